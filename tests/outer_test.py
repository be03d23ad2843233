"""SlowMo, gossip DiLoCo and NoLoCo against dense NumPy references written as in the papers, and their limits, in float64."""

import functools

import jax
import numpy as np
import optax
import pytest

from decjax import gossip, optim, reduce, topology
from decjax.contrib import mixers
from decjax.contrib.outer import GossipDiLoCo, NoLoCo, SlowMo, SlowMoGossip
from tests import outer
from tests.outer import LR, START, STEPS, X0, Adam, N, adam, diloco, gradients, graph, trajectory
from tests.stand_ins import dense_top, top

H = 4
MODES = ("devices", "simulated")
pytestmark = pytest.mark.usefixtures("quick_compilation")
rate = optax.linear_schedule(LR, LR / 2, STEPS)
RATES = [float(LR - LR / 2 * t / STEPS) for t in range(STEPS)]


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def exact(name):
    return lambda channel: gossip.exact(graph(name), channel)


# -- SlowMo -----------------------------------------------------------------------------------------------------------


def dense_slowmo(alpha, beta, W=np.eye(N), reset=False, code=None):
    direction, x, anchor, u, e, path = Adam(), START, X0, 0.0, 0.0, [START]
    for t in range(STEPS):
        x = W @ x - RATES[t] * direction(gradients(x, t))
        if (t + 1) % H == 0:
            gamma = np.mean(RATES[t + 1 - H : t + 1])
            change = anchor - x + e
            sent = np.stack([code(row) for row in change]) if code else change
            e = change - sent
            u = beta * u + sent.mean(axis=0) / gamma
            anchor = anchor - alpha * gamma * u
            x = np.tile(anchor, (N, 1))
            direction = Adam() if reset else direction
        path.append(x)
    return np.stack(path)


@pytest.mark.parametrize("mode", MODES)
def test_slowmo_is_the_dense_reference_whose_change_is_compressed_with_error_feedback(mode):
    def make(channel):
        reducer = reduce.coded(channel, codec=top(0.5), form="gather")
        return SlowMo(adam(rate), reducer, N, learning_rate=rate, every=H, outer_learning_rate=0.8, outer_momentum=0.5)

    path, state, _ = trajectory(make, mode)
    # The matrix and the vector share a bucket.
    close(path, dense_slowmo(0.8, 0.5, code=dense_top(0.5)))
    assert all(np.ptp(x, axis=0).max() == 0 for x in jax.tree.leaves((state.anchor, state.momentum)))


@pytest.mark.parametrize("mode", MODES)
def test_slowmo_around_gossip_is_the_dense_reference_with_fresh_moments(mode):
    def make(channel):
        options = dict(every=H, outer_learning_rate=0.8, outer_momentum=0.5, reset=True)
        return SlowMoGossip(
            inner=adam(rate),
            mixer=exact("ring")(channel),
            reducer=reduce.mean(channel),
            num_workers=N,
            learning_rate=rate,
            **options,
        )

    path, _, method = trajectory(make, mode)
    close(path, dense_slowmo(0.8, 0.5, graph("ring").matrix(0), reset=True))
    again, _, _ = trajectory(make, mode, received=True)
    close(again, path, 1e-12)
    one = outer.tree(X0)
    sent = [method.num_bytes(one, method.phase(t))[0] for t in range(H)]
    assert sent == [2 * X0.nbytes] * (H - 1) + [2 * X0.nbytes + 2 * (N - 1) / N * X0.nbytes]


def test_slowmo_without_momentum_is_local_sgd():
    def make(channel):
        return SlowMo(optax.sgd(rate), reduce.mean(channel), N, learning_rate=rate, every=H, outer_momentum=0.0)

    def averaged(channel):
        return optim.DiLoCo(optax.sgd(rate), reduce.mean(channel), N, every=H, outer_learning_rate=1.0, outer_momentum=0.0)

    found, expected = trajectory(make)[0], trajectory(averaged)[0]
    close(found, expected, 1e-14)
    # So is decentralized training in order "atc", with any mixer in every H-th step.
    gossiping = lambda channel: optim.Decentralized(optax.sgd(rate), exact("complete")(channel), order="atc", every=H)
    close(trajectory(gossiping)[0], expected, 1e-14)


# -- Outer steps with neighbors ---------------------------------------------------------------------------------------


