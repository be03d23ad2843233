"""The Llama-shaped model against a dense NumPy reference; the sizes of configs/llama.py; rematerialization; a short run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import llama as config_file
from decjax import config, models, registry
from decjax.contrib.translation.parallel import Pairs
from tests import runs

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, T, D, F, H, DEPTH, B = 40, 7, 16, 24, 4, 2, 3
K, THETA, EPSILON = D // H, 500.0, 1e-5


def make(kv_heads=2, **options):
    size = dict(vocabulary=V, context=T, width=D, hidden=F, heads=H, depth=DEPTH, theta=THETA, epsilon=EPSILON)
    return models.llama(kv_heads=kv_heads, **size | options)


def randomized(model):
    """Parameters without zeros or ones, so that every one of them has an effect."""
    shapes, rng = jax.eval_shape(model.init, jax.random.key(0)), np.random.default_rng(1)
    return jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.4).astype(np.float32), shapes)


def tokens():
    return np.random.default_rng(0).integers(0, V, (B, T), np.int32)


# -- The equations ----------------------------------------------------------------------------------------------------


def norm(x, scale):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPSILON) * scale


def rotated(x_TxK):
    """Channel pair (k, k + K/2) as a complex number, times e^{i t θ^(−2k/K)}."""
    z = x_TxK[:, : K // 2] + 1j * x_TxK[:, K // 2 :]
    z = z * np.exp(1j * np.arange(len(x_TxK))[:, None] * THETA ** (-np.arange(K // 2) / (K // 2)))
    return np.concatenate([z.real, z.imag], axis=-1)


def attention(y_TxD, p, kv_heads):
    """Softmax attention head by head; H / G consecutive heads share the keys and values of a group."""
    qkv = y_TxD @ p["qkv"]["kernel"] + p["qkv"].get("bias", 0)
    shared = H // kv_heads
    heads_TxGxRxK, out = qkv.reshape(len(y_TxD), kv_heads, shared + 2, K), []
    for h in range(H):
        group_TxRxK = heads_TxGxRxK[:, h // shared]
        q, k, v = rotated(group_TxRxK[:, h % shared]), rotated(group_TxRxK[:, shared]), group_TxRxK[:, shared + 1]
        logits_TxT = np.where(np.tri(len(q), dtype=bool), q @ k.T / np.sqrt(K), -np.inf)
        weights_TxT = np.exp(logits_TxT - logits_TxT.max(axis=1, keepdims=True))
        out.append(weights_TxT / weights_TxT.sum(axis=1, keepdims=True) @ v)
    return np.concatenate(out, axis=1) @ p["out"]["kernel"]


def dense_logits(params, tokens_T, kv_heads):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    table_VxD = params["embedding"]["embedding"]
    x = table_VxD[tokens_T]
    for layer in range(DEPTH):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        x = x + attention(norm(x, p["attention_norm"]["scale"]), p["attention"], kv_heads)
        y = norm(x, p["mlp_norm"]["scale"])
        gate = y @ p["gate"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ p["up"]["kernel"])) @ p["down"]["kernel"]
    return norm(x, params["norm"]["scale"]) @ (params["head"]["kernel"] if "head" in params else table_VxD.T)


@pytest.mark.parametrize(
    "options", [{}, dict(kv_heads=4, tied=True), dict(kv_heads=1, qkv_bias=True)], ids=["grouped", "tied", "biased"]
)
def test_logits_are_those_of_the_dense_equations(options):
    model = make(**options)
    params = randomized(model)
    assert ("bias" in params["blocks"]["attention"]["qkv"]) == options.get("qkv_bias", False)
    expected = np.stack([dense_logits(params, row, options.get("kv_heads", 2)) for row in tokens()])
    np.testing.assert_allclose(jax.jit(model.logits)(params, tokens()), expected, rtol=1e-4, atol=1e-4)


# A model of each family.
SMALL = dict(vocabulary=300, width=32, hidden=64, heads=2)
FAMILIES = {
    "llama": dict(SMALL, kv_heads=1, depth=3, context=32),
    "decoder": dict(SMALL, depth=3, context=32),
    "gpt2": dict(SMALL, depth=3, context=32),
    "lstm": dict(vocabulary=300, width=32, depth=3, context=32),
    "translator": dict(SMALL, encoder=3, decoder=3),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_rematerialization_saves_memory_and_keeps_the_gradient(name):
    tokens_BxT1 = np.random.default_rng(0).integers(5, 300, (8, 33), np.int32)
    found = {}
    for remat in ("none", "dots", "full"):
        model = registry.make("model", name, remat=remat, **FAMILIES[name])
        if name == "translator":
            task, batch = registry.make("task", "translation", model=model), Pairs(tokens_BxT1[:, 1:], tokens_BxT1)
        else:
            task, batch = registry.make("task", "lm", model=model), tokens_BxT1
        params = randomized(model)
        gradient = jax.jit(jax.grad(lambda params: task.loss(params, (), batch, jax.random.key(0))[0])).lower(params).compile()
        found[remat] = gradient.memory_analysis().temp_size_in_bytes, gradient(params)
    memory = {remat: num_bytes for remat, (num_bytes, _) in found.items()}
    assert memory["none"] > 1.1 * memory["dots"] > 1.1 * 1.1 * memory["full"]
    for _, grads in found.values():
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max()), grads, found["none"][1])


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    exact, rounded = (jax.jit(make(dtype=dtype).logits)(randomized(make()), tokens()) for dtype in ("float32", "bfloat16"))
    assert rounded.dtype == jnp.float32 and {x.dtype for x in jax.tree.leaves(jax.eval_shape(make().init, jax.random.key(0)))} == {
        np.dtype(np.float32)
    }
    assert 1e-4 < np.abs(exact - rounded).max() / np.abs(exact).max() < 0.1


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(kv_heads=3), "model kv_heads=3: heads=4 must be a multiple of 3"),
        (dict(width=20), "heads=4: width=20 must be a multiple of 8"),
        (dict(theta=0.0), "theta=0.0 must be more than 0"),
        (dict(remat="some"), "'some' .* none, dots, full"),
    ],
)
def test_impossible_models_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        make(**bad)


# -- The config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", config_file.SIZES)
def test_sizes_have_the_parameters_of_the_table(size):
    (row,) = re.findall(rf"^ +{size} .*", config_file.__doc__, re.MULTILINE)
    table = [float(number) for number in re.findall(r"(?<= )\d[\d.]*(?= M|,|  |$)", row)]
    model = config_file.get_config(f"size={size}").model
    options = {name: value for name, value in model.items() if name != "name"}
    shapes = jax.eval_shape(registry.make("model", "llama", **options).init, jax.random.key(0))
    millions = round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e6, 1)
    sizes = [model[name] for name in ("depth", "width", "hidden", "heads", "kv_heads", "context", "vocabulary")]
    assert table == [millions, *sizes] and row.endswith("tied") == model.tied


def test_all_sizes_are_configs():
    for size in config_file.SIZES:
        assert config.read(config_file.get_config(f"size={size},workers=2")).model.name == "llama"
    with pytest.raises(ValueError, match="size='2B' is unknown; use one of 10M"):
        config_file.get_config("size=2B")


def losses(arg, steps=12):
    trainer = runs.trainer_of(config_file.get_config(f"smoke,{arg}"))
    state, found = trainer.init(), []
    for step in range(steps):
        state, loss_N = trainer.step(state, trainer.batch(step), step)
        found.append(float(trainer.workers.fetch(loss_N).mean()))
    return found


def test_it_trains_and_a_group_of_devices_computes_the_same():
    alone = losses("workers=2,simulate")
    assert alone[0] == pytest.approx(np.log(256), rel=1e-4) and alone[-1] < alone[0]
    np.testing.assert_allclose(losses("workers=2,tensor=2"), alone, rtol=1e-4)
    np.testing.assert_allclose(losses("workers=2,stages=2"), alone, rtol=1e-4)
