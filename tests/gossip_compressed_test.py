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
from decjax.train import state as state_lib
from decjax.train import wire

N, P, STEPS, LR = 8, 17, 60, 0.05
MATRIX = (4, 3)  # The shape of the first of P values; the others are a vector.
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


def tree(x_P, shape=MATRIX):
    """A matrix, or a stack of them, and a vector."""
    return {"matrix": x_P[:math.prod(shape)].reshape(shape), "vector": x_P[math.prod(shape):]}


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


def trajectory(make_mixer, order="awc", mode="devices", wrap=optim.decentralize, local_size=1, shape=MATRIX):
    """x_{STEPS+1 x N x P} of SGD on heterogeneous quadratics."""
    w = workers(mode, local_size)
    with jax.enable_x64(True):
        mixer = make_mixer(w.axis_name)
        tx = wrap(optax.sgd(LR), mixer, order)

        def whole(x_P, h_PxP, b_P):
            def one_step(carry, phase):
                params, state = carry
                updates, state = tx.update(tree(h_PxP @ flat(params) - b_P, shape), state, params, phase=phase)
                params = optax.apply_updates(params, updates)
                return (params, state), flat(params)
            start = tree(x_P, shape)
            return scanned(one_step, mixer, STEPS)((start, tx.init(start)))[1]

        path = np.asarray(w.jit(whole, (0, 0, 0))(np.tile(X0, (N, 1)), H, B))
        assert path.dtype == np.float64
    return np.concatenate([np.tile(X0, (1, N, 1)), path.transpose(1, 0, 2)[:STEPS]])


def mixed(make_mixer, x_NxP, steps, mode="devices", local_size=1, shape=MATRIX):
    """The path of parameters that are only mixed, x_{steps x N x P}, and of push-sum's weights y_{steps x N}."""
    w = workers(mode, local_size)
    with jax.enable_x64(True):
        mixer = make_mixer(w.axis_name)

        def whole(x_P):
            def one_step(carry, phase):
                params, state = gossip.mix(mixer, *carry, phase, 0)
                weight = state.weight if isinstance(state, gossip.PushSumState) else 1.0
                return (params, state), jnp.append(flat(params), weight)
            # Memories start from the same on all workers.
            return scanned(one_step, mixer, steps)((tree(x_P, shape), mixer.init(tree(0 * x_P, shape))))[1]

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


