"""PowerGossip against the paper's algorithm, edge by edge in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import gossip
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.contrib import mixers
from tests.quadratics import LR, MATRIX, STEPS, X0, N, P, gradients, mixed, trajectory, tree

pytestmark = pytest.mark.usefixtures("quick_compilation")


def power(W, rank, start, order):
    """Dense PowerGossip: q and p of every edge {i < j}, as in the paper's algorithm."""
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


@pytest.mark.parametrize(
    "name, rank, order, mode",
    [("ring", 1, "awc", "devices"), ("one_peer_ring", 2, "atc", "simulated"), ("line", 1, "atc", "devices")],
)
def test_power_gossip_is_that_of_the_paper(name, rank, order, mode):
    topology = topology_lib.make(name, N)
    make_mixer = lambda channel: mixers.power_gossip(topology, rank=rank, channel=channel)
    with jax.enable_x64(True):
        state = make_mixer(Channel()).init(tree(jnp.asarray(X0)))
        (p0,), (q0,) = state.left[0][0], state.right[0][0]
    expected = np.stack([np.tile(X0, (N, 1)), *power(topology, rank, (np.asarray(q0), np.asarray(p0)), order)])
    np.testing.assert_allclose(trajectory(make_mixer, order, mode), expected, rtol=0, atol=1e-8)


def test_power_gossip_at_full_rank_is_plain_gossip():
    topology, square = topology_lib.make("torus", N), (4, 4)
    power_gossip = trajectory(lambda channel: mixers.power_gossip(topology, rank=4, channel=channel), shape=square)
    plain = trajectory(lambda channel: gossip.exact(topology, channel=channel), shape=square)
    np.testing.assert_allclose(power_gossip, plain, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rank, name", [(1, "one_peer_ring"), (2, "ring")])
def test_power_gossip_keeps_the_mean_and_agrees(rank, name):
    topology = topology_lib.make(name, N)
    x_NxP = np.random.default_rng(3).normal(size=(N, P))
    make_mixer = lambda channel: mixers.power_gossip(topology, rank=rank, channel=channel)
    path, _ = mixed(make_mixer, x_NxP, 600, shape=(2, 4, 2))
    assert np.abs(path.mean(axis=1) - x_NxP.mean(axis=0)).max() < 1e-12
    assert np.abs(path[-1] - x_NxP.mean(axis=0)).max() < 1e-6


def test_a_rank_that_no_matrix_has_is_refused():
    mixer = mixers.power_gossip(topology_lib.make("ring", N), rank=4)
    with pytest.raises(ValueError, match="no array has two sides of at least rank=4"):
        mixer.init(tree(jnp.asarray(X0)))
