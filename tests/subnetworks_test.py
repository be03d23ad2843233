"""Independent subnetwork training: against a dense reference, the assignment of units, its fixed point, and refused configs."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits, quadratics
from decjax import config, mesh, reduce
from decjax.channel import Channel
from decjax.contrib import subnetworks
from tests.outer import LR, STEPS, A, B, N
from tests.runs import run_of
from tests.stand_ins import DenseAdam

P, EVERY, SEED = 8, 3, 5
START = np.random.default_rng(2).normal(size=P)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def owners(round_, units=P, workers=N):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), round_), units)
    return np.asarray(jax.random.permutation(key, units)) % workers


@functools.cache
def workers(mode):
    return mesh.make_workers(N, simulate=mode == "simulated")


def trajectory(mode, inner, every=EVERY, steps=STEPS):
    """Return [steps + 1, N, P]: N workers with ½ ‖A_i x − b_i‖² each, all of whose coordinates are units."""
    w = workers(mode)
    with jax.enable_x64(True):
        channel = Channel(w.axis, seed=SEED)
        method = subnetworks.IndependentSubnetworks(
            inner, reduce.mean(channel), N, channel=channel, units=(("x", -1),), every=every
        )

        def step(params, state, data, *, phase):
            a_PxP, b_P = data
            seen = method.view(params, state)["x"]
            updates, state = method.tx.update({"x": a_PxP.T @ (a_PxP @ seen - b_P)}, state, params, phase=phase)
            return optax.apply_updates(params, updates), state

        params = w.stack({"x": jnp.asarray(START)})
        state = w.jit(method.tx.init, (0,))(params)
        compiled, path = {}, [np.asarray(params["x"])]
        for t in range(steps):
            phase = method.phase(t)
            if phase not in compiled:
                compiled[phase] = w.jit(functools.partial(step, phase=phase), (0, 0, 0))
            params, state = compiled[phase](params, state, (A, B))
            path.append(np.asarray(params["x"]))
        assert all(fn._cache_size() == 1 for fn in compiled.values()), "a second call recompiled"
    return np.stack(path)


@pytest.mark.parametrize("mode", ("devices", "simulated"))
def test_it_is_the_dense_reference(mode):
    x, anchor, path = np.tile(START, (N, 1)), START, [np.tile(START, (N, 1))]
    adam = DenseAdam()
    for t in range(STEPS):
        mine = owners(t // EVERY) == np.arange(N)[:, None]
        residual = np.einsum("nij,nj->ni", A, mine * x) - B
        x = x - LR * mine * adam(mine * np.einsum("nji,nj->ni", A, residual))
        if (t + 1) % EVERY == 0:
            anchor = anchor + (x - anchor).sum(axis=0)
            x = np.tile(anchor, (N, 1))
        path.append(x)
    np.testing.assert_allclose(trajectory(mode, optax.adam(LR, b2=0.99)), path, rtol=0, atol=1e-11)


def test_every_unit_is_trained_once_a_round():
    path = trajectory("simulated", optax.sgd(0.01))
    for round_ in range(STEPS // EVERY):
        moved = path[EVERY * round_ + EVERY - 1] != path[EVERY * round_]
        np.testing.assert_array_equal(moved, owners(round_) == np.arange(N)[:, None])
        assert (moved.sum(axis=0) == 1).all()


def test_a_layer_with_fewer_units_than_workers_is_refused():
    with pytest.raises(config.ConfigError, match="with workers=16: the hidden units of a layer=.* must be at least 16"):
        config.resolve(quadratics.get_config("method=ist,smoke"))


def test_a_model_without_units_is_refused():
    with pytest.raises(config.ConfigError, match="needs a model with hidden units"):
        config.resolve(digits.get_config("method=ist,model=resnet"))


def test_a_perceptron_learns_the_digits(tmp_path):
    given = digits.get_config("method=ist(every=10),model=mlp,workers=4,simulate,steps=200")
    run_of(given, tmp_path / "run").train()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval_accuracy"] > 0.9
