"""Placement on heterogeneous networks: the cost as in its paper, searches against the optimum, files."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from decjax import topology
from decjax.contrib import placement
from decjax.contrib.placement import cost, links, measured, search
from tests import commands

ROOT = pathlib.Path(__file__).resolve().parent.parent


def make_links(N, seed=0, symmetric=False):
    rng = np.random.default_rng(seed)
    latency_s, bandwidth_Bps = rng.uniform(0.01, 0.2, (N, N)), 10 ** rng.uniform(7, 9, (N, N))
    if symmetric:
        latency_s, bandwidth_Bps = latency_s + latency_s.T, bandwidth_Bps + bandwidth_Bps.T
    return links.Links(latency_s, bandwidth_Bps)


# -- Cost -------------------------------------------------------------------------------------------------------------


def paper_cost(given, groups, gradient_bytes, activation_bytes):
    """As in arXiv 2206.01288 for symmetric links; all matchings and paths are tried."""
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


def test_bottleneck_of_many_workers_takes_few_matchings(monkeypatch):
    """Sorting 4,000,000 links and bisecting them for every layout once took a second per 2,000 workers."""
    matching, asked = cost.sparse.csgraph.maximum_bipartite_matching, []
    monkeypatch.setattr(cost.sparse.csgraph, "maximum_bipartite_matching", lambda *a, **b: asked.append(a) or matching(*a, **b))
    seconds = np.random.default_rng(0).uniform(size=(200, 200))
    least = cost.bottleneck_s(seconds)
    assert len(asked) == 1
    assert (matching(cost.sparse.csr_array(seconds <= least), perm_type="column") >= 0).all()
    assert (matching(cost.sparse.csr_array(seconds < least), perm_type="column") < 0).any()


def test_many_workers_are_matched_without_the_least_sum(monkeypatch):
    seconds = np.random.default_rng(0).uniform(size=(20, 20))
    slowest_s, _ = cost.bottleneck_matching(seconds)
    monkeypatch.setattr(cost, "MAX_LEAST_SUM", 19)
    monkeypatch.setattr(
        cost.optimize, "linear_sum_assignment", lambda *args: pytest.fail("it takes the third power of the workers")
    )
    same_s, columns = cost.bottleneck_matching(seconds)
    assert sorted(columns) == list(range(20))
    assert same_s == slowest_s == seconds[range(20), columns].max()


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


@pytest.mark.parametrize("S, W", [(1, 12), (3, 4), (4, 3)])
def test_gathered_devices_are_near_to_all_of_their_group(S, W):
    """Against the definition, which takes a group's size squared for each device: minutes with 4,000 devices."""
    network = placement.Network(make_links(S * W), placement.Job(W, S, 1e7, 1e7))
    layout = search.gathered(network, np.random.default_rng(3))
    rng = np.random.default_rng(3)
    near_s, left = network.shard_s + rng.uniform(0, 1e-9, network.shard_s.shape), set(range(S * W))
    for row in layout.tolist():
        assert row[0] == rng.choice(sorted(left))
        for k in range(1, W):
            left.remove(row[k - 1])
            assert row[k] == min(left, key=lambda device, row=row, k=k: near_s[row[:k], device].max())
        left.remove(row[-1])


def test_thousands_of_devices_are_gathered_at_once(monkeypatch):
    """Work grows with the square of the number of devices, not with the cube: each row of the matrix is read once."""
    network = placement.Network(make_links(300), placement.Job(300, 1, 1e7, 0.0))
    counted = []
    maximum = np.maximum
    monkeypatch.setattr(search.np, "maximum", lambda *args: counted.append(args) or maximum(*args))
    assert sorted(search.gathered(network, np.random.default_rng(0))[0]) == list(range(300))
    assert len(counted) == 299 and all(x.shape == (300,) for args in counted for x in args)


@pytest.mark.parametrize("find", [placement.genetic, placement.anneal])
def test_a_search_ends_with_the_first_layout_if_all_cost_the_same(find):
    network = placement.Network(make_links(12), placement.Job(12, gradient_bytes=1e7))
    found = find(network, trials=10**9, seconds=5)
    assert found.tried == 1 and sorted(found.layout[0]) == list(range(12))
    assert found.seconds == network.shard_s.sum(axis=1).max()


