"""costmodel.fit: links, codecs and jitter from measured times; an emulated cluster at a rate between two measured ones."""

import dataclasses

import numpy as np
import pytest

from decjax import costmodel
from decjax import topology as tp
from decjax.costmodel import Cluster, Jitter, Link, Workload, all_reduce, fit, gossip, plan, predict
from decjax.costmodel.fit import Measurement

LOAD = Workload(0.1, (0.05,) * 4, (1e7,) * 4)


def test_a_cluster_is_recovered_from_its_own_times():
    sizes, rng = (1e4, 1e5, 1e6, 1e7, 4e7), np.random.default_rng(0)

    def noisy(time_s):
        return float(time_s * (1 + 0.01 * rng.standard_normal()))

    measured = [Measurement("shift", b, noisy(3e-4 + b / 2e7)) for b in sizes] * 3
    measured += [Measurement("pair", b, noisy(3e-4 + 2 * b / 2e7)) for b in sizes]
    measured += [Measurement("shift", b, noisy(1e-5 + b / 1e9), scope="intra") for b in sizes]
    measured += [Measurement("all_reduce", b, noisy(6 * 3e-4 + 1.5 * b / (0.9 * 2e7)), num_workers=4) for b in sizes[2:]]
    measured += [Measurement("codec", 1e7, noisy(0.02))]
    assert fit.line_of(measured, "all_reduce", "intra") is None
    cluster = fit.fit_cluster(measured, name="box", num_nodes=4, workers_per_node=1)
    assert (cluster.inter.latency_s, cluster.inter.bandwidth_Bps) == pytest.approx((3e-4, 2e7), rel=0.05)
    assert (cluster.intra.latency_s, cluster.intra.bandwidth_Bps) == pytest.approx((1e-5, 1e9), rel=0.05)
    assert not cluster.full_duplex_pairs and cluster.codec_Bps == pytest.approx(5e8, rel=0.05)
    assert cluster.all_reduce_efficiency == pytest.approx(0.9, rel=0.05)


def test_latency_is_the_lesser_one_of_shifts_and_pairs():
    measured = [
        Measurement(kind, b, alpha + b / 2e7) for kind, alpha in (("shift", 2e-2), ("pair", 3e-4)) for b in (1e6, 4e6, 16e6)
    ]
    cluster = fit.fit_cluster(measured, name="box", num_nodes=4, workers_per_node=1)
    assert (cluster.inter.latency_s, cluster.inter.bandwidth_Bps) == pytest.approx((3e-4, 2e7))


@pytest.mark.parametrize("workers, steps", [(4, 50), (64, 20)])
def test_jitter_is_kept_as_whole_steps_of_the_same_mean_and_slowest_worker(workers, steps):
    times_NxR = 0.05 + np.random.default_rng(0).exponential(0.05, (workers, 5000)) + np.linspace(0, 0.1, 5000)
    jitter = fit.fit_jitter(times_NxR)
    assert len(jitter.trace_s) == workers * steps and np.mean(jitter.trace_s) == pytest.approx(times_NxR.mean())
    drawn = jitter.sample(np.random.default_rng(1), 0.1, (4000, workers))
    assert drawn.max(axis=1).mean() == pytest.approx(times_NxR.max(axis=0).mean(), rel=0.02)
    assert fit.fit_jitter(times_NxR[:1]) == Jitter()  # A single worker waits for no one,
    assert fit.fit_jitter(np.array([[0.1, 0.3], [0.1001, 0.2999]])) == Jitter()  # nor do workers that are slow together.


def test_workers_of_a_trace_keep_together_in_any_order():
    jitter = Jitter("trace", trace_s=(1.0, 2.0, 3.0, 10.0, 20.0, 30.0), together=3)
    drawn = jitter.sample(np.random.default_rng(0), 1.0, (500, 2, 7))
    steps = {tuple(sorted(group)) for group in drawn[..., :6].reshape(-1, 3).tolist()}
    assert steps == {(1.0, 2.0, 3.0), (10.0, 20.0, 30.0)} and set(drawn[..., 6].flat) == set(jitter.trace_s)
    assert len({tuple(group) for group in drawn[..., :3].reshape(-1, 3).tolist()}) == 12  # all orders of both


def test_throughputs_are_told_apart_by_the_codecs_names(tmp_path):
    shifts = [Measurement("shift", b, b / 1e8) for b in (1e6, 1e7)]
    coded = [
        Measurement("codec", 1e7, time_s, codec=codec)
        for codec, time_s in (("int8", 0.02), ("int8", 0.021), ("int8", 9.0), ("bfloat16", 0.01))
    ]
    cluster = fit.fit_cluster(shifts + coded, name="box", num_nodes=4, workers_per_node=1)
    assert cluster.codec_Bps == {"int8": pytest.approx(1e7 / 0.021), "bfloat16": pytest.approx(1e9)}
    costmodel.save(tmp_path / "box.json", cluster)
    assert costmodel.load(tmp_path / "box.json") == (cluster, None) and [*tmp_path.iterdir()] == [tmp_path / "box.json"]
    methods, _ = plan.candidates(cluster, ("ring",), codec="int8", ratio=0.25)
    coded = {m.name: predict(cluster, LOAD, m).compute_s for m in methods}
    assert coded["ring awc"] - coded["no communication"] == pytest.approx(LOAD.total_bytes / (1e7 / 0.021))
    assert coded["all-reduce"] == pytest.approx(coded["no communication"]) and methods[1].ratio == 1  # a sum is not coded
    with pytest.raises(
        ValueError, match="cluster 'box' has speeds of some codecs only: codec='zip' is unknown; use one of int8, bfloat16"
    ):
        predict(cluster, LOAD, dataclasses.replace(methods[-1], codec="zip"))


