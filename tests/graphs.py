"""Shared by tests of topologies: the sizes that exist, and mixing matrices written from their definitions."""

import itertools
import math

import numpy as np

SIZES = range(2, 34)

# name -> (sizes that exist with default options, what the error must say otherwise)
EXISTS = {
    "torus": (lambda n: any(n % r == 0 for r in range(2, math.isqrt(n) + 1)), "sides of at least 2"),
    "one_peer_torus": (lambda n: n % 4 == 0, "even"),
    "alternating_exponential_ring": (lambda n: bin(n).count("1") == 1, "2^r"),
    "hypercube": (lambda n: bin(n).count("1") == 1, "power of two"),
    "grid": (lambda n: any(n % r == 0 for r in range(2, math.isqrt(n) + 1)), "sides of at least 2"),
    "inner_outer_ring": (lambda n: any(n % L == 0 for L in range(3, n // 2 + 1)), "local_size >= 3"),
    "inner_outer_exponential": (lambda n: any(n % L == 0 for L in range(3, n // 2 + 1)), "local_size >= 3"),
    "hierarchical": (lambda n: n % 2 == 0, "multiple of local_size=2"),
}


def exists(name, n):
    return name not in EXISTS or EXISTS[name][0](n)


def dense(round_):
    """W_NxN of a round, worker by worker, without Kronecker products."""
    L = round_.group_size
    W_NxN = np.zeros((round_.num_workers, round_.num_workers))
    for i, j in itertools.product(range(round_.num_workers), repeat=2):
        if i // L == j // L:
            W_NxN[i, j] += round_.self_weights[i // L] / L
        for shift in round_.shifts:
            if (j // L, i // L) in shift.pairs:
                W_NxN[i, j] += shift.weights[i // L] / L
    return W_NxN


def second_singular_value(W_NxN):
    return np.linalg.svd(W_NxN, compute_uv=False)[1]


def directed_reference(n, hops):
    W_NxN = np.zeros((n, n))
    for i in range(n):
        for hop in (0, *hops):
            W_NxN[(i + hop) % n, i] += 1.0 / (len(hops) + 1)
    return W_NxN


def matching_reference(n, pairs):
    W_NxN = np.eye(n)
    for i, j in pairs:
        W_NxN[[i, j], [i, j]] = W_NxN[[i, j], [j, i]] = 0.5
    return W_NxN


def assert_same_rounds(topology, references):
    assert topology.period == len(references)
    for phase, W_NxN in enumerate(references):
        np.testing.assert_allclose(topology.matrix(phase), W_NxN, rtol=0, atol=1e-12, err_msg=f"phase {phase}")
