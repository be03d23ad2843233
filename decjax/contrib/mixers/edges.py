"""Mixers that exchange along matchings of edges: PowerGossip, and relayed sums on a spanning tree (RelaySGD)."""

from collections.abc import Sequence
import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, codecs
from decjax.buckets import is_floating, wide_dtype
from decjax.codecs.codec import dot
from decjax.gossip.mixer import Gossip, Pairs
from decjax.gossip.requirements import DOUBLY_STOCHASTIC, SINGLE_WORKERS, SYMMETRIC
from decjax.options import Range
from decjax.registry import Requirement
from decjax.topology import Round, Topology, coloring
from decjax.typing import Arrays, PyTree


class PowerState(NamedTuple):
    """State of `power_gossip`: factors of this worker's edges; the worker at the other end of an edge holds the same.

    Attributes:
        left: p_IxR for each round of the period, each matching of its edges and each matrix.
        right: q_JxR, likewise.
    """

    left: tuple
    right: tuple


class _Matching(NamedTuple):
    """Edges of a round that share no worker."""

    pairs: Pairs  # both directions of each edge
    weights_N: np.ndarray  # w of each worker's edge, positive at the end of lower index, negative at the other; 0: no edge


def _both_ways(edges: Sequence[tuple[int, int]]) -> Pairs:
    return tuple(pair for a, b in edges for pair in ((a, b), (b, a)))


def _matchings(round_: Round) -> tuple[_Matching, ...]:
    W_NxN = round_.matrix()
    edges = [(i, j) for i, j in np.argwhere(W_NxN).tolist() if i < j]
    matchings = []
    for matching in coloring.matchings(edges, len(W_NxN)):
        weights_N = np.zeros(len(W_NxN))
        for i, j in matching:
            weights_N[min(i, j)], weights_N[max(i, j)] = W_NxN[i, j], -W_NxN[i, j]
        matchings.append(_Matching(tuple(sorted(_both_ways(matching))), weights_N))
    return tuple(matchings)


