"""Exchange engines: the split engine takes the fused one's steps with a separate exchange; stale all-reduce against NumPy."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decjax import codecs, gossip, mesh, optim, reduce
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.contrib import corrections, outer
from decjax.pipeline import stateless
from decjax.program import jaxpr
from decjax.train import engine
from decjax.train.step import Step
from tests import runs

N, STEPS, LR = 4, 24, 0.05
AS_USERS = os.environ.get("DECJAX_TEST_COMPILE") == "users"
pytestmark = pytest.mark.usefixtures("quick_compilation", "users_generator")


@functools.cache
def workers():
    return mesh.make_workers(N)


def gradients(params, batch, key):
    """Gradient of a small network's error: nonlinear, and different on every worker."""
    del key
    x, y = batch[:, :3], batch[:, 3:]

    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)

    return jax.value_and_grad(loss)(params)


def init(key):
    a, b = jax.random.split(key)
    return {"in": jax.random.normal(a, (3, 5)), "out": jax.random.normal(b, (5, 2))}


def decentralized(name, inner, **options):
    # One array per message: split arrays travel in two parts.
    return optim.Decentralized(inner, gossip.exact(topology_lib.make(name, N, **options), Channel(bucket_bytes=0)))


def compressed(inner, make, name):
    return optim.Decentralized(inner, make(topology_lib.make(name, N), codec=codecs.make("int8")))


def beer(inner):
    return corrections.Tracking(inner, gossip.beer(topology_lib.make("ring", N), codec=codecs.make("int8")))


def every_other(inner):
    return optim.Decentralized(inner, gossip.exact(topology_lib.make("one_peer_ring", N)), every=2, strength=0.7)


def stale_allreduce(inner):
    return optim.AllReduce(inner, reduce.mean(), N, stale=True)


def batches(step):
    return np.random.default_rng(step).normal(size=(N, 6, 5)).astype(np.float32) * (1 + np.arange(N))[:, None, None]


def trajectory(method, which):
    """Return (final state, loss by step and worker, bytes by step, executables of the first step)."""
    program = engine.compile_per_phase(Step(stateless(gradients), method, workers(), 0), which)
    state = runs.start(init(jax.random.key(0)), method, workers())
    losses, sent, first = [], [], None
    for step in range(STEPS):
        batch = workers().build(lambda worker: batches(step)[worker])
        number = jax.device_put(np.int32(step), workers().replicated)
        due = program(method.phase(step), state, batch, number)
        first = first or due.executables
        with jax.transfer_guard("disallow"):  # a step moves nothing between host and devices
            state, loss_N = due.run(state, batch, number)
        losses.append(np.asarray(loss_N))
        sent.append(due.sent["worker"])
    return jax.tree.map(np.asarray, state), np.array(losses), np.array(sent), first


METHODS = {
    "one_peer_exponential": lambda: decentralized("one_peer_exponential", optax.adamw(LR)),
    "ring": lambda: decentralized("ring", optax.adamw(LR)),
    "alternating_exponential_ring": lambda: decentralized("alternating_exponential_ring", optax.adamw(LR), local_size=2),
    "every other step": lambda: every_other(optim.accumulated_adamw(LR, window=3)),
    "CHOCO": lambda: compressed(optax.sgd(LR), gossip.choco, "one_peer_ring"),
    "DCD": lambda: compressed(optax.sgd(LR), gossip.dcd, "ring"),
    "BEER": lambda: beer(optax.sgd(LR)),
    "stale all-reduce": lambda: stale_allreduce(optax.adamw(LR)),
    "streaming": lambda: outer.StreamingDiLoCo(optax.adamw(LR), reduce.mean(), N, every=4, fragments=2, delay=2),
}


def assert_near(x, y):
    """tolerance for sums in another order: 5 % of values, 3 % of the range for 8-bit codes, where 255 wraps to 0"""
    if x.dtype == np.uint8:
        assert np.abs((x - y).view(np.int8)).max(initial=0) <= 8
    else:
        np.testing.assert_allclose(x, y, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", METHODS)
def test_split_takes_the_steps_of_fused(name):
    fused, split = (trajectory(METHODS[name](), which) for which in ("fused", "split"))
    np.testing.assert_array_equal(fused[2], split[2])  # bytes
    if name == "one_peer_exponential":  # halves round to the same number in any order
        jax.tree.map(np.testing.assert_array_equal, fused[0], split[0])
    # Compiled as users do, the two round sums in different places, which changes codes.
    may_differ = AS_USERS and name in ("CHOCO", "DCD", "BEER")
    near = assert_near if may_differ else functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5)
    jax.tree.map(near, fused[0], split[0])
    np.testing.assert_allclose(fused[1], split[1], rtol=0.05 if may_differ else 1e-4)


