"""optax's own tools with these transformations: injected hyperparameters, maps over states, skipped steps, dtypes."""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decjax
from decjax import gossip, mesh, optim, reduce, registry
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.contrib import corrections, mixers, onebit, outer
from decjax.contrib.gravac import gravac

N, DIM, STEPS, LR = 4, 3, 6, 0.05
MODES = ("devices", "simulated")
RING = topology_lib.make("ring", N)
TARGET = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)
pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def workers(mode="devices"):
    return mesh.make_workers(N, simulate=mode == "simulated")


def path(tx, mode="devices", phases=lambda step: 0, bad=None):
    """Return x_{STEPS+1 x N x DIM} of ½ ‖x − target_i‖²; in step `bad`, the gradient of worker 1 is NaN."""
    w = workers(mode)

    @functools.cache
    def program(phase):
        def step(params, state, target, noise):
            grads = {"x": params["x"] - target + noise}
            updates, state = tx.update(grads, state, params, phase=phase)
            return optax.apply_updates(params, updates), state

        return w.jit(step, (0, 0, 0, 0))

    params = w.stack({"x": jnp.ones(DIM)})
    state = w.jit(tx.init, (0,))(params)
    found = [np.asarray(params["x"])]
    for t in range(STEPS):
        noise = np.zeros((N, 1), np.float32)
        noise[1] = np.nan if t == bad else 0
        params, state = jax.block_until_ready(program(phases(t))(params, state, TARGET, noise))
        found.append(np.asarray(params["x"]))
    return np.stack(found)


# -- Injected hyperparameters, dtypes ---------------------------------------------------------------------------------


def test_injected_hyperparameters_train_alike():
    """Including the window, which is then traced."""
    mixer = gossip.exact(RING)
    for make, given in (
        (decjax.decentralized_adam, dict(mixer=mixer, b2=0.99)),
        (decjax.decentralized_adamw, dict(mixer=mixer, weight_decay=0.1, nesterov=True)),
    ):
        np.testing.assert_allclose(path(optax.inject_hyperparams(make)(LR, **given)), path(make(LR, **given)), rtol=1e-5)
    for make, given in ((decjax.accumulated_adam, dict(window=3)), (decjax.accumulated_adamw, dict(window=2, weight_decay=0.1))):
        injected = optax.inject_hyperparams(make)(optax.linear_schedule(LR, LR, 1), **given)
        np.testing.assert_allclose(
            path(decjax.decentralize(injected, mixer)), path(decjax.decentralize(make(LR, **given), mixer)), rtol=1e-5
        )
    with pytest.raises(ValueError, match="window=0 steps"):
        decjax.accumulated_adam(LR, window=0)


def test_the_first_moment_of_accumulated_adam_has_the_dtype_that_is_asked_for():
    params, grads = {"x": jnp.ones(DIM), "steps": jnp.int32(5)}, {"x": jnp.ones(DIM), "steps": jnp.int32(0)}
    tx, plain = (decjax.accumulated_adam(LR, window=1, mu_dtype=dtype) for dtype in ("bfloat16", None))
    reference = optax.adam(LR, mu_dtype="bfloat16")
    states = [t.init(params) for t in (tx, plain, reference)]
    for _ in range(3):
        found = [t.update(grads, state, params) for t, state in zip((tx, plain, reference), states)]
        states = [state for _, state in found]
        assert (states[0][0].mu["x"].dtype, states[0][0].nu["x"].dtype) == (jnp.bfloat16, jnp.float32)
        assert states[1][0].mu["x"].dtype == jnp.float32
        np.testing.assert_allclose(found[0][0]["x"], found[2][0]["x"], rtol=1e-2)
        assert optax.apply_updates(params, found[0][0])["steps"] == 5, "counters are not stepped"