MIXERS = {"choco": (gossip.choco, choco), "deepsqueeze": (gossip.deepsqueeze, deepsqueeze), "dcd": (gossip.dcd, dcd),
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
    exact = trajectory(lambda axis_name: gossip.exact(topology, axis_name=axis_name), order, mode)
    np.testing.assert_allclose(trajectory(make_mixer, order, mode), exact, rtol=0, atol=1e-11)
    x = np.tile(X0, (N, 1))
    for t in range(STEPS):
        W_NxN, step = topology.matrix(t), -LR * gradients(x)
        x = W_NxN @ x + step if order == "awc" else W_NxN @ (x + step)
    np.testing.assert_allclose(exact[-1], x, rtol=0, atol=1e-11)


# -- Push-sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_push_sum_keeps_mass_and_agrees_exactly_at_four_bits(mode):
    topology = topology_lib.make("random_digraph", N, degree=2)
    assert not topology_lib.is_row_stochastic(topology)
    x_NxP = np.random.default_rng(3).normal(size=(N, P))
    codec = four_bits(stochastic=True)
    z, y = mixed(lambda axis_name: gossip.push_sum(topology, codec=codec, axis_name=axis_name), x_NxP, 200, mode)
    np.testing.assert_allclose(y.sum(axis=1), N, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.einsum("tn,tnp->tp", y, z), np.tile(x_NxP.sum(axis=0), (200, 1)), rtol=0, atol=1e-12)
    assert np.abs(z[-1] - x_NxP.mean(axis=0)).max() < 1e-12
    assert np.ptp(y[-1]) > 0.1, "without weights it would have been as good"


def test_push_sum_without_a_codec_is_push_sum():
    topology = topology_lib.make("random_digraph", N, degree=2)
    x = x_NxP = np.random.default_rng(3).normal(size=(N, P))
    path, weights = mixed(lambda axis_name: gossip.push_sum(topology, axis_name=axis_name), x_NxP, STEPS)
    y = np.ones(N)
    for z, weight in zip(path, weights):
        x, y = topology.matrix(0) @ x, topology.matrix(0) @ y
        np.testing.assert_allclose(z, x / y[:, None], atol=1e-12)
        np.testing.assert_allclose(weight, y, atol=1e-12)


# -- PowerGossip ------------------------------------------------------------------------------------------------------


def power(W, rank, start, order):
    """Dense PowerGossip: q and p of every edge {i < j}, as the paper's algorithm has them."""
    q0, p0 = start
    memory, size = {}, math.prod(MATRIX)
    x = np.tile(X0, (N, 1))
    for t in range(STEPS):
        W_NxN, index = W.matrix(t), t % W.period
        step = -LR * gradients(x)
        x = x + step if order == "atc" else x
        X, new = x[:, :size].reshape(N, *MATRIX), W_NxN @ x
        moved = X.copy()
        for i, j in np.argwhere(np.triu(W_NxN, 1)):
            q, p = memory.get((index, i, j), (q0, p0))
            D = X[i] - X[j]
            if t // W.period % 2 == 0:
                basis = np.linalg.qr(q)[0]
                p = D @ basis if D.any() else p
                delta = D @ basis @ basis.T
            else:
                basis = np.linalg.qr(p)[0]
                q = D.T @ basis if D.any() else q
                delta = basis @ basis.T @ D
            memory[index, i, j] = q, p
            moved[i] -= W_NxN[i, j] * delta
            moved[j] += W_NxN[i, j] * delta
        new[:, :size] = moved.reshape(N, size)
        x = new + step if order == "awc" else new
        yield x


@pytest.mark.parametrize("name, rank, order, mode", [
    ("ring", 1, "awc", "devices"), ("one_peer_ring", 2, "atc", "simulated"), ("line", 1, "atc", "devices")])
def test_power_gossip_is_that_of_the_paper(name, rank, order, mode):
    topology = topology_lib.make(name, N)
    make_mixer = lambda axis_name: gossip.power_gossip(topology, rank=rank, axis_name=axis_name)
    with jax.enable_x64(True):
        state = make_mixer(None).init(tree(jnp.asarray(X0)))
        (p0,), (q0,) = state.left[0][0], state.right[0][0]
    expected = np.stack([np.tile(X0, (N, 1)), *power(topology, rank, (np.asarray(q0), np.asarray(p0)), order)])
    np.testing.assert_allclose(trajectory(make_mixer, order, mode), expected, rtol=0, atol=1e-8)


def test_power_gossip_at_full_rank_is_plain_gossip():
    topology, square = topology_lib.make("torus", N), (4, 4)
    power_gossip = trajectory(lambda axis_name: gossip.power_gossip(topology, rank=4, axis_name=axis_name), shape=square)
    plain = trajectory(lambda axis_name: gossip.exact(topology, axis_name=axis_name), shape=square)
    np.testing.assert_allclose(power_gossip, plain, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rank, name", [(1, "one_peer_ring"), (2, "ring")])
def test_power_gossip_keeps_the_mean_and_agrees(rank, name):
    topology = topology_lib.make(name, N)
    x_NxP = np.random.default_rng(3).normal(size=(N, P))
    make_mixer = lambda axis_name: gossip.power_gossip(topology, rank=rank, axis_name=axis_name)
    path, _ = mixed(make_mixer, x_NxP, 600, shape=(2, 4, 2))
    assert np.abs(path.mean(axis=1) - x_NxP.mean(axis=0)).max() < 1e-12
    assert np.abs(path[-1] - x_NxP.mean(axis=0)).max() < 1e-6


# -- On devices and simulated, with noise, in nodes -------------------------------------------------------------------


def mixers(codec=None):
    """Every mixer over graphs of all kinds that it takes: name -> axis name -> mixer."""
    def make(build, graph, **options):
        graph_options = {"hierarchical": dict(local=2), "alternating_exponential_ring": dict(local_size=2)}.get(graph, {})
        topology = topology_lib.make(graph, N, **graph_options)
        return lambda axis_name: build(topology, axis_name=axis_name, **options)

    codec = codec or four_bits(stochastic=True)
    return {
        "exact": make(gossip.exact, "one_peer_exponential", codec=codec),
        "choco": make(gossip.choco, "one_peer_exponential", codec=codec),
        "choco, two rounds": make(gossip.choco, "ring", codec=codec, rounds=2),
        "choco, idle workers": make(gossip.choco, "line", codec=codec),
        "choco, nodes": make(gossip.choco, "hierarchical", codec=codec),
        "deepsqueeze": make(gossip.deepsqueeze, "random_matching", codec=codec),
        "deepsqueeze, nodes": make(gossip.deepsqueeze, "alternating_exponential_ring", codec=codec),
        "dcd": make(gossip.dcd, "exponential", codec=codec),
        "beer": make(gossip.beer, "torus", codec=codec),
        "push_sum": make(gossip.push_sum, "random_digraph", codec=codec),
        "push_sum, nodes": make(gossip.push_sum, "alternating_exponential_ring", codec=codec),
        "power_gossip": make(gossip.power_gossip, "ring", rank=2),
        "power_gossip, idle workers": make(gossip.power_gossip, "line", rank=1),
    }


@pytest.mark.parametrize("name", [name for name in mixers() if "nodes" not in name])
def test_devices_and_simulated_workers_take_the_same_steps(name):
    paths = [trajectory(mixers()[name], "awc", mode, wrapper(name)) for mode in MODES]
    # A value between two codes may go either way, and half of a code's distance is all that can make: none did here.
    np.testing.assert_allclose(*paths, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in mixers() if "nodes" in name])
def test_nodes_keep_the_mean_and_agree(name):
    """Devices exchange shares, simulated workers the whole mean: other blocks, other noise, the same properties."""
    x_NxP = np.random.default_rng(3).normal(size=(N, P))
    for mode in MODES:
        path, y = mixed(mixers()[name], x_NxP, 120, mode, local_size=2)
        mean = (path * y[..., None]).mean(axis=1)
        np.testing.assert_allclose(mean, np.tile(x_NxP.mean(axis=0), (120, 1)), rtol=0, atol=1e-12)
        floor = 1.0 if name.startswith("deep") else 1e-12  # Whole parameters are encoded: noise stays.
        assert np.abs(path[-1] - x_NxP.mean(axis=0)).max() < floor
        assert np.abs(path[-1, ::2] - path[-1, 1::2]).max() < 1e-12 or name.startswith("deep")


@pytest.mark.parametrize("name", mixers())
def test_declared_bytes_are_those_of_the_compiled_program(name):
    w = workers("devices", 2 if "nodes" in name else 1)
    mixer = mixers()[name](w.axis_name)
    one = jax.eval_shape(tree, jax.ShapeDtypeStruct((P,), jnp.float32))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((N, *x.shape), x.dtype), one)
    state = jax.eval_shape(w.map(mixer.init, (0,)), stacked)
    for phase in {mixer.phases.start, mixer.phases.stop - 1}:
        exchange = functools.partial(mixer.exchange, phase=phase)
        hlo = jax.jit(w.map(exchange, (0, 0))).lower(stacked, state).compile().as_text()
        np.testing.assert_allclose(wire.bytes_sent(hlo, N), mixer.num_bytes(one, phase))


