"""The LSTM against its equations in NumPy; sampling, sizes, and that it cannot be divided into stages."""

import functools

import jax
import numpy as np
import pytest

from configs import lm
from decjax import models
from decjax.errors import ConfigError
from tests.runs import run_of, spec_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, T, D, L, B = 256, 7, 6, 2, 3


@functools.cache
def make(dtype="float32"):
    return models.lstm(vocabulary=V, context=T, width=D, depth=L, dtype=dtype)


@functools.cache
def initial():
    return jax.jit(make().init)(jax.random.key(0))


@functools.cache
def randomized():
    """Parameters without zeros, so that every one of them has an effect."""
    leaves, treedef = jax.tree.flatten(initial())
    rng = np.random.default_rng(1)
    return treedef.unflatten([x + 0.5 * rng.normal(size=x.shape).astype(np.float32) for x in leaves])


@functools.cache
def logits(dtype="float32"):
    return jax.jit(make(dtype).logits)


def tokens(length=T, seed=0):
    return np.random.default_rng(seed).integers(0, V, (B, length), np.int32)


def dense_logits(params, tokens_BxT):
    """One sequence, one layer and one token at a time, in float64; rows are input, forget, candidate and output gates."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    sigma, out = lambda x: 1 / (1 + np.exp(-x)), []
    for sequence in tokens_BxT:
        x_TxD = params["embedding"]["embedding"][sequence]
        for layer in range(L):
            W, U, b = (
                params["layers"][name][kind][layer]
                for name, kind in (("dense_i", "kernel"), ("dense_h", "kernel"), ("dense_h", "bias"))
            )
            c, h, written = np.zeros(D), np.zeros(D), []
            for x in x_TxD:
                i, f, g, o = np.split(x @ W + h @ U + b, 4)
                c = sigma(f) * c + sigma(i) * np.tanh(g)
                h = sigma(o) * np.tanh(c)
                written.append(h)
            x_TxD = x_TxD + np.array(written)
        out.append(x_TxD @ params["head"]["kernel"])
    return np.array(out)


def test_logits_and_loss_are_those_of_the_equations():
    seen = tokens(T + 1)
    expected = dense_logits(randomized(), seen[:, :-1])
    found = logits()(randomized(), seen[:, :-1])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    log_p = expected - np.log(np.exp(expected).sum(axis=-1, keepdims=True))
    nll_BxT = jax.jit(make().nll)(randomized(), seen, jax.random.key(0))
    np.testing.assert_allclose(nll_BxT, -np.take_along_axis(log_p, seen[:, 1:, None], axis=-1)[..., 0], rtol=1e-4, atol=1e-5)


def test_logits_depend_on_the_past_only():
    before = np.asarray(logits()(randomized(), tokens()))
    for t in range(T):
        changed = tokens()
        changed[:, t] = (changed[:, t] + 1) % V
        after = np.asarray(logits()(randomized(), changed))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (np.abs(after[:, t:] - before[:, t:]).max(axis=(0, 2)) > 1e-4).all(), "the token is not read"


def test_every_parameter_has_a_gradient_and_layers_start_different():
    grads = jax.jit(jax.grad(lambda params: make().nll(params, tokens(T + 1), jax.random.key(0)).mean()))(randomized())
    for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(initial()), strict=True):
        assert grad.shape == param.shape and grad.dtype == param.dtype == np.float32
        assert np.isfinite(grad).all() and np.abs(grad).max() > 0
    kernel = np.asarray(initial()["layers"]["dense_h"]["kernel"])
    assert kernel.shape == (L, D, 4 * D) and np.abs(kernel[0] - kernel[1]).max() > 1e-3
    assert not np.asarray(initial()["head"]["kernel"]).any()  # the initial loss is ln V


def test_bfloat16_rounds_products():
    exact, rounded = (np.asarray(logits(dtype)(randomized(), tokens())) for dtype in ("float32", "bfloat16"))
    assert rounded.dtype == np.float32
    assert 1e-4 < np.abs(exact - rounded).max() / np.abs(exact).max() < 0.1


def test_cold_samples_are_the_most_likely_tokens():
    text = list(b"xy")
    for _ in range(9):
        text.append(int(np.argmax(dense_logits(randomized(), np.array([text[-T:]]))[0, -1])))
    assert models.sample(make(), randomized(), b"xy", 9, jax.random.key(0), 1e-6) == text[2:]


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(width=0), "model 'lstm': width=0 must be at least 1"),
        (dict(depth=0), "model 'lstm': depth=0 must be at least 1"),
        (dict(context=-1), "model 'lstm': context=-1 must be at least 1"),
        (dict(dtype="float8"), "model 'lstm': dtype='float8' is unknown; use one of float32, bfloat16"),
    ],
)
def test_impossible_models_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        models.lstm(**dict(vocabulary=V, context=T, width=D, depth=L) | bad)


@pytest.mark.parametrize(
    "argument, message",
    [
        ("stages=2", "stages"),
        ("tensor=2,workers=2", "tensor=2: task 'lm' with model 'lstm' has no parameters to divide; use tensor=1"),
        ("method=ist", "units"),
        ("tied", "tied=True has no effect with .*model 'lstm'"),
    ],
)
def test_what_needs_a_divided_model_is_refused(argument, message):
    with pytest.raises((ConfigError, ValueError), match=message) as raised:
        spec_of(lm.get_config(f"model=lstm,smoke,{argument}"))
    assert "\n" not in str(raised.value)


def test_it_trains_by_its_config(tmp_path):
    config = lm.get_config("model=lstm,smoke,workers=2,topology=ring,steps=30")
    config.eval.every = config.checkpoint.every = 30
    outcome = run_of(config, tmp_path).train()
    assert outcome.summary["eval_loss"] < 4.0 and len(outcome.shown) > 30
