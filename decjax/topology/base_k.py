"""The base-(k+1) graph: exact averaging over any number of workers, with at most k neighbors in each round.

A round is given by its edges and their weights; the rest of a row of W is the worker's self weight.

Reference: Takezawa et al. 2023, "Beyond exponential graph", arXiv 2305.11420.
"""

from collections.abc import Sequence
import functools
import itertools

Edges = dict[tuple[int, int], float]  # (receiver, sender) -> weight, without the diagonal


def base_graph(n: int, k: int) -> list[Edges]:
    """Return rounds whose product is J/n, at most 2 log_{k+1}(n) + 2 of them; no worker has more than k neighbors in a round.

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
    found = ((f, *tail) for f, tail in tails if tail is not None)
    return min(found, key=lambda factors: (len(factors), sum(factors)), default=None)


def _in_parallel(schedules: list[list[Edges]]) -> list[Edges]:
    """Join schedules over disjoint workers into one; workers whose schedule has ended are idle."""
    return [dict(itertools.chain(*(edges.items() for edges in step))) for step in itertools.zip_longest(*schedules, fillvalue={})]
