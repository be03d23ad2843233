"""The named topologies: for each a function from the number of workers and options to rounds.

A builder is called with two or more workers (for one worker every topology is the identity) and raises a ValueError of one line when
the size or an option does not fit. Its keyword arguments are the options of `make`. Their defaults work for every size that the graph
exists for; None means "derived from the size". Traits:

    needs       the numbers of workers it exists for; left out: any
    directed    whether a worker may send to one that does not send back
    static      whether every round is the same
    exact       whether a period of rounds averages exactly, at every size

Where a graph looks the same from all workers (ring, torus, exponential, …), its rounds are whole permutations, one per neighbour.
Random graphs depend on (size, options, seed) alone, and are redrawn until repeating their rounds brings all workers to agreement.
"""

from collections.abc import Callable, Iterable
import dataclasses
import functools
import inspect
import itertools
import math
import operator
from typing import Any

import numpy as np

from decjax import registry
from decjax.topology import base_k, coloring, matcha, schedule

Rounds = list[schedule.Round]

_MAX_DRAWS = 1000
MAX_ROUNDS = 1024  # in a period that is drawn at random
_ANY_SIZE = "'base_k' works for any number"


def _register(name: str, **traits) -> Callable[[Callable[..., Rounds]], Callable[..., Rounds]]:
    """A decorator that registers a builder of rounds as a factory of topologies."""

    def enter(builder):
        @functools.wraps(builder)
        def factory(num_workers, **options):
            n = _integer("num_workers", num_workers, 1)
            return schedule.Topology(name, n, tuple(builder(n, **options)) if n > 1 else (schedule.Round((1.0,)),))

        signature = inspect.signature(builder)
        size, *options = signature.parameters.values()
        factory.__signature__ = signature.replace(parameters=[size.replace(name="num_workers"), *options])  # pyright: ignore[reportAttributeAccessIssue]
        registry.register("topology", name, **traits)(factory)
        return builder

    return enter


def names() -> tuple[str, ...]:
    """The names of all topologies that `make` builds."""
    return registry.names("topology")


def options(name: str) -> dict[str, object]:
    """The options of a named topology with their defaults; ValueError for an unknown name."""
    return {option: entry.default for option, entry in registry.part("topology", name).options.items()}


def make(name: str, num_workers: int, /, **chosen: Any) -> schedule.Topology:
    """The topology of a name for N workers.

    Args:
      name: one of `names()`, or a call form such as "base_k(k=2)".
      num_workers: N >= 1; for one worker every topology is the identity.
      **chosen: options of that topology, see `options(name)`. Equal options give equal topologies; random ones take a `seed`.

    Raises:
      ValueError: for an unknown name or option, a size that the graph does not exist for, or a bad option value.

    Examples:
      >>> make("hierarchical", 16, local_size=4, outer="base_k(k=3)").matrix(0).shape
      (16, 16)
    """
    return registry.make("topology", name, num_workers, **chosen)


# Exact and neighbour graphs ---------------------------------------------------------------------------------


@_register("complete", static=True, exact=True)
def _complete(n: int) -> Rounds:
    """All workers average exactly in every round: W = J/n, an all-reduce."""
    return [schedule.Round((1.0,), group_size=n)]


@_register("ring", static=True)
def _ring(n: int) -> Rounds:
    """Self and both neighbours on a ring, weight 1/3 each (two workers: 1/2 each)."""
    return [_equal_weights(n, [_rotation(n, hop) for hop in sorted({1, n - 1})])]


