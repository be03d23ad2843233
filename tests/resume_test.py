"""Runs that continue: bit for bit, after damage, from another run, with another number of workers."""

import json
import shutil
import signal
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits
from decjax import registry, train
from decjax.optim import DecentralizeState
from decjax.train import checkpoint
from decjax.train import state as state_lib
from decjax.train.workdir import steps_saved
from tests.runs import run_of
from tests.tiny_runs import RICH, STEPS, assert_equal_states, forget_after, launch, losses, prepare, reference, rows, text  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_resume_is_bit_exact(launch, reference, tmp_path):
    resumed, _ = launch("optimizer=accum_adamw", workdir=forget_after(reference, 4, tmp_path / "run"), **RICH)
    assert_equal_states(reference, resumed)
    untimed = [
        [{k: v for k, v in row.items() if k not in ("time_s", "tokens_per_s")} for row in rows(d) + rows(d, "eval")]
        for d in (reference, resumed)
    ]
    assert untimed[0] == untimed[1]
    assert rows(resumed)[-1]["time_s"] > rows(reference)[0]["time_s"], "time continues, it does not restart"


class HangUp(train.Tracker):
    """A terminal that is closed after the sixth step."""

    def log(self, step, kind, values):
        pass

    def step(self, step):
        if step == 6:
            signal.raise_signal(signal.SIGHUP)


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_stops_a_run_after_it_has_saved(prepare, reference, tmp_path, nohup):
    """SIGHUP once ended launch.train without a checkpoint; under nohup it is ignored."""
    run = prepare("optimizer=accum_adamw", workdir=forget_after(reference, 4, tmp_path / "run"), **RICH)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else lambda *_: pytest.fail("the run does not handle SIGHUP"))
    try:
        outcome = run.train([lambda run: HangUp()])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (outcome.step, outcome.signal) == ((STEPS, None) if nohup else (6, signal.SIGHUP))
    assert steps_saved(run.workdir)[-1] == outcome.step


@pytest.mark.parametrize("workers", ["workers=3", "workers=12,simulate"])
def test_another_number_of_workers(launch, reference, workers):
    target, outcome = launch(f"optimizer=accum_adamw,topology=ring,{workers}", resume_from=reference, steps=STEPS + 4, **RICH)
    assert outcome.step == STEPS + 4
    assert rows(target)[0]["step"] == 16, "steps go on from where the other run stood"


class Remembered(NamedTuple):
    """The memory of a user's optimizer, in fields named like some of decjax's."""

    gradient: Any
    source: Any
    params: Any
    mixer: Any
    reducer: Any
    count: Any


@registry.register("optimizer", "remembering")
def remembering(learning_rate, *, decay: float = 0.5) -> optax.GradientTransformation:
    """SGD along five means of the gradient."""

    def init(params):
        return Remembered(*[jax.tree.map(jnp.zeros_like, params) for _ in range(5)], jnp.zeros((), jnp.int32))

    def update(grads, state, params=None):
        means = [jax.tree.map(lambda m, g: decay * m + g, mean, grads) for mean in state[:5]]
        return means[0], Remembered(*means, state.count + 1)

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate))


@pytest.mark.parametrize("argument", ["mixer=choco,codec=int8,topology=ring", "method=allreduce,reducer=powersgd,rank=1"])
def test_an_optimizer_whose_fields_are_called_like_ours_is_carried_over_whole(prepare, argument):
    """To fewer workers: each mean is the average of its replicas'; only per-edge state is reset."""
    argument = f"optimizer=remembering,simulate,{argument}"
    source = prepare(f"{argument},workers=4", steps=4)
    source.train()
    target = prepare(f"{argument},workers=2", resume_from=source.workdir, steps=8)

    def remembered(run):
        is_ours = lambda state: isinstance(state, Remembered)
        (found,) = filter(is_ours, jax.tree.leaves(run.state.opt_state, is_leaf=is_ours))
        return jax.tree.map(np.asarray, found)

    before, after = remembered(source), remembered(target)
    assert (after.count == 4).all() and all(np.any(x) for x in jax.tree.leaves(after))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(y, x.reshape(2, 2, *x.shape[1:]).mean(axis=1), rtol=1e-5), before[:5], after[:5]
    )
    assert target.train().step == 8


