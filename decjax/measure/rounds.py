"""Timing of actions that all workers start together, in rounds, in an order that rotates."""

from collections.abc import Callable, Sequence
import time
from typing import Any

import jax
import numpy as np

from decjax import mesh
from decjax.typing import PyTree

ROUNDS = (3, 400)  # fewest and most
STEPS = (5, 20)  # fewest and most gradients in a round, twice: begun together, and in a row; they get about two thirds of the time

Actions = dict[Any, Callable[[], PyTree]]  # what is timed -> a function that dispatches it, and whose result is waited for


class Stopwatch:
    """A stopwatch for actions that all workers start together."""

    def __init__(self, workers: mesh.Workers):
        self._workers = workers
        self._token = workers.build(lambda worker: np.float32(0))
        self._meet = workers.jit(workers.axis.mean, (0,))
        self.meet()  # CPU processes must connect within half a minute, so before one of them compiles for longer.

    def meet(self) -> None:
        """Wait until all workers have called it."""
        jax.block_until_ready(self._meet(self._token))

    def time(self, action: Callable[[], PyTree], repeats: int = 1, in_a_row: bool = False) -> list[float]:
        """Return the seconds of each repeat in this process, from dispatch to completion.

        All workers start each repeat together, or only the first if `in_a_row`.
        """
        times_s = []
        for index in range(repeats):
            if not (in_a_row and index):
                self.meet()
            begun = time.perf_counter()
            jax.block_until_ready(action())
            times_s.append(time.perf_counter() - begun)
        return times_s

    def gather(self, times_s: Sequence[float]) -> np.ndarray:
        """Return the R times of each process, for every worker: [N, R]. A collective."""
        local = np.asarray(times_s, np.float32)
        return self._workers.fetch(self._workers.build(lambda worker: local)).astype(float)


def take_rounds(
    watch: Stopwatch, actions: Actions, seconds: float, rounds: int | None, note: Callable[[int, int], None]
) -> dict[Any, np.ndarray]:
    """Return the seconds of every action, [N, R], timed in R rounds, and of gradients in a row, "in a row", [N, R · steps of a row].

    Args:
        watch: a stopwatch of the workers.
        actions: what is timed; "gradient" is repeated within a round.
        seconds: about how long to measure.
        rounds: how many rounds; None: as many as fit in `seconds`.
        note: called with (rounds done, rounds to do) after each round.
    """
    for action in actions.values():
        watch.time(action)  # The first call compiles.
    # All processes must choose the same numbers, so they use the slowest worker's times.
    slowest_s = watch.gather([watch.time(action)[0] for action in actions.values()]).max(axis=0)
    round_s, gradient_s = slowest_s.sum(), slowest_s[list(actions).index("gradient")]
    steps = int(np.clip(round_s / gradient_s - 1, *STEPS))
    rounds = rounds or int(np.clip(seconds / (round_s + (2 * steps - 1) * gradient_s), *ROUNDS))
    times_s = {name: [] for name in (*actions, "in a row")}
    for done in range(rounds):
        names = list(actions)
        for name in names[done % len(names) :] + names[: done % len(names)]:  # Another one first in each round.
            times_s[name] += watch.time(actions[name], steps if name == "gradient" else 1)
            if name == "gradient":
                times_s["in a row"] += watch.time(actions[name], steps, in_a_row=True)
        note(done + 1, rounds)
    return {name: watch.gather(times) for name, times in times_s.items()}
