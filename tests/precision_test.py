"""float32 and bfloat16 precision: every method on quadratics in float32 next to float64, and means that narrow dtypes must keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from configs import quadratics
import decjax
from decjax import channel, gossip, reduce, registry
from decjax import topology as topology_lib
from decjax.config import setup
from decjax.pipeline import stateless
from decjax.program import hlo
from decjax.train.step import at_rounded
from tests import quadratics as quadratic
from tests.runs import spec_of, trainer_of

N, P, STEPS = 8, 64, 60  # enough steps that the last one synchronizes
LONG = 20_000
pytestmark = pytest.mark.usefixtures("quick_compilation")
METHODS = [name for name in registry.names("method") if registry.part("method", name).factory.__module__.startswith("decjax.")]


def made(argument, steps, **fields):
    """Return the setup of a run on quadratics with N simulated workers, without noise, at a constant rate."""
    config = quadratics.get_config(f"smoke,simulate,workers={N},steps={steps},{argument}")
    constant = {"schedule.learning_rate": 0.05, "schedule.final_fraction": 1.0, "schedule.warmup_steps": 0}
    config.update_from_flattened_dict({"data.dimension": P, "data.noise": 0.0} | constant | fields)
    return spec_of(config).setup


def path(setup, steps, dtype, records=10):
    """Return (x_{N x records x P} during a run in the given dtype, the scale of the last parameters)."""
    method, narrow, (h_NxP, t_NxP) = setup.method, setup.spec.param_dtype, quadratics_of(setup)
    phases = [method.phase(step) for step in range(steps)]
    kinds = list(dict.fromkeys(phases))
    due = np.array([kinds.index(phase) for phase in phases], np.int32).reshape(records, -1)

    def one(phase, carry, h_P, t_P):
        params, state = carry
        seen = method.view(params, state) if method.view else params
        gradient = stateless(lambda params, batch, key: (0.0, {"x": (h_P * (params["x"] - t_P)).astype(params["x"].dtype)}))
        gradient = gradient if narrow == "float32" else at_rounded(gradient, narrow)
        updates, state = method.tx.update(gradient(seen, (), (), None)[1], state, params, phase=phase)
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
    """Return the workers' curvatures and targets, [N, P] each."""
    data = setup.task.load(N, 1, 0)
    return (np.stack(values) for values in zip(*([x[0] for x in data.batch(worker, 0)] for worker in range(N)), strict=True))


def error(argument, steps, **fields):
    """Return the largest error of float32 during a run ÷ the largest parameter."""
    setup = made(argument, steps, **fields)
    single, double = (path(setup, steps, dtype) for dtype in (np.float32, np.float64))
    return np.abs(single - double).max() / np.abs(double).max()


# -- Many steps -------------------------------------------------------------------------------------------------------


@pytest.fixture
def optimized():
    """Compile with all optimizations: this many steps take longer than their compilation."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def long_run(name):
    """Return the fields of a long run that settles in float64."""
    if name == "qg_dadam":
        # Its steps have norm 1 however near the optimum is, so with momentum it circles around the optimum forever, and rounding
        # changes its phase.
        return {"method.b1": 0.0, "data.heterogeneity": 0.0}
    if registry.part("method", name).traits.get("warm"):  # the variance is frozen while the gradient is still of its initial size
        return {"reducer.start": 50, "schedule.learning_rate": 0.005}
    return {}


def rounds(name):
    """Whether a codec rounds a method's messages by default."""
    return registry.parse("reducer", registry.part("method", name).traits.get("default_reducer", "mean"))[0] == "codec"


def exact_messages(chosen, averaging, channel, *others):
    return reduce.start_at(reduce.mean(channel), averaging.start, reduce.mean(channel))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", METHODS)
def test_float32_follows_float64(name, monkeypatch, steps=LONG):
    """With messages that are not rounded to few bits; the test below covers those."""
    if rounds(name):
        monkeypatch.setattr(setup, "make_reducer", exact_messages)
    assert error(f"method={name}", steps, **long_run(name)) < 1e-4


