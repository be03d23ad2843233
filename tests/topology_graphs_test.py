"""Graphs against their definitions, as dense matrices."""

import itertools
import math

import numpy as np
import pytest

from decjax import topology as tp
from decjax.topology import graphs
from tests.graphs import SIZES, assert_same_rounds, directed_reference, matching_reference


@pytest.mark.parametrize("n", SIZES)
def test_ring(n):
    reference = np.array([[1.0 if (i - j) % n in (0, 1, n - 1) else 0.0 for j in range(n)] for i in range(n)])
    topology = tp.make("ring", n)
    assert_same_rounds(topology, [reference / min(n, 3)])
    lambda2 = 0.0 if n == 2 else (1 + 2 * math.cos(2 * math.pi / n)) / 3
    # For n = 4 the smallest eigenvalue, (1 − 2)/3, is as large as λ2 = 1/3 in modulus; above, λ2 wins.
    expected = max(lambda2, 0.0 if n == 2 else abs(1 + 2 * math.cos(2 * math.pi * (n // 2) / n)) / 3)
    assert tp.spectral_gap(topology) == pytest.approx(1 - expected, abs=1e-12)
    assert tp.spectral_gap(topology, 0) == pytest.approx(1 - expected, abs=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_one_peer_ring(n):
    topology = tp.make("one_peer_ring", n)
    if n % 2 == 0:
        even = [(i, i + 1) for i in range(0, n, 2)]
        odd = [(i, (i + 1) % n) for i in range(1, n, 2)]
        assert_same_rounds(topology, [matching_reference(n, even), matching_reference(n, odd)])
        cosine = abs(math.cos(2 * math.pi / n)) if n > 2 else 0.0
        assert tp.spectral_gap(topology) == pytest.approx(1 - cosine, abs=1e-12)
        eigenvalues = np.sort(np.abs(np.linalg.eigvals(topology.product())))
        assert eigenvalues[-2] == pytest.approx(cosine**2, abs=1e-7)
    else:
        assert topology.period == 3
        edges = set()
        for phase in range(3):
            W_NxN = topology.matrix(phase)
            pairs = [(int(i), int(j)) for i, j in np.argwhere(np.triu(W_NxN, 1))]
            assert len(pairs) == n // 2  # one idle worker
            np.testing.assert_allclose(W_NxN, matching_reference(n, pairs))
            edges |= set(pairs)
        assert edges == {(i, i + 1) for i in range(n - 1)} | {(0, n - 1)}


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2), (3, 5), (4, 4), (2, 8)])
def test_torus(shape):
    rows, columns = shape
    n = rows * columns
    reference = np.zeros((n, n))
    for r, c in itertools.product(range(rows), range(columns)):
        for dr, dc in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
            reference[r * columns + c, (r + dr) % rows * columns + (c + dc) % columns] += 0.2
    assert_same_rounds(tp.make("torus", n, shape=shape), [reference])


def test_default_torus_is_near_square():
    assert tp.make("torus", 24) == tp.make("torus", 24, shape=(4, 6))
    assert tp.make("one_peer_torus", 24) == tp.make("one_peer_torus", 24, shape=(4, 6))


@pytest.mark.parametrize("shape", [(2, 2), (2, 6), (4, 4), (6, 4)])
def test_one_peer_torus_alternates_between_directions_and_uses_every_edge(shape):
    rows, columns = shape
    n = rows * columns
    topology = tp.make("one_peer_torus", n, shape=shape)
    assert topology.period == 4 and topology.max_degree == 1 and topology.is_symmetric
    met = np.zeros((n, n), bool)
    for phase in range(4):
        W_NxN = topology.matrix(phase)
        np.testing.assert_array_equal(np.diag(W_NxN), 0.5)  # a perfect matching
        pairs = np.argwhere(np.triu(W_NxN, 1))
        along_row = pairs[:, 0] // columns == pairs[:, 1] // columns
        assert along_row.all() if phase % 2 == 0 else not along_row.any()
        met |= W_NxN > 0
    np.testing.assert_array_equal(met, tp.make("torus", n, shape=shape).matrix(0) > 0)


@pytest.mark.parametrize("n", SIZES)
def test_exponential(n):
    hops = [2**k for k in range(math.ceil(math.log2(n)))]
    for name in ("exponential", "directed_exponential"):
        topology = tp.make(name, n)
        assert_same_rounds(topology, [directed_reference(n, hops)])
        assert topology.max_degree == len(hops) == len(topology.rounds[0].shifts)
    assert_same_rounds(tp.make("one_peer_exponential", n), [directed_reference(n, [hop]) for hop in hops])
    pairwise = [matching_reference(n, [(i, i ^ h) for i in range(n) if i < i ^ h < n]) for h in hops]
    assert_same_rounds(tp.make("one_peer_exponential", n, pairwise=True), pairwise)
    assert_same_rounds(tp.make("directed_ring", n), [directed_reference(n, [1])])


@pytest.mark.parametrize("pairwise", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_one_peer_exponential_is_exact_for_powers_of_two_only(n, pairwise):
    topology = tp.make("one_peer_exponential", n, pairwise=pairwise)
    is_power = n in (2, 4, 8, 16, 32)
    assert tp.rounds_to_exact(topology) == (topology.period if is_power else None)
    # Circulants, and the commuting factors of a hypercube, are exact from any phase on.
    assert tp.rounds_to_exact(topology, start=1) == (topology.period if is_power else None)


@pytest.mark.parametrize("dimension", [1, 2, 3, 4, 5])
def test_hypercube(dimension):
    n = 2**dimension
    apart = np.array([[bin(i ^ j).count("1") for j in range(n)] for i in range(n)])
    topology = tp.make("hypercube", n)
    assert_same_rounds(topology, [(apart <= 1) / (dimension + 1.0)])
    # Eigenvalues of the hypercube's adjacency are d − 2m.
    expected = max(abs(1 + dimension - 2 * m) for m in range(1, dimension + 1)) / (dimension + 1)
    assert tp.spectral_gap(topology) == pytest.approx(1 - expected, abs=1e-12)


@pytest.mark.parametrize("name", ["star", "line", "erdos_renyi"])
def test_metropolis_weights(name):
    for n in SIZES:
        topology = tp.make(name, n)
        A_NxN = (topology.matrix(0) > 0) & ~np.eye(n, dtype=bool)
        degrees = A_NxN.sum(axis=1)
        reference = A_NxN / (1.0 + np.maximum.outer(degrees, degrees))
        reference += np.diag(1.0 - reference.sum(axis=1))
        assert_same_rounds(topology, [reference])
        assert topology.is_symmetric
        if name == "star":
            assert sorted(degrees)[:-1] == [1] * (n - 1) and degrees[0] == n - 1
        if name == "line":
            np.testing.assert_array_equal(A_NxN, np.abs(np.subtract.outer(range(n), range(n))) == 1)


def test_star_gap_is_one_over_n():
    # W = I − L/n for the star, and λ2(L) = 1.
    for n in SIZES:
        expected = 1.0 if n == 2 else 1.0 / n
        assert tp.spectral_gap(tp.make("star", n)) == pytest.approx(expected, abs=1e-12)


def test_erdos_renyi_follows_p():
    assert_same_rounds(tp.make("erdos_renyi", 9, p=1.0), [np.full((9, 9), 1 / 9)])
    edges = [np.count_nonzero(tp.make("erdos_renyi", 33, p=0.3, seed=s).matrix(0)) - 33 for s in range(20)]
    mean, deviation = 33 * 32 * 0.3, 2 * math.sqrt(33 * 16 * 0.3 * 0.7)
    assert abs(np.mean(edges) - mean) < 5 * deviation / math.sqrt(20)


def aer_reference(nodes, local):
    """Groups as in their definition: a counter over all pairs decides which workers meet in which phase."""
    references, counter = [], 0
    for i in range(int(math.log2(nodes))):
        phases = [[], []]
        for j in range(nodes):
            partner = j ^ (1 << i)
            if j > partner:
                continue
            alone, together = (0, 1) if counter % 2 == 0 else (1, 0)
            phases[alone] += [[j], [partner]]
            phases[together] += [[j, partner]]
            counter += 1
        for groups in phases:
            W_NxN = np.zeros((nodes * local, nodes * local))
            for group in groups:
                members = [node * local + worker for node in group for worker in range(local)]
                W_NxN[np.ix_(members, members)] = 1.0 / len(members)
            references.append(W_NxN)
    return references


@pytest.mark.parametrize("local", [1, 2, 4])
@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_alternating_exponential_ring(nodes, local):
    topology = tp.make("alternating_exponential_ring", nodes * local, local_size=local)
    assert_same_rounds(topology, aer_reference(nodes, local))
    for start in range(0, topology.period, 2):
        P_NxN = topology.product(start=start)
        np.testing.assert_allclose(P_NxN, 1.0 / topology.num_workers, rtol=0, atol=1e-12)
    if nodes > 2:
        assert not np.allclose(topology.product(start=1), 1.0 / topology.num_workers, rtol=0, atol=1e-6)
    # Inside a node 2(L−1)/L, plus one shard of 1/L for workers that meet.
    for round_ in topology.rounds:
        meets = np.repeat(np.array(round_.self_weights) < 1, local)
        np.testing.assert_allclose(round_.volume(), 2 * (local - 1) / local + meets / local)


def test_alternating_exponential_ring_example_of_four_nodes():
    groups = [[{0}, {1}, {2, 3}], [{0, 1}, {2}, {3}], [{0}, {2}, {1, 3}], [{0, 2}, {1}, {3}]]
    topology = tp.make("alternating_exponential_ring", 4)
    for phase, expected in enumerate(groups):
        W_NxN = topology.matrix(phase)
        found = {frozenset(np.flatnonzero(row).tolist()) for row in W_NxN}
        assert found == {frozenset(group) for group in expected}


def test_complete():
    for n in SIZES:
        topology = tp.make("complete", n)
        np.testing.assert_allclose(topology.matrix(0), 1.0 / n, rtol=1e-15)
        assert tp.rounds_to_exact(topology) == 1 and topology.max_degree == n - 1
        assert tp.spectral_gap(topology) == pytest.approx(1.0, abs=1e-12)
        np.testing.assert_allclose(topology.rounds[0].volume(), 2 * (n - 1) / n)  # a bandwidth-optimal all-reduce


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [*SIZES, 47, 48, 63])
def test_base_k_is_exact_with_few_neighbors(n, k):
    topology = tp.make("base_k", n, k=k)
    np.testing.assert_allclose(topology.product(), 1.0 / n, rtol=0, atol=1e-12)
    assert topology.period <= 2 * math.log(n) / math.log(k + 1) + 2
    assert topology.max_degree <= k
    assert all(len(round_.shifts) <= k for round_ in topology.rounds)
    assert tp.rounds_to_exact(topology) == topology.period


def test_base_k_takes_as_many_rounds_as_there_are_factors():
    assert tp.make("base_k", 32).period == 5
    assert tp.make("base_k", 12, k=2).period == 3  # 3 · 2 · 2
    assert tp.make("base_k", 12, k=3).period == 2  # 4 · 3
    assert tp.make("base_k", 7, k=6).period == 1


def test_base_k_takes_the_shorter_construction_and_of_equally_short_ones_that_of_fewer_messages():
    # 22 = 4·5 + 2: average 20 = 5·4 (2 rounds), exchange, finish 5. Not 2 · (11 = 2·5 + 1): that takes 4 + 1.
    assert tp.make("base_k", 22, k=4).period == 4
    # 12 = 4 · 3, where 3 = 2 + 1 takes 3 rounds and 4 takes 2. Not 8 + 4, which takes 3 + 1 + 3.
    assert tp.make("base_k", 12, k=1).period == 5
    # 26 = 25 + 1: averages 25 = 5·5, exchanges, finishes 25: 402 messages in 5 rounds. 13 = 2·5 + 3, twice, then across: 242.
    sent = sum(round_.volume().sum() for round_ in tp.make("base_k", 26, k=4).rounds)
    assert tp.make("base_k", 26, k=4).period == 5 and sent == 242


@pytest.mark.parametrize("n", range(2, 65))
def test_base_k_never_sends_more_than_either_of_its_constructions(n):
    for k in range(1, 5):
        found, simple = graphs.base_graph(n, k), graphs._simple_base(range(n), k)
        assert len(found) <= len(simple)
        if len(found) == len(simple):
            assert sum(map(len, found)) <= sum(map(len, simple))


@pytest.mark.parametrize("n", [4, 9, 16, 33])
def test_random_matchings_leave_at_most_one_worker_idle(n):
    topology = tp.make("random_matching", n, rounds=12, seed=3)
    assert topology.period == 12 and topology.is_symmetric and topology.max_degree == 1
    for phase in range(12):
        idle = np.diag(topology.matrix(phase)) == 1
        assert idle.sum() == n % 2
        np.testing.assert_array_equal(np.diag(topology.matrix(phase))[~idle], 0.5)


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_random_digraph_splits_mass_equally(degree):
    for seed in range(5):
        W_NxN = tp.make("random_digraph", 9, degree=degree, seed=seed).matrix(0)
        assert ((W_NxN > 0).sum(axis=0) == degree + 1).all()
        np.testing.assert_allclose(W_NxN[W_NxN > 0], 1 / (degree + 1))
        assert (np.diag(W_NxN) > 0).all()
    assert not tp.is_doubly_stochastic(tp.make("random_digraph", 9, degree=2))


@pytest.mark.parametrize("name", ["equitopo_d", "equitopo_u"])
def test_static_equitopo_averages_basis_graphs(name):
    for n, degree in ((8, 3), (15, 4), (33, 6)):
        topology = tp.make(name, n, degree=degree, seed=1)
        W_NxN = topology.matrix(0)
        row = W_NxN[0]
        np.testing.assert_allclose(W_NxN, [np.roll(row, i) for i in range(n)], rtol=0, atol=1e-12)  # circulant
        assert row[0] == pytest.approx(1 / n)
        if name == "equitopo_d":
            assert topology.max_degree == degree
            np.testing.assert_allclose(row[row > 0][1:], (n - 1) / (n * degree))
        else:
            assert topology.is_symmetric and topology.max_degree <= 2 * degree
    np.testing.assert_allclose(tp.make(name, 9, degree=8).matrix(0), 1 / 9)  # all basis graphs: J/n


def test_equitopo_gap_does_not_vanish_with_size():
    # With degree ~ log n the gap is constant, whereas that of the ring decays like 1/n².
    gaps = [tp.spectral_gap(tp.make("equitopo_u", n, seed=0)) for n in (8, 32, 128)]
    assert min(gaps) > 0.15 > tp.spectral_gap(tp.make("ring", 32)) * 10


@pytest.mark.parametrize("n", [6, 9, 16])
def test_one_peer_equitopo(n):
    eta = 0.4
    directed = tp.make("equitopo_od", n, rounds=10, eta=eta)
    undirected = tp.make("equitopo_ou", n, rounds=10, eta=eta)
    assert directed.period == undirected.period == 10 and undirected.is_symmetric
    for phase in range(10):
        W_NxN = directed.matrix(phase)
        (hop,) = np.flatnonzero(W_NxN[:, 0])[1:]
        reference = (1 - eta) * np.eye(n) + eta * np.eye(n) / n
        reference[(np.arange(n) + hop) % n, np.arange(n)] += eta * (n - 1) / n
        np.testing.assert_allclose(W_NxN, reference, rtol=0, atol=1e-12)
        W_NxN = undirected.matrix(phase)
        pairs = np.argwhere(np.triu(W_NxN, 1))
        np.testing.assert_allclose(W_NxN[tuple(pairs.T)], eta * (n - 1) / n)
        hops = {min((j - i) % n, (i - j) % n) for i, j in pairs}
        assert len(hops) == 1
        # Cycles of even length are matched perfectly, odd ones leave one worker each.
        num_cycles = math.gcd(int(*hops), n)
        assert n - 2 * len(pairs) == (num_cycles if n // num_cycles % 2 else 0)


@pytest.mark.parametrize("local", [1, 2, 3])
@pytest.mark.parametrize("outer", ["ring", "complete", "one_peer_exponential", "alternating_exponential_ring"])
def test_hierarchical_is_a_kronecker_product(outer, local):
    topology = tp.make("hierarchical", 4 * local, local_size=local, outer=outer)
    inner = tp.make(outer, 4)
    assert_same_rounds(topology, [np.kron(inner.matrix(p), np.full((local, local), 1 / local)) for p in range(inner.period)])
    for round_, inner_round in zip(topology.rounds, inner.rounds, strict=True):
        # Per worker: twice (L−1)/L inside the groups, plus its share of what the outer node sends.
        groups = round_.group_size
        sent = np.zeros(round_.num_nodes)
        for shift in inner_round.shifts:
            for source, _ in shift.pairs:
                sent[source] += 1
        np.testing.assert_allclose(round_.volume(), np.repeat(2 * (groups - 1) / groups + sent / groups, groups))


def test_hierarchical_composes():
    nested = tp.make("hierarchical", 16, local_size=4, outer="complete")
    assert nested.rounds == tp.make("complete", 16).rounds
    aer = tp.make("hierarchical", 16, local_size=2, outer="alternating_exponential_ring(local_size=2)")
    assert aer.rounds == tp.make("alternating_exponential_ring", 16, local_size=4).rounds
    assert tp.make("hierarchical", 6, local_size=6, outer="ring").rounds == tp.make("complete", 6).rounds


# -- Suns and trees ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 16])
@pytest.mark.parametrize("centers", [1, 2])
def test_sun_is_one_minus_a_share_of_the_laplacian_and_its_centres_move(n, centers):
    topology = tp.make("sun", n, centers=centers)
    assert topology.period == min(n, 8) and topology.is_symmetric
    seen = []
    for t in range(topology.period):
        middle = {(t * n // topology.period + c) % n for c in range(centers)}
        A_NxN = np.array([[float(i != j and bool({i, j} & middle)) for j in range(n)] for i in range(n)])
        np.testing.assert_allclose(topology.matrix(t), np.eye(n) - (np.diag(A_NxN.sum(axis=1)) - A_NxN) / n, rtol=0, atol=1e-12)
        seen.append(frozenset(middle))
    assert len(set(seen)) > 1 or n == centers


def test_a_sun_of_centres_is_complete_and_wrong_numbers_are_refused():
    np.testing.assert_allclose(tp.make("sun", 6, centers=5, rounds=1).matrix(0), 1 / 6, rtol=0, atol=1e-12)
    for options in (dict(centers=0), dict(centers=7), dict(rounds=0)):
        with pytest.raises(ValueError, match="topology 'sun'.* must be at (least 1|most 6)"):
            tp.make("sun", 6, **options)


@pytest.mark.parametrize("n", [2, 7, 8])
def test_binary_trees_have_few_neighbors_and_share_the_work(n):
    one, two = tp.make("binary_tree", n), tp.make("double_binary_tree", n)
    assert one.max_degree <= 3 and one.round(0) == two.round(0)
    edges = [{(i, j) for i, j in np.argwhere(two.matrix(t)).tolist() if i < j} for t in range(2)]
    assert edges[0] == {(i // 2, i) for i in range(1, n)} and edges[1] == {(n - 1 - j, n - 1 - i) for i, j in edges[0]}
    if n == 8:
        assert np.ptp([two.round(0).volume() + two.round(1).volume()]) <= 2
