"""Topologies against their definitions: every name, every size, and independent dense references."""

import itertools
import math

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from decjax import topology as tp
from decjax.topology import coloring, matcha

SIZES = range(2, 34)
DIRECTED_MASS = ("random_digraph",)  # column-stochastic only

# name -> (sizes it exists for with default options, what the error has to say otherwise)
EXISTS = {
    "torus": (lambda n: any(n % r == 0 for r in range(2, math.isqrt(n) + 1)), "sides of at least 2"),
    "one_peer_torus": (lambda n: n % 4 == 0, "even"),
    "alternating_exponential_ring": (lambda n: bin(n).count("1") == 1, "2^r"),
    "hypercube": (lambda n: bin(n).count("1") == 1, "power of two"),
    "hierarchical": (lambda n: n % 2 == 0, "multiple of local=2"),
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
        np.testing.assert_allclose(
            topology.matrix(phase), W_NxN, rtol=0, atol=1e-12, err_msg=f"phase {phase}"
        )


# Every name, every size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tp.names())
def test_contract_of_every_size(name):
    for n in filter(lambda n: exists(name, n), SIZES):
        topology = tp.make(name, n)
        assert (topology.name, topology.num_workers, topology.period) == (name, n, len(topology.rounds))
        for phase, round_ in enumerate(topology.rounds):
            W_NxN = topology.matrix(phase)
            assert W_NxN.dtype == np.float64 and W_NxN.shape == (n, n) and (W_NxN >= 0).all()
            np.testing.assert_allclose(W_NxN, dense(round_), rtol=0, atol=1e-12)
            np.testing.assert_allclose(W_NxN.sum(axis=0), 1.0, rtol=0, atol=1e-12)
            if name not in DIRECTED_MASS:
                np.testing.assert_allclose(W_NxN.sum(axis=1), 1.0, rtol=0, atol=1e-12)
            for shift in round_.shifts:
                sources, targets = zip(*shift.pairs, strict=True)
                assert len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
                assert all(s != t for s, t in shift.pairs)
                assert {node for node, weight in enumerate(shift.weights) if weight} <= set(targets)
        assert tp.is_doubly_stochastic(topology) or name in DIRECTED_MASS
        assert tp.is_column_stochastic(topology)
        np.testing.assert_array_equal(topology.matrix(topology.period + 1), topology.matrix(1))


@pytest.mark.parametrize("name", tp.names())
def test_repeating_the_period_brings_all_workers_together(name):
    for n in filter(lambda n: exists(name, n), SIZES):
        topology = tp.make(name, n)
        P_NxN = topology.product()
        for _ in range(20):  # 2^20 periods
            P_NxN = P_NxN @ P_NxN
            P_NxN /= P_NxN.sum(axis=0)  # rounding errors grow with the exponent
        # Every column is the limit of one worker's mass: all the same, and 1/n if doubly stochastic.
        np.testing.assert_allclose(P_NxN, np.repeat(P_NxN[:, :1], n, axis=1), rtol=0, atol=1e-7)
        assert (P_NxN > 0).all()
        if name not in DIRECTED_MASS:
            np.testing.assert_allclose(P_NxN, 1.0 / n, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", EXISTS)
def test_impossible_sizes_are_refused_with_constraint_and_alternative(name):
    impossible = [n for n in SIZES if not exists(name, n)]
    assert impossible
    for n in impossible:
        with pytest.raises(ValueError, match=f"got {n}") as error:
            tp.make(name, n)
        message = str(error.value)
        assert name in message and EXISTS[name][1] in message and "base_k" in message and "\n" not in message


@pytest.mark.parametrize("name", tp.names())
def test_one_worker_is_the_identity(name):
    np.testing.assert_array_equal(tp.make(name, 1).matrix(0), [[1.0]])


@pytest.mark.parametrize("name", tp.names())
def test_topologies_are_values(name):
    first, second = tp.make(name, 8), tp.make(name, 8)
    assert first == second and hash(first) == hash(second) and first != tp.make(name, 16)


@pytest.mark.parametrize("name", [name for name in tp.names() if "seed" in tp.options(name)])
def test_other_seeds_give_other_graphs(name):
    assert len({tp.make(name, 16, seed=seed) for seed in range(5)}) > 1


# Dense references -------------------------------------------------------------------------------------------


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
    """Groups as in the design's definition: a counter over all pairs decides who meets in which phase."""
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
    # Inside a node 2(L−1)/L, and one shard of 1/L for who meets.
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
        np.testing.assert_allclose(
            topology.rounds[0].volume(), 2 * (n - 1) / n
        )  # a bandwidth-optimal all-reduce


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


def test_base_k_takes_the_shorter_construction():
    # 22 = 4·5 + 2: average 20 = 5·4 (2 rounds), exchange, finish 5. Not 2 · (11 = 2·5 + 1): that takes 4 + 1.
    assert tp.make("base_k", 22, k=4).period == 4
    # 12 = 4 · 3, where 3 = 2 + 1 takes 3 rounds and 4 takes 2. Not 8 + 4, which takes 3 + 1 + 3.
    assert tp.make("base_k", 12, k=1).period == 5


@pytest.mark.parametrize("n", [4, 9, 16, 33])
def test_random_matchings_leave_at_most_one_worker_idle(n):
    topology = tp.make("random_matching", n, rounds=12, seed=3)
    assert topology.period == 12 and topology.is_symmetric and topology.max_degree == 1
    for phase in range(12):
        idle = np.diag(topology.matrix(phase)) == 1
        assert idle.sum() == n % 2
        np.testing.assert_array_equal(np.diag(topology.matrix(phase))[~idle], 0.5)


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
    # Two cliques of four joined by one edge: nothing connects them but this bridge, so the matching that has
    # it is active more often than the average one.
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
    p = matcha.activation_probabilities(np.array(laplacians), budget=0.4)
    assert p.mean() == pytest.approx(0.4, abs=1e-9) and (p >= 0).all() and (p <= 1).all()
    with_bridge = [bool({bridge, bridge[::-1]} & set(pairing)) for pairing in pairings].index(True)
    assert p[with_bridge] > 0.4 + 1e-3

    def connectivity(p):
        return np.linalg.eigvalsh(np.tensordot(p, laplacians, 1))[1]

    rng = np.random.default_rng(0)
    others = [q for q in rng.dirichlet(np.ones(len(p)), 500) * 0.4 * len(p) if q.max() <= 1]
    assert connectivity(p) >= max(connectivity(q) for q in others) - 1e-3

    alpha = matcha.mixing_weight(np.array(laplacians), p)
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
        np.testing.assert_allclose(
            W_NxN, [np.roll(row, i) for i in range(n)], rtol=0, atol=1e-12
        )  # circulant
        assert row[0] == pytest.approx(1 / n)
        if name == "equitopo_d":
            assert topology.max_degree == degree
            np.testing.assert_allclose(row[row > 0][1:], (n - 1) / (n * degree))
        else:
            assert topology.is_symmetric and topology.max_degree <= 2 * degree
    np.testing.assert_allclose(tp.make(name, 9, degree=8).matrix(0), 1 / 9)  # all basis graphs: J/n


def test_equitopo_gap_does_not_vanish_with_size():
    # With degree ~ log n the gap stays, where that of the ring falls like 1/n².
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
@pytest.mark.parametrize(
    "outer", ["ring", "complete", "one_peer_exponential", "alternating_exponential_ring"]
)
def test_hierarchical_is_a_kronecker_product(outer, local):
    topology = tp.make("hierarchical", 4 * local, local=local, outer=outer)
    inner = tp.make(outer, 4)
    assert_same_rounds(
        topology, [np.kron(inner.matrix(p), np.full((local, local), 1 / local)) for p in range(inner.period)]
    )
    for round_, inner_round in zip(topology.rounds, inner.rounds, strict=True):
        # Per worker: twice (L−1)/L inside the groups, plus its share of what the outer node sends.
        groups = round_.group_size
        sent = np.zeros(round_.num_nodes)
        for shift in inner_round.shifts:
            for source, _ in shift.pairs:
                sent[source] += 1
        np.testing.assert_allclose(
            round_.volume(), np.repeat(2 * (groups - 1) / groups + sent / groups, groups)
        )


def test_hierarchical_composes():
    nested = tp.make("hierarchical", 16, local=4, outer="complete")
    assert nested.rounds == tp.make("complete", 16).rounds
    aer = tp.make("hierarchical", 16, local=2, outer="alternating_exponential_ring", local_size=2)
    assert aer.rounds == tp.make("alternating_exponential_ring", 16, local_size=4).rounds
    assert tp.make("hierarchical", 6, local=6, outer="ring").rounds == tp.make("complete", 6).rounds


# Properties -------------------------------------------------------------------------------------------------


def test_volume_counts_messages_per_worker():
    np.testing.assert_array_equal(tp.make("ring", 5).rounds[0].volume(), 2.0)
    np.testing.assert_array_equal(tp.make("star", 5).rounds[0].volume(), [4, 1, 1, 1, 1])
    np.testing.assert_array_equal(tp.make("one_peer_ring", 5).rounds[0].volume(), [1, 1, 1, 1, 0])


def test_static_and_symmetric():
    assert tp.make("ring", 6).is_static and tp.make("ring", 6).is_symmetric
    assert not tp.make("exponential", 6).is_symmetric
    assert not tp.make("one_peer_exponential", 6).is_static


def test_spectral_gap_is_of_singular_values():
    # A directed ring with weights 1/2: singular values |cos(πm/n)|.
    topology = tp.make("directed_ring", 7)
    assert tp.spectral_gap(topology) == pytest.approx(1 - math.cos(math.pi / 7), abs=1e-12)
    for name in ("one_peer_ring", "equitopo_od", "torus", "base_k"):
        topology = tp.make(name, 12)
        assert tp.spectral_gap(topology) == pytest.approx(
            1 - second_singular_value(topology.product()), abs=1e-12
        )
        for phase in range(topology.period):
            expected = 1 - second_singular_value(topology.matrix(phase))
            assert tp.spectral_gap(topology, phase) == pytest.approx(expected, abs=1e-12)


def test_products_apply_earlier_rounds_first():
    A, B = np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[0.25, 0.75], [0.0, 1.0]])
    topology = tp.from_matrices([A, B])
    np.testing.assert_array_equal(topology.product(), B @ A)
    np.testing.assert_array_equal(topology.product(start=1, num_rounds=3), B @ A @ B)