@pytest.mark.parametrize("name", ["decentralized", "streaming_diloco"])
def test_float32_follows_float64_for_a_while(name, monkeypatch):
    test_float32_follows_float64(name, monkeypatch, steps=1000)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", filter(rounds, METHODS))
def test_rounded_messages_lead_no_further_away_in_float32(name):
    """A value between two codes rounds to one of them in float32 and to the other in float64, after which the paths diverge; so
    they do in float64 if targets change by 1e-8. But neither path leaves the optimum, nor stays further from it than the other.
    """
    setup = made(f"method={name}", LONG, **long_run(name))
    h_NxP, t_NxP = (values.astype(np.float64) for values in quadratics_of(setup))
    optimum_P = (h_NxP * t_NxP).sum(axis=0) / h_NxP.sum(axis=0)
    away = lambda dtype: np.sqrt(((path(setup, LONG, dtype) - optimum_P) ** 2).mean(axis=(0, 2)))
    single, double = away(np.float32), away(np.float64)
    assert single[5:].mean() < 2 * single[:5].mean() and single.mean() < 2 * double.mean()


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_corrections_do_not_lose_the_optimum(graph):
    """The mean moved by every rounding error ever made: by 7e-3 of the parameters in these steps, and growing."""
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
    """Return (method, worker axis) as from a config, with a stateless optimizer."""
    setup = made(f"method={name}", STEPS)
    return setup.method, setup.workers


def traced(name, params, grads):
    """Return (the updates, the state before and after) of one step, as shapes."""
    method, w = parts(name)
    stacked = jax.eval_shape(lambda: w.stack(params))
    before = w.eval_shape(method.tx.init, (0,), stacked)
    update = functools.partial(method.tx.update, phase=method.phase(STEPS - 1))
    after = w.eval_shape(update, (0, 0, 0), jax.eval_shape(lambda: w.stack(grads)), before, stacked)
    return w.one_device(after[0]), before, after[1]


@pytest.mark.parametrize("name", sorted({*METHODS} - {"local"}))  # its state is the optimizer's
def test_states_keep_their_types_where_gradients_are_wider(name):
    """So that a step can be scanned, and a run continues. The state of optax's optimizers is not checked."""
    one = {"x": jnp.ones(P, jnp.bfloat16)}
    _, before, after = traced(name, one, {"x": jnp.ones(P, jnp.float32)})
    names = lambda tree: [(jax.tree_util.keystr(path), x.dtype) for path, x in jax.tree.leaves_with_path(tree)]
    own = lambda tree: [(name, dtype) for name, dtype in names(tree) if ".inner" not in name]
    assert own(after) == own(before)


# -- Means in bfloat16 ------------------------------------------------------------------------------------------------

MEAN = 3.09375
NARROW_STEPS = 500
STEP = 2.0**-6  # from one value of bfloat16 between 2 and 4 to the next
# The expected drift of the mean if every value is rounded once per step, up as often as down: a random walk.
WALK = float(jnp.finfo(jnp.bfloat16).eps) * 2 / np.sqrt(12) * np.sqrt(NARROW_STEPS / N) / MEAN


def narrow(size):
    """Values of N workers in bfloat16, and their mean."""
    x_NxP = jnp.asarray(MEAN + 0.25 * np.random.default_rng(0).normal(size=(N, size)), jnp.bfloat16)
    return x_NxP, np.asarray(x_NxP, np.float64).mean(axis=0)


def drift(means_KxP, mean_P):
    """Return the largest deviation of a mean from its start ÷ its size."""
    return np.linalg.norm(means_KxP - mean_P, axis=1).max() / np.linalg.norm(mean_P)


