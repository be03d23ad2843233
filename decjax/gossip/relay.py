"""Relayed sums on a spanning tree, RelaySGD's exchange: a worker's parameters reach all others, each along the shortest path."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csgraph

from decjax import buckets
from decjax.gossip.mixer import Gossip, Pairs
from decjax.gossip.requirements import SINGLE_WORKERS
from decjax.registry import Requirement
from decjax.topology import Topology, coloring
from decjax.typing import Arrays, PyTree


class RelayState(NamedTuple):
    """State of `relay`.

    Attributes:
        age: exchanges since the start, an int32 scalar.
        received: for each tree, each matching of its edges and each bucket the sum that arrived last; zeros where nothing does.
    """

    age: jax.Array
    received: tuple


class Tree(NamedTuple):
    """A spanning tree, its edges divided into matchings, along each of which all pairs swap messages at once.

    Attributes:
        matchings: M of them, each the pairs (source, target) of its edges in both directions.
        counts: [T, M, N], how many workers' parameters the message in exchange t to worker i along matching m is the sum of; those
            of later exchanges are as of the last.
    """

    matchings: tuple[Pairs, ...]
    counts: np.ndarray


class Relay(Gossip, name="relay"):
    """RelaySGD's mixer: each worker takes the mean over all workers of parameters as old as their distance on a spanning tree.

        m_{i→j} = x_i + Σ_{k≠j} m_{k→i}        x_i <- ( Σ_j m_{j→i} + (n − Σ_j c_{j→i}) x_i ) / n

    Sums run over neighbors on the tree; m_{k→i} is what arrived in the step before, m_{j→i} what arrives in this one, and c_{j→i} the
    number of workers that it is a sum of. No worker's parameters count more than another's, so workers with different data have no
    bias. A worker sends its parameters to each neighbor on the tree.

    The tree has the shortest paths from a worker in the middle of the graph. If the graph varies in time, and each round is
    connected, as those of `double_binary_tree` are, every round has its own tree, and each an equal share of the parameters;
    otherwise there is one tree, of the edges of all rounds. Weights of the graph are not used.

    Reference: Vogels et al. 2021, arXiv 2110.04175, algorithm 1.
    """

    order = "atc"
    graph = "line"
    messages = "sums of parameters, along a spanning tree"
    memory = "a copy a neighbor"
    source = "arXiv 2110.04175"
    requires = (
        SINGLE_WORKERS,
        Requirement(
            "topology",
            "an undirected graph, to send both ways along each edge",
            lambda topology: bool((_union(topology) == _union(topology).T).all()),
            "use 'line' or 'double_binary_tree'",
        ),
        Requirement(
            "topology",
            "a connected graph, for a tree of all workers",
            lambda topology: _is_connected(_union(topology)),
            "use 'line' or 'double_binary_tree'",
        ),
    )

    @functools.cached_property
    def trees(self) -> tuple[Tree, ...]:
        """The spanning trees."""
        rounds = _edges(self.topology)
        each = list({edges_NxN.tobytes(): edges_NxN for edges_NxN in rounds}.values())
        connected = all((edges_NxN == edges_NxN.T).all() and _is_connected(edges_NxN) for edges_NxN in each)
        return tuple(map(_tree, each if connected else [_union(self.topology)]))

    @property
    def phases(self) -> range:
        return range(1)

    @property
    def keeps_mean(self) -> bool:
        return False

    @property
    def permutations(self) -> tuple[Pairs, ...]:
        return tuple(pairs for tree in self.trees for pairs in tree.matchings)

    def layout(self, params: PyTree) -> buckets.Layout:
        self.channel.check(params, self.num_workers)
        return self.channel.layout(params, multiple_of=len(self.trees))

    def init(self, params: PyTree) -> RelayState:
        shares = [jnp.zeros(bucket.size // len(self.trees), bucket.dtype) for bucket in self.layout(params).buckets]
        received = tuple(tuple(tuple(shares) for _ in tree.matchings) for tree in self.trees)
        return RelayState(jnp.zeros((), jnp.int32), received)

    def exchange(self, params: PyTree, state: RelayState, phase: int) -> tuple[PyTree, RelayState]:
        layout = self.layout(params)
        vectors_TxP = [x_P.reshape(len(self.trees), -1) for x_P in layout.pack(params)]
        mixed, arrived = [], []
        for t, (tree, memory) in enumerate(zip(self.trees, state.received, strict=True)):
            own = [x_TxP[t] for x_TxP in vectors_TxP]
            new = [self._swapped(own, memory, m, pairs) for m, pairs in enumerate(tree.matchings)]
            count = jnp.asarray(tree.counts)[jnp.minimum(state.age, len(tree.counts) - 1), :, self.channel.axis.index].sum()
            mixed.append([self._mean(x_P, [each[b] for each in new], count) for b, x_P in enumerate(own)])
            arrived.append(tuple(map(tuple, new)))
        vectors = [jnp.concatenate(shares) for shares in zip(*mixed, strict=True)]
        return layout.unpack(vectors, like=params), RelayState(state.age + 1, tuple(arrived))

    def restart(self, average: PyTree, state: RelayState) -> RelayState:
        return self.init(average)

    def _swapped(self, own: Arrays, memory: tuple, m: int, pairs: Pairs) -> list[jax.Array]:
        """Return what arrives along matching m, after passing on everything that came along the others."""
        sums = list(own)
        for k, arrived in enumerate(memory):
            sums = sums if k == m else [x_P + y_P for x_P, y_P in zip(sums, arrived, strict=True)]
        return [self.channel.axis.exchange(x_P, pairs) for x_P in sums]

    def _mean(self, own: jax.Array, sums: Arrays, count: jax.Array) -> jax.Array:
        dtype = jnp.promote_types(own.dtype, jnp.float32)
        total = (self.num_workers - count).astype(dtype) * own.astype(dtype)
        for x in sums:
            total += x.astype(dtype)
        return (total / self.num_workers).astype(own.dtype)

    def num_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        sources = [source for tree in self.trees for pairs in tree.matchings for source, _ in pairs]
        return np.bincount(sources, minlength=self.num_workers) * (self.layout(params).num_bytes / len(self.trees))


# -- Trees ------------------------------------------------------------------------------------------------------------


def _edges(topology: Topology) -> list[np.ndarray]:
    """Return the adjacency matrix of each round."""
    return [topology.matrix(phase) != 0 for phase in range(topology.period)]


def _union(topology: Topology) -> np.ndarray:
    return np.any(_edges(topology), axis=0)


def _distances(edges_NxN: np.ndarray) -> np.ndarray:
    """Return the number of edges on the shortest path from worker i to j, [N, N]; infinity if there is none."""
    return csgraph.shortest_path(edges_NxN, unweighted=True)


def _is_connected(edges_NxN: np.ndarray) -> bool:
    return bool(np.isfinite(_distances(edges_NxN)).all())


def _tree(edges_NxN: np.ndarray) -> Tree:
    """Return the tree of shortest paths from the worker to which the farthest is nearest; of several parents the first."""
    n, distance_NxN = len(edges_NxN), _distances(edges_NxN)
    depth_N = distance_NxN[distance_NxN.max(axis=1).argmin()]
    links = [
        (child, int(np.flatnonzero(edges_NxN[child] & (depth_N == depth_N[child] - 1))[0])) for child in np.flatnonzero(depth_N)
    ]
    links = [(min(int(a), b), max(int(a), b)) for a, b in links]
    matchings = tuple(tuple(pair for a, b in edges for pair in ((a, b), (b, a))) for edges in coloring.matchings(links, n))
    tree_NxN = np.zeros((n, n), bool)
    for a, b in links:
        tree_NxN[a, b] = tree_NxN[b, a] = True
    distance_NxN = _distances(tree_NxN)
    counts = np.zeros((max(1, int(distance_NxN.max())), len(matchings), n), np.int32)
    for m, pairs in enumerate(matchings):
        for source, target in pairs:
            behind_N = distance_NxN[source] < distance_NxN[target]  # The workers that are nearer to the source.
            for age in range(len(counts)):
                counts[age, m, target] = (behind_N & (distance_NxN[source] <= age)).sum()
    return Tree(matchings, counts)
