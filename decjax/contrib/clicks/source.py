"""The gradient source of a model whose embedding tables are divided among the workers, while all else is data parallel.

Worker n owns the tables t with t mod N = n, whole. In each step, with B examples per worker,

    c        row numbers of each worker's examples       all-to-all, uncompressed        to the owners
    v        vectors E_t[c_t]                            all-to-all, within bounds       to the workers of the examples
    g        B ∂F_i/∂v, each example's own gradient      all-to-all, within bounds       back to the owners
    ∂F/∂E_t  (1/NB) Σ g over the examples of all workers with that row

where F = (1/N) Σ_i F_i is the mean loss over all workers. So a table's gradient is complete at its owner and is not averaged; all other
gradients are averaged as in any data-parallel run. Without compression the run equals the undivided one up to rounding.

Nothing is differentiated through a collective: loss and gradients are taken with respect to the vectors that have arrived.

References: Naumov et al. 2019, arXiv 1906.00091 (tables divided as wholes); Feng et al. 2024, arXiv 2407.04272 (bounds).
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Annotated, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import mesh, reduce, registry
from decjax.config.spec import RunSpec
from decjax.contrib.clicks.bounds import MOST, BoundedLink, Shape, bounds_of, factor
from decjax.options import Natural, Range
from decjax.pipeline.source import Source
from decjax.typing import PyTree

TABLES = "tables"  # their place in the parameters


def rest(tree: PyTree) -> PyTree:
    """Return parameters, or gradients, without the tables."""
    return {name: part for name, part in tree.items() if name != TABLES}


@dataclasses.dataclass(frozen=True)
class Shares:
    """Which worker owns which table, and where: table t is slot t div N of worker t mod N.

    A worker's tables are one array of rows, padded to the longest of all workers'.

    Attributes:
        sizes: V_t, rows of each table.
        num_workers: N.
    """

    sizes: tuple[int, ...]
    num_workers: int

    @property
    def slots(self) -> int:
        """P, tables of the worker with the most."""
        return -(-len(self.sizes) // self.num_workers)

    @property
    def rows_NxP(self) -> np.ndarray:
        """The rows of each slot; 0 without a table."""
        padded = np.zeros(self.slots * self.num_workers, np.int32)
        padded[: len(self.sizes)] = self.sizes
        return padded.reshape(self.slots, self.num_workers).T

    @property
    def first_NxP(self) -> np.ndarray:
        """The first row of each slot in its owner's array; past its last row for a slot without a table."""
        return (np.cumsum(self.rows_NxP, axis=1) - self.rows_NxP).astype(np.int32)

    def by_owner(self, x_T: PyTree, axis: int = 0) -> jax.Array:
        """Return values by table, along an axis, as values [N, P, …] by owner and slot; zeros for slots without a table."""
        x_T = jnp.moveaxis(jnp.asarray(x_T), axis, 0)
        padded = jnp.pad(x_T, [(0, self.slots * self.num_workers - len(x_T)), *[(0, 0)] * (x_T.ndim - 1)])
        return padded.reshape(self.slots, self.num_workers, *x_T.shape[1:]).swapaxes(0, 1)

    def by_table(self, x_NxP: jax.Array) -> jax.Array:
        """Return the inverse, [T, …]."""
        return x_NxP.swapaxes(0, 1).reshape(-1, *x_NxP.shape[2:])[: len(self.sizes)]

    def deal(self, params: PyTree) -> PyTree:
        """Return a whole model's parameters as those of all workers, [N, …]: own tables in one array, a copy of all else."""
        N, tables = self.num_workers, [params[TABLES][t]["embedding"] for t in range(len(self.sizes))]
        own = [jnp.concatenate(tables[n::N] or [tables[0][:0]]) for n in range(N)]
        rows_NxRxD = jnp.stack([jnp.pad(x, ((0, max(map(len, own)) - len(x)), (0, 0))) for x in own])
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (N, *x.shape)), rest(params)) | {TABLES: rows_NxRxD}

    def gather(self, params: PyTree) -> PyTree:
        """Return the parameters of all workers, [N, …], as N whole models, each with all tables."""
        N, tables = self.num_workers, {}
        for t, size in enumerate(self.sizes):
            first = int(self.first_NxP[t % N, t // N])
            table_VxD = params[TABLES][t % N, first : first + size]
            tables[t] = {"embedding": jnp.broadcast_to(table_VxD, (N, *table_VxD.shape))}
        return params | {TABLES: tables}


@runtime_checkable
class TaskWithTables(Protocol):
    """A task whose model has embedding tables; its parameters are a dict with the table of feature t at ["tables"][t]["embedding"].

    Attributes:
        sizes: V_t, rows of each table.
        width: D.
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def width(self) -> int: ...

    def indices(self, batch: PyTree) -> jax.Array:
        """Return the rows that a batch looks up, indices_BxT."""
        ...

    def loss_of(self, params: PyTree, vectors_BxTxD: jax.Array, batch: PyTree, key: jax.Array | None) -> jax.Array:
        """Return the mean loss of a batch from the vectors that were looked up; the parameters may lack the tables."""
        ...


class Exchanged(NamedTuple):
    """State of a worker's exchanged vectors. Entry 0 is of vectors, entry 1 of their gradients.

    Attributes:
        step: how many steps were taken, an int32 scalar; bounds follow from it.
        raw_2: steps in which these were uncompressed, since a bound would not have held, int32.
        worst_2xP: the last step's largest |v − v̂| ÷ bound in what this worker sent, of each table slot. For vectors slots are this
            worker's own tables; for gradients the largest over all owners.
    """

    step: jax.Array
    raw_2: jax.Array
    worst_2xP: jax.Array


def is_elementwise(optimizer: optax.GradientTransformation) -> bool:
    """Return whether the update of a parameter depends on its own gradient and value only, as tried on a matrix and a vector."""

    def second_update(first: float) -> jax.Array:
        """The update of all values but the first of each array, whose gradients are `first`."""
        params = {"matrix": jnp.ones((2, 2)), "vector": jnp.full(3, 0.5)}
        grads = {"matrix": jnp.array([[first, -0.2], [0.1, 0.4]]), "vector": jnp.array([first, 0.2, 0.3])}
        state, updates = optimizer.init(params), params
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
        return jnp.concatenate([x.ravel()[1:] for x in jax.tree.leaves(updates)])

    return bool((second_update(0.3) == second_update(7.0)).all())


class DividedTables(Source, name="divided_tables"):
    """The gradient source of a model whose embedding tables are divided among the workers.

    Attributes:
        task: a task with embedding tables, as `clicks` is.
        axis: of the workers.
        num_workers: N.
        batch_size: B, examples of a worker.
        clips: whether the norm of the gradient is needed.
        forward: bounds of vectors, see `bounds_of`; empty: uncompressed.
        backward: bounds of each example's own gradient of them; empty: uncompressed.
        bits: of each coded value.
        outliers: how many values in a group of 256 a message has room for beyond those that the bits hold.
        start: k, how many times larger bounds are at first; see `bounds.factor`.
        within: S, the step from which on bounds stay.
        decay: how they shrink until then.
    """

    divided = True

    task: TaskWithTables
    axis: mesh.Axis
    num_workers: int
    batch_size: int
    clips: bool = False
    forward: str = ""
    backward: str = ""
    bits: Annotated[int, Range(2, 12)] = 8
    outliers: Annotated[int, Range(1, 256)] = 2
    start: Annotated[float, Range(1, MOST)] = 1.0
    within: Natural = 0
    decay: Shape = "stepwise"

    def __post_init__(self):
        if (self.start > 1) != (self.within > 0):
            raise ValueError(
                f"source.start={self.start} with source.within={self.within}: larger bounds need steps, at least 1, within which they "
                "shrink; use start=1 and within=0 for bounds that stay"
            )
        _ = self.bounds_2xT, self.num_bytes  # They refuse impossible values.

    @staticmethod
    def check(spec: object) -> None:
        """Raise a ValueError unless only the gradients of a table's rows change it."""
        assert isinstance(spec, RunSpec) and spec.source
        options, method, optimizer = spec.source.options, spec.method, spec.optimizer
        if method.name != "allreduce" or method.options.get("stale"):
            what = "stale" if method.options.get("stale") else f"method {method.name!r}"
            raise ValueError(
                f"divided tables with {what}: they need gradients that are averaged in every step; use method 'allreduce' without stale, "
                "or leave config.source out"
            )
        single = {f"pipeline.{name}": getattr(spec.pipeline, name) for name in ("stages", "microbatches")} | {"tensor": spec.tensor}
        faults = {
            f"{name}={value} with divided tables, which need a batch's lookups in one program; use {name}=1": value > 1
            for name, value in single.items()
        }
        if not (options["forward"] or options["backward"]):
            faults |= {
                f"source.{name}={options[name]!r} has no effect without bounds; use bound=0.02 or gradient_bound=0.01": True
                for name, option in registry.part("source", "divided_tables").options.items()
                if options[name] != option.default
            }
        within = f"source.within={options['within']} is more than steps={spec.steps}, so the bounds are never reached"
        faults[f"{within}; use at most {spec.steps}"] = options["within"] > spec.steps
        if optimizer:
            made = registry.make("optimizer", optimizer.name, learning_rate=lambda step: 1e-3, **optimizer.options)
            fault = f"optimizer {optimizer.name!r} with divided tables: its update of shared parameters would depend on a worker's tables"
            faults[f"{fault}; use an elementwise one, such as 'adamw'"] = not is_elementwise(made)
        for fault in (fault for fault, applies in faults.items() if applies):
            raise ValueError(fault)

    @functools.cached_property
    def shares(self) -> Shares:
        """Which worker owns which table."""
        return Shares(tuple(self.task.sizes), self.num_workers)

    @functools.cached_property
    def links(self) -> tuple[BoundedLink, ...]:
        """The all-to-all of vectors, and that of their gradients."""
        return tuple(BoundedLink(self.bits, self.outliers, bool(text)) for text in (self.forward, self.backward))

    @functools.cached_property
    def bounds_2xT(self) -> np.ndarray:
        """The bounds of vectors and of gradients by table; 1 where they are uncompressed."""
        texts = {"source.forward": self.forward, "source.backward": self.backward}
        return np.stack([bounds_of(text or "1", what, len(self.shares.sizes)) for what, text in texts.items()])

    @property
    def _message(self) -> tuple[int, int, int]:
        """(N, P, values of a table slot for one worker)."""
        return self.num_workers, self.shares.slots, self.batch_size * self.task.width

    @functools.cached_property
    def num_bytes(self) -> float:
        vectors = sum(link.num_bytes(*self._message) for link in self.links)
        norm = mesh.mean_bytes(1, jnp.float32, self.num_workers) if self.clips else 0
        return vectors + (self.num_workers - 1) * self.shares.slots * self.batch_size * 4 + norm

    @property
    def extra_bytes(self) -> Callable[[Exchanged], jax.Array]:
        more_2 = np.array([link.more_bytes(*self._message) for link in self.links], np.float32)
        return lambda state: state.raw_2 @ more_2

    def stacked(self, params: PyTree, num_workers: int) -> PyTree:
        return self.shares.deal(params)

    def gathered(self, params: PyTree) -> PyTree:
        return self.shares.gather(params)

    def init(self, params: PyTree) -> Exchanged:
        return Exchanged(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros((2, self.shares.slots)))

    def gradient(self, params: PyTree, state: Exchanged, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree, Exchanged]:
        shares, axis = self.shares, self.axis
        rows_RxD, dense = params[TABLES], rest(params)
        shrinking = factor(state.step, self.start, self.within, self.decay)
        bounds_2xNxP = [jnp.maximum(shares.by_owner(e_T), 1e-30) * shrinking for e_T in self.bounds_2xT]
        ours_2xNxP = [jnp.broadcast_to(e_NxP[axis.index], e_NxP.shape) for e_NxP in bounds_2xNxP]

        asked_NxPxB = axis.all_to_all(shares.by_owner(self.task.indices(batch), axis=1).astype(jnp.int32))
        first_P, held_P = (jnp.asarray(x_NxP)[axis.index] for x_NxP in (shares.first_NxP, shares.rows_NxP > 0))
        place_NxPxB = first_P[:, None] + asked_NxPxB
        found_NxPxBxD = jnp.where(held_P[:, None, None], rows_RxD[place_NxPxB], 0)
        arrived_NxPxBxD, vectors = self.links[0].send(found_NxPxBxD, ours_2xNxP[0], bounds_2xNxP[0], axis)

        vectors_BxTxD = shares.by_table(arrived_NxPxBxD).swapaxes(0, 1)
        loss = lambda dense, vectors_BxTxD: self.task.loss_of(dense, vectors_BxTxD, batch, key)
        value, (grads, grads_BxTxD) = jax.value_and_grad(loss, argnums=(0, 1))(dense, vectors_BxTxD)

        B = len(grads_BxTxD)
        back_NxPxBxD, gradients = self.links[1].send(shares.by_owner(B * grads_BxTxD, axis=1), bounds_2xNxP[1], ours_2xNxP[1], axis)
        back_NxPxBxD = jnp.where(held_P[:, None, None], back_NxPxBxD, 0)
        summed_RxD = jnp.zeros_like(rows_RxD).at[place_NxPxB].add(back_NxPxBxD)
        sent = (vectors, gradients)
        raw_2 = state.raw_2 + jnp.stack([each.is_raw for each in sent])
        state = Exchanged(state.step + 1, raw_2, jnp.stack([each.worst_P for each in sent]))
        return value, grads | {TABLES: summed_RxD / (shares.num_workers * B)}, state

    def norm(self, grads: PyTree) -> jax.Array:
        """Return the ℓ2 norm of the whole gradient: of this worker's copy of all else, and of the tables of all workers."""
        return jnp.sqrt(optax.global_norm(rest(grads)) ** 2 + self.axis.sum(jnp.square(grads[TABLES]).sum()))

    def averaging(self, reducer: reduce.Reducer) -> reduce.Reducer:
        """Return a reducer of all gradients but those of the tables, which are complete at their owners."""
        return WithOwnTables(reducer.channel, reducer=reducer)


class WithOwnTables(reduce.WrappedReducer):
    """A reducer that leaves the gradients of the tables unchanged."""

    def init(self, params):
        return super().init(rest(params))

    def reduce(self, grads, state, phase=None):
        averaged, state = super().reduce(rest(grads), state, phase)
        return averaged | {TABLES: grads[TABLES]}, state

    def num_bytes(self, params, num_workers, phase=None):
        return super().num_bytes(rest(params), num_workers, phase)