@pytest.mark.parametrize("name", [name for name, make in quadratic.mixers("int8").items() if make(channel.Channel()).keeps_mean])
def test_mixing_keeps_the_mean_of_narrow_values(name):
    """Memories start equal on all workers. With a codec of so few bits that values never settle, such as `exact` with four, they
    are rounded in every step, and drift by up to `WALK`.
    """
    w = quadratic.workers("simulated")
    mixer = quadratic.mixers("int8")[name](channel.Channel(w.axis))

    def whole(x_P):
        def step(carry, phase):
            params, state = gossip.mix(mixer, *carry, phase, 0)
            if mixer.settle:
                params, state = mixer.settle(params, params, state)
            weight = mixer.weight(state) if mixer.weight else 1.0
            return (params, state), jnp.append(quadratic.flat(params).astype(jnp.float32), weight)

        params = quadratic.tree(x_P)
        start = params, mixer.init(jax.tree.map(lambda x: jnp.full_like(x, MEAN), params))
        return quadratic.scanned(step, mixer, NARROW_STEPS)(start)[1]

    x_NxP, mean_P = narrow(quadratic.P)
    found = np.asarray(w.jit(whole, (0,))(x_NxP), np.float64)
    values, weights = found[..., :-1], found[..., -1:]
    assert drift((weights * values).sum(axis=0) / weights.sum(axis=0), mean_P) < 5e-3


def core_mixers():
    """The mixers of the core, and plain gossip over graphs with nodes and with an all-reduce."""
    of_core = lambda name: registry.part("mixer", name.partition(",")[0]).factory.__module__.startswith("decjax.gossip")
    graphs = {"ring": {}, "one_peer_exponential": {}, "complete": {}, "hierarchical": dict(local_size=2)}
    plain = {graph: functools.partial(topology_lib.make, graph, N, **options) for graph, options in graphs.items()}
    return {name: make for name, make in quadratic.mixers("int8").items() if of_core(name)} | {
        f"exact, {graph}": lambda channel, make=make: gossip.exact(make(), channel=channel) for graph, make in plain.items()
    }


