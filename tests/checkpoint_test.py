"""Checkpoints: damage is detected and reported in one line, and only finite states are saved."""

import json
import os
import pathlib
import resource
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import lm
from decjax import train
from decjax.train import checkpoint
from tests.runs import run_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Written by `python -m launch.train` of commit f08f7a6 from text.txt, eight steps each. The checkpoint of the fourth is kept,
# without what Orbax noted of the arrays' shardings.
TEXT = ROOT / "tests/data/text.txt"
COUNTERS = {"time_s": 12.5, "bytes_sent_per_worker": 72320.0, "first_step": 0, "corpus": "4096+31 bytes, crc cad9eae3"}
pytestmark = pytest.mark.usefixtures("quick_compilation")


def state_of(seed=0, workers=4):
    rng = np.random.default_rng(seed)
    return {
        "params": jnp.asarray(rng.normal(size=(workers, 300)), jnp.float32),
        "half": jnp.asarray(rng.normal(size=(workers, 7)), jnp.bfloat16),
        "pending": (jnp.ones(workers, bool), jnp.asarray(rng.normal(size=(workers, 5)), jnp.float32)),
        "count": jnp.full(workers, 3),
    }


def saved(folder, *steps, state=None):
    checkpoints = checkpoint.Checkpoints(folder, keep=9)
    for step in steps:
        checkpoints.save(step, state_of() if state is None else state, COUNTERS)
    checkpoints.finish()
    return checkpoints


def overwrite(folder, step, state):
    """Put other arrays into a checkpoint."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / "checkpoints" / str(step) / "state").absolute(), state, force=True)


# -- Damage -----------------------------------------------------------------------------------------------------------


def flipped_signs(x):
    """Negate two of the first worker's values, whose effects cancel in a weak checksum."""
    return x.at[0, 0].multiply(-1).at[0, 1].multiply(-1)


@pytest.mark.parametrize(
    "damage",
    [flipped_signs, lambda x: x.at[2].multiply(-1), lambda x: -x, lambda x: x[::-1], lambda x: x.at[0, :2].set(x[0, 1::-1])],
    ids=["two signs", "a replica", "all", "workers in reverse", "two values exchanged"],
)
def test_changed_arrays_are_seen(tmp_path, damage):
    state = state_of()
    damaged = state | {"params": damage(state["params"])}
    assert (checkpoint.checksums(state) != checkpoint.checksums(damaged)).sum() == 1
    checkpoints = saved(tmp_path, 1, 2)
    overwrite(tmp_path, 2, damaged)
    with pytest.raises(train.CheckpointError, match=r"checksums do not match its arrays\); move it away to continue from step 1"):
        checkpoints.restore(2, state)
    assert checkpoints.restore(1, state)[1] == COUNTERS


def test_a_flipped_bit_of_the_counters_is_seen(tmp_path):
    state, checkpoints = state_of(), saved(tmp_path, 1)
    path = tmp_path / "checkpoints/1/extra/metadata"
    content = path.read_bytes()
    for i in range(0, len(content), 3):
        path.write_bytes(content[:i] + bytes([content[i] ^ (1 << i % 7)]) + content[i + 1 :])
        try:
            assert checkpoints.restore(1, state)[1] == COUNTERS
        except train.CheckpointError as error:
            assert "checkpoints/1 is damaged" in str(error) and "\n" not in str(error)
        else:  # only where the flip changes no value, such as white space
            assert json.loads(path.read_bytes()) == json.loads(content)
    changed = json.loads(content)
    changed["counters"]["bytes_sent_per_worker"] = 72321.0
    path.write_text(json.dumps(changed))
    with pytest.raises(train.CheckpointError, match="does not match its counters"):
        checkpoints.restore(1, state)


