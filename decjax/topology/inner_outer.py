"""Rounds in which one worker of every node sends to another node, and the others send inside of theirs."""

from collections.abc import Callable
import math

import numpy as np

from decjax.topology import build

_NEEDS = "at least two nodes of local_size >= 3 workers"


@build.register("inner_outer_ring", needs=_NEEDS, directed=True)
def _inner_outer_ring(n: int, local_size: int | None = None) -> build.Rounds:
    """In round t worker t mod L of each node sends to that of the next node; the others form a ring in their node. Weight 1/2.

    Args:
        local_size: L, workers of a node; None: the least divisor of n that is 3 or more.

    Reference: BlueFog's `GetInnerOuterRingDynamicSendRecvRanks`, arXiv 2111.04287.
    """
    size = _local_size("inner_outer_ring", n, local_size)
    return [_round(n, size, t % size, 1, 1) for t in range(size)]


@build.register("inner_outer_exponential", needs=_NEEDS, directed=True)
def _inner_outer_exponential(n: int, local_size: int | None = None) -> build.Rounds:
    """As `inner_outer_ring`, with hops of 1, 2, 4, … in turns: between the M nodes while < M, and among a node's L − 1 others.

    Args:
        local_size: L, workers of a node; None: the least divisor of n that is 3 or more.

    Reference: BlueFog's `GetInnerOuterExpo2DynamicSendRecvRanks`, arXiv 2111.04287.
    """
    size = _local_size("inner_outer_exponential", n, local_size)
    outer, inner = build.log2_ceil(n // size), build.log2_ceil(size - 1)
    hops: Callable[[int], tuple[int, int]] = lambda t: (2 ** (t % outer), 2 ** (t % inner))
    return [_round(n, size, t % size, *hops(t)) for t in range(math.lcm(size, outer, inner))]


def _round(n: int, size: int, leaver: int, outer_hop: int, inner_hop: int):
    """Each node's worker `leaver` sends `outer_hop` nodes further on, each other one `inner_hop` places on in the ring of the others."""
    staying = np.delete(np.arange(size), leaver)
    local = np.arange(size)
    local[staying] = np.roll(staying, -inner_hop)
    targets_MxL = np.arange(n).reshape(-1, size)[:, local]
    targets_MxL[:, leaver] = np.roll(targets_MxL[:, leaver], -outer_hop)
    return build.equal_weights(n, [targets_MxL.ravel()])


def _local_size(name: str, n: int, chosen: int | None) -> int:
    fits = [size for size in range(3, n // 2 + 1) if n % size == 0]
    if chosen is not None:
        fits = [size for size in fits if size == build.integer("local_size", chosen, 1)]
    if not fits:
        given = "" if chosen is None else f" with local_size={chosen}"
        raise ValueError(f"topology {name!r} needs {_NEEDS}, got {n} workers{given}; {build.ANY_SIZE}")
    return fits[0]