def dense_gossip(W_of, eta, mu):
    direction, x, anchor, m, path = Adam(), START, START, 0.0, [START]
    for t in range(STEPS):
        x = x - LR * direction(gradients(x, t))
        if (t + 1) % H == 0:
            delta = anchor - W_of((t + 1) // H - 1) @ x
            m = mu * m + delta
            x = anchor = anchor - eta * (delta + mu * m)
        path.append(x)
    return np.stack(path)


@pytest.mark.parametrize("mode", MODES)
def test_gossip_diloco_is_the_dense_reference_on_a_graph_that_moves(mode):
    rounds = graph("one_peer_exponential")
    make = lambda channel: GossipDiLoCo(adam(LR), gossip.exact(rounds, channel), every=H)
    path, _, method = trajectory(make, mode)
    close(path, dense_gossip(lambda r: rounds.matrix(r % rounds.period), 0.7, 0.9))
    one = outer.tree(X0)
    assert [method.num_bytes(one, method.phase(t))[0] for t in range(H)] == [0] * (H - 1) + [X0.nbytes]


def test_gossip_diloco_on_the_complete_graph_is_diloco():
    path, _, _ = trajectory(lambda channel: GossipDiLoCo(adam(LR), exact("complete")(channel), every=H))
    close(path, diloco(H, 0.7, 0.9))
    same = lambda channel: optim.DiLoCo(adam(LR), reduce.mean(channel), N, every=H)
    close(path, trajectory(same)[0], 1e-13)


def test_an_outer_step_of_rate_one_is_local_sgd_with_gossip():
    options = dict(every=H, outer_learning_rate=1.0, outer_momentum=0.0)
    path, _, _ = trajectory(lambda channel: GossipDiLoCo(optax.sgd(LR), exact("ring")(channel), **options))
    gossiping = lambda channel: optim.Decentralized(optax.sgd(LR), exact("ring")(channel), order="atc", every=H)
    close(path, trajectory(gossiping)[0], 1e-14)


@pytest.mark.parametrize("name", ["random_matching", "complete"])
def test_noloco_is_the_dense_reference_and_with_all_in_a_pair_diloco(name):
    rounds = graph(name, **({"rounds": 3, "seed": 1} if name == "random_matching" else {}))
    alpha, beta, gamma = 0.5, 0.7, 0.9

    def make(channel):
        options = dict(every=H, outer_learning_rate=beta, outer_momentum=alpha, pull=gamma)
        return NoLoCo(adam(LR), gossip.exact(rounds, channel), **options)

    path, _, method = trajectory(make)
    direction, x, phi, delta, expected = Adam(), START, START, 0.0, [START]
    for t in range(STEPS):
        x = x - LR * direction(gradients(x, t))
        if (t + 1) % H == 0:
            W = rounds.matrix(((t + 1) // H - 1) % rounds.period)
            delta = alpha * delta + beta * W @ (x - phi) - gamma * (phi - W @ phi)
            x = phi = phi + delta
        expected.append(x)
    close(path, np.stack(expected))
    if name == "complete":
        close(path, diloco(H, beta, alpha, nesterov=False))
    else:
        assert [method.num_bytes(outer.tree(X0), method.phase(t))[0] for t in range(H)] == [0] * (H - 1) + [2 * X0.nbytes]


def test_a_mixer_with_a_memory_may_be_the_outer_average():
    """CHOCO mixes the parameters of outer steps; equal workers stay equal, and others move about as they do without a codec."""
    choco = lambda channel: gossip.choco(graph("ring"), channel, codec=top(0.5))
    options = dict(every=H, outer_learning_rate=0.7, outer_momentum=0.0)
    make = lambda build: lambda channel: GossipDiLoCo(optax.sgd(0.0), build(channel), **options)
    path, _, _ = trajectory(make(choco))
    close(path, np.broadcast_to(START, path.shape), 1e-12)  # equal workers stay equal
    path, state, _ = trajectory(lambda channel: GossipDiLoCo(optax.sgd(LR), choco(channel), **options))
    plain, _, _ = trajectory(lambda channel: GossipDiLoCo(optax.sgd(LR), exact("ring")(channel), **options))
    assert np.abs(path[-1].mean(axis=0) - plain[-1].mean(axis=0)).max() < 0.1 and path.shape == plain.shape
    assert isinstance(state.mixer, gossip.CompressedState)


def test_what_cannot_be_is_refused_in_one_line():
    push_sum = mixers.push_sum(topology.make("directed_ring", N))
    mean, control = reduce.mean(), mixers.consensus_control(topology.make("ring", N))
    for make, message in (
        (functools.partial(GossipDiLoCo, mixer=push_sum), "need not see every step, got mixer 'push_sum'; use"),
        (functools.partial(NoLoCo, mixer=push_sum), "need not see every step, got mixer 'push_sum'; use"),
        (
            functools.partial(NoLoCo, mixer=gossip.exact(graph()), pull=-1.0),
            "a pull between 0 and 3, or workers drift apart, got pull '-1.0'",
        ),
        (
            functools.partial(NoLoCo, mixer=mixers.relay(topology.make("line", N))),
            "a mixer of this step's parameters, got mixer 'relay'; use",
        ),
        (
            functools.partial(GossipDiLoCo, mixer=mixers.delayed(graph())),
            "a mixer of this step's parameters, got mixer 'delayed'; use",
        ),
        (
            functools.partial(NoLoCo, mixer=gossip.exact(graph()), pull=4.0),
            "a pull between 0 and 3, or workers drift apart, got pull '4.0'",
        ),
        (functools.partial(GossipDiLoCo, mixer=control), "'gossip_diloco' .* known beforehand, got .*; use mixer 'exact'"),
        (functools.partial(NoLoCo, mixer=control), "'noloco' .* known beforehand, got .*; use mixer 'exact'"),
        (functools.partial(SlowMoGossip, mixer=push_sum, reducer=mean, num_workers=N, learning_rate=rate), "with equal weights"),
        (
            functools.partial(SlowMoGossip, mixer=control, reducer=mean, num_workers=N, learning_rate=rate),
            "known beforehand, got mixer .*; use mixer",
        ),
    ):
        with pytest.raises(ValueError, match=message) as error:
            make(inner=optax.sgd(LR))
        assert "\n" not in str(error.value)
