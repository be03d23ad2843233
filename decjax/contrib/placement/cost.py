"""The seconds of an iteration's messages, for devices that are laid out as stages × workers on a network.

A *layout* is an array of devices, [S, W]: row s computes stage s, and column w is worker w, a pipeline of S devices. Messages are

    all-reduce    each device of a row owns 1/W of its stage's parameters and exchanges with every other of the row, one after the
                  other: row s takes max_i Σ_j (α_ij + α_ji + (b/W)(1/β_ij + 1/β_ji)), and rows do so at the same time
    gossip        in each round groups of L workers average as above, if L > 1; then a device sends b/L to its neighbors, one after
                  the other: max_i Σ_j (α_ij + b/(L β_ij)). The mean over a period of rounds
    pipeline      Σ_s max_w (α + a/β) of the link from stage s to s + 1, forward, and of the link back

With all-reduce nothing depends on which column a device stands in, but for the links between rows. So the best order of rows and
columns is found exactly for given groups: two groups are joined by the matching whose slowest link is the fastest, and rows follow the
shortest path through all groups. This is the cost of arXiv 2206.01288, sections 3.2 to 3.4, whose links are the same both ways.
"""

import bisect
import dataclasses
import functools
from typing import Annotated

import numpy as np
from scipy import optimize, sparse

from decjax.contrib.placement.links import MAX_DEVICES, Links
from decjax.costmodel.profile import Amount, exactly
from decjax.options import Range, check, checked_class
from decjax.topology import Round, Topology

MAX_STAGES = 16  # The shortest path takes S²·2^S operations.
TILE = 128  # rows and columns that a processor's cache holds
MAX_LEAST_SUM = 512  # The matching with the least sum takes W³ operations: 2 s of 1,000 workers, and no iteration gets shorter.


@checked_class
@dataclasses.dataclass(frozen=True)
class Job:
    """What an iteration sends.

    Args:
        workers: W.
        stages: S.
        gradient_bytes: b, of the parameters of one stage: what all-reduce averages, or gossip sends to one neighbor.
        activation_bytes: a, that a stage sends to the next one, and as many back; with S = 1, nothing.
        topology: of gossip between W workers; None: all-reduce.

    Raises:
        ValueError: for an impossible value.
    """

    workers: Annotated[int, Range(1, MAX_DEVICES)]
    stages: Annotated[int, Range(1, MAX_STAGES)] = 1
    gradient_bytes: Amount = 0.0
    activation_bytes: Amount = 0.0
    topology: Topology | None = None

    def __post_init__(self):
        if self.topology:
            check("the topology's workers", self.topology.num_workers, exactly(self.workers))

    @property
    def num_devices(self) -> int:
        """S·W."""
        return self.stages * self.workers

    @property
    def is_pipelined(self) -> bool:
        """Whether stages send to each other."""
        return self.stages > 1 and self.activation_bytes > 0


def all_reduce_s(there_and_back_s: np.ndarray) -> float:
    """Return the seconds of a group's all-reduce from [W, W] seconds of a W-th of the bytes, there and back."""
    return float(there_and_back_s.sum(axis=1).max())


def both_ways(seconds: np.ndarray) -> np.ndarray:
    """Return the seconds there and back, [N, N]; tile by tile, since a column of thousands of devices is spread over memory."""
    total = np.empty_like(seconds)
    for i in range(0, len(seconds), TILE):
        for j in range(0, len(seconds), TILE):
            there, back = seconds[i : i + TILE, j : j + TILE], seconds[j : j + TILE, i : i + TILE].T
            np.add(there, back, out=total[i : i + TILE, j : j + TILE])
    return total


