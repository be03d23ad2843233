"""decjax.contrib.compress and launch.compress: each form against its definition, bytes, losses of a run, one-line errors."""

import json

import numpy as np
import pytest

from configs import lm
from decjax import config
from decjax.contrib import compress
from tests import commands

RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(12, 8)).astype(np.float32),
    "kernel": RNG.normal(size=(3, 3, 4, 6)).astype(np.float32),
    "b": np.ones(8, np.float32),
}


def test_int8_rounds_each_column_to_its_own_scale():
    smaller = compress.make("int8")(PARAMS)
    scale_J = np.abs(PARAMS["w"]).max(axis=0) / 127
    expected = np.array([[round(float(w) / s) * s for w, s in zip(row, scale_J)] for row in PARAMS["w"]])
    np.testing.assert_allclose(smaller.params["w"], expected, rtol=1e-6)
    assert smaller.params["b"] is PARAMS["b"] or (smaller.params["b"] == 1).all()
    assert smaller.num_bytes == (96 + 4 * 8) + (216 + 4 * 6) + 4 * 8
    zero = compress.make("int8")({"w": np.zeros((3, 2), np.float32)})
    assert (zero.params["w"] == 0).all()


def test_low_rank_is_the_nearest_matrix():
    smaller = compress.make("low_rank(fraction=0.5)")(PARAMS)
    w, rank = PARAMS["w"], 4
    values = np.linalg.svd(w, compute_uv=False)
    assert np.linalg.matrix_rank(smaller.params["w"]) == rank
    assert np.linalg.norm(w - smaller.params["w"]) ** 2 == pytest.approx((values[rank:] ** 2).sum(), rel=1e-5)
    assert smaller.num_bytes == 4 * (4 * 20 + 3 * 42 + 8)


@pytest.mark.parametrize("form", ["low_rank(fraction=1)", "prune(fraction=0)"])
def test_full_rank_and_no_pruning_are_exact(form):
    smaller = compress.make(form)(PARAMS)
    for name, x in PARAMS.items():
        np.testing.assert_allclose(smaller.params[name], x, rtol=1e-5, atol=1e-6)
        assert smaller.params[name].dtype == np.float32


def test_prune_leaves_the_largest():
    smaller = compress.make("prune(fraction=0.75)")(PARAMS)
    w = PARAMS["w"]
    largest = np.sort(np.abs(w), axis=None)[-24]
    np.testing.assert_array_equal(smaller.params["w"], np.where(np.abs(w) >= largest, w, 0))
    assert smaller.num_bytes == (4 * 24 + 12) + (4 * 54 + 27) + 32


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    done = commands.run("launch.train", "--config=configs/lm.py:workers=4,smoke", f"--workdir={path}")
    assert done.returncode == 0, done.stderr
    return path


def test_losses_of_a_run(workdir):
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file()}
    done = commands.run("launch.compress", f"--workdir={workdir}", "--forms=low_rank(fraction=1);int8;prune(fraction=1)")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if "." in line and len(line.split()) >= 5}
    trained = json.loads((workdir / "summary.json").read_text())["eval_loss"]
    assert float(rows["as"][-2]) == pytest.approx(trained, abs=1e-4)
    assert abs(float(rows["low_rank(fraction=1)"][-1])) <= 1e-4 and abs(float(rows["int8"][-1])) < 0.01
    assert float(rows["prune(fraction=1)"][-1]) > 0.1  # nothing is left
    assert before == {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file()}


def test_a_task_that_shows_no_outputs_is_told(workdir):
    done = commands.run("launch.compress", f"--workdir={workdir}", "--forms=principal(fraction=0.5)")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and "needs outputs of layers" in line and "use 'low_rank'" in line


@pytest.mark.parametrize(
    "argument", ["tensor=2,tensor_codec=int8", "workers=2,reducer=gravac(speed=measured)"], ids=["coded sums", "measured speed"]
)
def test_runs_that_could_not_be_simulated_are_read(argument, tmp_path):
    """These runs have no checkpoint, which is checked last."""
    document = config.resolve(lm.get_config(f"smoke,method=allreduce,simulate=false,{argument}"), 2).document
    (tmp_path / "config.json").write_text(json.dumps(document))
    done = commands.run("launch.compress", f"--workdir={tmp_path}")
    assert done.returncode == 2 and "has no checkpoints" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("--workdir=none",), "holds no run"),
        (("--workdir=none", "--forms=zip"), "form='zip' is unknown"),
        (("--workdir=none", "--forms=prune"), "use 'prune(fraction=0.5)'"),
        (("--workdir=none", "--forms=int8(fraction=1)"), "has no option 'fraction'"),
        (("--workdir=none", "--forms=low_rank(fraction=0)"), "fraction=0 must be more than 0"),
        (("--workdir=none", "--forms=principal"), "use 'principal(fraction=0.5)'"),
        (("--workdir=none", "--forms=principal(fraction=0)"), "fraction=0 must be more than 0"),
        (("--workdir=none", "--forms=principal(fraction=0.5,centred=2)"), "centred=2 must be True or False"),
        (("--workdir=none", "--forms=low_rank(fraction=0.5,centred=true)"), "has no option 'centred'; use fraction"),
        (("--workdir=none", "--forms=principal(fraction=1.5)"), "fraction=1.5 must be more than 0 and at most 1"),
        (("--workdir=none", "--forms=prune(fraction=x)"), "fraction='x' must be a number"),
        (("--workdir=none", "--out=none/found.json"), "out='none/found.json' cannot be written"),
        ((), "--workdir is missing"),
    ],
)
def test_mistakes_are_one_line(arguments, problem):
    done = commands.run("launch.compress", *arguments)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and problem in line
