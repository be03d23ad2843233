"""What a mixer is, and wrappers of mixers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, phases, registry
from decjax.channel import Channel

SILENT = -1
"""The phase of a step that sends nothing and does not mix."""


class Linear(NamedTuple):
    """Mixing that is x <- Wx and nothing else, up to rounding.

    Attributes:
        matrix: `matrix(phase) -> W`, [N, N].
        pull: `pull(params, phase)`, Wx − x in float32 or wider, from the differences x_j − x_i. Its sum over workers is zero up to
            roundings of these differences, unlike that of the rounded Wx − x: a sum of pulls over many steps keeps the mean.
        num_bytes: `num_bytes(params, phase) -> (N,)`, bytes that each worker sends for a pull.
    """

    matrix: Callable[[int], np.ndarray]
    pull: Callable[[Any, int], Any]
    num_bytes: Callable[[Any, int], np.ndarray]


class Mixer(NamedTuple):
    """How parameters are mixed: functions that exchange and combine them, called on each worker.

    Attributes:
        init: `init(params) -> state`, for parameters that are the same on all workers.
        exchange: `exchange(params, state, phase) -> received`, the only part that communicates. Where `combine` is left out, it
            returns (mixed, state).
        phase: `phase(step) -> phase`, for an int (static) or a traced int32 step; None if the state decides on it.
        phases: all values that `phase` takes, a contiguous range.
        num_bytes: `num_bytes(params, phase) -> (N,)`, bytes that each worker sends, by formula; 0 where `usage` tells the phase.
        num_workers: N, the number of workers.
        combine: `combine(params, received, state, phase, step) -> (mixed, state)`, local and cheap. `step` counts all steps, also
            those that do not mix, as an int or a traced int32. Left out, it returns what was received.
        settle: `settle(mixed, stepped, state) -> (params, state)`, local: the parameters after the optimizer has stepped from `mixed`
            to `stepped`; None: `stepped`.
        restart: `restart(average, state) -> state`, local: the state after the parameters of all workers have been replaced by their
            average; None: unchanged.
        weight: `weight(state) -> y_i`, a scalar: mixing preserves, and workers agree on, Σ_i y_i x_i / Σ_i y_i. None: y_i = 1.
        orders: when it can exchange: "awc", while the gradient is taken, "atc", after the step; see `decjax.optim.decentralize`.
        keeps_mean: whether mixing leaves the mean over workers, weighted by `weight`, as it is.
        linear: W, and the pull of neighbours, where mixing is x <- Wx and nothing else; None: otherwise.
        usage: `usage(state) -> [phases]`, steps so far in each phase, if the state decides on it; else None.
        permutations: pairs (source, target) of workers of each message; None: those of the topology.
        name: the one by which a config chose it; empty: none did.
    """

    init: Callable[[Any], Any]
    exchange: Callable[[Any, Any, int], Any]
    phase: Callable[[Any], Any]
    phases: range
    num_bytes: Callable[[Any, int], np.ndarray]
    num_workers: int
    combine: Callable[[Any, Any, Any, int, Any], tuple[Any, Any]] = lambda params, received, state, phase, step: received
    settle: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
    restart: Callable[[Any, Any], Any] | None = None
    weight: Callable[[Any], jax.Array] | None = None
    orders: tuple[str, ...] = ("awc", "atc")
    keeps_mean: bool = True
    linear: Linear | None = None
    usage: Callable[[Any], jax.Array] | None = None
    permutations: tuple[tuple[tuple[int, int], ...], ...] | None = None
    name: str = ""

    @property
    def called(self) -> str:
        """What errors call it."""
        return f"mixer {self.name!r}" if self.name else "this mixer"


def _with_checks(mixer: Mixer, arguments: Mapping[str, Any]) -> Mixer:
    """The mixer that a factory made of its arguments, with checks of the parameters when it is traced."""
    channel = arguments.get("channel") or Channel()

    def checked(fn):
        def of_params(params, *others, **named):
            channel.check(params, mixer.num_workers)
            return fn(params, *others, **named)

        return of_params

    linear = mixer.linear and mixer.linear._replace(pull=checked(mixer.linear.pull))
    return mixer._replace(init=checked(mixer.init), exchange=checked(mixer.exchange), linear=linear)


registry.finish("mixer", _with_checks)


def mix(mixer: Mixer, params: Any, state: Any, phase: Any, step: Any) -> tuple[Any, Any]:
    """One mixing step, exchange and combine: the mixed parameters and the new state."""
    return mixer.combine(params, mixer.exchange(params, state, phase), state, phase, step)


def mix_due(mixer: Mixer, params: Any, state: Any, phase: int | None, step: jax.Array) -> tuple[Any, Any]:
    """`mix` in the given static phase; if it is None, in the phase of a traced step, by a conditional over all phases, unless the
    mixer's state decides."""
    phases.check(mixer, phase)
    if phase is not None or mixer.usage:
        return mix(mixer, params, state, phase, step)
    branches = [lambda params, state, phase=phase: mix(mixer, params, state, phase, step) for phase in mixer.phases]
    if len(branches) == 1:
        return branches[0](params, state)
    return jax.lax.switch(mixer.phase(step) - mixer.phases.start, branches, params, state)