def test_is_mixing_needs_more_than_connected_rounds():
    swap = tp.Round((0.0, 0.0), (tp.Shift(((0, 1), (1, 0)), (1.0, 1.0)),))
    assert not tp.is_mixing([swap])  # connected, but two workers only trade places
    assert not tp.is_mixing([tp.Round((1.0, 1.0))])
    assert tp.is_mixing([swap, *tp.make("ring", 2).rounds])


# Given matrices ---------------------------------------------------------------------------------------------


@st.composite
def stochastic_matrices(draw):
    """(W, axis): nonnegative, sums over `axis` are one, often sparse, often with a symmetric pattern."""
    n = draw(st.integers(1, 9))
    elements = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
    W_NxN = draw(hnp.arrays(np.float64, (n, n), elements=elements))
    if draw(st.booleans()):
        W_NxN = W_NxN * ((W_NxN > 0) & (W_NxN.T > 0))
    W_NxN = W_NxN + np.eye(n) * (W_NxN.sum() * draw(st.booleans()) + 0.1)
    axis = draw(st.sampled_from([0, 1]))
    return W_NxN / W_NxN.sum(axis=axis, keepdims=True), axis


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(stochastic_matrices())
def test_from_matrices_round_trip(drawn):
    W_NxN, axis = drawn
    topology = tp.from_matrices(W_NxN)
    (round_,) = topology.rounds
    np.testing.assert_array_equal(topology.matrix(0), W_NxN)
    np.testing.assert_array_equal(dense(round_), W_NxN)
    edges_NxN = (W_NxN > 0) & ~np.eye(len(W_NxN), dtype=bool)
    degree = max(edges_NxN.sum(axis=0).max(), edges_NxN.sum(axis=1).max())
    assert len(round_.shifts) == degree == topology.max_degree
    assert tp.is_row_stochastic(topology) if axis == 1 else tp.is_column_stochastic(topology)


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
    assert set(tp.from_matrices(circulant).rounds[0].shifts) == set(
        tp.make("exponential", 8).rounds[0].shifts
    )
    for shift in tp.from_matrices(tp.make("hypercube", 8).matrix(0)).rounds[0].shifts:
        assert {(t, s) for s, t in shift.pairs} == set(shift.pairs)


