"""Statistics of several runs: the best learning rate, means over seeds, and whether two of them differ."""

from collections.abc import Callable, Sequence
import math
import statistics
from typing import NamedTuple

from experiments.trials import Trial

FACTOR, MOST_RATES = 2.0, 8  # ratio of neighboring rates; maximum size of a grid
_ROUNDING = 1e-9  # Intervals that touch, such as those of counts, overlap whatever their last bits are.


def best_rate(measure: Callable[[float], float], grid: Sequence[float]) -> tuple[float, dict[float, float]]:
    """Return the learning rate with the smallest loss, and the losses of all rates.

    A grid of several rates is extended while the best is at its edge. Runs that diverge have an infinite loss; if all do, smaller
    rates are tried.
    """
    losses = {rate: measure(rate) for rate in grid}
    while True:
        best = min(losses, key=lambda rate: (losses[rate], rate))
        further = best * FACTOR if best == max(losses) else best / FACTOR if best == min(losses) else None
        if further is None or len(grid) == 1 or len(losses) >= MOST_RATES:
            return best, losses
        losses[further] = measure(further)


class Spread(NamedTuple):
    """The mean over seeds, and σ, the standard deviation of one seed's value."""

    mean: float
    sigma: float
    size: int  # number of seeds

    @property
    def error(self) -> float:
        """Return 2σ of the mean, the half of its interval; nan for a single seed."""
        return 2 * self.sigma / math.sqrt(self.size)

    def text(self, digits: int) -> str:
        """Return a text such as "27.71 ± 0.09", the mean and 2σ of one seed's value; for a single seed the mean alone."""
        return f"{self.mean:.{digits}f}" + (f" ± {2 * self.sigma:.{digits}f}" if self.size > 1 else "")


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of one value for each seed; all nan if one is."""
    if any(map(math.isnan, values)):
        return Spread(math.nan, math.nan, len(values))
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values))


def text(runs: Sequence[Trial], name: str, digits: int, scale: float = 1.0) -> str:
    """Return the spread of an entry of the runs' summaries as text; "diverged" if there are no runs."""
    return spread([scale * run.summary()[name] for run in runs]).text(digits) if runs else "diverged"


def apart(one: Spread, other: Spread) -> bool:
    """Whether the intervals of ± 2σ of both means do not overlap; False for a single seed, which has none."""
    return abs(one.mean - other.mean) - (one.error + other.error) > _ROUNDING * abs(one.mean)


def equal(one: Spread, other: Spread) -> bool:
    """Whether these intervals overlap, and the means differ by at most one σ, the root of the mean variance."""
    difference, sigma = abs(one.mean - other.mean), math.sqrt((one.sigma**2 + other.sigma**2) / 2)
    return not apart(one, other) and difference <= sigma
