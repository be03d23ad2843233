"""Training methods by name: an optimizer, what is exchanged around it, and when.

    decentralized    x_i ← Σ_j w_ij x_j − α d_i(g_i)               an optimizer and a mixer
    tracking         the same with trackers of the mean gradient   an optimizer and a mixer, such as beer
    allreduce        x ← x − α d(ḡ)                                an optimizer and a reducer
    onebit_adam      all-reduce of Adam's momentum                 a reducer; it is an optimizer itself
    diloco           H local steps, then an outer one              an optimizer and a reducer
    sparseloco       the same, with the changes compressed         an optimizer and a reducer
    local            each worker by itself                         an optimizer

Methods for different data on each worker have a module each: `quasi_global`, `quasi_global_adam`, `decentlam`, `exact_diffusion`,
`tracking_in_turn` and `normalized_tracking`.

The registered factories take built parts first and their options after `*`. The parts, of which each takes what it needs: `inner`,
the optimizer; `mixer`, how parameters (and trackers) are mixed; `reducer`, how gradients, momenta or changes are averaged;
`num_workers`, N; `learning_rate`, by step; `share`, the learning rate ÷ its peak, by step; `clip`, which clips each worker's own
gradient; `norm`, the norm of a tree of which each pipeline stage holds a part; `channel`, the axis of the workers and the seed; and
`units`, which parameters belong to a model's hidden units (see `tasks.Task`).
"""

from collections.abc import Callable
import functools
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from decjax import gossip, mesh, reduce, registry
from decjax.optim.decentralize import decentralize, stale_exchange, synchronize
from decjax.optim.local_updates import local_updates
from decjax.optim.memories import transformation
from decjax.optim.onebit import scale_by_onebit_adam
from decjax.optim.tracking import track, tracked_exchange
from decjax.options import Count, Decay, Positive


class Method(NamedTuple):
    """A training method: what is done with gradients and parameters, and what is sent for it.

    Attributes:
        tx: the transformation; its update takes `phase`, and `received` where there is an `exchange`.
        phase: `phase(step)`, a static int; None where it is traced, or the state decides on it.
        num_bytes: `num_bytes(params, phase) -> (N,)`, the declared bytes that each worker sends.
        exchange: `exchange(params, opt_state, phase) -> received`, all communication of a step whose exchange does not need that
            step's gradient; None for other methods.
        usage: `usage(opt_state) -> [phases]`, how many steps so far were in each of `phases`, where the state decides on the phase,
            so that bytes can be counted; None where `phase` knows.
        phases: the phases that `usage` counts.
        mixer: the mixer of a method whose state has a `mixer` field; it says how workers are averaged.
        every: steps from one exchange to the next.
        view: `view(params, opt_state) -> params`, local: where a worker takes its gradient; None: at its own parameters.
        between_steps: `between_steps(workers)` returns a function (opt_state, [N, …], loss_N, step) -> opt_state that is called after
            each step of a run; None if there is none. See `reduce.Reducer.between_steps`.
    """

    tx: optax.GradientTransformationExtraArgs
    phase: Callable[[int], int | None]
    num_bytes: Callable[[Any, int | None], np.ndarray]
    exchange: Callable[[Any, Any, int], Any] | None = None
    usage: Callable[[Any], jax.Array] | None = None
    phases: range = range(0)
    mixer: gossip.Mixer | None = None
    every: int = 1
    view: Callable[[Any, Any], Any] | None = None
    between_steps: Callable[[mesh.Workers], reduce.Hook] | None = None


@registry.register("method", "decentralized", chooses=("mixer", "optimizer"))
def decentralized(
    inner: optax.GradientTransformation,
    mixer: gossip.Mixer,
    share: Callable[[Any], Any] | None = None,
    *,
    order: Literal["awc", "atc"] = "awc",
    every: Count = 1,
    strength: float = 1.0,
    strength_power: float = 0.0,
    static_phase: bool = True,
) -> Method:
    """Decentralized training (gossip): each worker mixes its parameters with its neighbours' around any optimizer's step.

    See `decentralize`.

    Args:
        order: "awc" mixes the parameters before the step, so the exchange overlaps with the gradient; "atc" mixes after the step.
        every: p; mix in every p-th step only.
        strength: γ in W' = γW + (1−γ)I, from 0 (no mixing) to 1 (full).
        strength_power: q; γ is multiplied by (learning rate ÷ its peak)^q.
        static_phase: compile one program for each phase of the topology; false: one program for all, whose exchange cannot overlap.

    Reference: arXiv 2410.11998, decentralized Adam.
    """
    mixer = _every_and_damped(mixer, every, strength, strength_power, share)

    def exchange(params, opt_state, phase):
        return mixer.exchange(params, opt_state.mixer, phase)

    return _gossip(decentralize(inner, mixer, order), mixer, exchange, order, every, static_phase)


