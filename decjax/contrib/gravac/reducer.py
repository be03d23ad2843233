"""GraVAC: compression that gets stronger as long as it pays, by speeds that are given, or measured during training."""

import collections
from collections.abc import Callable, Sequence
import functools
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, codecs, mesh, registry
from decjax.codecs.feedback import Feedback, Memory, contractive, residual
from decjax.options import Count, Fraction, NonNegative
from decjax.reduce import Reducer, messages
from decjax.reduce.reducer import StepNumber
from decjax.typing import PyTree

MEASURED = "measured"
clock = time.perf_counter


class Pace:
    """Measures the seconds of steps in this process and passes them to a reducer's state between steps.

    It does not wait for a step in flight: after step k has been dispatched, the clock is read when step k − 1 is complete. Only at the
    end of a window must the step itself be complete. The median is passed on, so that single steps during a compilation, an evaluation
    or a checkpoint do not count.

    Args:
        observe: `observe(state, step_s) -> state`, on each worker, with the seconds of a step in the last window as this worker's
            process measured them; NaN if it could not.
        window: number of averages in a window; the first of them is not measured.
        workers: the workers.
        number: maps a step to the reducer's own step, or None if it does not average in it.
    """

    def __init__(self, observe: Callable[[PyTree, jax.Array], PyTree], window: int, workers: mesh.Workers, number: StepNumber):
        self._window, self._workers, self._number = window, workers, number
        self._observe = workers.jit(observe, (0, 0), donate_argnums=(0,))
        self._last: tuple[int, jax.Array] | None = None  # number and loss of the step in flight
        self._ends: collections.deque[tuple[int, float]] = collections.deque(maxlen=window)  # (step, when it ended) of a window's

    def after(self, state: PyTree, loss_N: jax.Array, step: int) -> PyTree:
        """Return the state after step `step`, which has been dispatched."""
        if self._last and self._last[0] == step - 1:
            self._ended(*self._last)
        else:
            self._ends.clear()
        self._last = step, loss_N
        number = self._number(step)
        if number is None or (number + 1) % self._window:
            return state
        self._ended(step, loss_N)
        self._last = None  # The time until the end of the next step, the first of its window, does not count.
        steps, ends_s = zip(*self._ends)
        return self._pass_on(state, float(np.median(np.diff(ends_s)) / (steps[-1] - steps[-2])) if len(steps) > 1 else np.nan)

    def _ended(self, step: int, loss_N: jax.Array) -> None:
        loss_N.block_until_ready()
        if self._number(step) is not None:
            self._ends.append((step, clock()))

    def _pass_on(self, state: PyTree, step_s: float) -> PyTree:
        return self._observe(state, self._workers.build(lambda worker: np.float32(step_s)))


class GravacState(NamedTuple):
    """State of `Gravac`; all fields except the errors and the codecs' states are the same on all workers.

    Attributes:
        error: [N, …], what this worker's own messages lost.
        owner_error: […], what the messages of the shard that this worker owns lost.
        codec: states of each rung's codec, for the worker's and for the owner's messages.
        step: int32 scalar, steps so far.
        usage: int32 [rungs], steps so far on each rung; rung 0 has no codec.
        rung: int32 scalar, the rung in use.
        settled: bool scalar, whether it has stopped climbing.
        energy_sent: Σ E‖C(x)‖² since the window began.
        energy: Σ E‖x‖² since the window began.
        score: (steps per second) · gain of the rung below.
        rate: with measured speed, float [rungs], steps per second when each was last measured, 0 before; otherwise ().
    """

    error: tuple[jax.Array, ...]
    owner_error: tuple[jax.Array, ...]
    codec: tuple[tuple[PyTree, ...], ...]
    step: jax.Array
    usage: jax.Array
    rung: jax.Array
    settled: jax.Array
    energy_sent: jax.Array
    energy: jax.Array
    score: jax.Array
    rate: PyTree = ()


