"""PowerSGD in one-sided iterations against a dense NumPy reference, in float64."""

import functools

import jax
import numpy as np
import pytest

from decjax import reduce
from tests.reducers import SHAPES, STEPS, N, Runner, all_close, assert_equal_replicas, gradients, mean_of, x64

VIEWS = {"a": (6, 5), "b": (6, 5), "c": (6, 8)}
pytestmark = pytest.mark.usefixtures("quick_compilation")


def one_sided(iterations=2, rank=1):
    return functools.partial(reduce.powersgd_one_sided, rank=rank, iterations=iterations, gate=2.0)


class Dense:
    """Every iteration projects the residual of each worker's matrix on the basis spanned by the last mean, alternating sides."""

    def __init__(self, state, iterations):
        self.iterations, self.turn = iterations, 0
        self.factors = [[np.asarray(x[0], np.float64) for x in side] for side in (state.rows, state.columns)]
        self.left = {name: np.zeros((N, *view)) for name, view in VIEWS.items()}

    def __call__(self, grads_N):
        out = mean_of(grads_N)
        sent = {name: np.zeros(view) for name, view in VIEWS.items()}
        self.left = {name: e + grads_N[name].reshape(e.shape) for name, e in self.left.items()}
        for _ in range(self.iterations):
            for k, name in enumerate(VIEWS):
                A_NxIxJ = self.left[name]
                if self.turn % 2 == 0:
                    q, _ = np.linalg.qr(self.factors[1][k])
                    P_NxIxR = A_NxIxJ @ q
                    self.factors[0][k] = P_NxIxR.mean(axis=0)
                    sent[name] += self.factors[0][k] @ q.T
                    self.left[name] = A_NxIxJ - P_NxIxR @ q.T
                else:
                    p, _ = np.linalg.qr(self.factors[0][k])
                    Q_NxJxR = A_NxIxJ.transpose(0, 2, 1) @ p
                    self.factors[1][k] = Q_NxJxR.mean(axis=0)
                    sent[name] += p @ self.factors[1][k].T
                    self.left[name] = A_NxIxJ - p @ Q_NxJxR.transpose(0, 2, 1)
            self.turn += 1
        for name in VIEWS:
            out[name] = np.broadcast_to(sent[name].reshape(SHAPES[name]), (N, *SHAPES[name]))
        return out


@pytest.mark.parametrize("mode, iterations, rank", [("devices", 1, 2), ("simulated", 2, 1), ("simulated", 3, 2)])
@x64
def test_it_is_the_dense_reference(mode, iterations, rank):
    run = Runner(one_sided(iterations, rank), mode)
    dense = Dense(run.state, iterations)
    for step in range(20):  # rounding errors grow about tenfold in ten steps
        out = run(gradients(step), step)
        assert_equal_replicas(out)
        all_close(out, dense(gradients(step)), rtol=1e-6, atol=1e-9)
    for e, expected in zip(run.state.error, dense.left.values()):
        np.testing.assert_allclose(e, expected, rtol=1e-6, atol=1e-9)
    assert len(run.compiled) == 1 + iterations % 2


@x64
def test_it_leaves_less_unsent_than_powersgd_for_the_same_bytes():
    """Of gradients whose singular values decay fast."""
    rng = np.random.default_rng(0)
    (u, _), (v, _) = (np.linalg.qr(rng.normal(size=(length, 24))) for length in (24, 32))
    common = (u / np.arange(1, 25) ** 2) @ v.T
    draws = [{"w": common + 0.003 * rng.normal(size=(N, 24, 32))} for _ in range(STEPS)]
    runs = [Runner(make, "simulated", like=draws[0]) for make in (one_sided(), functools.partial(reduce.powersgd, rank=1))]
    left = []
    for run in runs:
        for step, grads in enumerate(draws):
            run(grads, step)
        left.append(float(np.linalg.norm(np.asarray(run.state.error[0]).mean(axis=0))))
    np.testing.assert_array_equal(*(run.reducer.num_bytes(run.like, N) for run in runs))
    assert left[0] < 0.95 * left[1]


def test_narrow_messages_lose_the_rounding_of_their_mean_and_nothing_else():
    run = Runner(functools.partial(one_sided(), wire_dtype="bfloat16"), "simulated", np.float32)  # pyright: ignore[reportArgumentType]
    sent, total = (jax.tree.map(lambda x: np.zeros(x.shape[1:]), gradients(0)) for _ in range(2))
    for step in range(STEPS):
        sent = jax.tree.map(lambda s, x: s + x[0], sent, run(gradients(step)))
        total = jax.tree.map(lambda s, x: s + x.mean(axis=0), total, gradients(step))
    for (name, view), e in zip(VIEWS.items(), run.state.error):
        np.testing.assert_allclose(sent[name].reshape(view) + np.asarray(e).mean(axis=0), total[name].reshape(view), atol=0.2)


@x64
def test_it_recovers_from_a_gradient_that_is_not_finite_and_from_zeros():
    run, other = Runner(one_sided(), "simulated"), Runner(one_sided(), "simulated")
    for step in range(4):
        if step == 2:
            poisoned = gradients(99)
            poisoned["a"][1, 2, 3] = np.nan
            before = jax.tree.map(np.asarray, run.state)
            assert not np.isfinite(run(poisoned)["a"]).any()
            jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, run.state))
        all_close(run(gradients(step)), other(gradients(step)), rtol=0, atol=0)
    idle = Runner(one_sided(), "simulated")
    idle(jax.tree.map(np.zeros_like, gradients(0)))
    assert all(np.abs(x).max() > 0.1 for x in idle(gradients(1)).values())


def test_impossible_options_are_refused():
    for options, told in ((dict(iterations=0), "iterations=0 must be at least 1"), (dict(rank=0), "rank=0 must be at least 1")):
        with pytest.raises(ValueError, match=told):
            reduce.powersgd_one_sided(**options)
