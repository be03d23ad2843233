"""Trainings of an experiment: made once each, two at a time, and read from their directories; rates that are tuned; means over seeds.

What is finished is not made again, so an interrupted experiment goes on where it was.
"""

from collections.abc import Callable, Iterable, Sequence
import concurrent.futures
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

from launch import command

FACTOR, MOST_RATES = 2.0, 8  # between neighbouring rates; of a grid
TOGETHER = 2  # trainings at a time


class Trial(NamedTuple):
    """A run of `launch.train`."""

    workdir: pathlib.Path
    config: str  # config file with its shorthand
    fields: tuple[tuple[str, Any], ...] = ()  # of the config, dotted, and their values

    @property
    def arguments(self) -> list[str]:
        """Of `launch.train`."""
        return [f"--config={self.config}", f"--workdir={self.workdir}", *(f"--config.{key}={value}" for key, value in self.fields)]

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.workdir / "summary.json").exists()

    def summary(self) -> dict[str, Any]:
        """What the run came to."""
        return json.loads((self.workdir / "summary.json").read_text())

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The rows of the run's metrics that are of a kind, "train" or "eval"."""
        lines = (self.workdir / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]


class Broken(Exception):
    """A training that did not end as one does."""


def train(trial: Trial) -> bool:
    """Makes a run unless it is finished; returns whether it came to its end: False if it diverged.

    Raises:
        Broken: if it ended in any other way.
    """
    if trial.finished:
        return True
    environment = os.environ | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}  # Several share the cores.
    line = [sys.executable, "-m", "launch.train", *trial.arguments]
    process = subprocess.run(line, stdout=subprocess.DEVNULL, env=environment, check=False)
    if process.returncode not in (0, command.USER_ERROR):  # The latter is also that of a run that diverged.
        raise Broken(f"the run in {trial.workdir} ended with exit code {process.returncode}; the same command continues")
    return trial.finished


def together(do: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """`do(item)` of every item, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(do, items))


def train_all(trials: Iterable[Trial]) -> list[bool]:
    """Makes all runs, two at a time; of each, whether it came to its end."""
    return together(train, trials)


def name_of(text: str) -> str:
    """A text as a folder's name."""
    return "_".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


# -- Rates ------------------------------------------------------------------------------------------------------------


def best_rate(measure: Callable[[float], float], grid: Sequence[float]) -> tuple[float, dict[float, float]]:
    """The learning rate with the least loss, and all that were tried; a grid of several whose best is at its edge is extended."""
    losses = {rate: measure(rate) for rate in grid}
    while True:
        best = min(losses, key=lambda rate: losses[rate])
        further = best * FACTOR if best == max(losses) else best / FACTOR if best == min(losses) else None
        if further is None or len(grid) == 1 or len(losses) >= MOST_RATES:
            return best, losses
        losses[further] = measure(further)


# -- Seeds ------------------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """The mean over seeds, and σ, the standard deviation of one seed's value."""

    mean: float
    sigma: float
    count: int

    @property
    def error(self) -> float:
        """2σ of the mean: the half of its interval; nan for a single seed."""
        return 2 * self.sigma / math.sqrt(self.count)

    def text(self, digits: int) -> str:
        """As "27.71 ± 0.09", the mean and 2σ of one seed's value; the mean alone of a single seed."""
        return f"{self.mean:.{digits}f}" + (f" ± {2 * self.sigma:.{digits}f}" if self.count > 1 else "")


def spread(values: Sequence[float]) -> Spread:
    """Of one value for each seed."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values))


def equal(one: Spread, other: Spread) -> bool:
    """Whether intervals of ± 2σ of the mean overlap, and the means differ by less than one σ, the larger of the two."""
    apart = abs(one.mean - other.mean)
    return apart <= one.error + other.error and apart < max(one.sigma, other.sigma)
