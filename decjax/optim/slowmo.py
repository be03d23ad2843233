"""SlowMo: blocks of H steps of any optimizer, each followed by a step along a momentum of the blocks' changes.

With x₀ the parameters at the start of a block (the same on all workers), γ the mean learning rate of its H steps, and u = 0 at first,

    x_i ← one step of the base method                              in every step
    x̄ = (1/N) Σ_i x_i;   u ← βu + (x₀ − x̄)/γ;   x₀ ← x₀ − αγu;   x_i ← x₀      in every H-th

The base method is the optimizer alone, as in local SGD, or decentralized training with any mixer inside of a block. α = 1 and β = 0 is
the base method with an exact average in every H-th step. The paper's γ is constant within a block.

Reference: Wang et al. 2020, arXiv 1910.00643, algorithm 1; without messages inside of a block it is BMUF (Chen and Huo 2016).
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import gossip, reduce, registry
from decjax.buckets import in_float32, of_floating
from decjax.optim.decentralize import DecentralizeState
from decjax.optim.memories import communicating, increment, init_memory, transformation, transient
from decjax.optim.method import OldMethod, averaging, check_update, known_phase


@communicating
@transient("mixer", "reducer")
class SlowMoState(NamedTuple):
    """State of the methods `slowmo` and `slowmo_gossip`.

    Attributes:
        step: steps so far, an int32 scalar.
        inner: state of the base optimizer.
        anchor: x₀, the same on all workers.
        momentum: u, the same on all workers.
        mixer: state of the mixer; () without one.
        reducer: state of the reducer.
    """

    step: jax.Array
    inner: Any
    anchor: Any
    momentum: Any
    mixer: Any
    reducer: Any


@registry.register(
    "method",
    "slowmo",
    chooses=("reducer", "optimizer"),
    messages="changes of H steps",
    memory="2 copies",
    source="arXiv 1910.00643",
)
def slowmo(
    inner: optax.GradientTransformation,
    reducer: reduce.Reducer,
    num_workers: int,
    learning_rate: Callable[[Any], Any],
    *,
    every: int = 12,
    outer_learning_rate: float = 1.0,
    outer_momentum: float = 0.6,
    reset: bool = False,
) -> OldMethod:
    """SlowMo: H local steps, then one along a momentum of the workers' average changes.

        x̄ = (1/N) Σ_i x_i;     u ← βu + (x₀ − x̄)/γ;     x₀ ← x₀ − αγu;     x_i ← x₀

    γ is the mean learning rate of the H steps. A worker sends what the reducer sends of an array of the parameters' size, once in H
    steps; with a codec, the change x₀ − x_i is compressed, with error feedback. Any data; no graph.

    Args:
        every: H, steps from one average to the next.
        outer_learning_rate: α; 1: the momentum is applied as it is.
        outer_momentum: β; with 0 and α = 1 it is local SGD.
        reset: start the optimizer's moments anew after each average; false: they are kept, and stay with their worker.

    Reference: Wang et al. 2020, arXiv 1910.00643, algorithm 1.
    """
    average = reduce.every(reducer, every)
    form = SlowMo(inner, None, average, learning_rate, every, outer_learning_rate, outer_momentum, reset)
    return averaging(form.transformation, average, num_workers)._replace(every=every)


@dataclasses.dataclass(frozen=True)
class SlowMo:
    """The transformation of SlowMo, with or without a mixer (equations: `decjax.optim.slowmo`)."""

    base: optax.GradientTransformation  # the optimizer, or `decentralize` around it
    mixer: gossip.Mixer | None
    reducer: reduce.Reducer
    learning_rate: Callable[[Any], Any]
    every: int
    alpha: float
    beta: float
    reset: bool
    optimizer: optax.GradientTransformation | None = None  # inside of `decentralize`

    def phases(self, phase: int | None) -> tuple[Any, int | None]:
        """The phases of the mixer and of the reducer."""
        if self.mixer is None:
            return None, reduce.due_phase(self.reducer, phase)
        phase = known_phase(phase)
        mixing, due = divmod(phase, len(self.reducer.phases))
        return self.mixer.phases[mixing], self.reducer.phases[due]

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return transformation(self.init, self.update)

    def init(self, params):
        base: Any = self.base.init(params)
        nothing = jax.tree.map(jnp.zeros_like, params)
        inner, mixer = base[1:] if self.mixer else (base, ())  # Of a `DecentralizeState`, or without one.
        anchor, reducer = jax.tree.map(jnp.copy, params), init_memory(self.reducer.init, params)
        return SlowMoState(jnp.zeros((), jnp.int32), inner, anchor, nothing, mixer, reducer)

    def update(self, grads, state, params: Any = None, *, phase=None, received=None, **extra):
        check_update(params)
        mixing, due = self.phases(phase)
        base = optax.with_extra_args_support(self.base)
        if self.mixer:
            before = DecentralizeState(state.step, state.inner, state.mixer)
            after: Any
            updates, after = base.update(grads, before, params, phase=mixing, received=received, **extra)
            state = state._replace(inner=after.inner, mixer=after.mixer)
        else:
            updates, inner = base.update(grads, state.inner, params, **extra)
            state = state._replace(inner=inner)
        state = state._replace(step=increment(state.step))
        if due == reduce.SILENT:
            return updates, state
        change = jax.tree.map(jnp.subtract, state.anchor, optax.apply_updates(params, updates))
        averaged, reducer_state = self.reducer.reduce(change, state.reducer, due)
        state = self.outer_step(averaged, state)._replace(reducer=reducer_state)
        return in_float32(jnp.subtract, state.anchor, params), state

    def outer_step(self, change, state: SlowMoState) -> SlowMoState:
        """The state after x₀ and u have moved by the average change, with fresh memories of what is not averaged."""
        steps = state.step - self.every + jnp.arange(self.every)
        rate = jnp.mean(jax.vmap(lambda step: jnp.asarray(self.learning_rate(step), float))(steps))
        inverse = jnp.where(rate > 0, 1 / jnp.where(rate > 0, rate, 1), 0)  # At a rate of 0 nothing has changed.

        momentum = of_floating(lambda u, d: self.beta * u + d * inverse.astype(d.dtype), state.momentum, change)
        anchor = of_floating(lambda x, u: x - self.alpha * rate.astype(u.dtype) * u, state.anchor, momentum)
        mixer = self.mixer.restart(anchor, state.mixer) if self.mixer else state.mixer
        inner = _afresh(self.optimizer or self.base, state.inner, anchor) if self.reset else state.inner
        return state._replace(inner=inner, anchor=anchor, momentum=momentum, mixer=mixer)


def _afresh(optimizer: optax.GradientTransformation, state: Any, params: Any) -> Any:
    """An optimizer's initial state, but for the steps that its schedules have counted."""
    counts = lambda node: isinstance(node, optax.ScaleByScheduleState)
    return jax.tree.map(lambda old, new: old if counts(old) else new, state, optimizer.init(params), is_leaf=counts)