@pytest.mark.parametrize("which", ["fused", "split"])
def test_batches_of_a_few_shapes_are_compiled_once_each(which):
    """Steps of one shape equal those of a run with only that shape; the exchange is compiled once for all."""
    method = METHODS["ring"]()
    program = engine.compile_per_phase(Step(stateless(gradients), method, workers(), 0), which)
    state, taken = runs.start(init(jax.random.key(0)), method, workers()), []
    own = jax.tree.map(np.asarray, state)
    for step, rows in enumerate((6, 3, 6, 3)):
        batch = workers().build(lambda worker: batches(step)[worker, :rows])
        due = program(0, state, batch, np.int32(step))
        alone = engine.compile_per_phase(Step(stateless(gradients), method, workers(), 0))(0, state, batch, np.int32(step))
        expected, _ = alone.run(jax.tree.map(jnp.copy, state), batch, np.int32(step))
        state, _ = due.run(state, batch, np.int32(step))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), state, expected)
        taken.append(due)
    assert taken[0] is taken[2] and taken[1] is taken[3] and taken[0] is not taken[1]
    if which == "split":
        assert taken[0].executables[1:] == taken[1].executables[1:]
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(state), strict=True))


@pytest.mark.parametrize("which, senders", [("fused", 1), ("split", 2)])
def test_an_update_by_itself_is_what_a_step_does_beside_its_gradient(which, senders):
    method, found = METHODS["one_peer_exponential"](), []
    step = Step(stateless(gradients), method, workers(), 0)
    state, batch = runs.start(init(jax.random.key(0)), method, workers()), workers().build(lambda worker: batches(0)[worker])
    _, grads, _ = workers().jit(step.take_gradient, (0, 0, 0, None))(state.params, state.source, batch, np.int32(0))
    update = engine.compile_update(step, which, 0, state, grads, lambda fn: found.append(fn) or fn)
    assert len(found) == senders  # functions that send: one for everything, or one per part
    due = engine.compile_per_phase(step, which)(0, state, batch, np.int32(0))
    for _ in range(2):
        after = update(jax.tree.map(jnp.copy, state), grads)
    expected, _ = due.run(jax.tree.map(jnp.copy, state), batch, np.int32(0))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), after, expected)


def test_split_communicates_in_its_exchange_only():
    *_, (take_gradient, *parts, prepare, join, last_join) = trajectory(METHODS["one_peer_exponential"](), "split")
    encodes, travels, decodes = parts[::3], parts[1::3], parts[2::3]
    assert len(travels) == 2 and all("collective-permute" in travel.as_text() for travel in travels)
    for executable in (take_gradient, *encodes, *decodes, prepare, join, last_join):
        assert not any(kind in executable.as_text() for kind in ("collective-permute", "all-reduce", "all-gather"))


@pytest.mark.parametrize("hops", [0, 1, 2])
def test_an_exchange_is_cut_at_its_messages(hops):
    """What is computed before the first message and after the last one is not part of the exchange."""

    def exchange(x, y):
        message = jnp.sin(x) * y
        for hop in range(hops):
            message = jax.lax.ppermute(jnp.cos(message) if hop else message, "worker", [(0, 1), (1, 2), (2, 0)])
        return {"exchanged": jnp.exp(message) + jnp.sin(x), "own": y}

    def in_turns(x, y):
        pieces = jaxpr.cut_at_messages(jaxpr.trace(exchange, x, y))
        encoded = pieces.encode((x, y))
        programs.append(str(jax.make_jaxpr(lambda encoded: pieces.travel((x, y), encoded))(encoded)))
        return pieces.decode((x, y), encoded, pieces.travel((x, y), encoded))

    programs: list[str] = []
    x, y = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    at_once = jax.vmap(exchange, axis_name="worker")(x, y)
    np.testing.assert_array_equal(jax.vmap(in_turns, axis_name="worker")(x, y), jax.tree.leaves(at_once))
    (program,) = programs
    assert program.count("ppermute") == hops and ("cos" in program) == (hops == 2)
    assert "sin" not in program and "exp" not in program


