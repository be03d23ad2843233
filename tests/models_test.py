"""The decoder against dense NumPy references, and sampling against a plain loop."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import models
from decjax.models import decoder, layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, T, D, F, H, DEPTH, B = 256, 6, 8, 12, 2, 2, 3
K = D // H


@functools.cache
def make(dtype="float32"):
    return models.decoder_lm(vocabulary=V, context=T, width=D, hidden=F, heads=H, depth=DEPTH, dtype=dtype)


@functools.cache
def initial():
    return jax.jit(make().init)(jax.random.key(0))


@functools.cache
def randomized():
    """Parameters without zeros or ones, so that every one of them has an effect."""
    leaves, treedef = jax.tree.flatten(initial())
    rng = np.random.default_rng(1)
    return treedef.unflatten([x + 0.3 * rng.normal(size=x.shape).astype(np.float32) for x in leaves])


@functools.cache
def logits(dtype="float32"):
    return jax.jit(make(dtype).logits)


@functools.cache
def loss_and_gradient(dtype="float32"):
    """(params, tokens_BxT1) -> ((mean nll, nll_BxT), gradient)."""

    def loss(params, tokens_BxT1):
        nll_BxT = make(dtype).nll(params, tokens_BxT1, jax.random.key(0))
        return nll_BxT.mean(), nll_BxT

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def tokens(length=T, seed=0):
    return np.random.default_rng(seed).integers(0, V, (B, length), np.int32)


def test_logits_depend_on_the_past_only():
    before = np.asarray(logits()(randomized(), tokens()))
    for t in range(T):
        changed = tokens()
        changed[:, t] = (changed[:, t] + 1) % V
        after = np.asarray(logits()(randomized(), changed))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (np.abs(after[:, t:] - before[:, t:]).max(axis=(0, 2)) > 1e-4).all(), "the token is not read"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_and_dtypes(dtype):
    model = make(dtype)
    assert model.context == T
    like = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), like) == jax.tree.map(lambda x: (x.shape, x.dtype), initial())
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(like)} == {"float32"}
    out = logits(dtype)(initial(), tokens())
    assert out.shape == (B, T, V) and out.dtype == jnp.float32
    (value, nll_BxT), grads = loss_and_gradient(dtype)(randomized(), tokens(T + 1))
    assert value.dtype == nll_BxT.dtype == jnp.float32 and nll_BxT.shape == (B, T)
    for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(initial()), strict=True):
        assert grad.shape == param.shape and grad.dtype == jnp.float32
        assert np.isfinite(grad).all() and np.abs(grad).max() > 0


def test_bfloat16_computes_in_bfloat16():
    exact, rounded = (np.asarray(logits(dtype)(randomized(), tokens())) for dtype in ("float32", "bfloat16"))
    scale = np.abs(exact).max()
    error = np.abs(exact - rounded).max()
    # Rounding a float32 result to bfloat16 once costs at most 2^-9 of it; a chain of roundings slightly more.
    assert 1e-4 * scale < error < 0.1 * scale
    assert not np.array_equal(rounded, np.asarray(jnp.asarray(exact).astype(jnp.bfloat16).astype(jnp.float32)))


def test_initial_loss_is_that_of_guessing():
    """The head is initialized to zero: every token has probability 1/V."""
    (_, nll_BxT), _ = loss_and_gradient()(initial(), tokens(T + 1))
    np.testing.assert_allclose(nll_BxT, np.log(V), rtol=1e-6)
    assert not np.asarray(initial()["head"]["kernel"]).any()
    assert np.asarray(initial()["embedding"]["embedding"]).any()


def test_nll_is_the_log_probability_of_the_next_token():
    seen = tokens(T + 1)
    out = np.asarray(logits()(randomized(), seen[:, :-1]), np.float64)
    log_p = out - np.log(np.exp(out).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(log_p, seen[:, 1:, None], axis=-1)[..., 0]
    (value, nll_BxT), _ = loss_and_gradient()(randomized(), seen)
    np.testing.assert_allclose(nll_BxT, expected, rtol=2e-5, atol=1e-5)
    assert float(value) == pytest.approx(expected.mean(), rel=2e-5)


def test_layers_start_different():
    kernel = np.asarray(initial()["blocks"]["up"]["kernel"])
    assert kernel.shape == (DEPTH, D, F) and np.abs(kernel[0] - kernel[1]).max() > 1e-3


# -- Rotary positions -------------------------------------------------------------------------------------------------


def rotate_complex(x_BxTxHxK):
    """Channel pair (k, k + K/2) as a complex number, times e^{i t 10000^(−2k/K)}."""
    half = x_BxTxHxK.shape[-1] // 2
    z = x_BxTxHxK[..., :half].astype(np.float64) + 1j * x_BxTxHxK[..., half:]
    t = np.arange(x_BxTxHxK.shape[1])[None, :, None, None]
    z = z * np.exp(1j * t * 10_000.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("head_dim", [2, 4, 10])
def test_rotate_multiplies_by_complex_phases(head_dim):
    x = np.random.default_rng(0).normal(size=(B, 50, H, head_dim)).astype(np.float32)
    rotated = layers.rotate(jnp.asarray(x))
    assert rotated.dtype == jnp.float32
    np.testing.assert_allclose(rotated, rotate_complex(x), atol=3e-5)
    np.testing.assert_array_equal(rotated[:, 0], x[:, 0])
    low = layers.rotate(jnp.asarray(x, jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(low, np.float32), rotate_complex(x), atol=0.05)


def test_rotated_dot_products_depend_on_distance_only():
    length = 12
    q_K, k_K = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    q, k = (np.asarray(layers.rotate(jnp.broadcast_to(x, (1, length, 1, 6))))[0, :, 0] for x in (q_K, k_K))
    products_TxT = q @ k.T
    distances = {}
    for offset in range(-length + 1, length):
        diagonal = np.diagonal(products_TxT, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=2e-5)
        distances[offset] = diagonal[0]
    assert abs(distances[3] - distances[-3]) > 1e-3 and abs(distances[1] - distances[2]) > 1e-3, "positions do not matter"


# -- Attention and the whole model ------------------------------------------------------------------------------------


def norm(x, scale):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale


def dense_attention(x_BxTxD, qkv_Dx3D, out_DxD, query_scale_K=1.0, key_scale_K=1.0):
    """softmax(norm(q) norm(k)' / √K + causal mask) v, one head at a time, in float64."""
    batch, length, width = x_BxTxD.shape
    size = width // H
    q, k, v = np.moveaxis((x_BxTxD @ qkv_Dx3D).reshape(batch, length, H, 3, size), 3, 0)
    q, k = rotate_complex(norm(q, query_scale_K)), rotate_complex(norm(k, key_scale_K))
    mixed = np.zeros((batch, length, H, size))
    for b in range(batch):
        for h in range(H):
            for t in range(length):
                weights = np.exp(q[b, t, h] @ k[b, : t + 1, h].T / np.sqrt(size))
                mixed[b, t, h] = weights / weights.sum() @ v[b, : t + 1, h]
    return mixed.reshape(batch, length, width) @ out_DxD


def test_attention_is_dense_causal_softmax():
    attention = decoder.Attention(D, H, depth=1, dtype=jnp.float32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x_BxTxD, qkv_Dx3D, out_DxD = (rng.normal(size=shape).astype(np.float32) for shape in ((B, T, D), (D, 3 * D), (D, D)))
    assert attention.qkv.kernel.shape == qkv_Dx3D.shape and attention.out.kernel.shape == out_DxD.shape
    attention.qkv.kernel[...], attention.out.kernel[...] = qkv_Dx3D, out_DxD
    np.testing.assert_allclose(attention(x_BxTxD), dense_attention(x_BxTxD, qkv_Dx3D, out_DxD), rtol=1e-4, atol=1e-4)


def test_model_is_a_dense_pre_norm_transformer():
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), randomized())

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = params["embedding"]["embedding"][tokens()]
    for layer in range(DEPTH):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        x = x + dense_attention(
            norm(x, p["attention_norm"]["scale"]),
            p["attention"]["qkv"]["kernel"],
            p["attention"]["out"]["kernel"],
            p["attention"]["query_norm"]["scale"],
            p["attention"]["key_norm"]["scale"],
        )
        x = x + gelu(norm(x, p["mlp_norm"]["scale"]) @ p["up"]["kernel"]) @ p["down"]["kernel"]
    expected = norm(x, params["norm"]["scale"]) @ params["head"]["kernel"]
    np.testing.assert_allclose(logits()(randomized(), tokens()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width, heads", [(8, 3), (6, 2), (10, 4)])
def test_width_must_divide_into_heads_of_even_size(width, heads):
    with pytest.raises(ValueError, match=f"heads={heads}: width={width} must be a multiple of {2 * heads}"):
        models.decoder_lm(vocabulary=V, context=T, width=width, hidden=F, heads=heads, depth=1)


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(depth=0), "depth=0 must be at least 1"),
        (dict(heads=0), "heads=0 must be at least 1"),
        (dict(context=-1), "context=-1 must be at least 1"),
        (dict(dtype="float99"), "'float99' .* float32, bfloat16"),
    ],
)
def test_impossible_models_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        models.decoder_lm(**dict(vocabulary=V, context=T, width=D, hidden=F, heads=H, depth=1) | bad)


