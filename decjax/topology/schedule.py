"""Mixing rounds and topologies: how a stochastic matrix is executed as messages, and how well it mixes.

Any stochastic matrix can be written as a `Round`: its nonzeros outside the diagonal are the edges of a bipartite graph (senders,
receivers), which always has an edge coloring with as many colors as the largest degree (Kőnig).
"""

from collections.abc import Iterable, Sequence
import dataclasses

import numpy as np

from decjax.topology import coloring

STOCHASTIC_TOLERANCE = 1e-6  # how far row or column sums may be from 1: float32 matrices are accepted
EXACT_TOLERANCE = 1e-9  # how close a product has to come to the exact mean J/n to be called exact


@dataclasses.dataclass(frozen=True)
class Shift:
    """Messages of a round that travel together: a partial permutation of nodes, and the weight each receiver gives to its message.

    Attributes:
      pairs: (source, target) nodes; source != target, each source once, each target once.
      weights: for each node the weight of what it receives; 0.0 where nothing arrives.
    """

    pairs: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]

    def __post_init__(self):
        sources, targets, nodes = {s for s, _ in self.pairs}, {t for _, t in self.pairs}, range(len(self.weights))
        is_permutation = len(sources) == len(targets) == len(self.pairs) and all(
            s != t and s in nodes and t in nodes for s, t in self.pairs
        )
        if not is_permutation or not all(w >= 0.0 and (not w or node in targets) for node, w in enumerate(self.weights)):
            raise ValueError(
                f"pairs {self.pairs} with weights {self.weights} must join different nodes, each at most once as source and as target, "
                "with weights of at least 0, and 0.0 where nothing arrives"
            )


@dataclasses.dataclass(frozen=True)
class Round:
    """One mixing step: groups of `group_size` consecutive workers average exactly, then nodes mix.

        W_NxN = W_nodes ⊗ J_L / L,     W_nodes = diag(self_weights) + Σ_s diag(weights_s) P_s

    Attributes:
      self_weights: for each node the weight that it gives to itself.
      shifts: the messages between nodes.
      group_size: L, the workers of a node; the round is for L · len(self_weights) workers.
    """

    self_weights: tuple[float, ...]
    shifts: tuple[Shift, ...] = ()
    group_size: int = 1

    def __post_init__(self):
        lengths = [len(shift.weights) for shift in self.shifts]
        if self.group_size < 1 or set(lengths) | {self.num_nodes} != {max(1, self.num_nodes)} or not min(self.self_weights) >= 0.0:
            raise ValueError(
                f"a round with self weights {self.self_weights}, shifts of {lengths} nodes and group_size={self.group_size} must have "
                "weights of at least 0, of as many nodes as its shifts, and a group_size of at least 1"
            )
        if not (_sums_to_one(self.row_sums()) or _sums_to_one(self.column_sums())):
            rows, columns = self.row_sums().round(6).tolist(), self.column_sums().round(6).tolist()
            raise ValueError(f"rows sum to {rows} and columns to {columns}; one of the two has to be all ones")

    @property
    def num_nodes(self) -> int:
        """Number of groups of `group_size` workers."""
        return len(self.self_weights)

    @property
    def num_workers(self) -> int:
        """N, the number of workers."""
        return self.group_size * self.num_nodes

    def matrix(self) -> np.ndarray:
        """Return the dense float64 matrix W, [N, N]; W[i, j] is the weight that worker i gives to what it receives from worker j."""
        W_nodes = np.diag(np.asarray(self.self_weights, np.float64))
        for shift in self.shifts:
            for source, target in shift.pairs:
                W_nodes[target, source] += shift.weights[target]
        return np.kron(W_nodes, np.full((self.group_size, self.group_size), 1.0 / self.group_size))

    def row_sums(self) -> np.ndarray:
        """Return the row sums of W_nodes, [num_nodes]."""
        return np.array([self.self_weights, *(shift.weights for shift in self.shifts)], np.float64).sum(axis=0)

    def column_sums(self) -> np.ndarray:
        """Return the column sums of W_nodes, [num_nodes]."""
        sums = np.array(self.self_weights, np.float64)
        for shift in self.shifts:
            for source, target in shift.pairs:
                sums[source] += shift.weights[target]
        return sums

    def volume(self) -> np.ndarray:
        """Return what each worker sends in this round, in multiples of the parameters' size, [N]: 2(L−1)/L + (messages its node sends)/L.

        A reduce-scatter inside the node before the exchange, and an all-gather after it, send (L−1)/L each. Between nodes every
        worker sends its shard of 1/L.
        """
        sent = np.zeros(self.num_nodes)
        for shift in self.shifts:
            sent[[source for source, _ in shift.pairs]] += 1.0  # Sources are different.
        return np.repeat(2.0 * (self.group_size - 1) + sent, self.group_size) / self.group_size

    def degree(self) -> int:
        """Return the largest number of other workers that a worker receives from, or sends to."""
        edges_NxN = self.matrix() != 0.0
        np.fill_diagonal(edges_NxN, False)
        return int(max(edges_NxN.sum(axis=0).max(), edges_NxN.sum(axis=1).max()))