def every(mixer: Mixer, period: int) -> Mixer:
    """The mixer that mixes in steps p−1, 2p−1, … only, for a period p ≥ 1; other steps send nothing.

    Reference: Zhang et al. 2020, adaptive serverless learning (Adam with gossip in every p-th step, order "atc").
    """
    if period < 1:
        raise ValueError(f"mixing every={period} steps: must be at least 1")
    if period == 1:
        return mixer
    if mixer.usage:
        raise ValueError(f"mixing every={period} steps with a mixer that decides itself how much it sends; use every=1")
    if "atc" not in mixer.orders:  # Its messages are due in the step after.
        raise ValueError(
            f"mixing every={period} steps with {mixer.called}, whose messages arrive in the next step; use every=1, or mixer 'push_sum'"
        )

    def exchange(params, state, phase):
        return () if phase == SILENT else mixer.exchange(params, state, phase)

    def combine(params, received, state, phase, step):
        return (params, state) if phase == SILENT else mixer.combine(params, received, state, phase, step)

    def phase(step):
        due = mixer.phase(step // period)
        mixes = (step + 1) % period == 0
        return jnp.where(mixes, due, SILENT) if isinstance(step, jax.Array) else (due if mixes else SILENT)

    def num_bytes(params, phase):
        return np.zeros(mixer.num_workers) if phase == SILENT else mixer.num_bytes(params, phase)

    return mixer._replace(
        exchange=exchange, combine=combine, phase=phase, num_bytes=num_bytes, phases=range(SILENT, mixer.phases.stop), linear=None
    )


def damp(mixer: Mixer, strength: float | Callable[[jax.Array], jax.Array]) -> Mixer:
    """The mixer with strength γ: x_i <- γ (Wx)_i + (1−γ) x_i.

    Args:
        mixer: gives Wx; not one with weights, such as `push_sum`.
        strength: γ in [0, 1], or a schedule `step -> γ`, such as γ = (lr / lr_max)^p for a learning-rate schedule.

    Raises:
        ValueError: for a constant γ outside [0, 1], or a mixer with weights.
    """
    if not callable(strength):
        if not 0 <= strength <= 1:
            raise ValueError(f"mixing strength={strength} must lie in [0, 1]; 1 is full mixing")
        if strength == 1:
            return mixer
    if mixer.weight:
        raise ValueError(
            f"mixing strength other than 1 with {mixer.called}, whose weights have to be damped with its values; use strength 1, or "
            "mixer 'push_sum' with its own gamma"
        )

    def combine(params, received, state, phase, step):
        mixed, state = mixer.combine(params, received, state, phase, step)
        gamma = strength(step) if callable(strength) else strength

        return buckets.of_floating(lambda x, y: x + gamma * (y - x), params, mixed), state

    linear = None if callable(strength) else mixer.linear and _damped(mixer.linear, strength)
    return mixer._replace(combine=combine, linear=linear)


def unrounded(mixer: Mixer) -> Mixer:
    """The mixer whose results of narrow parameters, such as bfloat16, stay in float32 where mixing is linear.

    For methods that step along Wx − x: what rounding Wx to the size of x adds to the mean of that, a momentum would add up. Parameters
    of float32 and wider are mixed as before.
    """
    linear = mixer.linear
    if linear is None:
        return mixer
    is_narrow = lambda x: buckets.is_floating(x) and x.dtype != buckets.wide_dtype(x)
    narrow = lambda params: any(map(is_narrow, jax.tree.leaves(params)))

    def exchange(params, state, phase):
        if not narrow(params):
            return mixer.exchange(params, state, phase)
        return buckets.in_float32(jnp.add, params, linear.pull(params, phase)), state

    def combine(params, received, state, phase, step):
        return received if narrow(params) else mixer.combine(params, received, state, phase, step)

    def num_bytes(params, phase):
        return (linear if narrow(params) else mixer).num_bytes(params, phase)

    return mixer._replace(exchange=exchange, combine=combine, num_bytes=num_bytes)


def _damped(linear: Linear, gamma: float) -> Linear:
    def matrix(phase):
        W_NxN = linear.matrix(phase)
        return gamma * W_NxN + (1 - gamma) * np.eye(len(W_NxN))

    def pull(params, phase):
        return buckets.of_floating(lambda pull: gamma * pull, linear.pull(params, phase))

    return linear._replace(matrix=matrix, pull=pull)
