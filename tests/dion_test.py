"""Dion against a dense NumPy reference: one worker with the mean gradient, as in the paper, in float64."""

import functools

import jax
import numpy as np
import optax
import pytest

from decjax import registry
from decjax.contrib.dion import Dion as dion
from tests.reducers import MODES, STEPS, N, Runner, all_close, assert_equal_replicas, gradients, mean_of, x64

MU, RANK = 0.9, 2
STACKS = {"a": (1, 6, 5), "b": (1, 6, 5), "c": (2, 3, 8)}
pytestmark = pytest.mark.usefixtures("quick_compilation")


class DenseDion:
    """Algorithm 1 of arXiv 2504.05295, for the mean gradient."""

    def __init__(self, state):
        self.q = {name: np.array(q[0], np.float64) for name, q in zip(STACKS, state.factor)}
        self.m = {name: np.zeros(stack) for name, stack in STACKS.items()}

    def __call__(self, grads_N):
        out = mean_of(grads_N)
        for name, (L, I, J) in STACKS.items():
            update = np.zeros((L, I, J))
            for layer, g in enumerate(out[name][0].reshape(L, I, J)):
                b = self.m[name][layer] + g
                p, _ = np.linalg.qr(b @ self.q[name][layer])
                r = b.T @ p
                self.m[name][layer] = b - (1 - MU) * p @ r.T
                self.q[name][layer] = r / np.linalg.norm(r, axis=0)
                update[layer] = np.sqrt(J / I) * p @ self.q[name][layer].T
            out[name] = np.broadcast_to(update.reshape(out[name].shape[1:]), out[name].shape)
        return out


@pytest.mark.parametrize("mode", MODES)
@x64
def test_dion_is_the_dense_reference(mode):
    run = Runner(functools.partial(dion, rank=RANK, momentum=MU), mode)
    dense = DenseDion(run.state)
    for step in range(STEPS):
        out = run(gradients(step))
        assert_equal_replicas(out)
        all_close(out, dense(gradients(step)), rtol=1e-6, atol=1e-9)
    for own, expected in zip(run.state.momentum, dense.m.values()):
        np.testing.assert_allclose(own.mean(axis=0), expected, atol=1e-8)
        assert np.ptp(own, axis=0).max() > 0.1, "momenta of workers differ"
    state = jax.tree.map(np.asarray, run.state)
    bad = gradients(0)
    bad["bias"][1, 0] = np.inf
    out = run(bad)
    assert all(np.isnan(out[name]).all() for name in (*STACKS, "bias"))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, run.state), state)


@x64
def test_of_full_rank_the_update_is_orthonormal():
    run = Runner(functools.partial(dion, rank=8, momentum=MU))
    for step in range(3):
        out = run(gradients(step))
    for name, (_, I, J) in STACKS.items():
        for u in out[name][0].reshape(-1, I, J) / np.sqrt(J / I):
            columns = np.linalg.norm(np.linalg.svd(u)[1][: min(I, J)])
            np.testing.assert_allclose(columns**2, min(I, J), rtol=0.2)


def test_a_worker_sends_thin_matrices_and_the_rest():
    values = sum(L * (I + J) * RANK for L, I, J in STACKS.values()) + 5 + 1
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], np.float32), gradients(0))
    np.testing.assert_allclose(dion(rank=RANK).num_bytes(like, N), 2 * (N - 1) / N * 4 * values)
    with pytest.raises(ValueError, match="rank=0 must be at least 1"):
        dion(rank=0)
    with pytest.raises(ValueError, match="the parameters have none; use reducer 'mean'"):
        dion().num_bytes({"bias": like["bias"]}, N)


def test_its_optimizer_steps_along_matrices_and_by_adamw_for_the_rest():
    assert registry.part("reducer", "dion").traits["optimizer"] == "dion"
    tx = registry.make("optimizer", "dion", learning_rate=optax.constant_schedule(0.1), weight_decay=0.5)
    params = {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32), "embedding": np.ones((4, 2), np.float32)}
    steps, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(steps["kernel"], -0.1 * (1 + 0.5), rtol=1e-6)
    np.testing.assert_allclose(steps["bias"], -0.1, rtol=1e-5)
    np.testing.assert_allclose(steps["embedding"], -0.1, rtol=1e-5)
