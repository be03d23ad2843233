"""experiments/compressed_speed.py: its acceptance rules and its table."""

import math

import pytest

from decjax import costmodel
from experiments import compressed_speed as cs
from experiments.speedup import Measured

SECONDS = {
    cs.ALONE: 0.7,
    cs.SYNC: 6.5,
    "gossip, int8": 1.0,
    "gossip, int4, CHOCO": 0.75,
    "all-reduce, DeMo": 0.8,
    cs.TORCH_ALONE: 0.5,
    cs.DDP: 6.4,
    f"{cs.HOOK}, one bucket": 0.55,
}
MEASURED = Measured("50mbit", 6e6, {row: [seconds] for row, seconds in SECONDS.items()}, dict.fromkeys(SECONDS, 1000000.0))


def test_the_fastest_row_of_each_family_is_asked():
    found = {check.what: check for check in cs.checks(MEASURED, {cs.ALONE: 0.72, cs.SYNC: 6.5 * 1.2})}
    gossip = found[f"gossip, int4, CHOCO ÷ {cs.ALONE}"]
    assert gossip.figure == pytest.approx(0.75 / 0.7) and gossip.met
    assert found[f"speed-up of gossip, int4, CHOCO over {cs.SYNC}"].met
    assert not found[f"all-reduce, DeMo ÷ {cs.ALONE}"].met and found[f"speed-up of all-reduce, DeMo over {cs.SYNC}"].met
    assert found["the cost model's worst error"].figure == pytest.approx(0.2) and len(found) == 5


def test_a_family_that_did_not_run_meets_nothing():
    nothing = Measured("50mbit", 6e6, {cs.ALONE: [0.7], cs.SYNC: [6.5]}, {})
    found = cs.checks(nothing, {})
    assert len(found) == 5 and not any(check.met for check in found) and all(math.isnan(check.figure) for check in found)


def test_peers_are_compared_with_their_own():
    table = cs.tabulate(MEASURED, {cs.ALONE: 0.77}, {f"{cs.HOOK}, default buckets": "it aborts"})
    cells = {row[0]: row[1:] for row in zip(*(column.cells for column in table.columns), strict=True)}
    assert cells[cs.ALONE] == ("700", "1.00", "9.29", "1.00", "770", "+10.0 %")
    assert cells[f"{cs.HOOK}, one bucket"] == ("550", "1.10", "11.64", "1.00", "", "")
    assert cells[f"{cs.HOOK}, default buckets"][0] == "cannot run" and cells["all-reduce, 1-bit Adam"] == ("",) * 6


def test_every_row_on_the_emulated_cluster_is_predicted():
    """Half-size messages and 0.1 s of coding on a link that sends the parameters in one second."""
    emulated = costmodel.Cluster("emulated", cs.HOSTS, 1, costmodel.Link(0, 1e9), costmodel.Link(0, 24e6))
    forms = tuple(
        costmodel.Compressed(text, cs.HOSTS, "" if "allreduce" in text else "base_k", 0.5, 0.1) for text in cs.SHORTHANDS.values()
    )
    predicted = cs.predict(emulated, costmodel.Workload(0.1, (0.2,), (24e6,), compressed=forms))
    assert set(predicted) == set(cs.EXACT) | set(cs.SHORTHANDS)
    assert predicted[cs.SYNC] == pytest.approx(0.3 + 1.5) and predicted[cs.ALONE] == pytest.approx(0.3)
    assert predicted["all-reduce, DeMo"] == pytest.approx(0.3 + 0.1 + 0.75)
    assert predicted["gossip, int8"] == pytest.approx(max(0.3, 0.5) + 0.1)
    assert {row.name for row in cs.rows(4)} > set(predicted)
