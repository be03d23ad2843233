"""Seconds of steps, for a reducer whose state decides by the speed of training."""

import collections
from collections.abc import Callable
import functools
import time

import jax
import numpy as np

from decjax import mesh
from decjax.reduce.reducer import StepNumber
from decjax.typing import PyTree

clock = time.perf_counter


class Pace:
    """Measures steps in this process and passes their seconds to a reducer's state, between steps: a compiled step has no clock.

    A step in flight is not waited for: after step k has been dispatched, the clock is read when step k − 1 is complete. Only at the end
    of a window the step itself must be complete. The median is passed on, so that single steps during a compilation, an evaluation or
    a checkpoint do not count.

    Args:
        observe: `observe(state, step_s) -> state`, on each worker, with the seconds of a step in the last window as this worker's
            process measured them; NaN if it could not.
        window: number of averages in a window; the first of them is not measured.
        workers: the workers.
        number: maps a step to the reducer's own step, or None if it does not average in it.
    """

    def __init__(self, observe: Callable[[PyTree, jax.Array], PyTree], window: int, workers: mesh.Workers, number: StepNumber):
        self._observe, self._window, self._workers, self._number = observe, window, workers, number
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
        self._last = None  # What comes until the end of the next step, the first of its window, does not count.
        return self._told(state, self._step_s())

    def _step_s(self) -> float:
        steps, ends_s = zip(*self._ends)
        return float(np.median(np.diff(ends_s)) / (steps[-1] - steps[-2])) if len(steps) > 1 else np.nan

    def _ended(self, step: int, loss_N: jax.Array) -> None:
        loss_N.block_until_ready()
        if self._number(step) is not None:
            self._ends.append((step, clock()))

    def _told(self, state: PyTree, step_s: float) -> PyTree:
        return self._program(state, self._workers.build(lambda worker: np.float32(step_s)))

    @functools.cached_property
    def _program(self) -> Callable[[PyTree, jax.Array], PyTree]:
        return self._workers.jit(self._observe, (0, 0), donate_argnums=(0,))
