"""launch/calibrate.py: each exchange is the one named, launch.plan accepts the profile, and errors take one line."""

import json

import jax
import numpy as np
import pytest

from configs import lm, translation
from decjax import config as parts
from decjax import costmodel, train
from decjax.contrib import placement
from decjax.measure import profiling as measure
from decjax.measure import timing
from experiments import tiny
from tests import commands
from tests.runs import spec_of

TINY = ("--config.model.depth=1", "--config.model.width=8", "--config.model.hidden=8", "--config.model.context=8")
# Sizes are far enough apart that larger ones take longer on any machine, with enough rounds that two pauses do not change a median.
QUICK = ("--rounds=15", "--sizes=1e4,6.4e7")  # On a busy machine, a smaller message may take no longer than a tiny one.
pytestmark = pytest.mark.usefixtures("quick_compilation")


def launch(module, *arguments):
    """Run a command on forced CPU devices."""
    return commands.run(module, *arguments, COLUMNS="120")


# -- What is timed ----------------------------------------------------------------------------------------------------


def tiny_config(shorthand="smoke"):
    config = lm.get_config(shorthand)
    for argument in TINY:
        field, _, value = argument.removeprefix("--config.model.").partition("=")
        config.model[field] = int(value)
    return config


def setup_of(workers, local_size):
    return measure.prepare(spec_of(tiny_config(f"smoke,workers={workers},local_size={local_size},method=allreduce,stale")))


@pytest.mark.parametrize(
    "workers, local_size, expected",
    [
        # Worker i sends i; -1: nothing arrives. Between nodes, the first worker of each takes part.
        (
            8,
            2,
            {
                ("shift", "inter"): [6, -1, 0, -1, 2, -1, 4, -1],
                ("pair", "inter"): [2, -1, 0, -1, 6, -1, 4, -1],
                ("pair", "intra"): [1, 0, 3, 2, 5, 4, 7, 6],
                ("all_reduce", "inter"): [3.5] * 8,
            },
        ),
        (3, 1, {("shift", "inter"): [2, 0, 1], ("pair", "inter"): [1, 0, -1], ("all_reduce", "inter"): [1] * 3}),
        (2, 1, {("pair", "inter"): [1, 0], ("all_reduce", "inter"): [0.5] * 2}),
        (4, 4, {("shift", "intra"): [3, 0, 1, 2], ("pair", "intra"): [1, 0, 3, 2], ("all_reduce", "intra"): [1.5] * 4}),
    ],
)
def test_exchanges_are_what_they_are_called(workers, local_size, expected):
    setup = setup_of(workers, local_size)
    layout = timing.layout(setup)
    actions = timing.exchange_actions(setup, [1000, layout.num_bytes])
    assert {(what.kind, what.scope) for what in actions} == set(expected) and len(actions) == 2 * len(expected)
    for what, action in actions.items():
        vectors = action()
        assert len(vectors) == len(layout.buckets)  # as many messages as in training
        assert sum(x_NxP.nbytes for x_NxP in vectors) == workers * what.num_bytes
        assert what.num_bytes == pytest.approx(1000, rel=0.01) or what.num_bytes == layout.num_bytes
        for x_NxP in vectors:
            wanted_N = np.array(expected[what.kind, what.scope])
            np.testing.assert_array_equal(x_NxP, np.where(wanted_N < 0, 0, wanted_N)[:, None] * np.ones_like(x_NxP))
        assert what.num_workers == (workers if what.kind == "all_reduce" else 2)


