"""Relayed sums on a spanning tree, RelaySGD's exchange: a worker's parameters reach all others, each by the shortest way."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import registry
from decjax.channel import Channel
from decjax.gossip.mixer import Mixer
from decjax.topology import Topology, coloring

Pairs = tuple[tuple[int, int], ...]


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


@registry.register(
    "mixer",
    "relay",
    topology="line",
    order="atc",
    needs="connected undirected graph",
    messages="sums of parameters, along a spanning tree",
    memory="a copy a neighbour",
    source="arXiv 2110.04175",
)
def relay(topology: Topology, channel: Channel = Channel()) -> Mixer:
    """RelaySGD's mixer: each worker takes the mean over all workers of parameters as old as their distance on a spanning tree.

        m_{i→j} = x_i + Σ_{k≠j} m_{k→i}        x_i <- ( Σ_j m_{j→i} + (n − Σ_j c_{j→i}) x_i ) / n

    Sums run over neighbours on the tree; m_{k→i} is what arrived in the step before, m_{j→i} what arrives in this one, and c_{j→i} the
    number of workers that it is a sum of. No worker's parameters count more than another's, so workers with different data have no
    bias. A worker sends its parameters to each neighbour on the tree.

    The tree has shortest ways from one of the worker in the middle of the graph. If the graph varies in time, and each round is
    connected, as those of `double_binary_tree` are, every round has a tree of its own, and each an equal share of the parameters;
    otherwise there is one tree, of the edges of all rounds. Weights of the graph are not used.

    Args:
        topology: undirected, connected over a period.
        channel: how parameters travel.

    Raises:
        ValueError: if the graph is directed, not connected, or averages inside nodes.

    Reference: Vogels et al. 2021, arXiv 2110.04175, algorithm 1.
    """
    trees = tuple(map(_tree, _graphs(topology)))
    return _Relay(topology.num_workers, trees, channel).mixer()


@dataclasses.dataclass(frozen=True)
class _Relay:
    """The functions of the mixer."""

    num_workers: int
    trees: tuple[Tree, ...]
    channel: Channel

    def _layout(self, params):
        return self.channel.layout(params, multiple_of=len(self.trees))

    def init(self, params: Any) -> RelayState:
        shares = [jnp.zeros(bucket.size // len(self.trees), bucket.dtype) for bucket in self._layout(params).buckets]
        received = tuple(tuple(tuple(shares) for _ in tree.matchings) for tree in self.trees)
        return RelayState(jnp.zeros((), jnp.int32), received)

    def exchange(self, params: Any, state: RelayState, phase: int) -> tuple[Any, RelayState]:
        del phase
        layout = self._layout(params)
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

    def _swapped(self, own, memory, m, pairs):
        """What arrives along matching m; everything that came along the others is passed on."""
        sums = list(own)
        for k, arrived in enumerate(memory):
            sums = sums if k == m else [x_P + y_P for x_P, y_P in zip(sums, arrived, strict=True)]
        return [self.channel.axis.exchange(x_P, pairs) for x_P in sums]

    def _mean(self, own, sums, count):
        dtype = jnp.promote_types(own.dtype, jnp.float32)
        total = (self.num_workers - count).astype(dtype) * own.astype(dtype)
        for x in sums:
            total += x.astype(dtype)
        return (total / self.num_workers).astype(own.dtype)

    def num_bytes(self, params: Any, phase: int) -> np.ndarray:
        del phase
        sources = [source for tree in self.trees for pairs in tree.matchings for source, _ in pairs]
        return np.bincount(sources, minlength=self.num_workers) * (self._layout(params).num_bytes / len(self.trees))

    def mixer(self) -> Mixer:
        return Mixer(
            init=self.init,
            exchange=self.exchange,
            phase=lambda step: step * 0,
            phases=range(1),
            num_bytes=self.num_bytes,
            num_workers=self.num_workers,
            restart=lambda average, state: self.init(average),
            orders=("atc",),
            keeps_mean=False,
            permutations=tuple(pairs for tree in self.trees for pairs in tree.matchings),
        )


# -- Trees ------------------------------------------------------------------------------------------------------------


def _graphs(topology: Topology) -> list[np.ndarray]:
    """The graphs of which each has a tree of its own, as symmetric boolean adjacency matrices."""
    if any(round_.group_size > 1 for round_ in topology.rounds):
        raise ValueError(
            f"mixer 'relay' needs single workers as nodes, and topology {topology.name!r} averages inside nodes; use 'line', "
            "'double_binary_tree' or another graph without local_size"
        )
    edges = [topology.matrix(phase) != 0 for phase in range(topology.period)]
    union_NxN = np.any(edges, axis=0)
    if (union_NxN != union_NxN.T).any():
        raise ValueError(
            f"mixer 'relay' sends both ways along each edge, and topology {topology.name!r} is directed; use 'line', "
            "'double_binary_tree' or another undirected graph"
        )
    each = [edges_NxN for edges_NxN in edges if (edges_NxN == edges_NxN.T).all() and (_distances(edges_NxN) >= 0).all()]
    found = list({edges_NxN.tobytes(): edges_NxN for edges_NxN in each}.values()) if len(each) == len(edges) else [union_NxN]
    if (_distances(found[0]) < 0).any():
        raise ValueError(f"mixer 'relay' needs a tree of all workers, and topology {topology.name!r} is not connected; use 'line'")
    return found


def _distances(edges_NxN: np.ndarray) -> np.ndarray:
    """The number of edges from worker i to j on the shortest way, [N, N]; −1 if there is none."""
    n = len(edges_NxN)
    distance_NxN, reached_NxN = np.where(np.eye(n, dtype=bool), 0, -1), np.eye(n, dtype=bool)
    for hops in range(1, n):
        next_NxN = (reached_NxN.astype(np.float32) @ edges_NxN) > 0
        distance_NxN[next_NxN & ~reached_NxN] = hops
        reached_NxN |= next_NxN
    return distance_NxN


def _tree(edges_NxN: np.ndarray) -> Tree:
    """The tree of shortest ways from the worker to which the farthest is nearest; of several parents the first."""
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
    counts = np.zeros((max(1, distance_NxN.max()), len(matchings), n), np.int32)
    for m, pairs in enumerate(matchings):
        for source, target in pairs:
            behind_N = distance_NxN[source] < distance_NxN[target]  # The workers that are nearer to the source.
            for age in range(len(counts)):
                counts[age, m, target] = (behind_N & (distance_NxN[source] <= age)).sum()
    return Tree(matchings, counts)