@dataclasses.dataclass(frozen=True)
class Topology:
    """A periodic schedule of rounds: x^{t+1} = W^{t mod period} x^t. Immutable, comparable, hashable.

    Attributes:
      name: shown in tables and errors.
      num_workers: N, the number of workers.
      rounds: those of one period, in order.
    """

    name: str
    num_workers: int
    rounds: tuple[Round, ...]

    def __post_init__(self):
        sizes = sorted({round_.num_workers for round_ in self.rounds})
        if sizes != [self.num_workers]:
            raise ValueError(f"topology {self.name!r} needs at least one round, all for {self.num_workers} workers, got {sizes}")

    @property
    def period(self) -> int:
        """Number of rounds after which the schedule repeats."""
        return len(self.rounds)

    @property
    def is_static(self) -> bool:
        """Whether every step applies the same round (a period of 1)."""
        return self.period == 1

    @property
    def is_symmetric(self) -> bool:
        """Whether W = Wᵀ in every round."""
        matrices = (round_.matrix() for round_ in self.rounds)
        return all(np.allclose(W_NxN, W_NxN.T, rtol=0.0, atol=STOCHASTIC_TOLERANCE) for W_NxN in matrices)

    @property
    def max_degree(self) -> int:
        """The largest number of other workers that a worker receives from, or sends to, in one round."""
        return max(round_.degree() for round_ in self.rounds)

    def round(self, phase: int) -> Round:
        """Return the round of a phase, modulo the period, so that a step count may be given."""
        return self.rounds[phase % self.period]

    def matrix(self, phase: int) -> np.ndarray:
        """Return the dense matrix W of a phase, [N, N], modulo the period."""
        return self.round(phase).matrix()

    def product(self, start: int = 0, num_rounds: int | None = None) -> np.ndarray:
        """Return the matrix W^{start+R−1} ⋯ W^{start} that R rounds together apply, [N, N]; R = `num_rounds`, by default a period."""
        P_NxN = np.eye(self.num_workers)
        for step in range(start, start + (self.period if num_rounds is None else num_rounds)):
            P_NxN = self.matrix(step) @ P_NxN
        return P_NxN


def is_row_stochastic(topology: Topology) -> bool:
    """Return whether all rows of every round sum to one: workers with equal parameters keep them."""
    return all(_sums_to_one(round_.row_sums()) for round_ in topology.rounds)


def is_column_stochastic(topology: Topology) -> bool:
    """Return whether all columns of every round sum to one, which preserves the sum over workers; push-sum needs no more."""
    return all(_sums_to_one(round_.column_sums()) for round_ in topology.rounds)


