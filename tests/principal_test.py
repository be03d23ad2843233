"""Principal directions against NumPy, and autoencoders initialized from them: equal on all devices, kept on resuming, and invalid
alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm
from decjax import config, models, train
from decjax.pipeline import autoencoder
from decjax.principal import principal
from tests import commands
from tests.runs import spec_of, trainer_of
from tests.tiny_runs import assert_equal_states, forget_after, launch, losses, prepare, text  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(0)
NARROW = "stages=2,microbatches=2,autoencoder=2,autoencoder_init=pca"


def samples(M, D):
    """with a mean, and decaying singular values"""
    return RNG.normal(size=(M, D)) * np.geomspace(3, 0.01, D) @ np.linalg.qr(RNG.normal(size=(D, D)))[0] + 0.5


@pytest.mark.parametrize("M, D, R", [(50, 6, 2), (50, 6, 6), (50, 6, 1), (4, 6, 2), (4, 6, 5), (1, 3, 1)])
def test_the_error_is_the_sum_of_discarded_eigenvalues(M, D, R):
    x_MxD = samples(M, D)
    with jax.enable_x64(True):
        E_DxR, discarded = map(np.asarray, principal(jnp.asarray(x_MxD), R))
    value_D, vector_DxD = np.linalg.eigh(x_MxD.T @ x_MxD / M)
    error = np.square(x_MxD - x_MxD @ E_DxR @ E_DxR.T).sum() / M
    np.testing.assert_allclose(error, value_D[: D - R].sum(), rtol=1e-5, atol=1e-13)
    np.testing.assert_allclose(discarded, value_D[: D - R][::-1], rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(E_DxR.T @ E_DxR, np.eye(R), atol=1e-12)
    if M > R:  # this many directions are distinct
        top = vector_DxD[:, ::-1][:, :R]
        np.testing.assert_allclose(np.abs(top.T @ E_DxR), np.eye(R), atol=1e-8)
    assert (E_DxR[np.abs(E_DxR).argmax(axis=0), range(R)] > 0).all()


def test_samples_of_one_value_and_of_none():
    E_DxR, discarded = principal(jnp.full((9, 4), 0.5), 2)
    np.testing.assert_allclose(E_DxR[:, 0], 0.5, rtol=1e-6)
    np.testing.assert_allclose(E_DxR.T @ E_DxR, np.eye(2), atol=1e-6)
    assert np.abs(discarded).max() < 1e-6
    zero_DxR, _ = principal(jnp.zeros((9, 4)), 2)
    np.testing.assert_allclose(zero_DxR.T @ zero_DxR, np.eye(2), atol=1e-6)
    for bad in (jnp.nan, jnp.inf):
        assert np.isnan(principal(jnp.ones((9, 4)).at[3, 1].set(bad), 2)[0]).all()
    for shape, R, problem in (((9, 4), 0, "rank 0 of 4"), ((9, 4), 5, "rank 5 of 4 .* from 1 to 4"), ((0, 4), 1, "no sample of 4")):
        with pytest.raises(ValueError, match=problem):
            principal(jnp.zeros(shape), R)


@functools.cache
def model():
    return models.decoder_lm(vocabulary=16, context=6, width=8, hidden=8, depth=4)


@functools.cache
def fitted(R):
    """Return (parameters before, after) of a model of four layers in groups of 2, 1 and 1, and the tokens."""
    params = autoencoder.insert(model(), (2, 1, 1), R).init(jax.random.key(0))
    tokens_PxBxT1 = jax.random.randint(jax.random.key(1), (3, 4, 7), 0, 16)
    return params, autoencoder.fit(model().parts, params, (2, 1, 1), tokens_PxBxT1), tokens_PxBxT1


def test_encoders_fit_what_the_stages_send():
    """Each against NumPy, given the previous ones."""
    params, after, tokens_PxBxT1 = fitted(2)
    assert all((a == b).all() for a, b in zip(*(jax.tree.leaves(tree | {"autoencoder": ()}) for tree in (params, after))))
    encoder_UxDxR = after["autoencoder"]["encoder_DxR"]
    np.testing.assert_array_equal(np.swapaxes(after["autoencoder"]["decoder_RxD"], 1, 2), encoder_UxDxR)
    parts, pieces = model().parts, model().parts.cut(params)
    x_BxTxD = parts.embed(pieces.embedding_VxD, tokens_PxBxT1.reshape(-1, 7)[:, :-1])
    for (start, end), E_DxR in zip(((0, 2), (2, 3)), np.asarray(encoder_UxDxR)):
        y_BxTxD = np.asarray(parts.blocks(jax.tree.map(lambda leaf: leaf[start:end], pieces.blocks), x_BxTxD))
        rows_MxD = y_BxTxD.reshape(-1, 8).astype(float)
        _, vector_DxD = np.linalg.eigh(rows_MxD.T @ rows_MxD / len(rows_MxD))
        np.testing.assert_allclose(np.abs(vector_DxD[:, :-3:-1].T @ E_DxR), np.eye(2), atol=1e-4)
        x_BxTxD = jnp.asarray(y_BxTxD @ E_DxR @ E_DxR.T, jnp.float32)


def test_full_width_changes_nothing():
    _, after, tokens_PxBxT1 = fitted(8)
    with_head = {"head": {"kernel": jax.random.normal(jax.random.key(2), (8, 16))}}
    wide = autoencoder.insert(model(), (2, 1, 1), 8)
    one, other = (each.nll(after | with_head, tokens_PxBxT1[0], None) for each in (model(), wide))
    np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("workers", [1, 3, 40])
def test_the_sample_is_a_function_of_the_seed_and_takes_all_workers(workers):
    """40 workers exceed the number of batches needed."""
    given = lm.get_config(f"smoke,simulate,{NARROW},workers={workers}" + (",method=local" if workers == 1 else ""))
    setup, again = (spec_of(given).setup.place() for _ in range(2))
    assert setup.data and again.data
    sample = setup._sample(setup.data)
    np.testing.assert_array_equal(sample, again._sample(again.data))
    P, B, T1 = sample.shape
    assert (P - 1) * B * (T1 - 1) < 16 * 16 <= P * B * (T1 - 1)
    for k in range(min(P, workers)):
        np.testing.assert_array_equal(sample[k], setup.data.batch(k * max(1, workers // P), 0))


FIELDS = {"model.depth": 2}


@pytest.fixture(scope="module")
def simulated(launch):
    """A finished run of two simulated workers."""
    return launch(f"method=allreduce,workers=2,{NARROW},simulate", **FIELDS)[0]


def test_mapped_workers_start_and_train_as_simulated_ones(prepare, simulated):
    mapped = prepare(f"method=allreduce,workers=2,{NARROW}", **FIELDS)
    assert all((x[0] == x[1]).all() for x in jax.tree.leaves(mapped.trainer.workers.fetch(mapped.state.params)))
    mapped.train()
    np.testing.assert_allclose(losses(mapped.workdir), losses(simulated), rtol=1e-4)


def test_processes_start_alike(tmp_path):
    """Each stage in its own process finds the same directions as all stages in one."""
    config = f"--config=configs/lm.py:smoke,method=local,workers=1,steps=5,{NARROW}"
    apart = commands.run("launch.local", "--num_processes=2", "--", config, f"--workdir={tmp_path / 'apart'}")
    together = commands.run("launch.train", config + ",simulate", f"--workdir={tmp_path / 'together'}")
    assert apart.returncode == together.returncode == 0, apart.stderr + together.stderr
    np.testing.assert_allclose(losses(tmp_path / "apart"), losses(tmp_path / "together"), rtol=1e-4)


def test_only_the_directions_differ_from_a_random_start():
    starts = []
    for way in ("pca", "random"):
        trainer = trainer_of(lm.get_config(f"smoke,simulate,workers=1,method=local,{NARROW.replace('pca', way)}"))
        starts.append(jax.jit(trainer.setup.start)(jax.random.key(trainer.spec.seed)))
    codes = [params.pop("autoencoder") for params in starts]
    for x, y in zip(*map(jax.tree.leaves, starts)):
        np.testing.assert_allclose(x, y, atol=1e-6)  # two programs, so up to rounding
    assert all(np.abs(x - y).max() > 0.1 for x, y in zip(*map(jax.tree.leaves, codes)))


def test_a_resumed_run_keeps_its_encoders(launch, simulated, monkeypatch, tmp_path):
    """It continues bit for bit, whatever a new fit would give."""
    zeros = lambda parts, params, layers, tokens: params | {"autoencoder": jax.tree.map(jnp.zeros_like, params["autoencoder"])}
    monkeypatch.setattr(autoencoder, "fit", zeros)
    resumed, _ = launch(
        f"method=allreduce,workers=2,{NARROW},simulate", workdir=forget_after(simulated, 4, tmp_path / "run"), **FIELDS
    )
    assert_equal_states(simulated, resumed)


@pytest.mark.parametrize(
    "argument, fields, problem",
    [
        ("autoencoder_init=pca", {}, "pipeline.autoencoder_init='pca' has no effect with pipeline.stages=1; leave it out"),
        (
            "stages=2,autoencoder_init=pca",
            {},
            "init='pca' has no effect with pipeline.autoencoder=0; leave it out, or give a width",
        ),
        ("stages=2,autoencoder=4,autoencoder_init=svd", {}, "autoencoder_init='svd' is unknown; use one of random, pca"),
        (
            "stages=2,autoencoder=4",
            {"pipeline.autoencoder_init": "svd"},
            "autoencoder_init='svd' is unknown; use one of random, pca",
        ),
        ("stages=2,autoencoder=17,autoencoder_init=pca", {}, "autoencoder=17 must be at least 0 and at most 16"),
        (
            "stages=2,autoencoder=4,autoencoder_init=pca,forward=int8",
            {},
            "autoencoder=4 already compresses messages between stages",
        ),
    ],
)
def test_impossible_starts_are_refused_in_one_line(argument, fields, problem):
    with pytest.raises((train.ConfigError, ValueError), match=problem) as error:
        given = lm.get_config(f"smoke,workers=2,{argument}")
        given.update_from_flattened_dict(fields)
        spec_of(given)
    assert "\n" not in str(error.value)


def test_configs_from_before_the_option_start_randomly():
    document = spec_of(lm.get_config("smoke,workers=2,stages=2,autoencoder=4")).document
    del document["pipeline"]["autoencoder_init"]
    assert config.resolve(document, 8).pipeline.autoencoder_init == "random"


@pytest.mark.parametrize("twice", [("--rate=0.006", "--rate=6e-3"), ("--start=random", "--start=random")])
def test_a_training_that_is_asked_for_twice_is_refused(tmp_path, twice):
    """Two processes would otherwise train in one directory."""
    done = commands.run("experiments.principal", f"--out={tmp_path / 'out'}", *twice)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and f"{twice[0]} is given twice; leave one out" in line and not (tmp_path / "out").exists()
