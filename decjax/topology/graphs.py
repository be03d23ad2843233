"""Named topologies that are not random: functions from the number of workers and options to rounds; see `build`."""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
from typing import Annotated

import numpy as np

from decjax.options import Count, Range
from decjax.topology import build, schedule
from decjax.topology.build import NodeSize, Shape, Workers

Edges = dict[tuple[int, int], float]  # (receiver, sender) -> weight, without the diagonal

# -- Exact and neighbor graphs ----------------------------------------------------------------------------------------


@build.register("complete", static=True, exact=True)
def _complete(n: Workers) -> build.Rounds:
    """All workers average exactly in every round: W = J/n, an all-reduce."""
    return [schedule.Round((1.0,), group_size=n)]


@build.register("ring", static=True)
def _ring(n: Workers) -> build.Rounds:
    """Self and both neighbors on a ring, weight 1/3 each (two workers: 1/2 each)."""
    return [build.equal_weights(n, [build.rotation(n, hop) for hop in sorted({1, n - 1})])]


@build.register("one_peer_ring")
def _one_peer_ring(n: Workers) -> build.Rounds:
    """The edges of the ring in turns, even ones, then odd ones, weight 1/2; odd rings take three rounds, one worker idle in each."""
    # In odd rings the worker before the first one is idle; in the third round it is an odd one, so that the edge (n−1, 0) has its turn.
    firsts = [0, 1] if n % 2 == 0 else [n, 1, (n // 2 | 1) + 1]
    return [build.pairwise(n, [((first + 2 * p) % n, (first + 2 * p + 1) % n) for p in range(n // 2)]) for first in firsts]


@build.register("torus", needs="a grid of two sides of at least 2", static=True)
def _torus(n: Workers, shape: Shape | None = None) -> build.Rounds:
    """Self and the four neighbors on a grid that wraps around, weight 1/5 each; worker = row · columns + column.

    Along a side of two, both neighbors are the same worker, which then has the weight 2/5.
    """
    workers_RxC = build.grid(n, shape, step=1)
    neighbors = [np.roll(workers_RxC, -hop, axis).ravel() for axis in (0, 1) for hop in (1, -1)]
    return [build.equal_weights(n, neighbors)]


@build.register("grid", needs="a grid of two sides of at least 2", static=True)
def _grid(n: Workers, shape: Shape | None = None) -> build.Rounds:
    """The torus without the edges that wrap around, with Metropolis weights W_ij = 1/(1 + max(deg i, deg j))."""
    workers_RxC = build.grid(n, shape, step=1)
    along, across = (workers_RxC[:, :-1], workers_RxC[:, 1:]), (workers_RxC[:-1], workers_RxC[1:])
    pairs = [pair for ends in (along, across) for pair in zip(*(end.ravel().tolist() for end in ends), strict=True)]
    return [build.metropolis(n, pairs)]


@build.register("one_peer_torus", needs="a grid with even sides")
def _one_peer_torus(n: Workers, shape: Shape | None = None) -> build.Rounds:
    """The edges of the torus in four rounds of pairs, weight 1/2: even columns, even rows, odd columns, odd rows.

    Args:
        shape: (rows, columns), both even; None: as near to a square as n allows.
    """
    workers_RxC = build.grid(n, shape, step=2)
    # The first worker of each pair is moved to an even position along the axis.
    turned = [np.moveaxis(np.roll(workers_RxC, -first, axis), axis, 0) for first in (0, 1) for axis in (1, 0)]
    return [build.pairwise(n, zip(grid[0::2].ravel(), grid[1::2].ravel(), strict=True)) for grid in turned]


@build.register("exponential", directed=True, static=True)
def _exponential(n: Workers) -> build.Rounds:
    """Self and the workers 2^k further on, k < ⌈log2 n⌉, with equal weights.

    Reference: Ying et al. 2021, arXiv 2110.13363.
    """
    return [build.equal_weights(n, [build.rotation(n, 2**k) for k in range(build.log2_ceil(n))])]


@build.register("one_peer_exponential", directed=True)
def _one_peer_exponential(n: Workers, pairwise: bool = False) -> build.Rounds:
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


@build.register("symmetric_exponential", static=True)
def _symmetric_exponential(n: Workers, base: Annotated[int, Range(2)] = 4) -> build.Rounds:
    """Self and the workers b^k further on and b^k back, b^k ≤ n/2, with equal weights: b = 4 has about log2 n neighbors.

    Args:
        base: b; 2: the exponential graph in both directions.

    Reference: BlueFog's `SymmetricExponentialGraph`, arXiv 2111.04287.
    """
    powers = [base**k for k in range(n.bit_length()) if base**k <= n // 2]
    hops = sorted({hop for power in powers for hop in (power, n - power)})
    return [build.equal_weights(n, [build.rotation(n, hop) for hop in hops])]


@build.register("alternating_exponential_ring", needs="local_size * 2^r workers", exact=True)
def _alternating_exponential_ring(n: Workers, local_size: NodeSize = 1) -> build.Rounds:
    """AER: nodes j and j XOR 2^i average jointly, half of these pairs in phase 2i, the other half in phase 2i + 1.

    Pairs are numbered over all i: those of odd number average in the even phase, those of even number in the odd phase. Meanwhile
    the other nodes average internally, over their `local_size` workers. So about half of the links between nodes are in use at any
    time. Exact over any period that starts at an even phase.

    Reference: Wang et al. 2024, arXiv 2410.11998.
    """
    nodes = n // local_size
    build.require(
        n % local_size == 0 and nodes >= 2 and nodes & (nodes - 1) == 0,
        f"needs local_size * 2^r workers with r >= 1, got {n} with local_size={local_size}; {build.ANY_SIZE}",
    )
    # For each i there is an even number of pairs, or there is only one i: a pair's number and its place in the list have one parity.
    pairs_by_round = [[(j, j ^ 2**i) for j in range(nodes) if j < j ^ 2**i] for i in range(build.log2_ceil(nodes))]
    return [build.pairwise(nodes, pairs[parity::2], group_size=local_size) for pairs in pairs_by_round for parity in (1, 0)]


@build.register("hypercube", needs="a power of two workers", static=True)
def _hypercube(n: Workers) -> build.Rounds:
    """Self and the log2 n workers i XOR 2^k, with equal weights."""
    build.require(n & (n - 1) == 0, f"needs a power of two workers, got {n}; {build.ANY_SIZE}")
    return [build.equal_weights(n, [np.arange(n) ^ 2**k for k in range(build.log2_ceil(n))])]


@build.register("star", static=True)
def _star(n: Workers) -> build.Rounds:
    """Worker 0 exchanges with all others, with Metropolis weights W_ij = 1/(1 + max(deg i, deg j))."""
    return [build.metropolis(n, [(0, i) for i in range(1, n)])]


@build.register("line", static=True)
def _line(n: Workers) -> build.Rounds:
    """The ring without the edge (n−1, 0), with Metropolis weights W_ij = 1/(1 + max(deg i, deg j))."""
    return [build.metropolis(n, [(i, i + 1) for i in range(n - 1)])]


@build.register("binary_tree", static=True)
def _binary_tree(n: Workers) -> build.Rounds:
    """A binary tree, in which worker i > 0 exchanges with ⌊i/2⌋, with Metropolis weights W_ij = 1/(1 + max(deg i, deg j))."""
    return [build.metropolis(n, [(child, child // 2) for child in range(1, n)])]


@build.register("double_binary_tree")
def _double_binary_tree(n: Workers) -> build.Rounds:
    """A binary tree, and in the next round the same tree with the workers in reverse, so that inner workers are leaves then.

    Gossip takes the two in turn. Mixer `relay` takes both in every step, each for half of the parameters, so that all workers send
    about as much.

    Reference: Vogels et al. 2021, "RelaySum for decentralized deep learning on heterogeneous data", arXiv 2110.04175.
    """
    return [*_binary_tree(n), build.metropolis(n, [(n - 1 - child, n - 1 - child // 2) for child in range(1, n)])]


@build.register("sun")
def _sun(n: Workers, centers: Count = 1, rounds: build.Period | None = None) -> build.Rounds:
    """Some workers, the centers, exchange with all others, and are others in the next round: W = I − L/n.

    L is the Laplacian of the graph whose edges are all pairs with a center among them. A center gives all workers the weight 1/n; any
    other worker gives itself 1 − c/n and each of the c centers 1/n. Round t has its first center at worker ⌊t n / rounds⌋, and
    the next workers are the other centers. These graphs give the lower bound for methods on time-varying graphs, so accelerated
    gossip does not help there.

    Args:
        centers: c, from 1 to n; n − 1 or n: complete.
        rounds: in a period; None: n, and at most 8, since a round of n workers has n − 1 messages to and from a center.

    Reference: Huang and Yuan 2022, "Optimal complexity in non-convex decentralized learning over time-varying networks", arXiv
    2211.00533.
    """
    build.require(centers <= n, f"of {n} workers: centers={centers} must be at most {n}")
    count = rounds or min(n, 8)
    return [_sun_round(n, t * n // count, centers) for t in range(count)]


def _sun_round(n: int, first: int, centers: int) -> schedule.Round:
    is_center_N = np.isin(np.arange(n), (first + np.arange(centers)) % n)
    W_NxN = (is_center_N[:, None] | is_center_N) / n
    np.fill_diagonal(W_NxN, 0.0)
    np.fill_diagonal(W_NxN, 1.0 - W_NxN.sum(axis=1))
    return schedule.round_from_matrix(W_NxN)


# -- Directed graphs for push-sum -------------------------------------------------------------------------------------


@build.register("directed_ring", directed=True, static=True)
def _directed_ring(n: Workers) -> build.Rounds:
    """Each worker keeps half of its value and sends the other half to the next on the ring: i → i + 1."""
    return [build.equal_weights(n, [build.rotation(n, 1)])]


@build.register("one_peer_directed_ring", directed=True)
def _one_peer_directed_ring(n: Workers) -> build.Rounds:
    """Each worker sends half of its value to the next on the ring in even rounds, and to the one before in odd rounds."""
    return [build.equal_weights(n, [build.rotation(n, hop)]) for hop in sorted({1, n - 1})]


# The exponential graph is directed; the second name is for use with push-sum.
build.register("directed_exponential", directed=True, static=True)(_exponential)


# -- Exact in finite time for any number of workers -------------------------------------------------------------------


@build.register("base_k", exact=True)
def _base_k(n: Workers, k: Count = 1) -> build.Rounds:
    """Base-(k+1) graph: exact after at most 2 log_{k+1}(n) + 2 rounds, for any n, with at most k neighbors in each round.

    Args:
        k: the most neighbors that a worker has in a round.

    Reference: Takezawa et al. 2023, arXiv 2305.11420.
    """
    return [build.from_edges(n, edges) for edges in base_graph(n, k)]


def base_graph(n: int, k: int) -> list[Edges]:
    """Return rounds whose product is J/n, at most 2 log_{k+1}(n) + 2 of them; no worker has more than k neighbors in a round.

    A round is given by its edges and their weights; the rest of a row of W is the worker's self weight.

    Of two constructions the one with fewer rounds is taken, and of equally many that with fewer messages. Simple: n is written in
    base k+1 as Σ a_l (k+1)^{p_l}. Parts of these sizes average internally; then each part in turn exchanges shares of the mean with
    all workers of the later parts, and averages internally once more. Composite: n = p·q with p the largest divisor without prime
    factors above k+1; p blocks of q workers average by the simple construction, then workers at the same place of all blocks average.
    """
    smooth = max(d for d in range(1, n + 1) if n % d == 0 and _fewest_factors(d, k + 1) is not None)
    rough = n // smooth
    blocks = [range(start, start + rough) for start in range(0, n, rough)]
    composite = _in_parallel([_simple_base(block, k) for block in blocks])
    composite += _in_parallel([_hyper_hypercube(across, k) for across in zip(*blocks, strict=True)])
    return min(_simple_base(range(n), k), composite, key=lambda rounds: (len(rounds), sum(map(len, rounds))))


def _simple_base(workers: Sequence[int], k: int) -> list[Edges]:
    """Return the simple base-(k+1) graph over some workers."""
    if _fewest_factors(len(workers), k + 1) is not None:
        return _hyper_hypercube(workers, k)
    # parts[l] holds a_l subsets of (k+1)^{p_l} workers, largest first.
    parts, rest = [], list(workers)
    size = (k + 1) ** next(p for p in itertools.count() if (k + 1) ** (p + 1) > len(workers))
    while rest:
        if count := len(rest) // size:
            parts.append([rest[i * size : (i + 1) * size] for i in range(count)])
            rest = rest[count * size :]
        size //= k + 1
    flat = [list(itertools.chain(*part)) for part in parts]
    rounds = _in_parallel([_hyper_hypercube(part, k) for part in flat])
    tails = []
    for index, part in enumerate(parts[:-1]):
        later = list(itertools.chain(*flat[index + 1 :]))
        # Each later worker exchanges with one worker of every subset (subsets have more members than there are later workers). It
        # receives this part's share of the mean, and every subset then holds the whole mean.
        weight = len(part[0]) / (len(flat[index]) + len(later))
        meetings = [(ours, theirs) for subset in part for ours, theirs in zip(subset, later, strict=False)]
        exchange = dict.fromkeys([*meetings, *(pair[::-1] for pair in meetings)], weight)
        finish = _in_parallel([_hyper_hypercube(subset, k) for subset in part])
        tails.append([{}] * index + [exchange] + finish)
    return rounds + _in_parallel(tails)


def _hyper_hypercube(workers: Sequence[int], k: int) -> list[Edges]:
    """Return rounds that average exactly, as few as the size has factors up to k+1: one mixed-radix digit per round."""
    rounds, stride, factors = [], 1, _fewest_factors(len(workers), k + 1)
    assert factors is not None
    for factor in factors:
        firsts = [start for start in range(len(workers)) if start // stride % factor == 0]
        groups = [workers[first : first + factor * stride : stride] for first in firsts]
        rounds.append({pair: 1.0 / factor for group in groups for pair in itertools.permutations(group, 2)})
        stride *= factor
    return rounds


@functools.cache
def _fewest_factors(n: int, largest: int) -> tuple[int, ...] | None:
    """Return the shortest factorization of n into factors 2 … largest, and of several that with the least sum; None if there is none."""
    if n == 1:
        return ()
    tails = ((f, _fewest_factors(n // f, largest)) for f in range(min(n, largest), 1, -1) if n % f == 0)
    factorizations = ((f, *tail) for f, tail in tails if tail is not None)
    return min(factorizations, key=lambda factors: (len(factors), sum(factors)), default=None)


def _in_parallel(schedules: list[list[Edges]]) -> list[Edges]:
    """Join schedules over disjoint workers into one; workers whose schedule has ended are idle."""
    return [dict(itertools.chain(*(edges.items() for edges in step))) for step in itertools.zip_longest(*schedules, fillvalue={})]


# -- Composition ------------------------------------------------------------------------------------------------------


@build.register("hierarchical", needs="a multiple of local_size", directed=True)
def _hierarchical(n: Workers, local_size: NodeSize = 2, outer: str = "one_peer_exponential") -> build.Rounds:
    """An exact mean over each L consecutive workers, and any graph between these nodes: W = W_outer ⊗ J_L / L.

    Args:
        outer: graph between nodes, in call form, as "base_k(k=2)".
    """
    build.require(
        n % local_size == 0,
        f"needs a multiple of local_size={local_size} workers, got {n}; use a divisor of {n}, or {build.ANY_SIZE}",
    )
    # If the outer graph has groups itself, theirs are multiplied: Kronecker products associate.
    rounds = build.make(outer, n // local_size).rounds
    return [dataclasses.replace(round_, group_size=round_.group_size * local_size) for round_ in rounds]


_NEEDS = "at least two nodes of local_size >= 3 workers"
LargeNodeSize = Annotated[Count, "L, workers of a node; None: the least divisor of n that is 3 or more"]


@build.register("inner_outer_ring", needs=_NEEDS, directed=True)
def _inner_outer_ring(n: Workers, local_size: LargeNodeSize | None = None) -> build.Rounds:
    """In round t worker t mod L of each node sends to that of the next node; the others form a ring in their node. Weight 1/2.

    Reference: BlueFog's `GetInnerOuterRingDynamicSendRecvRanks`, arXiv 2111.04287.
    """
    size = _local_size(n, local_size)
    return [_inner_outer_round(n, size, t % size, 1, 1) for t in range(size)]


@build.register("inner_outer_exponential", needs=_NEEDS, directed=True)
def _inner_outer_exponential(n: Workers, local_size: LargeNodeSize | None = None) -> build.Rounds:
    """As `inner_outer_ring`, with hops of 1, 2, 4, … in turns: between the M nodes while < M, and among a node's L − 1 others.

    Reference: BlueFog's `GetInnerOuterExpo2DynamicSendRecvRanks`, arXiv 2111.04287.
    """
    size = _local_size(n, local_size)
    outer, inner = build.log2_ceil(n // size), build.log2_ceil(size - 1)
    return [_inner_outer_round(n, size, t % size, 2 ** (t % outer), 2 ** (t % inner)) for t in range(math.lcm(size, outer, inner))]


def _inner_outer_round(n: int, size: int, leaver: int, outer_hop: int, inner_hop: int) -> schedule.Round:
    """Each node's worker `leaver` sends `outer_hop` nodes further on, each other one `inner_hop` places on in the ring of the others."""
    staying = np.delete(np.arange(size), leaver)
    local = np.arange(size)
    local[staying] = np.roll(staying, -inner_hop)
    targets_MxL = np.arange(n).reshape(-1, size)[:, local]
    targets_MxL[:, leaver] = np.roll(targets_MxL[:, leaver], -outer_hop)
    return build.equal_weights(n, [targets_MxL.ravel()])


def _local_size(n: int, chosen: int | None) -> int:
    fits = [size for size in range(3, n // 2 + 1) if n % size == 0 and chosen in (None, size)]
    option = "" if chosen is None else f" with local_size={chosen}"
    build.require(bool(fits), f"needs {_NEEDS}, got {n} workers{option}; {build.ANY_SIZE}")
    return fits[0]
