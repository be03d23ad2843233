"""Coded sums of tensor-parallel groups: a dense reference, equal devices, bytes of the program, training on all three axes,
refusals.
"""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm
from decjax import config, mesh, models, registry
from decjax.contrib import tensor_sums as sums
from decjax.program import hlo
from experiments.bench import axis_bytes
from tests.tiny_runs import launch, losses, prepare, text  # noqa: F401  Fixtures.

pytestmark = pytest.mark.usefixtures("quick_compilation")
R, D, F, STEPS, LR = 6, 8, 12, 20, 0.05
_rng = np.random.default_rng(0)
X, Y = _rng.normal(size=(R, D)).astype(np.float32), _rng.normal(size=(R, D)).astype(np.float32)
WEIGHTS = [(_rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32) for shape in ((D, D), (D, F), (F, D))]
CODEC = "topk(fraction=0.6)"


@functools.cache
def half_layer(K, codec=CODEC):
    """(weights, x, y) -> (loss, weights after a step) of ½ ‖tanh(XAU)V − Y‖², with U and V divided over a group of K devices."""
    workers = mesh.make_workers(1, tensor=K)
    multiply = sums.CodedSums(codec=codec)

    def loss(weights, x_RxD, y_RxD):
        A_DxD, U_DxF, V_FxD = weights
        hidden_RxF = jnp.tanh(multiply(x_RxD @ A_DxD, mesh.divide(U_DxF, 1), 1))
        return jnp.square(multiply(mesh.divide(hidden_RxF, 1), mesh.divide(V_FxD, 0), 0) - y_RxD).sum() / 2

    def step(weights, x_RxD, y_RxD):
        value, grads = jax.value_and_grad(loss)(weights, x_RxD, y_RxD)
        return value, jax.tree.map(lambda w, g: mesh.divide(w - LR * g, None), weights, grads)

    return workers, workers.jit(step, (0, None, None))


def largest(x):
    """Return x, rounded up, where it is one of the largest 60 %, else 0."""
    kept = np.argsort(-np.abs(x).ravel(), kind="stable")[: int(np.ceil(0.6 * x.size))]
    out = np.zeros(x.size, x.dtype)
    out[kept] = x.ravel()[kept]
    return out.reshape(x.shape)


def coded_sum(terms_KxRxD):
    """All terms coded; with more than two, the rows are summed in K parts, each of which is coded again."""
    K = len(terms_KxRxD)
    if K == 2:
        return sum(map(largest, terms_KxRxD))
    parts = [np.split(np.pad(term, ((0, -R % K), (0, 0))), K) for term in terms_KxRxD]
    return np.concatenate([largest(sum(largest(of[k]) for of in parts)) for k in range(K)])[:R]


@pytest.mark.parametrize("K", (2, 4))
def test_training_with_coded_sums_is_the_dense_reference(K):
    workers, step = half_layer(K)
    weights, (A, U, V) = workers.stack([jnp.asarray(w) for w in WEIGHTS]), WEIGHTS
    for _ in range(STEPS):
        value, weights = step(weights, X, Y)
        of_each = [(U_k, V_k) for U_k, V_k in zip(np.split(U, K, axis=1), np.split(V, K))]
        h = [np.tanh(X @ A @ U_k) for U_k, _ in of_each]
        error = coded_sum([h_k @ V_k for h_k, (_, V_k) in zip(h, of_each)]) - Y
        d = [(error @ V_k.T) * (1 - h_k**2) for h_k, (_, V_k) in zip(h, of_each)]
        dz = coded_sum([d_k @ U_k.T for d_k, (U_k, _) in zip(d, of_each)])
        dU, dV = np.concatenate([(X @ A).T @ d_k for d_k in d], axis=1), np.concatenate([h_k.T @ error for h_k in h])
        np.testing.assert_allclose(value.item(), np.square(error).sum() / 2, rtol=1e-4)
        A, U, V = A - LR * X.T @ dz, U - LR * dU, V - LR * dV
    for found, expected in zip(weights, (A, U, V)):
        np.testing.assert_allclose(np.asarray(found)[0], expected, atol=2e-5)
        assert len({shard.data.tobytes() for shard in found.addressable_shards}) == 1, "devices of a group differ"
    assert step._cache_size() <= 2, "a further call recompiled"  # the first one has the layout of `stack`


def bytes_of_sums(text, devices):
    """Return the bytes that each device sends for coded sums, each instruction once."""
    own = [each for body in hlo.Module(text).computations.values() for each in body if sums.SCOPE in each.line]
    return sum(each.sent(devices) for each in hlo.collectives(own, devices))


@pytest.mark.parametrize("K, codec", [(2, CODEC), (4, CODEC), (2, "zfp(rate=8)"), (4, "int8")])
def test_bytes_of_the_program_are_those_declared(K, codec):
    """one sum forward and one backward"""
    workers, step = half_layer(K, codec)
    text = step.lower(workers.stack([jnp.asarray(w) for w in WEIGHTS]), X, Y).compile().as_text()
    made = registry.make("codec", codec)
    np.testing.assert_array_equal(bytes_of_sums(text, K), np.full(K, 2 * sums.CodedSums(codec=made).num_bytes((R, D), K)))


# -- In training ------------------------------------------------------------------------------------------------------

GROUP = "workers=1,tensor=2,method=local"
THREE = "workers=2,stages=2,tensor=2,microbatches=2,method=allreduce"
CODED = f"{THREE},reducer=codec,codec=zfp(rate=8),backward=int8,forward=int8,tensor_codec=zfp(rate=8)"
TINY = {"model.heads": 2, "model.depth": 2}


