"""Streaming DiLoCo: fragments of the parameters take their outer steps in turn, and travel while the workers go on.

With P fragments, H local steps between two outer steps of a fragment, a delay of τ steps and Δ_p, a_p the parts of fragment p,

    x_i ← x_i − α d_i(∇F_i(x_i))                                            in every step
    Δ_p = a_p − x_{i,p};   Δ̄_p = (1/N) Σ_i Δ_p  travels                     in steps pH/P, …, pH/P + τ − 1 (mod H)
    a_p ← a_p − outer(Δ̄_p);   x_{i,p} ← (1 − μ) a_p + μ x_{i,p}              after the last of them, with mixing factor μ

Each of the τ steps sends a τ-th of the fragment, so 1/(Pτ) of what DiLoCo's outer step sends, and it sends it beside its gradient. With
τ = 0 the fragment is sent after the gradient, in one step. P = 1, τ = 0, μ = 0 is DiLoCo.

Reference: Douillard et al. 2025, arXiv 2501.18512, algorithm 2. There a fragment is a group of layers, and changes have 4 bits.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import reduce, registry
from decjax.optim import fragments as cut
from decjax.optim.memories import communicating, transformation, transient
from decjax.optim.method import OldMethod, check_update, known_phase


@communicating
@transient("reducer")
class StreamingState(NamedTuple):
    """State of the method `streaming_diloco`; its parts are lists of arrays, one list for each fragment.

    Attributes:
        inner: state of the inner optimizer.
        outer: states of the outer optimizer, the same on all workers.
        anchor: a_p, the same on all workers.
        pending: Δ_p of a fragment that travels, with the average in the place of what has arrived; () unless τ > 1.
        reducer: states of the reducer, one for each piece that is sent.
    """

    inner: Any
    outer: tuple
    anchor: tuple
    pending: tuple
    reducer: tuple


@registry.register(
    "method",
    "streaming_diloco",
    chooses=("reducer", "optimizer"),
    default_reducer="codec(codec=int4)",
    messages="changes of a fragment",
    memory="2 copies, with delay > 1 one more",
    source="arXiv 2501.18512",
)
def streaming_diloco(
    inner: optax.GradientTransformation,
    reducer: reduce.Reducer,
    num_workers: int,
    *,
    every: int = 30,
    fragments: int = 4,
    delay: int = 1,
    merge: float = 0.5,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
) -> OldMethod:
    """Streaming DiLoCo: P fragments of the parameters take DiLoCo's outer step in turn, and travel while the workers go on.

        Δ_p = a_p − x_{i,p};   a_p ← a_p − outer(mean Δ_p);   x_{i,p} ← (1 − μ) a_p + μ x_{i,p}

    In each of τ steps a worker sends what the reducer sends of a Pτ-th of the parameters, beside the computing of the gradient. A
    fragment has a P-th of every array, of stacked layers whole layers where P divides their number. Any data; no graph.

    Args:
        every: H, steps from one outer step of a fragment to its next.
        fragments: P, from 1 to H.
        delay: τ, steps during which a fragment travels, at most H/P; 0: it is sent after the gradient, which waits.
        merge: μ in [0, 1], the share of a worker's own values that is kept; 1: workers never meet, and only the anchor moves.
        outer_learning_rate: learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step; 0: none.

    Reference: Douillard et al. 2025, arXiv 2501.18512.
    """
    at, longest = "method 'streaming_diloco' with", every // max(1, fragments)
    if not 1 <= fragments <= every:
        raise ValueError(f"{at} fragments={fragments}: must be from 1 to every={every}, so that each is due once")
    if not 0 <= delay <= longest:
        raise ValueError(f"{at} delay={delay}: must be from 0 to every/fragments={longest}, so that one fragment travels at a time")
    if not 0 <= merge <= 1:
        raise ValueError(f"{at} merge={merge}: must be at least 0 and at most 1; use 0.5")
    if reducer.usage:
        raise ValueError(f"{at} a reducer that decides on its messages as it runs; use 'codec' in the place of 'gravac'")
    outer = optax.sgd(outer_learning_rate, outer_momentum or None, nesterov=True)
    return _Streaming(inner, outer, reducer, num_workers, every, fragments, delay, merge).method()


@dataclasses.dataclass(frozen=True)
class _Streaming:
    """The functions of the method."""

    inner: optax.GradientTransformation
    outer: optax.GradientTransformation
    reducer: reduce.Reducer
    num_workers: int
    every: int
    fragments: int
    delay: int
    merge: float

    @property
    def pieces(self) -> int:  # of a fragment; one is sent in a step
        return max(1, self.delay)

    def method(self) -> OldMethod:
        tx, exchange = transformation(self.init, self.update), self.exchange if self.delay else None
        return OldMethod(tx, self.phase, self.num_bytes, exchange, every=max(1, self.every // (self.fragments * self.pieces)))

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
        """(fragment, piece of it, phase of the reducer) that a step sends."""
        number, own = divmod(phase, len(self.reducer.phases))
        return *divmod(number, self.pieces), self.reducer.phases[own]

    def num_bytes(self, params: Any, phase: int | None) -> np.ndarray:
        assert phase is not None  # It is known beforehand.
        fragment, piece, own = self.due(max(phase, 0))  # A silent step is asked too: the reducer refuses what does not fit.
        sent = self.piece(cut.take(params, cut.indices(params, self.fragments)[fragment]), piece)
        return (phase != reduce.SILENT) * self.reducer.num_bytes(sent, self.num_workers, own)

    def piece(self, fragment, number):
        return cut.take(fragment, cut.indices(fragment, self.pieces)[number])

    def init(self, params):
        anchor = tuple(list(map(jnp.copy, cut.take(params, part))) for part in cut.indices(params, self.fragments))
        pending = jax.tree.map(jnp.zeros_like, anchor) if self.pieces > 1 else ()
        memories = tuple(self.reducer.init(self.piece(own, k)) for own in anchor for k in range(self.pieces))
        return StreamingState(self.inner.init(params), tuple(map(self.outer.init, anchor)), anchor, pending, memories)

    def change(self, params, state, fragment, piece):
        """Δ_p, in which arrived pieces are averages."""
        if piece:
            return state.pending[fragment]
        return list(map(jnp.subtract, state.anchor[fragment], cut.take(params, cut.indices(params, self.fragments)[fragment])))

    def exchange(self, params, opt_state, phase) -> Any:
        """All that a step sends, which needs no gradient of it: (average of the piece, state of the reducer)."""
        if phase == reduce.SILENT:
            return ()
        fragment, piece, own = self.due(phase)
        sent = self.piece(self.change(params, opt_state, fragment, piece), piece)
        return self.reducer.reduce(sent, opt_state.reducer[fragment * self.pieces + piece], own)

    def update(self, grads, state, params: Any = None, *, phase=None, received=None, **extra):
        check_update(params)
        phase = known_phase(phase)
        updates, inner = optax.with_extra_args_support(self.inner).update(grads, state.inner, params, **extra)
        if phase == reduce.SILENT:
            return updates, state._replace(inner=inner)
        start = params if self.delay else optax.apply_updates(params, updates)
        arrived, memory = self.exchange(start, state, phase) if received is None else received
        if self.delay:
            # Else compilers may put what follows before the gradient, which would then wait for the messages.
            arrived, _ = jax.lax.optimization_barrier((arrived, grads))
        fragment, piece, _ = self.due(phase)
        change = self.change(start, state, fragment, piece)
        averaged = cut.put(change, cut.indices(change, self.pieces)[piece], arrived)
        state = state._replace(inner=inner, reducer=_with(state.reducer, fragment * self.pieces + piece, memory))
        if piece == self.pieces - 1:
            return self.merged(params, updates, state, fragment, averaged)
        return updates, state._replace(pending=_with(state.pending, fragment, averaged))

    def merged(self, params, updates, state, fragment, averaged):
        """The updates and the state after a fragment's outer step."""
        part = cut.indices(params, self.fragments)[fragment]
        moves, outer = self.outer.update(averaged, state.outer[fragment], state.anchor[fragment])
        anchor: Any = optax.apply_updates(state.anchor[fragment], moves)
        own, steps = cut.take(params, part), cut.take(updates, part)
        steps = [a + self.merge * (x + u - a) - x for a, x, u in zip(anchor, own, steps)]
        state = state._replace(outer=_with(state.outer, fragment, outer), anchor=_with(state.anchor, fragment, anchor))
        return cut.put(updates, part, steps), state


def _with(values: tuple, position: int, value: Any) -> tuple:
    return (*values[:position], value, *values[position + 1 :])
