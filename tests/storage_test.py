"""Failing disks and killed processes: a good checkpoint remains, and the continued run equals the uninterrupted one, bit for bit."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import train
from decjax.train import checkpoint, workdir
from tests import commands
from tests.tiny_runs import RICH, STEPS, assert_equal_states, forget_after, launch, losses, prepare, reference, rows, text  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_compilation")
ARGUMENT = "optimizer=accum_adamw"


def state_of(seed, size=1000):
    rng = np.random.default_rng(seed)
    return {"params": jnp.asarray(rng.normal(size=(4, size)), jnp.float32), "count": jnp.full(4, seed)}


def saved(folder, *steps):
    with checkpoint.Checkpoints(folder, keep=9) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), {"step": step})


def newest(folder, **how):
    """Load whatever is in a directory of such checkpoints; it must be what was saved."""
    with checkpoint.Checkpoints(folder, **how) as checkpoints:
        step, (state, counters), damage = checkpoints.newest(lambda step: checkpoints.restore(step, state_of(0)))
    assert counters == {"step": step}
    jax.tree.map(np.testing.assert_array_equal, state, state_of(step))
    return step, damage


def is_equal_to(run, whole):
    """Check that a run has the results of an uninterrupted one, with each row once."""
    assert_equal_states(whole, run)
    untimed = [
        [{k: v for k, v in row.items() if k not in ("time_s", "tokens_per_s")} for row in rows(d) + rows(d, "eval")]
        for d in (whole, run)
    ]
    assert untimed[0] == untimed[1]
    return True


# -- While it is written ----------------------------------------------------------------------------------------------


def test_the_state_may_change_while_it_is_written(tmp_path):
    """Also where the next step is computed in place."""
    state = state_of(1, 10**6)
    before = jax.tree.map(np.array, state)
    change = jax.jit(lambda state: jax.tree.map(lambda x: -x, state), donate_argnums=0)
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(9):
            state = change(state)
        restored, _ = checkpoints.restore(1, state)
    jax.tree.map(np.testing.assert_array_equal, restored, before)
    assert (np.asarray(state["params"]) == -before["params"]).all()


def test_a_checkpoint_counts_once_it_is_complete(tmp_path):
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, state_of(step), {})
            assert checkpoints.latest() in (step, step - 1 or None)
            checkpoints.finish()
            assert workdir.steps_saved(tmp_path) == [*range(max(step - 1, 1), step + 1)]


SAVES = """
import sys
from tests import storage_test
from decjax.train import checkpoint
import pathlib
folder, first = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with checkpoint.Checkpoints(folder, keep=2) as checkpoints:
    for step in range(first, 10**6):
        checkpoints.save(step, storage_test.state_of(step), {"step": step})
        print(step, flush=True)
