"""The API for custom loops: one-line refusals with the value and the fix, and what it accepts."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decjax
from decjax import codecs, gossip, mesh, optim, reduce, registry, topology
from decjax.contrib import corrections, mixers

N = 4
DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(params=["devices", "simulated"])
def workers(request):
    return decjax.make_workers(N, simulate=request.param == "simulated")


def simulated():
    return decjax.make_workers(N, simulate=True)


def ring(size=N):
    return gossip.exact(topology.make("ring", size))


def sgd(mixer):
    return decjax.decentralize(optax.sgd(0.1), mixer)


def trained(workers, tx, schedule, steps=1, targets=None):
    """Return the parameters of all workers after some steps from 0 on a quadratic loss with minimum i on worker i."""

    def fn(params, state, target, *, phase):
        updates, state = tx.update(jax.tree.map(lambda x: x - target, params), state, params, phase=phase)
        return optax.apply_updates(params, updates), state

    take = decjax.make_step(fn, workers, schedule)
    params = workers.stack(jnp.zeros((32, 32)))
    state = workers.jit(tx.init, (0,))(params)
    for number in range(steps):
        params, state = take(number, params, state, jnp.arange(float(N)))
    return workers.fetch(params)


WRONG = {
    "topology as a word": (lambda: gossip.exact("ring"), "topology='ring' must be a Topology"),
    "codec as a number": (lambda: gossip.exact(topology.make("ring", N), codec=3), "codec=3 must be a Codec"),
    "half a round": (lambda: gossip.exact(topology.make("ring", N), rounds=1.5), "rounds=1.5 must be a whole number"),
    "workers as a word": (lambda: decjax.make_workers("4"), "num_workers='4' must be a whole number"),
    "no topology": (lambda: topology.make(None, 4), "topology.make: name=None must be a word"),
    "a large star": (lambda: topology.make("star", 10**6), "num_workers=1000000 must be at least 1 and at most 4096"),
    "a codec's name": (lambda: codecs.make(3), "codecs.make: name=3 must be a word or a Codec"),
    "two sizes": (lambda: codecs.topk(k=5, fraction=0.1), "k=5 and fraction=0.1 both set .*leave one out"),
    "negative buckets": (lambda: decjax.Channel(bucket_bytes=-1), "bucket_bytes=-1 must be at least 0"),
    "an axis": (lambda: decjax.Channel(simulated()), "axis, a Workers, must be an Axis .*workers.axis"),
    "a reducer": (lambda: decjax.decentralize(optax.sgd(0.1), reduce.mean()), "mixer, a Mean, must be a Mixer"),
    "a mixer": (lambda: decjax.synchronize(optax.sgd(0.1), ring()), "reducer, an Exact, must be a Reducer"),
    "no optimizer": (lambda: decjax.decentralize(None, ring()), "inner=None must be a GradientTransformation .*optax.adamw"),
    "no mixer": (lambda: decjax.decentralize(optax.sgd(0.1), None), "mixer=None must be a Mixer"),
    "make_step's topology": (lambda: decjax.make_step(len, simulated(), topology.make("ring", N)), "a Topology, must be a Mixer"),
    "make_step's size": (lambda: decjax.make_step(len, simulated(), ring(2)), "is for 2 workers, but there are 4; .*make.name, 4"),
    "another schedule": (
        lambda: trained(simulated(), sgd(gossip.exact(topology.make("one_peer_exponential", N))), ring(), steps=2),
        "phase is 0 in step 1, but the transformation's is 1",
    ),
    "twice": (lambda: trained(simulated(), decjax.decentralize(sgd(ring()), ring()), ring()), "wrap the plain optimizer once"),
    "MultiSteps outside": (
        lambda: trained(simulated(), optax.MultiSteps(sgd(ring()), 2), ring()),
        r"\(MultiStepsState\) around one that communicates \(DecentralizeState\).*put it inside",
    ),
    "chain outside": (
        lambda: trained(simulated(), optax.chain(sgd(ring()), optax.scale(0.5)), ring()),
        r"\(ScaleState\) around one that communicates .*put it inside|\(EmptyState\) around one",
    ),
    "unstacked": (lambda: simulated().jit(sgd(ring()).init, (0,))(jnp.zeros(3)), r"shape \(3,\), which must begin with \(4,\)"),
    "examples' gradients": (
        lambda: trained(simulated(), decjax.decentralize(optax.contrib.dpsgd(0.1, 1.0, 1.0, seed=0), ring()), ring()),
        "the optimizer's update has shape",
    ),
}


@pytest.mark.parametrize("wrong, told", WRONG.values(), ids=WRONG)
def test_mistakes_are_refused_in_one_line(wrong, told):
    with pytest.raises(ValueError, match=told) as error:
        wrong()
    assert "\n" not in str(error.value)


class WrongPhase(optim.Local):
    """A schedule with a phase that no mixer has."""

    def phase(self, step):
        return 99


@pytest.mark.parametrize(
    "tx, schedule", [(sgd(ring()), ring()), (decjax.synchronize(optax.sgd(0.1), reduce.mean()), reduce.mean())]
)
def test_a_phase_that_is_not_there_is_refused(tx, schedule):
    workers = simulated()
    with pytest.raises(ValueError, match="phase=99 must be from 0 to 0; .*schedule.phase"):
        trained(workers, tx, WrongPhase(optax.sgd(0.1), num_workers=N))


def test_a_clip_before_it_in_a_chain_only_sees_gradients():
    outside = trained(simulated(), optax.chain(optax.clip(1.0), sgd(ring())), ring(), steps=3)
    inside = trained(simulated(), decjax.decentralize(optax.chain(optax.clip(1.0), optax.sgd(0.1)), ring()), ring(), steps=3)
    np.testing.assert_array_equal(outside, inside)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(
    "make, name",
    [(gossip.exact, "ring"), (gossip.exact, "complete"), (mixers.push_sum, "complete"), (gossip.choco, "ring")],
    ids=["exact ring", "exact complete", "push_sum", "choco"],
)
def test_a_topology_for_other_workers_is_refused_with_both_numbers(make, name, size, workers):
    mixer, params = make(topology.make(name, size)), workers.stack(jnp.zeros(512))
    told = f"for {size} workers, but there are {N}"
    with pytest.raises(ValueError, match=told):
        workers.jit(sgd(mixer).init, (0,))(params)
    with pytest.raises(ValueError, match=told):
        workers.jit(lambda x: mixer.exchange(x, mixer.init(x), 0), (0,))(params)


def test_an_axis_of_one_s_own_is_compared_too():
    mixer = gossip.exact(topology.make("ring", 2), decjax.Channel(mesh.Axis("data")))
    with pytest.raises(ValueError, match=f"for 2 workers, but there are {N}"):
        jax.vmap(sgd(mixer).init, axis_name="data")(jnp.zeros((N, 3)))


def test_without_a_channel_arrays_travel_along_the_axis_of_the_workers(workers):
    graph = topology.make("one_peer_exponential", N)
    plain = trained(workers, sgd(gossip.exact(graph)), gossip.exact(graph), steps=3)
    channel = decjax.Channel(workers.axis)
    np.testing.assert_array_equal(plain, trained(workers, sgd(gossip.exact(graph, channel)), gossip.exact(graph, channel), steps=3))
    reducers = decjax.reduce.every(reduce.mean(), 2), reduce.powersgd(rank=1)
    for reducer, tx in (
        (reducers[0], decjax.local_updates(optax.sgd(0.1), reducers[0], optax.sgd(0.7))),
        (reducers[1], decjax.synchronize(optax.sgd(0.1), reducers[1])),
    ):
        found = trained(workers, tx, reducer, steps=2)
        assert (found == found[0]).all() and found.any()


def test_outside_of_workers_there_is_no_axis():
    with pytest.raises(ValueError, match="worker axis is not mapped here: call this in a function mapped over workers"):
        ring().exchange(jnp.zeros(3), (), 0)


@pytest.mark.parametrize("dtype, fix", [("complex64", "real and imaginary parts as two arrays"), ("float8_e4m3fn", "use bfloat16")])
@pytest.mark.parametrize(
    "tx",
    [sgd(ring()), decjax.synchronize(optax.sgd(0.1), reduce.mean()), corrections.track(optax.sgd(0.1), ring())],
    ids=["decentralize", "synchronize", "track"],
)
def test_numbers_that_cannot_be_averaged_are_refused(tx, dtype, fix):
    workers = simulated()
    with pytest.raises(ValueError, match=f"w.* of type {dtype} cannot be averaged .*{fix}"):
        workers.jit(tx.init, (0,))(workers.stack({"w": jnp.zeros(3, dtype)}))


def test_a_step_may_return_numbers_of_python_and_be_numbered_by_an_array(workers):
    mixer = gossip.exact(topology.make("one_peer_exponential", N))
    take = decjax.make_step(lambda x, *, phase: (x, 1.5, phase), workers, mixer, donate_argnums=())
    x_N, one_N, phase_N = take(jnp.int32(1), jnp.zeros(N))
    assert one_N.tolist() == [1.5] * N and phase_N.tolist() == [1] * N


def test_the_code_of_the_guides_trains_both_kinds_of_workers(workers):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "guides/compression.md").read_text(), re.DOTALL)
    scope = {}
    exec(code.replace("30)", "2)"), scope)
    found = trained(workers, scope["tx"], scope["reducer"], steps=2)
    assert (found == found[0]).all() and found.any()


@pytest.mark.parametrize(
    "name, options", [("dpsgd", dict(l2_norm_clip=1.0, noise_multiplier=1.0, seed=0)), ("momo", {}), ("lbfgs", {})]
)
def test_a_config_s_optimizers_need_gradients_state_and_parameters_alone(name, options):
    with pytest.raises(ValueError, match=f"optimizer '{name}' cannot be used in a config, .*own loop"):
        registry.make("optimizer", name, learning_rate=lambda step: 0.1, **options)


def test_an_optimizer_that_needs_a_loss_is_given_it_in_a_loop_of_one_s_own():
    tx, workers = decjax.decentralize(optax.contrib.momo(0.1), ring()), simulated()
    params = workers.stack(jnp.ones(3))
    update = workers.jit(lambda x, state, value: tx.update(x, state, x, phase=0, value=value)[0], (0, 0, 0))
    assert jnp.isfinite(update(params, workers.jit(tx.init, (0,))(params), jnp.ones(N))).all()


@pytest.mark.filterwarnings("ignore:Specifying a key")
def test_random_keys_of_a_config_s_optimizer_are_kept_as_numbers():
    schedule = lambda step: 0.1
    made, plain = registry.make("optimizer", "noisy_sgd", learning_rate=schedule), optax.noisy_sgd(schedule)
    params = {"w": jnp.ones((4, 2)), "b": jnp.ones(3)}
    own, theirs = made.init(params), plain.init(params)
    for _ in range(3):
        assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(own))
        (updates, own), (expected, theirs) = made.update(params, own, params), plain.update(params, theirs, params)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)


@pytest.mark.parametrize(
    "of",
    [
        lambda worker: jax.random.key(worker),
        lambda worker: np.full(3, 1j * worker, np.complex64),
        lambda worker: jnp.full(3, worker, jnp.int4),
        lambda worker: np.zeros((0, 3), np.float32),
        lambda worker: jax.device_put(jnp.ones(3), jax.devices()[1]),
    ],
    ids=["keys", "complex", "int4", "empty", "committed"],
)
def test_values_of_all_types_are_stacked_built_and_fetched(workers, of):
    shown = lambda x: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    copies, built = workers.fetch(workers.stack({"x": of(1)}))["x"], workers.fetch(workers.build(of))
    assert copies.dtype == built.dtype == of(1).dtype
    for worker in range(N):
        np.testing.assert_array_equal(shown(copies)[worker], shown(of(1)))
        np.testing.assert_array_equal(shown(built)[worker], shown(of(worker)))


def test_processes_start_from_the_values_of_the_first(tmp_path):
    code = """if True:
        import sys, jax, decjax
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
        workers = decjax.make_workers(2)
        tree = {"x": jax.numpy.full(3, 1.5 + jax.process_index()), "key": jax.random.key(jax.process_index())}
        found = workers.fetch(workers.stack(tree))
        assert (found["x"] == 1.5).all() and (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(0))).all()
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(DOCS.parent)}
    started = [subprocess.Popen([sys.executable, "-c", code, address, str(index)], env=environment) for index in range(2)]
    try:
        assert [process.wait(timeout=300) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("chosen", ["powersgd(rank=4)", "powersgd_one_sided(rank=4)", "codec(codec=int4)", "dion(rank=4)"])
def test_ranks_are_never_promoted(chosen):
    reducer = registry.make("reducer", chosen)
    with jax.numpy_rank_promotion("raise"):
        trained(simulated(), decjax.synchronize(optax.adam(0.1), reducer), reducer)


def test_copies_are_made_within_a_program_too(workers):
    stacked = jax.jit(lambda x: workers.stack({"x": x}))(jnp.arange(3.0))
    np.testing.assert_array_equal(stacked["x"], np.tile(np.arange(3.0), (N, 1)))


def test_sizes_of_nodes_that_divide_the_workers_are_proposed():
    with pytest.raises(ValueError, match=r"local_size=4 does not divide workers=6; use one of \[1, 2, 3, 6\]"):
        decjax.make_workers(6, local_size=4, simulate=True)
