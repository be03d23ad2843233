"""Weights that preserve the principal directions of outputs, against NumPy; a DLRM's outputs; and launch.compress on a click run."""

import functools
import json

import jax
import numpy as np
import pytest

from decjax.contrib import compress
from decjax.contrib.clicks import dlrm
from decjax.contrib.compress import features
from tests import commands

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(0)
I, J, V, M = 7, 5, 30, 40
PARAMS = {
    "up": {"kernel": RNG.normal(size=(I, J)).astype(np.float32), "bias": RNG.normal(size=J).astype(np.float32)},
    "plain": {"kernel": RNG.normal(size=(I, J)).astype(np.float32)},
    "table": {"embedding": RNG.normal(size=(V, J)).astype(np.float32) + 1},
    "other": RNG.normal(size=(3, 4)).astype(np.float32),
}
X_MxI = RNG.normal(size=(M, I)) * np.geomspace(3, 0.1, I) + 0.5
READ_M = RNG.choice(V, M, p=np.arange(V, 0, -1) / np.arange(V, 0, -1).sum())


def outputs(params):
    """Return the outputs of the layers and of the table for the sample."""
    return {
        "up/kernel": X_MxI @ params["up"]["kernel"] + params["up"]["bias"],
        "plain/kernel": X_MxI @ params["plain"]["kernel"],
        "table/embedding": np.asarray(params["table"]["embedding"], float)[READ_M],
    }


def eigen(y_MxJ, centred):
    """Return (directions, eigenvalues), largest first."""
    moved = y_MxJ - centred * y_MxJ.mean(axis=0)
    value, vector = np.linalg.eigh(moved.T @ moved / len(moved))
    return vector[:, ::-1], value[::-1]


@pytest.mark.parametrize("fraction, R", [(0.2, 1), (0.6, 3), (0.9, 5)])
def test_outputs_lose_the_discarded_eigenvalues_and_less_than_by_svd(fraction, R):
    before = outputs(PARAMS)
    small = compress.make(f"principal(fraction={fraction})")(PARAMS, before)
    after, by_svd = outputs(small.params), outputs(compress.make(f"low_rank(fraction={fraction})")(PARAMS).params)
    for name, y_MxJ in before.items():
        vector_JxJ, value_J = eigen(y_MxJ, centred=name != "plain/kernel")
        mean_J = y_MxJ.mean(axis=0) * (name != "plain/kernel")
        expected = mean_J + (y_MxJ - mean_J) @ vector_JxJ[:, :R] @ vector_JxJ[:, :R].T
        np.testing.assert_allclose(after[name], expected, atol=1e-5)
        error = np.square(after[name] - y_MxJ).sum() / M
        np.testing.assert_allclose(error, value_J[R:].sum(), rtol=1e-4, atol=1e-10)
        assert error <= np.square(by_svd[name] - y_MxJ).sum() / M + 1e-10
    assert small.params["other"] is PARAMS["other"] or (small.params["other"] == PARAMS["other"]).all()
    layer, table = min(R * (I + J), I * J), min(R * (V + J) + J, V * J) if R < J else V * J
    assert small.num_bytes == 4 * (2 * layer + J + table + 12)


def test_without_a_mean_the_second_moments_are_around_zero():
    before = outputs(PARAMS)
    small = compress.make("principal(fraction=0.6,centred=false)")(PARAMS, before)
    after = outputs(small.params)
    for name, y_MxJ in before.items():
        np.testing.assert_allclose(np.square(after[name] - y_MxJ).sum() / M, eigen(y_MxJ, centred=False)[1][3:].sum(), rtol=1e-4)
    assert small.num_bytes == compress.make("principal(fraction=0.6)")(PARAMS, before).num_bytes - 4 * J


