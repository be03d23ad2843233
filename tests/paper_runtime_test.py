"""The paper's iteration times: the fit holds for its rows, and its extrapolations are plausible."""

import json

import numpy as np
import pytest

from experiments import paper_runtime as paper
from tests import commands


@pytest.fixture(scope="module", params=["a40"])
def predicted(request):
    """(cluster, {GPUs: ms of the four methods}), with one size beyond the rows."""
    sizes = tuple(paper.MEASURED_MS[request.param])
    return request.param, {size: paper.predict_at(request.param, size) for size in (*sizes, 2 * sizes[-1])}


def test_rows_are_met(predicted):
    name, rows = predicted
    errors = np.abs(np.concatenate([paper.errors(name, size, rows[size]) for size in paper.MEASURED_MS[name]]))
    assert np.median(errors) < 5 and errors.max() < 10
    assert len(paper.PARAMETERS) <= 6


def test_the_unseen_size_is_plausible(predicted):
    name, rows = predicted
    *_, last, unseen = rows
    all_reduce, _, exp, aer = rows[unseen]
    compute_ms = 1e3 * np.exp(paper.fit(name, tuple(paper.MEASURED_MS[name]))[:2]) @ [1 / unseen, 1]
    assert compute_ms < min(exp, aer) and max(exp, aer) < all_reduce
    assert aer < rows[last][3]  # less computing each, and the same messages
    # Nothing shrinks faster than the share of the batch.
    assert (rows[unseen] > rows[last] / 2).all()


def test_one_node_needs_no_nic():
    theta = np.log([4.0, 0.04, 1.0, 1e10, 0.6, 0.01])  # a NIC of one byte per second
    assert paper.predict_ms("t4", 8, theta, num_steps=20, num_replicas=1).max() < 1000


def run(*args):
    return commands.run("experiments.paper_runtime", *args)


def test_json_is_what_the_table_says(predicted):
    name, rows = predicted
    result = run(f"--cluster={name}", f"--gpus={list(rows)[-1]}", "--json")
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert list(values) == ["all_reduce", "sgp", "exp", "aer"]
    assert list(values.values()) == pytest.approx(rows[list(rows)[-1]], rel=1e-3)


def test_table_and_figure(tmp_path):
    path = tmp_path / "paper.png"
    result = run("--cluster=t4", f"--out={path}")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert "over the fitted rows" in result.stdout
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "args, problem",
    [(("--cluster=v100",), "v100"), (("--json",), "--gpus"), (("--cluster=a40", "--gpus=12"), "gpus=12 must be a power of two")],
)
def test_mistakes_are_one_line(args, problem):
    result = run(*args)
    assert result.returncode == 2 and result.stderr.startswith("error: ") and problem in result.stderr
    assert result.stderr.count("\n") == 1