# -- Sampling ---------------------------------------------------------------------------------------------------------


def toy_logits(params, tokens_BxT):
    """A fast causal model in which every earlier token has an effect, the nearest the largest."""
    t = np.arange(tokens_BxT.shape[1])
    decay_TxT = np.where(t[:, None] >= t, 0.95 ** (t[:, None] - t), 0.0)
    return jnp.einsum("ts,bsv->btv", decay_TxT, params[tokens_BxT])


TOY = models.Model(None, None, toy_logits, T)
TABLE_VxV = 3 * np.random.default_rng(2).normal(size=(V, V)).astype(np.float32)


def sample(prompt, seed=0):
    return models.sample(TOY, jnp.asarray(TABLE_VxV), prompt, 9, jax.random.key(seed))


def test_sample_has_its_length_and_repeats_for_a_key():
    first = sample(b"abc")
    assert len(first) == 9
    assert first == sample(b"abc") != sample(b"abc", seed=1)
    assert first != sample(b"abd")


def greedy(logits_fn, prompt, num_tokens):
    text = list(prompt)
    for _ in range(num_tokens):
        window = text[-T:]
        padded = np.array([window + [0] * (T - len(window))], np.int32)
        text.append(int(np.argmax(logits_fn(padded)[0, len(window) - 1])))
    return text[len(prompt) :]


