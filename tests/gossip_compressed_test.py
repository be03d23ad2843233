"""Compressed gossip against dense NumPy references written as in the papers, over 60 steps in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decjax import codecs, gossip, registry
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.contrib import mixers as contrib_mixers
from decjax.program import hlo
from decjax.train import checkpoint
from tests.quadratics import (
    LR,
    MATRIX,
    MODES,
    STEPS,
    X0,
    B,
    H,
    N,
    P,
    flat,
    gradients,
    mixed,
    mixers,
    order_of,
    trajectory,
    tree,
    workers,
    wrapper,
)
from tests.stand_ins import dense_four_bits, dense_top, four_bits, identity, top

# Codecs, and their NumPy counterparts on all workers' values.
CODECS = {
    "identity": (identity(), lambda x_NxP: x_NxP),
    "four_bits": (four_bits(), dense_four_bits),
    "top": (top(0.3), lambda x_NxP: np.stack([dense_top(0.3)(x_P) for x_P in x_NxP])),
}
pytestmark = pytest.mark.usefixtures("quick_compilation")


# -- Dense references -------------------------------------------------------------------------------------------------


def choco(W, C, gamma, order):
    x = np.tile(X0, (N, 1))
    known = {}  # x̂ of each round of the period
    for t in range(STEPS):
        W_NxN, index = W.matrix(t), t % W.period
        hat = known.get(index, np.tile(X0, (N, 1)))
        if order == "awc" and W.period == 1:  # as published: mix the estimates, then send
            x = x - LR * gradients(x) + gamma * (W_NxN @ hat - hat)
            known[index] = hat + C(x - hat)
        else:
            step = -LR * gradients(x)
            x = x + step if order == "atc" else x
            hat = known[index] = hat + C(x - hat)
            x = x + gamma * (W_NxN @ hat - hat)
            x = x + step if order == "awc" else x
        yield x


def deepsqueeze(W, C, gamma, order):
    x, error = np.tile(X0, (N, 1)), np.zeros((N, P))
    for t in range(STEPS):
        step = -LR * gradients(x)
        x = x + step if order == "atc" else x
        c = C(x + error)
        error = x + error - c
        x = x + gamma * (W.matrix(t) @ c - c)
        x = x + step if order == "awc" else x
        yield x


def dcd(W, C, gamma, order):
    x = at = np.tile(X0, (N, 1))  # the parameters, and where the gradient is evaluated
    for t in range(STEPS):
        if order == "awc":
            x = x + C(W.matrix(t) @ x - LR * gradients(x) - x)
            at = x
        else:
            x = x + C(at - LR * gradients(at) - x)
            at = W.matrix(t) @ x
        yield at


def beer(W, C, gamma, order):
    X, V, before = np.tile(X0, (N, 1)), np.zeros((N, P)), np.zeros((N, P))
    known, known_tracker, W_NxN = np.tile(X0, (N, 1)), np.zeros((N, P)), W.matrix(0)

    def encoded(a, b):  # one bucket for both
        joint = C(np.concatenate([a, b], axis=1))
        return joint[:, :P], joint[:, P:]

    for t in range(STEPS):
        now = gradients(X)
        if order == "awc":  # as published; V^0 = ∇F(X^0)
            V = V + gamma * (W_NxN @ known_tracker - known_tracker) + now - before
            X = X + gamma * (W_NxN @ known - known) - LR * V
            q, q_tracker = encoded(X - known, V - known_tracker)
            known, known_tracker = known + q, known_tracker + q_tracker
        else:
            V = V + now - before
            X = X - LR * V
            q, q_tracker = encoded(X - known, V - known_tracker)
            known, known_tracker = known + q, known_tracker + q_tracker
            X = X + gamma * (W_NxN @ known - known)
            V = V + gamma * (W_NxN @ known_tracker - known_tracker)
        before = now
        yield X


def push_sum(W, C, gamma, order):
    x = np.tile(X0, (N, 1))  # mixed values; z = x / y
    y, hat = np.ones((N, 1)), np.tile(X0, (N, 1))
    for t in range(STEPS):
        A = W.matrix(t)
        step = -LR * gradients(x / y)
        x = x + step if order == "atc" else x
        hat = hat + C(x - hat)
        x, y = x + gamma * (A @ hat - hat), y + gamma * (A @ y - y)
        x = x + step if order == "awc" else x
        yield x / y


MIXERS = {
    "choco": (gossip.choco, choco),
    "deepsqueeze": (gossip.deepsqueeze, deepsqueeze),
    "dcd": (gossip.dcd, dcd),
    "beer": (gossip.beer, beer),
    "push_sum": (contrib_mixers.push_sum, push_sum),
}
GRAPHS = {"push_sum": ("random_digraph", dict(degree=2))}


def built(name, codec, gamma, graph=None, **options):
    """Return (topology, axis name -> mixer) for a name."""
    graph, graph_options = (graph, options) if graph else GRAPHS.get(name, ("ring", {}))
    topology = topology_lib.make(graph, N, **graph_options)
    strength = {} if name == "dcd" else dict(gamma=gamma)
    return topology, lambda channel: MIXERS[name][0](topology, codec=codec, channel=channel, **strength)


@pytest.mark.parametrize("order, mode", [("awc", "devices"), ("atc", "simulated")])
@pytest.mark.parametrize(
    "name, codec, gamma",
    [
        *((name, *coded) for name in MIXERS if name != "dcd" for coded in (("top", 0.3), ("four_bits", 0.8))),
        ("dcd", "identity", 1.0),
        ("dcd", "four_bits", 0.8),
    ],
)  # it refuses codecs with large errors
def test_trajectory_is_that_of_the_paper(name, codec, gamma, order, mode):
    coded, C = CODECS[codec]
    topology, make_mixer = built(name, coded, gamma)
    path = trajectory(make_mixer, order, mode, wrapper(name))
    expected = np.stack([np.tile(X0, (N, 1)), *MIXERS[name][1](topology, C, gamma, order)])
    assert np.abs(expected).max() < 10, "the reference itself diverges"
    np.testing.assert_allclose(path, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name, graph", [("choco", "one_peer_exponential"), ("deepsqueeze", "one_peer_ring")])
def test_time_varying_graphs(name, graph):
    topology, make_mixer = built(name, four_bits(), 0.9, graph)
    expected = np.stack([np.tile(X0, (N, 1)), *MIXERS[name][1](topology, dense_four_bits, 0.9, "awc")])
    np.testing.assert_allclose(trajectory(make_mixer), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mode, order", [("simulated", "awc"), ("devices", "atc")])
@pytest.mark.parametrize("name", ["choco", "deepsqueeze", "push_sum", "dcd"])
def test_an_exact_codec_is_plain_gossip(name, order, mode):
    """Wx − ηu in order "awc", W(x − ηu) in order "atc"."""
    graph = "exponential" if name == "dcd" else "one_peer_exponential"
    topology, make_mixer = built(name, identity(), 1.0, graph)
    exact = trajectory(lambda channel: gossip.exact(topology, channel=channel), order, mode)
    np.testing.assert_allclose(trajectory(make_mixer, order, mode), exact, rtol=0, atol=1e-11)
    x = np.tile(X0, (N, 1))
    for t in range(STEPS):
        W_NxN, step = topology.matrix(t), -LR * gradients(x)
        x = W_NxN @ x + step if order == "awc" else W_NxN @ (x + step)
    np.testing.assert_allclose(exact[-1], x, rtol=0, atol=1e-11)


# -- On devices and simulated, with noise, in nodes -------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in mixers() if "nodes" not in name])
def test_devices_and_simulated_workers_take_the_same_steps(name):
    paths = [trajectory(mixers()[name], order_of(name), mode, wrapper(name)) for mode in MODES]
    # A value between two codes may round either way, by at most half a code's distance: here none did.
    np.testing.assert_allclose(*paths, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in mixers() if "nodes" in name])
def test_nodes_keep_the_mean_and_agree(name):
    """Devices exchange shards, simulated workers the whole mean: other blocks, other noise, the same properties."""
    x_NxP = np.random.default_rng(3).normal(size=(N, P))
    for mode in MODES:
        path, y = mixed(mixers()[name], x_NxP, 120, mode, local_size=2)
        mean = (path * y[..., None]).mean(axis=1)
        np.testing.assert_allclose(mean, np.tile(x_NxP.mean(axis=0), (120, 1)), rtol=0, atol=1e-12)
        floor = 1.0 if name.startswith("deep") else 1e-12  # whole parameters are encoded, so noise remains
        assert np.abs(path[-1] - x_NxP.mean(axis=0)).max() < floor
        assert np.abs(path[-1, ::2] - path[-1, 1::2]).max() < 1e-12 or name.startswith("deep")


@pytest.mark.parametrize("name", mixers())
def test_declared_bytes_are_those_of_the_compiled_program(name):
    w = workers("devices", 2 if "nodes" in name else 1)
    mixer = mixers()[name](Channel(w.axis))
    one = jax.eval_shape(tree, jax.ShapeDtypeStruct((P,), jnp.float32))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((N, *x.shape), x.dtype), one)
    state = jax.eval_shape(w.map(mixer.init, (0,)), stacked)
    for phase in {mixer.phases.start, mixer.phases.stop - 1}:
        exchange = functools.partial(mixer.exchange, phase=phase)
        text = jax.jit(w.map(exchange, (0, 0))).lower(stacked, state).compile().as_text()
        np.testing.assert_allclose(hlo.bytes_sent(text, N), mixer.num_bytes(one, phase))


# -- Resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["choco", "deepsqueeze", "dcd", "beer", "push_sum", "power_gossip", "relay", "overlap_push_sum"])
def test_resume_is_bit_exact(name, tmp_path):
    w = workers("simulated")
    mixer = mixers()[name](Channel(w.axis))
    tx = wrapper(name)(optax.adam(LR), mixer, order_of(name))

    @functools.partial(w.jit, in_axes=(0, 0, 0))
    def period(carry, h_PxP, b_P):
        for phase in mixer.phases:
            params, state = carry
            updates, state = tx.update(tree(h_PxP @ flat(params) - b_P), state, params, phase=phase)
            carry = optax.apply_updates(params, updates), state
        return carry

    data = H.astype(np.float32), B.astype(np.float32)
    params = w.stack(tree(X0.astype(np.float32)))
    carry = period((params, w.jit(tx.init, (0,))(params)), *data)
    saved = checkpoint.Checkpoints(tmp_path)
    saved.save(1, carry, {})
    through = period(period(carry, *data), *data)
    restored, _ = saved.restore(1, carry)
    saved.close()
    resumed = period(period(restored, *data), *data)
    jax.tree.map(np.testing.assert_array_equal, through, resumed)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(jax.tree.leaves(through), jax.tree.leaves(carry)))


# -- Codecs with a state, and of matrices -----------------------------------------------------------------------------


class RowsInTurn(codecs.Codec):
    """Each row of a matrix is one message; vectors are sent uncompressed."""

    state_key = "tensor"
    matrix = True

    def encode(self, x, state, key):
        return {"row": state["next"], "values": x[state["next"]]} if x.ndim == 2 else x

    def decode(self, message, shape, dtype):
        return jnp.zeros(shape, dtype).at[message["row"]].set(message["values"]) if len(shape) == 2 else message

    def num_bytes(self, shape, dtype):
        return jnp.dtype(dtype).itemsize * shape[-1] + 4 * (len(shape) == 2)

    def init(self, shape, dtype):
        return {"next": jnp.int32(0), "rows": jnp.int32(shape[0])} if len(shape) == 2 else ()

    def advance(self, state, message):
        return state | {"next": (message["row"] + 1) % state["rows"]} if state else ()

    def delta(self, shape):
        return 1 / shape[0]


def test_a_codec_of_matrices_sees_them_and_keeps_its_state():
    topology = topology_lib.make("ring", N)
    x_NxP = np.random.default_rng(3).normal(size=(N, P))
    path, _ = mixed(lambda channel: gossip.choco(topology, codec=RowsInTurn(), gamma=0.3, channel=channel), x_NxP, 400)
    rows = path[:, :, : math.prod(MATRIX)].reshape(-1, N, *MATRIX)
    first = np.abs(rows[0] - x_NxP[:, : math.prod(MATRIX)].reshape(N, *MATRIX)).max(axis=(0, 2)) > 0
    second = np.abs(rows[1] - rows[0]).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(first, [True, False, False, False])
    np.testing.assert_array_equal(second, [True, True, False, False])
    assert np.abs(path[-1] - x_NxP.mean(axis=0)).max() < 1e-6


# -- What fits together -----------------------------------------------------------------------------------------------


def test_typical_contraction_and_the_strength_that_follows():
    kept = gossip.typical_contraction(top(0.1))
    assert 0.4 < kept < 0.5 and gossip.typical_contraction(four_bits(True)) > 0.9
    x_NxP = np.random.default_rng(3).normal(size=(N, P))
    topology = topology_lib.make("ring", N)
    for codec in (top(0.1), four_bits(True)):
        path, _ = mixed(lambda channel: gossip.choco(topology, codec=codec, channel=channel), x_NxP, 400, "simulated")
        assert np.abs(path[-1] - x_NxP.mean(axis=0)).max() < 1e-3


MADE_WITH = {"choco": dict(codec="int4(block=64)", gamma=0.5), "accelerated": dict(rounds=6), "power_gossip": dict(rank=2)}


def unbiased():
    return four_bits(delta=lambda self, shape: None, omega=lambda self, size: 3.0)


@pytest.mark.parametrize(
    "build, graph, options, complaint",
    [
        (gossip.choco, "ring", dict(codec=None), "codec=None must be a Codec"),
        (gossip.choco, "ring", dict(codec=unbiased()), "needs a contractive codec"),
        (gossip.deepsqueeze, "ring", dict(codec=unbiased()), "needs a contractive codec"),
        (gossip.beer, "ring", dict(codec=unbiased()), "needs a contractive codec"),
        (contrib_mixers.push_sum, "ring", dict(codec=unbiased()), "needs a contractive codec"),
        (gossip.choco, "random_digraph", dict(codec=four_bits()), "a doubly stochastic graph, .*or mixer 'push_sum'"),
        (gossip.choco, "complete", dict(codec=four_bits()), "needs messages between nodes"),
        (gossip.choco, "ring", dict(codec=four_bits(), gamma=1.5), "gamma=1.5 must be more than 0 and at most 1"),
        (gossip.choco, "ring", dict(codec=four_bits(state_key="sample")), "without a memory of a batch's samples"),
        (gossip.choco, "hierarchical", dict(codec=four_bits(matrix=True)), "single workers as nodes for a codec of matrices"),
        (
            gossip.exact,
            "ring",
            dict(codec="bounded"),
            r"messages all have one size, got codec 'bounded'; use 'bounded\(raw=False\)'",
        ),
        (gossip.dcd, "ring", dict(codec=top(0.1)), "keeps at least 0.9 of the energy of noise"),
        (
            gossip.dcd,
            "one_peer_exponential",
            dict(codec=four_bits()),
            "a static graph, got topology 'one_peer_exponential'; use 'ring'",
        ),
        (gossip.dcd, "hierarchical", dict(codec=four_bits(), local_size=2, outer="ring"), "needs single workers as nodes"),
        (gossip.beer, "exponential", dict(codec=four_bits()), "a symmetric graph, got topology 'exponential'; use 'ring'"),
        (gossip.beer, "one_peer_ring", dict(codec=four_bits()), "a static graph"),
        (contrib_mixers.power_gossip, "exponential", dict(rank=1), "a symmetric graph, got topology 'exponential'; use 'ring'"),
        (contrib_mixers.power_gossip, "ring", dict(rank=0), "rank=0 must be at least 1"),
        (contrib_mixers.power_gossip, "hierarchical", dict(rank=1, outer="ring"), "single workers as nodes"),
    ],
)
def test_what_does_not_fit_is_refused(build, graph, options, complaint):
    graph_options = {name: options[name] for name in ("local_size", "outer") if name in options}
    topology = topology_lib.make(graph, N, **graph_options)
    with pytest.raises(ValueError, match=complaint) as refusal:
        build(topology, **{name: value for name, value in options.items() if name not in graph_options})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "build, graph",
    [(gossip.choco, "ring"), (gossip.dcd, "ring"), (contrib_mixers.push_sum, "random_digraph"), (gossip.exact, "hierarchical")],
)
def test_codecs_that_make_nothing_smaller_are_refused(build, graph):
    topology, like = topology_lib.make(graph, N), jax.eval_shape(tree, jax.ShapeDtypeStruct((P,), jnp.float32))
    mixer = build(topology, codec=codecs.topk(fraction=1.0, values=codecs.bfloat16()))  # 2 bytes of value, 1 of position
    assert mixer.num_bytes(like, 0).max() > 0
    mixer = build(topology, codec=codecs.topk(fraction=1.0))
    for refused in (lambda: mixer.num_bytes(like, 0), lambda: jax.eval_shape(mixer.init, like)):
        with pytest.raises(
            ValueError, match="codec 'topk' makes messages of .* bytes from .* bytes of parameters; use fewer"
        ) as refusal:
            refused()
        assert "\n" not in str(refusal.value)


def test_graphs_on_which_plain_gossip_drifts_are_refused():
    with pytest.raises(
        ValueError,
        match="a doubly stochastic graph, got topology 'random_digraph'; use .* or mixer 'push_sum' with method 'decentralized'",
    ):
        gossip.exact(topology_lib.make("random_digraph", N))


@pytest.mark.parametrize("name", registry.names("mixer"))
def test_every_mixer_is_made_by_its_name(name):
    """A mixer with the options of its signature reports what it requires, sends and stores."""
    made = registry.make("mixer", name, topology_lib.make("ring", N), Channel(workers("simulated").axis), **MADE_WITH.get(name, {}))
    assert name in mixers(), "tests of bytes and of simulation take mixers from there"
    assert made.num_workers == N and {"needs", "messages", "memory"} <= registry.part("mixer", name).traits.keys()