def test_memories_of_another_number_of_workers_start_afresh(launch, tmp_path):
    """One-peer exponential has two rounds with four workers and one with two: other estimates, of other neighbors."""
    argument = "mixer=choco,codec=int8,topology=one_peer_exponential,simulate"
    source, _ = launch(argument + ",workers=4")
    target, outcome = launch(argument + ",workers=2", resume_from=source, steps=STEPS + 8)
    assert outcome.step == STEPS + 8 and losses(target)[-1] < losses(source)[0]


@pytest.fixture(scope="module")
def push_sum(prepare):
    """On a graph whose rows do not sum to one: weights differ, and so do the plain mean and the preserved one."""
    run = prepare("mixer=push_sum,codec=int8,workers=4,optimizer=sgdm,topology=random_digraph(degree=2)")
    run.train()
    return run


@pytest.mark.parametrize("argument", ["mixer=push_sum,codec=int8,workers=2", "mixer=push_sum,workers=4", "workers=3", "workers=8"])
def test_what_push_sum_has_averaged_is_what_others_start_from(prepare, push_sum, argument):
    target = prepare(f"{argument},optimizer=sgdm,topology=directed_exponential", resume_from=push_sum.workdir, steps=STEPS + 4)
    before, after = (jax.tree.map(np.asarray, run.trainer.average(run.state)[0]) for run in (push_sum, target))
    plain = jax.tree.map(lambda x: np.asarray(x).mean(axis=0), push_sum.state.params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), after, before)
    assert max(jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max(), plain, before))) > 1e-4


def test_members_of_a_group_count_by_their_weights():
    state, weight_N = make_state(5), np.array([0.5, 2.0, 1.0, 0.25, 1.25])
    params, resized = state.params["w"], state_lib.resize(state_lib.kept(state, True), 2, weight_N)
    first, second = (np.average(params[own], axis=0, weights=weight_N[own]) for own in ([0, 1, 2], [3, 4]))
    new = resized["params"]["w"]
    np.testing.assert_allclose(new.mean(axis=0), np.average(params, axis=0, weights=weight_N), rtol=1e-6)
    np.testing.assert_allclose(new[1] - new[0], second - first, rtol=1e-5)
    np.testing.assert_allclose(resized["opt_state"]["inner"]["m"][1], state.opt_state.inner["m"][3:].mean(axis=0), rtol=1e-6)


def make_state(n, mixer=0.0):
    rng = np.random.default_rng(n)
    return state_lib.State(
        {"w": rng.normal(size=(n, 3)).astype(np.float32)},
        DecentralizeState(
            np.full(n, 7, np.int32), {"m": rng.normal(size=(n, 3)).astype(np.float32)}, np.full(n, mixer, np.float32)
        ),
    )


