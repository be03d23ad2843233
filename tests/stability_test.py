"""experiments.stability: closed forms, and decjax's optimizers settle below the limits and not above them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decjax import gossip, mesh, optim, reduce, topology
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


def grown(rate, optimizer, scheme):
    """Return how much further from zero the workers are after the second half of a run than after the first."""
    # Adam's ε exceeds √V, so that V has no effect; rates are divided by ε = 1. On one-peer graphs it takes longer until the largest
    # eigenvalue dominates; on others, x would grow so large in that time that V matters.
    steps = 120 if scheme.graph == "complete" else 240
    scale = optim.scale_by_accumulated_adam(optimizer.decay, 0.999, 1.0, optimizer.window)
    inner, channel = optax.chain(scale, optax.scale(-rate)), Channel(workers().axis)
    start, phases = 1e-30 * np.random.default_rng(0).normal(size=(N, 1)), (0,)
    if scheme.order in ("mean", "stale"):
        tx = optim.synchronize(inner, reduce.mean(channel), stale=scheme.order == "stale")
        start = np.broadcast_to(start[:1], (N, 1))  # all-reduce preserves differences between parameters
    else:
        mixer = gossip.exact(topology.make(scheme.graph, N), channel)
        tx, phases = optim.decentralize(inner, mixer, scheme.order), mixer.phases

    def train(x):
        def step(carry, _):
            x, state = carry
            for phase in range(len(phases)):
                updates, state = tx.update(x, state, x, phase=phase)
                x: Any = optax.apply_updates(x, updates)
            return (x, state), jnp.abs(x).max()

        return jax.lax.scan(step, (x, tx.init(x)), None, length=steps // len(phases))[1]

    sizes = np.asarray(workers().jit(train, (0,))(jnp.asarray(start))).max(axis=0)
    half = len(sizes) // 2
    return sizes[-half // 4 :].max() / sizes[half - half // 4 : half].max()


@pytest.mark.parametrize("optimizer", [Optimizer(0.9), Optimizer(0.8, 4)], ids=lambda made: made.name)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_training_settles_below_its_limit_only(optimizer, scheme: Scheme):
    most = limit(optimizer, scheme)
    assert grown(0.93 * most, optimizer, scheme) < 1 < grown(1.07 * most, optimizer, scheme)