def test_a_piece_holds_only_the_constants_that_it_needs():
    """Elastic runs cache compiled pieces by their text, which must not depend on other pieces."""

    def text(other):
        x, scale = jnp.ones(3), jnp.arange(3.0)
        traced = jaxpr.trace(lambda x: (x * scale, x + other), x)
        assert len(traced.consts) == 2
        program, first = traced.program, traced.program.eqns[0]
        return jax.jit(jaxpr.piece(traced, program.invars, [first], first.outvars)).lower(x).as_text()

    assert text(jnp.zeros(3)) == text(jnp.full(3, 7.0))


def test_split_leaves_little_to_do_after_the_message():
    """Adam's moments are computed during the exchange; weight decay, which acts on the mean, waits for it."""
    *_, executables = trajectory(METHODS["one_peer_exponential"](), "split")
    prepare, *joins = executables[-3:]
    assert "sqrt" in prepare.as_text() and not any("sqrt" in join.as_text() for join in joins)


def test_stale_allreduce_applies_the_mean_gradient_of_the_step_before():
    """x^{t+1} = x^t − α ḡ(x^{t−1}), with no change in the first step; in NumPy."""
    state, *_ = trajectory(stale_allreduce(optax.sgd(LR)), "fused")
    params = jax.tree.map(np.asarray, init(jax.random.key(0)))
    pending = None
    for step in range(STEPS):
        own = [jax.tree.map(np.asarray, gradients(params, batches(step)[worker], None)[1]) for worker in range(N)]
        if pending is not None:
            params = jax.tree.map(lambda x, g: x - LR * g, params, pending)
        pending = jax.tree.map(lambda *g: np.mean(g, axis=0), *own)
    for worker in range(N):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[worker], y, rtol=1e-4, atol=1e-5), state.params, params)


def test_stale_adam_has_no_step_without_a_gradient():
    """After the first step, parameters, moments and their counter equal the initial ones."""
    method = stale_allreduce(optax.adamw(LR))
    state = before = runs.start(init(jax.random.key(0)), method, workers())
    before = jax.tree.map(np.asarray, before)
    batch = workers().build(lambda worker: batches(0)[worker])
    program = engine.compile_per_phase(Step(stateless(gradients), method, workers(), 0))
    state, _ = program(0, state, batch, np.int32(0)).run(state, batch, np.int32(0))
    jax.tree.map(np.testing.assert_array_equal, before.params, jax.tree.map(np.asarray, state.params))
    jax.tree.map(np.testing.assert_array_equal, before.opt_state.inner, jax.tree.map(np.asarray, state.opt_state.inner))


def test_engines_that_cannot_be_are_refused():
    atc = dataclasses.replace(decentralized("ring", optax.adamw(LR)), order="atc")
    with pytest.raises(ValueError, match="engine='warp' is unknown; use one of auto, fused, split"):
        engine.choose("warp", atc, workers())
    with pytest.raises(ValueError, match="engine 'split' needs an exchange .* use engine 'fused'"):
        engine.choose("split", atc, workers())
    assert engine.choose("auto", decentralized("ring", optax.adamw(LR)), workers()) == "fused"  # one process


@pytest.mark.parametrize("options", [{}, dict(stages=2), dict(tensor=2)])
def test_processes_split_no_step_whose_gradient_has_collectives_of_its_own(options, monkeypatch):
    method, w = decentralized("ring", optax.adamw(LR)), mesh.make_workers(N, **options)
    assert engine.choose("split", method, w) == "split"  # one process executes them in one order
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    if not options:
        assert engine.choose("split", method, w) == engine.choose("auto", method, w) == "split"
        return
    assert engine.choose("auto", method, w) == "fused"
    with pytest.raises(
        ValueError, match="engine 'split' with stages=. and tensor=. over 4 processes: .* use engine 'fused'"
    ) as error:
        engine.choose("split", method, w)
    assert "\n" not in str(error.value)
