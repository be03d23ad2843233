"""Gradient tracking: every worker's optimizer is given an estimate v_i of the mean gradient instead of its own gradient.

    v_i <- Σ_j w_ij v_j + ∇F_i(x_i) − ∇F_i(x_i⁻)     x_i <- Σ_j w_ij x_j − α d_i(v_i)

with x_i⁻ the parameters of the step before. The mean of the v_i is always the mean of the workers' gradients, so workers with
different data converge to a stationary point of the sum; plain gossip with constant α ends at a distance from it that grows with α.
Parameters and trackers are sent in one exchange, twice the bytes of gossip. With an exact mixer this is gradient tracking (DIGing);
with `gossip.beer` both are compressed as in CHOCO, which is BEER:

    X <- X + γ H (W − I) − α V     H <- H + C(X − H)
    V <- V + γ G (W − I) + ∇F(X) − ∇F(X⁻)     G <- G + C(V − G)

Reference: Nedić, Olshevsky and Shi 2017, arXiv 1607.03218 (DIGing); Zhao et al. 2022, arXiv 2201.13320 (BEER, algorithm 1).
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import gossip, options
from decjax.buckets import in_float32, of_floating
from decjax.optim.decentralize import Gossiping, mix_in_step
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import OfTwo, check_update


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
    inner: Any
    mixer: Any
    tracker: Any
    gradient: Any


@options.checked
def track(
    inner: optax.GradientTransformation, mixer: gossip.Mixer, order: Literal["awc", "atc"] = "awc"
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that follows the tracked mean gradient, and mixes parameters and trackers (equations: `decjax.optim.tracking`).

    The update takes `phase` and `received` as that of `decentralize` does; `received` comes from `tracked_exchange`.

    Put wrappers that may skip a step on one worker inside, around `inner`; see `decentralize`. A tracker keeps every gradient that
    it was given, so replace one that is not finite by `state.gradient`, the one before, ahead of the update.

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

    See `track`.
    """

    messages = "parameters and trackers"
    memory = "2 copies"
    needs = "the mixer's graph"
    data = "any; no bias"

    def check_requirements(self, *more):
        if self.mixer.settle is not None or not self.mixer.keeps_mean:
            raise ValueError(
                f"gradient tracking also mixes trackers, for which {self.mixer} is not made; use mixer 'exact' or 'beer'"
            )
        super().check_requirements(*more)

    @functools.cached_property
    def communicator(self):
        return OfTwo(super().communicator)

    def init(self, params):
        nothing = jax.tree.map(jnp.zeros_like, params)
        memory = init_memory(lambda params: self.communicator.init((params, nothing)), params)
        return TrackState(jnp.zeros((), jnp.int32), self.optimizer.init(params), memory, nothing, nothing)

    @property
    def exchange(self):
        exchange = lambda params, state, phase: tracked_exchange(self.communicator, params, state, phase)
        return exchange if super().exchange else None

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params, self.order, phase, received)
        # In the type in which it is remembered, so that trackers add up to the gradients.
        grads = jax.tree.map(lambda g, before: g.astype(before.dtype), grads, state.gradient)
        if self.order == "awc":
            (mixed, tracker), mixer_state = mix_in_step(self.communicator, (params, state.tracker), state, phase, received)
            tracker = of_floating(lambda v, g, before: v + (g - before), tracker, grads, state.gradient)
            updates, inner_state = self.optimizer.update(tracker, state.inner, mixed, **extra)
            updates = in_float32(lambda y, x, u: (y - x) + u, mixed, params, updates)
        else:
            tracker = of_floating(lambda v, g, before: v + (g - before), state.tracker, grads, state.gradient)
            updates, inner_state = self.optimizer.update(tracker, state.inner, params, **extra)
            stepped = optax.apply_updates(params, updates)
            (mixed, tracker), mixer_state = mix_in_step(self.communicator, (stepped, tracker), state, phase)
            updates = in_float32(jnp.subtract, mixed, params)
        return updates, TrackState(increment(state.step), inner_state, mixer_state, tracker, grads)


def tracked_exchange(mixer: gossip.Mixer, params: Any, state: TrackState, phase: int) -> Any:
    """All that `track` sends in order "awc", to be passed to its update as `received`.

    It does not depend on this step's gradient, so another program can run it meanwhile.
    """
    return mixer.exchange((params, state.tracker), state.mixer, phase)
