"""Methods for heterogeneous data in the loop: resuming, another number of workers, and a learning rate that starts at zero."""

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import lm, quadratics
from decjax.train import state as state_lib
from tests.runs import run_of, trainer_of

STEPS = 8
METHODS = ("qg_dsgdm", "qg_dadam", "decentlam", "exact_diffusion", "d2", "gt_nsgdm", "mc_dsgt,topology=one_peer_ring")
pytestmark = pytest.mark.usefixtures("quick_compilation")


def configured(method, workers=4, **fields):
    config = quadratics.get_config(f"smoke,workers={workers},steps={STEPS},method={method}")
    fields = {"checkpoint.every": 4, "checkpoint.keep": 9, "log_every": 4, "eval.every": STEPS} | fields
    config.update_from_flattened_dict(fields)
    return config


def saved_state(workdir):
    path = (workdir / "checkpoints" / str(STEPS) / "state").absolute()
    return [np.asarray(x) for x in jax.tree.leaves(ocp.StandardCheckpointer().restore(path))]


@pytest.mark.parametrize("method", ["qg_dsgdm", "mc_dsgt,topology=one_peer_ring"])
def test_resume_is_bit_exact(method, tmp_path):
    """With moments, mixer memories, and phases that differ from the mixer's."""
    config = configured(method)
    run_of(config, tmp_path / "whole").train()
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / str(STEPS))
    (tmp_path / "part" / "summary.json").unlink()
    assert run_of(config, tmp_path / "part").train().step == STEPS
    for a, b in zip(saved_state(tmp_path / "whole"), saved_state(tmp_path / "part"), strict=True):
        np.testing.assert_array_equal(a, b)
    assert json.loads((tmp_path / "part" / "summary.json").read_text())["bytes_per_step_per_worker"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_what_another_number_of_workers_makes_meaningless_starts_afresh(method):
    """Trackers and corrections, which must sum to a fixed value over all workers, are reset; momenta are kept."""
    four, two = (trainer_of(configured(method, workers)).abstract for workers in (4, 2))
    filled = [jax.tree.map(lambda x: np.full(x.shape, value, x.dtype), each) for value, each in ((7, four), (0, two))]
    resized = state_lib.resumed(state_lib.resize(state_lib.kept(filled[0], True), 2), filled[1])
    assert jax.tree.structure(resized) == jax.tree.structure(two)
    fresh = {"tracker", "signal", "correction"}
    for path, x in jax.tree_util.tree_leaves_with_path(resized.opt_state):
        name = jax.tree_util.keystr(path[:1], simple=True)
        assert x.shape[:1] == (2,) and (x == (0 if name in fresh else 7)).all(), name


@pytest.mark.parametrize("method", ["qg_dsgdm", "qg_dadam", "decentlam", "gt_nsgdm"])
def test_a_warm_up_from_zero_trains(method):
    trainer = trainer_of(configured(method, **{"schedule.warmup_steps": 4}))
    state = trainer.init()
    for step in range(STEPS):
        state, loss_N = trainer.step(state, trainer.batch(step), step)
    assert np.isfinite(np.asarray(loss_N)).all() and np.isfinite(np.asarray(state.params["x"])).all()


@pytest.mark.parametrize("method", ["qg_dsgdm", "decentlam", "gt_nsgdm"])
def test_decay_that_is_added_to_the_gradient_is_as_small_as_sgds(method):
    """AdamW's decoupled decay would exceed the gradient: normalized steps would lead to zero."""
    as_sgd = lm.get_config("optimizer=sgdm").optimizer.weight_decay
    assert lm.get_config(f"method={method}").method.weight_decay == as_sgd <= 1e-3