def is_doubly_stochastic(topology: Topology) -> bool:
    """Return whether all rows and columns of every round sum to one, which plain gossip needs to agree on the mean."""
    return is_row_stochastic(topology) and is_column_stochastic(topology)


def spectral_gap(topology: Topology, phase: int | None = None) -> float:
    """Return 1 − ‖W − J/n‖₂, by which the distance to the mean shrinks at least: 1 is exact averaging, 0 guarantees no progress.

    For a doubly stochastic W this is one minus its second largest *singular* value (not eigenvalue: time-varying and directed rounds
    are not symmetric). Where only columns sum to one, it may be negative and is no bound.

    Args:
      topology: gives W.
      phase: whose round is W, modulo the period; None: W is the product of all rounds of a period, from phase 0.
    """
    W_NxN = topology.product() if phase is None else topology.matrix(phase)
    return float(1.0 - np.linalg.norm(W_NxN - 1.0 / topology.num_workers, ord=2))


def rounds_to_exact(topology: Topology, start: int = 0) -> int | None:
    """Return the number of rounds from phase `start` on whose product is J/n, to within 1e-9 in every entry: exact averaging.

    None if two periods do not reach it: workers then agree in the limit only, if at all. Finite-time topologies are exact over
    windows that start at certain phases only, such as 0.
    """
    P_NxN = np.eye(topology.num_workers)
    for count in range(1, 2 * topology.period + 1):
        P_NxN = topology.matrix(start + count - 1) @ P_NxN
        if np.abs(P_NxN - 1.0 / topology.num_workers).max() <= EXACT_TOLERANCE:
            return count
    return None


def is_mixing(rounds: Sequence[Round]) -> bool:
    """Return whether repeating these rounds brings all workers to a common value, from any start.

    They do if and only if one is a simple eigenvalue of their product and all others lie strictly inside the unit circle.
    """
    union_NxN = np.sum([round_.matrix() for round_ in rounds], axis=0)
    if not _is_strongly_connected(union_NxN != 0.0):  # cheap, and decides almost every random draw
        return False
    moduli = np.sort(np.abs(np.linalg.eigvals(Topology("", rounds[0].num_workers, tuple(rounds)).product())))
    return len(moduli) == 1 or bool(moduli[-2] < 1.0 - EXACT_TOLERANCE)


def from_matrices(matrices: np.ndarray | Sequence[np.ndarray], name: str = "from_matrices") -> Topology:
    """Return the topology whose rounds apply the given matrices, in order.

    Each matrix becomes its diagonal and as many weighted partial permutations as the busiest worker sends or receives messages, which
    is the least possible. `topology.matrix(t)` returns the matrices, bit for bit.

    Args:
      matrices: one [N, N] matrix or a sequence of them, nonnegative, each with all rows or all columns summing to one; W[i, j] is the
        weight that worker i gives to what it receives from worker j.
      name: name of the topology.

    Raises:
      ValueError: for other matrices, naming the first that does not fit.

    Examples:
      >>> from_matrices([[0.5, 0.5], [0.5, 0.5]]).rounds[0].shifts[0].pairs
      ((0, 1), (1, 0))
    """
    is_one = len(matrices) and np.ndim(matrices[0]) == 1
    arrays = [np.asarray(W_NxN, np.float64) for W_NxN in ([matrices] if is_one else matrices)]
    for index, W_NxN in enumerate(arrays):
        where = f"topology {name!r}: matrix {index}"
        if W_NxN.shape != (len(arrays[0]),) * 2 or not W_NxN.size:
            raise ValueError(f"{where} has shape {W_NxN.shape}; it must be square and of the size of matrix 0, workers x workers")
        if not (np.isfinite(W_NxN).all() and (W_NxN >= 0.0).all()):
            i, j = np.argwhere(~(np.isfinite(W_NxN) & (W_NxN >= 0.0)))[0]
            raise ValueError(f"{where} has entry [{i}, {j}] = {W_NxN[i, j]}; weights must be finite and at least 0")
        row_sums, column_sums = W_NxN.sum(axis=1), W_NxN.sum(axis=0)
        if not (_sums_to_one(row_sums) or _sums_to_one(column_sums)):
            row, column = np.abs(row_sums - 1.0).argmax(), np.abs(column_sums - 1.0).argmax()
            raise ValueError(
                f"{where} is not stochastic: row {row} sums to {row_sums[row]:.6g} and column {column} to "
                f"{column_sums[column]:.6g}; divide it by its row sums (or, for push-sum, by its column sums)"
            )
    return Topology(name, len(arrays[0]) if arrays else 0, tuple(round_from_matrix(W_NxN) for W_NxN in arrays))


