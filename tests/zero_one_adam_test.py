"""0/1 Adam against a dense NumPy reference written as in the paper, and its limit, in float64."""

import jax
import numpy as np
import optax
import pytest

from decjax import reduce
from decjax.channel import Channel
from decjax.contrib import onebit
from tests import outer
from tests.outer import LR, START, STEPS, X0, N, gradients, trajectory
from tests.stand_ins import dense_top, identity, top

B1, B2, EPS, DECAY = 0.9, 0.99, 1e-8, 0.1
FREEZE, KAPPA, DOUBLING, MOST = 8, 2, 4, 4
# k_0 = 0, then two steps of 1, two of 2, …; and blocks of 1, 1, 1, 1, 2, 2, 4, 4 steps.
T_V = [0, 1, 2, 4, 6]
T_U = [*range(12), 13, 15, 19, 23]
pytestmark = pytest.mark.usefixtures("quick_compilation")
rate = optax.linear_schedule(LR, LR / 2, STEPS)
RATES = [float(LR - LR / 2 * t / STEPS) for t in range(STEPS)]


def method(codec, start=FREEZE, **options):
    def make(channel):
        coded = reduce.coded(channel, codec=codec, form="gather")
        options.setdefault("refresh", KAPPA)
        schedule = reduce.start_at(coded, start, reduce.mean(channel))
        chosen = dict(weight_decay=DECAY, doubling=DOUBLING, local_steps=MOST) | options
        return onebit.ZeroOneAdam(schedule, N, learning_rate=rate, clip=optax.identity(), **chosen)

    return make


@pytest.mark.parametrize("mode", ["devices", "simulated"])
def test_it_is_the_dense_reference(mode):
    path, state, _ = trajectory(method(top(0.5)), mode)
    code = dense_top(0.5)
    x, anchor, m, v, u, e, rates, expected = START, X0, 0.0, 0.0, 0.0, 0.0, 0.0, [START]
    for t in range(STEPS):
        g, gamma = gradients(x, t), RATES[t]
        if t in T_V:
            v = B2 * v + (1 - B2) * g.mean(axis=0) ** 2
        m = B1 * m + (1 - B1) * g
        u, rates = u + gamma * m, rates + gamma
        if t in T_U:
            sent = np.stack([code(row) for row in u + e])
            e = u + e - sent
            anchor = anchor - DECAY * rates * anchor - sent.mean(axis=0) / (np.sqrt(v) + EPS)
            m, x, u, rates = sent.mean(axis=0) / rates, np.tile(anchor, (N, 1)), 0.0, 0.0
        else:
            x = x - gamma * (m / (np.sqrt(v) + EPS) + DECAY * x)
        expected.append(x)
    np.testing.assert_allclose(path, np.stack(expected), rtol=0, atol=1e-6)
    assert all(np.ptp(x, axis=0).max() == 0 for x in jax.tree.leaves((state.anchor, state.nu)))


def test_a_step_sends_what_is_due():
    made, one = method(top(1))(Channel()), outer.tree(X0)
    exact, coded = 2 * (N - 1) / N * X0.nbytes, (N - 1) * (1 + 8 + 2)  # a flag, a value and its position
    sent = [made.num_bytes(one, made.phase(t))[0] for t in range(STEPS)]
    assert sent == [exact * (t in T_V) + coded * (t in T_U) for t in range(STEPS)]


def test_with_every_variance_and_momentum_as_they_are_it_is_adam_without_corrections():
    path, _, _ = trajectory(method(identity(), start=STEPS, refresh=STEPS, weight_decay=0.0))
    x, m, v = X0, 0.0, 0.0
    for t in range(STEPS):
        g = gradients(np.tile(x, (N, 1)), t).mean(axis=0)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        x = x - RATES[t] * m / (np.sqrt(v) + EPS)
        np.testing.assert_allclose(path[t + 1], np.tile(x, (N, 1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "reducer, options, message",
    [
        (reduce.mean(), {}, "give reducer.start of at least 1"),
        (None, dict(local_steps=3), "a power of two, since local steps double, got local_steps '3'"),
        (None, dict(refresh=0), "refresh=0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(reducer, options, message):
    reducer = reducer or reduce.start_at(reduce.coded(codec="int8"), 2, reduce.mean())
    with pytest.raises(ValueError, match=message) as error:
        onebit.ZeroOneAdam(reducer, N, learning_rate=rate, clip=optax.identity(), **options)
    assert "\n" not in str(error.value)
