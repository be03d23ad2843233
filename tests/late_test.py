"""Gradients delayed by stage: against a dense reference, limits, a pipelined model, and refused configs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import lm
from decjax import config
from decjax.contrib.late import late_gradients
from decjax.mesh.axis import Axis
from tests.stand_ins import DenseAdam
from tests.tiny_runs import launch, losses, prepare, text  # noqa: F401  Fixtures.

pytestmark = pytest.mark.usefixtures("quick_compilation")
S, P, STEPS, LR = 3, 4, 12, 0.1
_rng = np.random.default_rng(0)
A = _rng.normal(size=(S * P, S * P)) / np.sqrt(S * P) + np.eye(S * P)
B, X0 = _rng.normal(size=S * P), _rng.normal(size=S * P)
STAGE = Axis("stage")


def trajectory(delay, inner):
    """Return [STEPS + 1, S, P]: S stages with P of the parameters of ½ ‖Ax − b‖² each."""
    tx = late_gradients(inner, S, STAGE, delay=delay) if delay else inner

    def step(x_P, state):
        x = jax.lax.all_gather(x_P, STAGE.name).reshape(-1)
        own = jax.lax.dynamic_slice_in_dim(A.T @ (A @ x - B), P * STAGE.index, P)
        updates, state = tx.update(own, state, x_P)
        return optax.apply_updates(x_P, updates), state

    mapped = functools.partial(jax.vmap, axis_name=STAGE.name)
    with jax.enable_x64(True):
        x, path = jnp.asarray(X0).reshape(S, P), []
        state = mapped(tx.init)(x)
        for _ in range(STEPS):
            path.append(x)
            x, state = jax.jit(mapped(step))(x, state)
        return np.stack([*path, x])


@pytest.mark.parametrize("delay", (1, 2))
def test_late_gradients_are_the_dense_reference(delay):
    """x_s(t + 1) = x_s(t) − α d(∇F(x(t − τ_s))_s) with Adam d, and no change before step τ_s = δ (S − 1 − s)."""
    xs, adams = [X0.reshape(S, P)], [DenseAdam() for _ in range(S)]
    for t in range(STEPS):
        x = xs[-1].copy()
        for s in range(S):
            if (seen := t - delay * (S - 1 - s)) >= 0:
                x[s] -= LR * adams[s]((A.T @ (A @ xs[seen].ravel() - B)).reshape(S, P)[s])
        xs.append(x)
    np.testing.assert_allclose(trajectory(delay, optax.adam(LR, b2=0.99)), xs, rtol=0, atol=1e-12)


def test_the_last_stage_is_not_late():
    late, at_once = trajectory(1, optax.sgd(LR)), trajectory(0, optax.sgd(LR))
    np.testing.assert_array_equal(late[1, -1], at_once[1, -1])
    np.testing.assert_array_equal(late[1, 0], X0[:P])


def test_delay_of_nothing_is_refused():
    with pytest.raises(ValueError, match="delay=0 must be at least 1"):
        late_gradients(optax.sgd(1.0), S, delay=0)


STAGED = "workers=2,simulate,stages=2,microbatches=2"
AVERAGED = "method=diloco(every={},outer_learning_rate=1.0,outer_momentum=0.0)"


@pytest.mark.parametrize(
    ("shorthand", "said"),
    (
        (f"{STAGED},delay=1,tied", "tied"),
        (f"{STAGED},delay=1,method=onebit_adam", "optimizer itself"),
        (f"{STAGED},delay=-1", "at least 0"),
        ("workers=2,simulate,delay=1", "stages=1"),
        (f"{STAGED},delay=20", "gradients come 20 steps late, so it would not change in steps=20"),
    ),
)
def test_what_cannot_be_late_is_refused(shorthand, said):
    with pytest.raises((ValueError, config.ConfigError), match=said):
        config.resolve(lm.get_config(f"smoke,{shorthand}"))


def test_pipelines_that_do_not_wait_train_and_average_every_few_steps(launch):
    """Ravnest's form; without delay and with an average in every step, plain SGD equals SGD on all-reduced gradients."""
    fields = {"model.depth": 2, "log_every": 1, "clip_norm": 0.0}
    ravnest, at_once, synchronous = (
        losses(launch(f"{STAGED},optimizer=sgd,{shorthand}", **fields)[0])
        for shorthand in (f"delay=1,{AVERAGED.format(4)}", AVERAGED.format(1), "method=allreduce")
    )
    np.testing.assert_allclose(at_once, synchronous, rtol=1e-5)
    assert np.isfinite(ravnest).all() and ravnest != synchronous
