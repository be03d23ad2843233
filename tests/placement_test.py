"""Placement on networks of links that differ: the cost as its paper states it, searches beside the optimum, files."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from decjax import placement, topology
from decjax.placement import cost, links, search

ROOT = pathlib.Path(__file__).resolve().parent.parent


def make_links(N, seed=0, symmetric=False):
    rng = np.random.default_rng(seed)
    latency_s, bandwidth_Bps = rng.uniform(0.01, 0.2, (N, N)), 10 ** rng.uniform(7, 9, (N, N))
    if symmetric:
        latency_s, bandwidth_Bps = latency_s + latency_s.T, bandwidth_Bps + bandwidth_Bps.T
    return links.Links(latency_s, bandwidth_Bps)


# -- Cost -------------------------------------------------------------------------------------------------------------


def paper_cost(given, groups, gradient_bytes, activation_bytes):
    """As arXiv 2206.01288 states it, for links that are the same both ways; all matchings and paths are tried."""
    α, β, size = given.latency_s, given.bandwidth_Bps, len(groups[0])
    data_parallel = max(
        max(sum(2 * (α[d, e] + gradient_bytes / (size * β[d, e])) for e in group if e != d) for d in group) for group in groups
    )

    def joined(one, other):
        return min(max(α[d, e] + activation_bytes / β[d, e] for d, e in zip(one, order)) for order in itertools.permutations(other))

    paths = itertools.permutations(groups)
    return data_parallel + 2 * min(sum(joined(a, b) for a, b in itertools.pairwise(path)) for path in paths)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("S, W", [(2, 4), (4, 2), (3, 3)])
def test_cost_is_that_of_the_paper(S, W, seed):
    given = make_links(S * W, seed, symmetric=True)
    network = placement.Network(given, placement.Job(W, S, 3e7, 2e6))
    layout = placement.random_layout(network, np.random.default_rng(seed))
    np.testing.assert_allclose(network.seconds(layout), paper_cost(given, layout.tolist(), 3e7, 2e6), rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_ordered_layout_costs_what_the_best_order_does(seed):
    network = placement.Network(make_links(12, seed), placement.Job(3, 4, 1e7, 1e7))
    layout = placement.random_layout(network, np.random.default_rng(seed))
    ordered = network.ordered(layout)
    assert {frozenset(row) for row in ordered.tolist()} == {frozenset(row) for row in layout.tolist()}
    hops_s = sum(network.hop_s[a, b].max() for a, b in itertools.pairwise(ordered))
    np.testing.assert_allclose(network.averaging_s(ordered) + hops_s, network.seconds(layout), rtol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_bottleneck_matching_is_the_best_of_all(seed):
    seconds = np.random.default_rng(seed).integers(1, 9, (5, 5)).astype(float)
    slowest_s, columns = cost.bottleneck_matching(seconds)
    sums = [(max(seconds[range(5), order]), sum(seconds[range(5), order])) for order in map(list, itertools.permutations(range(5)))]
    assert (slowest_s, seconds[range(5), columns].sum()) == min(sums)


@pytest.mark.parametrize("seed", range(6))
def test_shortest_path_is_the_best_of_all(seed):
    seconds = np.random.default_rng(seed).uniform(size=(6, 6))
    length, path = cost.shortest_path(seconds)
    along = lambda order: sum(seconds[a, b] for a, b in itertools.pairwise(order))
    assert sorted(path) == list(range(6))
    np.testing.assert_allclose([length, along(path)], min(map(along, itertools.permutations(range(6)))), rtol=1e-12)


def test_gossip_costs_the_slowest_device_of_each_round():
    given = make_links(6)
    job = placement.Job(6, gradient_bytes=1e7, topology=topology.make("ring", 6))
    order = np.random.default_rng(1).permutation(6)
    seconds = given.seconds(1e7)
    expected = max(seconds[order[i], order[i - 1]] + seconds[order[i], order[(i + 1) % 6]] for i in range(6))
    np.testing.assert_allclose(placement.Network(given, job).seconds(order[None]), expected, rtol=1e-12)


def test_links_that_differ_by_direction_count_both_ways():
    latency_s = np.array([[0, 1.0], [3.0, 0]])
    given = links.Links(latency_s, np.full((2, 2), 1e300**0.05))
    assert placement.Network(given, placement.Job(2)).seconds(np.array([[0, 1]])) == pytest.approx(4)
    assert placement.Network(given, placement.Job(1, 2, 0.0, 1e-9)).seconds(np.array([[0], [1]])) == pytest.approx(4)


# -- Searches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("find", [placement.genetic, placement.anneal])
@pytest.mark.parametrize("S, W", [(2, 4), (4, 2), (2, 5), (5, 2), (3, 3)])
def test_search_comes_near_the_optimum_of_few_devices(find, S, W):
    network = placement.Network(make_links(S * W, seed=S), placement.Job(W, S, 3e7, 2e7))
    best = placement.best_of_all(network).seconds
    found = find(network, trials=1000)
    assert found.seconds <= 1.02 * best
    assert sorted(found.layout.ravel().tolist()) == list(range(S * W))


@pytest.mark.parametrize("find", [placement.genetic, placement.anneal])
def test_search_comes_near_the_optimum_of_gossip(find):
    job = placement.Job(7, gradient_bytes=3e7, topology=topology.make("ring", 7))
    network = placement.Network(make_links(7, seed=5), job)
    assert find(network, trials=1500).seconds <= 1.02 * placement.best_of_all(network).seconds


def test_same_seed_same_layout():
    network = placement.Network(make_links(12), placement.Job(4, 3, 1e7, 1e7))
    one, other = (placement.genetic(network, seed=3, trials=200) for _ in range(2))
    np.testing.assert_array_equal(one.layout, other.layout)


@pytest.mark.parametrize("S, W", [(1, 8), (2, 4), (8, 1)])
def test_exchange_and_cross_keep_all_devices(S, W):
    network = placement.Network(make_links(8), placement.Job(W, S, 1e7, 1e7))
    rng = np.random.default_rng(0)
    for _ in range(20):
        one, other = (placement.random_layout(network, rng) for _ in range(2))
        for layout in (search.exchange(one, network, rng), search.cross(one, other, rng), search.gathered(network, rng)):
            assert sorted(layout.ravel().tolist()) == list(range(8))


def test_all_layouts_of_many_devices_are_refused():
    with pytest.raises(ValueError, match="12 devices have too many layouts"):
        placement.best_of_all(placement.Network(make_links(12), placement.Job(4, 3)))


def test_worldwide_cloud_is_laid_out_in_less_than_065_of_random():
    given = placement.load(ROOT / "configs/links/worldwide.json")
    network = placement.Network(given, placement.Job(8, 8, 3e8, 3e7))
    rng = np.random.default_rng(0)
    usual = np.mean([network.seconds(placement.random_layout(network, rng)) for _ in range(10)])
    assert placement.genetic(network, trials=60).seconds <= 0.65 * usual


# -- Files ------------------------------------------------------------------------------------------------------------


def test_regions_are_written_out():
    given = placement.load(ROOT / "configs/links/worldwide.json")
    oregon, tokyo = given.names.index("Oregon 0"), given.names.index("Tokyo 3")
    assert given.num_devices == 64
    assert given.latency_s[oregon, tokyo] == given.latency_s[tokyo, oregon] == 0.096
    assert given.bandwidth_Bps[oregon, oregon + 1] == 2.5e8


def test_homes_send_at_the_lower_of_upload_and_download():
    given = placement.load(ROOT / "configs/links/homes.json")
    fast, slow = given.names.index("broadband 0"), given.names.index("dsl 0")
    assert given.bandwidth_Bps[fast, slow] == 1.875e5
    assert given.bandwidth_Bps[slow, fast] == 4.8e4
    assert given.latency_s[fast, slow] == pytest.approx(0.039)


MATRICES = dict(latency_s=[[0, 0.1], [0.1, 0]], bandwidth_Bps=[[0, 1e6], [1e6, 0]])
REGIONS = dict(regions={"A": 1, "B": 1}, within=dict(latency_s=0.1, bandwidth_Bps=1e6), between=[])
A_TO_B = {"from": "A", "to": "B", "latency_s": 0.1, "bandwidth_Bps": 1e6}
HOME = dict(name="a", count=2, latency_s=0.1, upload_Bps=1e6, download_Bps=1e6)


@pytest.mark.parametrize(
    "content, message",
    [
        ({}, "one of latency_s, regions, connections"),
        (MATRICES | dict(regions={}), "has latency_s and regions"),
        (MATRICES | dict(latency_s=[[0, 0.1]]), "latency_s is 1 × 2; it must be N × N"),
        (MATRICES | dict(latency_s=[[0, 0.1], [0.1]]), "rows of the same length"),
        (MATRICES | dict(latency_s=[[0, -0.1], [0.1, 0]]), r"latency_s\[0\]\[1\]=-0.1 must be at least 0"),
        (MATRICES | dict(bandwidth_Bps=[[0, 1], [float("nan"), 0]]), r"bandwidth_Bps\[1\]\[0\]=nan must be above 0"),
        (MATRICES | dict(bandwidth_Bps=np.ones((3, 3)).tolist()), "bandwidth_Bps is 3 × 3 and latency_s 2 × 2"),
        (MATRICES | dict(devices=["a"]), "1 different names for 2 devices"),
        (MATRICES | dict(devices="ab"), "must be a list of names"),
        (MATRICES | dict(flops=[1.0]), "flops must be 2 numbers above 0"),
        (MATRICES | dict(memory_bytes=[1.0, -1]), "memory_bytes must be 2 numbers above 0"),
        (MATRICES | dict(speed=1), "'speed' is unknown"),
        (REGIONS, "the link from A to B is missing"),
        (REGIONS | dict(between=[A_TO_B | {"to": "C"}]), "'C' is no region"),
        (REGIONS | dict(between=[A_TO_B | {"from": ["A"]}]), "is no region"),
        (REGIONS | dict(between=[A_TO_B], flops="fast"), "flops='fast' must be a number above 0"),
        (REGIONS | dict(regions={"A": 4096, "B": 1}), "4097 devices together; there may be at most 4096"),
        (REGIONS | dict(between=[A_TO_B | {"latency_s": "x"}]), "latency_s='x' must be a number"),
        (REGIONS | dict(regions={"A": 0, "B": 1}), "regions: A=0 must be a whole number"),
        (REGIONS | dict(between={}), "between must be a list"),
        (dict(connections=[]), "connections must be a list"),
        (dict(connections=[HOME | dict(count=1.5)]), "count=1.5 must be a whole number"),
        (dict(connections=[HOME, HOME | dict(name="b", flops=1e9)]), "flops must be given for all or for none"),
        (dict(connections=[HOME | dict(upload_Bps=0)]), "upload_Bps=0 must be a number above 0"),
    ],
)
def test_impossible_files_are_refused(tmp_path, content, message):
    path = tmp_path / "links.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        placement.load(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: placement.Network(make_links(8), placement.Job(3, 2)), "3 workers × 2 stages are 6 devices, and the links have 8"),
        (lambda: placement.Job(1, 17), "stages=17 must be a whole number of at most 16"),
        (lambda: placement.Job(0), "workers=0 must be a whole number"),
        (lambda: placement.Job(2, gradient_bytes=-1), "gradient_bytes=-1 must be a number at least 0"),
        (lambda: placement.Job(4, topology=topology.make("ring", 3)), "topology is for 3 workers, and workers=4"),
    ],
)
def test_job_that_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_groups_of_a_topology_average_before_they_send():
    given = make_links(4)
    graph = topology.make("alternating_exponential_ring", 4, local_size=2)
    network = placement.Network(given, placement.Job(4, gradient_bytes=1e7, topology=graph))
    seconds, order = given.seconds(0.5e7), np.array([2, 0, 3, 1])
    inside = max(seconds[2, 0] + seconds[0, 2], seconds[3, 1] + seconds[1, 3])
    round_ = graph.rounds[0]
    assert round_.group_size == 2
    sent = max(seconds[order[a], order[b]] for a, b in [(0, 2), (1, 3), (2, 0), (3, 1)]) * len(round_.shifts)
    np.testing.assert_allclose(network.round_s(order[None], round_), inside + sent, rtol=1e-12)