# -- Integers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_onebit_adam_leaves_integers_alone(mode):
    w = workers(mode)
    compressing = reduce.coded(Channel(w.axis), codec="int8")
    reducer = reduce.start_at(compressing, 2, reduce.mean(Channel(w.axis)))
    tx = optax.chain(onebit.scale_by_onebit_adam(reducer), optax.scale_by_learning_rate(LR))
    params = w.stack({"count": jnp.int32(7), "x": jnp.ones(DIM)})
    state = w.jit(tx.init, (0,))(params)

    def step(params, state, target, phase):
        grads = jax.grad(lambda p: 0.5 * jnp.sum((p["x"] - target) ** 2), allow_int=True)(params)
        updates, state = tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state

    for t in range(4):
        params, state = w.jit(functools.partial(step, phase=reducer.phase(t)), (0, 0, 0))(params, state, TARGET)
    assert (np.asarray(params["count"]) == 7).all() and params["count"].dtype == jnp.int32
    moved = np.asarray(params["x"])
    assert np.isfinite(moved).all() and np.ptp(moved, axis=0).max() == 0 and (moved != 1).all()


# -- Maps over states -------------------------------------------------------------------------------------------------


def transformations(axis):
    """Every wrapper, around memories in buckets and around none."""
    channel = Channel(axis)
    choco = gossip.choco(RING, channel, codec="int8")
    coded = reduce.coded(channel, codec="int8")
    powersgd = reduce.powersgd(channel, rank=1)
    late = reduce.start_at(coded, 1, reduce.mean(channel))
    return {
        "decentralize": decjax.decentralize(optax.adam(LR), choco),
        "decentralize, power": decjax.decentralize(optax.adam(LR), mixers.power_gossip(RING, channel, rank=1)),
        "decentralize, exact": decjax.decentralize(optax.adam(LR), gossip.exact(RING, channel)),
        "track": corrections.track(optax.adam(LR), choco),
        "synchronize": decjax.synchronize(optax.adam(LR), powersgd, stale=True),
        "synchronize, gravac": decjax.synchronize(optax.adam(LR), gravac(channel, ladder="int8")),
        "local_updates": decjax.local_updates(optax.adam(LR), reduce.every(coded, 2), optax.sgd(1.0, momentum=0.9)),
        "onebit": onebit.scale_by_onebit_adam(late),
    }


@pytest.mark.parametrize("name", transformations(mesh.SIMULATED))
def test_maps_over_states_find_what_is_shaped_like_parameters(name):
    w = workers("simulated")
    tx = transformations(w.axis)[name]
    params = w.stack({"x": jnp.ones((8, 8))})
    state = w.jit(tx.init, (0,))(params)
    doubled = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)
    for (where, before), after in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(doubled)):
        mapped = jax.tree_util.keystr(where[-1:]) == "['x']"  # the only leaves with the parameters' own keys
        np.testing.assert_array_equal(after, before + 1 if mapped else before)
    specs = optax.tree.map_params(tx, lambda x, spec: spec, state, {"x": "params"}, transform_non_params=lambda x: "other")
    leaves = set(jax.tree.leaves(specs))
    assert leaves == {"params", "other"}


@pytest.mark.parametrize("name", ["decentralize", "track", "local_updates"])
def test_an_update_without_the_parameters_it_needs_is_refused(name):
    tx, w = transformations(mesh.SIMULATED)[name], workers("simulated")
    with pytest.raises(ValueError, match=r"params=None, .* call update\(grads, state, params\)"):
        jax.eval_shape(w.map(lambda x: tx.update(x, tx.init(x)), (0,)), w.stack({"x": jnp.ones((8, 8))}))