# -- Replicas replaced by their average ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, order", [
    ("choco", "awc"), ("choco, nodes", "atc"), ("dcd", "awc"), ("dcd", "atc"), ("push_sum", "awc"), ("power_gossip", "atc")])
def test_replicas_that_were_replaced_by_their_average_stay_equal(name, order):
    """Over 20 steps without a gradient, after 20 with one; and the average is what the mixer preserves."""
    w = workers("devices", 2 if "nodes" in name else 1)
    with jax.enable_x64(True):
        mixer = mixers()[name](w.axis_name)
        tx = optim.decentralize(optax.sgd(LR), mixer, order)

        @functools.partial(w.jit, in_axes=(0, 0, 0, None))
        def steps(state, h_PxP, b_P, gain):
            def one_step(state, phase):
                grads = tree(gain * (h_PxP @ flat(state.params) - b_P))
                updates, opt_state = tx.update(grads, state.opt_state, state.params, phase=phase)
                state = state_lib.State(optax.apply_updates(state.params, updates), opt_state)
                return state, jnp.append(flat(state.params), mixer.weight(opt_state.mixer) if mixer.weight else 1.0)
            return scanned(one_step, mixer, 20)(state)

        def path(state, gain):
            state, values = steps(state, H, B, gain)
            values = np.asarray(values).transpose(1, 0, 2)
            return state, values[..., :-1], values[..., -1]

        def mean(x_TxNxP, y_TxN):
            return (x_TxNxP * y_TxN[..., None]).sum(axis=1) / y_TxN.sum(axis=1, keepdims=True)

        params = w.stack(tree(jnp.asarray(X0)))
        apart, before, y = path(state_lib.State(params, w.jit(tx.init, (0,))(params)), 1.0)
        assert np.ptp(before[-1], axis=0).max() > 0.02
        expected = mean(before, y)[-1]
        together = jax.jit(functools.partial(state_lib.consensus, mixer=mixer, workers=w))(apart)
        np.testing.assert_allclose(jax.vmap(flat)(together.params), np.tile(expected, (N, 1)), rtol=0, atol=1e-12)
        _, after, y = path(together, 0.0)
        np.testing.assert_allclose(mean(after, y), np.tile(expected, (len(after), 1)), rtol=0, atol=1e-12)
        if name == "push_sum":  # What it encodes are y_i z_i: noise of the size of what they differed by, which fades.
            assert np.abs(before[-1].mean(axis=0) - expected).max() > 1e-3, "weights made no difference"
            assert np.ptp(after[-1], axis=0).max() < 1e-3 * np.ptp(before[-1], axis=0).max()
        else:
            assert np.ptp(after, axis=1).max() < 1e-12
        if name == "dcd":  # Neighbours that have not been told go on from what they knew.
            _, untold, _ = path(together._replace(opt_state=apart.opt_state), 0.0)
            assert np.ptp(untold[0], axis=0).max() > 1e-3


