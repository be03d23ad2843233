"""PowerSGD against a dense NumPy reference written as in the paper, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import reduce
from decjax.channel import Channel
from tests.reducers import MODES, SHAPES, STEPS, N, Runner, all_close, assert_equal_replicas, gradients, mean_of, workers, x64

VIEWS = {"a": (6, 5), "b": (6, 5), "c": (6, 8)}
pytestmark = pytest.mark.usefixtures("quick_compilation")


class DensePowerSGD:
    """Algorithms 1 and 2 of arXiv 1905.13727, with every worker's own residual."""

    def __init__(self, state, rank):
        self.rank = rank
        self.q = [np.asarray(q[0], np.float64) for q in state.factor]
        self.e = {name: np.zeros((N, *view)) for name, view in VIEWS.items()}

    def __call__(self, grads_N):
        out = mean_of(grads_N)
        for k, (name, view) in enumerate(VIEWS.items()):
            a = grads_N[name].reshape(N, *view) + self.e[name]
            p, _ = np.linalg.qr(np.mean([m @ self.q[k] for m in a], axis=0))
            own = [m.T @ p for m in a]
            self.q[k] = np.mean(own, axis=0)
            self.e[name] = np.stack([m - p @ q.T for m, q in zip(a, own)])
            out[name] = np.broadcast_to((p @ self.q[k].T).reshape(SHAPES[name]), (N, *SHAPES[name]))
        return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [1, 2])
@x64
def test_powersgd_is_the_dense_reference(mode, rank):
    run = Runner(functools.partial(reduce.powersgd, rank=rank, gate=2.0), mode)
    dense = DensePowerSGD(run.state, rank)
    for step in range(STEPS):
        out = run(gradients(step))
        assert_equal_replicas(out)
        all_close(out, dense(gradients(step)), rtol=1e-6, atol=1e-9)
    for e, expected in zip(run.state.error, dense.e.values()):
        np.testing.assert_allclose(e, expected, rtol=1e-6, atol=1e-9)


@x64
def test_powersgd_of_full_rank_is_the_mean():
    run = Runner(functools.partial(reduce.powersgd, rank=8, gate=np.inf))
    for step in range(5):
        all_close(run(gradients(step)), mean_of(gradients(step)), atol=1e-12)


@pytest.mark.parametrize("wire_dtype", [None, "bfloat16", "float16"])
def test_powersgd_delivers_everything_in_the_end(wire_dtype):
    """Σ sent + e = Σ g on the mean over workers; narrow messages lose only the rounding of their mean."""
    run = Runner(functools.partial(reduce.powersgd, rank=1, gate=2.0, wire_dtype=wire_dtype), dtype=np.float32)
    sent, total = (jax.tree.map(lambda x: np.zeros(x.shape[1:]), gradients(0)) for _ in range(2))
    for step in range(STEPS):
        out = run(gradients(step))
        assert_equal_replicas(out)
        sent = jax.tree.map(lambda s, x: s + x[0], sent, out)
        total = jax.tree.map(lambda s, x: s + x.mean(axis=0), total, gradients(step))
    error = {name: np.asarray(e).mean(axis=0).reshape(SHAPES[name]) for name, e in zip(VIEWS, run.state.error)}
    for name in VIEWS:
        np.testing.assert_allclose(sent[name] + error[name], total[name], atol=1e-4 if wire_dtype is None else 0.2)
        assert np.abs(total[name] - sent[name]).max() > 0.3, "without the error nothing would be tested"


def test_powersgd_errors_stay_bounded():
    """Over 3,000 steps; the residual of the average, as in PyTorch's hook, would grow like √t."""
    w = workers("simulated")
    reducer = reduce.powersgd(rank=1, gate=np.inf, channel=Channel(w.axis))
    common = jax.random.normal(jax.random.key(1), (4, 4))

    def worker(worker_key):
        def step(state, t):
            grads = {"w": common + jax.random.normal(jax.random.fold_in(worker_key, t), (4, 4))}
            _, state = reducer.reduce(grads, state)
            return state, jnp.linalg.norm(state.error[0])

        return jax.lax.scan(step, reducer.init({"w": common}), jnp.arange(3000))[1]

    norms_NxT = np.asarray(w.jit(worker, in_axes=(0,))(jax.random.split(jax.random.key(0), N)))
    early, late = norms_NxT[:, 100:600].mean(), norms_NxT[:, 2500:].mean()
    assert late < 1.1 * early, (early, late)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@x64
def test_powersgd_recovers_from_a_gradient_that_is_not_finite(bad):
    run, other = (Runner(functools.partial(reduce.powersgd, rank=2, gate=2.0)) for _ in range(2))
    for step in range(6):
        if step == 3:
            poisoned = gradients(99)
            poisoned["a"][1, 2, 3] = bad
            before = jax.tree.map(np.asarray, run.state)
            out = run(poisoned)
            assert not np.isfinite(out["a"]).any(), "what is not finite must not look as if it were"
            jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, run.state))
        all_close(run(gradients(step)), other(gradients(step)), rtol=0, atol=0)


@x64
def test_powersgd_recovers_from_gradients_of_zeros():
    run = Runner(functools.partial(reduce.powersgd, rank=2, gate=2.0))
    zeros = jax.tree.map(np.zeros_like, gradients(0))
    run(zeros)
    assert not any(np.asarray(q).any() for q in run.state.factor), "with Q = 0, A Q is zero for ever"
    rank_two = jax.tree.map(np.zeros_like, zeros)
    rng = np.random.default_rng(3)
    for name, (I, J) in VIEWS.items():
        product = rng.normal(size=(I, 2)) @ rng.normal(size=(2, J))
        rank_two[name] = np.broadcast_to(product.reshape(SHAPES[name]), rank_two[name].shape)
    all_close(run(rank_two), rank_two, atol=1e-9)


def test_powersgd_gates_arrays_that_would_not_get_smaller():
    like = {"square": (9, 9), "flat": (2, 40), "vector": (40,)}
    like = {name: jnp.zeros(shape) for name, shape in like.items()}
    assert len(reduce.powersgd(rank=4).init(like).error) == 1  # (9 + 9) 4 < 81
    assert len(reduce.powersgd(rank=1).init(like).error) == 2
    assert len(reduce.powersgd(rank=4, gate=0.8).init(like | {"large": jnp.zeros((20, 20))}).error) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(rank=0), "rank=0 must be at least 1"),
        (dict(gate=0.0), "gate=0.0 must be more than 0"),
        (dict(rank=99), "rank=99 makes no array smaller: the smaller sides of the matrices are at most 6; use a rank of at most 3"),
    ],
)
def test_impossible_powersgd_is_refused(options, message):
    like = jax.tree.map(lambda x: x[0], gradients(0))
    with pytest.raises(ValueError, match=message):
        reduce.powersgd(**options).init(like)


def test_powersgd_refuses_numbers_that_cannot_be_averaged():
    like = {"wide": jnp.zeros((8, 8), jnp.float8_e4m3fn)}
    with pytest.raises(ValueError, match="wide of type float8_e4m3fn cannot be averaged over workers.*use bfloat16"):
        reduce.powersgd(rank=1).init(like)