@pytest.mark.parametrize("find", [placement.genetic, placement.anneal])
def test_a_search_without_time_tries_one_layout(find):
    """16 layouts of 4,000 devices once took 12 s longer than --search_s."""
    assert find(placement.Network(make_links(12), placement.Job(4, 3)), trials=10**9, seconds=1e-9).tried == 1


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
    with pytest.raises(ValueError, match="the number of devices=12 must be at least 1 and at most 10"):
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
        (MATRICES | dict(latency_s=[[0, 0.1]]), "the number of devices=1 must be at least 2 and at most 4096"),
        (MATRICES | dict(latency_s=[[0, 0.1], [0.1]]), "latency_s=.* must be 2 × 2 numbers for 2 devices"),
        (MATRICES | dict(latency_s=[[0, -0.1], [0.1, 0]]), r"latency_s\[0\]\[1\]=-0.1 must be at least 0"),
        (MATRICES | dict(bandwidth_Bps=[[0, 1], [float("nan"), 0]]), r"bandwidth_Bps\[1\]\[0\]=nan must be at least 1e-18"),
        (MATRICES | dict(bandwidth_Bps=[[0, "1e8"], [1, 0]]), "bandwidth_Bps=.* must be 2 × 2 numbers"),
        (MATRICES | dict(latency_s=[[0, True], [0.1, 0]]), "latency_s=.* must be 2 × 2 numbers"),
        (MATRICES | dict(latency_s=[[0, 10**400], [0.1, 0]]), r"latency_s\[0\]\[1\]=1000.* must be at least 0"),
        (MATRICES | dict(flops=["1", 2]), "flops=.* must be 2 numbers"),
        (MATRICES | dict(bandwidth_Bps=np.ones((3, 3)).tolist()), "bandwidth_Bps=.* must be 2 × 2 numbers"),
        (MATRICES | dict(devices=["a"]), "1 different names for 2 devices"),
        (MATRICES | dict(devices="ab"), "devices='ab' must be a sequence"),
        (MATRICES | dict(flops=[1.0]), "flops=.* must be 2 numbers for 2 devices"),
        (MATRICES | dict(memory_bytes=[1.0, -1]), r"memory_bytes\[1\]=-1 must be at least 1e-18"),
        (MATRICES | dict(speed=1), "unknown field 'speed'"),
        (REGIONS, "the link from A to B has 0 different values"),
        (REGIONS | dict(between=[A_TO_B | {"to": "C"}]), "region='C' is unknown; use one of A, B"),
        (
            REGIONS | dict(between=[A_TO_B, A_TO_B | {"latency_s": 0.2}]),
            "the link from A to B has 2 different values; give it once",
        ),
        (REGIONS | dict(between=[A_TO_B | {"from": ["A"]}]), "from_, a list, must be a word"),
        (REGIONS | dict(between=[A_TO_B], flops="fast"), "flops='fast' must be a number or None"),
        (REGIONS | dict(regions={"A": 4096, "B": 1}), "the number of devices=4097 must be at least 1 and at most 4096"),
        (REGIONS | dict(between=[A_TO_B | {"latency_s": "x"}]), "latency_s='x' must be a number"),
        (REGIONS | dict(regions={"A": 0, "B": 1}), "regions: A=0 must be at least 1"),
        (REGIONS | dict(between={}), "between, a dict, must be a list"),
        (dict(connections=[]), "the number of devices=0 must be at least 1"),
        (dict(connections=[HOME | dict(count=1.5)]), "count=1.5 must be a whole number"),
        (dict(connections=[HOME, HOME | dict(name="b", flops=1e9)]), "flops must be given for all or for none"),
        (dict(connections=[HOME | dict(upload_Bps=0)]), "upload_Bps=0 must be at least 1e-18"),
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
        (lambda: placement.Network(make_links(8), placement.Job(3, 2)), "workers × stages=6 must be 8"),
        (lambda: placement.Job(1, 17), "stages=17 must be at least 1 and at most 16"),
        (lambda: placement.Job(0), "workers=0 must be at least 1"),
        (lambda: placement.Job(2, gradient_bytes=-1), "gradient_bytes=-1 must be at least 0"),
        (lambda: placement.Job(4, topology=topology.make("ring", 3)), "the topology's workers=3 must be 4"),
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


