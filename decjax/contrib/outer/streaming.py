"""Streaming DiLoCo: fragments of the parameters take their outer steps in turn, and travel while the workers compute."""

from collections.abc import Sequence
import itertools
import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import reduce
from decjax.buckets import is_floating
from decjax.optim.local_updates import NesterovOuter
from decjax.optim.memories import communicating, transient
from decjax.optim.method import KNOWN_AVERAGES, Exchange, Reducing, Wrapping, check_update, known_phase
from decjax.options import Count, Fraction, Natural
from decjax.registry import Requirement
from decjax.typing import PyTree

Index = tuple[slice, ...]


@communicating
@transient("reducer")
class StreamingState(NamedTuple):
    """State of the method `streaming_diloco`; its parts are lists of arrays, one list for each fragment.

    Attributes:
        inner: state of the inner optimizer.
        outer: states of the outer optimizer, the same on all workers.
        anchor: a_p, the same on all workers.
        pending: Δ_p of a fragment that is being sent, in which averages replace what has arrived; () unless τ > 1.
        reducer: states of the reducer, one for each piece that is sent.
    """

    inner: PyTree
    outer: tuple
    anchor: tuple
    pending: tuple
    reducer: tuple


class StreamingDiLoCo(NesterovOuter, Reducing, Wrapping, name="streaming_diloco"):
    """Streaming DiLoCo: P fragments of the parameters take DiLoCo's outer step in turn, and travel while the workers compute.

        x_i ← x_i − α d_i(∇F_i(x_i))                                            in every step
        Δ_p = a_p − x_{i,p};   Δ̄_p = (1/N) Σ_i Δ_p  travels                     in steps pH/P, …, pH/P + τ − 1 (mod H)
        a_p ← a_p − outer(Δ̄_p);   x_{i,p} ← (1 − μ) a_p + μ x_{i,p}              after the last of them

    Each of the τ steps sends a τ-th of the fragment while the gradient is computed: 1/(Pτ) of what DiLoCo's outer step sends. With τ = 0
    the fragment is sent in one step, after the gradient. P = 1, τ = 0, μ = 0 is DiLoCo. A fragment has a P-th of every array, of stacked
    layers whole layers where P divides their number; in the paper it is a group of layers.

    Attributes:
        every: H, steps from one outer step of a fragment to its next.
        fragments: P, at most H.
        delay: τ, steps during which a fragment travels, at most H/P; 0: it is sent after the gradient, which waits.
        merge: μ, the share of a worker's local values that is kept; 1: workers never meet, and only the anchor moves.

    Reference: Douillard et al. 2025, arXiv 2501.18512, algorithm 2.
    """

    default_reducer = "codec(codec=int4)"
    messages = "changes of a fragment"
    memory = "2 copies, with delay > 1 one more"
    requires = (KNOWN_AVERAGES,)

    every: Count = 30
    fragments: Count = 4
    delay: Natural = 1
    merge: Fraction = 0.5

    def check_requirements(self, *more):
        longest = self.every // self.fragments
        super().check_requirements(
            *more,
            Requirement(
                "fragments",
                f"at most every={self.every} fragments",
                lambda count: count <= self.every,
                "use fewer, or a larger every",
            ),
            Requirement("delay", f"a delay of at most every/fragments={longest}", lambda tau: tau <= longest, "use a smaller one"),
        )

    @property
    def pieces(self) -> int:
        """How many pieces of a fragment are sent, one in a step."""
        return max(1, self.delay)

    @property
    def exchange(self) -> Exchange | None:
        return self._exchange if self.delay else None

    def phase(self, step: int) -> int:
        steps = step if self.delay else step + 1  # taken before what is sent now was known
        for fragment in range(self.fragments):
            piece = (steps - fragment * self.every // self.fragments) % self.every
            due = steps - piece
            if piece < self.pieces and due > 0:
                times = due // self.every - (fragment == 0)  # that the fragment was due before
                phase = self.reducer.phase(times)
                assert phase is not None  # As the reducer has no usage.
                return (fragment * self.pieces + piece) * len(self.reducer.phases) + self.reducer.phases.index(phase)
        return reduce.SILENT

    def due(self, phase: int) -> tuple[int, int, int]:
        """Return (fragment, piece of it, phase of the reducer) that a step sends."""
        number, own = divmod(phase, len(self.reducer.phases))
        return *divmod(number, self.pieces), self.reducer.phases[own]

    def num_bytes(self, params, phase):
        phase = known_phase(phase)
        fragment, piece, own = self.due(max(phase, 0))  # also for a silent step: the reducer refuses what does not fit
        sent = self.piece(take(params, indices(params, self.fragments)[fragment]), piece)
        return (phase != reduce.SILENT) * self.reducer.num_bytes(sent, self.num_workers, own)

    def piece(self, fragment: list, number: int) -> list:
        """Return a piece of a fragment."""
        return take(fragment, indices(fragment, self.pieces)[number])

    def init(self, params):
        anchor = tuple(list(map(jnp.copy, take(params, part))) for part in indices(params, self.fragments))
        pending = jax.tree.map(jnp.zeros_like, anchor) if self.pieces > 1 else ()
        memories = tuple(self.reducer.init(self.piece(own, k)) for own in anchor for k in range(self.pieces))
        return StreamingState(self.optimizer.init(params), tuple(map(self.outer.init, anchor)), anchor, pending, memories)

    def change(self, params: PyTree, state: StreamingState, fragment: int, piece: int) -> list:
        """Return Δ_p, in which arrived pieces are averages."""
        if piece:
            return state.pending[fragment]
        return list(map(jnp.subtract, state.anchor[fragment], take(params, indices(params, self.fragments)[fragment])))

    def _exchange(self, params: PyTree, state: StreamingState, phase: int) -> tuple:
        """Return (average of the piece, state of the reducer)."""
        if phase == reduce.SILENT:
            return ()
        fragment, piece, own = self.due(phase)
        sent = self.piece(self.change(params, state, fragment, piece), piece)
        return self.reducer.reduce(sent, state.reducer[fragment * self.pieces + piece], own)

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params)
        phase = known_phase(phase)
        updates, inner = self.optimizer.update(grads, state.inner, params, **extra)
        if phase == reduce.SILENT:
            return updates, state._replace(inner=inner)
        start = params if self.delay else optax.apply_updates(params, updates)
        arrived, memory = self._exchange(start, state, phase) if received is None else received
        if self.delay:
            # Otherwise compilers may put what follows before the gradient, which would then wait for the messages.
            arrived, _ = jax.lax.optimization_barrier((arrived, grads))
        fragment, piece, _ = self.due(phase)
        change = self.change(start, state, fragment, piece)
        averaged = put(change, indices(change, self.pieces)[piece], arrived)
        state = state._replace(inner=inner, reducer=_with(state.reducer, fragment * self.pieces + piece, memory))
        if piece == self.pieces - 1:
            return self.merged(params, updates, state, fragment, averaged)
        return updates, state._replace(pending=_with(state.pending, fragment, averaged))

    def merged(
        self, params: PyTree, updates: PyTree, state: StreamingState, fragment: int, averaged: list
    ) -> tuple[PyTree, StreamingState]:
        """Return (updates, state) after a fragment's outer step."""
        part = indices(params, self.fragments)[fragment]
        moves, outer = self.outer.update(averaged, state.outer[fragment], state.anchor[fragment])
        anchor = typing.cast(list, optax.apply_updates(state.anchor[fragment], moves))
        own, steps = take(params, part), take(updates, part)
        steps = [a + self.merge * (x + u - a) - x for a, x, u in zip(anchor, own, steps)]
        state = state._replace(outer=_with(state.outer, fragment, outer), anchor=_with(state.anchor, fragment, anchor))
        return put(updates, part, steps), state