def test_all_parts_of_a_step_run_again_and_again():
    setup = setup_of(2, 1)
    actions = measure.step_actions(setup) | measure.codec_actions(setup)
    assert set(actions) == {"forward", "gradient", "optimizer", *measure.CODECS}
    told = []
    times_s = timing.take_rounds(
        timing.Stopwatch(setup.workers), actions, 0.0, None, lambda done, total: told.append((done, total))
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
    steps = times_s.pop("gradient").shape[1]
    assert steps % 3 == 0 and steps <= 3 * max(timing.STEPS) and times_s.pop("in a row").shape == (2, steps)
    assert all(times_NxR.shape == (2, 3) and (times_NxR > 0).all() for times_NxR in times_s.values())


def test_batches_of_several_shapes_take_turns(tmp_path):
    """Batches of several lengths, like sentences; each shape is compiled before timing starts."""
    config = translation.get_config("smoke,workers=2")
    config.update_from_flattened_dict({"data.path": str(tiny.multi30k(tmp_path, shortest=3)), "data.length": 24})
    setup = measure.prepare(spec_of(config))
    assert len({setup.batch(step).source_BxS.shape for step in range(measure.BATCHES)}) > 1
    actions = measure.step_actions(setup)
    found = [np.asarray(actions["forward"]()) for _ in range(2 * measure.BATCHES)]
    assert np.isfinite(found).all() and len(np.unique(found[: measure.BATCHES])) == 2 * measure.BATCHES
    np.testing.assert_array_equal(found[measure.BATCHES :], found[: measure.BATCHES])


# -- The command ------------------------------------------------------------------------------------------------------


def check_profile(path, nodes, per_node):
    cluster, workload = costmodel.load(path)
    assert (cluster.num_nodes, cluster.workers_per_node) == (nodes, per_node)
    assert set(cluster.codec_Bps) == set(measure.CODECS)
    size = parts.size(tiny_config())
    assert workload.total_bytes == 4 * size.params and min(workload.forward_s, workload.optimizer_s) > 0
    assert workload.combine_s >= 0  # a difference of two times
    planned = launch("launch.plan", f"--cluster={path}", "--codec=int8")
    assert planned.returncode == 0 and planned.stderr == "", planned.stderr
    assert "Decentralization" in planned.stdout and f"{nodes} × {per_node} workers" in planned.stdout


def test_a_profile_of_devices_in_one_process(tmp_path):
    path = tmp_path / "here.json"
    path.write_text("an old one")
    result = launch(
        "launch.calibrate",
        "--config=configs/lm.py:smoke,workers=4,local_size=2",
        *TINY,
        *QUICK,
        f"--out={path}",
        "--name=here [2]",
        "--compressed=method=allreduce,reducer=powersgd,rank=1",
    )
    assert result.returncode == 0 and result.stderr == "", result.stderr
    for told in (
        "here [2]",
        "forward and backward",
        "pair between nodes",
        "pair inside nodes",
        "all-reduce between nodes",
        "int8",
        "in a row, not waiting",
        "update by gossip",
        f"--cluster={path}",
    ):
        assert told in result.stdout
    assert json.loads(path.read_text())["name"] == "here [2]" and [*tmp_path.iterdir()] == [path]
    check_profile(path, 2, 2)
    workload = costmodel.load(path)[1]
    assert workload.jitter.is_deterministic  # workers of one process are timed together
    (form,) = workload.compressed
    assert (form.num_workers, form.topology, form.latencies) == (4, "", 2.0) and 0 < form.ratio < 1
    for workers, told in ((4, f"│ {form.name}"), (8, f"{form.name!r} was measured with 4 workers, not 8")):
        planned = launch("launch.plan", f"--cluster={path}", f"--workers={workers}", "--topologies=ring")
        assert told.strip("│ ") in " ".join(planned.stdout.split()), planned.stdout + planned.stderr


def test_a_profile_of_two_processes(tmp_path):
    path = tmp_path / "two.json"
    result = launch(
        "launch.local",
        "--num_processes=2",
        "--module=launch.calibrate",
        "--",
        "--config=configs/lm.py:smoke",
        *TINY,
        *QUICK,
        f"--out={path}",
        f"--links={tmp_path / 'links.json'}",
    )
    assert result.returncode == 0, result.stderr
    links = placement.load(tmp_path / "links.json")
    assert links.num_devices == 2 and links.flops is not None
    assert "Mbit/s" in result.stdout and "--links=" in result.stdout
    assert result.stdout.count("pair between nodes") == 1 and "2 nodes × 1 workers, cpu" in result.stdout
    assert result.stdout.count("during a gradient") == 1  # processes send from a separate thread
    check_profile(path, 2, 1)
    assert costmodel.load(path)[1].beside_s >= 0


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ((), "is missing"),
        (("--config=configs/none.py", "--out={tmp}/x.json"), "configs/none.py"),
        (("--config=configs/lm.py:smoke",), "--out"),
        (("--config=configs/lm.py:smoke,workers=1", "--out={tmp}/x.json"), "least two workers"),
        (("--config=configs/lm.py:smoke,simulate", "--out={tmp}/x.json"), "simulate=True"),
        (
            ("--config=configs/clicks.py:smoke,divided", "--out={tmp}/x.json"),
            "divided tables: only workers that each hold the whole",
        ),
        (("--config=configs/lm.py:smoke,workers=3,local_size=2", "--out={tmp}/x.json"), "local_size=2"),
        (("--config=configs/lm.py:smoke", "--out={tmp}/none/x.json"), "(No such file or directory); choose another --out"),
        (("--config=configs/lm.py:smoke", "--out={tmp}"), "it is a folder"),
        (
            ("--config=configs/lm.py:smoke", "--out={tmp}/x.json", "--sizes=1e5,-1"),
            "sizes=1e5,-1: must be two or more different numbers",
        ),
        (("--config=configs/lm.py:smoke", "--out={tmp}/x.json", "--sizes=1e5"), "two or more different numbers"),
        (("--config=configs/lm.py:smoke", "--out={tmp}/x.json", "--sizes=1e5,large"), "must be numbers of bytes"),
        (("--config=configs/lm.py:smoke", "--out={tmp}/x.json", "--rounds=0"), "rounds"),
        (("--config=configs/lm.py:smoke", "--out={tmp}/x.json", "--compressed=reducer=zip"), "reducer=zip"),
        (("--config=configs/lm.py:smoke", "--out={tmp}/x.json", "--compressed=method=diloco"), "cannot be measured"),
        (("--config=configs/lm.py:smoke", "--out={tmp}/x.json", "now"), "unexpected argument 'now'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(arguments, problem, tmp_path):
    result = launch("launch.calibrate", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.returncode == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and problem in line
    assert [*tmp_path.iterdir()] == []


def test_one_device_is_too_few(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(train.ConfigError, match="workers=1, devices=1"):
        measure.prepare(spec_of(lm.get_config("smoke,method=local")))