@registry.register(
    "method",
    "tracking",
    chooses=("mixer", "optimizer"),
    step="y ← W y + g − g₋, x ← W x − η d(y)",
    messages="parameters and trackers",
    memory="2 copies",
    needs="the mixer's graph",
    data="any; no bias",
    source="arXiv 1607.03218",
)
def tracking(
    inner: optax.GradientTransformation,
    mixer: gossip.Mixer,
    share: Callable[[Any], Any] | None = None,
    *,
    order: Literal["awc", "atc"] = "awc",
    every: Count = 1,
    strength: float = 1.0,
    strength_power: float = 0.0,
    static_phase: bool = True,
) -> Method:
    """Gradient tracking: each worker follows an estimate of the mean gradient, mixed with the parameters; with mixer "beer", BEER.

    See `track`.

    Args:
        order: "awc" mixes the values before the step, so the exchange overlaps with the gradient; "atc" mixes after the step.
        every: p; mix in every p-th step only.
        strength: γ in W' = γW + (1−γ)I, from 0 (no mixing) to 1 (full).
        strength_power: q; γ is multiplied by (learning rate ÷ its peak)^q.
        static_phase: compile one program for each phase of the topology; false: one program for all, whose exchange cannot overlap.

    Reference: Nedić, Olshevsky and Shi 2017, arXiv 1607.03218; Zhao et al. 2022, arXiv 2201.13320 (BEER).
    """
    mixer = _every_and_damped(mixer, every, strength, strength_power, share)
    exchange = functools.partial(tracked_exchange, mixer)
    both = _OfTwo(mixer)
    method = _gossip(track(inner, mixer, order), both, exchange, order, every, static_phase)
    # The mixer's memory is also of trackers, which averaging the parameters does not make equal.
    return method._replace(mixer=gossip.Restartless(mixer))


class _OfTwo(gossip.WrappedMixer):
    """A mixer of parameters and trackers, by the size of the parameters."""

    def num_bytes(self, params, phase):
        return self.inner.num_bytes((params, params), phase)


def _every_and_damped(mixer, every, strength, power, share) -> gossip.Mixer:
    mixer = gossip.every(mixer, every)
    if not power:
        return gossip.damp(mixer, strength)
    if share is None:
        raise ValueError(f"strength_power={power} scales mixing with the learning rate: give `share`, or leave it 0")
    return gossip.damp(mixer, lambda step: strength * share(step) ** power)


def _gossip(tx, mixer, exchange, order, every, static_phase) -> Method:
    if static_phase:
        return _mixed(tx, mixer, exchange if order == "awc" else None, every)

    # One program holds all phases, so its bytes are declared as the mean over a period of steps.
    steps = range(every * sum(phase != gossip.SILENT for phase in mixer.phases))
    num_bytes = lambda params, phase: np.mean([mixer.num_bytes(params, mixer.phase(step)) for step in steps], axis=0)
    return Method(tx, lambda step: None, num_bytes, mixer=mixer, every=every)


def mixing(form: Any, mixer: gossip.Mixer, exchange: Callable[[Any, Any, int], Any] | None = None) -> Method:
    """The method of an object with `init` and `update` that sends what a mixer sends; `exchange` as in `Method`."""
    return _mixed(transformation(form.init, form.update), mixer, exchange)


def _mixed(tx: optax.GradientTransformationExtraArgs, mixer: gossip.Mixer, exchange: Any, every: int = 1) -> Method:
    num_bytes: Any = mixer.num_bytes
    of = mixer.usage
    usage = of and (lambda opt_state: of(opt_state.mixer))
    return Method(tx, mixer.phase, num_bytes, exchange, usage, mixer.phases, mixer, every)


@registry.register("method", "allreduce", chooses=("reducer", "optimizer"), averages_gradients=True)
def allreduce(inner: optax.GradientTransformation, reducer: reduce.Reducer, num_workers: int, *, stale: bool = False) -> Method:
    """Data-parallel training: gradients are averaged over all workers, exactly or compressed; see `synchronize`.

    Args:
        stale: apply the average of the previous step's gradients, so that averaging overlaps with computing the next ones.
    """
    method = averaging(synchronize(inner, reducer, stale), reducer, num_workers)
    exchange = lambda params, opt_state, phase: stale_exchange(reducer, opt_state, phase)
    return method._replace(exchange=exchange) if stale else method


