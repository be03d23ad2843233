"""Base classes of reducers, the plain mean, and wrappers of reducers."""

import abc
from collections.abc import Callable
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, codecs, mesh, options, phases, registry
from decjax.channel import Channel
from decjax.options import Count, Natural
from decjax.registry import delegates, of_field
from decjax.typing import PyTree

SILENT = -1
"""The phase of a step that sends nothing and averages nothing."""
BEFORE = 0
"""The first phase of `start_at`."""

Hook = Callable[[PyTree, jax.Array, int], PyTree]  # (state, [N, …], loss_N, step) -> state
StepNumber = Callable[[int], int | None]  # from a step of the run to that of a reducer, None if it does not average in it


class Reducer(registry.Part, abc.ABC, kind="reducer"):
    """Averages the gradients of all workers; `init` and `reduce` are called on each worker.

    The average is the same on every worker, bit for bit. If the gradient of any worker is not finite, the average is not finite on any
    worker, and the state stays unchanged.

    Attributes:
        channel: how gradients travel.
        sharded: whether it may average the shards of arrays that are divided among the devices of a worker, each by itself.
    """

    sharded: ClassVar[bool] = False
    _wraps: ClassVar[bool] = False

    channel: Channel = Channel()

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if not cls._wraps:  # Otherwise the methods of the wrapped reducer are mapped.
            mesh.map_by_shard(cls, init="state", reduce="both")
            if "reduce" in vars(cls):
                setattr(cls, "reduce", _all_shards_finite(cls.reduce))  # noqa: B010

    @abc.abstractmethod
    def init(self, params: PyTree) -> PyTree:
        """Return the state before the first step."""

    @abc.abstractmethod
    def reduce(self, grads: PyTree, state: PyTree, phase: int | None = 0) -> tuple[PyTree, PyTree]:
        """Return (average, state); contains the collectives.

        `phase` is static, so that no program has a conditional around a collective; None if the state decides on it.
        """

    @abc.abstractmethod
    def num_bytes(self, params: PyTree, num_workers: int, phase: int | None = 0) -> np.ndarray:
        """Return the bytes that each worker sends, (N,), by formula."""

    @property
    def phases(self) -> range:
        """All values that `phase` takes."""
        return range(1)

    def phase(self, step: int) -> int | None:
        """Return the phase of a step; None if the state decides on it."""
        return 0

    @property
    def usage(self) -> Callable[[PyTree], jax.Array] | None:
        """`usage(state) -> [phases]`, steps so far in each phase, if the state decides on it; else None."""
        return None

    @property
    def between_steps(self) -> Callable[[mesh.Workers, StepNumber], Hook] | None:
        """`between_steps(workers, number)` returns a function that a training loop calls after each step, if the state needs it."""
        return None


@delegates("reducer", "phase", "phases", "usage")
class WrappedReducer(Reducer):
    """Base of reducers that change some methods of another one.

    Attributes:
        reducer: the other one.
    """

    _wraps = True

    _: dataclasses.KW_ONLY
    reducer: Reducer

    init = of_field("reducer.init")

    def reduce(self, grads, state, phase=None):
        return self.reducer.reduce(grads, state, self._due(phase))

    def num_bytes(self, params, num_workers, phase=None):
        return self.reducer.num_bytes(params, num_workers, self._due(phase))

    @property
    def between_steps(self):
        hook_of = self.reducer.between_steps

        def number_of(number: StepNumber, step: int) -> int | None:
            own = number(step)
            return None if own is None else self._number(own)

        return hook_of and (lambda workers, number: self._hook(hook_of(workers, functools.partial(number_of, number))))

    def _number(self, number: int) -> int | None:
        """Return the number of a step for the wrapped reducer, None if it does not average in it."""
        return number

    def _hook(self, hook: Hook) -> Hook:
        """Return the hook of the wrapped reducer for a state of this one."""
        return hook

    def _due(self, phase: int | None) -> int | None:
        """Return the phase, or for None the last one, unless the state decides."""
        return self.reducer.phases[-1] if phase is None and not self.reducer.usage else phase


