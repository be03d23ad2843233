"""Programs without their messages: nothing is sent and all of the arithmetic is left; and the message sizes in `measure.form`."""

import functools

import jax
import numpy as np
import pytest

from configs import lm
from decjax import costmodel, measure, mesh, train
from decjax.measure import profiling as measure_lib
from decjax.program import hlo, jaxpr
from tests.runs import spec_of

WORKERS = 4
pytestmark = pytest.mark.usefixtures("quick_compilation")


def spec(shorthand):
    config = lm.get_config(f"smoke,workers={WORKERS},{shorthand}")
    config.model.update(width=32, hidden=64, depth=1)
    return spec_of(config)


@functools.cache
def form_of(shorthand):
    return measure.form(shorthand, spec(shorthand))


def test_a_worker_hears_itself():
    workers, sums = mesh.make_workers(WORKERS), []

    def talk(x_P):
        return (workers.axis.mean(x_P), workers.axis.all_gather(x_P), workers.axis.exchange(x_P, [(0, 1), (1, 0)]), 2 * x_P)

    x_NxP = np.arange(4.0 * WORKERS, dtype=np.float32).reshape(WORKERS, 4)
    mean, gathered, heard, twice = workers.jit(jaxpr.silent(talk, lambda: workers.axis.index, sums), (0,))(x_NxP)
    np.testing.assert_array_equal(mean, x_NxP / WORKERS)  # its own value is the sum
    np.testing.assert_array_equal(gathered, np.repeat(x_NxP[:, None], WORKERS, axis=1))
    np.testing.assert_array_equal(heard, x_NxP)
    np.testing.assert_array_equal(twice, 2 * x_NxP)
    assert sums == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    "shorthand",
    [
        "method=allreduce,reducer=powersgd,rank=2",
        "method=allreduce,reducer=codec,codec=int8",
        "mixer=choco,codec=int8",
        "topology=base_k,mixer=power_gossip,rank=1",
    ],
)
def test_an_update_computes_all_and_sends_nothing(shorthand):
    form = form_of(shorthand)
    workers, state, phase = form.trainer.workers, form.trainer.init(), form.phases[-1]

    def update(state, grads):
        return form.trainer.method.tx.update(grads, state.opt_state, state.params, phase=phase)

    def compiled(fn):
        return workers.jit(fn, (0, 0)).lower(state, state.params).compile()

    loud, silent = compiled(update), compiled(jaxpr.silent(update, lambda: workers.axis.index))
    assert hlo.bytes_sent(loud.as_text(), WORKERS).min() > 0 and not hlo.bytes_sent(silent.as_text(), WORKERS).any()
    # Nothing is left out; without a message in between, the compiler may compute something twice if that is faster.
    assert 0.95 <= silent.cost_analysis()["flops"] / loud.cost_analysis()["flops"] < 1.3


@pytest.mark.parametrize(
    "shorthand, ratio, latencies",
    [
        ("method=allreduce", 1.0, None),
        ("topology=ring", 1.0, 1.0),
        ("method=allreduce,reducer=codec,codec=bfloat16", 1 / 2, 1.0),  # scattered and gathered
        ("codec=bfloat16", 1 / 2, 1.0),
    ],
)
def test_what_messages_come_to(shorthand, ratio, latencies):
    form = measure.form(shorthand, spec(shorthand))
    assert form.ratio == pytest.approx(ratio, rel=1e-3)
    assert latencies is None or form.latencies == latencies


@pytest.mark.parametrize(
    "shorthand",
    ["method=diloco", "order=atc,codec=int8", "method=allreduce,reducer=gravac", "method=local", "method=allreduce,stale"],
)
def test_other_methods_are_refused(shorthand):
    with pytest.raises(train.ConfigError, match="cannot be measured as a compressed method"):
        measure.form(shorthand, spec(shorthand))


def test_updates_run_again_and_again():
    forms = [form_of(text) for text in ("method=allreduce,reducer=powersgd,rank=2", "mixer=choco,codec=int8")]
    actions = measure_lib.coding_actions(forms)
    assert set(actions) == {(forms[0].name, 0), (forms[1].name, 0), (forms[1].name, 1)}
    for action in [*actions.values()] * 2:
        jax.block_until_ready(action())


def test_coding_is_what_an_update_takes_beyond_what_the_model_adds():
    """The optimizer, and the combination of exact messages; where noise makes the update appear faster, zero."""
    forms = [form_of("method=allreduce,reducer=powersgd,rank=2"), form_of("mixer=choco,codec=int8")]
    workload = costmodel.Workload(0.1, (0.2,), (1e6,), optimizer_s=2e-3, combine_s=1e-3)

    def coding_s(update_s):
        return [measure_lib._compressed(form, update_s, workload).coding_s for form in forms]

    assert coding_s(5e-3) == pytest.approx([3e-3, 2e-3])
    assert coding_s(2.5e-3) == [pytest.approx(0.5e-3), 0.0]
