"""Checkpoints with Orbax: the state of every worker, bit for bit, and the run's counters (time, bytes).

They are written while training goes on. A checkpoint has its own name only once it is complete, and those that it replaces are
removed after that: whenever the process is killed, the newest one that has a name is whole. Checksums of all arrays tell whether
what is read is what was saved.
"""

import asyncio
from collections.abc import Callable
import contextlib
import functools
import pathlib
import shutil
import sys
import tempfile
from typing import Any, NamedTuple, TypeVar, cast

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp

from decjax.errors import CheckpointError, Diverged, not_written
from decjax.train import contents
from decjax.train import workdir as workdir_lib
from decjax.train.contents import VERSION, arrays_of, checksums, finite

T = TypeVar("T")
PROBE = ".probe"  # suffix of a folder that is made only to test whether the directory can be written
SAVE_TIMEOUT_S = 3600  # after which a checkpoint that is still not written counts as failed


class Damaged(CheckpointError):
    """A checkpoint that cannot be read, or is not what was saved; `why` says what is wrong with it."""

    def __init__(self, message: str, why: str):
        super().__init__(message)
        self.why = why


class _PatientLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for its tasks before it closes.

    When one array cannot be read or written, Orbax closes its loop while TensorStore still works on others; each of their results
    would then print a traceback on stderr.
    """

    def close(self):
        if not self.is_closed():
            self.run_until_complete(self._finished())
        super().close()

    async def _finished(self):
        await asyncio.sleep(0)
        while others := asyncio.all_tasks(self) - {asyncio.current_task()}:
            await asyncio.gather(*others, return_exceptions=True)


class _PatientLoops(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        return _PatientLoop()


@contextlib.contextmanager
def _errors_once():
    """Inside, errors of Orbax are raised but not also printed by its event loops or logged by its threads."""
    policy, verbosity = asyncio.get_event_loop_policy(), logging.get_verbosity()
    asyncio.set_event_loop_policy(_PatientLoops())
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        logging.set_verbosity(verbosity)


def _waiting_for_others() -> Callable[..., None]:
    """What a save waits for the other processes with; a process whose own part has failed does not, so that it can tell."""
    wait = ocp.multihost.get_barrier_sync_fn()

    def wait_unless_failed(*, key: str, timeout_ms: int) -> None:
        if sys.exception() is None:
            wait(key=key, timeout_ms=timeout_ms)

    return wait_unless_failed


def _in_any_process(condition: bool) -> bool:
    """Whether a condition holds in any process. A collective."""
    return condition if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(condition)).any())


class Found(NamedTuple):
    """What `Checkpoints.newest` gives: the step, what was read of it, and a text on the damaged ones before it, or nothing."""

    step: int
    content: Any
    damage: str


class Checkpoints:
    """The checkpoints in a run's work directory, of which the newest `keep` are kept (None: all).

    `read_only` is for those of another run, and with `own` for processes of this run that do not write them. At its end the context
    manager waits for what is being written and releases the directory.
    """

    def __init__(self, workdir: pathlib.Path, *, keep: int | None = None, read_only: bool = False, own: bool = False):
        self._workdir, self._directory, self._own = workdir, (workdir / "checkpoints").absolute(), own or not read_only
        if read_only and not self._directory.is_dir():
            raise CheckpointError(f"{workdir} has no checkpoints; give the --workdir of a run that saved some")
        self._saving: tuple[int, contextlib.ExitStack] | None = None  # the step that is being written, what holds meanwhile
        # It reads for this process alone, which others do not wait for: they may find a damaged file that this one does not need.
        alone = ocp.options.MultiprocessingOptions(active_processes={jax.process_index()}, primary_host=None)
        self._reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=alone)),
            multiprocessing_options=alone,
        )
        self._manager = None if read_only else self._writer(keep)

    def _writer(self, keep: int | None) -> ocp.CheckpointManager:
        self._try_writing()
        self._remove_parts()  # Orbax would do so in the background.
        return ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                async_options=ocp.options.AsyncOptions(
                    timeout_secs=SAVE_TIMEOUT_S,
                    barrier_sync_fn=_waiting_for_others(),
                    create_directories_asynchronously=False,  # Otherwise threads wait forever for a folder that cannot be made.
                ),
                lightweight_initialize=True,  # Damaged ones are found when they are read.
            ),
        )

    def _try_writing(self) -> None:
        """Raises a CheckpointError now rather than at the first checkpoint if the folder cannot be written."""
        if jax.process_index() == 0:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryDirectory(dir=self._directory, suffix=PROBE).cleanup()
            except OSError as error:
                raise not_written("checkpoints", self._directory, error) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None or jax.process_count() == 1:  # Else the others may never finish their part of what is being written.
            self.close()

    def close(self) -> None:
        """Waits for what is being written, as `finish`, and ends the use of the directory."""
        try:
            self.finish()
        finally:
            if self._manager is not None:
                with contextlib.suppress(OSError, ValueError):  # Orbax raises again what `finish` has told.
                    self._manager.close()
            self._reader.close()

    def latest(self) -> int | None:
        """The step of the newest checkpoint, which may be damaged; None if there is none. What is being written is waited for."""
        self.finish()
        return max(workdir_lib.steps_saved(self._workdir), default=None)

    # -- Writing ------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, counters: dict) -> None:
        """Begins to write a checkpoint, and returns when the state may change again; `finish` waits until it is complete, and only
        then it counts. A collective; it waits for the checkpoint before.

        Raises:
            Diverged: if a value of the state is not finite, in parameters or any other part; nothing is written then.
            CheckpointError: if this checkpoint, or the one before, cannot be written: the disk is full, read-only or gone.
        """
        assert self._manager is not None  # Another run's checkpoints are only read.
        self.finish()
        if not finite(state):
            raise self.diverged(f"the state of step {step} is not finite", state)
        extra = {
            "version": VERSION,
            "step": step,
            "arrays": arrays_of(state),
            "counters": dict(counters),  # They change while these are written.
        }
        extra |= {"counters_checksum": contents.extra_checksum(extra), "checksums": np.asarray(checksums(state)).tolist()}
        self._check_there(step)
        quiet = contextlib.ExitStack()
        quiet.enter_context(_errors_once())
        self._saving = step, quiet
        try:
            self._manager.save(
                step, force=True, args=ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra))
            )
        except (OSError, ValueError) as error:
            raise self._failed(error) from error

    def check(self) -> None:
        """Raises the `CheckpointError` of `finish` if it is known by now that the last checkpoint cannot be written; waits for
        nothing."""
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.finish()
        if self._saving is not None:
            self._check_there(self._saving[0])

    def finish(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
            CheckpointError: if it cannot be written; those before it stay.
        """
        if self._saving is None or self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
            if not (self._directory / str(self._saving[0])).is_dir():
                raise OSError("it is not there after it was written; the disk may be full")
        except (OSError, ValueError) as error:  # TensorStore raises ValueErrors.
            raise self._failed(error) from error
        self._saving[1].close()
        self._saving = None

    def _check_there(self, step: int) -> None:
        """Raises a CheckpointError if the folder has vanished, which Orbax would make anew, without all that belongs to it."""
        if jax.process_index() == 0 and not self._directory.is_dir():
            error = FileNotFoundError(2, "No such file or directory")
            raise not_written(f"checkpoint of step {step}", self._directory, error)

    def _failed(self, error: Exception) -> CheckpointError:
        """What to raise when writing has failed; removes what was written, for which there may be no room."""
        assert self._saving is not None
        step, quiet = self._saving
        self._saving = None
        quiet.close()
        self._remove_parts()
        return not_written(f"checkpoint of step {step}", self._directory, error)

    def _remove_parts(self) -> None:
        """Removes what was being written when a process was killed, or writing failed."""
        if jax.process_index() == 0:
            for part in (*self._directory.glob("*.orbax-checkpoint-tmp*"), *self._directory.glob(f"*{PROBE}")):
                shutil.rmtree(part, ignore_errors=True)

    # -- Reading ------------------------------------------------------------------------------------------------------

    def newest(self, read: Callable[[int], Any]) -> Found:
        """The newest step that is not damaged, and what `read` gives of it; there must be a checkpoint. A collective.

        Damaged ones of this run that are newer are renamed to `STEP.damaged`, since their steps will be saved again.

        Raises:
            CheckpointError: if all are damaged, or one cannot be used for another reason.
        """
        damaged: dict[int, Damaged] = {}
        for step in reversed(workdir_lib.steps_saved(self._workdir)):
            try:
                content = read(step)
            except Damaged as error:
                damaged[step] = error
                continue
            if damaged and self._manager is not None:
                self.set_aside([*damaged])
            told = (f"checkpoint {self._directory / str(step)} is damaged ({error.why}); " for step, error in damaged.items())
            return Found(step, content, "".join(told))
        if len(damaged) == 1:
            raise next(iter(damaged.values()))
        why = "; ".join(f"{step}: {error.why}" for step, error in damaged.items())
        raise CheckpointError(f"all checkpoints in {self._directory} are damaged ({why}); {self._way_out(0)}")

    def restore(self, step: int, like: Any, partial: bool = False) -> tuple[Any, dict]:
        """(state, counters) of a saved step, read and verified; what is being written is waited for.

        Args:
            step: one that was saved.
            like: arrays or `ShapeDtypeStruct`s whose structure, shapes, dtypes and shardings the state must have.
            partial: whether `like` may lack some of the saved arrays.

        Raises:
            CheckpointError: if the checkpoint is damaged, not finite, or that of another program or model.
        """
        self.finish()
        extra = self._readable(step, functools.partial(self._extra, step))
        self._check(step, extra, like, partial)
        state = self._readable(step, functools.partial(self._state, step, like, partial))
        sums, saved_sums = np.asarray(checksums(state, extra["version"])).tolist(), extra["checksums"]
        if not set(sums) <= set(saved_sums) if partial else sums != saved_sums:
            raise self._damaged(step, "its checksums do not match its arrays")
        if not finite(state):
            raise self._unusable(step, "its state is not finite: training had diverged")
        return state, extra["counters"]

    def _readable(self, step: int, read: Callable[[], T]) -> T:
        """The result of `read`; raises a CheckpointError in every process if it fails in one."""
        failed, content = None, None
        try:
            content = read()
        except Exception as error:  # Orbax and TensorStore raise many types of errors for a damaged file.
            failed = error
        if _in_any_process(failed is not None):  # Agreed before the next collective, in which some would wait for the others.
            error = failed or OSError("another process cannot read it")
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise self._damaged(step, f"it cannot be read: {reason}") from failed
        return cast(T, content)

    def _extra(self, step: int) -> dict[str, Any]:
        """The records that were saved with the state of a step."""
        with _errors_once():
            args = ocp.args.Composite(extra=ocp.args.JsonRestore())
            extra = {"version": 1} | self._reader.restore(self._directory / str(step), args=args)["extra"]
        if missing := {"counters", "checksums"} - set(extra):
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        if extra["version"] > 1 and extra.get("counters_checksum") != contents.extra_checksum(extra):
            raise ValueError("its checksum does not match its counters")
        return extra

    def _state(self, step: int, like: Any, partial: bool) -> Any:
        """The state of a saved step, as this process finds it."""
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        state = ocp.args.StandardRestore(like)
        if partial:
            restore_args = ocp.checkpoint_utils.construct_restore_args(like)
            state = ocp.args.PyTreeRestore(like, restore_args=restore_args, partial_restore=True)
        with _errors_once():
            return self._reader.restore(self._directory / str(step), args=ocp.args.Composite(state=state))["state"]

    def _check(self, step: int, extra: dict[str, Any], like: Any, partial: bool) -> None:
        """Raises a CheckpointError if an undamaged step was renamed or holds other arrays."""
        if not 1 <= extra["version"] <= VERSION:
            raise self._unusable(step, f"its format is version {extra['version']}, and this decjax reads versions up to {VERSION}")
        if (saved := extra.get("step", step)) != step:
            raise CheckpointError(
                f"checkpoint {self._directory / str(step)} was saved as step {saved}; rename it to {saved}, or move it away"
            )
        if extra["version"] < VERSION:
            return
        here = arrays_of(like)
        there = {name: array for name, array in extra["arrays"].items() if not partial or name in here}
        if difference := contents.difference(there, here):
            problem = f"checkpoint {self._directory / str(step)} holds other arrays: {difference}"
            raise CheckpointError(f"{problem}; {contents.fix(there, here)}")

    def unlike(self, step: int, like: Any) -> str:
        """The first array of `like` whose dtype or shape per worker differs from that of a saved step; empty: none does."""
        try:
            there, here = contents.per_worker(self._extra(step)["arrays"]), contents.per_worker(arrays_of(like))
        except Exception:  # Such as for a damaged file, for which `restore` raises a better error.
            return ""
        return contents.difference({name: array for name, array in there.items() if name in here}, here)

    def last_good(self, like: Any) -> int | None:
        """The newest step that can be restored, found by restoring it; None if there is none. A collective."""
        for step in reversed(workdir_lib.steps_saved(self._workdir)):
            with contextlib.suppress(CheckpointError):
                self.restore(step, like)
                return step
        return None

    def diverged(self, what: str, state: Any, like: Any = None) -> Diverged:
        """The error that ends a diverged run: what was seen, and the last good checkpoint. A collective.

        Checkpoints are restored as `like` to find a good one; the state's arrays are deleted first, to make room.
        """
        with contextlib.suppress(CheckpointError):
            self.finish()  # It may still read the arrays.
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state) if like is None else like
        for x in jax.tree.leaves(state):
            if isinstance(x, jax.Array):
                x.delete()
        good = self.last_good(like)
        kept = "no good checkpoint was saved" if good is None else f"the last good checkpoint is of step {good}"
        return Diverged(
            f"{what}: training has diverged; {kept}. Lower schedule.learning_rate, raise schedule.warmup_steps or set clip_norm"
        )

    def _unusable(self, step: int, why: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self._directory / str(step)} cannot be restored, {why}; {self._way_out(step)}")

    def _damaged(self, step: int, why: str) -> Damaged:
        return Damaged(f"checkpoint {self._directory / str(step)} is damaged ({why}); {self._way_out(step)}", why)

    def _way_out(self, step: int) -> str:
        if not self._own:
            return "choose another --resume_from"
        others = [other for other in workdir_lib.steps_saved(self._workdir) if other < step]
        return f"move it away to continue from step {max(others)}" if others else "start again in another --workdir"

    def set_aside(self, steps: list[int]) -> None:
        """Gives checkpoints of this run other names, with which they do not count. A collective."""
        if jax.process_index() == 0:
            for step in steps:
                aside = self._directory / f"{step}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                (self._directory / str(step)).rename(aside)
        _in_any_process(False)  # Waits for process 0.
        assert self._manager is not None
        self._manager.reload()
