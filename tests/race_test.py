"""experiments/race: how a loss is reached, how rows are tuned, and a race of tiny models from start to end."""

import json
import math

import pytest

from experiments import race, race_steps
from tests import commands


def test_a_target_counts_from_where_the_loss_stays_below_it():
    losses = [(50, 3.0), (100, 2.0), (150, 2.2), (200, 1.0)]
    assert race.steps_to(losses, 2.5) == 75
    assert race.steps_to(losses, 2.1) == pytest.approx(150 + 50 / 12)  # 2.0 did not last
    assert race.steps_to(losses, 3.5) == 50
    assert math.isinf(race.steps_to(losses, 0.5))


def test_a_loss_between_evaluations():
    losses = [(50, 3.0), (100, 2.0)]
    assert [race.loss_at(losses, step) for step in (10, 50, 75, 100, 120)] == [3.0, 3.0, 2.5, 2.0, 2.0]


@pytest.mark.parametrize(("outer", "trials"), [((), 5), (race.OUTER, 7)])
def test_rows_are_tuned_alike(monkeypatch, tmp_path, outer, trials):
    """Three rates, the row's other options at the best of them, then rates √2 below and above."""
    asked = []

    def curve(self, name, setting, seed, steps):
        asked.append(setting)
        assert seed == race.TUNING_SEED and steps == race.TASKS["lm"].tuning_steps
        worse = {"": 0.0, "0.5, 0.5": 0.2, "1.0, 0.0": 0.1, "0.7, 0.9": 0.3}[setting.outer]
        return race.Curve(steps, [(steps, abs(math.log(setting.rate / 0.02)) + worse)], 0.0)

    monkeypatch.setattr(race.Race, "curve", curve)
    monkeypatch.setitem(race.ROWS, "row", race.Row("", race.LOCAL, outer=outer))
    best, tried = race.Race(race.TASKS["lm"], tmp_path, None, "", smoke=False).tune("row")
    assert best == race.Setting(0.0226, "1.0, 0.0" if outer else "") and len(tried) == trials == len(set(asked))


def test_a_race_of_tiny_models(tmp_path):
    log = tmp_path / "log.jsonl"
    line = ["experiments.race", "--task=lm", f"--out={tmp_path}", "--smoke", "--row=gossip int8"]
    done = commands.run(*line)
    assert done.returncode == 0, done.stderr
    assert "all-reduce fp32" in done.stdout and "gossip int8" in done.stdout and "steps to" in done.stdout
    runs = [json.loads(row) for row in (tmp_path / "smoke" / "lm" / "results.jsonl").read_text().splitlines()]
    assert len(runs) == 4 and all(len(run["numbers"]["losses"]) > 1 for run in runs)
    refused = commands.run("experiments.race", "--task=translation", f"--out={tmp_path}", f"--results={log}")
    assert refused.returncode and "--multi30k" in refused.stderr


def test_every_row_of_the_race_is_timed_but_those_left_out():
    timed = {row.name for row in race_steps.rows(race.TASKS["lm"])}
    assert {*race.ROWS} - timed == {*race_steps.LEFT_OUT}
    assert {*race_steps.JITTERED} <= {*race.ROWS}