def trained(prepare, shorthand):
    """Return (the losses of 20 steps, the run)."""
    run = prepare(shorthand, steps=STEPS, **TINY)
    state, found = run.trainer.init(), []
    for step in range(STEPS):
        state, loss_N = run.trainer.step(state, run.trainer.batch(step), step)
        found.append(float(np.asarray(loss_N).mean()))
    return found, run


@pytest.fixture(scope="module")
def uncoded(prepare):
    return trained(prepare, GROUP)[0]


@pytest.mark.parametrize("codec, tolerance", [("identity", 1e-5), ("zfp(rate=24)", 1e-4)])
def test_codecs_that_lose_nothing_change_nothing(prepare, uncoded, codec, tolerance):
    found, run = trained(prepare, f"{GROUP},tensor_codec={codec}")
    np.testing.assert_allclose(found, uncoded, rtol=tolerance)
    assert_declared(run, num_devices=2)


def assert_declared(run, num_devices):
    """Two sums per layer forward and two backward: recomputation in a pass sends nothing. Each stage has one loop over its layers,
    so each sum appears once in the program.
    """
    (program,) = run.trainer.program(run.trainer.abstract, run.trainer.batch(0), 0).executables
    made, tokens = registry.make("codec", run.spec.tensor_codec), run.spec.batch_per_worker // run.spec.pipeline.microbatches * 16
    expected = np.full(num_devices, 4 * sums.CodedSums(codec=made).num_bytes((tokens, 8), 2))
    np.testing.assert_array_equal(bytes_of_sums(program.as_text(), num_devices), expected)


def test_all_three_axes_coded_train_and_resume_bit_for_bit(prepare, launch, tmp_path):
    run = prepare(CODED, **TINY)
    assert_declared(run, num_devices=8)
    whole, part = run.workdir, tmp_path / "run"
    run.train()
    shutil.copytree(whole, part)
    for step in (8, 12):
        shutil.rmtree(part / "checkpoints" / str(step))
    (part / "summary.json").unlink()
    launch(CODED, workdir=part, **TINY)
    assert losses(part) == losses(whole) and losses(part)[-1] < losses(part)[0]
    one, other = (json.loads((each / "summary.json").read_text()) for each in (part, whole))
    assert one["eval_loss"] == other["eval_loss"] and one["bytes_per_step_per_worker"] == other["bytes_per_step_per_worker"]


def test_messages_of_each_axis_are_taken_apart():
    """The bytes of one step of a two-layer model: every term of a sum, messages between stages, and the gradient."""
    size = dict(width=8, hidden=8, heads=2, depth=2, context=4)
    model = models.decoder_lm(**size)
    params, tokens_BxT1 = model.init(jax.random.key(0)), jax.random.randint(jax.random.key(1), (3, 5), 0, 256)
    messages = axis_bytes.Messages(size, params, tokens_BxT1)
    assert [x.shape for x in messages.found["pp"]] == [(3, 4, 8)] * 2
    assert {x.shape for x in messages.found["tp"]} == {(2, 12, 8)} and len(messages.found["tp"]) >= 8
    grads = jax.grad(lambda params: model.nll(params, tokens_BxT1, None).mean())(params)
    for found, expected in zip(messages.found["dp"], jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert all(0 < messages.lossless(axis) <= 32 for axis in messages.found)
    as_they_are = axis_bytes.sent(registry.make("codec", "identity"), size, 12, params)
    assert as_they_are == {
        "dp": 4.0 * sum(x.size for x in jax.tree.leaves(params)),
        "pp": 2.0 * 12 * 8 * 4,
        "tp": 4.0 * 2 * 2 * 12 * 8 * 4,
    }


# -- Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shorthand, said",
    [
        ("workers=8,tensor_codec=int8", "tensor_codec='int8' codes sums .* got tensor=1; use tensor=2"),
        ("workers=2,simulate,tensor_codec=int8", "got tensor=1 with simulate; leave it empty"),
        ("workers=2,tensor=2,simulate,tensor_codec=int8", "simulate"),
        ("workers=4,tensor=2,tensor_codec=zip", "codec 'zip' is unknown"),
        ("workers=4,tensor=2,tensor_codec=zfp(rate=3)", "rate=3"),
        ("workers=4,tensor=2,tensor_codec=zfp(bits=3)", "no option 'bits'"),
        ("workers=4,tensor=2,tensor_codec=low_rank", "keeps a state"),
        ("workers=4,tensor=2,tensor_codec=qsgd", "draws random numbers"),
        ("workers=4,tensor=2,tensor_codec=bounded", "messages of varying size"),
        ("workers=4,tensor=2,tensor_codec=topk(fraction=0.9)", "sends .* bytes for a sum of float32 values .* use fewer bits"),
    ],
)
def test_codecs_that_do_not_fit_are_refused(shorthand, said):
    with pytest.raises((ValueError, config.ConfigError), match=said) as error:
        spec = config.resolve(lm.get_config(f"smoke,{shorthand}"), 8)
        spec.setup.place()
    assert "\n" not in str(error.value)


def test_models_that_multiply_by_themselves_are_refused(forgotten_parts):
    @registry.register("model", "own sums", tasks=("lm",))
    def own(*, vocabulary: int = 256, divide=None):
        return models.decoder_lm(vocabulary=vocabulary, divide=mesh.divide)

    given = lm.get_config("smoke,workers=4,tensor=2,tensor_codec=int8")
    given.model = {"name": "own sums", "vocabulary": 256}
    with pytest.raises(config.ConfigError, match="model 'own sums' has no parameter product"):
        config.resolve(given, 8)


def test_configs_of_older_runs_have_no_coded_sums():
    document = json.loads(lm.get_config("smoke,workers=8").to_json())
    del document["tensor_codec"]
    assert config.resolve(document, 8).tensor_codec == ""