def bottleneck_matching(seconds: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the matching of rows and columns whose slowest link is the fastest; of those, up to 512 rows, one with the least sum.

    Args:
        seconds: [W, W].

    Returns:
        Seconds of its slowest link; the column of each row, [W].
    """
    slowest_s = bottleneck_s(seconds)
    if len(seconds) > MAX_LEAST_SUM:
        return slowest_s, _matching(seconds <= slowest_s)
    _, columns = optimize.linear_sum_assignment(np.where(seconds <= slowest_s, seconds, 1e6 * (1 + slowest_s)))
    return slowest_s, columns


def _matching(allowed: np.ndarray) -> np.ndarray:
    """Return the column of each row, [W], in a matching with as many allowed links as possible; -1 without one."""
    columns, starts = np.nonzero(allowed)[1], np.append(0, np.cumsum(allowed.sum(axis=1)))
    links = sparse.csr_array((np.ones(len(columns), np.int8), columns, starts), shape=allowed.shape)
    return sparse.csgraph.maximum_bipartite_matching(links, perm_type="column")


def bottleneck_s(seconds: np.ndarray) -> float:
    """Return the seconds of the slowest link of the matching whose slowest link is the fastest, from [W, W]."""
    least = max(seconds.min(axis=0).max(), seconds.min(axis=1).max())  # Each row and each column has a link.
    suffices = lambda slowest_s: bool((_matching(seconds <= slowest_s) >= 0).all())
    if suffices(least):  # As nearly always, so that sorting is spared.
        return float(least)
    levels = np.unique(seconds[seconds > least])
    return float(levels[bisect.bisect_left(levels, True, hi=len(levels) - 1, key=suffices)])


def shortest_path(seconds: np.ndarray) -> tuple[float, list[int]]:
    """Return the shortest path through all nodes, by dynamic programming over sets of nodes (Held and Karp 1962).

    Args:
        seconds: [S, S], from row to column; S at most 16.

    Returns:
        Its length, and the nodes in order.
    """
    S = len(seconds)
    best, before = np.full((1 << S, S), np.inf), np.zeros((1 << S, S), int)
    best[1 << np.arange(S), np.arange(S)] = 0
    sets = np.arange(1 << S)
    for size in range(2, S + 1):
        of_size = sets[np.bitwise_count(sets) == size]
        for last in range(S):
            with_last = of_size[of_size >> last & 1 == 1]
            through = best[with_last ^ (1 << last)] + seconds[:, last]  # [sets, the node before]
            before[with_last, last], best[with_last, last] = through.argmin(axis=1), through.min(axis=1)
    visited, path = (1 << S) - 1, [int(best[-1].argmin())]
    while len(path) < S:
        last = path[-1]
        path.append(int(before[visited, last]))
        visited ^= 1 << last
    return float(best[-1].min()), path[::-1]


class Network:
    """The cost of layouts on the links of some devices; results for pairs of groups are cached.

    Args:
        links: of the devices.
        job: what is sent; its W·S must be the number of devices.

    Raises:
        ValueError: if the numbers do not fit.
    """

    def __init__(self, links: Links, job: Job):
        check("workers × stages", job.num_devices, exactly(links.num_devices))
        self.job, self._links = job, links
        self.shard_s = both_ways(links.seconds(job.gradient_bytes / job.workers))
        sizes = {round_.group_size for round_ in job.topology.rounds} if job.topology else ()
        self.message_s = {L: links.seconds(job.gradient_bytes / L) for L in sizes}
        self.pairs_s = functools.lru_cache(maxsize=2**16)(self._pair_s)
        self.together_s = all_reduce_s(self.shard_s) if self.fixed else 0.0

    @property
    def free(self) -> bool:
        """Whether only the groups matter, so that the best order of rows and columns is found for them."""
        return self.job.topology is None

    @property
    def fixed(self) -> bool:
        """Whether all layouts cost the same, as all devices are one group."""
        return self.free and self.job.stages == 1

    @functools.cached_property
    def hop_s(self) -> np.ndarray:
        """Seconds of activations from row to column and back, [N, N]."""
        return both_ways(self._links.seconds(self.job.activation_bytes))

    def _pair_s(self, one: tuple[int, ...], other: tuple[int, ...]) -> float:
        return bottleneck_s(self.hop_s[np.ix_(one, other)])

    def averaging_s(self, layout: np.ndarray) -> float:
        """Return the seconds of all-reduce or gossip."""
        if self.fixed:
            return self.together_s
        if self.job.topology is None:
            return max(all_reduce_s(self.shard_s[np.ix_(row, row)]) for row in layout)
        return float(np.mean([self.round_s(layout, round_) for round_ in self.job.topology.rounds]))

    def round_s(self, layout: np.ndarray, round_: Round) -> float:
        """Return the seconds of a round of gossip."""
        L, sent_s = round_.group_size, np.zeros(layout.shape)
        message_s = self.message_s[L]
        for shift in round_.shifts:
            nodes_2xE = np.array(shift.pairs).T
            sources, targets = (L * nodes_2xE[..., None] + np.arange(L)).reshape(2, -1)
            sent_s[:, sources] += message_s[layout[:, sources], layout[:, targets]]
        groups = layout.reshape(-1, L) if L > 1 else ()
        return max((all_reduce_s(both_ways(message_s[np.ix_(group, group)])) for group in groups), default=0.0) + sent_s.max()

    def between_s(self, layout: np.ndarray) -> np.ndarray:
        """Return the seconds between every two rows, [S, S], if the best matching joins them."""
        rows = [tuple(row) for row in np.sort(layout, axis=1).tolist()]
        pairs_SxS = np.zeros((len(rows), len(rows)))
        for i, row in enumerate(rows):
            for j in range(i):
                pairs_SxS[i, j] = pairs_SxS[j, i] = self.pairs_s(*sorted((row, rows[j])))
        return pairs_SxS

    def pipeline_s(self, layout: np.ndarray) -> float:
        """Return the seconds of the links between stages; with all-reduce, in the best order of rows and columns."""
        if not self.job.is_pipelined:
            return 0.0
        if self.free:
            return shortest_path(self.between_s(layout))[0]
        return float(self.hop_s[layout[:-1], layout[1:]].max(axis=1).sum())

    def seconds(self, layout: np.ndarray, limit: float = np.inf) -> float:
        """Return the seconds of an iteration's messages; inf as soon as they must take more than `limit`."""
        averaging_s = self.averaging_s(layout)
        return averaging_s + self.pipeline_s(layout) if averaging_s <= limit else np.inf

    def ordered(self, layout: np.ndarray) -> np.ndarray:
        """Return the layout with its rows and columns in the best order, where these are free."""
        if not (self.free and self.job.is_pipelined):
            return layout
        rows = [layout[i] for i in shortest_path(self.between_s(layout))[1]]
        done = [rows[0]]
        for row in rows[1:]:
            done.append(row[bottleneck_matching(self.hop_s[np.ix_(done[-1], row)])[1]])
        return np.array(done)
