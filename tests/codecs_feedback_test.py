"""Error feedback: the memory stays bounded, is eventually sent, and survives non-finite values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import codecs

pytestmark = pytest.mark.usefixtures("quick_compilation")


def run_feedback(feedback, grads, keys=None):
    """Return the memory after all steps, and the messages decoded at every step."""
    shape = grads.shape[1:]

    def step(memory, given):
        grad, key = given
        message, memory = feedback.encode(grad, memory, key)
        return memory, (feedback.codec.decode(message, shape, grad.dtype), memory.error)

    keys = jax.random.split(jax.random.key(0), len(grads)) if keys is None else keys
    run = jax.jit(lambda: jax.lax.scan(step, feedback.init(shape, grads.dtype), (grads, keys)))
    return jax.tree.map(np.asarray, run())


GRADS = np.random.default_rng(4).normal(size=(60, 30)) + 1


def test_decayed_error_is_the_momentum_of_demo():
    with jax.enable_x64(True):
        _, (sent, errors) = run_feedback(codecs.feedback.residual(codecs.make("topk", fraction=0.1), decay=0.9), GRADS)
    m = np.zeros(30)
    for grad, c, e in zip(GRADS, sent, errors):
        m = 0.9 * m + grad
        top = np.argsort(-np.abs(m))[:3]
        np.testing.assert_allclose(c, np.where(np.isin(np.arange(30), top), m, 0))
        m[top] = 0
        np.testing.assert_allclose(e, m)


def test_momentum_is_taken_before_anything_is_lost():
    with jax.enable_x64(True):
        memory, (sent, _) = run_feedback(codecs.feedback.momentum(codecs.make("scaled_sign"), beta=0.5), GRADS)
    v, total = np.zeros(30), np.zeros(30)
    for grad in GRADS:
        v = 0.5 * v + grad
        total += v
    np.testing.assert_allclose(sent.sum(axis=0) + memory.error, total, atol=1e-10)
    np.testing.assert_allclose(memory.momentum, v)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_ef21_holds_the_same_at_both_ends_and_finds_a_constant(beta):
    with jax.enable_x64(True):
        grads = np.broadcast_to(GRADS[0], (200, 30)).copy()
        grads[50, 3], grads[60] = np.nan, 0
        feedback = codecs.feedback.ef21(codecs.make("topk", fraction=0.1), beta)
        memory, (sent, errors) = run_feedback(feedback, grads)
        estimate = jnp.zeros(30)
        for arrived, held in zip(sent, errors):
            estimate = feedback.receive(estimate, arrived)
            np.testing.assert_allclose(estimate, held, atol=1e-12)
    np.testing.assert_allclose(estimate, GRADS[0], atol=1e-9)


@pytest.mark.parametrize("wrap", [codecs.feedback.residual, codecs.feedback.momentum, codecs.feedback.ef21])
@pytest.mark.parametrize("codec", ["topk", "low_rank", "int4"])
def test_a_bad_gradient_leaves_all_memory_as_it_was(wrap, codec):
    feedback = wrap(codecs.make(codec))
    grads = np.ones((3, 6, 8), np.float32) + np.arange(8, dtype=np.float32)
    grads[1, 0, 0] = np.inf
    before, _ = run_feedback(feedback, grads[:1])
    after, _ = run_feedback(feedback, grads[:2])
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run_feedback(feedback, grads)[0]))


def test_both_ends_of_ef21_agree_where_the_message_does_not_tell():
    """Random-k may leave out the non-finite value."""
    grads = np.ones((40, 30), np.float32)
    grads[::3, 4] = np.nan
    feedback = codecs.feedback.ef21(codecs.make("randomk", fraction=0.2))
    _, (sent, errors) = run_feedback(feedback, grads)
    estimate = jnp.zeros(30)
    for arrived, held in zip(sent, errors):
        estimate = feedback.receive(estimate, arrived)
        np.testing.assert_array_equal(estimate, held)
    assert np.isfinite(estimate).all() and np.abs(estimate).max() > 0.5


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_error_memory_in_8_bits_stays_bounded_and_loses_little(rounding):
    codec, storage = codecs.make("topk", fraction=0.1), codecs.make("int8", rounding=rounding)
    grads = np.random.default_rng(0).normal(size=(2000, 100)).astype(np.float32) + np.linspace(0, 1, 100, dtype=np.float32)
    memory, (sent, errors) = run_feedback(codecs.feedback.residual(codec, storage=storage), grads)
    assert codecs.message_bytes(memory.error) == storage.num_bytes((100,), np.float32) < 0.3 * 400
    _, (exact, exact_errors) = run_feedback(codecs.feedback.residual(codec), grads)
    length = np.linalg.norm(errors["scales"], axis=1) * 127
    largest = np.abs(exact_errors).max(axis=1)
    assert length[1000:].max() < 1.5 * largest[1000:].max()
    np.testing.assert_allclose(sent.mean(axis=0), exact.mean(axis=0), atol=0.05)