def on_shared_cores(work_NxK, cores, together):
    """Seconds per step of N workers that share cores equally: either all wait for the slowest in every step, or none wait."""
    N, K = work_NxK.shape
    left, step, begun, now = work_NxK[:, 0].astype(float), np.zeros(N, int), np.zeros(N), 0.0
    times, busy = np.zeros((N, K)), np.ones(N, bool)
    while busy.any():
        speed = min(1.0, cores / busy.sum())
        passed = left[busy].min() / speed
        left, now = left - passed * speed * busy, now + passed
        for i in np.flatnonzero(busy & (left < 1e-12)):
            times[i, step[i]], step[i], begun[i], busy[i] = now - begun[i], step[i] + 1, now, False
        again = np.flatnonzero(~busy & (step < K))
        if len(again) and (not together or not busy.any()):
            busy[again], begun[again] = True, now
            left[again] = work_NxK[again, step[again]]
    return times


@pytest.mark.parametrize("cores, share", [(4, 1.0), (2, 0.45), (1, 0.0)])  # on two cores, the last worker leaves one idle
def test_leads_are_kept_on_cores_of_ones_own_and_lost_on_shared_ones(cores, share):
    work_NxK = 1 + np.random.default_rng(0).exponential(0.5, (4, 400))
    begun_together = on_shared_cores(work_NxK, cores, together=True)
    in_a_row = on_shared_cores(work_NxK, cores, together=False)
    found = fit.own_share(begun_together, fit.pace(in_a_row))
    assert found == pytest.approx(share, abs=0.1)
    times_NxR = fit.shared(begun_together, found)
    # What the model needs: the slowest worker's time where workers wait, and the mean pace where they do not.
    assert times_NxR.max(axis=0) == pytest.approx(begun_together.max(axis=0))
    assert times_NxR.mean() == pytest.approx(fit.pace(in_a_row), rel=0.03)


def test_the_pace_counts_steps_until_the_first_worker_is_done():
    assert fit.pace(np.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])) == pytest.approx(3 / ((3 + 1.5) / 2))
    assert fit.own_share(np.ones((4, 3)), 0.9) == 1.0  # within one process no worker starts earlier


@pytest.mark.parametrize(
    "call, problem",
    [
        (lambda: Measurement("ping", 1, 1), "use one of shift, pair"),
        (lambda: Measurement("shift", 0, 1), "num_bytes=0 must be at least 1e-18"),
        (lambda: Measurement("shift", 1, 1, scope="rack"), "use one of intra, inter"),
        (lambda: fit.fit_line([1e6, 1e6], [1, 1]), "at least two sizes"),
        (lambda: fit.fit_line([1e6, 2e6], [1, 0.5]), "do not take longer"),
        (lambda: fit.fit_jitter(np.zeros((4, 0))), "the number of compute times=0 must be at least 1"),
        (lambda: fit.fit_cluster([], name="x", num_nodes=2, workers_per_node=1), "links need shifts or pairs"),
    ],
)
def test_bad_measurements_are_one_line(call, problem):
    with pytest.raises(ValueError) as error:
        call()
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_the_box_at_another_rate():
    """Measured with a prototype on four shaped hosts, in ms at 200 and 100 Mbit/s. The model must follow from the compute time
    (663 ms), the bytes (5.9 million float32 values), and links that deliver 1/1.09 of their rate.
    """
    measured = {"all-reduce": (2166, 3738), "stale": (1622, 3240), "exp, half duplex": (1609, 3085), "exp": (1101, 2113)}
    workload = Workload(0.221, (0.442,), (5.9e6 * 4,))
    exp = gossip(tp.make("one_peer_exponential", 4))
    for column, rate in enumerate((200e6, 100e6)):
        box = Cluster("box", 4, 1, Link(0, 1e10), Link(0, rate / 8 / 1.09), full_duplex_pairs=False)
        duplex = dataclasses.replace(box, full_duplex_pairs=True)
        predicted = [
            predict(*each).mean_s * 1e3
            for each in (
                (box, workload, all_reduce(4)),
                (box, workload, all_reduce(4, overlap=True)),
                (box, workload, exp),
                (duplex, workload, exp),
            )
        ]
        assert predicted == pytest.approx([row[column] for row in measured.values()], rel=0.08)