def test_full_rank_is_exact():
    small = compress.make("principal(fraction=1)")(PARAMS, outputs(PARAMS))
    for x, y in zip(*map(jax.tree.leaves, (small.params, PARAMS)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        assert x.dtype == np.float32


@pytest.mark.parametrize("count", [1, 2])
def test_a_sample_smaller_than_the_rank_is_kept(count):
    few = {name: y[:count] for name, y in outputs(PARAMS).items()}
    after = outputs(compress.make("principal(fraction=0.4)")(PARAMS, few).params)
    for name, y in few.items():
        np.testing.assert_allclose(after[name][:count], y, atol=1e-5)


def test_outputs_that_are_all_alike_are_kept():
    constant = {"table/embedding": np.tile(PARAMS["table"]["embedding"][3], (9, 1))}
    after = compress.make("principal(fraction=0.2)")(PARAMS, constant).params["table"]["embedding"]
    np.testing.assert_allclose(after[3], PARAMS["table"]["embedding"][3], rtol=1e-5)


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"table/embedding": np.full((4, J), np.nan)}, "outputs of 'table/embedding' are not finite"),
        ({"tables/embedding": np.zeros((4, J))}, "'tables/embedding' .* belong to no weight"),
        ({"table/embedding": np.zeros((4, J + 1))}, r"\(4, 6\) belong to no weight; give M ≥ 1 rows"),
        ({"table/embedding": np.zeros(J)}, "belong to no weight"),
        ({"table/embedding": np.zeros((0, J))}, "belong to no weight; give M ≥ 1 rows"),
        ({}, "needs outputs of layers"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem) as error:
        compress.make("principal(fraction=0.5)")(PARAMS, given)
    assert "\n" not in str(error.value)


@functools.cache
def clicks():
    """Return (a DLRM, its parameters, numbers, indices)."""
    model = dlrm(width=4, hidden=6)(3, (9, 5))
    numbers_BxF = jax.random.normal(jax.random.key(1), (20, 3))
    return model, jax.jit(model.init)(jax.random.key(0)), numbers_BxF, jax.random.randint(jax.random.key(2), (20, 2), 0, 5)


def test_outputs_of_a_dlrm_are_those_of_all_its_weights():
    model, params, numbers_BxF, indices_BxT = clicks()
    found = jax.tree.map(np.asarray, model.outputs(params, numbers_BxF, indices_BxT))
    paths = jax.tree_util.tree_leaves_with_path(params)
    assert found.keys() == {
        name for path, x in paths if x.ndim == 2 for name in [jax.tree_util.keystr(path, simple=True, separator="/")]
    }
    bottom = params["dense"]["bottom"]["layers"]
    first_BxJ = np.asarray(numbers_BxF) @ bottom[0]["kernel"] + bottom[0]["bias"]
    np.testing.assert_allclose(found["dense/bottom/layers/0/kernel"], first_BxJ, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        found["dense/bottom/layers/1/kernel"],
        np.maximum(first_BxJ, 0) @ bottom[1]["kernel"] + bottom[1]["bias"],
        rtol=1e-5,
        atol=1e-6,
    )
    for t in range(2):
        np.testing.assert_array_equal(
            found[f"tables/{t}/embedding"], np.asarray(params["tables"][t]["embedding"])[indices_BxT[:, t]]
        )
    logits_B = model.logits(params["dense"], numbers_BxF, model.lookup(params["tables"], indices_BxT))
    np.testing.assert_allclose(found["dense/top/layers/1/kernel"][:, 0], logits_B, rtol=1e-5, atol=1e-6)


def test_a_dlrm_of_full_rank_predicts_the_same():
    model, params, numbers_BxF, indices_BxT = clicks()
    small, _ = features.project(params, jax.tree.map(np.asarray, model.outputs(params, numbers_BxF, indices_BxT)), 1.0)
    one, other = (model.logits(own["dense"], numbers_BxF, model.lookup(own["tables"], indices_BxT)) for own in (params, small))
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_run_of_clicks_is_offered_principal_directions(tmp_path):
    done = commands.run("launch.train", "--config=configs/clicks.py:simulate,smoke", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    done = commands.run("launch.compress", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'found.json'}")
    assert done.returncode == 0 and "principal(fraction=0.5)" in done.stdout, done.stderr
    again = commands.run("launch.compress", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'again.json'}")
    assert again.stdout == done.stdout and (tmp_path / "again.json").read_text() == (tmp_path / "found.json").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["step"] == 20 and {"bytes", "loss", "accuracy"} <= found["forms"]["principal(fraction=0.5)"].keys()
    assert found["forms"]["low_rank(fraction=0.5)"]["bytes"] < found["forms"]["principal(fraction=0.5)"]["bytes"]  # by the means