@_register("one_peer_ring")
def _one_peer_ring(n: int) -> Rounds:
    """The edges of the ring in turns, even ones, then odd ones, weight 1/2; odd rings take three rounds, one worker idle in each."""
    # In odd rings the worker before the first one is idle; in the third round it is an odd one, so that the edge (n−1, 0) has its turn.
    firsts = [0, 1] if n % 2 == 0 else [n, 1, (n // 2 | 1) + 1]
    return [_pairwise(n, [((first + 2 * p) % n, (first + 2 * p + 1) % n) for p in range(n // 2)]) for first in firsts]


@_register("torus", needs="a grid of two sides of at least 2", static=True)
def _torus(n: int, shape: tuple[int, int] | None = None) -> Rounds:
    """Self and the four neighbours on a grid that wraps around, weight 1/5 each; worker = row · columns + column.

    Along a side of two, both neighbours are the same worker, which then has the weight 2/5.

    Args:
        shape: (rows, columns); None: as near to a square as n allows.
    """
    workers_RxC = _grid("torus", n, shape, step=1)
    neighbors = [np.roll(workers_RxC, -hop, axis).ravel() for axis in (0, 1) for hop in (1, -1)]
    return [_equal_weights(n, neighbors)]


@_register("one_peer_torus", needs="a grid with even sides")
def _one_peer_torus(n: int, shape: tuple[int, int] | None = None) -> Rounds:
    """The edges of the torus in four rounds of pairs, weight 1/2: even columns, even rows, odd columns, odd rows.

    Args:
        shape: (rows, columns), both even; None: as near to a square as n allows.
    """
    workers_RxC = _grid("one_peer_torus", n, shape, step=2)
    # The first worker of each pair is moved to an even position along the axis.
    turned = [np.moveaxis(np.roll(workers_RxC, -first, axis), axis, 0) for first in (0, 1) for axis in (1, 0)]
    return [_pairwise(n, zip(grid[0::2].ravel(), grid[1::2].ravel(), strict=True)) for grid in turned]


@_register("exponential", directed=True, static=True)
def _exponential(n: int) -> Rounds:
    """Self and the workers 2^k further on, k < ⌈log2 n⌉, with equal weights.

    Reference: Ying et al. 2021, arXiv 2110.13363.
    """
    return [_equal_weights(n, [_rotation(n, 2**k) for k in range(_log2_ceil(n))])]


@_register("one_peer_exponential", directed=True)
def _one_peer_exponential(n: int, pairwise: bool = False) -> Rounds:
    """One hop of the exponential graph per round, weight 1/2; exact over a period for powers of two.

    In round k worker i sends to i + 2^k, modulo n.

    Args:
        pairwise: whether i and i XOR 2^k exchange instead; workers whose partner would be n or more are then idle.

    Reference: Ying et al. 2021, "Exponential graph is provably efficient for decentralized deep training", arXiv 2110.13363.
    """
    hops = [2**k for k in range(_log2_ceil(n))]
    if pairwise:
        return [_pairwise(n, [(i, i ^ hop) for i in range(n) if i < i ^ hop < n]) for hop in hops]
    return [_equal_weights(n, [_rotation(n, hop)]) for hop in hops]


@_register("alternating_exponential_ring", needs="local_size * 2^r workers", exact=True)
def _alternating_exponential_ring(n: int, local_size: int = 1) -> Rounds:
    """AER: nodes j and j XOR 2^i average jointly, half of these pairs in phase 2i, the other half in phase 2i + 1.

    Pairs are numbered over all i: those of odd number average in the even phase, those of even number in the odd phase. Meanwhile
    the other nodes average internally, over their `local_size` workers. So about half of the links between nodes are in use at any
    time. Exact over any period that starts at an even phase.

    Args:
        local_size: L, workers of a node.

    Reference: Wang et al. 2024, arXiv 2410.11998.
    """
    local_size = _integer("local_size", local_size, 1)
    nodes = n // local_size
    if n % local_size or nodes < 2 or nodes & (nodes - 1):
        raise ValueError(
            f"topology 'alternating_exponential_ring' needs local_size * 2^r workers with r >= 1, got {n} with "
            f"local_size={local_size}; {_ANY_SIZE}"
        )
    # For each i there is an even number of pairs, or there is only one i: a pair's number and its place in the list have one parity.
    pairs_by_round = [[(j, j ^ 2**i) for j in range(nodes) if j < j ^ 2**i] for i in range(_log2_ceil(nodes))]
    return [_pairwise(nodes, pairs[parity::2], group_size=local_size) for pairs in pairs_by_round for parity in (1, 0)]


@_register("hypercube", needs="a power of two workers", static=True)
def _hypercube(n: int) -> Rounds:
    """Self and the log2 n workers i XOR 2^k, with equal weights."""
    if n & (n - 1):
        raise ValueError(f"topology 'hypercube' needs a power of two workers, got {n}; {_ANY_SIZE}")
    return [_equal_weights(n, [np.arange(n) ^ 2**k for k in range(_log2_ceil(n))])]


@_register("star", static=True)
def _star(n: int) -> Rounds:
    """Worker 0 exchanges with all others, with Metropolis weights W_ij = 1/(1 + max(deg i, deg j))."""
    return [_metropolis(n, [(0, i) for i in range(1, n)])]


@_register("line", static=True)
def _line(n: int) -> Rounds:
    """The ring without the edge (n−1, 0), with Metropolis weights W_ij = 1/(1 + max(deg i, deg j))."""
    return [_metropolis(n, [(i, i + 1) for i in range(n - 1)])]


# Random undirected graphs -----------------------------------------------------------------------------------


@_register("erdos_renyi", static=True)
def _erdos_renyi(n: int, p: float | None = None, seed: int = 0) -> Rounds:
    """A random graph that has each edge with probability p, with Metropolis weights.

    Args:
        p: probability of an edge; None: 2 ln(n)/n, at which most graphs are connected.
        seed: of the random draws.
    """
    p = min(1.0, 2.0 * math.log(n) / n) if p is None else _real("p", p, 1.0)
    rng = _rng(seed)
    pairs_Ex2 = np.stack(np.triu_indices(n, 1), axis=1)

    def draw():
        drawn_Ex2 = pairs_Ex2[rng.random(len(pairs_Ex2)) < p]
        return [_metropolis(n, drawn_Ex2.tolist())] if len(np.unique(drawn_Ex2)) == n else []  # Nobody is alone.

    problem = f"found no connected graph of {n} workers with p={p:.3g}; raise p above ln(n)/n = {math.log(n) / n:.2g}"
    return _first_mixing(draw, f"topology 'erdos_renyi' {problem}")


@_register("random_matching")
def _random_matching(n: int, rounds: int | None = None, seed: int = 0) -> Rounds:
    """In every round workers average in random pairs, weight 1/2; for odd n one worker is idle.

    Args:
        rounds: number of rounds until the schedule repeats; None: 2⌈log2 n⌉.
        seed: of the random draws.
    """
    count, rng = _num_rounds(n, rounds), _rng(seed)
    return _first_mixing(
        lambda: [_pairwise(n, rng.permutation(n)[: n - n % 2].reshape(-1, 2)) for _ in range(count)],
        f"topology 'random_matching' cannot connect {n} workers in rounds={count}; raise rounds",
    )


@_register("matcha")
def _matcha(n: int, base: str = "ring", budget: float = 0.5, rounds: int | None = None, seed: int = 0) -> Rounds:
    """MATCHA: a base graph is split into matchings, of which a random subset is active in each round.

    The probabilities p_j maximise the algebraic connectivity λ2(Σ p_j L_j) of the expected graph, and a round is W = I − α Σ_active L_j
    with the α that minimises ‖E[WᵀW] − J/n‖. The sequence is drawn once and repeats. Differences from the paper: α is at most 1/Δ, so
    that weights stay nonnegative, and probabilities come from projected supergradient ascent.

    Args:
        base: the static undirected graph that is split, in call form, as "ring" or "torus(shape=(2,4))".
        budget: fraction of the matchings that is active on average, in (0, 1].
        rounds: number of rounds until the schedule repeats; None: 2⌈log2 n⌉.
        seed: of the random draws.

    Reference: Wang et al. 2019, arXiv 1905.09435.
    """
    budget, rounds, rng = _real("budget", budget, 1.0), _num_rounds(n, rounds), _rng(seed)
    traits = registry.part("topology", registry.parse("topology", base)[0]).traits
    if not traits.get("static") or traits.get("directed") or not (graph := make(base, n)).is_symmetric:
        raise ValueError(
            f"topology 'matcha' needs a static undirected base graph, got base={base!r}; use 'ring', 'torus' or 'erdos_renyi'"
        )
    edges = [(int(i), int(j)) for i, j in np.argwhere(np.triu(graph.matrix(0), 1))]
    pairings = coloring.matchings(edges, n)
    laplacians_MxNxN = np.array([np.eye(n) - np.eye(n)[_swap(n, pairing)] for pairing in pairings])
    probabilities = matcha.activation_probabilities(laplacians_MxNxN, budget)
    alpha = matcha.mixing_weight(laplacians_MxNxN, probabilities)

    def draw_round():
        active = itertools.compress(pairings, rng.random(len(pairings)) < probabilities)
        moves = [(_swap(n, pairing), alpha) for pairing in active]
        return schedule.round_from_moves([(range(n), 1.0 - alpha * len(moves)), *moves])

    return _first_mixing(
        lambda: [draw_round() for _ in range(rounds)],
        f"topology 'matcha' cannot connect {n} workers over base={base!r} in rounds={rounds} with budget={budget:g}; "
        "raise rounds or budget",
    )


# Directed graphs for push-sum -------------------------------------------------------------------------------


@_register("directed_ring", directed=True, static=True)
def _directed_ring(n: int) -> Rounds:
    """Each worker keeps half of its value and sends the other half to the next on the ring: i → i + 1."""
    return [_equal_weights(n, [_rotation(n, 1)])]


# The exponential graph is directed as it is; the second name is for use with push-sum.
_register("directed_exponential", directed=True, static=True)(_exponential)


@_register("random_digraph", directed=True, static=True)
def _random_digraph(n: int, degree: int | None = None, seed: int = 0) -> Rounds:
    """Each worker splits its value equally among itself and `degree` random others: a column-stochastic W, for push-sum.

    One of the others is the next on a random cycle through all workers, which makes the graph strongly connected; the remaining ones
    are drawn uniformly.

    Args:
        degree: number of others that a worker sends to; None: ⌈log2 n⌉.
        seed: of the random draws.
    """
    degree = _log2_ceil(n) if degree is None else _integer("degree", degree, 1, n - 1)
    rng = _rng(seed)
    cycle = rng.permutation(n)
    A_NxN = np.eye(n) / (degree + 1.0)
    for sender, successor in zip(cycle, np.roll(cycle, -1), strict=True):
        others = np.setdiff1d(np.arange(n), (sender, successor))
        A_NxN[[successor, *rng.choice(others, degree - 1, replace=False)], sender] = 1.0 / (degree + 1.0)
    return [schedule.round_from_matrix(A_NxN)]


# Exact in finite time for any number of workers -------------------------------------------------------------


@_register("base_k", exact=True)
def _base_k(n: int, k: int = 1) -> Rounds:
    """Base-(k+1) graph: exact after at most 2 log_{k+1}(n) + 2 rounds, for any n, with at most k neighbours in each round.

    Args:
        k: the most neighbours that a worker has in a round.

    Reference: Takezawa et al. 2023, arXiv 2305.11420.
    """
    return [_round_from_edges(n, edges) for edges in base_k.base_graph(n, _integer("k", k, 1))]


# Random circulant graphs ------------------------------------------------------------------------------------
#
# EquiTopo averages basis graphs A(u), in which worker i+u gives the weight (n−1)/n to worker i and 1/n to itself, u = 1 … n−1. Their
# mean over all u is J/n, so the mean of a few random ones is close to it at any n. Reference: Song et al., "Communication-Efficient
# Topologies for Decentralized Learning with O(1) Consensus Rate", NeurIPS 2022.


@_register("equitopo_d", directed=True, static=True)
def _equitopo_d(n: int, degree: int | None = None, seed: int = 0) -> Rounds:
    """D-EquiStatic: each worker hears from `degree` random distances u; the mean of the basis graphs A(u).

    In A(u) worker i+u gives the weight (n−1)/n to worker i and 1/n to itself.

    Args:
        degree: number of distances u, drawn without replacement; None: ⌈log2 n⌉.
        seed: of the random draws.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo), which draws with replacement.
    """
    return _equitopo_static("equitopo_d", n, degree, seed, both_ways=False)


@_register("equitopo_u", static=True)
def _equitopo_u(n: int, degree: int | None = None, seed: int = 0) -> Rounds:
    """U-EquiStatic: the undirected form of `equitopo_d`, the mean of (A(u) + A(u)ᵀ)/2, with up to 2·degree neighbours.

    Args:
        degree: number of distances u, drawn without replacement; None: ⌈log2 n⌉.
        seed: of the random draws.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo).
    """
    return _equitopo_static("equitopo_u", n, degree, seed, both_ways=True)


def _equitopo_static(name: str, n: int, degree: int | None, seed: int, both_ways: bool) -> Rounds:
    degree = _log2_ceil(n) if degree is None else _integer("degree", degree, 1, n - 1)
    rng = _rng(seed)

    def draw():
        hops = rng.choice(np.arange(1, n), degree, replace=False)
        if both_ways:
            hops = np.concatenate([hops, n - hops])
        moves = [(_rotation(n, hop), (n - 1) / (n * len(hops))) for hop in sorted(hops)]
        return [schedule.round_from_moves([(range(n), 1.0 / n), *moves])]

    return _first_mixing(draw, f"topology {name!r} found no connected graph of {n} workers; raise degree={degree}")


@_register("equitopo_od", directed=True)
def _equitopo_od(n: int, rounds: int | None = None, eta: float = 0.5, seed: int = 0) -> Rounds:
    """OD-EquiDyn: one neighbour per round, at a random distance u: W = (1−η) I + η A(u), with A(u) as in `equitopo_d`.

    Args:
        rounds: number of rounds until the schedule repeats; None: 2⌈log2 n⌉.
        eta: η in (0, 1], the weight of what arrives.
        seed: of the random draws.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo).
    """
    return _equitopo_one_peer("equitopo_od", n, rounds, eta, seed, lambda rng: _rotation(n, rng.integers(1, n)))


@_register("equitopo_ou")
def _equitopo_ou(n: int, rounds: int | None = None, eta: float = 0.5, seed: int = 0) -> Rounds:
    """OU-EquiDyn: as `equitopo_od`, but workers at distance u exchange in pairs; each cycle i, i+u, … is paired from a random start.

    Args:
        rounds: number of rounds until the schedule repeats; None: 2⌈log2 n⌉.
        eta: η in (0, 1], the weight of what arrives.
        seed: of the random draws.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo).
    """

    def draw_targets(rng):
        hop, start = rng.integers(1, n), rng.integers(n)
        num_cycles = math.gcd(int(hop), n)
        pairs = itertools.product(range(num_cycles), range(n // num_cycles // 2))
        firsts = [start + cycle + 2 * pair * hop for cycle, pair in pairs]
        return _swap(n, [(first % n, (first + hop) % n) for first in firsts])

    return _equitopo_one_peer("equitopo_ou", n, rounds, eta, seed, draw_targets)


def _equitopo_one_peer(name: str, n: int, rounds: int | None, eta: float, seed: int, draw_targets) -> Rounds:
    rounds, eta, rng = _num_rounds(n, rounds), _real("eta", eta, 1.0), _rng(seed)
    weight = eta * (n - 1) / n

    def draw():
        return [schedule.round_from_moves([(range(n), 1.0 - weight), (draw_targets(rng), weight)]) for _ in range(rounds)]

    return _first_mixing(draw, f"topology {name!r} cannot connect {n} workers in rounds={rounds}; raise rounds")


# Composition ------------------------------------------------------------------------------------------------


@_register("hierarchical", needs="a multiple of local_size", directed=True)
def _hierarchical(n: int, local_size: int = 2, outer: str = "one_peer_exponential") -> Rounds:
    """An exact mean over each L consecutive workers, and any graph between these nodes: W = W_outer ⊗ J_L / L.

    Args:
        local_size: L, workers of a node.
        outer: graph between nodes, in call form, as "base_k(k=2)".
    """
    local_size = _integer("local_size", local_size, 1)
    if n % local_size:
        raise ValueError(
            f"topology 'hierarchical' needs a multiple of local_size={local_size} workers, got {n}; set it to a divisor of {n}, or "
            f"{_ANY_SIZE}"
        )
    # If the outer graph has groups itself, theirs are multiplied: Kronecker products associate.
    rounds = make(outer, n // local_size).rounds
    return [dataclasses.replace(round_, group_size=round_.group_size * local_size) for round_ in rounds]


# Pieces -----------------------------------------------------------------------------------------------------


def _rotation(n: int, hop: int) -> np.ndarray:
    return (np.arange(n) + hop) % n


def _swap(n: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    targets = list(range(n))
    for i, j in pairs:
        targets[i], targets[j] = j, i
    return targets


def _equal_weights(n: int, permutations: Iterable[Iterable[int]]) -> schedule.Round:
    """The round that gives self and all permutations the same weight."""
    moves = [range(n), *permutations]
    return schedule.round_from_moves([(targets, 1.0 / len(moves)) for targets in moves])


def _pairwise(n: int, pairs: Iterable[tuple[int, int]], group_size: int = 1) -> schedule.Round:
    """The round in which each pair averages and all others are idle."""
    return schedule.round_from_moves([(range(n), 0.5), (_swap(n, pairs), 0.5)], group_size)


def _round_from_edges(n: int, edges: base_k.Edges) -> schedule.Round:
    """The round with the given weights off the diagonal, and what is left of each row on it."""
    W_NxN = np.zeros((n, n))
    for edge, weight in edges.items():
        W_NxN[edge] = weight
    # Rounding must not make a weight negative where nothing is left.
    np.fill_diagonal(W_NxN, np.maximum(1.0 - W_NxN.sum(axis=1), 0.0))
    return schedule.round_from_matrix(W_NxN)


def _metropolis(n: int, pairs: Iterable[tuple[int, int]]) -> schedule.Round:
    """W_ij = 1 / (1 + max(deg i, deg j)) on the edges: symmetric for any degrees."""
    pairs = list(pairs)
    degrees = np.bincount(np.array(pairs, int).ravel(), minlength=n)
    weights = {(i, j): 1.0 / (1.0 + max(degrees[i], degrees[j])) for i, j in pairs}
    return _round_from_edges(n, weights | {(j, i): weight for (i, j), weight in weights.items()})


def _grid(name: str, n: int, shape: tuple[int, int] | None, step: int) -> np.ndarray:
    """Workers on an R x C grid whose sides are >= 2 and multiples of `step`, near-square by default."""
    sides = "sides that are even" if step == 2 else "two sides of at least 2"
    if shape is None:
        fits = [r for r in range(2, math.isqrt(n) + 1) if n % r == 0 and r % step == 0 and n // r % step == 0]
        if not fits:
            raise ValueError(f"topology {name!r} needs a grid with {sides}, got {n} workers; {_ANY_SIZE}")
        shape = (fits[-1], n // fits[-1])
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise ValueError(f"'shape' has to be (rows, columns), got {shape!r}")
    rows, columns = (_integer("shape", side, 2) for side in shape)
    if rows * columns != n or rows % step or columns % step:
        raise ValueError(
            f"topology {name!r} needs a grid of {n} workers with {sides}, got shape={rows}x{columns}; leave shape out for a "
            f"near-square grid, and if there is none, {_ANY_SIZE}"
        )
    return np.arange(n).reshape(rows, columns)


def _first_mixing(draw: Callable[[], Rounds], problem: str) -> Rounds:
    """The first random schedule that brings all workers to agreement; a ValueError says `problem` if none of `_MAX_DRAWS` does."""
    for _ in range(_MAX_DRAWS):
        if (rounds := draw()) and schedule.is_mixing(rounds):
            return rounds
    raise ValueError(problem)


def _log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


def _num_rounds(n: int, rounds: int | None) -> int:
    return 2 * _log2_ceil(n) if rounds is None else _integer("rounds", rounds, 1, MAX_ROUNDS)


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(_integer("seed", seed, 0, 2**63 - 1))


def _integer(option: str, value: Any, low: int, high: int | None = None) -> int:
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        interval = f">= {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{option!r} has to be an integer {interval}, got {value!r}")
    return number


def _real(option: str, value: Any, high: float) -> float:
    """The value of an option as a float in (0, high]; ValueError for any other."""
    number = value  # numpy's types take a scalar for text and bytes as well.
    if isinstance(value, (bool, str)) or not np.isscalar(value) or not 0.0 < number <= high:
        raise ValueError(f"{option!r} has to be a number in (0, {high:g}], got {value!r}")
    return float(number)
