"""Gradient tracking: every worker's optimizer gets an estimate of the mean gradient instead of the worker's own gradient.

`Tracking` mixes trackers and parameters in one exchange, trackers a step behind; methods with the base `TrackingInTurn` mix first the
trackers, then the parameters.
"""

import abc
from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import gossip, options
from decjax.buckets import in_float32, of_floating
from decjax.optim.decentralize import Gossiping, mix_in_step
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import KEEPS_MEAN, KNOWN_MESSAGES, LEAVES_STEP, MIXES_AFTER, Mixing, OfTwo, Order, Wrapping, check_update
from decjax.options import Decay, NonNegative
from decjax.registry import Requirement
from decjax.typing import PyTree


def moved(tracker: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Return trackers plus the change of what they track."""
    return of_floating(lambda y, new, old: y + (new - old), tracker, new, old)


def remembered(tree: PyTree, before: PyTree) -> PyTree:
    """Return values in the types in which they are remembered, so that trackers add up to them."""
    return jax.tree.map(lambda x, old: x.astype(old.dtype), tree, before)


# -- In one exchange --------------------------------------------------------------------------------------------------


@communicating
@transient("mixer", "tracker", "gradient")
class TrackState(NamedTuple):
    """State of `track`; tracker and gradient have the shapes of the parameters.

    Attributes:
        step: steps so far, an int32 scalar; it gives the phase where the caller gives none.
        inner: state of the wrapped optimizer.
        mixer: state of the mixer, of parameters and trackers.
        tracker: v, the estimate of the mean gradient.
        gradient: ∇F(x⁻), the gradient of the step before.
    """

    step: jax.Array
    inner: PyTree
    mixer: PyTree
    tracker: PyTree
    gradient: PyTree


@options.checked
def track(inner: optax.GradientTransformation, mixer: gossip.Mixer, order: Order = "awc") -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer to follow the tracked mean gradient, and to mix parameters and trackers (equations: `Tracking`).

    The update takes `phase` and `received` as that of `decentralize` does; `received` comes from `tracked_exchange`.

    Put wrappers that may skip a step on one worker inside, around `inner`; see `decentralize`. A tracker accumulates every gradient, so
    replace one that is not finite by `state.gradient`, the one before, ahead of the update.

    Args:
        inner: any optax optimizer; clipping acts on the tracked gradient.
        mixer: how parameters and trackers are mixed: `gossip.beer`, or an exact one.
        order: "awc" mixes the parameters and trackers from before the step, so that the exchange can overlap with the gradient;
            "atc" mixes both after the update, x_i <- Σ_j w_ij (x_j − α d_j(v_j)), and waits for the gradient.

    Raises:
        ValueError: if the order is unknown, or the mixer changes the optimizer's step itself, as `gossip.dcd` does, or the mean.
    """
    return Tracking(inner, mixer, order=order).tx


class Tracking(Gossiping, name="tracking"):
    """Gradient tracking: each worker follows an estimate of the mean gradient, mixed with the parameters; with mixer "beer", BEER.

        v_i <- Σ_j w_ij v_j + ∇F_i(x_i) − ∇F_i(x_i⁻)     x_i <- Σ_j w_ij x_j − α d_i(v_i)

    with x_i⁻ the parameters of the step before. The mean of the v_i is always the mean of the workers' gradients, so workers with
    different data converge to a stationary point of the sum; plain gossip with constant α ends at a distance from it that grows with α.
    Parameters and trackers are sent in one exchange, twice the bytes of gossip. With an exact mixer this is gradient tracking (DIGing);
    with `gossip.beer` both are compressed as in CHOCO, which is BEER:

        X <- X + γ H (W − I) − α V     H <- H + C(X − H)
        V <- V + γ G (W − I) + ∇F(X) − ∇F(X⁻)     G <- G + C(V − G)

    References: Nedić, Olshevsky and Shi 2017, arXiv 1607.03218 (DIGing); Zhao et al. 2022, arXiv 2201.13320 (BEER, algorithm 1).
    """

    messages = "parameters and trackers"
    memory = "2 copies"
    needs = "the mixer's graph"
    data = "any; no bias"
    requires = (
        Requirement(
            "mixer",
            "a mixer that also mixes trackers",
            lambda mixer: mixer.settle is None and mixer.keeps_mean,
            "use mixer 'exact' or 'beer'",
        ),
    )

    @functools.cached_property
    def communicator(self):
        return OfTwo(super().communicator)

    def init(self, params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        memory = init_memory(lambda params: self.communicator.init((params, zeros)), params)
        return TrackState(jnp.zeros((), jnp.int32), self.optimizer.init(params), memory, zeros, zeros)

    @property
    def exchange(self):
        exchange = lambda params, state, phase: tracked_exchange(self.communicator, params, state, phase)
        return exchange if super().exchange else None

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params, self.order, phase, received)
        grads = remembered(grads, state.gradient)
        if self.order == "awc":
            (mixed, tracker), mixer_state = mix_in_step(self.communicator, (params, state.tracker), state, phase, received)
            tracker = moved(tracker, grads, state.gradient)
            updates, inner_state = self.optimizer.update(tracker, state.inner, mixed, **extra)
            updates = in_float32(lambda y, x, u: (y - x) + u, mixed, params, updates)
        else:
            tracker = moved(state.tracker, grads, state.gradient)
            updates, inner_state = self.optimizer.update(tracker, state.inner, params, **extra)
            stepped = optax.apply_updates(params, updates)
            (mixed, tracker), mixer_state = mix_in_step(self.communicator, (stepped, tracker), state, phase)
            updates = in_float32(jnp.subtract, mixed, params)
        return updates, TrackState(increment(state.step), inner_state, mixer_state, tracker, grads)


def tracked_exchange(mixer: gossip.Mixer, params: PyTree, state: TrackState, phase: int) -> PyTree:
    """Return all that `track` sends in order "awc", to be passed to its update as `received`.

    It does not depend on this step's gradient, so another program can run it meanwhile.
    """
    return mixer.exchange((params, state.tracker), state.mixer, phase)


# -- In turn ----------------------------------------------------------------------------------------------------------


@communicating
@transient("mixer", "tracker", "signal")
class TrackInTurnState(NamedTuple):
    """State of `TrackingInTurn`; tracker and signal have the shapes of the parameters.

    Attributes:
        step: steps so far, an int32 scalar.
        before: state of the transformation of the gradient.
        inner: state of the wrapped optimizer.
        mixer: states of the mixer, of trackers and of parameters.
        tracker: y, the estimate of the mean signal.
        signal: v₋, the signal of the step before.
    """

    step: jax.Array
    before: PyTree
    inner: PyTree
    mixer: PyTree
    tracker: PyTree
    signal: PyTree


class TrackingInTurn(Mixing):
    """Base of methods that mix trackers and parameters in turn, by an exchange each; a subclass defines `optimizer`.

        v = signal(g)     y <- W (y + v − v₋)     x <- W (x − η d(y)),     y = v at first

    The mean of the y_i is always that of the v_i, and a step is along trackers that are mixed already. Both take the same rounds of the
    graph, R of them if the mixer has R: were these in turn even and odd ones, each would be mixed over a part of a graph with an even
    period, which may not be connected.
    """

    requires = (KEEPS_MEAN, LEAVES_STEP, KNOWN_MESSAGES, MIXES_AFTER)
    messages = "parameters and trackers"
    memory = "2 copies"
    needs = "the mixer's graph"
    data = "any; no bias"

    @functools.cached_property
    def communicator(self):
        # The mixer's memory is also of trackers, which averaging the parameters does not make equal.
        return gossip.Restartless(self.mixer)

    @property
    def signal(self) -> optax.GradientTransformation:
        """The transformation of the gradient."""
        return optax.identity()

    @functools.cached_property
    @abc.abstractmethod
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer whose gradient is y."""

    def num_bytes(self, params, phase):
        return 2 * super().num_bytes(params, phase)

    def init(self, params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        memories = tuple(init_memory(self.mixer.init, tree) for tree in (zeros, params))
        before, inner = self.signal.init(params), self.optimizer.init(params)
        return TrackInTurnState(jnp.zeros((), jnp.int32), before, inner, memories, zeros, zeros)

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params)
        v, before = self.signal.update(grads, state.before, params)
        v = remembered(v, state.signal)
        own = moved(state.tracker, v, state.signal)
        mixed, of_trackers = gossip.mix_due(self.mixer, own, state.mixer[0], phase, state.step)
        tracker = jax.tree.map(lambda first, later: jnp.where(state.step == 0, first, later), own, mixed)
        updates, inner = self.optimizer.update(tracker, state.inner, params, **extra)
        stepped = optax.apply_updates(params, updates)
        mixed, of_params = gossip.mix_due(self.mixer, stepped, state.mixer[1], phase, state.step)
        after = TrackInTurnState(increment(state.step), before, inner, (of_trackers, of_params), tracker, v)
        return in_float32(jnp.subtract, mixed, params), after


class MCDSGT(Wrapping, TrackingInTurn, name="mc_dsgt"):
    """MC-DSGT: gradient tracking with R rounds of gossip for each of trackers and parameters, for graphs that vary in time.

        y <- W…W (y + g − g₋)     x <- W…W (x − η d(y)),     R matrices each

    R is the mixer's: `exact(rounds=R)`, or, on static symmetric graphs only, `accelerated(rounds=R)`. In the paper g is the mean of
    R gradients, which `config.pipeline.microbatches` = R computes, so that a step communicates as much for each gradient as gradient
    tracking, which is R = 1.

    Reference: Huang and Yuan 2022, arXiv 2211.00533.
    """

    messages = "parameters and trackers, R rounds of each"
    default_mixer = "exact(rounds=4)"


class GTNSGDm(TrackingInTurn, name="gt_nsgdm"):
    """GT-NSGDm: gradient tracking of momenta, and steps of equal length, for gradients whose noise has heavy tails.

        v <- β v + (1−β) g     y <- W (y + v − v₋)     x <- W (x − η y / ‖y‖),     y = v at first

    ‖y‖ is the norm over all of a worker's parameters.

    Attributes:
        learning_rate: η, by step.
        clip: clips each worker's own gradient.
        norm: the norm of a tree.
        momentum: β.
        weight_decay: λ, added to the gradient.

    Reference: Yu et al. 2025, arXiv 2505.03736, algorithm 1.
    """

    like = "sgdm"  # Weight decay is added to the gradient: as much as AdamW's would be larger than it.
    memory = "3 copies"
    data = "any; noise with heavy tails"

    learning_rate: optax.Schedule
    clip: optax.GradientTransformation = optax.identity()
    norm: Callable[[PyTree], jax.Array] = optax.global_norm
    momentum: Decay = 0.9
    weight_decay: NonNegative = 0.0

    @property
    def signal(self):
        return optax.chain(self.clip, optax.add_decayed_weights(self.weight_decay), optax.ema(self.momentum, debias=False))

    @functools.cached_property
    def optimizer(self):
        def direction(y, params):
            scale = 1 / jnp.maximum(self.norm(y), jnp.finfo(jnp.float32).tiny)
            return jax.tree.map(lambda y: y * scale.astype(y.dtype), y)

        return optax.with_extra_args_support(
            optax.chain(optax.stateless(direction), optax.scale_by_learning_rate(self.learning_rate))
        )
