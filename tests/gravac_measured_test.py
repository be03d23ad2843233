"""GraVAC with measured speed in training: inputs of its state, compilation, resuming, and refused configs."""

import itertools
import shutil

import jax
import numpy as np
import pytest

from configs import lm, quadratics
from decjax import config as parts
from decjax.contrib.gravac import reducer as gravac_reducer
from decjax.errors import ConfigError
from tests.reducers import N
from tests.runs import run_of, spec_of, trainer_of

pytestmark = pytest.mark.usefixtures("quick_compilation")


def config_of(reducer="window=4,speed=measured", method="allreduce", **fields):
    config = quadratics.get_config(f"workers={N},simulate=false,method={method},steps=24,reducer=gravac({reducer})")
    config.data.dimension = 64
    config.log_every = config.eval.every = config.checkpoint.every = 8
    config.checkpoint.keep = 9
    config.update_from_flattened_dict(fields)
    return config


class Clock:
    """A clock that returns the next of these times whenever it is read."""

    def __init__(self, steps_s):
        self.ends_s = itertools.accumulate(steps_s)

    def __call__(self):
        return float(next(self.ends_s))


@pytest.fixture
def told(monkeypatch):
    """Step times in the order in which the state receives them."""
    told, Pace = [], gravac_reducer.Pace
    tell = Pace._pass_on
    monkeypatch.setattr(Pace, "_pass_on", lambda self, state, step_s: (told.append(step_s), tell(self, state, step_s))[1])
    return told


@pytest.fixture
def clock_of(monkeypatch):
    """Set the seconds by which the clock advances whenever it is read."""
    return lambda steps_s: monkeypatch.setattr(gravac_reducer, "clock", Clock(steps_s))


def trained(trainer, steps, state=None):
    state, rungs = state or trainer.init(), []
    for step in steps:
        rungs.append(int(state.opt_state.reducer.rung[0]))
        state, _ = trainer.step(state, trainer.batch(step), step)
    return state, rungs


def test_the_state_is_told_the_median_of_each_window_without_its_first_step(told, clock_of):
    trainer = trainer_of(config_of())
    #                          compiles          slow: one step beside a checkpoint   a rung that does not pay
    clock_of([90, 1, 1.25, 1.5, 70, 0.5, 9, 0.75, 80, 6, 6, 6, 70, 2, 2, 2, 5, 5, 5])
    state, rungs = trained(trainer, range(16))
    assert told == [1.25, 0.75, 6.0, 2.0]
    assert rungs == [0] * 4 + [1] * 4 + [2] * 4 + [1] * 4
    np.testing.assert_allclose(state.opt_state.reducer.rate[0], [1 / 1.25, 1 / 2.0, 1 / 6.0, 0])
    trained(trainer, [16, 17, 19], state)  # as after a restart: of the steps since then only one end is measured
    assert np.isnan(told[-1])


def test_a_run_that_starts_afresh_within_a_window_is_judged_all_the_same(clock_of):
    """Reducers are reset where a run continues with another number of workers, at any step."""
    trainer = trainer_of(config_of())
    clock_of([1, 4, 70, 3, 3, 3, 70, 2, 2, 2])
    _, rungs = trained(trainer, range(2, 12))
    assert rungs == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_it_compiles_nothing_when_the_rung_changes(caplog, clock_of):
    trainer = trainer_of(config_of())
    clock_of(itertools.chain(*([each] * 4 for each in (4, 3, 2, 1, 1))))
    with jax.log_compiles():
        state, _ = trained(trainer, range(5))
        assert "Compiling" in caplog.text
        caplog.clear()
        _, rungs = trained(trainer, range(5, 18), state)
    assert set(rungs) == {1, 2, 3} and "Compiling" not in caplog.text


@pytest.mark.parametrize("method", ["diloco", "slowmo"])
def test_windows_begin_after_the_exact_steps_and_count_outer_steps(method, told, clock_of):
    """These average every other step: two steps count as one, and each takes half."""
    trainer = trainer_of(config_of("window=3,speed=measured", f"{method},every=2", **{"reducer.start": 2}))
    clock_of([70, 2, 4, 80, 6, 10])
    state, counts = trainer.init(), []
    for step in range(16):
        state, _ = trainer.step(state, trainer.batch(step), step)
        counts.append(len(told))
    assert told == [1.5, 4.0] and counts == [0] * 9 + [1] * 6 + [2]
    *_, zero, one, two, three = np.asarray(jax.vmap(trainer.method.usage)(state.opt_state)[0]).tolist()
    assert (zero, one, two, three) == (3, 3, 0, 0)  # the second rung took longer
    assert trainer.bytes_by_usage(state) > 0


def test_a_continued_run_goes_on_with_its_rung_and_speeds(tmp_path, clock_of):
    run = run_of(config_of(), tmp_path)
    clock_of([1.0] * 24)
    run.train()
    for step in (16, 24):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    (tmp_path / "summary.json").unlink()
    continued = run_of(config_of(), tmp_path)
    before = continued.state.opt_state.reducer
    assert np.asarray(before.usage[0]).tolist() == [4, 4, 0, 0] and int(before.rung[0]) == 0 and bool(before.settled[0])
    np.testing.assert_array_equal(before.rate[0], [1, 1, 0, 0])
    clock_of([0.5] * 24)
    assert continued.train().step == 24
    after = continued.state.opt_state.reducer
    assert np.asarray(after.usage[0]).tolist() == [20, 4, 0, 0]
    np.testing.assert_array_equal(after.rate[0], [2, 1, 0, 0])


# -- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "speed", ["fast", "measured; 1; 2; 3", "1; 2; 3", "1; 2; -3; 4", "1; 2; nan; 4", "1; 2; inf; 4", "0; 1; 2; 3"]
)
def test_a_bad_speed_is_refused_in_one_line(speed):
    with pytest.raises(ConfigError) as raised:
        spec_of(config_of("window=4", **{"reducer.speed": speed}))
    text = str(raised.value)
    assert f"speed={speed!r} needs 4 positive values" in text and "'1; 2; 3; 4'; or 'measured'" in text and "\n" not in text


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"simulate": True}, "simulate with measured speed: .* leave simulate out, or give the speeds"),
        ({"reducer.window": 1}, "window=1 must be at least 2 with speed='measured', which skips the first step"),
    ],
)
def test_what_cannot_be_measured_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(config_of(**fields))


@pytest.mark.parametrize("method", ["onebit_adam", "zero_one_adam", "streaming_diloco,every=4", "slowmo_gossip,topology=ring"])
def test_methods_that_could_not_be_told_refuse_it(method):
    config = lm.get_config(f"smoke,workers=2,method={method},reducer=gravac(window=4,speed=measured)")
    with pytest.raises(ConfigError, match="'gravac'|'codec'"):
        spec_of(config)


def test_a_lone_accelerator_is_refused_too():
    config = config_of()
    config.workers = 0
    with pytest.raises(ConfigError, match="simulate with measured speed"):
        parts.resolve(config, 1, "gpu")
