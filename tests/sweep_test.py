"""launch/sweep.py: what it runs, skips, continues and tabulates; one sweep with real training."""

import json
import re
import signal
import subprocess
import sys

import pytest
import rich.console

from launch import command, config_file, processes, sweep
from tests import commands

TINY = (
    "--config.model.depth=1",
    "--config.model.width=8",
    "--config.model.hidden=8",
    "--config.model.context=8",
    "--config.data.sample_bytes=1",
    "--config.eval.num_windows=2",
    "--config.eval.every=100",
)


def launch(*arguments, **environment):
    return commands.run("launch.sweep", *arguments, COLUMNS="120", **environment)


# -- With real training -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two settings, of which `steps=0` cannot be trained, with two seeds; then the same command again."""
    workdir = tmp_path_factory.mktemp("sweep")
    command = [
        "--config=configs/lm.py:smoke,workers=1,method=local",
        "--sweep=steps=4,0;seed=0,1",
        f"--workdir={workdir}",
        "--",
        *TINY,
    ]
    # Compiled programs are kept between the runs: compilation is most of a tiny one.
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first = launch(*command, **environment)
    finished = workdir / "steps=4,seed=0" / "metrics.jsonl"
    before = finished.stat().st_mtime_ns
    (workdir / "steps=4,seed=1" / "summary.json").unlink()  # As if it had been interrupted.
    second = launch(*command, **environment)
    return workdir, first, second, before == finished.stat().st_mtime_ns


def test_every_combination_is_trained_in_its_own_directory(swept):
    workdir, _, _, _ = swept
    for seed in (0, 1):
        config = json.loads((workdir / f"steps=4,seed={seed}" / "config.json").read_text())
        assert (config["steps"], config["seed"], config["model"]["width"], config["method"]["name"]) == (4, seed, 8, "local")


def test_a_failed_run_is_told_and_the_others_go_on(swept):
    workdir, first, _, _ = swept
    assert first.returncode == 1
    assert first.stdout.count("FAILED") == 2 and "steps=0: must be at least 1" in first.stdout
    log = workdir / "steps=0,seed=1" / "train.log"
    assert str(log) in first.stdout and "steps=0: must be at least 1" in log.read_text()
    assert first.stdout.count("eval_loss 5.") == 2


def test_again_it_skips_the_finished_and_continues_the_others(swept):
    workdir, _, second, untouched = swept
    assert untouched and "steps=4,seed=0: already finished" in second.stdout
    assert "continuing from step 4" in (workdir / "steps=4,seed=1" / "train.log").read_text()
    assert (workdir / "steps=4,seed=1" / "summary.json").exists() and second.stdout.count("FAILED") == 2


def test_the_table_has_mean_and_spread_over_seeds(swept):
    workdir, _, second, _ = swept
    paths = [workdir / f"steps=4,seed={seed}" / "summary.json" for seed in (0, 1)]
    one, two = (json.loads(path.read_text())["eval_loss"] for path in paths)
    row = next(line.split() for line in second.stdout.splitlines() if re.match(r" *4 +2 ", line))
    assert float(row[2]) == pytest.approx((one + two) / 2, abs=1e-4)
    assert float(row[4]) == pytest.approx(abs(one - two) / 2**0.5, abs=1e-4)  # n − 1 = 1 in the denominator
    assert next(line.split()[1] for line in second.stdout.splitlines() if re.match(r" *0 +0/2 ", line)) == "0/2"


def test_another_config_is_refused_in_the_same_directory(swept):
    workdir, _, _, _ = swept
    result = launch("--config=configs/lm.py:smoke", "--sweep=seed=0", f"--workdir={workdir}")
    assert result.returncode == 2 and "holds a sweep of another config" in result.stderr


# -- What to run ------------------------------------------------------------------------------------------------------


def test_shorthand_keys_go_into_the_argument_and_fields_into_flags(tmp_path):
    swept = sweep.parse_sweep("topology=ring,torus; schedule.learning_rate=1e-3")
    members = sweep.expand("configs/lm.py:smoke", swept, {"topology"}, tmp_path, ["--debug"])
    assert [member.name for member in members] == [
        "topology=ring,schedule.learning_rate=1e-3",
        "topology=torus,schedule.learning_rate=1e-3",
    ]
    assert members[1].arguments == [
        "--config=configs/lm.py:smoke,topology=torus",
        "--config.schedule.learning_rate=1e-3",
        "--debug",
        f"--workdir={members[1].directory}",
    ]
    (bare,) = sweep.expand("configs/lm.py", {"data.path": ["/a/b"]}, {"topology"}, tmp_path, [])
    assert bare.arguments[0] == "--config=configs/lm.py" and bare.directory.parent == tmp_path


