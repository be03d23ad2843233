"""The gradient of a divided model by any schedule: one program for all stages, which executes the table of the schedule tick by tick.

In a tick a stage computes one pass of one microbatch, or none:

    F    y = blocks(x);              send y to the next virtual stage
    B    dx, dθ = blocks'(x)ᵀ g;     θ̄ ← θ̄ + dθ;   send dx to the previous virtual stage

At the end of the tick messages are exchanged, only between pairs of stages that have one. The first virtual stage takes x from the
embedding; the last one takes g from the loss, which is computed in B. With rematerialization (`remat`) B recomputes F from x, so the
last virtual stage skips F; without it F stores the residuals of B, except for the parameters.

All stages run one program, a scan over ticks; differences between stages are looked up in tables by the index of the stage. The pass
of a stage selects a branch without collectives between stages (an idle stage computes nothing); the pairs that exchange messages select
another branch, the same one on all stages. The size of the program is independent of the number of microbatches and almost independent
of the number of stages. Buffers have as many slots as the schedule needs; slots are assigned at compile time.
"""

from collections.abc import Callable, Iterable
import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import mesh, schedules
from decjax.buckets import wide_dtype
from decjax.pipeline import boundary as boundary_lib
from decjax.pipeline import stages
from decjax.pipeline.ticks import BACKWARD, BOXES, FORWARD, NOWHERE, Label, Message, Table, is_one_permutation, tabulate
from decjax.program import hlo, jaxpr
from decjax.typing import PyTree


def check_microbatches(microbatches: int, batch_size: int) -> None:
    """Raise a ValueError if the number of microbatches does not divide a worker's batch."""
    if microbatches < 1 or batch_size % microbatches:
        divisors = [m for m in range(1, min(batch_size, 10_000) + 1) if batch_size % m == 0]
        raise ValueError(
            f"microbatches={microbatches} does not divide a worker's batch of {batch_size} examples; "
            f"use one of {divisors}, or another batch_size"
        )


