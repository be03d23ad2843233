"""experiments.outer: every row is a config, rates and outer rates are tuned, and a run from start to end with tiny models."""

import json

import jax
import pytest

from configs import lm
from decjax import config
from experiments import outer, trials
from experiments.results_log import ResultsLog
from tests import commands


@pytest.mark.parametrize("name", outer.ROWS)
def test_every_row_is_a_config(name, tmp_path):
    made = outer.Runs(tmp_path, ResultsLog(tmp_path / "results.jsonl"), smoke=False)
    trial = made.trial(name, 1e-2, outer.MIDDLE if outer.ROWS[name].outer else None, 0)
    _, _, argument = trial.config.partition(":")
    given = lm.get_config(argument)
    given.update_from_flattened_dict(dict(trial.fields))
    spec = config.resolve(given, jax.device_count())
    assert spec.steps == outer.STEPS and spec.workers == outer.WORKERS


def test_momentum_and_rate_of_the_outer_step_are_tuned_with_the_best_rate(monkeypatch, tmp_path):
    def train(trial):
        fields = dict(trial.fields)
        trial.workdir.mkdir(parents=True, exist_ok=True)
        loss = 1.09 + (fields["schedule.learning_rate"] - 1.2e-2) ** 2 - 0.09 * ("method.outer_momentum" not in fields)
        loss += (fields.get("method.outer_learning_rate", 3.8) - 3.8) ** 2 + fields.get("method.outer_momentum", 0)
        (trial.workdir / "summary.json").write_text(json.dumps({"eval_loss": loss, "bytes_per_step_per_worker": 5.0}))
        return True

    monkeypatch.setattr(trials.Pool, "train", lambda pool, trial: train(trial))
    made = outer.Runs(tmp_path, ResultsLog(tmp_path / "results.jsonl"), smoke=False)
    found = {name: made.result(name) for name in (outer.ALL_REDUCE, "DiLoCo, H = 16")}
    own = found["DiLoCo, H = 16"]
    assert (own.rate, own.outer) == (1.2e-2, (4.0, 0.0)) and len(own.losses) == outer.SEEDS  # its grid has been extended
    assert outer.compared(found, "DiLoCo, H = 16")[0] == 1 and not outer.checks(found)
    found["DiLoCo, H = 16"] = own._replace(sent=0.04)
    assert outer.checks(found)[0].met is False
    assert "nats/byte" in str([column.header for column in outer.tabulate(found).columns])


def test_the_whole_way_with_tiny_models(tmp_path):
    line = ("experiments.outer", f"--out={tmp_path}", "--smoke")
    first = commands.run(*line)
    assert first.returncode == 0, first.stderr
    assert commands.run(*line).stdout == first.stdout
    assert {*json.loads((tmp_path / "smoke/outer.json").read_text())} == {outer.ALL_REDUCE, "gossip DiLoCo, H = 4"}
    assert (tmp_path / "smoke/outer.png").read_bytes().startswith(b"\x89PNG")


def test_a_part_of_the_rows_makes_no_page(tmp_path):
    done = commands.run("experiments.outer", f"--out={tmp_path}", "--row=DiLoCo", "--pages=docs")
    assert done.returncode == 2 and "--row=DiLoCo would write a part of the rows into --pages=docs" in done.stderr, done.stderr
