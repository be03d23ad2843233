"""Which device does what: layouts whose messages take little time, by three searches and, for few devices, by trying all.

    genetic        a population of layouts; two make a third, which a local search improves; it replaces the worst if it is better
                   (arXiv 2206.01288, section 3.5: a genetic algorithm with cyclic local search, after Kang and Moon's graph partitions)
    anneal         one layout, from which worse ones are accepted with a probability that falls (Kirkpatrick et al. 1983)
    best_of_all    every layout of at most ten devices
    random_layout  what the others are compared with

A *cyclic exchange* takes one device of each of k groups and moves each to the next group; where positions matter, of each of k
positions. Where only groups matter (`Network.free`), rows and columns are put in their best order at the end.
"""

from collections.abc import Iterator
import itertools
import math
import time
from typing import Annotated, NamedTuple

import numpy as np

from decjax.contrib.placement.cost import Network
from decjax.options import Range, check

MAX_ALL = 10  # devices
POPULATION, LONGEST_CYCLE = 16, 3
COOLEST = 1e-3  # the last temperature of annealing, as a part of the first


class Placed(NamedTuple):
    """The result of a search."""

    layout: np.ndarray  # devices, [S, W]
    seconds: float  # of an iteration's messages
    tried: int  # layouts whose cost was computed


class _Search:
    """Counts layouts, and ends after a number of them or seconds, or with the first if all cost the same."""

    def __init__(self, network: Network, trials: int, seconds: float):
        self.network, self.tried = network, 0
        self._trials, self._ends = trials, time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return bool(self.tried) and (self.network.fixed or self.tried >= self._trials or time.monotonic() > self._ends)

    def cost(self, layout: np.ndarray, limit: float = math.inf) -> float:
        self.tried += 1
        return self.network.seconds(layout, limit)

    def result(self, layout: np.ndarray) -> Placed:
        layout = self.network.ordered(layout)
        return Placed(layout, self.network.seconds(layout), self.tried)


def random_layout(network: Network, rng: np.random.Generator) -> np.ndarray:
    """Return a random layout, [S, W]."""
    S, W = network.job.stages, network.job.workers
    return rng.permutation(S * W).reshape(S, W)


def exchange(layout: np.ndarray, network: Network, rng: np.random.Generator) -> np.ndarray:
    """Return the layout after a random cyclic exchange."""
    S, W = layout.shape
    apart = S if network.free else S * W  # between how many groups, or positions, devices move
    k = int(rng.integers(2, min(LONGEST_CYCLE, apart) + 1)) if apart > 1 else 0
    groups = rng.choice(apart, k, replace=False)
    places = groups * W + rng.integers(W, size=k) if network.free else groups
    flat = layout.ravel().copy()
    flat[np.roll(places, 1)] = flat[places]
    return flat.reshape(S, W)


def gathered(network: Network, rng: np.random.Generator) -> np.ndarray:
    """Return groups of devices that are near to each other: around a device at random, those to which messages take least."""
    S, W = network.job.stages, network.job.workers
    near_s = network.shard_s + rng.uniform(0, 1e-9, network.shard_s.shape)  # Equals in any order.
    taken_N, rows = np.zeros(S * W, bool), []
    for _ in range(S):
        row = [int(rng.choice(np.flatnonzero(~taken_N)))]
        taken_N[row] = True
        farthest_N = near_s[row[0]]  # Seconds to each device from that of the row that is farthest from it.
        while len(row) < W:
            row.append(int(np.where(taken_N, np.inf, farthest_N).argmin()))
            taken_N[row[-1]] = True
            farthest_N = np.maximum(farthest_N, near_s[row[-1]])
        rows.append(row)
    return np.array(rows)


# -- Searches ---------------------------------------------------------------------------------------------------------


