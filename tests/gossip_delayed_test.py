"""Gossip with delayed parameters against a dense NumPy reference, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import gossip
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.contrib import mixers
from tests.quadratics import LR, MODES, STEPS, X0, N, gradients, trajectory, workers

pytestmark = pytest.mark.usefixtures("quick_compilation")


def make(name="one_peer_exponential", **options):
    topology = topology_lib.make(name, N)
    return lambda channel: mixers.delayed(topology, channel, **options)


def delays(steps=STEPS, **options):
    """τ_{steps x N}, measured with parameters that hold the number of the exchange."""
    w = workers("simulated")
    mixer = make("directed_ring", **options)(Channel(w.axis))

    def run(x):
        def step(carry, t):
            (x,), state = carry
            received = mixer.exchange([x], state, 0)
            _, state = mixer.combine([x], received, state, 0, t)
            return ([x + 1], state), received[0][0]

        return jax.lax.scan(step, ([x], mixer.init([x])), jnp.arange(steps, dtype=jnp.int32))[1]

    sent_NxT = np.asarray(w.jit(run, (0,))(jnp.zeros((N, 1))))  # (x_i' + x_{i−1}') / 2 of the sent values
    sum_TxN = 2 * sent_NxT.T - 2 * np.arange(steps)[:, None]
    return -sum_TxN


def dense(tau_TxN, order, name="one_peer_exponential"):
    """Worker by worker, from the history of all parameters."""
    topology = topology_lib.make(name, N)
    path, start = [np.tile(X0, (N, 1))], np.tile(X0, (N, 1))
    seen = []  # values at the time of the exchange
    x = start
    for t in range(STEPS):
        if order == "atc":
            seen.append(x - LR * gradients(x))
        else:
            seen.append(x)
        W_NxN = topology.matrix(t)
        mixed = np.stack(
            [sum(W_NxN[i, j] * seen[t - (0 if i == j else min(tau_TxN[t][j], t))][j] for j in range(N)) for i in range(N)]
        )
        x = mixed if order == "atc" else mixed - LR * gradients(x)
        path.append(x)
    return np.stack(path)


@pytest.mark.parametrize("mode, order", [("devices", "awc"), ("simulated", "atc")])
def test_constant_delays_are_the_dense_reference(mode, order):
    assert mode in MODES
    path = trajectory(make(delay=3, draw="constant"), order, mode)
    expected = dense(np.full((STEPS, N), 3), order)[: len(path)]
    np.testing.assert_allclose(path, expected, atol=1e-12, rtol=0)


def test_without_delay_it_is_plain_gossip():
    plain = trajectory(lambda channel: gossip.exact(topology_lib.make("ring", N), channel))
    np.testing.assert_array_equal(trajectory(make("ring", delay=0)), plain)


@pytest.mark.parametrize("draw, mean", [("constant", 2.0), ("uniform", 1.0), ("geometric", 0.75)])
def test_delays_have_their_distribution(draw, mean):
    """On the directed ring a worker sees its own delay and one other; both are in 0 … D."""
    both = delays(600, delay=2, draw=draw)[10:]
    assert both.min() >= 0 and both.max() == 4
    assert abs(both.mean() / 2 - mean) < 0.05
    assert draw == "constant" or abs(np.corrcoef(both[:, 0], both[:, 4])[0, 1]) < 0.15


def test_fixed_delays_are_those_of_slow_and_fast_workers():
    both = delays(40, delay=6, fixed=True)[10:]
    assert (both == both[0]).all() and len(set(both[0])) > 3


@pytest.mark.parametrize(
    "name, options, told",
    [("ring", dict(delay=-1), "delay=-1 must be at least 0"), ("complete", {}, "single workers as nodes, got topology 'complete'")],
)
def test_mistakes_are_refused(name, options, told):
    with pytest.raises(ValueError, match=told):
        make(name, **options)(Channel(workers("simulated").axis))


def test_it_sends_what_plain_gossip_sends():
    params = {"w": jnp.zeros((5, 3)), "b": jnp.zeros(3)}
    topology = topology_lib.make("ring", N)
    one, other = (form(topology, Channel()) for form in (functools.partial(mixers.delayed, delay=2), gossip.exact))
    np.testing.assert_array_equal(one.num_bytes(params, 0), other.num_bytes(params, 0))
