"""What `experiments.related` measures of low rank by principal directions: of autoencoders between stages, and of models of clicks."""

import jax
import numpy as np

from decjax import models
from decjax.contrib.clicks import dlrm
from decjax.contrib.compress import features
from decjax.pipeline import autoencoder
from decjax.principal import principal


def boundary_autoencoder(smoke: bool) -> float:
    """The largest relative difference of a model's loss, token by token, that autoencoders of full width make: from random directions,
    and from principal ones."""
    width = 16 if smoke else 64
    model = models.decoder_lm(width=width, hidden=2 * width, depth=4, context=32)
    layers, tokens = (1, 1, 1, 1), jax.random.randint(jax.random.key(1), (4, 33), 0, 256)
    wide = autoencoder.insert(model, layers, width)
    params = jax.jit(wide.init)(jax.random.key(0))
    params["head"]["kernel"] = (
        jax.random.normal(jax.random.key(2), params["head"]["kernel"].shape) / width**0.5
    )  # It starts at zero.
    whole = np.asarray(model.nll(params, tokens, None))
    starts = params, jax.jit(lambda params: autoencoder.fit(model.parts, params, layers, tokens[None]))(params)
    nll = jax.jit(lambda params: wide.nll(params, tokens, None))
    return max(float(np.abs(np.asarray(nll(start)) / whole - 1).max()) for start in starts)


def low_rank_clicks(smoke: bool) -> float:
    """The largest relative difference, over layers and tables of a DLRM, of what outputs lose at half the rank from the sum of discarded
    eigenvalues; inf unless outputs are exact in all of their directions, to 1e-5 of the largest."""
    model, M = dlrm(width=8, hidden=16)(4, (50, 20, 5)), 256 if smoke else 4096
    params = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    numbers_MxF = jax.random.normal(jax.random.key(1), (M, 4))
    indices_MxT = jax.random.randint(jax.random.key(2), (M, 3), 0, jax.numpy.array((50, 20, 5)))
    outputs = model.outputs
    assert outputs
    seen = jax.jit(lambda params: outputs(params, numbers_MxF, indices_MxT))
    before = {name: np.asarray(y_MxJ, np.float64) for name, y_MxJ in seen(params).items()}
    for y_MxJ in before.values():
        E_JxJ = np.asarray(principal(jax.numpy.asarray(y_MxJ, jax.numpy.float32), y_MxJ.shape[1])[0])
        if np.abs(y_MxJ @ E_JxJ @ E_JxJ.T - y_MxJ).max() > 1e-5 * np.abs(y_MxJ).max():
            return float("inf")
    worst = 0.0
    for path, weight in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        R = -(-min(weight.shape) // 2)
        if name not in before or weight.shape[1] == R:
            continue
        small, _ = features.project(params, {name: before[name]}, 0.5)
        lost = np.square(np.asarray(seen(small)[name]) - before[name]).sum() / M
        discarded = np.linalg.eigvalsh(np.cov(before[name].T, bias=True))[:-R].sum()
        worst = max(worst, abs(lost / discarded - 1))
    return worst