def test_given_matrices_form_a_period():
    ring, complete = tp.make("ring", 5).matrix(0), np.full((5, 5), 0.2)
    topology = tp.from_matrices([ring, complete], name="mine")
    assert (topology.name, topology.period, topology.num_workers) == ("mine", 2, 5)
    assert_same_rounds(topology, [ring, complete])
    assert tp.from_matrices(np.stack([ring, complete]), name="mine") == topology
    assert tp.rounds_to_exact(topology) == 2


@pytest.mark.parametrize(
    "matrices, problem",
    [
        ([], "at least one"),
        ([[0.5, 0.5]], "square"),
        ([[0.5, 0.4], [0.5, 0.5]], "row 0 sums to 0.9"),
        ([[1.5, -0.5], [0.0, 1.0]], r"\[0, 1\] = -0.5"),
        ([[math.nan, 1.0], [0.0, 1.0]], "finite"),
        ([np.eye(2), np.eye(3)], "3 workers"),
    ],
)
def test_bad_matrices_are_refused(matrices, problem):
    with pytest.raises(ValueError, match=problem) as error:
        tp.from_matrices(matrices)
    assert "\n" not in str(error.value)


# Mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, num_workers, options, problem",
    [
        ("rings", 4, {}, "unknown topology 'rings'.*ring.*base_k"),
        ("ring", 0, {}, "num_workers.*>= 1, got 0"),
        ("ring", 2.0, {}, "num_workers.*integer"),
        ("ring", True, {}, "num_workers.*integer"),
        ("ring", 4, {"k": 1}, "'ring' has no option 'k'; it has no options"),
        ("base_k", 4, {"degree": 1}, "'base_k' has no option 'degree'; its options are k"),
        ("base_k", 4, {"k": 0}, "'k'.*>= 1, got 0"),
        ("base_k", 4, {"k": 1.5}, "'k'.*integer.*1.5"),
        ("torus", 12, {"shape": (5, 2)}, "12 workers.*5x2"),
        ("torus", 12, {"shape": (1, 12)}, "'shape'.*>= 2, got 1"),
        ("torus", 12, {"shape": 12}, "rows, columns"),
        ("one_peer_torus", 12, {"shape": (4, 3)}, "even"),
        ("one_peer_exponential", 4, {"pairwise": 1}, "True or False"),
        ("alternating_exponential_ring", 8, {"local_size": 3}, "local_size=3"),
        ("alternating_exponential_ring", 8, {"local_size": 8}, "local_size=8"),
        ("erdos_renyi", 8, {"p": 0.0}, r"'p'.*\(0, 1\].*0.0"),
        ("erdos_renyi", 30, {"p": 0.01}, "raise p"),
        ("random_matching", 8, {"rounds": 1}, "rounds=1; raise rounds"),
        ("random_matching", 8, {"seed": -1}, "'seed'.*>= 0, got -1"),
        ("matcha", 8, {"budget": 1.5}, "budget.*1.5"),
        ("matcha", 8, {"base": "exponential"}, "static undirected"),
        ("matcha", 8, {"base": "rings"}, "unknown topology 'rings'"),
        ("matcha", 12, {"base": "star", "rounds": 1, "budget": 0.1}, "raise rounds or budget"),
        ("random_digraph", 4, {"degree": 4}, "from 1 to 3, got 4"),
        ("equitopo_d", 4, {"degree": 4}, "from 1 to 3, got 4"),
        ("equitopo_od", 4, {"eta": 0}, "eta"),
        ("hierarchical", 8, {"local": 3}, "local=3"),
        (
            "hierarchical",
            8,
            {"locl": 2},
            "'hierarchical' has no option 'locl'; its options are local, outer, pairwise",
        ),
        ("hierarchical", 12, {"outer": "hypercube"}, "power of two workers, got 6"),
    ],
)
def test_mistakes_are_named(name, num_workers, options, problem):
    with pytest.raises(ValueError, match=problem) as error:
        tp.make(name, num_workers, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: tp.Shift(((0, 1), (0, 2)), (0.0, 0.5, 0.5)),
        lambda: tp.Shift(((0, 1), (2, 1)), (0.0, 0.5, 0.0)),
        lambda: tp.Shift(((1, 1),), (0.0, 0.5)),
        lambda: tp.Shift(((0, 2),), (0.0, 0.5)),
        lambda: tp.Shift(((0, 1),), (0.5, 0.5)),
        lambda: tp.Shift(((0, 1),), (0.0, -0.5)),
        lambda: tp.Round(()),
        lambda: tp.Round((1.0,), group_size=0),
        lambda: tp.Round((0.5, 0.4)),
        lambda: tp.Round((1.0, 1.0, 1.0), (tp.Shift(((0, 1),), (0.0, 0.0)),)),
        lambda: tp.Round((1.5, 1.0), (tp.Shift(((0, 1),), (0.0, 0.5)),)),
        lambda: tp.Topology("none", 2, ()),
        lambda: tp.Topology("mixed", 2, (tp.Round((1.0, 1.0)), tp.Round((1.0,)))),
    ],
)
def test_malformed_rounds_are_refused(build):
    with pytest.raises(ValueError):
        build()


def test_given_matrices_through_make():
    W_NxN = [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]
    assert tp.make("from_matrices", 3, matrices=W_NxN) == tp.from_matrices(W_NxN)
    with pytest.raises(ValueError, match="for 3 workers, not 4"):
        tp.make("from_matrices", 4, matrices=W_NxN)
    with pytest.raises(ValueError, match="needs the option matrices"):
        tp.make("from_matrices", 3)