def genetic(network: Network, seed: int = 0, trials: int = 2000, seconds: float = 60.0) -> Placed:
    """Return the best layout of a population after so many trials, or so many seconds."""
    rng, search = np.random.default_rng(seed), _Search(network, trials, seconds)
    starts = (random_layout, gathered)
    people, costs = [], []
    while len(people) < POPULATION and not search.over:
        people.append(starts[len(people) % 2](network, rng))
        costs.append(search.cost(people[-1]))
    while not search.over:
        one, other = rng.choice(POPULATION, 2, replace=False)
        child = cross(people[one], people[other], rng)
        child, cost = descend(search, child, rng, patience=8 * network.job.stages + 8)
        worst = int(np.argmax(costs))
        if cost < costs[worst] and not any(cost == had for had in costs):
            people[worst], costs[worst] = child, cost
    return search.result(people[int(np.argmin(costs))])


def cross(one: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a layout with about half of the rows of one parent, and the other devices where the other parent has them, if possible."""
    S, W = one.shape
    child = np.full((S, W), -1)
    kept = rng.permutation(S)[: max(1, S // 2)] if S > 1 else ()
    for row in kept:
        child[row] = one[row]
    if S == 1:
        cut = np.sort(rng.choice(W + 1, 2, replace=False))
        child[0, cut[0] : cut[1]] = one[0, cut[0] : cut[1]]
    missing = set(range(S * W)) - set(child[child >= 0].tolist())
    for place in np.argwhere(child < 0):
        if (device := int(other[tuple(place)])) in missing:
            child[tuple(place)] = device
            missing.remove(device)
    child[child < 0] = rng.permutation(sorted(missing))
    return child


def descend(search: _Search, layout: np.ndarray, rng: np.random.Generator, patience: int) -> tuple[np.ndarray, float]:
    """Apply cyclic exchanges that are no worse, until `patience` of them in a row were."""
    cost, idle = search.cost(layout), 0
    while idle < patience and not search.over:
        tried = exchange(layout, search.network, rng)
        new = search.cost(tried, limit=cost)
        idle = 0 if new < cost else idle + 1
        if new <= cost:
            layout, cost = tried, new
    return layout, cost


def anneal(network: Network, seed: int = 0, trials: int = 2000, seconds: float = 60.0) -> Placed:
    """Return the best layout met while a temperature falls geometrically to a thousandth over the trials, or over the seconds."""
    rng, search = np.random.default_rng(seed), _Search(network, trials, seconds)
    layout = random_layout(network, rng) if network.fixed else gathered(network, rng)
    cost, begun = search.cost(layout), time.monotonic()
    best, least = layout, cost
    while not search.over:
        passed = max(search.tried / trials, (time.monotonic() - begun) / seconds)
        temperature = 0.1 * least * COOLEST**passed
        limit = cost + temperature * rng.exponential()  # Metropolis: what a draw accepts.
        tried = exchange(layout, network, rng)
        new = search.cost(tried, limit)
        if new <= limit:
            layout, cost = tried, new
        if cost < least:
            best, least = layout, cost
    return search.result(best)


def best_of_all(network: Network) -> Placed:
    """Return the best of all layouts.

    Raises:
        ValueError: for more than ten devices.
    """
    N, (S, W) = network.job.num_devices, (network.job.stages, network.job.workers)
    check("the number of devices", N, Annotated[int, Range(1, MAX_ALL)])  # More have too many layouts.
    search = _Search(network, 2**62, math.inf)
    layouts = _partitions(list(range(N)), W) if network.free else map(list, itertools.permutations(range(N)))
    arrays: Iterator[np.ndarray] = (np.array(layout).reshape(S, W) for layout in layouts)
    return search.result(min(arrays, key=search.cost))


def _partitions(devices: list[int], size: int) -> Iterator[list[int]]:
    """Yield all divisions into groups of a size, one after the other in a list; the order of groups does not count."""
    if not devices:
        yield []
        return
    for others in itertools.combinations(devices[1:], size - 1):
        rest = [device for device in devices[1:] if device not in others]
        for further in _partitions(rest, size):
            yield [devices[0], *others, *further]