def zero_sum(params: PyTree) -> PyTree:
    """Return the sum of no gradients, in float32, or in the parameters' dtype if it is wider."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x)), params)


def added(total: PyTree, grads: PyTree, share: jax.Array | float = 1.0) -> PyTree:
    """Return a sum with `share` times these gradients added."""
    return jax.tree.map(lambda total, x: total + jnp.asarray(share, total.dtype) * x.astype(total.dtype), total, grads)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The gradient of a divided model, computed by a schedule; its methods are functions of one stage of one worker.

    Attributes:
        division: of the model, into S stages of C chunks.
        schedule: for the same S and C; see `schedules.make`.
        remat: recompute F in B, so that a microbatch in flight needs the memory of one activation only.
        boundary: how messages between stages are sent.
    """

    division: stages.Division
    schedule: schedules.Schedule
    _: dataclasses.KW_ONLY
    remat: bool
    boundary: boundary_lib.Boundary = boundary_lib.UNCOMPRESSED

    def __post_init__(self):
        model, its = (self.division.num_stages, self.division.num_chunks), (self.schedule.num_stages, self.schedule.num_chunks)
        if model != its:
            raise ValueError(
                f"schedule {self.schedule.name!r} is for stages x chunks = {its}, and the model is divided into {model}; use equal ones"
            )

    @functools.cached_property
    def table(self) -> Table:
        """The schedule as arrays."""
        return tabulate(self.schedule, self.boundary.compresses, self.remat)

    def activation(self, tokens_BxT1: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of a microbatch's activations; a ValueError if microbatches do not divide the batch."""
        (B, T1), M = tokens_BxT1.shape, self.schedule.num_microbatches
        check_microbatches(M, B)
        return self.division.activation(B // M, T1 - 1)

    def init(self, tokens_BxT1: jax.Array | jax.ShapeDtypeStruct) -> PyTree:
        """Return the initial state of the boundary."""
        whole = jax.eval_shape(self.division.narrow, self.activation(tokens_BxT1))
        part = jax.ShapeDtypeStruct(_part(whole.shape, self.boundary.of_samples), whole.dtype)
        return mesh.for_each_device(self.boundary.init(part, self.schedule))

    def gradient(
        self, params: PyTree, state: PyTree, tokens_BxT1: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Return (loss, gradient, state); the loss is the mean over microbatches, equal on all stages. The key is for random codecs."""
        activation = self.activation(tokens_BxT1)
        tokens_MxBxT1 = tokens_BxT1.reshape(self.schedule.num_microbatches, -1, tokens_BxT1.shape[-1])
        passes = _Passes(self.division, params, tokens_MxBxT1, activation, self.remat)
        tick = functools.partial(self._tick, passes, mesh.STAGES.index, tokens_MxBxT1, key)
        columns = {name: jnp.asarray(column_TxS) for name, column_TxS in self.table.columns.items()}
        rows = columns, jnp.asarray(self.table.pattern)
        carry, _ = jax.lax.scan(tick, passes.start(self.table.slots, state), rows)
        state, _ = mesh.each_device(lambda state, nothing: (self.boundary.finish(state), nothing), carry.boundary, ())
        return mesh.STAGES.sum(carry.loss), self.division.sum_tied(optax.tree.cast_like(carry.grads, params)), state

    def _tick(self, passes, stage, tokens_MxBxT1, key, carry, row):
        columns, pattern = row
        at = {name: column_S[stage] for name, column_S in columns.items()}
        carry, made = passes.take(carry, at)
        given = at | {"stage": stage}, pattern, self.division.narrow(made), tokens_MxBxT1, key
        state, arrived = mesh.each_device(functools.partial(_exchange, self.boundary, self.table), carry.boundary, given)
        boxes = {
            name: _put(carry.boxes[name], at[f"next_{name}"], self.division.widen(arrived[kind], made.shape[-1]))
            for kind, name in BOXES.items()
        }
        return carry._replace(boxes=boxes, boundary=state), None


class _Carry(NamedTuple):
    """The state of a stage between ticks."""

    boxes: dict[str, jax.Array]  # "input", "gradient": [slots, B, T, D], messages that have arrived and are not used yet
    kept: list[jax.Array]  # [slots, ...], residuals that F stores for B
    grads: PyTree
    loss: jax.Array
    boundary: PyTree


def _put(box: jax.Array, slot: jax.Array, x: jax.Array) -> jax.Array:
    """The box with `x` in a slot, or unchanged where the slot is NOWHERE."""
    if not len(box):
        return box
    safe = jnp.maximum(slot, 0)
    return box.at[safe].set(jnp.where(slot == NOWHERE, box[safe], x))


def _part(shape: tuple[int, int, int], of_samples: bool) -> tuple[int, int, int]:
    """The shape of the part of B×T×D that each device of a tensor-parallel group sends: whole sequences, or some of the B·T rows."""
    (B, T, D), K = shape, mesh.tensor_size()
    if B % K == 0:
        return B // K, T, D
    if of_samples:
        raise ValueError(
            f"boundary forward_error='samples' with tensor={K} and microbatches of {B} sequences: each device stores whole "
            f"sequences; use microbatches of a multiple of {K} sequences"
        )
    if B * T % K:
        raise ValueError(
            f"tensor={K} does not divide the {B * T} tokens of a microbatch, of which each device sends its part to "
            f"the next stage; use microbatches of a multiple of {K // math.gcd(T, K)} sequences"
        )
    return 1, B * T // K, D


def _exchange(boundary, table, state, given):
    """Send the results of a tick: (the boundary's state, the messages that arrive, by kind).

    Arriving messages are used only where the table gives them a slot. Each device of a tensor-parallel group compresses its own part
    and sends it to the device at the same position in the other stage; the receivers gather the parts.
    """
    at, pattern, whole, tokens_MxBxT1, key = given
    shape = _part(whole.shape, boundary.of_samples)
    made = mesh.own_rows(whole.reshape(-1, whole.shape[-1])).reshape(shape)
    device = _Device(boundary, table, at, made, tokens_MxBxT1, mesh.own_key(key))
    channels, outgoing, state = device.send(state)
    branches = [functools.partial(_moved, *of, channels) for of in zip(table.patterns, table.runs)]
    arrived, state = device.receive(jax.lax.switch(pattern, branches, outgoing), state)
    return state, _gathered(arrived, at, whole)


@dataclasses.dataclass(frozen=True)
class _Device:
    """How one device encodes its own message and decodes those that arrive, in a tick."""

    boundary: boundary_lib.Boundary
    table: Table
    at: dict[str, jax.Array]
    made: jax.Array
    tokens_MxBxT1: jax.Array
    key: jax.Array | None

    def place(self, microbatch, chunk):
        tokens_BxT1 = self.tokens_MxBxT1[microbatch]
        tokens_BxT1 = mesh.own_rows(tokens_BxT1) if self.boundary.of_samples else tokens_BxT1
        like = jax.ShapeDtypeStruct(self.made.shape, self.made.dtype)
        return boundary_lib.Place(like, self.at["stage"], microbatch, chunk, tokens_BxT1, self.key)

    def send(self, state):
        """Return (position of each label's message in the outgoing ones, these, one of each form, the boundary's state)."""
        at, channels, forms, outgoing = self.at, {}, [], []
        for i, label in enumerate(self.table.labels):
            message, form, transfer = self.made, None, self.boundary.transfers.get(label)
            if transfer:
                message, state = _send(transfer, at["sent"] == i, self.made, state, self.place(at["microbatch"], at["chunk"]))
                form = jax.tree.structure(message), [(x.shape, x.dtype) for x in jax.tree.leaves(message)]
            if form not in forms:
                forms.append(form)
                outgoing.append(message)
            elif transfer:  # A stage sends at most one message per tick; those of its other labels are zeros.
                outgoing[forms.index(form)] = jax.tree.map(jnp.add, outgoing[forms.index(form)], message)
            channels[label] = forms.index(form)
        return channels, outgoing, state

    def receive(self, incoming, state):
        """Return (what arrives, by kind, the boundary's state), from the message of each label."""
        at, labels = self.at, self.table.labels
        arrived = {kind: jnp.zeros_like(self.made) for kind in BOXES}
        arrived |= {label[0]: incoming[label] for label in labels if label not in self.boundary.transfers}
        for i, label in enumerate(labels):
            kind, _ = label
            if transfer := self.boundary.transfers.get(label):
                here = self.place(at[f"{kind} microbatch"], at[f"{kind} chunk"])
                is_due = at[f"{kind} label"] == i
                arrived[kind], state = _receive(transfer, is_due, incoming[label], arrived[kind], state, here)
        return arrived, state


def _moved(messages: Iterable[Message], runs: int, channels: dict[Label, int], outgoing: list[PyTree]) -> dict[Label, PyTree]:
    """The messages that arrive, by label, when these are exchanged; zeros for the other labels."""
    nothing = jax.tree.map(jnp.zeros_like, outgoing)
    arrived = {label: nothing[channel] for label, channel in channels.items()}
    for group in _joint(messages, channels):
        pairs = sorted(pair for message in group for pair in message.pairs)
        with hlo.counted(runs=runs):
            moved = jax.tree.map(lambda leaf: mesh.STAGES.exchange(leaf, pairs), outgoing[channels[group[0].label]])
        arrived |= {message.label: moved for message in group}
        # The same order on all stages, or they would wait for each other's messages (a deadlock).
        _, outgoing = jax.lax.optimization_barrier((moved, outgoing))
    return arrived


def _gathered(arrived: dict[str, jax.Array], at: dict[str, jax.Array], like: jax.Array) -> dict[str, jax.Array]:
    """The arrived messages, gathered from their parts on the devices of a tensor-parallel group; zeros where nothing has arrived."""
    if mesh.tensor_size() == 1:
        return arrived
    whole = {}
    for kind, name in BOXES.items():
        rows = arrived[kind].reshape(-1, like.shape[-1])
        gather = lambda x, rows=rows: (mesh.all_rows(rows).reshape(x.shape),)
        (whole[kind],) = _when(at[f"next_{name}"] != NOWHERE, gather, jnp.zeros_like(like))
        # The same order on all devices, or they would wait for each other's messages (a deadlock).
        _, arrived = jax.lax.optimization_barrier((whole[kind], arrived))
    return whole


def _joint(messages: Iterable[Message], channels: dict[Label, int]) -> Iterable[list[Message]]:
    """Groups of a tick's messages that one permutation sends, so that a stage can send and receive at once.

    A group has all messages of one form, or a single one where a stage would receive two of them.
    """
    groups: dict[int, list[Message]] = {}
    for message in messages:
        groups.setdefault(channels[message.label], []).append(message)
    for group in groups.values():
        yield from [group] if is_one_permutation(group) else [[message] for message in group]


def _send(transfer, condition, x, state, place):
    """(message, state) of a transfer; zeros and the old state unless the condition holds."""
    like = jax.eval_shape(lambda: transfer.send(x, state, place)[0])
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    return _when(condition, lambda message, state: transfer.send(x, state, place), empty, state)


def _receive(transfer, condition, message, x, state, place):
    """(what arrives, state) of a transfer; `x` and the old state unless the condition holds."""
    return _when(condition, lambda x, state: transfer.receive(message, state, place), x, state)


class _Tick(NamedTuple):
    """Which pass a stage computes in a tick, of which tokens."""

    at: dict[str, jax.Array]  # the row of the schedule's table
    is_first: jax.Array  # whether the chunk is the model's first
    is_last: jax.Array
    inputs_BxT: jax.Array
    targets_BxT: jax.Array


class _Passes:
    """Computes the passes F and B of one stage."""

    def __init__(
        self, division: stages.Division, params: PyTree, tokens_MxBxT1: jax.Array, activation: jax.ShapeDtypeStruct, remat: bool
    ):
        self.division, self.params, self.tokens_MxBxT1 = division, params, tokens_MxBxT1
        self.activation, self.remat, self.stage = activation, remat, mesh.STAGES.index
        self.kept = [] if remat else self._trace()

    def _blocks(self, chunk):
        """(function of one chunk's parameters and input, the chunk's parameters)."""
        own = self._chunked(self.params)
        if self.division.num_chunks == 1:
            own = jax.tree.map(lambda x: x[0], own)
        else:
            own = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, chunk, keepdims=False), own)
        return functools.partial(self.division.run, stage=self.stage, number=chunk), own

    def _chunked(self, tree):
        return {name: tree[name] for name in ("blocks", "autoencoder") if name in tree}

    def _trace(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the residuals that F stores for B; sets the structure of the pullback `_tree`, and `_known`, its parameters."""
        blocks, run = jax.eval_shape(lambda: self._blocks(0)[1]), self._blocks(0)[0]
        _, pullback = jax.eval_shape(lambda blocks, x: jax.vjp(run, blocks, x), blocks, self.activation)
        leaves = lambda blocks, x: jax.tree.leaves(jax.vjp(run, blocks, x)[1])
        program, _, shapes = jaxpr.trace(leaves, blocks, self.activation)
        parameters = {variable: i for i, variable in enumerate(program.invars[: len(jax.tree.leaves(blocks))])}
        self._tree = jax.tree.structure(pullback)
        self._known = [next(map(parameters.get, jaxpr.variables([atom])), None) for atom in program.outvars]
        return [shape for shape, i in zip(shapes, self._known) if i is None]

    def start(self, slots: dict[str, int], state: PyTree) -> _Carry:
        """The carry before the first tick, all zeros but the boundary's state."""
        boxes = {name: jnp.zeros((slots[name], *self.activation.shape), self.activation.dtype) for name in BOXES.values()}
        kept = [jnp.zeros((slots["kept"], *x.shape), x.dtype) for x in self.kept]
        return _Carry(boxes, kept, zero_sum(self.params), jnp.zeros(()), state)

    def take(self, carry: _Carry, at: dict[str, jax.Array]) -> tuple[_Carry, jax.Array]:
        """One tick without its messages: (carry, the value to be sent to another stage)."""
        tick = self._tick(at)
        made = jnp.zeros(self.activation.shape, self.activation.dtype)
        forward = functools.partial(self._forward, tick, carry.boxes["input"])
        carry, made = _when(at["op"] == FORWARD, forward, carry, made)
        backward = functools.partial(self._backward, tick, carry.boxes["input"])
        return _when(at["op"] == BACKWARD, backward, carry, made)

    def _tick(self, at):
        is_first = (at["chunk"] == 0) & (self.stage == 0)
        is_last = (at["chunk"] == self.division.num_chunks - 1) & (self.stage == self.division.num_stages - 1)
        tokens_BxT1 = self.tokens_MxBxT1[at["microbatch"]]
        return _Tick(at, is_first, is_last, tokens_BxT1[:, :-1], tokens_BxT1[:, 1:])

    def _waiting(self, box, slot):
        """The message in a slot of a box."""
        return box[slot] if len(box) else jnp.zeros(self.activation.shape, self.activation.dtype)

    def _embed(self, tick, table_VxD):
        return self.division.parts.embed(table_VxD, tick.inputs_BxT)

    def _given(self, tick, box):
        """The input of the chunk, from the box as it was before the pass."""
        embedded = lambda: self._embed(tick, self.params["table_VxD"])
        return jax.lax.cond(tick.is_first, embedded, lambda: self._waiting(box, tick.at["input"]))

    def _forward(self, tick, box, carry, made):
        at, (run, blocks) = tick.at, self._blocks(tick.at["chunk"])
        if self.remat:
            return carry, run(blocks, self._given(tick, box))
        y, pullback = jax.vjp(run, blocks, self._given(tick, box))
        leaves = [leaf for leaf, i in zip(jax.tree.leaves(pullback), self._known, strict=True) if i is None]
        kept = [slots.at[at["kept"]].set(leaf) for slots, leaf in zip(carry.kept, leaves, strict=True)]
        boxes = carry.boxes | {"input": _put(carry.boxes["input"], jnp.where(tick.is_last, at["input"], NOWHERE), y)}
        return carry._replace(kept=kept, boxes=boxes), y

    def _backward(self, tick, box, carry, made):
        at, (run, blocks) = tick.at, self._blocks(tick.at["chunk"])
        if self.remat:
            y, pullback = jax.vjp(run, blocks, self._given(tick, box))
        else:
            y, parameters = self._waiting(carry.boxes["input"], at["input"]), jax.tree.leaves(blocks)
            kept = iter([slots[at["kept"]] for slots in carry.kept])
            pullback = self._tree.unflatten([next(kept) if i is None else parameters[i] for i in self._known])
        g = self._waiting(carry.boxes["gradient"], at["gradient"])
        grads, loss, g = _when(tick.is_last, functools.partial(self._from_loss, tick, y), carry.grads, carry.loss, g)
        d_blocks, dx = pullback(g)
        (grads,) = _when(tick.is_first, functools.partial(self._to_embedding, tick, dx), grads)
        own = jax.tree.map(lambda x, d: x.at[at["chunk"]].add(d.astype(x.dtype)), self._chunked(grads), d_blocks)
        return carry._replace(grads=grads | own, loss=loss), dx

    def _from_loss(self, tick, y, grads, loss, g):
        """(grads, loss, the gradient of the last chunk's output y)."""

        def mean(norm, table_VxD, y):
            return self.division.parts.nll(norm, table_VxD, y, tick.targets_BxT).mean() / len(self.tokens_MxBxT1)

        value, (d_norm, d_table, g) = jax.value_and_grad(mean, (0, 1, 2))(self.params["norm"], self.params["table_VxD"], y)
        grads = grads | added({name: grads[name] for name in ("norm", "table_VxD")}, {"norm": d_norm, "table_VxD": d_table})
        return grads, loss + value.astype(loss.dtype), g

    def _to_embedding(self, tick, dx, grads):
        _, pullback = jax.vjp(functools.partial(self._embed, tick), self.params["table_VxD"])
        return (grads | {"table_VxD": added(grads["table_VxD"], pullback(dx)[0])},)


def _when(condition: jax.Array, fn: Callable, *carry: PyTree) -> PyTree:
    """`fn(*carry)` if the condition holds, else the carry.

    A loop of at most one turn, because a loop updates its carry in place where `lax.cond` would copy what a branch returns
    unchanged.
    """

    def turn(state):
        _, *carry = state
        return (jnp.zeros((), bool), *fn(*carry))

    return jax.lax.while_loop(lambda state: state[0], turn, (condition, *carry))[1:]
