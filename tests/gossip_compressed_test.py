"""Compressed gossip against dense NumPy references, written as the papers state them, over 60 steps in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decjax
from decjax import codecs
from decjax import gossip
from decjax import optim
from decjax import topology as topology_lib
from decjax.train import checkpoint
from decjax.train import wire

N, ROWS, COLUMNS, EXTRA, STEPS = 8, 4, 3, 5, 60
P = ROWS * COLUMNS + EXTRA
LR = 0.05
MODES = ("devices", "simulated")
_rng = np.random.default_rng(0)
H = _rng.normal(size=(N, P, P)) / np.sqrt(P) + np.eye(P)
H = np.einsum("nji,njk->nik", H, H) / 4
B = _rng.normal(size=(N, P))
X0 = _rng.normal(size=P)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def gradients(x_NxP):
    return np.einsum("nij,nj->ni", H, x_NxP) - B


# -- Codecs, and the same in NumPy ------------------------------------------------------------------------------------


def identity():
    return codecs.Codec(
        name="identity", encode=lambda x, state, key: x, decode=lambda message, shape, dtype: message,
        num_bytes=lambda shape, dtype: math.prod(shape) * jnp.dtype(dtype).itemsize,
        traits=codecs.Traits(contractive=lambda shape: 1.0))


def top_k(fraction):
    """The largest values, and where they are."""
    def count(shape):
        return max(1, math.ceil(fraction * math.prod(shape)))

    def encode(x, state, key):
        _, where = jax.lax.top_k(jnp.abs(x.ravel()), count(x.shape))
        return {"values": x.ravel()[where], "where": where.astype(jnp.uint16)}

    def decode(message, shape, dtype):
        return jnp.zeros(math.prod(shape), dtype).at[message["where"]].set(message["values"].astype(dtype)).reshape(shape)

    return codecs.Codec(name="top_k", encode=encode, decode=decode,
                        num_bytes=lambda shape, dtype: count(shape) * (jnp.dtype(dtype).itemsize + 2),
                        traits=codecs.Traits(contractive=lambda shape: count(shape) / math.prod(shape)))


def four_bits(stochastic=False, **traits):
    """Whole numbers −7 … 7 times the largest magnitude / 7, two to a byte."""
    def encode(x, state, key):
        scale = jnp.abs(x).max() / 7
        steps = x.ravel() / jnp.where(scale > 0, scale, 1)
        steps = jnp.floor(steps + jax.random.uniform(key, steps.shape, steps.dtype)) if stochastic else jnp.round(steps)
        codes = jnp.pad((steps + 8).astype(jnp.uint8), (0, x.size % 2))
        return {"codes": codes[::2] | codes[1::2] << 4, "scale": scale}

    def decode(message, shape, dtype):
        codes = jnp.stack([message["codes"] & 15, message["codes"] >> 4], axis=1).ravel()[:math.prod(shape)]
        return ((codes.astype(dtype) - 8) * message["scale"]).reshape(shape)

    return codecs.Codec(name="four_bits", encode=encode, decode=decode,
                        num_bytes=lambda shape, dtype: -(-math.prod(shape) // 2) + jnp.dtype(dtype).itemsize,
                        traits=codecs.Traits(random=stochastic, **{"contractive": lambda shape: 0.5} | traits))


def dense_top_k(fraction):
    def C(x_P):
        kept = np.argsort(-np.abs(x_P), kind="stable")[:math.ceil(fraction * len(x_P))]
        return np.where(np.isin(np.arange(len(x_P)), kept), x_P, 0)
    return lambda x_NxP: np.stack([C(x_P) for x_P in x_NxP])


def dense_four_bits(x_NxP):
    scale = np.abs(x_NxP).max(axis=1, keepdims=True) / 7
    return np.round(x_NxP / np.where(scale > 0, scale, 1)) * scale


CODECS = {"identity": (identity, lambda x_NxP: x_NxP), "top_k": (lambda: top_k(0.3), dense_top_k(0.3)),
          "four_bits": (four_bits, dense_four_bits)}


# -- The distributed program ------------------------------------------------------------------------------------------


@functools.cache
def workers(mode, local_size=1):
    return decjax.make_workers(N, local_size=local_size, simulate=mode == "simulated")


def tree(x_P):
    """A matrix and a vector."""
    return {"matrix": x_P[:ROWS * COLUMNS].reshape(ROWS, COLUMNS), "vector": x_P[ROWS * COLUMNS:]}


def flat(params):
    return jnp.concatenate([params["matrix"].ravel(), params["vector"]])


def scanned(one_step, mixer, steps):
    """`one_step(carry, phase) -> (carry, out)` over all steps, whole periods at a time: one compilation for all phases."""
    period = len(mixer.phases)
    assert mixer.phases.start == 0

    def whole_period(carry, _):
        outs = []
        for phase in range(period):
            carry, out = one_step(carry, phase)
            outs.append(out)
        return carry, jnp.stack(outs)

    def run(carry):
        carry, outs = jax.lax.scan(whole_period, carry, length=-(-steps // period))
        return carry, outs.reshape(-1, *outs.shape[2:])
    return run


def trajectory(make_mixer, order="awc", mode="devices", wrap=optim.decentralize, inner=None, local_size=1):
    """x_{STEPS+1 x N x P} of SGD on heterogeneous quadratics."""
    w = workers(mode, local_size)
    with jax.enable_x64(True):
        mixer = make_mixer(w.axis_name)
        tx = wrap(inner or optax.sgd(LR), mixer, order)

        def whole(x_P, h_PxP, b_P):
            def one_step(carry, phase):
                params, state = carry
                updates, state = tx.update(tree(h_PxP @ flat(params) - b_P), state, params, phase=phase)
                params = optax.apply_updates(params, updates)
                return (params, state), flat(params)
            start = tree(x_P)
            return scanned(one_step, mixer, STEPS)((start, tx.init(start)))[1]

        path = np.asarray(w.jit(whole, (0, 0, 0))(np.tile(X0, (N, 1)), H, B))
        assert path.dtype == np.float64
    return np.concatenate([np.tile(X0, (1, N, 1)), path.transpose(1, 0, 2)[:STEPS]])


def mixed(make_mixer, x_NxP, steps, mode="devices", local_size=1):
    """The path of parameters that are only mixed, x_{STEPS x N x P}, and what `state` holds at last."""
    w = workers(mode, local_size)
    with jax.enable_x64(True):
        mixer = make_mixer(w.axis_name)

        def whole(x_P):
            def one_step(carry, phase):
                params, state = gossip.mix(mixer, *carry, phase, 0)
                weight = state.weight if isinstance(state, gossip.PushSumState) else 1.0
                return (params, state), jnp.append(flat(params), weight)
            # Memories start from the same on all workers.
            return scanned(one_step, mixer, steps)((tree(x_P), mixer.init(tree(0 * x_P))))[1]

        path = np.asarray(w.jit(whole, (0,))(x_NxP)).transpose(1, 0, 2)[:steps]
    return path[..., :-1], path[..., -1]


# -- Dense references -------------------------------------------------------------------------------------------------


def choco(W, C, gamma, order):
    x = np.tile(X0, (N, 1))
    known = {}  # x̂ of each round of the period
    for t in range(STEPS):
        W_NxN, index = W.matrix(t), t % W.period
        hat = known.get(index, np.tile(X0, (N, 1)))
        if order == "awc" and W.period == 1:  # As published: mix with what is known, then send.
            x = x - LR * gradients(x) + gamma * (W_NxN @ hat - hat)
            known[index] = hat + C(x - hat)
        else:
            step = -LR * gradients(x)
            x = x + step if order == "atc" else x
            hat = known[index] = hat + C(x - hat)
            x = x + gamma * (W_NxN @ hat - hat)
            x = x + step if order == "awc" else x
        yield x


def deep_squeeze(W, C, gamma, order):
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
    x = at = np.tile(X0, (N, 1))  # The parameters, and where the gradient is taken.
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

    def encoded(a, b):  # One bucket for both.
        joint = C(np.concatenate([a, b], axis=1))
        return joint[:, :P], joint[:, P:]

    for t in range(STEPS):
        now = gradients(X)
        if order == "awc":  # As published; V^0 = ∇F(X^0).
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
    x = np.tile(X0, (N, 1))  # What is mixed; z = x / y.
    y, hat = np.ones((N, 1)), np.tile(X0, (N, 1))
    for t in range(STEPS):
        A = W.matrix(t)
        step = -LR * gradients(x / y)
        x = x + step if order == "atc" else x
        hat = hat + C(x - hat)
        x, y = x + gamma * (A @ hat - hat), y + gamma * (A @ y - y)
        x = x + step if order == "awc" else x
        yield x / y


MIXERS = {"choco": (gossip.choco, choco), "deep_squeeze": (gossip.deep_squeeze, deep_squeeze), "dcd": (gossip.dcd, dcd),
          "beer": (gossip.beer, beer), "push_sum": (gossip.push_sum, push_sum)}
GRAPHS = {"push_sum": ("random_digraph", dict(degree=2))}


def built(name, codec, gamma, graph=None, **options):
    """(topology, axis name -> mixer) of a name."""
    graph, graph_options = (graph, options) if graph else GRAPHS.get(name, ("ring", {}))
    topology = topology_lib.make(graph, N, **graph_options)
    strength = {} if name == "dcd" else dict(gamma=gamma)
    return topology, lambda axis_name: MIXERS[name][0](topology, codec=codec, axis_name=axis_name, **strength)


def wrapper(name):
    return optim.track if name == "beer" else optim.decentralize


@pytest.mark.parametrize("order, mode", [("awc", "devices"), ("atc", "simulated")])
@pytest.mark.parametrize("codec, gamma", [("top_k", 0.3), ("four_bits", 0.8)])
@pytest.mark.parametrize("name", MIXERS)
def test_trajectory_is_that_of_the_paper(name, codec, gamma, order, mode):
    if name == "dcd" and codec == "top_k":
        codec, gamma = "identity", 1.0  # It refuses codecs that lose much.
    make, C = CODECS[codec]
    topology, make_mixer = built(name, make(), gamma)
    path = trajectory(make_mixer, order, mode, wrapper(name))
    expected = np.stack([np.tile(X0, (N, 1)), *MIXERS[name][1](topology, C, gamma, order)])
    assert np.abs(expected).max() < 10, "the reference itself diverges"
    np.testing.assert_allclose(path, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name, graph", [("choco", "one_peer_exponential"), ("deep_squeeze", "one_peer_ring")])
def test_time_varying_graphs(name, graph):
    topology, make_mixer = built(name, four_bits(), 0.9, graph)
    expected = np.stack([np.tile(X0, (N, 1)), *MIXERS[name][1](topology, dense_four_bits, 0.9, "awc")])
    np.testing.assert_allclose(trajectory(make_mixer), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mode, order", [("simulated", "awc"), ("devices", "atc")])
@pytest.mark.parametrize("name", ["choco", "deep_squeeze", "push_sum", "dcd"])
def test_an_exact_codec_is_plain_gossip(name, order, mode):
    """Wx − ηu in order "awc", W(x − ηu) in order "atc"."""
    graph = "exponential" if name == "dcd" else "one_peer_exponential"
    topology, make_mixer = built(name, identity(), 1.0, graph)
    exact = trajectory(lambda axis_name: gossip.exact(topology, axis_name=axis_name), order, mode)
    np.testing.assert_allclose(trajectory(make_mixer, order, mode), exact, rtol=0, atol=1e-11)
    x = np.tile(X0, (N, 1))
    for t in range(STEPS):
        W_NxN, step = topology.matrix(t), -LR * gradients(x)
        x = W_NxN @ x + step if order == "awc" else W_NxN @ (x + step)
    np.testing.assert_allclose(exact[-1], x, rtol=0, atol=1e-11)