# -- Resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["choco", "deepsqueeze", "dcd", "beer", "push_sum", "power_gossip"])
def test_resume_is_bit_exact(name, tmp_path):
    w = workers("simulated")
    mixer = mixers()[name](w.axis_name)
    tx = wrapper(name)(optax.adam(LR), mixer)

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


def rows_in_turn():
    """A matrix row by row, one a message; vectors as they are."""
    def encode(x, state, key):
        return {"row": state["next"], "values": x[state["next"]]} if x.ndim == 2 else x

    def decode(message, shape, dtype):
        return jnp.zeros(shape, dtype).at[message["row"]].set(message["values"]) if len(shape) == 2 else message

    def num_bytes(shape, dtype):
        return jnp.dtype(dtype).itemsize * shape[-1] + 4 * (len(shape) == 2)

    return codecs.Codec(
        name="rows_in_turn", encode=encode, decode=decode, num_bytes=num_bytes,
        init=lambda shape, dtype: {"next": jnp.int32(0), "rows": jnp.int32(shape[0])} if len(shape) == 2 else (),
        advance=lambda state, message: state | {"next": (message["row"] + 1) % state["rows"]} if state else (),
        traits=codecs.Traits(contractive=lambda shape: 1 / shape[0], state_key="tensor", matrix=True))


def test_a_codec_of_matrices_sees_them_and_keeps_its_state():
    topology = topology_lib.make("ring", N)
    x_NxP = np.random.default_rng(3).normal(size=(N, P))
    path, _ = mixed(lambda axis_name: gossip.choco(topology, codec=rows_in_turn(), gamma=0.3, axis_name=axis_name), x_NxP, 400)
    rows = path[:, :, :math.prod(MATRIX)].reshape(-1, N, *MATRIX)
    first = np.abs(rows[0] - x_NxP[:, :math.prod(MATRIX)].reshape(N, *MATRIX)).max(axis=(0, 2)) > 0
    second = np.abs(rows[1] - rows[0]).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(first, [True, False, False, False])
    np.testing.assert_array_equal(second, [True, True, False, False])
    assert np.abs(path[-1] - x_NxP.mean(axis=0)).max() < 1e-6


# -- What fits together -----------------------------------------------------------------------------------------------


def test_typical_contraction_and_the_strength_that_follows():
    kept = gossip.typical_contraction(top_k(0.1))
    assert 0.4 < kept < 0.5 and gossip.typical_contraction(four_bits(True)) > 0.9
    x_NxP = np.random.default_rng(3).normal(size=(N, P))
    topology = topology_lib.make("ring", N)
    for codec in (top_k(0.1), four_bits(True)):
        path, _ = mixed(lambda axis_name: gossip.choco(topology, codec=codec, axis_name=axis_name), x_NxP, 400, "simulated")
        assert np.abs(path[-1] - x_NxP.mean(axis=0)).max() < 1e-3


def unbiased():
    return four_bits(contractive=None, unbiased=lambda size: 3.0)