@pytest.mark.parametrize("before, after", [(8, 4), (8, 1), (4, 8), (3, 7), (8, 3), (5, 5)])
def test_resize_averages_when_shrinking_and_copies_when_growing(before, after):
    state, fresh = make_state(before, mixer=5.0), make_state(after, mixer=0.0)
    resized = state_lib.resumed(state_lib.resize(state_lib.kept(state, True), after), fresh)
    for old, new in ((state.params["w"], resized.params["w"]), (state.opt_state.inner["m"], resized.opt_state.inner["m"])):
        for j in range(after):
            members = [i for i in range(before) if i * after // before == j] if after < before else [j * before // after]
            np.testing.assert_allclose(new[j], old[members].mean(axis=0), rtol=1e-6)
        if before % after == 0 or after % before == 0:
            np.testing.assert_allclose(new.mean(axis=0), old.mean(axis=0), atol=1e-6)
    assert (resized.opt_state.step == 7).all() and resized.opt_state.step.dtype == np.int32
    assert (resized.opt_state.mixer == 0).all() and resized.opt_state.mixer.shape == (after,)


def test_a_run_that_is_finished_stays_as_it_is(launch, reference):
    before = (reference / "metrics.jsonl").read_bytes()
    _, outcome = launch("optimizer=accum_adamw", workdir=reference, **RICH)
    assert outcome.step == STEPS and (reference / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("damaged", ['{"a": ', "{}", "[1]", None])
def test_a_damaged_summary_is_found_anew(launch, reference, damaged, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    if damaged is None:
        (run / "summary.json").unlink()
    else:
        (run / "summary.json").write_text(damaged)
    launch("optimizer=accum_adamw", workdir=run, **RICH)
    assert json.loads((run / "summary.json").read_text()) == json.loads((reference / "summary.json").read_text())
    assert rows(run) + rows(run, "eval") == rows(reference) + rows(reference, "eval"), "no step stands twice"


def test_lost_checkpoints_are_noticed_and_nothing_is_overwritten(launch, reference, tmp_path):
    for finished, complaint in ((True, "a finished run but no checkpoints"), (False, "steps after 4, which was saved")):
        run = tmp_path / str(finished)
        shutil.copytree(reference, run)
        shutil.rmtree(run / "checkpoints")
        if not finished:
            (run / "summary.json").unlink()
        with pytest.raises(train.CheckpointError, match=complaint):
            launch("optimizer=accum_adamw", workdir=run, **RICH)
        assert rows(run) == rows(reference)
    (run / "checkpoints").touch()
    with pytest.raises(train.CheckpointError, match="is a file where a folder must be"):
        launch("optimizer=accum_adamw", workdir=run, **RICH)


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(prepare, reference, tmp_path):
    run = forget_after(reference, 0, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])  # step 4, which was about to be saved
    again = prepare("optimizer=accum_adamw", workdir=run, **RICH)
    again.train()
    assert again.note == "no checkpoint yet, starting from step 0"
    assert losses(run) == losses(reference)


def test_metrics_are_not_judged_by_a_config_that_came_after_them(prepare, tmp_path):
    """A run that was killed before its first checkpoint, and one that would save more often but ended before its first step."""
    argument, run = "optimizer=adamw,workers=2,simulate", tmp_path / "run"
    prepare(argument, workdir=run, **{"checkpoint.every": 500})
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "kind": "train"}}\n' for step in (4, 8)))
    assert [prepare(argument, workdir=run).note for _ in range(2)] == ["no checkpoint yet, starting from step 0", ""]


def test_metrics_that_lack_steps_before_the_checkpoint_are_told(prepare, reference, tmp_path, capsys):
    run = forget_after(reference, 8, tmp_path / "run")
    (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:1]))
    resumed = prepare("optimizer=accum_adamw", workdir=run, **RICH)
    resumed.train()
    assert resumed.note == "continuing from step 8; metrics.jsonl ends at step 4, rows after it are lost"
    assert not "".join(capsys.readouterr()), "the library prints nothing"
    assert [row["step"] for row in rows(run)] == [4, 12]


def test_resume_from_needs_steps_that_are_left(launch, reference, tmp_path):
    with pytest.raises(train.CheckpointError, match="set more steps"):
        launch("optimizer=accum_adamw", workdir=tmp_path / "run", resume_from=reference, **RICH)


@pytest.fixture(scope="module")
def saved(prepare):
    """A run that saved a step and took none."""
    run = prepare("optimizer=adamw,workers=2,simulate")
    run.checkpoints.save(4, run.state, run.counters)
    run.checkpoints.finish()
    return run.workdir


