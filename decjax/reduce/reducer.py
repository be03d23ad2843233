"""What a reducer is, the plain mean, and wrappers of reducers."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh, phases, registry
from decjax.channel import Channel

SILENT = -1
"""The phase of a step that sends nothing and averages nothing."""
BEFORE = 0
"""The first phase of `start_at`."""


class Timing(NamedTuple):
    """How a state that decides by the speed of training is told it, between steps: a compiled step has no clock.

    Attributes:
        window: how many averages it is told about at a time; the first of them is not measured.
        due: `due(step) -> bool`, whether it is told after that step, counted from 0.
        observe: `observe(state, step_s) -> state`, on each worker, with the seconds of a step in the last window as this worker's
            process measured them; nan if it could not. It contains a collective.
    """

    window: int
    due: Callable[[int], bool]
    observe: Callable[[Any, jax.Array], Any]


class Reducer(NamedTuple):
    """How gradients of all workers are averaged: functions called on each worker.

    The average is the same on every worker, bit for bit. If the gradient of any worker is not finite, neither is the average, on all
    workers, and the state stays as it was.

    Attributes:
        init: `init(params) -> state`.
        reduce: `reduce(grads, state, phase) -> (averaged, state)`, which contains the collectives. `phase` is static, so that no
            program has a conditional around a collective; left out, it is the last.
        num_bytes: `num_bytes(params, num_workers, phase) -> (N,)`, bytes that each worker sends, by formula.
        phase: `phase(step) -> phase`, for an int; None if the state decides on the phase.
        phases: all values that `phase` takes.
        usage: `usage(state) -> [phases]`, steps so far in each phase, if the state decides on it; else None.
        timing: how the state is told the speed of training, if it decides by that; else None.
    """

    init: Callable[[Any], Any]
    reduce: Callable[..., tuple[Any, Any]]
    num_bytes: Callable[..., np.ndarray]
    phase: Callable[[int], int | None] = lambda step: 0
    phases: range = range(1)
    usage: Callable[[Any], jax.Array] | None = None
    timing: Timing | None = None


def _with_checks(reducer: Reducer, arguments: Mapping[str, Any]) -> Reducer:
    """The reducer that a factory made of its arguments, with a check of the trees that are given to it."""
    channel = arguments.get("channel") or Channel()

    def init(params):
        channel.check(params)
        return reducer.init(params)

    def reduce(grads, *state_and_phase, **phase):
        channel.check(grads)
        return reducer.reduce(grads, *state_and_phase, **phase)

    return reducer._replace(init=init, reduce=reduce)


registry.finish("reducer", _with_checks)


def due_phase(reducer: Reducer, phase: int | None) -> int | None:
    """The phase to call `reduce` with: the only one, else the given one, which must not be None unless the state decides."""
    phases.check(reducer, phase)
    if len(reducer.phases) == 1:
        return reducer.phases[0]
    if phase is None and not reducer.usage:
        raise ValueError(f"this reducer has {len(reducer.phases)} phases: give update(…, phase=reducer.phase(step)), a static int")
    return phase


@registry.register("reducer", "mean", exact=True, needs="nothing", messages="gradients", memory="none")
def mean(channel: Channel = Channel()) -> Reducer:
    """All-reduce, the mean of all gradients: g_i <- (1/N) Σ_j g_j. A worker sends 2(N−1)/N of the gradient's bytes."""

    def reduce(grads, state, phase=0):
        layout = channel.layout(grads)
        means = [channel.axis.mean(x_P) for x_P in layout.pack(grads, flat=False)]
        return layout.unpack(means, like=grads), state

    def num_bytes(params, num_workers, phase=0):
        layout = channel.layout(params)
        return np.full(num_workers, 2 * (num_workers - 1) / num_workers * layout.num_bytes)

    return Reducer(lambda params: (), reduce, num_bytes)


def start_at(reducer: Reducer, step: int, before: Reducer) -> Reducer:
    """The reducer that uses another one in the first steps, while gradients are hard to compress.

    Args:
        reducer: used from `step` on.
        step: number of steps before.
        before: used until then, as phase `BEFORE`; one with a single phase, such as `mean`.
    """
    if step < 0:
        raise ValueError(f"start={step}: must be at least 0 steps")
    if step == 0:
        return reducer
    if len(before.phases) > 1:
        raise ValueError(f"the reducer before step {step} has {len(before.phases)} phases; use one with a single one, as mean")
    num_own = len(reducer.phases)

    def own(phase):
        return phase if phase is None else reducer.phases[phase - 1]

    def reduce(grads, state, phase=num_own):
        first, then = state
        if phase == BEFORE:
            averaged, first = before.reduce(grads, first)
        else:
            averaged, then = reducer.reduce(grads, then, own(phase))
        return averaged, (first, then)

    def num_bytes(params, num_workers, phase=num_own):
        if phase == BEFORE:
            return before.num_bytes(params, num_workers)
        return reducer.num_bytes(params, num_workers, own(phase))

    phase = functools.partial(_phase_from, step, reducer)
    counts = reducer.usage
    usage = (lambda state: jnp.pad(counts(state[1]), (1, 0))) if counts else None
    init = lambda params: (before.init(params), reducer.init(params))
    return Reducer(init, reduce, num_bytes, phase, range(1 + num_own), usage, _timing_from(step, reducer.timing))


