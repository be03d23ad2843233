"""DiLoCo with neighbors: local steps, then an outer step that mixes parameters by a graph instead of averaging over all workers.

Worker i has an anchor a_i, its parameters after its last outer step. Each step is x_i ← x_i − α d_i(∇F_i(x_i)); every H-th step is
followed by the outer step of the class, and then x_i ← a_i. W is the mixing matrix of the round.
"""

import abc
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import gossip
from decjax.buckets import in_float32
from decjax.optim.decentralize import mix_in_step
from decjax.optim.local_updates import NesterovOuter
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import KEEPS_MEAN, KNOWN_MESSAGES, LEAVES_STEP, Mixing, OfTwo, Wrapping, check_update, known_phase
from decjax.options import Count, Decay, Positive
from decjax.registry import Requirement
from decjax.typing import PyTree


@communicating
@transient("mixer")
class GossipOuterState(NamedTuple):
    """State of the methods `gossip_diloco` and `noloco`.

    Attributes:
        step: steps so far, an int32 scalar.
        inner: state of the inner optimizer.
        outer: state of the outer step.
        anchor: a_i.
        mixer: state of the mixer.
    """

    step: jax.Array
    inner: PyTree
    outer: PyTree
    anchor: PyTree
    mixer: PyTree


class OuterSteps(Mixing, Wrapping):
    """Base of methods with local steps and an outer step between neighbors.

    Attributes:
        every: H, steps from one outer step to the next.
    """

    anchored = True
    memory = "2 copies"
    requires = (KNOWN_MESSAGES, KEEPS_MEAN, LEAVES_STEP)

    _: dataclasses.KW_ONLY
    every: Count = 30

    @functools.cached_property
    def communicator(self):
        return gossip.every(gossip.unrounded(self.mixer), self.every)

    def mixed(self, params: PyTree, change: PyTree) -> PyTree:
        """Return what is mixed: parameters, a change of them, or both."""
        return params

    @abc.abstractmethod
    def start(self, params: PyTree) -> PyTree:
        """Return the initial state of the outer step."""

    @abc.abstractmethod
    def outer_step(self, stepped: PyTree, state: GossipOuterState, phase: int) -> GossipOuterState:
        """Return the state after the outer step from this worker's parameters."""

    def init(self, params):
        empty = lambda params: self.mixed(params, jax.tree.map(jnp.zeros_like, params))
        memory = init_memory(lambda params: self.communicator.init(empty(params)), params)
        anchor = jax.tree.map(jnp.copy, params)
        return GossipOuterState(jnp.zeros((), jnp.int32), self.optimizer.init(params), self.start(params), anchor, memory)

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params)
        phase = known_phase(phase)
        updates, inner = self.optimizer.update(grads, state.inner, params, **extra)
        state = state._replace(inner=inner)
        if phase != gossip.SILENT:
            state = self.outer_step(optax.apply_updates(params, updates), state, phase)
            updates = in_float32(jnp.subtract, state.anchor, params)
        return updates, state._replace(step=increment(state.step))


class GossipDiLoCo(NesterovOuter, OuterSteps, name="gossip_diloco"):
    """DiLoCo with neighbors: H local steps, then a step with Nesterov momentum along the change to the mixed parameters.

        Δ_i = a_i − Σ_j w_ij x_j;   a_i ← a_i − outer(Δ_i)

    A worker sends the mixer's messages once in H steps. With the complete graph it is DiLoCo; with an outer learning rate of 1 and no
    momentum it is local SGD with gossip. x is mixed and not a − x: Σ_j w_ij (a_j − x_j) = 0 wherever each worker is at the optimum of
    its local data, so with an invertible W workers would stop there.

    Reference: Douillard et al. 2023, arXiv 2311.08105 (DiLoCo).
    """

    messages = "parameters, every H steps"

    def start(self, params):
        return self.outer.init(params)

    def outer_step(self, stepped, state, phase):
        mixed, memory = mix_in_step(self.communicator, stepped, state, phase)
        change = in_float32(jnp.subtract, state.anchor, mixed)
        moves, outer = self.outer.update(change, state.outer, state.anchor)
        return state._replace(outer=outer, anchor=optax.apply_updates(state.anchor, moves), mixer=memory)


class NoLoCo(OuterSteps, name="noloco"):
    """NoLoCo: H local steps, then an outer step along the mean change of a random pair, which also draws the pair together.

        Δ_i = x_i − a_i;   δ_i ← αδ_i + β Σ_j w_ij Δ_j − γ(a_i − Σ_j w_ij a_j);   a_i ← a_i + δ_i

    A worker sends two arrays of the parameters' size once in H steps. With the complete graph all a_i are equal, so that the last term
    vanishes and the step is DiLoCo's with plain momentum α and learning rate β.

    Attributes:
        outer_learning_rate: β.
        outer_momentum: α.
        pull: γ; the workers of a pair converge if 0 < γ < 2(1 + α).

    Reference: Kolehmainen et al. 2025, arXiv 2506.10911.
    """

    default_topology = "random_matching"
    messages = "changes and parameters, every H steps"

    outer_learning_rate: Positive = 0.7
    outer_momentum: Decay = 0.5
    pull: float = 1.0

    def check_requirements(self, *more):
        limit = 2 * (1 + self.outer_momentum)
        converges = Requirement(
            "pull", f"a pull between 0 and {limit:g}, or workers drift apart", lambda pull: 0 < pull < limit, "use 1.0"
        )
        super().check_requirements(*more, converges)

    @functools.cached_property
    def communicator(self):
        return OfTwo(super().communicator)

    def mixed(self, params, change):
        return change, params

    def start(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    def outer_step(self, stepped, state, phase):
        change = jax.tree.map(jnp.subtract, stepped, state.anchor)
        (change, mean), memory = mix_in_step(self.communicator, self.mixed(state.anchor, change), state, phase)
        alpha, beta, gamma = self.outer_momentum, self.outer_learning_rate, self.pull
        moved = lambda delta, change, x, mean: alpha * delta + beta * change - gamma * (x - mean)
        delta = in_float32(moved, state.outer, change, state.anchor, mean)
        return state._replace(outer=delta, anchor=optax.apply_updates(state.anchor, delta), mixer=memory)