# -- Which devices take part ------------------------------------------------------------------------------------------


def even_links(N, **each):
    return links.Links(np.full((N, N), 0.01), np.full((N, N), 1e8), **each)


def test_devices_without_the_memory_are_left_out():
    given = even_links(4, memory_bytes=[8e9, 1e9, 8e9, 8e9])
    placed = placement.place(given, placement.Job(3, gradient_bytes=1e6), placement.best_of_all, stage_bytes=2e9)
    assert sorted(placed.layout.ravel()) == [0, 2, 3]
    with pytest.raises(ValueError, match="need 4 devices with 2 GB of memory, and 3 of 4 have it; choose fewer workers"):
        placement.place(given, placement.Job(4, gradient_bytes=1e6), placement.best_of_all, stage_bytes=2e9)
    with pytest.raises(ValueError, match="need 5 devices with 0 GB of memory, and 4 of 4 have it"):
        placement.place(given, placement.Job(5), placement.best_of_all)


def test_a_slow_device_is_left_out_unless_the_fast_ones_are_far():
    job, flops = placement.Job(2, gradient_bytes=1e6), [1e9, 4e9, 4e9]
    placed = placement.place(even_links(3, flops=flops), job, placement.best_of_all, stage_flop=4e9)
    assert sorted(placed.layout.ravel()) == [1, 2] and placed.compute_s == 1
    bandwidth_Bps = np.full((3, 3), 1e8)
    bandwidth_Bps[1, 2] = bandwidth_Bps[2, 1] = 1e4
    far = links.Links(np.full((3, 3), 0.01), bandwidth_Bps, flops=flops)
    placed = placement.place(far, job, placement.best_of_all, stage_flop=4e9)
    assert 0 in placed.layout and placed.compute_s == 4
    assert placed.seconds == pytest.approx(4 + 2 * (0.01 + 0.5e6 / 1e8))


def test_of_too_many_devices_the_farthest_are_left_out():
    latency_s = np.full((5, 5), 0.01)
    latency_s[3], latency_s[:, 3] = 1.0, 1.0
    (choice,) = placement.choice.choices(links.Links(latency_s, np.full((5, 5), 1e9)), placement.Job(4))
    assert choice.devices == [0, 1, 2, 4]


