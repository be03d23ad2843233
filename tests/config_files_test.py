"""The files in configs/: sweep keys, layers that divide into stages, and schedules that follow the number of steps."""

import importlib
import pathlib
import types

import pytest

from configs import cifar, gpt, lm, translation
from decjax import config as parts
from launch import command, config_file, members, train_flags

FOLDER = pathlib.Path(gpt.__file__).parent
FILES = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem not in ("__init__", "base", "shorthand")]


@pytest.mark.parametrize("name", FILES)
def test_keys_are_those_of_the_shorthand(name):
    module = importlib.import_module(f"configs.{name}")
    with pytest.raises(ValueError, match="'colour' is unknown") as error:
        module.get_config("colour=red")
    assert "use some of seed, steps, workers" in str(error.value)


def test_a_sweep_over_sizes_goes_into_the_shorthand(tmp_path):
    (member,) = members.expand("configs/gpt_optimus.py", {"size": ["tiny"]}, config_file.ANY_KEY, tmp_path, [])
    assert member.arguments[0] == "--config=configs/gpt_optimus.py:size=tiny"


def test_values_follow_the_steps_of_the_config():
    assert gpt.get_config("method=onebit_adam").reducer.start == 2000 // 6
    assert gpt.get_config("method=onebit_adam,steps=600").reducer.start == 100
    assert gpt.get_config().steps == 2000 and gpt.get_config("smoke").steps == 20 and gpt.get_config("steps=7").steps == 7


@pytest.mark.parametrize(
    "arg, depth", [("", 4), ("stages=3", 6), ("stages=2", 4), ("stages=5", 5), ("stages=3,schedule=interleaved", 6)]
)
def test_layers_divide_into_stages(arg, depth):
    config = gpt.get_config(f"{arg},microbatches=6")
    assert config.model.depth == depth
    assert parts.resolve(config, 30).pipeline.stages == config.pipeline.stages


@pytest.mark.parametrize("steps, warmup", [(2, 1), (9, 1), (20, 2), (5000, 200)])
def test_short_runs_have_a_warm_up_where_the_schedule_needs_one(steps, warmup):
    config = translation.get_config(f"workers=2,steps={steps}")
    assert config.schedule.warmup_steps == warmup
    parts.resolve(config, 2)
    assert gpt.get_config("steps=9").schedule.warmup_steps == 0


@pytest.mark.parametrize("scale, factor", [("linear", 2), ("sqrt", 2**0.5)])
@pytest.mark.parametrize("file, tuned_workers", [(lm, 8), (cifar, 16), (translation, 16)], ids=["lm", "cifar", "translation"])
def test_a_scaled_rate_is_the_tuned_one_at_the_tuned_number_of_workers(file, tuned_workers, scale, factor):
    """Doubling the workers, and so the global batch, scales the rate by 2 or √2, whenever their number is set."""
    rate = lambda arg: file.get_config(arg).schedule.learning_rate
    tuned = rate(f"workers={tuned_workers}")
    assert rate(f"workers={2 * tuned_workers}") == tuned
    assert rate(f"workers={tuned_workers},scale={scale}") == pytest.approx(tuned)
    assert rate(f"workers={2 * tuned_workers},scale={scale}") == pytest.approx(factor * tuned)
    config = file.get_config(f"scale={scale}")
    config.workers = 2 * tuned_workers
    assert config.schedule.learning_rate == pytest.approx(factor * tuned)


@pytest.mark.parametrize("where", ["import sys; sys.exit(0)", "def get_config(arg): raise SystemExit(0)"])
def test_a_file_that_ends_the_program_is_an_error(tmp_path, where):
    (tmp_path / "own.py").write_text(where)
    assert config_file.complaint(["train", f"--config={tmp_path / 'own.py'}"]).startswith("config")


@pytest.mark.parametrize(
    "module, problem",
    [
        (dict(SWEEP=5), "the sweep of own.py is 5; it must be a text such as 'seed=0,1'"),
        (dict(get_sweep=lambda arg: ["seed=0"]), r"the sweep of own.py is \['seed=0'\]; it must be a text"),
        (dict(get_sweep=lambda arg: {}[arg]), r"get_sweep of own.py failed \(KeyError\('x'\)\); correct it"),
        ({}, "own.py defines none"),
    ],
)
def test_a_sweep_that_is_no_text_is_refused(module, problem):
    with pytest.raises(command.UserError, match=problem):
        members.sweep_of(types.SimpleNamespace(**module), "own.py", "x")


def test_a_command_lines_config_has_its_fields_set():
    """Values as the flag parser reads them: the text "false" is not true."""
    found = train_flags.read(["--config=configs/quadratics.py:workers=4", "--config.elastic.spares=false", "--workdir=w"]).config
    assert (found.elastic.spares, found.workers) == (False, 4)
