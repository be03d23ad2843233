"""SlowMo: blocks of H steps of any optimizer, each followed by a step along a momentum of the blocks' changes.

With x₀ the parameters at the start of a block (the same on all workers), γ the mean learning rate of its H steps, and u = 0 at first,

    x_i ← one step of the base method                              in every step
    x̄ = (1/N) Σ_i x_i;   u ← βu + (x₀ − x̄)/γ;   x₀ ← x₀ − αγu;   x_i ← x₀      in every H-th

The base method is the optimizer alone, as in local SGD, or decentralized training with any mixer inside of a block. α = 1 and β = 0 is
the base method with an exact average in every H-th step. The paper's γ is constant within a block. Without messages inside of a block
it is BMUF (Chen and Huo 2016).

Reference: Wang et al. 2020, arXiv 1910.00643, algorithm 1.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import gossip, reduce
from decjax.buckets import in_float32, of_floating
from decjax.optim.decentralize import Decentralized, DecentralizeState
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import KNOWN_AVERAGES, KNOWN_MESSAGES, Order, Reducing, Wrapping, check_order, check_update, known_phase
from decjax.options import Count
from decjax.registry import Requirement
from decjax.typing import PyTree


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
    inner: PyTree
    anchor: PyTree
    momentum: PyTree
    mixer: PyTree
    reducer: PyTree


class Blocks(Reducing, Wrapping):
    """Base of both methods; a subclass defines the steps inside of a block.

    Attributes:
        learning_rate: by step.
        every: H, steps from one average to the next.
        outer_learning_rate: α; 1: the momentum is applied unchanged.
        outer_momentum: β; with 0 and α = 1 it is the base method with an average in every H-th step.
        reset: restart the optimizer's moments after each average; false: they are kept, and stay with their worker.
    """

    memory = "2 copies"

    _: dataclasses.KW_ONLY
    learning_rate: optax.Schedule
    every: Count = 12
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.6
    reset: bool = False

    @functools.cached_property
    def communicator(self):
        return reduce.every(self.reducer, self.every)

    def init(self, params):
        anchor, zeros = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.zeros_like, params)
        inner, memory = self.optimizer.init(params), init_memory(self.communicator.init, params)
        return SlowMoState(jnp.zeros((), jnp.int32), inner, anchor, zeros, (), memory)

    def outer_step(self, updates: PyTree, state: SlowMoState, params: PyTree, due: int | None) -> tuple[PyTree, SlowMoState]:
        """Return (updates, state) after a step of the base method, and at the end of a block the step along the momentum."""
        state = state._replace(step=increment(state.step))
        if due == reduce.SILENT:
            return updates, state
        change = jax.tree.map(jnp.subtract, state.anchor, optax.apply_updates(params, updates))
        averaged, memory = self.communicator.reduce(change, state.reducer, due)
        steps = state.step - self.every + jnp.arange(self.every)
        rate = jnp.mean(jax.vmap(lambda step: jnp.asarray(self.learning_rate(step), float))(steps))
        per_rate = jnp.where(rate > 0, 1 / jnp.where(rate > 0, rate, 1), 0)  # At a rate of 0 nothing has changed.
        momentum = of_floating(lambda u, d: self.outer_momentum * u + d * per_rate.astype(d.dtype), state.momentum, averaged)
        anchor = of_floating(lambda x, u: x - self.outer_learning_rate * rate.astype(u.dtype) * u, state.anchor, momentum)
        inner = _restarted(self.inner, state.inner, anchor) if self.reset else state.inner
        return in_float32(jnp.subtract, anchor, params), state._replace(
            inner=inner, anchor=anchor, momentum=momentum, reducer=memory
        )


def _restarted(optimizer: optax.GradientTransformation, state: PyTree, params: PyTree) -> PyTree:
    """Return an optimizer's initial state, except for the steps that its schedules have counted."""
    counts = lambda node: isinstance(node, optax.ScaleByScheduleState)
    return jax.tree.map(lambda old, new: old if counts(old) else new, state, optimizer.init(params), is_leaf=counts)


class SlowMo(Blocks, name="slowmo"):
    """SlowMo: H local steps, then one along a momentum of the workers' average changes.

    Equations: `decjax.contrib.outer.slowmo`. Once in H steps, a worker sends what the reducer sends of an array of the parameters' size.
    With a codec, the change x₀ − x_i is compressed, with error feedback.
    """

    messages = "changes of H steps"

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params)
        due = reduce.due_phase(self.communicator, phase)
        updates, inner = self.optimizer.update(grads, state.inner, params, **extra)
        return self.outer_step(updates, state._replace(inner=inner), params, due)


class SlowMoGossip(Blocks, name="slowmo_gossip"):
    """SlowMo around gossip: H steps of decentralized training, then one along a momentum of the workers' average changes.

    As `slowmo`, with parameters mixed in every step. A worker sends the mixer's messages in every step, and once in H steps the
    reducer's. The mixer's memory restarts after each average.

    Attributes:
        mixer: what is exchanged in every step, and how.
        order: "awc" mixes before the step, so that the exchange overlaps with the gradient; "atc" mixes after the step.
    """

    mixer: gossip.Mixer
    _: dataclasses.KW_ONLY
    order: Order = "awc"

    requires = (
        Requirement("mixer", "a mixer with equal weights", lambda mixer: not mixer.weight, "use mixer 'exact' or 'choco'"),
        KNOWN_MESSAGES,
        KNOWN_AVERAGES,
    )
    messages = "parameters; changes of H steps"

    def check_requirements(self, *more: Requirement) -> None:
        super().check_requirements(*more)
        check_order(self.mixer, self.order)

    @functools.cached_property
    def base(self) -> Decentralized:
        """The base method."""
        return Decentralized(inner=self.inner, mixer=self.mixer, order=self.order)

    @property
    def replica_mixer(self):
        return self.mixer

    @property
    def exchange(self):
        mix = lambda params, state, phase: self.mixer.exchange(params, state.mixer, self._phases(phase)[0])
        return mix if self.order == "awc" else None

    def phase(self, step):
        due = self.communicator.phase(step)
        assert due is not None  # `KNOWN_AVERAGES`
        return (self.mixer.phase(step) - self.mixer.phases.start) * len(self.communicator.phases) + self.communicator.phases.index(
            due
        )

    def _phases(self, phase: int | None) -> tuple[int, int]:
        """Return the phases of the mixer and of the reducer."""
        mixing, due = divmod(known_phase(phase), len(self.communicator.phases))
        return self.mixer.phases[mixing], self.communicator.phases[due]

    def num_bytes(self, params, phase):
        mixing, due = self._phases(phase)
        return self.mixer.num_bytes(params, mixing) + self.communicator.num_bytes(params, self.num_workers, due)

    def init(self, params):
        before = self.base.init(params)
        return super().init(params)._replace(inner=before.inner, mixer=before.mixer)

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params)
        mixing, due = self._phases(phase)
        before = DecentralizeState(state.step, state.inner, state.mixer)
        updates, after = self.base.update(grads, before, params, phase=mixing, received=received, **extra)
        updates, state = self.outer_step(updates, state._replace(inner=after.inner, mixer=after.mixer), params, due)
        if due == reduce.SILENT:
            return updates, state
        return updates, state._replace(mixer=self.mixer.restart(state.anchor, state.mixer))