def _with(values: tuple, position: int, value: PyTree) -> tuple:
    return (*values[:position], value, *values[position + 1 :])


# -- Fragments of a tree ----------------------------------------------------------------------------------------------


def indices(tree: PyTree, count: int) -> list[list[Index | None]]:
    """Cut a tree into parts of about equal bytes; return the index of each part in each leaf, None where it has nothing of the leaf.

    An array is cut along the first of its axes that `count` divides, so stacked layers into whole layers where it divides their number;
    else along its longest axis, into parts that differ by a row; an array without an axis of that length belongs to one part whole.
    Leaves that are not floating point belong to no part.

    Raises:
        ValueError: if a part has nothing.
    """
    parts: list[list[Index | None]] = [[] for _ in range(count)]
    positions = itertools.count()  # of floating-point leaves, so that others change nothing
    for leaf in jax.tree.leaves(tree):
        cuts = _cut(leaf.shape, count, next(positions)) if leaf.size and is_floating(leaf) else [None] * count
        for part, index in zip(parts, cuts):
            part.append(index)
    if not all(any(index is not None for index in part) for part in parts):
        raise ValueError(f"{count} parts of the parameters: some would be empty; use fewer fragments, or less delay")
    return parts


def _cut(shape: tuple[int, ...], count: int, position: int) -> list[Index | None]:
    whole = tuple(slice(0, size) for size in shape)
    fitting = [axis for axis, size in enumerate(shape) if size % count == 0]
    longest = max(range(len(shape)), key=lambda axis: shape[axis], default=None)
    if not fitting and (longest is None or shape[longest] < count):
        return [whole if part == position % count else None for part in range(count)]
    axis = fitting[0] if fitting else longest
    assert axis is not None
    ends = [shape[axis] * part // count for part in range(count + 1)]
    return [(*whole[:axis], slice(start, end), *whole[axis + 1 :]) for start, end in itertools.pairwise(ends)]


def take(tree: PyTree, part: Sequence[Index | None]) -> list:
    """Return the arrays of a part, or their shapes if the tree has shapes."""
    return [_taken(leaf, index) for leaf, index in zip(jax.tree.leaves(tree), part, strict=True) if index is not None]


def _taken(leaf: PyTree, index: Index) -> PyTree:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct([along.stop - along.start for along in index], leaf.dtype)
    return leaf[index]


def put(tree: PyTree, part: Sequence[Index | None], arrays: Sequence[jax.Array]) -> PyTree:
    """Return the tree with other values in a part."""
    leaves, treedef = jax.tree.flatten(tree)
    values = iter(arrays)
    return treedef.unflatten(
        leaf if index is None else leaf.at[index].set(next(values)) for leaf, index in zip(leaves, part, strict=True)
    )
