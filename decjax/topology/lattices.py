"""The grid, and circulant graphs with few neighbours on both sides."""

import numpy as np

from decjax.topology import build, schedule


@build.register("grid", needs="a grid of two sides of at least 2", static=True)
def _grid(n: int, shape: tuple[int, int] | None = None) -> build.Rounds:
    """The torus without the edges that wrap around, with Metropolis weights W_ij = 1/(1 + max(deg i, deg j)).

    Args:
        shape: (rows, columns); None: as near to a square as n allows.
    """
    workers_RxC = build.grid("grid", n, shape, step=1)
    along, across = (workers_RxC[:, :-1], workers_RxC[:, 1:]), (workers_RxC[:-1], workers_RxC[1:])
    pairs = [pair for ends in (along, across) for pair in zip(*(end.ravel().tolist() for end in ends), strict=True)]
    return [build.metropolis(n, pairs)]


@build.register("symmetric_exponential", static=True)
def _symmetric_exponential(n: int, base: int = 4) -> build.Rounds:
    """Self and the workers b^k further on and b^k back, b^k ≤ n/2, with equal weights: b = 4 has about log2 n neighbours.

    Args:
        base: b; 2: the exponential graph in both directions.

    Reference: BlueFog's `SymmetricExponentialGraph`, arXiv 2111.04287.
    """
    base = build.integer("base", base, 2)
    powers = [base**k for k in range(n.bit_length()) if base**k <= n // 2]
    hops = sorted({hop for power in powers for hop in (power, n - power)})
    return [build.equal_weights(n, [build.rotation(n, hop) for hop in hops])]


@build.register("one_peer_directed_ring", directed=True)
def _one_peer_directed_ring(n: int) -> build.Rounds:
    """Each worker sends half of its value to the next on the ring in even rounds, and to the one before in odd rounds."""
    return [build.equal_weights(n, [build.rotation(n, hop)]) for hop in sorted({1, n - 1})]


@build.register("erdos_renyi_digraph", directed=True, static=True)
def _erdos_renyi_digraph(n: int, p: float | None = None, seed: int = 0) -> build.Rounds:
    """A random digraph that has each directed edge with probability p; each worker splits its value equally among itself and those
    that it sends to: a column-stochastic W, for push-sum.

    Args:
        p: probability of an edge; None: 2 ln(n)/n, at which most of these digraphs are strongly connected.
        seed: of the random draws.
    """
    p = min(1.0, 2.0 * np.log(n) / n) if p is None else build.real("p", p, 1.0)
    rng = build.generator(seed)

    def draw():
        A_NxN = (rng.random((n, n)) < p) | np.eye(n, dtype=bool)
        return [schedule.round_from_matrix(A_NxN / A_NxN.sum(axis=0))]

    problem = f"found no strongly connected digraph of {n} workers with p={p:.3g}; raise p above ln(n)/n = {np.log(n) / n:.2g}"
    return build.first_mixing(draw, f"topology 'erdos_renyi_digraph' {problem}")