def test_commas_within_brackets_divide_no_values():
    nested = "hierarchical(local_size=4,outer=base_k(k=3))"
    assert sweep.parse_sweep(f"topology={nested},ring;seed=0,1") == {"topology": [nested, "ring"], "seed": ["0", "1"]}
    config = f"configs/lm.py:topology={nested},codec=topk(fraction=0.1,values=int4)"
    sweep.check_apart(config, {"outer": ["1"], "values": ["2"]}, [])  # Options of a part are no keys.
    with pytest.raises(command.UserError, match="topology is set by the sweep, .* 'topology=hierarchical.*k=3..'; leave it out"):
        sweep.check_apart(config, {"topology": ["ring"]}, [])


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "''"),
        ("seed", "'seed'"),
        ("seed=0;", "''"),
        ("=1", "'=1'"),
        ("seed=", "empty"),
        ("seed=0,,1", "empty"),
        ("seed=0,0", "twice"),
        ("seed=0;seed=1", "twice"),
    ],
)
def test_invalid_sweeps_are_refused(text, problem):
    with pytest.raises(command.UserError, match=problem):
        sweep.parse_sweep(text)


def test_a_config_file_may_define_its_sweep(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("SWEEP = 'seed=0,1'\n")
    assert sweep.sweep_of(config_file.load_module(str(path)), str(path), "") == "seed=0,1"
    path = tmp_path / "other.py"  # A module's bytecode is cached by its time stamp.
    path.write_text("def get_sweep(arg):\n    return 'seed=0' if arg == 'smoke' else 'seed=0,1'\n")
    assert sweep.sweep_of(config_file.load_module(str(path)), str(path), "smoke") == "seed=0"


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--config=configs/lm.py:smoke"], "no --sweep is given and configs/lm.py defines none"),
        (["--config=configs/lm.py:smoke", "--sweep=method=allreduce,magic"], "magic"),
        (
            ["--config=configs/lm.py:smoke,topology=ring", "--sweep=topology=torus,star"],
            "topology is set by the sweep, 'topology=torus,star', and in --config, 'topology=ring'; leave it out of --config",
        ),
        (
            ["--config=configs/lm.py:smoke", "--sweep=seed=0,1", "--", "--config.seed=3"],
            "seed is set by the sweep, 'seed=0,1', and in the options behind --, '--config.seed=3'; leave it out of the options",
        ),
        (["--config=configs/lm.py:smoke", "--sweep=seed=0,x"], "seed=x must be a whole number"),
        (["--config=configs/lm.py:smoke", "--sweep=sed=0"], "config.sed is unknown; did you mean seed?"),
        (["--config=configs/lm.py:smoke", "--sweep=topology.k=0.1"], "topology is a word with its options in brackets"),
        (["--config=configs/lm.py:smoke", "--sweep=mixer.gamma=0.1"], "mixer 'exact' has codec, rounds; gamma belongs to choco"),
        (["--config=configs/none.py", "--sweep=seed=0"], "configs/none.py"),
        (["--sweep=seed=0"], "--config"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(arguments, problem, tmp_path):
    result = launch(f"--workdir={tmp_path / 'sweep'}", *arguments)
    assert result.returncode == 2 and not (tmp_path / "sweep").exists()
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and problem in line


# -- Signals ----------------------------------------------------------------------------------------------------------

STOPS_WHEN_TOLD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"saved\\n"), sys.exit(143)))
os.write(1, b"listening\\n")
time.sleep(60)
"""


def test_an_interrupt_stops_the_child_and_the_sweep(tmp_path, monkeypatch):
    """The child is a stand-in that, like launch.train, saves at SIGTERM."""
    members = sweep.expand("configs/lm.py", {"seed": ["0", "1"]}, (), tmp_path, [])
    caught = []
    children = []

    def start(arguments, **options):
        children.append(subprocess.Popen([sys.executable, "-c", STOPS_WHEN_TOLD], **options))
        return children[-1]

    def interrupt_when_it_listens(seconds):
        if members[0].log.read_text() and not caught:
            caught.append(signal.SIGINT)

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(sweep.time, "sleep", interrupt_when_it_listens)
    console = rich.console.Console(record=True, soft_wrap=True)
    assert sweep.run_all(members, caught, console) == 0
    assert [child.returncode for child in children] == [143]  # The second run never began.
    assert members[0].log.read_text() == "listening\nsaved\n" and "FAILED" not in console.export_text()