def round_from_moves(moves: Iterable[tuple[Sequence[int] | np.ndarray, float]], group_size: int = 1) -> Round:
    """Return the round with W_nodes = Σ_m weight_m · P_m, for whole permutations P_m.

    A move is (targets, weight): node s sends to targets[s]. Fixed points become self weights, and equal permutations are merged into
    one message.
    """
    merged: dict[tuple[int, ...], float] = {}
    for targets, weight in moves:
        key = tuple(int(target) for target in targets)
        merged[key] = merged.get(key, 0.0) + float(weight)
    self_weights_N = np.zeros(len(next(iter(merged))))
    shifts = []
    for targets, weight in merged.items():
        is_fixed_N = np.equal(targets, np.arange(len(targets)))
        self_weights_N += weight * is_fixed_N
        if pairs := tuple((source, target) for source, target in enumerate(targets) if source != target):
            shifts.append(Shift(pairs, tuple((weight * ~is_fixed_N).tolist())))
    return Round(tuple(self_weights_N.tolist()), tuple(shifts), group_size)


def round_from_matrix(W_NxN: np.ndarray) -> Round:
    """Return the round that applies a stochastic matrix, with as many shifts as its busiest worker has messages.

    Undirected graphs are split into matchings where that costs no additional shift: both ends of a link then send to each other at
    the same time.
    """
    num_nodes = len(W_NxN)
    # Sorted by distance, so that first-fit colors a circulant matrix by its rotations.
    edges = sorted(
        ((s, t) for t, s in np.argwhere(W_NxN).tolist() if s != t), key=lambda edge: ((edge[1] - edge[0]) % num_nodes, edge)
    )
    classes = None
    if np.array_equal(W_NxN != 0.0, W_NxN.T != 0.0):
        pairings = coloring.matchings([(s, t) for s, t in edges if s < t], num_nodes)
        if len(pairings) == max(np.bincount([s for s, _ in edges], minlength=1)):
            classes = [[pair for s, t in pairing for pair in ((s, t), (t, s))] for pairing in pairings]
    if classes is None:
        classes = coloring.permutations(edges)
    shifts = []
    for pairs in classes:
        weight_of = {target: float(W_NxN[target, source]) for source, target in pairs}
        shifts.append(Shift(tuple(sorted(pairs)), tuple(weight_of.get(node, 0.0) for node in range(num_nodes))))
    return Round(tuple(np.diag(W_NxN).tolist()), tuple(shifts))


def _sums_to_one(sums: np.ndarray) -> bool:
    return bool(np.all(np.abs(sums - 1.0) <= STOCHASTIC_TOLERANCE))


def _is_strongly_connected(edges_NxN: np.ndarray) -> bool:
    """Return whether every node reaches every other along the edges of a boolean adjacency matrix."""
    for adjacency_NxN in (edges_NxN, edges_NxN.T):
        reached, frontier = np.zeros(len(edges_NxN), bool), np.arange(len(edges_NxN)) == 0
        while frontier.any():
            reached |= frontier
            frontier = adjacency_NxN[:, frontier].any(axis=1) & ~reached
        if not reached.all():
            return False
    return True
