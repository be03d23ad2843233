"""Edges as matchings, and MATCHA's choice among them."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from decjax import topology as tp
from decjax.contrib.random_graphs import graphs as random_graphs
from decjax.topology import coloring


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.integers(2, 10), st.data())
def test_matchings_partition_any_graph(n, data):
    pairs = list(itertools.combinations(range(n), 2))
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True))
    matchings = coloring.matchings(edges, n)
    assert sorted(tuple(sorted(pair)) for matching in matchings for pair in matching) == sorted(edges)
    for matching in matchings:
        ends = [node for pair in matching for node in pair]
        assert len(set(ends)) == len(ends)
    degree = max(np.bincount(np.ravel(edges).astype(int), minlength=1)) if edges else 0
    assert len(matchings) <= degree + 1


def test_given_matrices_use_rotations_or_matchings_where_they_can():
    circulant = tp.make("exponential", 8).matrix(0)
    assert set(tp.from_matrices(circulant).rounds[0].shifts) == set(tp.make("exponential", 8).rounds[0].shifts)
    for shift in tp.from_matrices(tp.make("hypercube", 8).matrix(0)).rounds[0].shifts:
        assert {(t, s) for s, t in shift.pairs} == set(shift.pairs)


@pytest.mark.parametrize("base", ["ring", "torus", "erdos_renyi", "star"])
def test_matcha_activates_the_budgeted_share_of_matchings(base):
    n, budget, rounds = 12, 0.5, 400
    topology = tp.make("matcha", n, base=base, budget=budget, rounds=rounds)
    base_NxN = tp.make(base, n).matrix(0)
    used = sum(topology.matrix(phase) > 0 for phase in range(rounds))
    np.testing.assert_array_equal(used > 0, (base_NxN > 0) | np.eye(n, dtype=bool))
    assert topology.is_symmetric
    matchings = {frozenset(shift.pairs) for round_ in topology.rounds for shift in round_.shifts}
    degree = tp.make(base, n).max_degree
    assert degree <= len(matchings) <= degree + 1  # Vizing
    edges = [frozenset(pair) for matching in matchings for pair in matching]
    assert len(edges) == 2 * len(set(edges)) == np.count_nonzero(np.triu(base_NxN, 1)) * 2  # a partition
    active = [len(round_.shifts) for round_ in topology.rounds]
    deviation = math.sqrt(len(matchings) * 0.25 / rounds)  # of a mean of independent coins, at most
    assert abs(np.mean(active) - budget * len(matchings)) < 5 * deviation


def test_matcha_spends_its_budget_where_it_connects():
    # Two cliques of four joined by one bridge, so the matching that contains the bridge is active more often than the average one.
    bridge, n = (3, 4), 8
    A_NxN = np.kron(np.eye(2), np.ones((4, 4)))
    A_NxN[bridge], A_NxN[bridge[::-1]] = 1.0, 1.0
    pairings = coloring.matchings([(int(i), int(j)) for i, j in np.argwhere(np.triu(A_NxN, 1))], n)
    laplacians = []
    for pairing in pairings:
        L_NxN = np.zeros((n, n))
        for i, j in pairing:
            L_NxN[i, i] += 1
            L_NxN[j, j] += 1
            L_NxN[i, j] -= 1
            L_NxN[j, i] -= 1
        laplacians.append(L_NxN)
    p = random_graphs.activation_probabilities(np.array(laplacians), budget=0.4)
    assert p.mean() == pytest.approx(0.4, abs=1e-9) and (p >= 0).all() and (p <= 1).all()
    with_bridge = [bool({bridge, bridge[::-1]} & set(pairing)) for pairing in pairings].index(True)
    assert p[with_bridge] > 0.4 + 1e-3

    def connectivity(p):
        return np.linalg.eigvalsh(np.tensordot(p, laplacians, 1))[1]

    rng = np.random.default_rng(0)
    others = [q for q in rng.dirichlet(np.ones(len(p)), 500) * 0.4 * len(p) if q.max() <= 1]
    assert connectivity(p) >= max(connectivity(q) for q in others) - 1e-3

    alpha = random_graphs.mixing_weight(np.array(laplacians), p)
    active = np.array(list(itertools.product([0, 1], repeat=len(p))))
    chance = np.prod(np.where(active, p, 1 - p), axis=1)

    def rho(alpha):  # ‖E[WᵀW] − J/n‖ by enumeration
        W = np.eye(n) - alpha * np.tensordot(active, laplacians, 1)
        return np.linalg.norm(np.einsum("s,sij,sik->jk", chance, W, W) - 1 / n, ord=2)

    assert rho(alpha) <= min(rho(a) for a in np.linspace(0.01, 1 / 4, 25)) + 1e-5


def test_matcha_with_full_budget_is_the_base_graph():
    topology = tp.make("matcha", 12, base="torus", budget=1.0, rounds=2)
    for phase in range(2):
        np.testing.assert_array_equal(topology.matrix(phase) > 0, tp.make("torus", 12).matrix(0) > 0)
