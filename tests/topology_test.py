"""Properties of every topology, by any name and of any size, and error messages."""

import time

import numpy as np
import pytest

from decjax import registry
from decjax import topology as tp
from tests.graphs import EXISTS, SIZES, dense, exists

DIRECTED_MASS = ("random_digraph", "erdos_renyi_digraph")  # column-stochastic only


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
        # Every column is the limit of one worker's mass: all are equal, and 1/n if doubly stochastic.
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


@pytest.mark.parametrize(
    "name, num_workers, options, problem",
    [
        ("rings", 4, {}, "topology 'rings' is unknown; use one of .*ring.*base_k"),
        ("ring", 0, {}, "num_workers=0 must be at least 1 and at most 4096"),
        ("ring", 2.0, {}, "num_workers.*whole number"),
        ("ring", True, {}, "num_workers.*whole number"),
        ("ring", 4, {"k": 1}, "'ring' has no option 'k'; leave it out, it has no options"),
        ("base_k", 4, {"degree": 1}, "'base_k' has no option 'degree'; use k"),
        ("base_k", 4, {"k": 0}, "k=0 must be at least 1"),
        ("base_k", 4, {"k": 1.5}, "k=1.5 must be a whole number"),
        ("torus", 12, {"shape": (5, 2)}, r"12 workers with shape=\(5, 2\)"),
        ("torus", 12, {"shape": (1, 12)}, r"shape=\(1, 12\)"),
        ("torus", 12, {"shape": 12}, "must be a tuple"),
        ("one_peer_torus", 12, {"shape": (4, 3)}, "even"),
        ("one_peer_exponential", 4, {"pairwise": 1}, "True or False"),
        ("alternating_exponential_ring", 8, {"local_size": 3}, "local_size=3"),
        ("alternating_exponential_ring", 8, {"local_size": 8}, "local_size=8"),
        ("erdos_renyi", 8, {"p": 0.0}, "p=0.0 must be more than 0 and at most 1"),
        ("erdos_renyi", 30, {"p": 0.01}, "raise p"),
        ("random_matching", 8, {"rounds": 1}, "rounds=1; raise rounds"),
        ("random_matching", 8, {"seed": -1}, "seed=-1 must be at least 0"),
        ("matcha", 8, {"budget": 1.5}, "budget.*1.5"),
        ("matcha", 8, {"base": "exponential"}, "static undirected"),
        ("matcha", 8, {"base": "rings"}, "topology 'rings' is unknown"),
        ("matcha", 12, {"base": "star", "rounds": 1, "budget": 0.1}, "raise rounds or budget"),
        ("random_digraph", 4, {"degree": 4}, "degree=4 must be at most 3"),
        ("equitopo_d", 4, {"degree": 4}, "degree=4 must be at most 3"),
        ("equitopo_od", 4, {"eta": 0}, "eta"),
        ("hierarchical", 8, {"local_size": 3}, "local_size=3"),
        ("hierarchical", 8, {"locl": 2}, "'hierarchical' has no option 'locl'; use local_size, outer"),
        ("hierarchical", 12, {"outer": "hypercube"}, "power of two workers, got 6"),
        ("hierarchical", 12, {"outer": "ring(k=2)"}, "'ring' has no option 'k'"),
        ("ring", 4, {"num_workers": 3}, "'ring' has no option 'num_workers'"),
        ("ring", 4, {"name": "x"}, "'ring' has no option 'name'"),
        ("base_k(k={[]:1})", 4, {}, "must read like"),
        ("base_k(k=2)", 4, {"k": 2}, "option k is given twice"),
        ("random_matching", 64, {"rounds": 10**6}, "rounds=1000000 must be at least 1 and at most 1024"),
        ("matcha", 64, {"rounds": 10**30}, "rounds=10*.*at most"),
        ("random_matching", 8, {"seed": 1e30}, "seed=1e.30 must be a whole number"),
        ("random_matching", 8, {"seed": 10**30}, "seed=10*.*at most"),
        ("erdos_renyi", 256, {"p": 1e-9}, "raise p"),
        ("matcha", 64, {"base": "matcha"}, "static undirected"),
    ],
)
def test_mistakes_are_named_within_two_seconds(name, num_workers, options, problem):
    start = time.process_time()
    with pytest.raises(ValueError, match=problem) as error:
        tp.make(name, num_workers, **options)
    assert "\n" not in str(error.value) and time.process_time() - start < 2


def test_traits_are_true():
    """With default options, at sizes up to 17."""
    for name in tp.names():
        built = [tp.make(name, n) for n in range(2, 18) if exists(name, n)]
        traits = registry.part("topology", name).traits
        assert traits.get("static", False) == all(topology.is_static for topology in built), name
        assert traits.get("directed", False) == any(not topology.is_symmetric for topology in built), name
        assert traits.get("exact", False) == all(tp.rounds_to_exact(topology) == topology.period for topology in built), name
        assert ("needs" in traits) == (len(built) < 16), name


def test_a_topology_of_ones_own_is_one_function(monkeypatch):
    monkeypatch.setitem(registry._parts, "topology", dict(registry._parts["topology"]))

    @registry.register("topology", "pair_of_halves")
    def pair_of_halves(num_workers, weight: float = 0.5):
        J_NxN = np.full((num_workers, num_workers), 1 / num_workers)
        return tp.from_matrices([weight * np.eye(num_workers) + (1 - weight) * J_NxN], "pair_of_halves")

    assert tp.options("pair_of_halves") == {"weight": 0.5}
    assert tp.make("pair_of_halves(weight=0.25)", 4).matrix(0)[0, 0] == 0.25 + 0.75 / 4