class PowerGossip(Gossip, name="power_gossip"):
    """PowerGossip: only R columns travel for each matrix and edge, found by a power iteration on the neighbors' difference.

    For an edge {i, j} with i < j, both ends hold the same p and q, and send products with their own matrix X. Exchanges alternate:

        even    q̂ = orth(q),  p = X_i q̂ − X_j q̂,      Δ = p q̂ᵀ
        odd     p̂ = orth(p),  q = X_iᵀ p̂ − X_jᵀ p̂,    Δ = p̂ qᵀ

        X_i <- X_i − w_ij Δ,   X_j <- X_j + w_ij Δ

    Δ is the projection of X_i − X_j on R columns. Both ends use the same Δ, so the mean is preserved at any rank, and the error fades
    as workers agree. A worker sends I·R or J·R values for a matrix, in turns, to each neighbor; at R = I = J this is plain gossip.

    An array is seen as the matrix I×J that `codecs.matrix_shape` gives; a stack of L scanned layers is one matrix L·I×J with R columns
    for all layers. Vectors, and matrices with a side shorter than R, travel uncompressed; `init` raises a ValueError if nothing else
    is left. There are twice as many phases as rounds in the period: exchanges of the first period are even, those of the second odd.
    The channel's seed determines the first p and q.

    Attributes:
        rank: R ≥ 1, columns that travel.

    Reference: Vogels, Karimireddy and Jaggi 2020, "Practical low-rank communication compression in decentralized deep learning",
    arXiv 2008.01425, algorithms 1 and 2.
    """

    graph = "one_peer_exponential(pairwise=True)"
    messages = "thin matrices"
    memory = "2 thin matrices an edge"
    requires = (SYMMETRIC, DOUBLY_STOCHASTIC, SINGLE_WORKERS)

    rank: Annotated[int, Range(1, 2**12)] = 1

    @functools.cached_property
    def matchings(self) -> tuple[tuple[_Matching, ...], ...]:
        """The matchings of each round of the period."""
        return tuple(map(_matchings, self.topology.rounds))

    @property
    def phases(self) -> range:
        return range(2 * self.topology.period)

    @property
    def permutations(self) -> tuple[Pairs, ...]:
        return tuple(matching.pairs for edges in self.matchings for matching in edges)

    def _view(self, x: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, int] | None:
        """Return (I, J) of an array that travels by columns; None if it travels uncompressed."""
        sides = codecs.matrix_shape(x.shape)
        return sides if is_floating(x) and sides and x.size and self.rank <= min(sides) else None

    def _start(self, x: jax.Array | jax.ShapeDtypeStruct, side: int, position: int) -> jax.Array:
        """Return the first p (side 0) or q (side 1) of a matrix."""
        key, sides = jax.random.fold_in(jax.random.key(self.channel.seed), position), self._view(x)
        assert sides is not None
        return jax.random.normal(key, (sides[side], self.rank), wide_dtype(x))

    def init(self, params: PyTree) -> PowerState:
        super().init(params)
        matrices = [x for x in jax.tree.leaves(params) if self._view(x)]
        if not matrices:
            raise ValueError(f"{self}: no array has two sides of at least rank={self.rank}; use a smaller rank, or mixer 'exact'")

        def start(side):
            return tuple(self._start(x, side, 2 * m + 1 - side) for m, x in enumerate(matrices))

        return PowerState(*(tuple(tuple(start(side) for _ in edges) for edges in self.matchings) for side in (0, 1)))

    def _message(self, params: PyTree, bases: Sequence[jax.Array], odd: bool) -> list[jax.Array]:
        """Return what a worker sends over an edge: products of its matrices, and all other arrays unchanged."""
        basis = iter(bases)

        def product(x, basis_SxR):
            x_IxJ = x.reshape(self._view(x)).astype(basis_SxR.dtype)
            return dot(basis_SxR.T, x_IxJ).T if odd else dot(x_IxJ, basis_SxR)

        return [product(x, next(basis)) if self._view(x) else x for x in jax.tree.leaves(params)]

    def exchange(self, params: PyTree, state: PowerState, phase: int) -> tuple[PyTree, PowerState]:
        self.channel.check(params, self.num_workers)
        odd, index = divmod(phase, self.topology.period)
        leaves, treedef = jax.tree.flatten(params)
        mixed = [x.astype(wide_dtype(x)) if is_floating(x) else x for x in leaves]
        old, new = (state.left, state.right) if odd else (state.right, state.left)
        news = []
        for matching, bases, before in zip(self.matchings[index], old[index], new[index]):
            mixed, after = self._meeting(params, mixed, matching, bases, before, bool(odd))
            news.append(after)
        new = (*new[:index], tuple(news), *new[index + 1 :])
        state = PowerState(old, new) if odd else PowerState(new, old)
        return treedef.unflatten([m.astype(x.dtype) for m, x in zip(mixed, leaves)]), state

    def _meeting(
        self, params: PyTree, mixed: list[jax.Array], matching: _Matching, factors: Arrays, before: Arrays, odd: bool
    ) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        """Return the mixed arrays, and the new p or q, after each worker has exchanged over its edge in one matching."""
        # Householder's Q is orthonormal for any input, also for zeros and dependent columns.
        bases = [jnp.linalg.qr(x_SxR)[0] for x_SxR in factors]
        own = self._message(params, bases, odd)
        layout = self.channel.layout(own)
        arrived = layout.unpack([self.channel.axis.exchange(x_P, matching.pairs) for x_P in layout.pack(own)], like=own)
        weight = jnp.asarray(matching.weights_N)[self.channel.axis.index]
        mixed, matrices, after = list(mixed), iter(zip(bases, before)), []
        for k, x in enumerate(jax.tree.leaves(params)):
            if not is_floating(x):
                continue
            # Bit for bit the same at both ends, with the signs of zeros, on which orth depends: q̂ must not differ.
            step = difference = jnp.where(weight > 0, own[k] - arrived[k], arrived[k] - own[k])
            if self._view(x):
                basis_SxR, last = next(matrices)
                step = (dot(basis_SxR, difference.T) if odd else dot(difference, basis_SxR.T)).reshape(x.shape)
                after.append(codecs.revived(difference, last))
            mixed[k] -= jnp.where(weight == 0, 0, weight.astype(mixed[k].dtype) * step)
        return mixed, tuple(after)

    def num_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        odd, index = divmod(phase, self.topology.period)
        matrices = [x for x in jax.tree.leaves(params) if self._view(x)]
        bases = [jax.eval_shape(functools.partial(self._start, x, 1 - odd, 0)) for x in matrices]
        own = jax.eval_shape(lambda params, bases: self._message(params, bases, bool(odd)), params, bases)
        message_bytes = self.channel.layout(own).num_bytes
        return sum(((m.weights_N != 0) * message_bytes for m in self.matchings[index]), np.zeros(self.topology.num_workers))


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
        dtype = wide_dtype(own)
        total = (self.num_workers - count).astype(dtype) * own.astype(dtype)
        for x in sums:
            total += x.astype(dtype)
        return (total / self.num_workers).astype(own.dtype)

    def num_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        sources = [source for tree in self.trees for pairs in tree.matchings for source, _ in pairs]
        return np.bincount(sources, minlength=self.num_workers) * (self.layout(params).num_bytes / len(self.trees))


def _edges(topology: Topology) -> list[np.ndarray]:
    """Return the adjacency matrix of each round."""
    return [topology.matrix(phase) != 0 for phase in range(topology.period)]


def _union(topology: Topology) -> np.ndarray:
    return np.any(_edges(topology), axis=0)


def _distances(edges_NxN: np.ndarray) -> np.ndarray:
    """Return the number of edges on the shortest path from worker i to j, [N, N]; infinity if there is none."""
    from scipy.sparse import csgraph  # Importing it takes a quarter of a second, which every command would take.

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
    matchings = tuple(map(_both_ways, coloring.matchings(links, n)))
    tree_NxN = np.zeros((n, n), bool)
    tree_NxN[tuple(np.transpose(_both_ways(links)))] = True
    distance_NxN = _distances(tree_NxN)
    counts = np.zeros((max(1, int(distance_NxN.max())), len(matchings), n), np.int32)
    for m, pairs in enumerate(matchings):
        for source, target in pairs:
            behind_N = distance_NxN[source] < distance_NxN[target]  # The workers that are nearer to the source.
            for age in range(len(counts)):
                counts[age, m, target] = (behind_N & (distance_NxN[source] <= age)).sum()
    return Tree(matchings, counts)