@pytest.mark.parametrize("mode", quadratic.MODES)
@pytest.mark.parametrize("name", core_mixers())
def test_the_mean_of_bfloat16_parameters_moves_by_rounding_only(name, mode, steps=50):
    """In each step by at most the distance of two values; in all steps no further than a random walk."""
    w = quadratic.workers(mode)
    mixer = core_mixers()[name](channel.Channel(w.axis))

    def whole(x_P):
        def step(carry, phase):
            params, state = gossip.mix(mixer, *carry, phase, 0)
            if mixer.settle:
                params, state = mixer.settle(params, params, state)
            return (params, state), quadratic.flat(params).astype(jnp.float32)

        params = quadratic.tree(x_P)
        start = params, mixer.init(jax.tree.map(lambda x: jnp.full_like(x, MEAN), params))
        return quadratic.scanned(step, mixer, steps)(start)[1][:steps]

    x_NxP, mean_P = narrow(quadratic.P)
    found_NxKxP = np.asarray(w.jit(whole, (0,))(x_NxP), np.float64)
    assert all(np.array_equal(x, np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)) for x in found_NxKxP)
    means_KxP = np.concatenate([mean_P[None], found_NxKxP.mean(axis=0)])
    assert np.abs(np.diff(means_KxP, axis=0)).max() <= STEP
    assert drift(means_KxP, mean_P) < 2 * WALK * np.sqrt(steps / NARROW_STEPS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
@pytest.mark.parametrize("graph", [None, "complete", "hierarchical"])
def test_averages_of_sixteen_bits_are_summed_in_float32_and_sent_in_sixteen(graph, dtype):
    w, size = quadratic.workers("devices"), 40
    # A sum of 16 bits loses the small values that follow the large one.
    x_NxP = np.random.default_rng(0).uniform(1, 2, (N, size)) * np.where(np.arange(N) == 0, 300, 1)[:, None]
    x_NxP, params = jnp.asarray(x_NxP, dtype), jax.ShapeDtypeStruct((size,), dtype)
    if graph:
        topology = topology_lib.make(graph, N, **({"local_size": 2} if graph == "hierarchical" else {}))
        mixer, W_NxN = gossip.exact(topology, channel.Channel(w.axis)), topology.matrix(0)
        average, declared_N = (lambda x_P: mixer.exchange(x_P, (), 0)[0]), mixer.num_bytes(params, 0)
    else:
        reducer, W_NxN = reduce.mean(channel.Channel(w.axis)), np.full((N, N), 1 / N)
        average, declared_N = (lambda x_P: reducer.reduce(x_P, ())[0]), reducer.num_bytes(params, N)
    program = w.jit(average, (0,)).lower(x_NxP).compile()
    eps = float(jnp.finfo(dtype).eps)
    roundings = 2 if graph == "hierarchical" else 1  # of the mean of a node, which is sent, and of the result
    np.testing.assert_allclose(
        np.asarray(program(x_NxP), np.float64), W_NxN @ np.asarray(x_NxP, np.float64), rtol=roundings * eps / 2 * 1.01
    )
    np.testing.assert_allclose(hlo.bytes_sent(program.as_text(), N), declared_N, rtol=1e-12)


def test_an_outer_step_rounds_bfloat16_parameters_once():
    """The anchor moves by α((1 + μ) Δ), with Δ rounded when it is sent; arithmetic of 16 bits would round four times."""
    w = quadratic.workers("devices")
    tx = decjax.local_updates(optax.sgd(1.0), reduce.mean(channel.Channel(w.axis)), optax.sgd(0.7, 0.9, nesterov=True))

    def step(x_P, g_P):
        updates, state = tx.update({"x": g_P}, tx.init({"x": x_P}), {"x": x_P}, phase=0)
        return optax.apply_updates({"x": x_P}, updates)["x"], state

    rng = np.random.default_rng(0)
    x_NxP = jnp.asarray(np.broadcast_to(rng.uniform(1, 2, P), (N, P)), jnp.bfloat16)
    g_NxP = jnp.asarray(rng.uniform(0.1, 0.2, (N, P)), jnp.bfloat16)
    found_NxP, state = w.jit(step, (0, 0))(x_NxP, g_NxP)
    change_NxP = np.asarray(x_NxP - (x_NxP - g_NxP), np.float64)  # of the parameters by a step, in 16 bits
    expected_P = np.asarray(x_NxP, np.float64)[0] - 0.7 * 1.9 * np.asarray(
        jnp.asarray(change_NxP.mean(axis=0), jnp.bfloat16), np.float64
    )
    np.testing.assert_allclose(np.asarray(found_NxP, np.float64), np.tile(expected_P, (N, 1)), rtol=2**-8 * 1.01)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("name, size", [("decentlam", 0), ("decentlam", 1), ("qg_dsgdm", 0), ("qg_dsgdm", 1), ("gossip_diloco", 0)])
def test_momenta_of_what_mixing_changes_do_not_add_up_roundings(name, size):
    """Neither mixing errors nor those of the step before: with gradients that cancel, QG-DSGDm's mean once moved by 43 %."""
    method, w = (setup := made(f"method={name}", NARROW_STEPS)).method, setup.workers
    phases = [method.phase(step) for step in range(NARROW_STEPS)]
    kinds = list(dict.fromkeys(phases))

    def whole(x_P, g_P):
        def one(phase, carry):
            params, state = carry
            updates, state = method.tx.update({"x": g_P}, state, params, phase=phase)
            return optax.apply_updates(params, updates), state

        def step(carry, due):
            carry = jax.lax.switch(due, [functools.partial(one, phase) for phase in kinds], carry)
            return carry, carry[0]["x"].astype(jnp.float32)

        params = {"x": x_P}
        return jax.lax.scan(step, (params, method.tx.init(params)), np.array(list(map(kinds.index, phases))))[1]

    x_NxP, mean_P = narrow(P)
    half_NxP = size * np.random.default_rng(1).normal(size=(N // 2, P))
    g_NxP = jnp.asarray(np.concatenate([half_NxP, -half_NxP]), jnp.bfloat16)
    means_KxP = np.asarray(w.jit(whole, (0, 0))(x_NxP, g_NxP), np.float64).mean(axis=0)
    assert drift(means_KxP, mean_P) < 2 * WALK


# -- A float32 master copy of bfloat16 parameters ---------------------------------------------------------------------

MASTERED = [
    *(
        f"mixer={name}"
        for name in ("exact", "exact,order=atc", "exact,topology=complete", "exact,topology=hierarchical,local_size=2")
    ),
    *(
        "mixer=choco",
        "mixer=dcd",
        "mixer=beer",
        "method=local",
        "method=diloco,every=5",
        "method=allreduce",
        "method=allreduce,stale",
    ),
    *("method=exact_diffusion", "method=slowmo_gossip"),
]


@pytest.mark.parametrize("argument", MASTERED)
def test_a_master_copy_follows_float32_within_a_rounding(argument):
    found, expected = (path(made(argument, STEPS, param_dtype=dtype), STEPS, np.float32) for dtype in ("bfloat16", "float32"))
    eps, scale = float(jnp.finfo(jnp.bfloat16).eps), np.abs(expected).max()
    assert 0 < np.abs(found - expected).max() < eps * scale
    assert np.abs(found.mean(axis=0) - expected.mean(axis=0)).max() < eps / 4 * scale


def moved(argument, steps=10, **fields):
    """Return how far the workers' mean moves in a few tiny steps from 3, and what a worker has sent in each."""
    config = quadratics.get_config(f"smoke,simulate,workers={N},steps={steps},{argument}")
    config.update_from_flattened_dict(
        {"schedule.learning_rate": 1e-5, "schedule.final_fraction": 1.0, "data.dimension": P} | fields
    )
    trainer = trainer_of(config)
    state = trainer.start({"x": jnp.full(P, 3.0)})
    for step in range(steps):
        program = trainer.program(state, trainer.batch(step), step)
        state, _ = trainer.take(program, state, trainer.batch(step), step)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    return np.asarray(state.params["x"], np.float64).mean(axis=0) - 3, program.sent["worker"][0]


@pytest.mark.parametrize("argument", ["topology=ring", "method=allreduce", "method=diloco,every=2"])
def test_a_master_copy_keeps_updates_that_bfloat16_loses(argument):
    (found_P, sent), (expected_P, sent_wide) = (moved(argument, param_dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert 1e-5 < np.abs(expected_P).max() < 2e-3  # The values next to 3 are 1.6e-2 away.
    np.testing.assert_allclose(found_P, expected_P, rtol=0, atol=0.02 * np.abs(expected_P).max())
    assert sent == sent_wide / 2


def test_bfloat16_alone_loses_them():
    tx, params = optax.sgd(1e-5), {"x": jnp.full(P, 3.0, jnp.bfloat16)}
    updates, _ = tx.update({"x": jnp.ones(P, jnp.bfloat16)}, tx.init(params), params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["x"], params["x"])


@pytest.mark.parametrize("mode", quadratic.MODES)
@pytest.mark.parametrize("graph", ["ring", "one_peer_exponential", "complete", "hierarchical"])
def test_float32_that_travels_in_bfloat16_is_mixed_and_keeps_its_mean(graph, mode, steps=60):
    """Until all values are as close as two of bfloat16."""
    w, topology = quadratic.workers(mode), topology_lib.make(graph, N, **({"local_size": 2} if graph == "hierarchical" else {}))
    mixer = gossip.exact(topology, channel.Channel(w.axis, dtype="bfloat16"))
    mixed = lambda params: quadratic.scanned(lambda x, phase: (mixer.exchange(x, (), phase)[0], jnp.zeros(())), mixer, steps)(
        params
    )[0]
    x_NxP = np.float32(MEAN + 0.25 * np.random.default_rng(0).normal(size=(N, P)))
    found_NxP = np.asarray(w.jit(mixed, (0,))({"x": x_NxP})["x"])
    assert found_NxP.dtype == np.float32
    np.testing.assert_allclose(found_NxP.mean(axis=0, dtype=np.float64), x_NxP.mean(axis=0, dtype=np.float64), rtol=1e-6)
    assert np.abs(found_NxP - found_NxP.mean(axis=0)).max() < 2 * STEP
    if mode == "devices":
        program = w.jit(lambda params: mixer.exchange(params, (), 0)[0], (0,)).lower({"x": x_NxP}).compile()
        declared_N = mixer.num_bytes({"x": jax.ShapeDtypeStruct((P,), np.float32)}, 0)
        np.testing.assert_allclose(hlo.bytes_sent(program.as_text(), N), declared_N, rtol=1e-12)


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