class Gravac(Reducer, name="gravac"):
    """GraVAC: the average of gradients, compressed by the strongest of several codecs that pays.

    Rung 0 of a ladder has no codec; the others have ever stronger codecs C. With x = g + e what a worker sends,
    gain = Σ E‖C(x)‖² / Σ E‖x‖² is the fraction of the energy that arrives, over a window of steps. After each window: if the gain is
    below the threshold, one rung down, for good. Else, if speed · gain has grown by more than `improvement` since the rung below, one
    rung up; and if it has not, one rung down, for good. Errors are remembered across rungs, and sent out on rung 0. Messages are
    averaged shard by shard, see `decjax.reduce.messages`.

    All rungs are branches of one program. They are the reducer's phases, on which its state decides: `usage(state)` counts the
    steps of each. `init` must be called inside a function that is mapped over workers. `num_bytes` raises ValueError for a rung that does
    not send less than the one below.

    With speed "measured", as in the paper, a rung is judged by `observe(state, step_s)` instead of by the step that ends its window:
    `Pace` calls it between two steps, with the median seconds of the window's steps except the first. A compiled step has no clock, and
    a callback from it would make devices wait in every step; this waits once in a window. Seconds are averaged over workers (4 bytes
    each, not among the declared ones), so that all make the same decision. A window in which some worker has no seconds, as after a
    restart in its last step, is prolonged by another one. Clocks differ from run to run, and so do the steps at which such a run climbs:
    it cannot be repeated bit for bit. A continued run keeps its rung, score and measured speeds.

    Attributes:
        channel: how gradients travel.
        ladder: codecs from the mildest to the strongest, or a text of their names divided by semicolons.
        window: steps on a rung before it is judged; with measured speed at least 2.
        threshold: ε, the least gain.
        improvement: ω, relative.
        speed: steps per second on each rung, "measured", or a sequence or a text such as "1; 1.8; 3", from rung 0 on, relative to one
            another; `decjax.costmodel` predicts them. Empty: 1 ÷ bytes, as if communication took all the time.

    Reference: Tyagi and Swany 2023, arXiv 2305.12201.
    """

    adaptive = True
    warm_steps = "window"
    needs = "ladder of codecs"
    messages = "compressed gradients"
    memory = "1 copy and 1/N"

    ladder: str | Sequence[codecs.Codec] = "bfloat16; int8; int4"
    window: Count = 50
    threshold: Fraction = 0.5
    improvement: NonNegative = 0.0
    speed: str | Sequence[float] = ""

    def __post_init__(self):
        for codec in self._rungs:
            messages.check(codec)
        if not self._rungs:
            raise ValueError(f"{self}: ladder={self.ladder!r} needs at least one codec, from the mildest to the strongest")
        if self._measured and self.window < 2:
            raise ValueError(f"{self}: window={self.window} must be at least 2 with speed={MEASURED!r}, which skips the first step")
        speeds, count = self._speeds, len(self._rungs) + 1
        if speeds and not (len(speeds) == count and all(0 < speed < math.inf for speed in speeds)):
            raise ValueError(
                f"{self}: speed={registry.shown(self.speed)} needs {count} positive values, one without a codec and one for each, as "
                f"{'; '.join(map(str, range(1, count + 1)))!r}; or {MEASURED!r}, or none"
            )
        _ = self._ends  # Raises an error for codecs that are neither contractive nor unbiased.

    @functools.cached_property
    def _rungs(self) -> tuple[codecs.Codec, ...]:
        return tuple(registry.make("codec", rung) for rung in _listed(self.ladder))

    @functools.cached_property
    def _ends(self) -> tuple[Feedback, ...]:
        """The codecs with memories."""
        return tuple(residual(codecs.of_any_shape(contractive(codec))) for codec in self._rungs)

    @property
    def _measured(self) -> bool:
        return self.speed == MEASURED

    @functools.cached_property
    def _speeds(self) -> tuple[float, ...]:
        """The given speeds; () for 1 ÷ bytes, and where they are measured."""
        try:
            return () if self._measured else tuple(map(float, _listed(self.speed)))
        except (TypeError, ValueError):
            return (math.nan,)

    @property
    def phases(self):
        return range(len(self._rungs) + 1)

    def phase(self, step):
        return None

    @property
    def usage(self):
        return lambda state: state.usage

    @property
    def between_steps(self):
        return (lambda workers, number: Pace(self.observe, self.window, workers, number).after) if self._measured else None

    def _layout(self, tree: PyTree, num_workers: int | None = None) -> buckets.Layout:
        return messages.layout(self.channel, self._rungs, tree, num_workers or self.channel.axis.size)

    def init(self, params):
        layout = self._layout(params)
        rungs = [_taken_apart(messages.worker_side(end, layout), messages.owner_side(end, layout)) for end in self._ends]
        error, owner_error = rungs[0][0]
        zero, none = jnp.zeros((), jnp.result_type(jnp.float32, *error)), jnp.zeros((), jnp.int32)
        usage, settled = jnp.zeros(len(self._rungs) + 1, jnp.int32), jnp.zeros((), bool)
        rate = jnp.zeros(len(self._rungs) + 1, zero.dtype) if self._measured else ()
        codec = tuple(states for _, states in rungs)
        return GravacState(error, owner_error, codec, none, usage, none, settled, zero, zero, zero, rate)

    def _without_codec(self, arrays: list[jax.Array], state: GravacState):
        """Return for rung 0: (means, errors of workers, errors of owners, codecs' states, (E‖C(x)‖², E‖x‖²))."""
        axis, num_workers = self.channel.axis, self.channel.axis.size
        targets = [e + x for e, x in zip(state.error, arrays)]
        energy = _energy(targets, state)
        targets = [x.at[axis.index].add(num_workers * e) for x, e in zip(targets, state.owner_error)]
        joint = axis.mean(jnp.concatenate([energy[None], *(x.ravel().astype(energy.dtype) for x in targets)]))
        ends = np.cumsum([1, *(x.size for x in targets)])
        means = [joint[start:end].reshape(x.shape).astype(x.dtype) for start, end, x in zip(ends, ends[1:], targets)]
        error, owner_error = (jax.tree.map(jnp.zeros_like, x) for x in (state.error, state.owner_error))
        return means, error, owner_error, state.codec, jnp.stack([joint[0], joint[0]])

    def _with_codec(self, k: int, arrays: list[jax.Array], state: GravacState):
        """Return the results of rung k + 1, as `_without_codec` does."""
        worker, owner = (
            messages.Side(tuple(Memory(own, e, ()) for own, e in zip(states, errors)), ((),) * len(arrays))
            for states, errors in zip(state.codec[k], (state.error, state.owner_error))
        )
        energy = _energy([e + x for e, x in zip(state.error, arrays)], state)

        def energies(own):
            return jnp.stack([_energy(own, state), energy])

        key = self.channel.key(state.step)
        means, worker, owner, sent_Nx2 = messages.sharded(self._ends[k], arrays, worker, owner, key, energies, self.channel.axis)
        errors, states = _taken_apart(worker, owner)
        return means, *errors, (*state.codec[:k], states, *state.codec[k + 1 :]), sent_Nx2.mean(axis=0)

    def reduce(self, grads, state: GravacState, phase=None):
        layout = self._layout(grads)
        branches = [self._without_codec, *(functools.partial(self._with_codec, k) for k in range(len(self._rungs)))]
        arrays = layout.pack(grads, wide=True)
        means, error, owner_error, states, (sent, full) = jax.lax.switch(state.rung, branches, arrays, state)
        usage = state.usage.at[state.rung].add(1)
        new = state._replace(error=error, owner_error=owner_error, codec=states, usage=usage)
        new = new._replace(energy_sent=state.energy_sent + sent, energy=state.energy + full)
        if not self._measured:
            rates = self._speeds or [1 / max(1, each) for each in self._sent_bytes(grads, self.channel.axis.size)]
            judged = self._judged(new, jnp.asarray(np.divide(rates, max(rates)), new.score.dtype)[new.rung])
            over = usage.sum() % self.window == 0
            new = jax.tree.map(lambda judged, new: jnp.where(over, judged, new), judged, new)
        finite = jnp.isfinite(sent) & jnp.isfinite(full) & codecs.finite(means)  # The same on all workers.
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
        new = new._replace(step=state.step + 1, usage=usage)  # A step that is not finite has been sent too.
        return layout.unpack([jnp.where(finite, x, jnp.nan) for x in means], grads), new

    def observe(self, state: GravacState, step_s: jax.Array) -> GravacState:
        """Return the state with the rung of the next step, from this worker's seconds of a step, NaN if unknown. It has a collective."""
        mean_s = self.channel.axis.mean(jnp.asarray(step_s, state.score.dtype))
        is_known = jnp.isfinite(mean_s) & (mean_s > 0)  # The same on all workers.
        rate = 1 / jnp.where(is_known, mean_s, 1)
        judged = self._judged(state._replace(rate=state.rate.at[state.rung].set(rate)), rate)
        return jax.tree.map(lambda new, old: jnp.where(is_known, new, old), judged, state)

    def _judged(self, state: GravacState, rate: jax.Array) -> GravacState:
        """Return the state at the end of a window, with the rung of the next one; `rate`: speed on this rung."""
        gain = jnp.where(state.energy > 0, state.energy_sent / jnp.where(state.energy > 0, state.energy, 1), 1)
        score = rate * gain
        drops = (gain < self.threshold) & (state.rung > 0)
        stalls = ~state.settled & (state.rung > 0) & (score <= (1 + self.improvement) * state.score)
        climbs = ~(drops | stalls | state.settled) & (state.rung < len(self._rungs))
        return state._replace(
            rung=state.rung + jnp.where(drops | stalls, -1, jnp.where(climbs, 1, 0)),
            settled=state.settled | ~climbs,
            score=score,
            energy=jnp.zeros_like(state.energy),
            energy_sent=jnp.zeros_like(state.energy),
        )

    def _sent_bytes(self, params: PyTree, num_workers: int) -> list[float]:
        """Return the bytes of a step on each rung."""
        layout = self._layout(params, num_workers)
        itemsize = jnp.result_type(jnp.float32, *(x.dtype for x in layout.parts())).itemsize
        values = num_workers * sum(math.prod(x.shape) for x in layout.parts())
        dense = mesh.mean_bytes(1 + values, np.dtype(f"float{8 * itemsize}"), num_workers)
        return [dense, *(messages.num_bytes(end.codec, layout, num_workers, 2 * itemsize) for end in self._ends)]

    def num_bytes(self, params, num_workers, phase=None):
        sent = self._sent_bytes(params, num_workers)
        for below, above, codec in zip(sent, sent[1:], self._rungs):
            if num_workers > 1 and above >= below:
                raise ValueError(
                    f"{self}: rung {codec.name!r} sends {above:.0f} bytes a step, and the one below it {below:.0f}; "
                    "use a ladder from the mildest codec to the strongest, as 'bfloat16; int8; int4'"
                )
        return np.zeros(num_workers) if phase is None else np.full(num_workers, sent[phase])  # Only the state knows.


def _taken_apart(*sides: messages.Side) -> tuple[tuple, tuple]:
    """Return the errors of each side, and the codec states of each side."""
    errors = tuple(tuple(memory.error for memory in side.memory) for side in sides)
    states = tuple(tuple(memory.codec for memory in side.memory) for side in sides)
    return errors, states


def _energy(arrays: list[jax.Array], state: GravacState) -> jax.Array:
    return sum((jnp.sum(x**2) for x in arrays), jnp.zeros(())).astype(state.energy.dtype)


def _listed(entries: str | Sequence) -> Sequence:
    """Return the entries of a text divided by semicolons; a sequence is returned unchanged."""
    return [text.strip() for text in entries.split(";") if text.strip()] if isinstance(entries, str) else entries
