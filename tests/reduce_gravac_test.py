"""GraVAC against the ladder as described in decjax/contrib/gravac, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm
from decjax import codecs
from decjax.contrib.gravac import gravac
from decjax.program import hlo
from tests.reducers import MODES, STEPS, DenseShards, N, Runner, assert_equal_replicas, flat, gradients, x64
from tests.stand_ins import dense_top, top

pytestmark = pytest.mark.usefixtures("quick_compilation")


class DenseGravac:
    """The ladder of the module's docstring, with top-k codes."""

    def __init__(self, ks, speed, window, threshold):
        self.codes = [lambda x: x, *map(dense_top, ks)]
        self.speed, self.window, self.threshold = speed, window, threshold
        self.rung, self.settled, self.below, self.steps, self.e = 0, False, 0.0, 0, 0.0
        self.sums, self.shards = np.zeros(2), DenseShards()

    def __call__(self, g):
        x = self.e + g
        messages, averaged = self.shards(x, self.codes[self.rung])
        self.e = x - messages
        self.sums += (messages**2).sum(), (x**2).sum()
        self.steps += 1
        if self.steps % self.window == 0:
            gain = self.sums[0] / self.sums[1]
            score = self.speed[self.rung] * gain
            if (self.rung and gain < self.threshold) or (not self.settled and self.rung and score <= self.below):
                self.rung, self.settled = self.rung - 1, True
            elif not self.settled and self.rung + 1 < len(self.codes):
                self.rung, self.below = self.rung + 1, score
            else:
                self.settled = True
            self.sums[:] = 0
        return averaged


@pytest.mark.parametrize(
    "speed, threshold, last",
    [((1, 9, 81, 729), 0.0, 3), ((1, 9, 81, 729), 0.6, 1), ((1, 2, 2.1, 4), 0.0, 1)],
    ids=["climbs", "falls back", "stops"],
)
@pytest.mark.parametrize("mode", MODES)
@x64
def test_gravac_is_the_dense_reference(mode, speed, threshold, last):
    ks = (15, 6, 4)  # of 29 values in a shard
    run = Runner(functools.partial(gravac, ladder=[top(k) for k in ks], window=4, speed=speed, threshold=threshold), mode)
    dense = DenseGravac(ks, speed, 4, threshold)
    padded = lambda grads: np.pad(flat(grads), [(0, 0), (0, 1)])  # 115 values are 4 shards of 29
    used = np.zeros(4)
    for step in range(STEPS):
        used[dense.rung] += 1
        out = run(gradients(step))
        np.testing.assert_allclose(flat(out)[0], dense(padded(gradients(step)))[:-1], rtol=1e-6, atol=1e-9)
        assert_equal_replicas(out)
    assert np.asarray(run.state.rung).tolist() == [last] * N == [dense.rung] * N
    np.testing.assert_array_equal(run.reducer.usage(run.state), np.tile(used, (N, 1)))
    assert len(run.compiled) == 1


def test_gravac_climbs_the_default_ladder_and_falls_back_when_the_gain_drops():
    """All rungs keep a few large values; of normal values, a rung 5 % above the default ones keeps a quarter of the energy."""
    defaults = [codecs.make(name.strip()) for name in lm.get_config("method=allreduce,reducer=gravac").reducer.ladder.split(";")]
    rng = np.random.default_rng(0)
    like = {"w": np.zeros((N, 2048), np.float32)}
    run = Runner(
        functools.partial(gravac, ladder=[*defaults, codecs.make("topk", fraction=0.05)], window=4), like=like, dtype=np.float32
    )
    sent_on = np.array([run.reducer.num_bytes(run.like, N, rung)[0] for rung in run.reducer.phases])
    rungs, usage = [], [np.zeros(5)]
    for step in range(40):
        grads = {"w": rng.normal(size=(N, 2048)) * (1 if step >= 22 else 0.01)}
        if step < 22:
            grads["w"][:, ::128] += 10
        rungs.append(int(run.state.rung[0]))
        assert_equal_replicas(run(grads))
        usage.append(np.asarray(run.reducer.usage(run.state))[0])
    assert rungs[:20] == np.repeat(range(5), 4).tolist() and set(rungs[28:]) == {3}
    assert (np.diff(sent_on) < 0).all() and sent_on[3] < 0.15 * sent_on[0]
    np.testing.assert_array_equal(np.diff(usage, axis=0) @ sent_on, sent_on[rungs])


def test_gravac_delivers_everything_in_the_end():
    """While climbing and falling back: Σ averaged + memory of owners + mean memory of workers = Σ mean g."""
    run = Runner(functools.partial(gravac, ladder=[top(9), top(4)], window=5, threshold=0.7), dtype=np.float32)
    total = sum(flat(run(gradients(step)))[0] for step in range(30))
    assert (np.asarray(run.reducer.usage(run.state))[0] > 0).sum() > 1
    kept = np.asarray(run.state.error[0]).mean(axis=0).ravel() + np.asarray(run.state.owner_error[0]).ravel()
    expected = sum(flat(gradients(step)).mean(axis=0) for step in range(30))
    np.testing.assert_allclose(total + kept[: total.size], expected, atol=1e-4)


def test_gravac_sends_what_the_rung_in_use_declares():
    """The program contains all rungs as branches; its collectives add up to the declared bytes of all."""
    run = Runner(functools.partial(gravac, ladder=[codecs.make("int8"), top(3)]), dtype=np.float32)
    declared = sum(run.reducer.num_bytes(run.like, N, rung) for rung in run.reducer.phases)
    np.testing.assert_allclose(hlo.bytes_sent(run.program(None).as_text(), N), declared, rtol=1e-12)
    assert not run.reducer.num_bytes(run.like, N, None).any()