def test_damage_is_raised_and_not_printed_besides(tmp_path, capfd):
    """Many arrays are being read and written when the first one fails."""
    state = {f"{i}": jnp.asarray(np.random.default_rng(i).normal(size=3000), jnp.float32) for i in range(40)}
    checkpoints = saved(tmp_path, 1, 2, state=state)
    for path in (tmp_path / "checkpoints/2/state").rglob("d/*"):
        path.write_bytes(b"garbage!" * (path.stat().st_size // 8))
    capfd.readouterr()
    for _ in range(10):
        with pytest.raises(train.CheckpointError, match="checkpoints/2 is damaged"):
            checkpoints.restore(2, state)
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, room[1]))  # a file-size limit, as if the disk were full
    try:
        with pytest.raises(train.CheckpointError, match="step 3 cannot be written"):
            checkpoints.save(3, state, COUNTERS)
            checkpoints.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert capfd.readouterr() == ("", "")


# -- What a checkpoint is of ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moves", [["2 3"], ["2 999"], ["1 aside", "2 1", "aside 2"]], ids=["up", "far up", "exchanged"])
def test_a_checkpoint_under_another_name_is_refused(tmp_path, moves):
    checkpoints = saved(tmp_path, 1, 2)
    for move in moves:
        old, new = move.split()
        (tmp_path / "checkpoints" / old).rename(tmp_path / "checkpoints" / new)
    with pytest.raises(
        train.CheckpointError, match=r"checkpoints/\d+ was saved as step [12]; rename it to [12], or move it away"
    ) as error:
        checkpoints.newest(lambda step: checkpoints.restore(step, state_of()))
    assert "damaged" not in str(error.value) and "\n" not in str(error.value)


def other(**arrays):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of()) | arrays


@pytest.mark.parametrize(
    "like, difference",
    [
        (
            other(half=jax.ShapeDtypeStruct((4, 7), jnp.float32)),
            r"half is bfloat16\[4, 7\] there and float32\[4, 7\] here; use the",
        ),
        (other(params=jax.ShapeDtypeStruct((4, 30), jnp.float32)), r"params is float32\[4, 300\] there and float32\[4, 30\] here"),
        (state_of(workers=8), r"count is int32\[4\] there and int32\[8\] here; use the .* number of workers that"),
        (other(more=state_of()["half"]), r"more is missing there and bfloat16\[4, 7\] here"),
        ({"params": state_of()["params"]}, r"is .* there and missing here"),
        (other(params=np.zeros((4, 300))), r"float32\[4, 300\] there and float64\[4, 300\] here; set JAX_ENABLE_X64=[01]$"),
    ],
    ids=["dtype", "shape", "workers", "another array", "fewer arrays", "float64"],
)
def test_a_checkpoint_of_other_arrays_names_what_differs_and_is_not_called_damaged(tmp_path, like, difference):
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(train.CheckpointError, match=f"checkpoints/1 holds other arrays: .*{difference}") as error:
        checkpoints.newest(lambda step: checkpoints.restore(step, like))
    assert "damaged" not in str(error.value) and "\n" not in str(error.value)


def test_arrays_that_could_not_be_told_apart_or_saved_are_refused(tmp_path):
    x = jnp.ones((4, 2))
    with pytest.raises(
        train.CheckpointError, match="two arrays of the state are called 'a.b' in a checkpoint; use names without dots"
    ):
        saved(tmp_path, 1, state={"a.b": x, "a": {"b": 2 * x}})
    with pytest.raises(train.CheckpointError, match=r"b has dtype key<fry>, which .* cannot hold; keep jax.random.key_data"):
        saved(tmp_path, 1, state={"a": x, "b": jax.random.split(jax.random.key(0), 4)})
    assert saved(tmp_path, 2, state={"a.b": x}).restore(2, {"a.b": x})[1] == COUNTERS


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(train.CheckpointError, match="checkpoints cannot be written in .*; make the folder writable"):
        checkpoint.Checkpoints(tmp_path)


