"""Microbatches: the gradient and the loss of a batch in M parts equal those of the whole batch, whatever the parts' weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import mesh, models, pipeline, registry
from decjax.contrib.graphs import gcn
from decjax.contrib.graphs import task as nodes
from decjax.contrib.translation.model import BOS, EOS, PAD
from decjax.contrib.translation.parallel import Pairs

pytestmark = pytest.mark.usefixtures("quick_compilation")
KEY = jax.random.key(0)
BATCH, V, CONTEXT = 64, 256, 4

# -- Against a reference in NumPy, in float64 -------------------------------------------------------------------------


def weighted(params, variables, batch, key):
    """Weighted linear regression: L = Σ_b w_b (x_b·a − y_b)² ÷ Σ_b w_b."""
    x_BxD, y_B, w_B = batch
    error_B = x_BxD @ params - y_B
    return (w_B * error_B**2).sum() / w_B.sum(), variables


def by_hand(a_D, x_BxD, y_B, w_B):
    error_B = x_BxD @ a_D - y_B
    return (w_B * error_B**2).sum() / w_B.sum(), 2 * (w_B * error_B) @ x_BxD / w_B.sum()


@pytest.mark.parametrize("microbatches", [1, 2, 8, 64])
def test_parts_count_in_proportion_to_their_weight(microbatches):
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(BATCH, 5)), rng.normal(size=BATCH), rng.integers(1, 40, BATCH) * 1.0
    a_D = rng.normal(size=5)
    source = pipeline.Whole(weighted, microbatches=microbatches, weight=lambda batch: batch[2].sum())
    loss, grads, _ = jax.jit(source.gradient)(np.float32(a_D), (), jax.tree.map(np.float32, batch), KEY)
    expected, by_a = by_hand(a_D, *batch)
    np.testing.assert_allclose(loss, expected, rtol=5e-6)
    np.testing.assert_allclose(grads, by_a, rtol=2e-6)


# -- Tasks ------------------------------------------------------------------------------------------------------------


@functools.cache
def language_model(tied=False):
    return models.decoder_lm(vocabulary=V, context=CONTEXT, width=8, hidden=8, heads=2, depth=2, tied=tied)


def sentence_pairs():
    """Pairs of very different lengths, sorted, so that microbatches differ as much as possible."""
    rng = np.random.default_rng(1)
    length_B = np.sort(rng.integers(1, 12, BATCH))
    place_T = np.arange(13)
    tokens_BxT = rng.integers(EOS + 1, 300, (BATCH, 13))
    target_BxT1 = np.where(place_T < length_B[:, None], tokens_BxT, np.where(place_T == length_B[:, None], EOS, PAD))
    target_BxT1[:, 0] = BOS
    return Pairs(target_BxT1[:, 1:].astype(np.int32), target_BxT1.astype(np.int32))


def task_and_batch(name):
    rng = np.random.default_rng(2)
    if name == "translation":
        model = registry.make("model", "translator", vocabulary=300, width=8, hidden=8, heads=2, encoder=1, decoder=1, dropout=0.0)
        return registry.make("task", "translation", model=model, length=12, smoothing=0.1), sentence_pairs()
    if name == "nodes":
        task = registry.make("task", "nodes", model=gcn(hidden=5), graph="karate")
        batch = task.load(1, BATCH, 0).batch(0, 0)
        weight_BxV = batch.weight_BxV * (rng.random(batch.weight_BxV.shape) < np.linspace(0.1, 1, BATCH)[:, None])
        weight_BxV[:, np.flatnonzero(batch.weight_BxV[0])[0]] = 1
        return task, nodes.Subgraphs(batch.graphs, batch.labels_BxV, weight_BxV.astype(np.float32))
    return registry.make("task", "lm", model=language_model()), rng.integers(0, V, (BATCH, CONTEXT + 1)).astype(np.int32)


def relative(found, expected):
    """Return |actual − expected| ÷ |expected| over all leaves, in float64."""
    flat = lambda tree: np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
    return np.linalg.norm(flat(found) - flat(expected)) / np.linalg.norm(flat(expected))


@pytest.mark.parametrize("name", ["translation", "nodes", "lm"])
def test_a_batch_in_parts_has_the_gradient_of_the_whole_batch(name):
    task, batch = task_and_batch(name)
    params = jax.jit(task.init)(KEY)
    (loss, grads, _), *others = (
        jax.jit(pipeline.Whole(task.loss, microbatches=M, weight=task.weight).gradient)(params, (), batch, KEY) for M in (1, 8)
    )
    if name != "translation":  # with label smoothing
        sums, weight_B = jax.jit(task.measure)(params, (), batch)
        np.testing.assert_allclose(loss, sums["loss"].sum() / weight_B.sum(), rtol=1e-5)
    for in_parts, grads_in_parts, _ in others:
        np.testing.assert_allclose(in_parts, loss, rtol=5e-6)
        assert relative(grads_in_parts, grads) < 2e-6


# -- Parameters in bfloat16 -------------------------------------------------------------------------------------------


def staged(model, params, batch, microbatches):
    """Return the gradient of a two-stage model, joined, in the parameters' dtype."""
    workers = mesh.make_workers(1, stages=2)
    shape = jax.ShapeDtypeStruct(batch.shape, batch.dtype)
    division = pipeline.divide(model.parts, 2)
    source = pipeline.Staged(division, schedule="1f1b", microbatches=microbatches, remat=True, batch=shape)
    stacked = workers.stack(source.split(params))
    state = workers.jit(source.init, (0,))(stacked)
    gradient = workers.jit(lambda params, state, batch: source.gradient(params, state, batch, KEY)[:2], (0, 0, 0))
    loss, grads = gradient(stacked, state, workers.build(lambda worker: batch))
    return workers.fetch_first(loss), source.join(jax.tree.map(lambda x: x[0], workers.fetch(grads)))


@pytest.mark.parametrize("tied", [False, True])
def test_parts_of_a_divided_model_have_the_gradient_of_the_whole_batch(tied):
    model, (_, batch) = language_model(tied), task_and_batch("lm")
    params = jax.jit(model.init)(KEY)
    expected, grads = jax.jit(jax.value_and_grad(lambda params: model.nll(params, batch, None).mean()))(params)
    loss, in_parts = staged(model, params, batch, 8)
    np.testing.assert_allclose(loss, expected, rtol=5e-6)
    assert relative(in_parts, grads) < 1e-5


@pytest.mark.parametrize("stages", [1, 2])
def test_gradients_in_bfloat16_are_rounded_once(stages):
    """64 parts: summed in bfloat16 they are off by more than 1 %; the mean of the same parts, rounded once, by 0.2 %."""
    model, (_, batch) = language_model(), task_and_batch("lm")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), jax.jit(model.init)(KEY))
    mean = lambda params, variables, batch, key: (model.nll(params, batch, None).mean(), variables)
    if stages > 1:
        _, grads = staged(model, params, batch, BATCH)
    else:
        _, grads, _ = jax.jit(pipeline.Whole(mean, microbatches=BATCH).gradient)(params, (), batch, KEY)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    one = jax.jit(lambda params, tokens_1xT1: jax.grad(lambda params: mean(params, (), tokens_1xT1, None)[0])(params))
    parts = [jax.tree.map(np.float64, one(params, batch[b : b + 1])) for b in range(BATCH)]
    assert relative(grads, jax.tree.map(lambda *x: np.mean(x, axis=0), *parts)) < 3e-3