@pytest.mark.parametrize("prompt", [b"a", b"abcde", b"abcdef", b"xyzabcdefgh"], ids=len)
def test_cold_sampling_is_greedy_decoding(prompt):
    cold = models.sample(TOY, jnp.asarray(TABLE_VxV), prompt, 9, jax.random.key(0), 1e-6)
    assert cold == greedy(lambda padded: toy_logits(TABLE_VxV, padded), prompt, 9)


def test_cold_sampling_of_the_decoder_is_greedy_decoding():
    cold = models.sample(make(), randomized(), b"xy", 9, jax.random.key(0), 1e-6)
    assert cold == greedy(lambda padded: logits()(randomized(), padded), b"xy", 9)
    assert len(set(cold)) > 1


def test_only_the_last_context_of_a_prompt_is_read():
    assert sample(b"abcdef") == sample(b"XYZabcdef") != sample(b"XYZdef")


def test_samples_follow_the_softmax():
    """A model that ignores its input gives independent draws of p ∝ exp(logit / τ)."""
    logits_V = np.full(256, -50.0, np.float32)
    logits_V[[65, 66, 67]] = [0.0, 1.0, 3.0]
    model = models.Model(None, None, lambda params, tokens_BxT: jnp.broadcast_to(params, (*tokens_BxT.shape, 256)), T)
    temperature, count = 2.0, 4000
    drawn = models.sample(model, jnp.asarray(logits_V), b"?", count, jax.random.key(0), temperature)
    assert set(drawn) == {65, 66, 67}
    p = np.exp(logits_V[[65, 66, 67]] / temperature)
    p /= p.sum()
    frequency = np.bincount(drawn, minlength=256)[[65, 66, 67]] / count
    assert (np.abs(frequency - p) < 4 * np.sqrt(p * (1 - p) / count)).all()
