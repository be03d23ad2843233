"""Graphs whose definition is checked worker by worker: the grid, circulants, digraphs, and rounds inside and between nodes."""

import re

import numpy as np
import pytest

from decjax import topology


def sends(graph, phase):
    """Return the workers that each worker sends to in a round, besides itself."""
    W_NxN = graph.matrix(phase)
    return [sorted(set(np.flatnonzero(W_NxN[:, i]).tolist()) - {i}) for i in range(graph.num_workers)]


def test_a_grid_is_a_torus_whose_borders_do_not_meet():
    graph = topology.make("grid", 12, shape=(3, 4))
    torus = topology.make("torus", 12, shape=(3, 4)).matrix(0)
    W_NxN = graph.matrix(0)
    row, column = np.divmod(np.arange(12), 4)
    near = np.abs(row[:, None] - row) + np.abs(column[:, None] - column) == 1
    assert ((W_NxN > 0) == near | np.eye(12, dtype=bool)).all() and (torus[near] > 0).all()
    degree = near.sum(axis=0)
    np.testing.assert_allclose(W_NxN[near], (near / (1 + np.maximum(degree[:, None], degree)))[near])
    assert graph.is_symmetric and topology.is_doubly_stochastic(graph)


@pytest.mark.parametrize("n, base, hops", [(16, 4, [1, 4]), (16, 2, [1, 2, 4, 8]), (17, 4, [1, 4]), (3, 4, [1]), (8, 4, [1, 4])])
def test_symmetric_exponential(n, base, hops):
    graph = topology.make("symmetric_exponential", n, base=base)
    expected = [sorted({(i + sign * hop) % n for hop in hops for sign in (1, -1)}) for i in range(n)]
    assert sends(graph, 0) == expected and graph.is_symmetric
    assert len(set(graph.matrix(0)[graph.matrix(0) > 0])) == 1


def test_the_directed_ring_turns_round():
    graph = topology.make("one_peer_directed_ring", 5)
    assert sends(graph, 0) == [[1], [2], [3], [4], [0]] and sends(graph, 1) == [[4], [0], [1], [2], [3]]
    assert graph.period == 2 and topology.make("one_peer_directed_ring", 2).period == 1


def test_random_digraphs_are_strongly_connected_and_split_equally():
    graph = topology.make("erdos_renyi_digraph", 12, seed=3)
    W_NxN = graph.matrix(0)
    np.testing.assert_allclose(W_NxN.sum(axis=0), 1)
    assert (np.linalg.matrix_power(W_NxN, 12) > 0).all() and not graph.is_symmetric
    assert all(len(set(column[column > 0])) == 1 for column in W_NxN.T)
    assert graph == topology.make("erdos_renyi_digraph", 12, seed=3) != topology.make("erdos_renyi_digraph", 12, seed=4)


def leaver_and_rest(t, machine, local, n, size, exponential):
    """Return the workers that a worker sends to in round t, as in BlueFog's iterators."""
    machines, leaver = n // size, t % size
    if local == leaver:
        outer = 2 ** (t % (int(np.log2(machines - 1)) + 1)) if exponential else 1
        return (machine + outer) % machines * size + local
    hop = 2 ** (t % (int(np.log2(size - 2)) + 1)) if exponential else 1
    hop += hop >= (leaver - local) % size
    return machine * size + (local + hop) % size


@pytest.mark.parametrize("name", ["inner_outer_ring", "inner_outer_exponential"])
@pytest.mark.parametrize("n, size", [(6, 3), (16, 4), (15, 5), (40, 8)])
def test_one_worker_of_a_node_leaves_it_and_the_others_stay(name, n, size):
    graph = topology.make(name, n, local_size=size)
    for t in range(2 * graph.period):
        workers = [divmod(i, size) for i in range(n)]
        assert sends(graph, t) == [[leaver_and_rest(t, *worker, n, size, name.endswith("exponential"))] for worker in workers]
    assert topology.is_doubly_stochastic(graph) and topology.is_mixing(graph.rounds) and graph.max_degree == 1


@pytest.mark.parametrize(
    "name, n, options, told",
    [
        ("inner_outer_ring", 4, {}, "needs at least two nodes of local_size >= 3 workers, got 4 workers; 'base_k' works"),
        ("inner_outer_exponential", 16, {"local_size": 2}, "got 16 workers with local_size=2"),
        ("inner_outer_exponential", 16, {"local_size": 0}, "topology 'inner_outer_exponential': local_size=0 must be at least 1"),
        ("grid", 7, {}, "topology 'grid' needs a grid with two sides of at least 2, got 7 workers"),
        ("symmetric_exponential", 8, {"base": 1}, "topology 'symmetric_exponential': base=1 must be at least 2"),
        ("base_k", 8, {"k": 0}, "topology 'base_k': k=0 must be at least 1"),
        ("hierarchical", 8, {"outer": "base_k(k=0)", "local_size": 2}, "topology 'base_k': k=0 must be at least 1"),
        (
            "torus",
            8,
            {"shape": (8,)},
            "topology 'torus' needs a grid with two sides of at least 2, got 8 workers with shape=(8,), which must be (rows, columns)",
        ),
        ("erdos_renyi_digraph", 64, {"p": 2}, "topology 'erdos_renyi_digraph': p=2 must be more than 0 and at most 1"),
        ("erdos_renyi_digraph", 64, {"p": 1e-6}, "found no strongly connected digraph of 64 workers with p=1e-06; raise p above"),
    ],
)
def test_sizes_and_options_that_do_not_fit_are_refused(name, n, options, told):
    with pytest.raises(ValueError, match="(?s)^[^\n]*" + re.escape(told)):
        topology.make(name, n, **options)
