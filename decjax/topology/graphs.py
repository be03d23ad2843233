"""Named topologies: for each a function from the number of workers and options to rounds; see `build`."""

import dataclasses

import numpy as np

from decjax.topology import base_k, build, named, schedule

# Exact and neighbour graphs ---------------------------------------------------------------------------------


@build.register("complete", static=True, exact=True)
def _complete(n: int) -> build.Rounds:
    """All workers average exactly in every round: W = J/n, an all-reduce."""
    return [schedule.Round((1.0,), group_size=n)]


@build.register("ring", static=True)
def _ring(n: int) -> build.Rounds:
    """Self and both neighbours on a ring, weight 1/3 each (two workers: 1/2 each)."""
    return [build.equal_weights(n, [build.rotation(n, hop) for hop in sorted({1, n - 1})])]


@build.register("one_peer_ring")
def _one_peer_ring(n: int) -> build.Rounds:
    """The edges of the ring in turns, even ones, then odd ones, weight 1/2; odd rings take three rounds, one worker idle in each."""
    # In odd rings the worker before the first one is idle; in the third round it is an odd one, so that the edge (n−1, 0) has its turn.
    firsts = [0, 1] if n % 2 == 0 else [n, 1, (n // 2 | 1) + 1]
    return [build.pairwise(n, [((first + 2 * p) % n, (first + 2 * p + 1) % n) for p in range(n // 2)]) for first in firsts]


@build.register("torus", needs="a grid of two sides of at least 2", static=True)
def _torus(n: int, shape: tuple[int, int] | None = None) -> build.Rounds:
    """Self and the four neighbours on a grid that wraps around, weight 1/5 each; worker = row · columns + column.

    Along a side of two, both neighbours are the same worker, which then has the weight 2/5.

    Args:
        shape: (rows, columns); None: as near to a square as n allows.
    """
    workers_RxC = build.grid("torus", n, shape, step=1)
    neighbors = [np.roll(workers_RxC, -hop, axis).ravel() for axis in (0, 1) for hop in (1, -1)]
    return [build.equal_weights(n, neighbors)]


@build.register("one_peer_torus", needs="a grid with even sides")
def _one_peer_torus(n: int, shape: tuple[int, int] | None = None) -> build.Rounds:
    """The edges of the torus in four rounds of pairs, weight 1/2: even columns, even rows, odd columns, odd rows.

    Args:
        shape: (rows, columns), both even; None: as near to a square as n allows.
    """
    workers_RxC = build.grid("one_peer_torus", n, shape, step=2)
    # The first worker of each pair is moved to an even position along the axis.
    turned = [np.moveaxis(np.roll(workers_RxC, -first, axis), axis, 0) for first in (0, 1) for axis in (1, 0)]
    return [build.pairwise(n, zip(grid[0::2].ravel(), grid[1::2].ravel(), strict=True)) for grid in turned]


@build.register("exponential", directed=True, static=True)
def _exponential(n: int) -> build.Rounds:
    """Self and the workers 2^k further on, k < ⌈log2 n⌉, with equal weights.

    Reference: Ying et al. 2021, arXiv 2110.13363.
    """
    return [build.equal_weights(n, [build.rotation(n, 2**k) for k in range(build.log2_ceil(n))])]


@build.register("one_peer_exponential", directed=True)
def _one_peer_exponential(n: int, pairwise: bool = False) -> build.Rounds:
    """One hop of the exponential graph per round, weight 1/2; exact over a period for powers of two.

    In round k worker i sends to i + 2^k, modulo n.

    Args:
        pairwise: whether i and i XOR 2^k exchange instead; workers whose partner would be n or more are then idle.

    Reference: Ying et al. 2021, "Exponential graph is provably efficient for decentralized deep training", arXiv 2110.13363.
    """
    hops = [2**k for k in range(build.log2_ceil(n))]
    if pairwise:
        return [build.pairwise(n, [(i, i ^ hop) for i in range(n) if i < i ^ hop < n]) for hop in hops]
    return [build.equal_weights(n, [build.rotation(n, hop)]) for hop in hops]


@build.register("alternating_exponential_ring", needs="local_size * 2^r workers", exact=True)
def _alternating_exponential_ring(n: int, local_size: int = 1) -> build.Rounds:
    """AER: nodes j and j XOR 2^i average jointly, half of these pairs in phase 2i, the other half in phase 2i + 1.

    Pairs are numbered over all i: those of odd number average in the even phase, those of even number in the odd phase. Meanwhile
    the other nodes average internally, over their `local_size` workers. So about half of the links between nodes are in use at any
    time. Exact over any period that starts at an even phase.

    Args:
        local_size: L, workers of a node.

    Reference: Wang et al. 2024, arXiv 2410.11998.
    """
    local_size = build.integer("local_size", local_size, 1)
    nodes = n // local_size
    if n % local_size or nodes < 2 or nodes & (nodes - 1):
        raise ValueError(
            f"topology 'alternating_exponential_ring' needs local_size * 2^r workers with r >= 1, got {n} with "
            f"local_size={local_size}; {build.ANY_SIZE}"
        )
    # For each i there is an even number of pairs, or there is only one i: a pair's number and its place in the list have one parity.
    pairs_by_round = [[(j, j ^ 2**i) for j in range(nodes) if j < j ^ 2**i] for i in range(build.log2_ceil(nodes))]
    return [build.pairwise(nodes, pairs[parity::2], group_size=local_size) for pairs in pairs_by_round for parity in (1, 0)]


@build.register("hypercube", needs="a power of two workers", static=True)
def _hypercube(n: int) -> build.Rounds:
    """Self and the log2 n workers i XOR 2^k, with equal weights."""
    if n & (n - 1):
        raise ValueError(f"topology 'hypercube' needs a power of two workers, got {n}; {build.ANY_SIZE}")
    return [build.equal_weights(n, [np.arange(n) ^ 2**k for k in range(build.log2_ceil(n))])]


@build.register("star", static=True)
def _star(n: int) -> build.Rounds:
    """Worker 0 exchanges with all others, with Metropolis weights W_ij = 1/(1 + max(deg i, deg j))."""
    return [build.metropolis(n, [(0, i) for i in range(1, n)])]


@build.register("line", static=True)
def _line(n: int) -> build.Rounds:
    """The ring without the edge (n−1, 0), with Metropolis weights W_ij = 1/(1 + max(deg i, deg j))."""
    return [build.metropolis(n, [(i, i + 1) for i in range(n - 1)])]


# Directed graphs for push-sum -------------------------------------------------------------------------------


@build.register("directed_ring", directed=True, static=True)
def _directed_ring(n: int) -> build.Rounds:
    """Each worker keeps half of its value and sends the other half to the next on the ring: i → i + 1."""
    return [build.equal_weights(n, [build.rotation(n, 1)])]


# The exponential graph is directed as it is; the second name is for use with push-sum.
build.register("directed_exponential", directed=True, static=True)(_exponential)


# Exact in finite time for any number of workers -------------------------------------------------------------


@build.register("base_k", exact=True)
def _base_k(n: int, k: int = 1) -> build.Rounds:
    """Base-(k+1) graph: exact after at most 2 log_{k+1}(n) + 2 rounds, for any n, with at most k neighbours in each round.

    Args:
        k: the most neighbours that a worker has in a round.

    Reference: Takezawa et al. 2023, arXiv 2305.11420.
    """
    return [build.from_edges(n, edges) for edges in base_k.base_graph(n, build.integer("k", k, 1))]


# Composition ------------------------------------------------------------------------------------------------


@build.register("hierarchical", needs="a multiple of local_size", directed=True)
def _hierarchical(n: int, local_size: int = 2, outer: str = "one_peer_exponential") -> build.Rounds:
    """An exact mean over each L consecutive workers, and any graph between these nodes: W = W_outer ⊗ J_L / L.

    Args:
        local_size: L, workers of a node.
        outer: graph between nodes, in call form, as "base_k(k=2)".
    """
    local_size = build.integer("local_size", local_size, 1)
    if n % local_size:
        raise ValueError(
            f"topology 'hierarchical' needs a multiple of local_size={local_size} workers, got {n}; set it to a divisor of {n}, or "
            f"{build.ANY_SIZE}"
        )
    # If the outer graph has groups itself, theirs are multiplied: Kronecker products associate.
    rounds = named.make(outer, n // local_size).rounds
    return [dataclasses.replace(round_, group_size=round_.group_size * local_size) for round_ in rounds]