def _timing_from(step: int, own: Timing | None) -> Timing | None:
    """The timing of `start_at`, from that of the reducer which is used from `step` on."""
    if own is None:
        return None
    due = lambda count: count >= step and own.due(count - step)
    return Timing(own.window, due, lambda state, step_s: (state[0], own.observe(state[1], step_s)))


def _phase_from(step: int, reducer: Reducer, count: int) -> int | None:
    """The phase of `start_at` in step `count`."""
    if count < step:
        return BEFORE
    due = reducer.phase(count - step)
    return due if due is None else 1 + reducer.phases.index(due)


def first_stages(
    make: Callable[[Channel], Reducer],
    count: int,
    num_stages: int,
    others: Callable[[Channel], Reducer] = mean,
    channel: Channel = Channel(),
) -> Reducer:
    """The reducer that averages by one reducer in the first stages of a pipeline, and by another in the later stages.

    The last backward pass of a stage waits for those of all later stages. So what later stages send can travel meanwhile, and needs no
    compression. `num_bytes` is the mean over stages.

    Args:
        make: `make(channel)`, the reducer of the first stages; its phases are those of the whole.
        count: k ≥ 1, the number of first stages.
        num_stages: S ≥ k.
        others: `others(channel)`, the reducer of the other stages; one with a single phase.
        channel: how gradients travel.

    Reference: arXiv 2301.09830 (Optimus-CC), selective stage compression.
    """
    if not 1 <= count <= num_stages:
        raise ValueError(f"{count} compressed stages of {num_stages}: must be between 1 and {num_stages}")
    if count == num_stages:
        return make(channel)
    reducer, other = make(channel.sent_by(range(count))), others(channel.sent_by(range(count, num_stages)))
    if len(other.phases) > 1 or reducer.usage:
        raise ValueError(
            "the reducers of first and other stages take their steps together: use reducers whose phases are known "
            "beforehand, and one of a single phase, such as mean, for the others"
        )

    form = _FirstStages(reducer, other, count, num_stages)
    return reducer._replace(init=form.init, reduce=form.reduce, num_bytes=form.num_bytes)


@dataclasses.dataclass(frozen=True)
class _FirstStages:
    """The functions of `first_stages`; a phase that is left out is the last."""

    reducer: Reducer
    other: Reducer
    count: int
    num_stages: int

    def init(self, params):
        return self.reducer.init(params), self.other.init(params)

    def reduce(self, grads, state, phase=None):
        phase = self.reducer.phases[-1] if phase is None else phase
        # Every stage computes both, and sends one: see `mesh.Axis.sent_by`.
        compressed, plain = self.reducer.reduce(grads, state[0], phase), self.other.reduce(grads, state[1])
        is_first = mesh.STAGES.index < self.count
        chosen = lambda first, other: jax.tree.map(lambda x, y: jnp.where(is_first, x, y), first, other)
        return chosen(compressed[0], plain[0]), (chosen(compressed[1], state[0]), chosen(state[1], plain[1]))

    def num_bytes(self, params, num_workers, phase=None):
        phase = self.reducer.phases[-1] if phase is None else phase
        sent = self.reducer.num_bytes(params, num_workers, phase), self.other.num_bytes(params, num_workers)
        return (self.count * sent[0] + (self.num_stages - self.count) * sent[1]) / self.num_stages


def every(reducer: Reducer, period: int) -> Reducer:
    """The reducer that averages in steps H−1, 2H−1, … only, for a period H ≥ 1; in others (phase `SILENT`) it returns its input."""
    if period < 1:
        raise ValueError(f"every={period} steps: must be at least 1")
    if period == 1:
        return reducer

    def reduce(grads, state, phase=reducer.phases[-1]):
        return (grads, state) if phase == SILENT else reducer.reduce(grads, state, phase)

    def num_bytes(params, num_workers, phase=reducer.phases[-1]):
        if phase == SILENT:  # Asked all the same: it refuses what does not fit.
            return 0 * reducer.num_bytes(params, num_workers, reducer.phases[-1])
        return reducer.num_bytes(params, num_workers, phase)

    def phase(step):
        return SILENT if (step + 1) % period else reducer.phase(step // period)

    counts, own = reducer.usage, reducer.timing
    usage = (lambda state: jnp.pad(counts(state), (1, 0))) if counts else None
    timing = own and own._replace(due=lambda step: (step + 1) % period == 0 and own.due(step // period))
    return Reducer(reducer.init, reduce, num_bytes, phase, range(SILENT, reducer.phases.stop), usage, timing)