def _all_shards_finite(reduce: Callable[..., tuple[PyTree, PyTree]]) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return a `reduce` to which no shard of a gradient seems finite unless all are, so that all keep their states or none."""

    @functools.wraps(reduce)
    def joint(reducer: Reducer, grads: PyTree, state: PyTree, phase: int | None = 0) -> tuple[PyTree, PyTree]:
        if mesh.num_shards() > 1 and jax.tree.leaves(state):
            finite = codecs.finite(grads)
            grads = jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan) if buckets.is_floating(x) else x, grads)
        return reduce(reducer, grads, state, phase)

    return joint


def due_phase(reducer: Reducer, phase: int | None) -> int | None:
    """Return the phase to call `reduce` with: the only one, else the given one, which must not be None unless the state decides."""
    phases.check(reducer, phase)
    if len(reducer.phases) == 1:
        return reducer.phases[0]
    if phase is None and not reducer.usage:
        raise ValueError(f"this reducer has {len(reducer.phases)} phases: give update(…, phase=reducer.phase(step)), a static int")
    return phase


class Mean(Reducer, name="mean"):
    """All-reduce, the mean of all gradients: g_i <- (1/N) Σ_j g_j. A worker sends 2(N−1)/N of the gradient's bytes.

    Values of 16 bits are summed in float32, and the mean is rounded once.
    """

    exact = True
    needs = "nothing"
    messages = "gradients"
    memory = "none"
    sharded = True

    def init(self, params):
        self.channel.check(params)
        return ()

    def reduce(self, grads, state, phase=0):
        layout = self.channel.layout(grads)
        means = [self.channel.axis.mean(x_P, self.channel.dtype) for x_P in layout.pack(grads, flat=False)]
        return layout.unpack(means, like=grads), state

    def num_bytes(self, params, num_workers, phase=0):
        sizes = [(bucket.size, bucket.dtype) for bucket in self.channel.layout(params).buckets]
        return np.full(num_workers, sum(mesh.mean_bytes(*size, num_workers, self.channel.dtype) for size in sizes))


@options.checked
def start_at(reducer: Reducer, step: Natural, before: Reducer) -> Reducer:
    """Return a reducer that uses `before` for the first `step` steps, while gradients are hard to compress, and `reducer` afterwards.

    Args:
        reducer: used from `step` on.
        step: number of steps before.
        before: used until then, as phase `BEFORE`; one with a single phase, such as `mean`.
    """
    if len(before.phases) > 1:
        raise ValueError(f"the reducer before step {step} has {len(before.phases)} phases; use one with a single one, such as mean")
    return _StartAt(reducer.channel, reducer=reducer, before=before, start=step) if step else reducer


class _StartAt(WrappedReducer):
    _: dataclasses.KW_ONLY
    before: Reducer
    start: int

    def init(self, params):
        return self.before.init(params), self.reducer.init(params)

    def _due(self, phase):
        return super()._due(phase if phase is None else self.reducer.phases[phase - 1])

    def reduce(self, grads, state, phase=None):
        first, then = state
        if phase == BEFORE:
            averaged, first = self.before.reduce(grads, first)
        else:
            averaged, then = super().reduce(grads, then, phase)
        return averaged, (first, then)

    def num_bytes(self, params, num_workers, phase=None):
        return self.before.num_bytes(params, num_workers) if phase == BEFORE else super().num_bytes(params, num_workers, phase)

    def phase(self, step):
        if step < self.start:
            return BEFORE
        due = self.reducer.phase(step - self.start)
        return due if due is None else 1 + self.reducer.phases.index(due)

    @property
    def phases(self):
        return range(1 + len(self.reducer.phases))

    @property
    def usage(self):
        counts = self.reducer.usage
        return counts and (lambda state: jnp.pad(counts(state[1]), (1, 0)))  # Steps before are not counted.

    def _number(self, number):
        return number - self.start if number >= self.start else None

    def _hook(self, hook):
        return lambda state, loss_N, step: (state[0], hook(state[1], loss_N, step))


def first_stages(
    make: Callable[[Channel], Reducer],
    count: int,
    num_stages: int,
    others: Callable[[Channel], Reducer] = Mean,
    channel: Channel = Channel(),
) -> Reducer:
    """Return the reducer that averages by one reducer in the first stages of a pipeline, and by another in the later stages.

    The last backward pass of a stage waits for those of all later stages. So what later stages send can travel meanwhile, and needs no
    compression. `num_bytes` is the mean over stages.

    Args:
        make: `make(channel)`, the reducer of the first stages; its phases are those of the result.
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
    return _FirstStages(channel, reducer=reducer, other=other, count=count, num_stages=num_stages)


class _FirstStages(WrappedReducer):
    _: dataclasses.KW_ONLY
    other: Reducer
    count: int
    num_stages: int

    def init(self, params):
        return self.reducer.init(params), self.other.init(params)

    def reduce(self, grads, state, phase=None):
        # Every stage computes both, and sends one: see `mesh.Axis.sent_by`.
        compressed, plain = super().reduce(grads, state[0], phase), self.other.reduce(grads, state[1])
        is_first = mesh.STAGES.index < self.count
        chosen = lambda first, other: jax.tree.map(lambda x, y: jnp.where(is_first, x, y), first, other)
        return chosen(compressed[0], plain[0]), (chosen(compressed[1], state[0]), chosen(state[1], plain[1]))

    def num_bytes(self, params, num_workers, phase=None):
        sent = super().num_bytes(params, num_workers, phase), self.other.num_bytes(params, num_workers)
        return (self.count * sent[0] + (self.num_stages - self.count) * sent[1]) / self.num_stages


@options.checked
def every(reducer: Reducer, period: Count) -> Reducer:
    """Return the reducer that averages in steps H−1, 2H−1, … only, for a period H; in others (phase `SILENT`) it returns its input."""
    return _Every(reducer.channel, reducer=reducer, period=period) if period > 1 else reducer


class _Every(WrappedReducer):
    _: dataclasses.KW_ONLY
    period: int

    def reduce(self, grads, state, phase=None):
        return (grads, state) if phase == SILENT else super().reduce(grads, state, phase)

    def num_bytes(self, params, num_workers, phase=None):
        # Called for silent steps too, since it raises an error for what does not fit.
        return (phase != SILENT) * super().num_bytes(params, num_workers, None if phase == SILENT else phase)

    def phase(self, step):
        return SILENT if (step + 1) % self.period else self.reducer.phase(step // self.period)

    @property
    def phases(self):
        return range(SILENT, self.reducer.phases.stop)

    @property
    def usage(self):
        counts = self.reducer.usage
        return counts and (lambda state: jnp.pad(counts(state), (1, 0)))  # Silent steps are not counted.

    def _number(self, number):
        return None if (number + 1) % self.period else number // self.period
