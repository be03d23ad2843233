"""experiments/race: how a loss is reached, how rows are tuned, and a race of tiny models from start to end."""

import json
import math

import pytest

from experiments import race, race_steps, script, trials
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


def test_time_to_target_is_steps_times_seconds(tmp_path):
    """A row with steps half as long is twice as fast; one that never reaches the target has no speed-up."""
    losses = [(step, 3.0 - step / 1250) for step in range(50, 2501, 50)]
    higher = [(step, loss + 0.5) for step, loss in losses]
    curves = {race.FP32: losses, "gossip int8": losses, "gossip bf16": higher}
    results = {
        name: race.Result(race.Setting(0.01), {race.Setting(0.01): 1.0}, 2500, [race.Curve(2500, each, 1.0)] * 2)
        for name, each in curves.items()
    }
    (times := tmp_path / "steps.json").write_text(
        json.dumps({"20mbit": {name: {"step_s": [0.4, 0.2, 0.4]} if name == race.FP32 else {"step_s": [0.2]} for name in curves}})
    )
    step_s = race.step_times(str(times), "20mbit")
    assert step_s[race.FP32] == 0.4
    of_task = race.Race(race.TASKS["lm"], tmp_path, None, "", smoke=False)
    assert of_task.targets(results) == (1.0, 2.0)
    ends = race.finishes(results, step_s, 2.0)
    assert ends["gossip int8"].times_s == pytest.approx([250, 250]) and ends["gossip int8"].speedups == pytest.approx([2, 2])
    assert ends["gossip bf16"].reached and not race.finishes(results, step_s, 1.0)["gossip bf16"].reached
    text = script.markdown(race.tabulate_times(of_task, results, step_s))
    assert "never" in text and "2.00 ± 0.00" in text and "500 ± 0" in text
    race.draw(str(tmp_path / "race.png"), of_task, results, step_s)
    assert (tmp_path / "race.png").stat().st_size > 10_000
    with pytest.raises(trials.Broken, match="has no step times at 5mbit, only at 20mbit"):
        race.step_times(str(times), "5mbit")


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