@pytest.mark.parametrize("build, graph, options, complaint", [
    (gossip.choco, "ring", dict(codec=None), "needs a codec"),
    (gossip.choco, "ring", dict(codec=unbiased()), "needs a contractive codec"),
    (gossip.deepsqueeze, "ring", dict(codec=unbiased()), "needs a contractive codec"),
    (gossip.beer, "ring", dict(codec=unbiased()), "needs a contractive codec"),
    (gossip.push_sum, "ring", dict(codec=unbiased()), "needs a contractive codec"),
    (gossip.choco, "random_digraph", dict(codec=four_bits()), "doubly stochastic.*use mixer 'push_sum'"),
    (gossip.choco, "complete", dict(codec=four_bits()), "has no messages"),
    (gossip.choco, "ring", dict(codec=four_bits(), gamma=1.5), "gamma=1.5: must be"),
    (gossip.choco, "ring", dict(codec=four_bits(state_key="sample")), "remembers samples"),
    (gossip.choco, "hierarchical", dict(codec=four_bits(matrix=True)), "sees whole matrices"),
    (gossip.exact, "ring", dict(codec=codecs.bounded()), r"would send the largest; use 'bounded\(raw=False\)'"),
    (gossip.dcd, "ring", dict(codec=top_k(0.1)), "keeps 0.4.* of the energy of noise"),
    (gossip.dcd, "one_peer_exponential", dict(codec=four_bits()), "varies in time; use 'ring'"),
    (gossip.dcd, "hierarchical", dict(codec=four_bits(), local=2, outer="ring"), "has nodes of 2 workers"),
    (gossip.beer, "exponential", dict(codec=four_bits()), "is directed; use 'ring'"),
    (gossip.beer, "one_peer_ring", dict(codec=four_bits()), "varies in time"),
    (gossip.power_gossip, "exponential", dict(rank=1), "is not symmetric; use 'ring'"),
    (gossip.power_gossip, "ring", dict(rank=0), "rank=0: at least one"),
    (gossip.power_gossip, "hierarchical", dict(rank=1, outer="ring"), "whole matrices on every worker"),
])
def test_what_does_not_fit_is_refused(build, graph, options, complaint):
    graph_options = {name: options[name] for name in ("local", "outer") if name in options}
    topology = topology_lib.make(graph, N, **graph_options)
    with pytest.raises(ValueError, match=complaint) as refusal:
        build(topology, **{name: value for name, value in options.items() if name not in graph_options})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("build, graph", [
    (gossip.choco, "ring"), (gossip.dcd, "ring"), (gossip.push_sum, "random_digraph"), (gossip.exact, "hierarchical")])
def test_codecs_that_make_nothing_smaller_are_refused(build, graph):
    topology, like = topology_lib.make(graph, N), jax.eval_shape(tree, jax.ShapeDtypeStruct((P,), jnp.float32))
    mixer = build(topology, codec=codecs.topk(fraction=1.0, values=codecs.bfloat16()))  # 2 bytes, and 1 to say where.
    assert mixer.num_bytes(like, 0).max() > 0
    mixer = build(topology, codec=codecs.topk(fraction=1.0))
    for refused in (lambda: mixer.num_bytes(like, 0), lambda: jax.eval_shape(mixer.init, like)):
        with pytest.raises(ValueError, match="codec 'topk' makes messages of .* bytes of parameters that have .*; use fewer") as refusal:
            refused()
        assert "\n" not in str(refusal.value)


def test_row_stochastic_graphs_are_refused_by_push_sum():
    W_NxN = np.triu(np.ones((N, N)))
    with pytest.raises(ValueError, match="columns of W have to sum to one.*use 'directed_exponential'"):
        gossip.push_sum(topology_lib.from_matrices([W_NxN / W_NxN.sum(axis=1, keepdims=True)]), codec=four_bits())


def test_a_rank_that_no_matrix_has_is_refused():
    mixer = gossip.power_gossip(topology_lib.make("ring", N), rank=4)
    with pytest.raises(ValueError, match="rank=4: no array has both sides that long"):
        mixer.init(tree(jnp.asarray(X0)))


def test_push_sum_damps_its_own_weights():
    mixer = gossip.push_sum(topology_lib.make("directed_ring", N), codec=four_bits())
    with pytest.raises(ValueError, match="use its own gamma"):
        gossip.damp(mixer, 0.5)
    with pytest.raises(ValueError, match="use mixer 'exact' or 'beer'"):
        optim.track(optax.sgd(LR), mixer)
