"""Complete smoke runs of single-task configs on tiny synthetic data."""

import json

import numpy as np
import pytest

from configs import cifar, gpt, translation
from experiments import tiny
from tests import commands
from tests.runs import run_of, trainer_of
from tests.tiny_runs import assert_equal_states, forget_after, losses, rows

pytestmark = pytest.mark.usefixtures("quick_compilation")


def trained(config, workdir, **fields):
    config.update_from_flattened_dict(fields)
    run_of(config, workdir).train()
    summary = json.loads((workdir / "summary.json").read_text())
    assert np.isfinite(summary["eval_loss"]) and [row["step"] for row in rows(workdir, "eval")][-1] == config.steps
    return summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.multi30k(tmp_path_factory.mktemp("pairs")))


def test_a_translation_that_is_stopped_goes_on_bit_by_bit(folder, tmp_path):
    """With dropout, whose masks depend on the step."""
    fields = {"data.path": folder, "data.beams": 2, "data.length": 24}
    config = lambda: translation.get_config("smoke,workers=2")
    assert config().model.dropout > 0
    summary = trained(config(), tmp_path / "whole", **fields)
    assert 0 <= summary["eval_bleu"] <= 100
    again = forget_after(tmp_path / "whole", 5, tmp_path / "again")
    trained(config(), again, **fields)
    assert_equal_states(tmp_path / "whole", again, 10)


def test_tokens_of_byte_pairs(folder, tmp_path):
    fields = {"steps": 4, "data.path": f"{folder}/train.de", "model.context": 8, "eval.every": 2}
    summary = trained(gpt.get_config("smoke,workers=2"), tmp_path / "run", **fields)
    assert summary["eval_loss_per_byte"] == pytest.approx(summary["eval_loss"] / summary["bytes_per_token"])
    assert 1 < summary["bytes_per_token"] < 6  # a word and its space


def test_photographs(tmp_path):
    fields = {"steps": 2, "data.path": str(tiny.cifar10(tmp_path, images=20)), "model.width": 2, "eval.every": 2}
    assert 0 <= trained(cifar.get_config("smoke,workers=2"), tmp_path / "run", **fields)["eval_accuracy"] <= 1


def test_processes_and_simulated_workers_learn_the_same_translation(tmp_path):
    """Dropout, batches of several lengths and a decaying rate are functions of seed, worker and step, wherever a worker runs."""
    fields = {"data.path": str(tiny.multi30k(tmp_path, shortest=3)), "data.beams": 1, "data.length": 24, "log_every": 1}
    simulated = "smoke,steps=5,workers=2,simulate"
    config = translation.get_config(simulated)
    config.update_from_flattened_dict(fields)
    data = trainer_of(config).data
    assert len({data.batch(0, step).source_BxS.shape for step in range(5)}) > 1
    for command, shorthand in ((["launch.local", "--num_processes=2", "--"], "smoke,steps=5"), (["launch.train"], simulated)):
        place = [f"--config=configs/translation.py:{shorthand}", f"--workdir={tmp_path / command[0]}"]
        done = commands.run(*command, *place, *(f"--config.{name}={value}" for name, value in fields.items()))
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "launch.local"), losses(tmp_path / "launch.train"), rtol=1e-4)
