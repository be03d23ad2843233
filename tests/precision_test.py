"""What float32 and bfloat16 lose: every method on quadratics in float32 next to float64, and means that narrow values must keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from configs import quadratics
import decjax
from decjax import gossip, reduce, registry
from decjax import topology as topology_lib
from decjax.config import assemble
from tests.runs import spec_of

N, P, STEPS = 8, 64, 60  # so many steps that the last one synchronizes
pytestmark = pytest.mark.usefixtures("quick_compilation")
METHODS = [name for name in registry.names("method") if registry.part("method", name).factory.__module__.startswith("decjax.")]


def made(argument, steps, **fields):
    """The setup of a run on quadratics with N simulated workers, without noise, at a constant rate."""
    config = quadratics.get_config(f"smoke,simulate,workers={N},steps={steps},{argument}")
    constant = {"schedule.learning_rate": 0.05, "schedule.final_fraction": 1.0, "schedule.warmup_steps": 0}
    config.update_from_flattened_dict({"data.dimension": P, "data.noise": 0.0} | constant | fields)
    return assemble.on_paper(spec_of(config))


def path(setup, steps, dtype, records=10):
    """(parameters x_{N x records x P} in the course of a run in the given type, the scale of the last of them)."""
    method, (h_NxP, t_NxP) = setup.method, quadratics_of(setup)
    phases = [method.phase(step) for step in range(steps)]
    kinds = list(dict.fromkeys(phases))
    due = np.array([kinds.index(phase) for phase in phases], np.int32).reshape(records, -1)

    def one(phase, carry, h_P, t_P):
        params, state = carry
        seen = method.view(params, state) if method.view else params
        updates, state = method.tx.update({"x": h_P * (seen["x"] - t_P)}, state, params, phase=phase)
        return optax.apply_updates(params, updates), state

    def whole(h_P, t_P):
        steps = [functools.partial(one, phase, h_P=h_P, t_P=t_P) for phase in kinds]

        def record(carry, due):
            carry, _ = jax.lax.scan(lambda carry, k: (jax.lax.switch(k, steps, carry), None), carry, due)
            return carry, carry[0]["x"]

        start = {"x": jnp.zeros(P, dtype)}
        return jax.lax.scan(record, (start, method.tx.init(start)), due)[1]

    with jax.enable_x64(dtype == np.float64):
        found = np.asarray(setup.workers.jit(whole, (0, 0))(h_NxP.astype(dtype), t_NxP.astype(dtype)))
    assert found.dtype == dtype
    return found.astype(np.float64)


def quadratics_of(setup):
    """The workers' curvatures and targets, [N, P] each."""
    data = setup.task.load(N, 1, 0)
    return (np.stack(values) for values in zip(*([x[0] for x in data.batch(worker, 0)] for worker in range(N)), strict=True))


def error(argument, steps, **fields):
    """The largest error of float32 in the course of a run ÷ the largest parameter."""
    setup = made(argument, steps, **fields)
    single, double = (path(setup, steps, dtype) for dtype in (np.float32, np.float64))
    return np.abs(single - double).max() / np.abs(double).max()


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_corrections_do_not_lose_the_optimum(graph):
    """The mean moved by all that was ever rounded: by 7e-3 of the parameters in these steps, and further and further."""
    assert error(f"method=exact_diffusion,topology={graph}", 2000) < 2e-5


def test_d2_does_not_lose_the_optimum():
    assert error("method=d2,topology=line", 2000) < 2e-5


@pytest.mark.parametrize(
    "argument", ["method=exact_diffusion,topology=ring", "method=d2,topology=line", "method=d2,topology=complete"]
)
def test_without_gradients_corrections_leave_equal_workers_in_place(argument):
    method, w = (setup := made(argument, 50)).method, setup.workers
    start = {"x": jnp.asarray(3 * np.random.default_rng(0).normal(size=P), jnp.float32)}

    def whole(params):
        def step(carry, _):
            params, state = carry
            updates, state = method.tx.update(jax.tree.map(jnp.zeros_like, params), state, params, phase=0)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, method.tx.init(params)), length=50)[0][0]

    found = w.jit(whole, (0,))(w.stack(start))
    np.testing.assert_array_equal(found["x"], np.broadcast_to(start["x"], (N, P)))


# -- Types ------------------------------------------------------------------------------------------------------------


def parts(name):
    """(method, worker axis) as of a config, with an optimizer without state."""
    setup = made(f"method={name}", STEPS)
    return setup.method, setup.workers


def traced(name, params, grads):
    """(the updates, the state before and after) of one step, as shapes."""
    method, w = parts(name)
    stacked = jax.eval_shape(lambda: w.stack(params))
    before = w.eval_shape(method.tx.init, (0,), stacked)
    update = functools.partial(method.tx.update, phase=method.phase(STEPS - 1))
    after = w.eval_shape(update, (0, 0, 0), jax.eval_shape(lambda: w.stack(grads)), before, stacked)
    return w.one_device(after[0]), before, after[1]


@pytest.mark.parametrize("name", sorted({*METHODS} - {"local"}))  # Its state is the optimizer's.
def test_states_keep_their_types_where_gradients_are_wider(name):
    """So that a step can be scanned, and a run continues. What the state of optax's optimizers does is theirs."""
    one = {"x": jnp.ones(P, jnp.bfloat16)}
    _, before, after = traced(name, one, {"x": jnp.ones(P, jnp.float32)})
    names = lambda tree: [(jax.tree_util.keystr(path), x.dtype) for path, x in jax.tree.leaves_with_path(tree)]
    own = lambda tree: [(name, dtype) for name, dtype in names(tree) if ".inner" not in name]
    assert own(after) == own(before)


def test_windows_of_accumulated_adam_keep_their_type():
    tx, params = decjax.accumulated_adam(0.1, window=3), {"x": jnp.ones(P, jnp.bfloat16)}
    state = tx.init(params)
    _, after = tx.update({"x": jnp.ones(P, jnp.float32)}, state, params)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


@pytest.mark.parametrize("name", METHODS)
def test_masks_and_counters_are_left_alone(name):
    rest = {"mask": jnp.array([True, False]), "count": jnp.arange(3)}
    method, w = parts(name)
    params = w.stack({"x": jnp.ones(P)} | rest)
    state = w.jit(method.tx.init, (0,))(params)

    def step(params, state):
        updates, state = method.tx.update(jax.tree.map(jnp.zeros_like, params), state, params, phase=method.phase(STEPS - 1))
        return optax.apply_updates(params, updates), state

    after, _ = w.jit(step, (0, 0))(params, state)
    for key, value in rest.items():
        np.testing.assert_array_equal(after[key], np.broadcast_to(value, (N, *value.shape)))
        assert after[key].dtype == value.dtype


def test_an_optimizer_with_a_copy_of_the_parameters_is_refused_where_these_are_mixed():
    mixer, inner = gossip.exact(topology_lib.make("ring", N)), optax.contrib.schedule_free_sgd(0.1)
    for tx in (decjax.decentralize(inner, mixer), decjax.local_updates(inner, reduce.mean(), optax.sgd(1.0))):
        with pytest.raises(ValueError, match="schedule_free keeps a copy of the parameters, z, .*; use method 'allreduce'"):
            tx.init({"x": jnp.ones(P)})
    decjax.synchronize(inner, reduce.mean()).init({"x": jnp.ones(P)})
