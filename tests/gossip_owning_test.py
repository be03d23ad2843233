"""Mixers that own the parameters: push-sum's weights, and what happens to memories when replicas are replaced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decjax import gossip, optim
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.contrib import corrections
from decjax.contrib import mixers as contrib_mixers
from decjax.train import state as state_lib
from tests.quadratics import LR, MODES, STEPS, X0, B, H, N, P, flat, mixed, mixers, scanned, tree, workers
from tests.stand_ins import four_bits

pytestmark = pytest.mark.usefixtures("quick_compilation")


# -- Push-sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_push_sum_keeps_mass_and_agrees_exactly_at_four_bits(mode):
    topology = topology_lib.make("random_digraph", N, degree=2)
    assert not topology_lib.is_row_stochastic(topology)
    x_NxP = np.random.default_rng(3).normal(size=(N, P))
    codec = four_bits(stochastic=True)
    z, y = mixed(lambda channel: contrib_mixers.push_sum(topology, codec=codec, channel=channel), x_NxP, 200, mode)
    np.testing.assert_allclose(y.sum(axis=1), N, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.einsum("tn,tnp->tp", y, z), np.tile(x_NxP.sum(axis=0), (200, 1)), rtol=0, atol=1e-12)
    assert np.abs(z[-1] - x_NxP.mean(axis=0)).max() < 1e-12
    assert np.ptp(y[-1]) > 0.1, "without weights it would have been as good"


def test_push_sum_without_a_codec_is_push_sum():
    topology = topology_lib.make("random_digraph", N, degree=2)
    x = x_NxP = np.random.default_rng(3).normal(size=(N, P))
    path, weights = mixed(lambda channel: contrib_mixers.push_sum(topology, channel=channel), x_NxP, STEPS)
    y = np.ones(N)
    for z, weight in zip(path, weights):
        x, y = topology.matrix(0) @ x, topology.matrix(0) @ y
        np.testing.assert_allclose(z, x / y[:, None], atol=1e-12)
        np.testing.assert_allclose(weight, y, atol=1e-12)


def test_row_stochastic_graphs_are_refused_by_push_sum():
    W_NxN = np.triu(np.ones((N, N)))
    with pytest.raises(ValueError, match="a column-stochastic graph, .*use 'directed_exponential'"):
        contrib_mixers.push_sum(topology_lib.from_matrices([W_NxN / W_NxN.sum(axis=1, keepdims=True)]), codec=four_bits())


def test_push_sum_damps_its_own_weights():
    mixer = contrib_mixers.push_sum(topology_lib.make("directed_ring", N), codec=four_bits())
    with pytest.raises(ValueError, match="with its own gamma"):
        gossip.damp(mixer, 0.5)
    with pytest.raises(ValueError, match="use mixer 'exact' or 'beer'"):
        corrections.track(optax.sgd(LR), mixer)


# -- Replicas replaced by their average ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, order",
    [
        ("choco", "awc"),
        ("choco, nodes", "atc"),
        ("dcd", "awc"),
        ("dcd", "atc"),
        ("push_sum", "awc"),
        ("power_gossip", "atc"),
        ("relay", "atc"),
    ],
)
def test_replicas_that_were_replaced_by_their_average_stay_equal(name, order):
    """Over 20 steps without a gradient, after 20 with one; the average is the one that the mixer preserves."""
    w = workers("devices", 2 if "nodes" in name else 1)
    with jax.enable_x64(True):
        mixer = mixers()[name](Channel(w.axis))
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
        if name == "push_sum":  # it encodes y_i z_i: noise of the size of the former disagreement, which decays
            assert np.abs(before[-1].mean(axis=0) - expected).max() > 1e-3, "weights made no difference"
            assert np.ptp(after[-1], axis=0).max() < 1e-3 * np.ptp(before[-1], axis=0).max()
        else:
            assert np.ptp(after, axis=1).max() < 1e-12
        if name == "dcd":  # uninformed neighbors would continue from their old estimates
            _, untold, _ = path(together._replace(opt_state=apart.opt_state), 0.0)
            assert np.ptp(untold[0], axis=0).max() > 1e-3