@pytest.mark.parametrize(
    "argument, fields, differing",
    [
        ("optimizer=accum_adamw", {}, "optimizer: 'adamw' there, 'accum_adamw' here"),
        ("method=onebit_adam", {}, "optimizer: 'adamw' there, None here; method: 'decentralized' there, 'onebit_adam' here"),
        ("optimizer=adamw", {"model.width": 16}, "model.width: 8 there, 16 here"),
        ("optimizer=adamw", {"clip_norm": 0.0}, "clip_norm: 1.0 there, 0.0 here"),
    ],
)
def test_resume_from_a_run_of_something_else_names_what_differs(prepare, saved, argument, fields, differing, tmp_path):
    complaint = f"is a run of something else \\({differing}\\); choose another --resume_from"
    with pytest.raises(train.CheckpointError, match=complaint) as error:
        prepare(f"{argument},workers=2,simulate", workdir=tmp_path / "run", resume_from=saved, **fields)
    assert "move" not in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_resume_from_a_run_of_another_task_names_both(saved, tmp_path):
    config = digits.get_config("smoke,workers=2,simulate")
    with pytest.raises(train.CheckpointError, match="task: 'lm' there, 'images' here; model: 'decoder' there, 'mlp' here"):
        run_of(config, tmp_path / "run", saved)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "argument, fields, way_out",
    [
        ("method=tracking,optimizer=adamw", {}, "; to start from its parameters, add --resume_from={saved}"),
        (
            "method=tracking,optimizer=adamw",
            {"steps": 4},
            "; to start from its parameters, add --resume_from={saved} and set more than 4 steps",
        ),
        ("optimizer=accum_adamw", {}, "$"),
        ("optimizer=adamw", {"model.width": 16}, "$"),
    ],
)
def test_the_directory_of_another_run_is_advised_as_a_start_only_where_it_can_be_one(prepare, saved, argument, fields, way_out):
    complaint = r"there, .* here(; and \d+ more)?\); choose another --workdir" + way_out.format(saved=saved)
    with pytest.raises(train.CheckpointError, match=complaint):
        prepare(f"{argument},workers=2,simulate", workdir=saved, **fields)


def test_resume_from_takes_what_has_the_same_arrays(prepare, saved, tmp_path):
    """Of another method, topology, mixer and number of workers."""
    for argument in ("mixer=choco,topology=ring,workers=3", "method=tracking,workers=2", "method=allreduce,workers=2"):
        assert prepare(f"{argument},optimizer=adamw,simulate", resume_from=saved).start == 4


def test_a_run_that_cannot_begin_holds_nothing(prepare, saved, tmp_path, monkeypatch):
    """Also while its error is kept with all its frames, as a notebook keeps the last one."""
    closed = []
    close, fail = checkpoint.Checkpoints.close, mock.Mock(side_effect=train.TrainingError("nothing arrives"))
    with monkeypatch.context() as patched:
        patched.setattr(train.Trainer, "check_exchanges", fail)
        patched.setattr(checkpoint.Checkpoints, "close", lambda self: closed.append(self) or close(self))
        with pytest.raises(train.TrainingError) as kept:
            prepare("optimizer=adamw,workers=2,simulate", workdir=tmp_path / "run", resume_from=saved)
    assert len(closed) == 2, "its own checkpoints, and those of the other run"
    assert prepare("optimizer=adamw,workers=2,simulate", workdir=tmp_path / "run", resume_from=saved).start == 4
    assert str(kept.value) == "nothing arrives"


def test_a_damaged_checkpoint_of_another_run_stays_where_it_is(prepare, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "other")
    for path in [path for path in (tmp_path / "other/checkpoints/4/state").rglob("*") if path.is_file() and "/d/" in str(path)]:
        path.write_bytes(b"garbage!")
    with pytest.raises(train.CheckpointError, match="4 is damaged .*; choose another --resume_from"):
        prepare("optimizer=adamw,workers=2,simulate", resume_from=tmp_path / "other")


def test_stale_allreduce_resumes_with_the_gradient_it_has_not_applied(launch, tmp_path):
    """Bit for bit, from the checkpoint in the middle."""
    whole, _ = launch("method=allreduce,stale")
    part = forget_after(whole, 8, tmp_path / "run")
    launch("method=allreduce,stale", workdir=part)
    assert_equal_states(whole, part)


@pytest.mark.parametrize("argument", ["mixer=choco,codec=int8,order=atc", "mixer=beer,codec=int8,topology=ring"])
def test_compressed_gossip_resumes_bit_for_bit_and_simulates(launch, argument, tmp_path):
    whole, _ = launch(argument)
    part = forget_after(whole, 8, tmp_path / "run")
    launch(argument, workdir=part)
    assert_equal_states(whole, part)
    simulated, _ = launch(argument + ",simulate,workers=8")
    np.testing.assert_allclose(losses(simulated), losses(whole), rtol=1e-3)  # a value between two codes may round either way
    assert [r["bytes_sent_per_worker"] for r in rows(simulated)] == [r["bytes_sent_per_worker"] for r in rows(whole)]
