"""experiments/goodput and experiments/faults: metrics computed from events; experiments/crashes: killed runs end like others."""

import io
import itertools
import json
import math

import pytest

from experiments import crashes, fault_runs, faults, goodput
from experiments.fault_runs import Event
from launch import chaos
from tests import commands


class Notes(list):
    def __call__(self, kind, value):
        self.append((kind, value))


def test_a_launchers_words_become_events(tmp_path):
    notes, said = (
        Notes(),
        [
            "chaos: kill 2",
            "process 2 was killed by SIGKILL; it will be replaced",
            "step 120: continuing with 3 workers: 0, 1, 3",
            "[Gloo] Rank 0 is connected",
            "step 140: continuing with 4 workers: 0, 1, 2, 3",
        ],
    )
    fault_runs.listen(io.StringIO("\n".join(said) + "\n"), notes, tmp_path / "launcher.log")
    assert (tmp_path / "launcher.log").read_text().splitlines() == said
    assert notes == [("kill", [2]), ("start", [2]), ("view", [0, 1, 3]), ("view", [0, 1, 2, 3])]


def test_steps_and_participation_of_a_storm():
    """One of four dies after 10 s; the others continue 1 s later, it restarts at once and takes part after 5 s."""
    events = [
        Event(0, "start", [0, 1, 2, 3]),
        Event(5, "row", [10, 3.0, 4]),
        Event(15, "kill", [2]),
        Event(15, "start", [2]),
        Event(16, "view", [0, 1, 3]),
        Event(20, "view", [0, 1, 2, 3]),
        Event(25, "row", [50, 2.0, 4]),
        Event(30, "stop", [0, 1, 2, 3]),
    ]
    found = goodput.figures(events)
    assert found.steps_per_s == pytest.approx(40 / 20) and found.each_per_s == pytest.approx(4 * 40 / (4 * 20))
    assert found.participation == pytest.approx((4 * 10 + 3 * 5 + 4 * 5) / (4 * 20))
    assert (found.resumed_s, found.whole_s) == ([1], [5])
    assert math.isnan(found.quiet_per_s)


def test_quiet_stretches_are_long_after_any_death():
    rows = [Event(at_s, "row", [step, 2.0, 4]) for at_s, step in ((0, 0), (10, 30), (20, 40), (30, 60), (40, 95), (50, 120))]
    found = goodput.figures(sorted([Event(0, "start", [0, 1, 2, 3]), *rows, Event(15, "kill", [2]), Event(16, "start", [2])]))
    assert found.quiet_per_s == pytest.approx((30 + 35 + 25) / 30)  # from 0 to 10, from 30 to 50


def test_a_run_that_starts_again_takes_part_from_its_next_new_step_on():
    events = [
        Event(0, "start", [0, 1, 2, 3]),
        Event(10, "row", [20, 3.0, 4]),
        Event(20, "row", [40, 3.0, 4]),
        Event(22, "kill", [1]),
        Event(23, "stop", [0, 1, 2, 3]),
        Event(24, "start", [0, 1, 2, 3]),
        Event(44, "row", [60, 2.5, 4]),
        Event(50, "row", [80, 2.0, 4]),
    ]
    found = goodput.figures(events)
    assert found.steps_per_s == pytest.approx(60 / 40) and (found.resumed_s, found.whole_s) == ([22], [22])
    living, part = 4 * 12 + 3 + 4 * 26, 4 * 12 + 3 + 4 * 6
    assert found.participation == pytest.approx(part / living)


def test_each_kind_of_fault_happens_to_two_processes():
    happened = list(chaos.parse(faults.schedule(4), processes=4, hosts=4))
    assert {(event.kind, event.target) for event in happened} == {(kind, i) for kind in ("kill", "freeze", "cut") for i in (0, 1)}
    assert [late.at_s - early.at_s for early, late in itertools.pairwise(happened)] == [faults.APART_S] * 5


def test_what_a_fault_came_to():
    """A host is cut off for 15 s; the others step 6.5 s later, and it takes part 2 s after the link is back."""
    events = [
        Event(10, "cut", [1]),
        Event(10.5, "row", [7, 2.0, 4]),
        Event(16, "view", [0, 2, 3]),
        Event(16.25, "start", [1]),
        Event(16.5, "row", [8, 2.0, 3]),
        Event(27, "view", [0, 1, 2, 3]),
        Event(50, "kill", [0]),
        Event(50.1, "view", [1, 2, 3]),
    ]
    cut, kill = faults.found(events)
    assert cut == faults.Found("cut", 1, 6.5, 2.0)
    assert kill.stopped_s == math.inf  # no step was repeated


def test_what_cannot_be_measured_is_refused_in_one_line(tmp_path):
    done = commands.run("experiments.goodput", f"--out={tmp_path}", "--row=gossip with tea")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "gossip with tea" in done.stderr
    done = commands.run("experiments.faults", f"--out={tmp_path}", "--processes=2")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "processes" in done.stderr


def test_killed_runs_end_like_others(tmp_path, monkeypatch):
    """A fifth of the steps, so kills come five times sooner; the command then prints the recorded results."""
    monkeypatch.setattr(crashes, "LATEST_S", crashes.LATEST_S / 5)
    (choco,) = [row for row in crashes.ROWS if row.name == "choco"]
    assert crashes.compare(choco._replace(steps=choco.steps // 5), tmp_path, kills=2, seed=0).kills == 2
    done = commands.run("experiments.crashes", f"--out={tmp_path}", "--kills=2", "--row=choco")
    assert done.returncode == 0, done.stdout + done.stderr
    (cells,) = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| choco ")]
    assert [cells[2].strip(), cells[4].strip(), cells[5].strip()] == ["2", "yes", "yes"]


def test_rows_without_times(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, "time_s": 3.0, "steps_per_s": 4.0}) + "\n")
    assert crashes.untimed(crashes.trial(crashes.ROWS[0], tmp_path)) == [{"step": 1, "loss": 2.0}]
