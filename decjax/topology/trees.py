"""Binary trees of all workers, and two of them that share the work."""

import numpy as np

from decjax import registry
from decjax.topology import schedule


@registry.register("topology", "binary_tree", static=True)
def binary_tree(num_workers: int) -> schedule.Topology:
    """A binary tree, in which worker i > 0 exchanges with ⌊i/2⌋, with Metropolis weights W_ij = 1/(1 + max(deg i, deg j))."""
    return _topology("binary_tree", num_workers, [_parents(num_workers)])


@registry.register("topology", "double_binary_tree")
def double_binary_tree(num_workers: int) -> schedule.Topology:
    """A binary tree, and in the next round the same tree with the workers in reverse, so that inner workers are leaves then.

    Gossip takes the two in turn. Mixer `relay` takes both in every step, each for half of the parameters, so that all workers send
    about as much.

    Reference: Vogels et al. 2021, "RelaySum for decentralized deep learning on heterogeneous data", arXiv 2110.04175.
    """
    n = num_workers
    forward = _parents(n)
    return _topology("double_binary_tree", n, [forward, [(n - 1 - child, n - 1 - parent) for child, parent in forward]])


def _parents(n: int) -> list[tuple[int, int]]:
    return [(child, child // 2) for child in range(1, n)]


def _topology(name: str, n: int, trees: list[list[tuple[int, int]]]) -> schedule.Topology:
    return schedule.Topology(name, n, tuple(schedule.round_from_matrix(_metropolis(n, edges)) for edges in trees))


def _metropolis(n: int, edges: list[tuple[int, int]]) -> np.ndarray:
    degree_N = np.bincount(np.ravel(edges).astype(int), minlength=n)
    W_NxN = np.zeros((n, n))
    for i, j in edges:
        W_NxN[i, j] = W_NxN[j, i] = 1 / (1 + max(degree_N[i], degree_N[j]))
    np.fill_diagonal(W_NxN, 1 - W_NxN.sum(axis=1))
    return W_NxN