def test_a_save_that_fails_leaves_no_thread_that_an_exit_would_wait_for(tmp_path, monkeypatch):
    """Orbax's threads wait for a directory, by default even for one that cannot be created."""
    checkpoints, before = saved(tmp_path, 1), set(threading.enumerate())

    def refuse(*args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(train.CheckpointError, match="step 2 cannot be written .*Read-only file system.*; make the folder writable"):
        checkpoints.save(2, state_of(), COUNTERS)
        checkpoints.finish()
    monkeypatch.undo()
    checkpoints.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread


# -- Only what is finite ----------------------------------------------------------------------------------------------


def test_what_is_not_finite_is_not_saved_and_the_newest_good_one_is_named(tmp_path):
    state = state_of()
    assert checkpoint.finite(state) and checkpoint.finite({"count": jnp.arange(3)})

    def bad(value=jnp.nan):
        is_due, pending = state_of()["pending"]
        return state_of() | {"pending": (is_due, pending.at[3, 4].set(value))}

    assert not checkpoint.finite(bad()) and not checkpoint.finite(bad(-jnp.inf))
    with pytest.raises(train.Diverged, match=r"the state of step 1 is not finite.*no good checkpoint was saved.*Lower"):
        saved(tmp_path, 1, state=bad())
    checkpoints = saved(tmp_path, 1, 2, 3)
    overwrite(tmp_path, 3, bad())
    for path in (tmp_path / "checkpoints/2/state").rglob("d/*"):
        path.write_bytes(b"")
    with pytest.raises(train.Diverged, match=r"step 4 is not finite.*the last good checkpoint is of step 1"):
        checkpoints.save(4, bad(), COUNTERS)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2", "3"]


def test_a_checkpoint_that_is_not_finite_is_not_continued(tmp_path, monkeypatch):
    """A checkpoint that was saved without the check."""
    bad = state_of() | {"half": jnp.full((4, 7), jnp.inf, jnp.bfloat16)}
    saved(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "finite", lambda state: True)
        saved(tmp_path, 2, state=bad)
    with pytest.raises(train.CheckpointError, match=r"checkpoints/2 .* had diverged; move it away to continue from step 1"):
        checkpoint.Checkpoints(tmp_path).restore(2, state_of())


def test_another_format_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 4)
        saved(tmp_path, 1)
    with pytest.raises(
        train.CheckpointError, match=r"its format is version 4, and this decjax reads version 3; start again in another"
    ):
        checkpoint.Checkpoints(tmp_path).restore(1, state_of())


def test_a_pending_gradient_that_is_not_finite_ends_the_run(tmp_path):
    """After step 4 parameters and losses are finite, but the gradient that the next step would apply is not."""
    config = lm.get_config("smoke,workers=2,method=allreduce,stale,optimizer=sgdm")
    tiny = {"depth": 1, "width": 8, "hidden": 8, "heads": 1, "context": 16}
    config.update_from_flattened_dict(
        {f"model.{name}": value for name, value in tiny.items()}
        | {"data.path": str(TEXT), "checkpoint.every": 1, "checkpoint.keep": 9}
        | {"schedule.learning_rate": 1e10, "clip_norm": 0.0, "schedule.warmup_steps": 0}
    )
    run = run_of(config, tmp_path)
    with pytest.raises(train.Diverged, match=r"the state of step 4 is not finite.*the last good checkpoint is of step 3"):
        run.train()
    assert checkpoint.Checkpoints(tmp_path).latest() == 3


# -- Damage and lack of room ------------------------------------------------------------------------------------------


def test_a_checkpoint_that_finds_no_room_is_told_and_the_one_before_stays(tmp_path):
    def state(size):
        return {"x": jnp.asarray(np.random.default_rng(0).normal(size=size), jnp.float32)}  # incompressible

    saved, room = checkpoint.Checkpoints(tmp_path, keep=2), resource.getrlimit(resource.RLIMIT_FSIZE)
    saved.save(1, state(10), {"corpus": "a"})
    saved.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, room[1]))  # a file-size limit, as if the disk were full
    try:
        with pytest.raises(train.CheckpointError, match="step 2 cannot be written.*File too large.*make room") as error:
            saved.save(2, state(10**5), {"corpus": "a"})
            saved.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert "\n" not in str(error.value)
    again = checkpoint.Checkpoints(tmp_path, keep=2)
    assert again.latest() == 1 and again.restore(1, state(10))[1] == {"corpus": "a"}


def test_checkpoints_of_nothing():
    with pytest.raises(train.CheckpointError, match="no checkpoints"):
        checkpoint.Checkpoints(pathlib.Path("does-not-exist"), read_only=True)
