"""experiments/endurance: violated conditions in the files of a run, and one sequence of events."""

import json

import pytest

from experiments import endurance
from experiments.endurance import Case, Event, Violated

CASE = Case(0, "all-reduce", 3, (Event("kill", 0.5, (1,)),))


@pytest.fixture
def finished(tmp_path):
    """Write the files of a correct run with changed rows; return its directory."""

    def write(change=lambda rows: rows, newest=endurance.STEPS):
        steps = range(endurance.LOG, endurance.STEPS + 1, endurance.LOG)
        rows = [{"kind": "train", "step": step, "consensus_distance": 1e-6, "batches": 3 * step} for step in steps]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in change(rows)))
        (tmp_path / "checkpoints" / str(newest)).mkdir(parents=True)
        return tmp_path

    return write


def test_rows_that_hold(finished):
    endurance.check_rows(CASE, finished())


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda rows: rows[:5] + rows[6:], "missing, the first of step 60"),
        (lambda rows: rows + rows[-1:], "twice"),
        (lambda rows: rows[:5] + [rows[5] | {"batches": 20}] + rows[6:], "went from 150 to 20"),
        (lambda rows: rows[:-1] + [rows[-1] | {"consensus_distance": 8e-3}], "replicas of all-reduce differ"),
    ],
)
def test_broken_rows(finished, change, said):
    with pytest.raises(Violated, match=said):
        endurance.check_rows(CASE, finished(change))


def test_a_last_checkpoint_that_is_missing(finished):
    with pytest.raises(Violated, match="of step 50, not"):
        endurance.check_rows(CASE, finished(newest=50))


def test_only_disturbed_processes_may_be_removed():
    log = "step 40: continuing with 2 workers: 0, 2\n"
    endurance.check_views(CASE, log, {1})
    with pytest.raises(Violated, match="process 1 was removed"):
        endurance.check_views(CASE, log, set())


def test_sequences_are_seeded():
    drawn = [endurance.draw(seed, links=False) for seed in range(50)]
    assert drawn == [endurance.draw(seed, links=False) for seed in range(50)]
    assert {event.kind for case in drawn for event in case.events} == {*endurance.ON_PROCESS, *endurance.ON_LAUNCHER}
    assert {case.method for case in drawn} == set(endurance.METHODS)
    assert not any(case.in_cluster for case in drawn)


def test_a_sequence(tmp_path, monkeypatch):
    monkeypatch.setattr(endurance, "STEPS", 600)
    events, broken = endurance.run_case(CASE, tmp_path / "case")
    assert not broken
    assert events == list(CASE.events)
