"""experiments.stability: closed forms, and that decjax's own optimizers settle below the limits and not above them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decjax import gossip, mesh, optim, topology
from decjax.channel import Channel
from experiments import stability
from experiments.stability import SCHEMES, Optimizer, Scheme, limit

N = stability.WORKERS


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_limits_have_closed_forms(decay):
    adam, accum = (Optimizer(decay, window) for window in (1, 4))
    for name in ("all-reduce", "atc, complete"):
        assert limit(adam, SCHEMES[name]) == pytest.approx(2 * (1 + decay) / (1 - decay), rel=1e-4)
        assert limit(accum, SCHEMES[name]) == pytest.approx(2 / (1 - decay), rel=1e-4)
    assert limit(adam, SCHEMES["awc, complete"]) == pytest.approx((1 + decay) / (1 - decay), rel=1e-4)
    assert limit(accum, SCHEMES["awc, complete"]) == pytest.approx(1 / (1 - decay), rel=1e-4)
    assert limit(adam, SCHEMES["one step stale"]) == pytest.approx(1, rel=1e-4)


@functools.cache
def workers():
    return mesh.make_workers(N, simulate=True)


def grown(rate, optimizer, scheme, steps=240):
    """How much further from zero the workers are after the second half of a run than after the first one."""
    # Adam's ε outweighs √V, so that V is at rest; rates are divided by ε = 1.
    scale = optim.scale_by_accumulated_adam(optimizer.decay, 0.999, 1.0, optimizer.window)
    mixer = gossip.exact(topology.make(scheme.graph, N), Channel(workers().axis))
    tx = optim.decentralize(optax.chain(scale, optax.scale(-rate)), mixer, scheme.order)
    start = jnp.asarray(1e-20 * np.random.default_rng(0).normal(size=(N, 1)))

    def train(x):
        def step(carry, _):
            x, state = carry
            for phase in range(len(mixer.phases)):
                updates, state = tx.update(x, state, x, phase=phase)
                x: Any = optax.apply_updates(x, updates)
            return (x, state), jnp.abs(x).max()

        return jax.lax.scan(step, (x, tx.init(x)), None, length=steps // len(mixer.phases))[1]

    sizes = np.asarray(workers().jit(train, (0,))(start)).max(axis=0)
    half = len(sizes) // 2
    return sizes[-half // 4 :].max() / sizes[half - half // 4 : half].max()


@pytest.mark.parametrize("optimizer", [Optimizer(0.9), Optimizer(0.8, 4)], ids=lambda made: made.name)
@pytest.mark.parametrize("scheme", [SCHEMES["awc, complete"], SCHEMES["awc, one-peer"], SCHEMES["atc, one-peer"]], ids=str)
def test_training_settles_below_its_limit_only(optimizer, scheme: Scheme):
    most = limit(optimizer, scheme)
    assert grown(0.93 * most, optimizer, scheme) < 1 < grown(1.07 * most, optimizer, scheme)