# -- Steps left out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", optim.ORDERS)
def test_a_worker_leaves_out_its_own_step_and_mixes_on(mode, order):
    mixer = gossip.exact(RING, Channel(workers(mode).axis))
    found = path(decjax.decentralize(decjax.apply_if_finite(optax.sgd(LR), 5), mixer, order), mode, bad=2)
    W, x = RING.matrix(0), np.ones((N, DIM))
    for t in range(STEPS):
        step = LR * (x - TARGET)
        step[1] = 0 if t == 2 else step[1]
        x = W @ x - step if order == "awc" else W @ (x - step)
        np.testing.assert_allclose(found[t + 1], x, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_an_average_that_is_not_finite_is_left_out_by_all(mode):
    reducer = reduce.mean(Channel(workers(mode).axis))
    found = path(decjax.synchronize(decjax.apply_if_finite(optax.sgd(LR), 5), reducer), mode, bad=2)
    x = np.ones(DIM)
    for t in range(STEPS):
        x = x - (LR * (x - TARGET.mean(axis=0)) if t != 2 else 0)
        np.testing.assert_allclose(found[t + 1], np.tile(x, (N, 1)), atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_local_steps_are_left_out_by_one(mode):
    reducer = reduce.every(reduce.mean(Channel(workers(mode).axis)), 3)
    found = path(
        decjax.local_updates(decjax.apply_if_finite(optax.sgd(LR), 5), reducer, optax.sgd(1.0)), mode, phases=reducer.phase, bad=1
    )
    x = np.ones((N, DIM))
    for t in range(STEPS):
        step = LR * (x - TARGET)
        step[1] = 0 if t == 1 else step[1]
        x = x - step
        x = np.tile(x.mean(axis=0), (N, 1)) if t % 3 == 2 else x
        np.testing.assert_allclose(found[t + 1], x, atol=1e-6)


def test_steps_are_not_left_out_from_outside():
    params = {"x": jnp.ones(DIM)}
    mixer = gossip.exact(RING)
    for tx, name in (
        (decjax.decentralize(optax.sgd(LR), mixer), "DecentralizeState"),
        (optax.chain(optax.clip(1.0), decjax.synchronize(optax.sgd(LR), reduce.mean())), "SynchronizeState"),
        (corrections.track(optax.sgd(LR), mixer), "TrackState"),
        (decjax.local_updates(optax.sgd(LR), reduce.every(reduce.mean(), 2), optax.sgd(1.0)), "LocalUpdatesState"),
        (onebit.scale_by_onebit_adam(reduce.start_at(reduce.mean(), 1, reduce.mean())), "OnebitAdamState"),
        (outer.SlowMo(optax.sgd(LR), reduce.mean(), N, learning_rate=lambda step: LR).tx, "SlowMoState"),
        (outer.GossipDiLoCo(optax.sgd(LR), mixer).tx, "GossipOuterState"),
        (outer.StreamingDiLoCo(optax.sgd(LR), reduce.mean(), N, fragments=1).tx, "StreamingState"),
        (
            onebit.ZeroOneAdam(
                reduce.start_at(reduce.mean(), 1, reduce.mean()), N, learning_rate=lambda step: LR, clip=optax.identity()
            ).tx,
            "ZeroOneAdamState",
        ),
    ):
        with pytest.raises(ValueError, match=f"{name}.*put it inside"):
            decjax.apply_if_finite(tx, 5).init(params)


def test_a_user_s_optimizer_may_mark_a_field_and_be_left_out():
    """A mark says what a change of workers resets, not who communicates."""

    @optim.transient("last")
    class LastState(NamedTuple):
        last: Any

    own = optax.GradientTransformation(LastState, lambda grads, state, params=None: (grads, LastState(grads)))
    params, grads = {"x": jnp.ones(DIM)}, {"x": jnp.full(DIM, jnp.nan)}
    tx = decjax.apply_if_finite(own, 5)
    updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal((updates["x"], state.inner_state.last["x"]), (np.zeros(DIM), params["x"]))


def test_an_optimizer_alone_is_not_given_the_phase():
    own = optax.GradientTransformationExtraArgs(lambda params: (), lambda grads, state, params=None, **extra: (grads, extra))
    _, seen = optim.Local(own, num_workers=N).tx.update({}, (), {}, phase=0, value=1.0)
    assert seen == {"value": 1.0}


def test_sign_descent_decays_weights_by_themselves_and_not_within_the_sign():
    """x ← x − α (sign(g) + λ x)."""
    tx = registry.make("optimizer", "sign", learning_rate=optax.constant_schedule(0.1), weight_decay=0.5)
    params = jnp.array([2.0, -1.0, 4.0])
    updates, _ = tx.update(jnp.array([3.0, -1e-3, 0.0]), tx.init(params), params)
    np.testing.assert_allclose(updates, [-0.2, 0.15, -0.2], rtol=1e-6)


def test_options_of_optax_have_the_ranges_that_are_known():
    """Decay rates, λ and ε get a range, and other numbers keep their annotation."""
    options = {name: option.range for name, option in registry.part("optimizer", "rmsprop").options.items()}
    assert str(options["momentum"]) == "at least 0 and less than 1" and str(options["eps"]) == "at least 0"
    assert options["initial_scale"] is None
    original = inspect.signature(optax.rmsprop).parameters["initial_scale"].annotation
    assert inspect.signature(registry.part("optimizer", "rmsprop").factory).parameters["initial_scale"].annotation == original