@registry.register("method", "onebit_adam", chooses=("reducer",), warm=True, reducer="codec(codec=scaled_sign,form='shards')")
def onebit_adam(
    reducer: reduce.Reducer,
    num_workers: int,
    learning_rate: optax.Schedule,
    clip: optax.GradientTransformation,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Method:
    """1-bit Adam: Adam for the first steps, then its variance is frozen and the workers' momenta are averaged in compressed form.

    The reducer's `start` says after how many steps; until then it averages gradients exactly. See `scale_by_onebit_adam`.

    Args:
        b1: β1 in [0, 1), decay of the momentum.
        b2: β2 in [0, 1), decay of the variance until it is frozen.
        eps: ε, added outside of the root.
        weight_decay: λ, decoupled.

    Reference: Tang et al. 2021, arXiv 2102.02888.
    """
    tx = optax.chain(
        clip,
        scale_by_onebit_adam(reducer, b1, b2, eps),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return averaging(tx, reducer, num_workers)


@registry.register("method", "diloco", chooses=("reducer", "optimizer"))
def diloco(
    inner: optax.GradientTransformation,
    reducer: reduce.Reducer,
    num_workers: int,
    *,
    every: int = 30,
    outer_learning_rate: Positive = 0.7,
    outer_momentum: Decay = 0.9,
) -> Method:
    """DiLoCo: every worker takes H local steps, then all take one step with Nesterov momentum along their average change.

    See `local_updates`.

    Args:
        every: H, steps from one average to the next.
        outer_learning_rate: learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step; 0: none.

    Reference: Douillard et al. 2023, arXiv 2311.08105.
    """
    reducer = reduce.every(reducer, every)
    outer = optax.sgd(outer_learning_rate, outer_momentum or None, nesterov=True)
    return averaging(local_updates(inner, reducer, outer), reducer, num_workers)._replace(every=every)


@registry.register(
    "method",
    "sparseloco",
    chooses=("reducer", "optimizer"),
    reducer="codec(codec=block_topk(values=int2),decay=0.95,form='gather')",
)
def sparseloco(
    inner: optax.GradientTransformation,
    reducer: reduce.Reducer,
    num_workers: int,
    *,
    every: int = 30,
    outer_learning_rate: Positive = 1.0,
    outer_momentum: Decay = 0.0,
) -> Method:
    """SparseLoCo: DiLoCo with compressed changes (a few of the values, in few bits), whose errors are added to later changes.

    The default reducer keeps the largest values of each block in 2 bits, and multiplies the remembered error by 0.95 each time.

    Args:
        every: H, steps from one average to the next.
        outer_learning_rate: learning rate of the outer step; 1: the average change is applied as it is.
        outer_momentum: Nesterov momentum of the outer step; 0: none.

    Reference: Sarfi et al. 2025, arXiv 2508.15706.
    """
    return diloco(inner, reducer, num_workers, every=every, outer_learning_rate=outer_learning_rate, outer_momentum=outer_momentum)


def averaging(tx: Any, reducer: reduce.Reducer, num_workers: int) -> Method:
    """The method of a transformation whose communication is a reducer's."""
    steps, own = reducer.usage, reducer.between_steps
    usage = steps and (lambda opt_state: steps(opt_state.reducer))
    num_bytes = lambda params, phase: reducer.num_bytes(params, num_workers, phase)

    def between_steps(workers):
        assert own is not None
        hook = own(workers, lambda step: step)
        return lambda opt_state, loss_N, step: opt_state._replace(reducer=hook(opt_state.reducer, loss_N, step))

    return Method(tx, reducer.phase, num_bytes, usage=usage, phases=reducer.phases, between_steps=own and between_steps)


@registry.register("method", "local", chooses=("optimizer",), alone=True)
def local(inner: optax.GradientTransformation, num_workers: int) -> Method:
    """No communication: every worker trains by itself."""
    inner = optax.with_extra_args_support(inner)

    def update(grads, state, params=None, *, phase=None, **extra):
        del phase  # Not an argument of the optimizer.
        return inner.update(grads, state, params, **extra)

    tx = transformation(inner.init, update, moves=False)
    return Method(tx, lambda step: 0, lambda params, phase: np.zeros(num_workers))
