"""The contract of every reducer, and reducers that wrap reducers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import codecs, reduce
from decjax.channel import Channel
from decjax.contrib.gravac import gravac
from decjax.program import hlo
from tests.reducers import MODES, N, Runner, all_close, assert_equal_replicas, gradients, mean_of, workers, x64
from tests.stand_ins import dithered, one_bit, top

residual, ef21, none = (getattr(codecs.feedback, name) for name in ("residual", "ef21", "none"))
pytestmark = pytest.mark.usefixtures("quick_compilation")


# -- Reducers of reducers ---------------------------------------------------------------------------------------------


@x64
def test_start_at_leaves_the_later_reducer_alone_until_then():
    run = Runner(lambda **options: reduce.start_at(reduce.coded(codec=top(7), **options), 3, reduce.mean(**options)))
    other = Runner(functools.partial(reduce.coded, codec=top(7)))
    assert [run.reducer.phase(step) for step in range(5)] == [0, 0, 0, 1, 1] and run.reducer.phases == range(2)
    for step in range(6):
        expected = mean_of(gradients(step)) if step < 3 else other(gradients(step))
        all_close(run(gradients(step), step), expected, atol=1e-12)


def test_every_averages_in_every_third_step():
    reducer = reduce.every(reduce.start_at(reduce.powersgd(rank=1), 1, reduce.mean()), 3)
    assert [reducer.phase(step) for step in range(9)] == [-1, -1, 0, -1, -1, 1, -1, -1, 1] and reducer.phases == range(-1, 2)
    grads = {"w": jnp.ones((9, 9))}
    state = reducer.init(grads)
    same, same_state = reducer.reduce(grads, state, reduce.SILENT)
    assert same is grads and same_state is state and not reducer.num_bytes(grads, N, reduce.SILENT).any()


def test_phases_of_a_ladder_pass_through():
    w = workers("simulated")
    reducer = reduce.every(reduce.start_at(gravac(ladder=[top(3)], channel=Channel(w.axis)), 1, reduce.mean()), 2)
    assert [reducer.phase(step) for step in range(5)] == [-1, 0, -1, None, -1] and reducer.phases == range(-1, 3)
    grads = {"w": jnp.ones(99)}
    state = w.jit(reducer.init, in_axes=(0,))(w.stack(grads))
    np.testing.assert_array_equal(reducer.usage(jax.tree.map(lambda x: x[0], state)), [0, 0, 0, 0])
    assert reducer.num_bytes(grads, N, 2)[0] == 3 * (2 * 3 * 6 + 8)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: reduce.every(reduce.mean(), 0), "every: period=0 must be at least 1"),
        (lambda: reduce.start_at(reduce.powersgd(), -1, reduce.mean()), "start_at: step=-1 must be at least 0"),
        (lambda: reduce.due_phase(reduce.every(reduce.mean(), 2), None), r"2 phases: give update\(…, phase="),
    ],
)
def test_impossible_reducers_of_reducers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- Contract of every reducer ----------------------------------------------------------------------------------------

REDUCERS = {
    "mean": reduce.mean,
    "powersgd": functools.partial(reduce.powersgd, rank=2, gate=2.0),
    "powersgd after the mean": lambda **options: reduce.start_at(
        reduce.powersgd(rank=2, gate=2.0, **options), 2, reduce.mean(**options)
    ),
    "every third": lambda **options: reduce.every(
        reduce.start_at(reduce.coded(codec=top(7), **options), 1, reduce.mean(**options)), 3
    ),
    "powersgd, bfloat16": functools.partial(reduce.powersgd, rank=2, gate=2.0, wire_dtype="bfloat16"),
    "int8": functools.partial(reduce.coded, codec=codecs.make("int8")),
    "int8, gathered": functools.partial(reduce.coded, codec=codecs.make("int8"), form="gather"),
    "top": lambda channel: reduce.coded(
        dataclasses.replace(channel, bucket_bytes=0), codec=top(1), error=functools.partial(residual, decay=0.9)
    ),
    "one bit": functools.partial(reduce.coded, codec=one_bit(), form="gather"),
    "low rank": functools.partial(reduce.coded, codec=codecs.make("low_rank", rank=1), form="gather"),
    "ef21": functools.partial(reduce.coded, codec=top(7), error=functools.partial(ef21, beta=0.5), form="shards"),
    "dithered": functools.partial(reduce.coded, codec=dithered(), error=none),
}


@pytest.mark.parametrize("name", REDUCERS)
def test_declared_bytes_are_those_of_the_program(name):
    run = Runner(REDUCERS[name], dtype=np.float32)
    for phase in run.reducer.phases:
        measured_N = hlo.bytes_sent(run.program(phase).as_text(), N)
        np.testing.assert_allclose(run.reducer.num_bytes(run.like, N, phase), measured_N, rtol=1e-12)
        assert (measured_N > 0).all() == (phase != reduce.SILENT)


@pytest.mark.parametrize("name", REDUCERS)
def test_simulated_workers_take_the_same_steps(name):
    with jax.enable_x64(True):
        runs = [Runner(REDUCERS[name], mode) for mode in MODES]
        for step in range(8):
            one, other = (run(gradients(step), step) for run in runs)
            if runs[0].reducer.phase(step) != reduce.SILENT:
                assert_equal_replicas(one)
            all_close(one, other, rtol=1e-6, atol=1e-9)
        all_close(*(run.state for run in runs), rtol=1e-6, atol=1e-9)
