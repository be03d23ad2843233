"""experiments/bench/cluster: systems take turns on emulated hosts; the acceptance rules of the speed-up; the straggler model."""

import pathlib

import pytest

from decjax import costmodel
from experiments import methods, outer_speed, speedup, stragglers
from experiments.bench.cluster import group, systems
from launch import cluster
from tests.cluster_test import NAME, needs_namespaces

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = dict(vocabulary=256, context=8, width=8, hidden=8, heads=2, depth=1)
SECONDS = {
    speedup.ALONE: 1.0,
    speedup.SYNC: 4.0,
    speedup.STALE: 3.2,
    speedup.ONE_PEER: 2.1,
    f"{speedup.ONE_PEER}, bfloat16": 1.1,
    f"{speedup.ONE_PEER}, int8": 1.0,
    speedup.ALONE_2: 2.0,
    speedup.AER: 2.2,
    speedup.TORCH_ALONE: 1.0,
    speedup.DECENT: 2.2,
    speedup.TORCH_ALONE_2: 2.0,
    speedup.DECENT_AER: 3.0,
}


@pytest.fixture(scope="module")
def network():
    with cluster.network(hosts=2, rate="200mbit", name=f"{NAME}box", subnet="10.87.0.0/24") as made:
        yield made


def tiny(name, argument, **others):
    return systems.decjax(name, argument, model=TINY, batch_size=1, **others)


@needs_namespaces
def test_rows_take_turns_and_count_what_a_link_carries(network, monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = [
        tiny("alone", "method=local", pauses=True),
        tiny("gossip", "topology=one_peer_exponential"),
        tiny("streaming, pauses", "method=streaming_diloco(every=4,fragments=2)", pause_s=0.02),
        systems.torch("peer", "alone"),
    ]
    with systems.Runner(network) as runner:
        for row in rows:
            runner.prepare(row)
        assert "peer" in runner.refused  # It needs its own Python; the other rows run regardless.
        visits = list(systems.interleaved(runner, rows, rounds=2))
        assert [row.name for row, _ in visits] == ["alone", "gossip", rows[2].name, "gossip", rows[2].name, "alone"]
        assert all(visit.step_s > (0.02 if row.visits else 0) for row, visit in visits)
        assert runner.periods == {"alone": 1, "gossip": 1, rows[2].name: 4}
        assert min(visit.sent_bytes for row, visit in visits if row.name == "gossip") > 4 * runner.num_parameters
        # A pause affects every step; the token bucket delivers the link's rate, or less when the cores are busy.
        assert runner.visit(rows[0], 2, pause_s=(0.05, 0.0)).step_s > 0.05
        assert 0 < runner.throughput_Bps(rows[0], seconds=0.5) < 1.25 * 200e6 / 8


@needs_namespaces
def test_a_worker_that_fails_says_why(network, monkeypatch):
    monkeypatch.chdir(ROOT)
    with systems.Runner(network) as runner:
        runner.prepare(tiny("wrong", "topology=nonesuch"))
    assert "topology 'nonesuch' is unknown" in runner.refused["wrong"]


def test_complaint_is_the_line_that_names_an_error():
    assert (
        group._complaint(["Traceback", "ValueError: too small", "For simplicity, JAX has removed frames"])
        == "ValueError: too small"
    )
    assert group._complaint(["killed"]) == "killed" and "without a word" in group._complaint([])


def test_checks_know_a_figure_that_misses():
    measured = speedup.Measured("100mbit", 10.0, {row: [seconds] for row, seconds in SECONDS.items()}, {})
    found = {check.what: check for check in speedup.checks(measured, num_bytes=20.0)}  # c = 1 s, X = 2 s
    hides = found["one-peer exponential ÷ max(c, X)"]
    assert hides.figure == pytest.approx(1.05) and hides.met
    ideal = found["speed-up over all-reduce ÷ ideal"]
    assert ideal.figure == pytest.approx(4.0 / 2.1 / ((1 + 1.5 * 2) / 2)) and ideal.met
    assert found["decent-dp one-peer-exp ÷ one-peer exponential, int8, each ÷ own c"].met is False
    assert found["decent-dp AER, 2 a host ÷ AER, 2 a host, each ÷ own c"].figure == pytest.approx(1.5 / 1.1)


def test_a_row_that_did_not_run_meets_nothing():
    measured = speedup.Measured("100mbit", 10.0, {speedup.ALONE: [1.0], speedup.ONE_PEER: [2.0]}, {})
    assert [check.what for check in speedup.checks(measured, 20.0) if check.met] == ["one-peer exponential ÷ max(c, X)"]


def test_what_is_asked_of_streaming_diloco():
    times_s = {row.name: [1.04 if outer_speed.STREAMING in row.name else 1.0] for row in outer_speed.ROWS}
    measured = speedup.Measured("50mbit", 10.0, times_s, dict.fromkeys(times_s, 1e6))
    assert all(check.met for check in outer_speed.checks(measured))
    assert outer_speed.tabulate(measured, {}).row_count == len(outer_speed.ROWS)
    assert not any(check.met for check in outer_speed.checks(measured._replace(step_s={})))


def test_stragglers_model_orders_the_methods():
    steady = dict.fromkeys(stragglers.METHODS, 0.05) | {stragglers.SYNC: 0.064}
    predicted = stragglers.predict(steady, hosts=8, jitter_s=0.05)
    assert predicted[stragglers.ALONE] == pytest.approx(0.1, rel=0.05)
    # All-reduce waits for the slowest of 8 exponential variables: 50 ms times their expected maximum, the 8th harmonic number.
    harmonic = sum(1 / k for k in range(1, 9))
    assert predicted[stragglers.SYNC] == pytest.approx(0.064 + 0.05 * harmonic, rel=0.05)
    assert (
        predicted[stragglers.ALONE] < predicted["one-peer exponential"] < predicted[stragglers.STALE] < predicted[stragglers.SYNC]
    )
    assert isinstance(methods.modeled(8)[stragglers.STALE], costmodel.Method)