class Counted(np.ndarray):
    """An array that counts the elements read by index."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Counted.num_read += np.size(found)
        return found


@pytest.mark.parametrize("seed", range(3))
def test_leaving_out_many_devices_takes_the_square_of_their_number(seed):
    """Leaving out 200 of 1,000 connections took half a second, and 2,000 of 4,000 took minutes."""
    far_s, left = np.random.default_rng(seed).uniform(size=(60, 60)), list(range(1, 60))
    Counted.num_read = 0
    near = placement.choice.nearest(far_s.view(Counted), left, 20)
    assert Counted.num_read <= 2 * 60**2
    while len(left) > 20:
        del left[far_s[np.ix_(left, left)].sum(axis=1).argmax()]
    assert near == left


def test_too_many_speeds_are_refused(monkeypatch):
    monkeypatch.setattr(placement.choice, "MAX_PAIRS", 8**2 + 7**2)
    given, job = even_links(8, flops=np.arange(1.0, 9)), placement.Job(7, gradient_bytes=1e6)
    assert len(placement.choice.choices(given, job, stage_flop=1.0)) == 2
    with pytest.raises(ValueError, match="flops: links in the candidates of 3 speeds=149 must be at least 0 and at most 113"):
        placement.choice.choices(given, placement.Job(6), stage_flop=1.0)


# -- Clusters that hold the whole model -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_every_device_is_in_one_cluster_with_memory_for_the_model(seed):
    rng = np.random.default_rng(seed)
    latency_s, bandwidth_Bps = rng.uniform(0.01, 0.2, (12, 12)), 10 ** rng.uniform(7, 9, (12, 12))
    given = links.Links(latency_s, bandwidth_Bps, memory_bytes=rng.uniform(2e9, 16e9, 12))
    found = placement.clusters(given, 2e10)
    assert sorted(device for cluster in found for device in cluster.devices) == list(range(12))
    for cluster in found:
        assert given.memory_bytes[cluster.devices].sum() >= 2e10 and cluster.shares.sum() == pytest.approx(1)
        np.testing.assert_allclose(cluster.shares * given.memory_bytes[cluster.devices].sum(), given.memory_bytes[cluster.devices])


def test_clusters_are_regions_where_memory_allows_it():
    near = np.kron(np.eye(3), np.ones((4, 4)))
    given = links.Links(0.1 - 0.09 * near, 1e7 + 1e9 * near, memory_bytes=np.full(12, 4e9))
    shuffled = np.random.default_rng(0).permutation(12)
    found = placement.clusters(given.take(shuffled), 1.6e10)
    assert {frozenset(shuffled[cluster.devices] // 4) for cluster in found} == {frozenset([0]), frozenset([1]), frozenset([2])}
    assert all(cluster.slowest_Bps > 1e9 for cluster in found)


def test_clusters_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="memory_bytes is missing"):
        placement.clusters(even_links(4), 1e9)
    with pytest.raises(ValueError, match=r"model_bytes=10000000000.0 must be more than 0 and at most 8000000000"):
        placement.clusters(even_links(4, memory_bytes=[2e9] * 4), 1e10)
    with pytest.raises(ValueError, match="the number of devices in a cluster=20 must be at least 1 and at most 16"):
        placement.clusters(even_links(20, memory_bytes=[1e9] * 20), 2e10)


# -- The order of a mesh ----------------------------------------------------------------------------------------------


def test_a_placement_is_read_as_the_order_of_a_mesh(tmp_path):
    given, path = even_links(7, names=tuple("abcdefg")), tmp_path / "placement.json"
    layout = np.array([[6, 1], [3, 0]])  # stages × workers, without devices 2, 4 and 5
    placement.save(path, given, placement.Placement(layout, 0.0, 1.0, 1), links="given.json")
    content = json.loads(path.read_text())
    assert content["devices"] == [["g", "b"], ["d", "a"]] and content["links"] == "given.json"
    assert content["layout"] == [[3, 1], [2, 0]]  # among the participants
    order = placement.load_device_order(path)
    assert order.of(workers=2, stages=2) == [3, 2, 1, 0]
    assert order.of(workers=2, stages=2, tensor=2) == [6, 7, 4, 5, 2, 3, 0, 1]
    with pytest.raises(ValueError, match="the run's workers=4 must be 2"):
        order.of(workers=4, stages=1)


@pytest.mark.parametrize("layout", [None, [0, 1], [[0, 1], [2]], [[0, 0]], [[0, 2]], [[0.0, 1.0]], [[]], "ab"])
def test_what_is_no_placement_is_refused(tmp_path, layout):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"layout": layout}))
    with pytest.raises(ValueError, match="layout") as error:
        placement.load_device_order(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def losses(tmp_path, name, *arguments):
    run = "--config=configs/lm.py:smoke,workers=2,stages=2,steps=3", f"--workdir={tmp_path / name}", "--config.log_every=1"
    done = commands.run("launch.train", *run, *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]


def test_planned_placement_trains_the_same_numbers(tmp_path):
    """From links to a run: the device assignment changes no number."""
    given, path = tmp_path / "links.json", tmp_path / "placement.json"
    make_links(4, seed=3).save(given)
    model = "depth=2,width=16,heads=2,vocabulary=256,context=32,batch=16"
    asked = f"--links={given}", f"--model={model}", "--stages=2", "--search_s=0.2"
    done = commands.run("launch.place", *asked, f"--out={path}", f"--plot={tmp_path / 'plan.png'}")
    assert done.returncode == 0, done.stderr
    assert "of random" in done.stdout and "worker 1: " in done.stdout and (tmp_path / "plan.png").stat().st_size > 1e4
    rows = {
        cells[0]: float(cells[1])
        for line in done.stdout.splitlines()
        if len(cells := line.replace("all layouts", "all").split()) == 7
    }
    assert rows["genetic"] == rows["annealing"] == rows["all"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layout": [[3, 1], [0, 2]]}))  # certainly not JAX's own order
    assert losses(tmp_path, "placed", f"--placement={path}") == losses(tmp_path, "usual")


@pytest.mark.parametrize(
    "module, arguments, problem",
    [
        ("launch.place", ["--links=configs/links/homes.json", "--stages=3", "--model=params=1e6"], "--stages=3 does not divide 16"),
        ("launch.place", ["--links=configs/links/homes.json", "--stages=2", "--model=params=1e6"], "depth="),
        ("launch.place", ["--links=configs/links/homes.json", "--model=params=0"], "params=0"),
        ("launch.place", ["--links=configs/links/homes.json"], "--model is missing; --help lists the flags"),
        ("launch.place", ["--links=configs/links/homes.json", "--model=bytes=2"], "params is missing; write it as in params=65e6"),
        (
            "launch.place",
            ["--links=configs/links/homes.json", "--devices=17", "--model=params=1e6"],
            "from 2 to 16, the devices of",
        ),
        ("launch.place", ["--links=configs/links/homes.json", "--devices=1", "--model=params=1e6"], "flag --devices=1: "),
        (
            "launch.place",
            ["--links=configs/links/homes.json", "--stages=2", "--model=depth=1,width=8,heads=1,vocabulary=9,context=4,batch=8"],
            "--stages=2 must be at most depth=1 of the model; use fewer stages",
        ),
        ("launch.place", ["--links=configs/links/homes.json", "--topology=rings", "--model=params=1e6"], "'rings' is unknown"),
        ("launch.place", ["--links=none.json", "--model=params=1e6"], "none.json cannot be read"),
        ("launch.place", ["--model=params=1e6"], "--links is missing"),
        ("launch.train", ["--config=configs/lm.py:smoke", "--placement=none.json"], "none.json cannot be read"),
        ("launch.train", ["--config=configs/lm.py:smoke,simulate", "--placement=none.json"], "no effect with simulate"),
        ("launch.train", ["--config=configs/lm.py:smoke,workers=8", "--placement={placement}"], "must be 4"),
    ],
)
def test_placements_that_cannot_be_are_refused_in_one_line(tmp_path, module, arguments, problem):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"layout": [[2, 1, 0, 3]]}))
    workdir = [f"--workdir={tmp_path / 'run'}"] if module == "launch.train" else []
    done = commands.run(module, *(argument.format(placement=path) for argument in arguments), *workdir)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and problem in line


# -- Measuring links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [2, 3, 4, 7, 8])
def test_matchings_have_every_pair_once(N):
    found = measured.matchings(N)
    assert len(found) == N - 1 + N % 2
    assert sorted(tuple(sorted(pair)) for pairs in found for pair in pairs) == list(itertools.combinations(range(N), 2))
    assert all(len({worker for pair in pairs for worker in pair}) == 2 * len(pairs) for pairs in found)


def test_line_through_two_sizes():
    given = make_links(5)
    latency_s, bandwidth_Bps = measured.line(given.seconds(1e4), given.seconds(1e6), 10**4, 10**6)
    apart = ~np.eye(5, dtype=bool)
    np.testing.assert_allclose(latency_s[apart], given.latency_s[apart])
    np.testing.assert_allclose(bandwidth_Bps[apart], given.bandwidth_Bps[apart])
    with pytest.raises(ValueError, match="from worker 0 to 1 1000000 bytes take no longer than 10000"):
        measured.line(given.seconds(1e6), given.seconds(1e4), 10**4, 10**6)
