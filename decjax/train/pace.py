"""Seconds of steps, for methods whose state decides by the speed of training (`optim.Method.timing`).

    pace = Pace(method, workers)
    state, loss_N = program.run(state, batch, step)
    state = pace.after(state, loss_N, step)

A step in flight is not waited for: after step k has been dispatched, the clock is read when step k − 1 is complete. Only where the
state is about to be told is the step itself complete first. What is told is the median, so that single steps beside a compilation, an
evaluation or a checkpoint do not count.
"""

import collections
from collections.abc import Callable
import functools
import time

import jax
import numpy as np

from decjax import mesh
from decjax.optim.method import Method
from decjax.train.state import State


class Pace:
    """Measures steps in this process, and tells the state of a method about them.

    Args:
        method: one with a `timing`. Where it exchanges in every H-th step only, each H steps in a row count as one.
        workers: the workers.
        clock: seconds now.
    """

    def __init__(self, method: Method, workers: mesh.Workers, clock: Callable[[], float] = time.perf_counter):
        assert method.timing
        self._timing, self._every, self._workers, self.clock = method.timing, method.every, workers, clock
        self._last: tuple[int, jax.Array] | None = None  # number and loss of the step in flight
        self._ends_s: collections.deque = collections.deque(maxlen=self._timing.window)  # when the window's steps ended

    def after(self, state: State, loss_N: jax.Array, step: int) -> State:
        """The state after step `step`, which has been dispatched, with what it has been told if that is due."""
        if self._last and self._last[0] == step - 1:
            self._ended(*self._last)
        else:
            self._ends_s.clear()
        self._last = step, loss_N
        if not self._timing.due(step):
            return state
        self._ended(step, loss_N)
        between_s = np.diff(self._ends_s)
        self._last = None  # What comes until the end of the next step, the first of its window, does not count.
        step_s = np.float32(np.median(between_s) / self._every if len(between_s) else np.nan)
        told = self._observe(state.opt_state, self._workers.build(lambda worker: step_s))
        return state._replace(opt_state=told)

    def _ended(self, step: int, loss_N: jax.Array) -> None:
        loss_N.block_until_ready()
        if (step + 1) % self._every == 0:
            self._ends_s.append(self.clock())

    @functools.cached_property
    def _observe(self) -> Callable:
        return self._workers.jit(self._timing.observe, (0, 0), donate_argnums=(0,))