"""


@pytest.mark.parametrize("kills", [3, 10])
def test_after_a_kill_at_any_moment_there_is_a_good_checkpoint(tmp_path, kills):
    """The last saved step, or the one before."""
    rng, began = random.Random(kills), 0
    for _ in range(kills):
        command = [sys.executable, "-c", SAVES, str(tmp_path), str(began + 1)]
        with subprocess.Popen(command, cwd=commands.ROOT, stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(2)]  # the first checkpoint is complete when the second begins
            time.sleep(rng.uniform(0, 0.5))
            process.send_signal(signal.SIGKILL)
            began = int((lines + process.stdout.read().splitlines())[-1])
        step, damage = newest(tmp_path, keep=2)
        assert began - 1 <= step <= began + 1 and damage == ""
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if "tmp" in path.name) == []
        began = step


# -- Damage -----------------------------------------------------------------------------------------------------------

DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "garbled": lambda content: b"garbage!" * (len(content) // 8 + 1),
    "flipped": lambda content: (
        content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]
    ),
}


def files_of(folder, step):
    return sorted(path for path in (folder / "checkpoints" / str(step)).rglob("*") if path.is_file())


@pytest.mark.parametrize("how", [*DAMAGES, "lost"])
def test_whichever_file_is_damaged_what_is_read_was_saved(tmp_path, how):
    saved(tmp_path / "whole", 1, 2)
    seen = set()
    for file in files_of(tmp_path / "whole", 2):
        run = tmp_path / "run"
        shutil.copytree(tmp_path / "whole", run)
        damaged = run / file.relative_to(tmp_path / "whole")
        if how == "lost":
            damaged.unlink()
        else:
            damaged.write_bytes(DAMAGES[how](damaged.read_bytes()))
        step, damage = newest(run)
        names = {path.name for path in (run / "checkpoints").iterdir()}
        if step == 1:
            assert re.match(f"checkpoint {run}/checkpoints/2 is damaged \\(.+\\); $", damage) and "\n" not in damage
            assert names == {"1", "2.damaged"}
            saved(run, 2)
            assert newest(run) == (2, ""), "its step can be saved again"
        else:
            assert damage == "" and names == {"1", "2"}
        seen.add(step)
        shutil.rmtree(run)
    assert 1 in seen


def test_if_all_are_damaged_it_is_one_line_and_nothing_is_moved(tmp_path):
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        for file in files_of(tmp_path, step):
            file.write_bytes(b"")
    for how, way_out in (({}, "start again in another --workdir"), ({"read_only": True}, "choose another --resume_from")):
        told = rf"all checkpoints in .* are damaged \(step 2: .*; step 1: .*\); {way_out}"
        with pytest.raises(train.CheckpointError, match=told) as error:
            newest(tmp_path, **how)
        assert "\n" not in str(error.value) and workdir.steps_saved(tmp_path) == [1, 2]


def test_checkpoints_of_another_run_stay_where_they_are(tmp_path):
    saved(tmp_path, 1, 2)
    for file in files_of(tmp_path, 2):
        file.write_bytes(b"")
    step, damage = newest(tmp_path, read_only=True)
    assert step == 1 and "checkpoints/2 is damaged" in damage and workdir.steps_saved(tmp_path) == [1, 2]


def test_a_run_goes_on_from_the_checkpoint_before_the_damaged_one(prepare, reference, tmp_path):
    run = forget_after(reference, 8, tmp_path / "run")
    for file in files_of(run, 8):
        file.write_bytes(DAMAGES["garbled"](file.read_bytes()))
    other = prepare(f"{ARGUMENT},workers=4", resume_from=run, steps=STEPS + 4, **RICH)
    assert other.start == 4 and "checkpoints/8 is damaged" in other.note and "starting from step 4" in other.note
    again = prepare(ARGUMENT, workdir=run, **RICH)
    assert again.start == 4 and re.search(r"checkpoints/8 is damaged \(.*\); continuing from step 4", again.note)
    again.train()
    assert is_equal_to(run, reference) and (run / "checkpoints/8.damaged").is_dir()


# -- Disks ------------------------------------------------------------------------------------------------------------


def mounted(*arguments):
    """Mount, or skip the test where mounting is not allowed."""
    told = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if told.returncode:
        pytest.skip(f"mount needs root and a kernel that lets it: {told.stderr.strip()}")


@contextlib.contextmanager
def full(run):
    with (run / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    (run / "filler").unlink()


@contextlib.contextmanager
def read_only(run):
    folder = run / "checkpoints"
    mounted("--bind", folder, folder)
    try:
        mounted("-o", "remount,bind,ro", folder)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def gone(name):
    @contextlib.contextmanager
    def gone(run):
        aside, folder = run.with_name("aside"), run / name if name else run
        folder.rename(aside)
        yield
        aside.rename(folder)

    return gone


class Mischief(train.Tracker):
    """Change the directory of a run after a step, until it is closed."""

    def __init__(self, run, what, step):
        self._run, self._what, self._step, self._stack = run, what, step, contextlib.ExitStack()

    def step(self, step):
        if step == self._step:
            self._run.checkpoints.finish()  # the previous one is complete
            self._stack.enter_context(self._what(self._run.workdir))

    def log(self, step, kind, values):
        pass

    def undo(self):
        self._stack.close()


@pytest.fixture
def disk(tmp_path):
    """A small separate disk."""
    mounted("-t", "tmpfs", "-o", "size=32m", "tmpfs", tmp_path)
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.mark.parametrize(
    "what, why",
    [
        (full, r"cannot be written in .* \(.*No space left on device.*\); make room there"),
        (read_only, r"step 8 cannot be written in .* \(.*Read-only file system.*\); make the folder writable"),
        (gone("checkpoints"), r"step 8 cannot be written in .*checkpoints \(No such file or directory\); bring the folder back"),
        (gone(""), r"step 8 cannot be written in .*checkpoints \(No such file or directory\); bring the folder back"),
    ],
    ids=["full", "read-only", "no checkpoints", "no directory"],
)
def test_a_disk_that_fails_ends_the_run_in_one_line_and_it_goes_on_later(prepare, reference, disk, what, why):
    made = []

    def mischief(run):
        made.append(Mischief(run, what, 6))
        return made[0]

    run = prepare(ARGUMENT, workdir=disk / "run", **RICH)
    try:
        with pytest.raises(train.CheckpointError, match=why) as error:
            run.train([mischief])
    finally:
        made[0].undo()
    assert "\n" not in str(error.value) and "the same command continues" in str(error.value)
    assert workdir.steps_saved(disk / "run") == [4] and newest_is_good(prepare, disk / "run") == 4
    prepare(ARGUMENT, workdir=disk / "run", **RICH).train()
    assert is_equal_to(disk / "run", reference)
    assert not [name for name in os.listdir(disk / "run/checkpoints") if not name.isdigit()]


def newest_is_good(prepare, run):
    with checkpoint.Checkpoints(run, read_only=True) as checkpoints:
        return checkpoints.last_good(prepare(ARGUMENT, **RICH).trainer.abstract)
