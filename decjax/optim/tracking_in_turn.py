"""Gradient tracking that mixes first the trackers, then the parameters: MC-DSGT, and the base of GT-NSGDm.

    v = signal(g)     y <- W (y + v − v₋)     x <- W (x − η d(y)),     y = v at first

The mean of the y_i is always that of the v_i. `decjax.optim.tracking` mixes both in one exchange, trackers a step behind; here a step
is along trackers that are mixed already. Both take the same rounds of the graph, R of them if the mixer has R: were these in turn
even and odd ones, each would be mixed over a part of a graph with an even period, which may not be connected.

Reference: Huang and Yuan 2022, arXiv 2211.00533 (MC-DSGT).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import gossip, registry
from decjax.buckets import in_float32, of_floating
from decjax.optim.memories import communicating, increment, init_memory, transformation, transient
from decjax.optim.method import OldMethod, check_mixes_after, check_phase_is_known, check_update


@communicating
@transient("mixer", "tracker", "signal")
class TrackInTurnState(NamedTuple):
    """State of `track_in_turn`; tracker and signal have the shapes of the parameters.

    Attributes:
        step: steps so far, an int32 scalar.
        before: state of the transformation of the gradient.
        inner: state of the wrapped optimizer.
        mixer: states of the mixer, of trackers and of parameters.
        tracker: y, the estimate of the mean signal.
        signal: v₋, the signal of the step before.
    """

    step: jax.Array
    before: Any
    inner: Any
    mixer: Any
    tracker: Any
    signal: Any


def track_in_turn(signal: optax.GradientTransformation, inner: optax.GradientTransformation, mixer: gossip.Mixer) -> OldMethod:
    """The method of trackers and parameters that are mixed in turn (equations: `decjax.optim.tracking_in_turn`).

    Args:
        signal: makes v of a gradient.
        inner: the optimizer that is given y.
        mixer: mixes trackers and parameters, by an exchange each.

    Raises:
        ValueError: if the mixer changes the optimizer's step itself, or the mean.
    """
    if mixer.settle is not None or not mixer.keeps_mean:
        raise ValueError(f"gradient tracking also mixes trackers, for which {mixer} is not made; use mixer 'exact' or 'choco'")
    check_phase_is_known("gradient tracking in turn", mixer)
    check_mixes_after("gradient tracking", mixer)
    form = _TrackInTurn(signal, optax.with_extra_args_support(inner), mixer)
    tx = transformation(form.init, form.update)
    # The mixer's memory is also of trackers, which averaging the parameters does not make equal.
    return OldMethod(tx, mixer.phase, form.num_bytes, mixer=gossip.Restartless(mixer))


@dataclasses.dataclass(frozen=True)
class _TrackInTurn:
    """The functions of `track_in_turn`."""

    signal: optax.GradientTransformation
    inner: optax.GradientTransformationExtraArgs
    mixer: gossip.Mixer

    def num_bytes(self, params: Any, phase: int | None) -> np.ndarray:
        assert phase is not None  # It is known beforehand.
        return 2 * self.mixer.num_bytes(params, phase)

    def init(self, params):
        nothing = jax.tree.map(jnp.zeros_like, params)
        memories = tuple(init_memory(self.mixer.init, tree) for tree in (nothing, params))
        return TrackInTurnState(
            jnp.zeros((), jnp.int32), self.signal.init(params), self.inner.init(params), memories, nothing, nothing
        )

    def update(self, grads, state, params: Any = None, *, phase=None, **extra):
        check_update(params)
        v, before = self.signal.update(grads, state.before, params)
        # In the type in which it is remembered, so that trackers add up to the signals.
        v = jax.tree.map(lambda v, old: v.astype(old.dtype), v, state.signal)
        moved = of_floating(lambda y, new, old: y + (new - old), state.tracker, v, state.signal)
        mixed, of_trackers = gossip.mix_due(self.mixer, moved, state.mixer[0], phase, state.step)
        tracker = jax.tree.map(lambda first, later: jnp.where(state.step == 0, first, later), moved, mixed)
        updates, inner = self.inner.update(tracker, state.inner, params, **extra)
        stepped = optax.apply_updates(params, updates)
        mixed, of_params = gossip.mix_due(self.mixer, stepped, state.mixer[1], phase, state.step)
        step = increment(state.step)
        after = TrackInTurnState(step, before, inner, (of_trackers, of_params), tracker, v)
        return in_float32(jnp.subtract, mixed, params), after


@registry.register(
    "method",
    "mc_dsgt",
    chooses=("mixer", "optimizer"),
    default_mixer="exact(rounds=4)",
    step="y ← W…W (y + g − g₋), x ← W…W (x − η d(y)), R matrices each",
    messages="parameters and trackers, R rounds of each",
    memory="2 copies",
    needs="the mixer's graph",
    data="any; no bias",
    source="arXiv 2211.00533",
)
def mc_dsgt(inner: optax.GradientTransformation, mixer: gossip.Mixer) -> OldMethod:
    """MC-DSGT: gradient tracking with R rounds of gossip for each of trackers and parameters, for graphs that vary in time.

    R is the mixer's: `exact(rounds=R)`, or, on static symmetric graphs only, `accelerated(rounds=R)`. In the paper g is the mean of
    R gradients, which `config.pipeline.microbatches` = R computes, so that a step communicates as much for each gradient as gradient
    tracking, which is R = 1. See `decjax.optim.tracking_in_turn`.

    Reference: Huang and Yuan 2022, arXiv 2211.00533.
    """
    return track_in_turn(optax.identity(), inner, mixer)
