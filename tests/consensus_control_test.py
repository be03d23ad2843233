"""Gossip repeated until the workers are close, against a dense NumPy reference in float64."""

import json

import jax
import numpy as np
import optax
import pytest

from configs import quadratics as config
from decjax import gossip, optim
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.contrib import mixers
from tests.quadratics import LR, MODES, STEPS, X0, B, H, N, flat, gradients, tree, workers
from tests.runs import run_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
W_NxN = topology_lib.make("ring", N).matrix(0)


def make(channel, name="ring", **options) -> gossip.Mixer:
    return mixers.consensus_control(topology_lib.make(name, N), channel, **options)


def dense(target, rounds, steps=0):
    """Return (path, rounds of each step), with the paper's loop around the ring's round."""
    x, largest, path, taken = np.tile(X0, (N, 1)), 0.0, [], []
    for t in range(STEPS):
        x, count, first, distance = x - LR * gradients(x), 0, True, 0.0
        while first or (count < rounds and distance > target * largest and (not steps or t < steps)):
            mixed = W_NxN @ x
            distance = np.sqrt(np.square(x - mixed).sum(axis=1).mean())
            largest, first = max(largest, distance) if first else largest, False
            x, count = mixed, count + 1
        path.append(x)
        taken.append(count)
    return np.stack(path), taken


@pytest.mark.parametrize(
    "mode, options", [("devices", dict(target=0.3, rounds=4)), ("simulated", dict(target=0.5, rounds=6, steps=20))]
)
def test_it_is_the_dense_reference_and_counts_its_rounds(mode, options):
    assert mode in MODES
    w = workers(mode)
    with jax.enable_x64(True):
        tx = optim.decentralize(optax.sgd(LR), make(Channel(w.axis), **options), "atc")

        def whole(x_P, h_PxP, b_P):
            def step(carry, _):
                params, state = carry
                updates, state = tx.update(tree(h_PxP @ flat(params) - b_P), state, params)
                params = optax.apply_updates(params, updates)
                return (params, state), flat(params)

            start = tree(x_P)
            (_, state), path = jax.lax.scan(step, (start, tx.init(start)), length=STEPS)
            return path, state.mixer.usage  # pyright: ignore[reportAttributeAccessIssue]

        path, usage = w.jit(whole, (0, 0, 0))(np.tile(X0, (N, 1)), H, B)
    expected, taken = dense(**options)
    np.testing.assert_allclose(np.asarray(path).transpose(1, 0, 2), expected, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(usage, np.tile(np.bincount(taken, minlength=options["rounds"] + 1)[1:], (N, 1)))
    assert len(set(taken)) > 1


@pytest.mark.parametrize("method", ["decentralized", "qg_dsgdm", "qg_dadam", "decentlam"])
def test_bytes_are_counted_as_they_come(tmp_path, method):
    made = config.get_config(f"simulate,workers=8,topology=ring,method={method},mixer=consensus_control(rounds=5),steps=40")
    made.log_every = 10
    run = run_of(made, tmp_path / "run")
    run.train()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    trainer = run.trainer
    one = trainer.workers.one_device(trainer.abstract.params)
    each = [float(trainer.method.num_bytes(one, phase)[0]) for phase in trainer.method.phases]
    assert each[0] < summary["bytes_per_step_per_worker"] < each[-1]
    np.testing.assert_allclose(np.diff(each), each[0])


@pytest.mark.parametrize(
    "name, options, told",
    [
        ("one_peer_exponential", {}, "needs a static graph, got topology 'one_peer_exponential'; use 'ring'"),
        ("ring", dict(target=1.0), "target=1.0 must be more than 0 and less than 1"),
        ("ring", dict(rounds=0), "rounds=0 must be at least 1"),
        ("ring", dict(steps=-1), "steps=-1 must be at least 0"),
    ],
)
def test_mistakes_are_refused(name, options, told):
    with pytest.raises(ValueError, match=told) as refusal:
        make(Channel(), name, **options)
    assert "\n" not in str(refusal.value)


def test_what_does_not_go_with_it_is_refused():
    mixer = make(Channel())
    with pytest.raises(ValueError, match="known beforehand .* unlike those of mixer 'consensus_control'; use every=1"):
        gossip.every(mixer, 2)
    with pytest.raises(ValueError, match="made for order 'atc'"):
        optim.decentralize(optax.sgd(LR), mixer, "awc")