# -- Measured speed ---------------------------------------------------------------------------------------------------

KS, WINDOW = (15, 6), 4  # of 29 values in a shard
OWN = np.array([2.5, 0.5, 0.4, 0.6])  # seconds on each worker's clock per second


class DenseMeasured:
    """The paper's rule: (steps ÷ seconds) · gain of a window, by the mean of all workers' seconds."""

    def __init__(self):
        self.codes = [lambda x: x, *map(dense_top, KS)]
        self.rung, self.settled, self.below, self.steps, self.e = 0, False, 0.0, 0, 0.0
        self.sums, self.shards, self.rate = np.zeros(2), DenseShards(), np.zeros(1 + len(KS))

    def __call__(self, g):
        x = self.e + g
        messages, averaged = self.shards(x, self.codes[self.rung])
        self.e = x - messages
        self.sums += (messages**2).sum(), (x**2).sum()
        self.steps += 1
        return averaged

    def observe(self, step_s_N):
        gain, self.rate[self.rung] = self.sums[0] / self.sums[1], 1 / step_s_N.mean()
        self.sums[:] = 0
        score = self.rate[self.rung] * gain
        if self.rung and not self.settled and score <= self.below:
            self.rung, self.settled = self.rung - 1, True
        elif not self.settled and self.rung + 1 < len(self.codes):
            self.rung, self.below = self.rung + 1, score
        else:
            self.settled = True


def measured(channel):
    return gravac(channel, ladder=[top(k) for k in KS], window=WINDOW, threshold=0.0, speed="measured")


def decided(runner, seconds_of_rung, steps, dense=None):
    """Return the rungs of all steps; a step takes each worker `seconds_of_rung`, a number or one per worker, by its own clock."""
    rungs, observe = [], runner.workers.jit(runner.reducer.observe, (0, 0), donate_argnums=(0,))
    for step in range(steps):
        rungs.append(int(runner.state.rung[0]))
        out = runner(gradients(step))
        if dense:
            expected = dense(np.pad(flat(gradients(step)), [(0, 0), (0, 1)]))[:-1]  # 115 values are 4 shards of 29
            np.testing.assert_allclose(flat(out)[0], expected, rtol=1e-6, atol=1e-9)
            assert dense.rung == rungs[-1]
        if (step + 1) % WINDOW == 0:
            seconds_N = np.multiply(seconds_of_rung[rungs[-1]], OWN)
            runner.state = observe(runner.state, jax.device_put(seconds_N, runner.workers.stacked))
            assert_equal_replicas(jax.tree.map(np.asarray, (runner.state.rung, runner.state.score, runner.state.rate)))
            if dense:
                dense.observe(seconds_N)
                np.testing.assert_allclose(runner.state.rate[0], dense.rate, rtol=1e-9)
    assert len(runner.compiled) == observe._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]
    return rungs


ALONE = ([0.1, 4, 4, 4], [1.0, 0.01, 0.01, 0.01], 0.001)  # worker 0 alone would stay on rung 0


@pytest.mark.parametrize(
    "seconds, last",
    [((1.0, 0.1, 0.01), 2), ((1.0, 0.1, 0.2), 1), ((1.0, 1.0, 0.01), 0), (ALONE, 2)],
    ids=["climbs", "stops", "stays", "clocks disagree"],
)
@pytest.mark.parametrize("mode", MODES)
@x64
def test_decisions_are_those_of_the_dense_reference(mode, seconds, last):
    rungs = decided(Runner(measured, mode), seconds, 24, DenseMeasured())
    assert rungs[-1] == last and rungs[:8] == [0] * 4 + [1] * 4


def test_a_window_without_seconds_is_prolonged():
    runner = Runner(measured, dtype=np.float32)
    observe = runner.workers.jit(runner.reducer.observe, (0, 0))
    for step in range(WINDOW):
        runner(gradients(step))
    for unknown in (np.nan, np.inf, 0.0):  # of one worker; 0: of all
        step_s_N = np.array([1.0, unknown, 1.0, 1.0], np.float32) if unknown else np.zeros(N, np.float32)
        told = observe(runner.state, jax.device_put(step_s_N, runner.workers.stacked))
        jax.tree.map(np.testing.assert_array_equal, told, runner.state)
    told = observe(runner.state, jax.device_put(np.ones(N, np.float32), runner.workers.stacked))
    assert np.asarray(told.rung).tolist() == [1] * N


# -- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: gravac(ladder=[codecs.make("int4"), codecs.make("int8")]).num_bytes({"w": jnp.ones(10**4)}, 8),
            "rung 'int8' sends .*; use a ladder from the mildest",
        ),
        (lambda: gravac(ladder=[]), "needs at least one codec"),
        (lambda: gravac(ladder=[codecs.make("sign")]), "codec 'sign' is neither contractive"),
        (lambda: gravac(ladder=[top(3)], window=0), "window=0 must be at least 1"),
        (lambda: gravac(ladder=[top(3)], threshold=2.0), "threshold=2.0 must be at least 0 and at most 1"),
        (lambda: gravac(ladder=[top(3)], speed=(1.0,)), "needs 2 positive values"),
        (lambda: gravac(ladder="int8; int4", speed="1; 2"), "needs 3 positive values"),
        (lambda: gravac(ladder="int8; int5"), "codec 'int5' is unknown"),
    ],
)
def test_impossible_ladders_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
