"""Checkpoints with Orbax: the bit-exact state of all workers, and the run's counters (time, bytes).

They are written while training continues. A checkpoint gets its final name when it is complete, and those that it replaces are removed
after that, so a complete one exists at any time. Its metadata has a checksum, and the checksum, name, dtype and shape of each array, to
verify the state when it is read.
"""

import asyncio
from collections.abc import Callable, Iterator
import contextlib
import functools
import json
import pathlib
import shutil
import sys
import tempfile
from typing import Any, Generic, NamedTuple, TypeVar, cast
import zlib

from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from decjax import codecs, errors, files
from decjax.errors import CheckpointError, Diverged
from decjax.typing import PyTree

T = TypeVar("T")
Described = dict[str, list]  # dtype and shape of each array by its name in a checkpoint, such as {"params.w": ["float32", 4, 300]}
PROBE = ".probe"  # suffix of a folder with which write access is tested
SAVE_TIMEOUT_S = 3600  # of writing a checkpoint
VERSION = 3  # of the format; other versions are refused


def steps_saved(workdir: pathlib.Path) -> list[int]:
    """Return the steps of all complete checkpoints, including damaged ones, in ascending order."""
    return files.numbers_in(workdir / "checkpoints")


class Damaged(CheckpointError):
    """A checkpoint that cannot be read, or differs from what was saved, for the reason `why`."""

    def __init__(self, message: str, why: str):
        super().__init__(message)
        self.why = why


class _WaitingLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for its tasks before it closes.

    If an array cannot be read or written, Orbax closes its loop while TensorStore still processes others, each of which would then
    print a traceback.
    """

    def close(self):
        if not self.is_closed():
            self.run_until_complete(self._finished())
        super().close()

    async def _finished(self):
        await asyncio.sleep(0)
        while others := asyncio.all_tasks(self) - {asyncio.current_task()}:
            await asyncio.gather(*others, return_exceptions=True)


class _WaitingLoops(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        return _WaitingLoop()


@contextlib.contextmanager
def _without_logged_errors():
    """Context manager in which Orbax raises errors without also printing or logging them."""
    policy, verbosity = asyncio.get_event_loop_policy(), logging.get_verbosity()
    asyncio.set_event_loop_policy(_WaitingLoops())
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        logging.set_verbosity(verbosity)


def _barrier() -> Callable[..., None]:
    """Return the barrier of a save; a process whose part has failed does not wait, so that it can report the error."""
    wait = ocp.multihost.get_barrier_sync_fn()

    def wait_unless_failed(*, key: str, timeout_ms: int) -> None:
        if sys.exception() is None:
            wait(key=key, timeout_ms=timeout_ms)

    return wait_unless_failed


def _in_any_process(condition: bool) -> bool:
    """Return whether a condition holds in any process. A collective."""
    return condition if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(condition)).any())


class Newest(NamedTuple, Generic[T]):
    """The newest undamaged checkpoint: its step, what was read from it, and a message about newer, damaged ones."""

    step: int
    content: T
    damage: str


class Checkpoints:
    """The checkpoints in a run's work directory, of which the newest `keep` are kept (None: all).

    `read_only` is for another run, or with `own` for processes of this run that do not write. On exit the context manager waits for
    pending writes and releases the directory.
    """

    def __init__(self, workdir: pathlib.Path, *, keep: int | None = None, read_only: bool = False, own: bool = False):
        self._workdir, self._directory, self._own = workdir, (workdir / "checkpoints").absolute(), own or not read_only
        if read_only and not self._directory.is_dir():
            raise CheckpointError(f"{workdir} has no checkpoints; give the --workdir of a run that saved some")
        # The step that is being written, and a context until it is complete.
        self._saving: tuple[int, contextlib.ExitStack] | None = None
        # Reading does not involve other processes, which may find a damaged file that this one does not need.
        alone = ocp.options.MultiprocessingOptions(active_processes={jax.process_index()}, primary_host=None)
        self._reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=alone)),
            multiprocessing_options=alone,
        )
        self._manager = None if read_only else self._writer(keep)

    def _writer(self, keep: int | None) -> ocp.CheckpointManager:
        self._check_writable()
        self._remove_incomplete()  # Orbax would do it in the background.
        return ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                async_options=ocp.options.AsyncOptions(
                    timeout_secs=SAVE_TIMEOUT_S,
                    barrier_sync_fn=_barrier(),
                    create_directories_asynchronously=False,  # Otherwise threads wait forever for a folder that cannot be created.
                ),
                lightweight_initialize=True,  # Damage is detected on reading.
            ),
        )

    def _check_writable(self) -> None:
        """Raise a CheckpointError before training if the folder cannot be written."""
        if jax.process_index() == 0:
            with errors.translating_write_errors("checkpoints", self._directory):
                self._directory.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryDirectory(dir=self._directory, suffix=PROBE).cleanup()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or jax.process_count() == 1:  # After an error in one process, the others may never finish their part.
            self.close()

    def close(self) -> None:
        """Wait for pending writes, as `finish` does, and release the directory."""
        try:
            self.finish()
        finally:
            if self._manager is not None:
                with contextlib.suppress(OSError, ValueError):  # Orbax raises the errors of `finish` again.
                    self._manager.close()
            self._reader.close()

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint, which may be damaged; None if there is none. Waits for pending writes."""
        self.finish()
        return max(steps_saved(self._workdir), default=None)

    # -- Writing ------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: PyTree, counters: dict) -> None:
        """Start writing a checkpoint; return when the state may change again. `finish` waits until it is complete. A collective.

        Raises:
            Diverged: if a value of the state is not finite; nothing is written.
            CheckpointError: if this checkpoint or the previous one cannot be written: the disk is full, read-only or gone.
        """
        assert self._manager is not None  # not read-only
        self.finish()
        if not finite(state):
            raise self.diverged(f"the state of step {step} is not finite", state)
        extra = {
            "version": VERSION,
            "step": step,
            "arrays": arrays_of(state),
            "counters": dict(counters),  # a copy, since they change while it is written
        }
        extra |= {"counters_checksum": extra_checksum(extra), "checksums": np.asarray(checksums(state)).tolist()}
        self._check_exists(step)
        quiet = contextlib.ExitStack()
        quiet.enter_context(_without_logged_errors())
        self._saving = step, quiet
        with self._removing_incomplete():
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra))
            self._manager.save(step, force=True, args=args)

    def check(self) -> None:
        """Raise the `CheckpointError` of `finish` if writing has already failed; does not wait."""
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.finish()
        if self._saving is not None:
            self._check_exists(self._saving[0])

    def finish(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            CheckpointError: if it cannot be written; earlier ones are kept.
        """
        if self._saving is None or self._manager is None:
            return
        with self._removing_incomplete():
            self._manager.wait_until_finished()
            if not (self._directory / str(self._saving[0])).is_dir():
                raise OSError("it does not exist after it was written; the disk may be full")
        self._saving[1].close()
        self._saving = None

    def _check_exists(self, step: int) -> None:
        """Raise a CheckpointError if the folder has vanished, which Orbax would recreate empty."""
        if jax.process_index() == 0 and not self._directory.is_dir():
            error = FileNotFoundError(2, "No such file or directory")
            raise errors.not_written(f"checkpoint of step {step}", self._directory, error)

    @contextlib.contextmanager
    def _removing_incomplete(self) -> Iterator[None]:
        """Raise a CheckpointError for a failed write, and remove the incomplete checkpoint, since the disk may be full."""
        assert self._saving is not None
        step, quiet = self._saving
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore raises ValueErrors.
            self._saving = None
            quiet.close()
            self._remove_incomplete()
            raise errors.not_written(f"checkpoint of step {step}", self._directory, error) from error

    def _remove_incomplete(self) -> None:
        """Remove incomplete checkpoints of killed processes or failed writes."""
        if jax.process_index() == 0:
            for part in (*self._directory.glob("*.orbax-checkpoint-tmp*"), *self._directory.glob(f"*{PROBE}")):
                shutil.rmtree(part, ignore_errors=True)

    # -- Reading ------------------------------------------------------------------------------------------------------

    def newest(self, read: Callable[[int], T]) -> Newest[T]:
        """Return the newest undamaged checkpoint, as read by `read`; there must be a checkpoint. A collective.

        Newer, damaged checkpoints of this run are renamed to `STEP.damaged`, since their steps will be saved again.

        Raises:
            CheckpointError: if all are damaged, or one cannot be used for another reason.
        """
        damaged: dict[int, Damaged] = {}
        for step in reversed(steps_saved(self._workdir)):
            try:
                content = read(step)
            except Damaged as error:
                damaged[step] = error
                continue
            if damaged and self._manager is not None:
                self.set_aside([*damaged])
            messages = (f"{self._called(step)} is damaged ({error.why}); " for step, error in damaged.items())
            return Newest(step, content, "".join(messages))
        if len(damaged) == 1:
            raise next(iter(damaged.values()))
        why = "; ".join(f"step {step}: {error.why}" for step, error in damaged.items())
        raise CheckpointError(f"all checkpoints in {self._directory} are damaged ({why}); {self._fix(0)}")

    def restore(self, step: int, like: PyTree, partial: bool = False) -> tuple[PyTree, dict]:
        """Read and verify a saved step; return (state, counters). Waits for pending writes.

        Args:
            step: a saved step.
            like: arrays or `ShapeDtypeStruct`s whose structure, shapes, dtypes and shardings the state must have.
            partial: whether `like` may lack some of the saved arrays.

        Raises:
            CheckpointError: if the checkpoint is damaged, not finite, or has other arrays.
        """
        self.finish()
        extra = self._readable(step, functools.partial(self._extra, step))
        errors.refuse(self._problems(step, extra, like, partial))
        state = self._readable(step, functools.partial(self._state, step, like, partial))
        sums, saved_sums = np.asarray(checksums(state)).tolist(), extra["checksums"]
        if not set(sums) <= set(saved_sums) if partial else sums != saved_sums:
            raise self._damaged(step, "its checksums do not match its arrays")
        if not finite(state):
            raise CheckpointError(self._unusable(step, "its state is not finite: training had diverged"))
        return state, extra["counters"]

    def _readable(self, step: int, read: Callable[[], T]) -> T:
        """Return the result of `read`; if it fails in one process, raise a CheckpointError in all."""
        failed, content = None, None
        try:
            content = read()
        except Exception as error:  # Orbax and TensorStore raise many types of errors for a damaged file.
            failed = error
        if _in_any_process(failed is not None):  # All must agree before the next collective.
            error = failed or OSError("another process cannot read it")
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise self._damaged(step, f"it cannot be read: {reason}") from failed
        return cast(T, content)

    def _extra(self, step: int) -> dict[str, Any]:
        """Read the metadata of a saved step."""
        with _without_logged_errors():
            args = ocp.args.Composite(extra=ocp.args.JsonRestore())
            extra = self._reader.restore(self._directory / str(step), args=args)["extra"]
        if missing := {"version", "counters", "checksums"} - set(extra):
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        if extra.get("counters_checksum") != extra_checksum(extra):
            raise ValueError("its checksum does not match its counters")
        return extra

    def _state(self, step: int, like: PyTree, partial: bool) -> PyTree:
        """Read the state of a saved step."""
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        state = ocp.args.StandardRestore(like)
        if partial:
            restore_args = ocp.checkpoint_utils.construct_restore_args(like)
            state = ocp.args.PyTreeRestore(like, restore_args=restore_args, partial_restore=True)
        with _without_logged_errors():
            return self._reader.restore(self._directory / str(step), args=ocp.args.Composite(state=state))["state"]

    def _problems(self, step: int, extra: dict[str, Any], like: PyTree, partial: bool) -> Iterator[str]:
        """Yield why an undamaged checkpoint cannot be restored: it was renamed, or has other arrays."""
        if (version := extra["version"]) != VERSION:
            yield self._unusable(step, f"its format is version {version}, and this decjax reads version {VERSION}")
            return
        if (saved := extra["step"]) != step:
            yield f"{self._called(step)} was saved as step {saved}; rename it to {saved}, or move it away"
        here = arrays_of(like)
        there = {name: array for name, array in extra["arrays"].items() if not partial or name in here}
        if differing := difference(there, here):
            yield f"{self._called(step)} holds other arrays: {differing}; {fix(there, here)}"

    def unlike(self, step: int, like: PyTree) -> str:
        """Return how the first array differs from `like` in dtype or shape per worker; empty if none does."""
        try:
            there, here = (
                {name: [dtype, *shape[1:]] for name, (dtype, *shape) in arrays.items()}
                for arrays in (self._extra(step)["arrays"], arrays_of(like))
            )
        except Exception:  # `restore` raises a better error.
            return ""
        return difference({name: array for name, array in there.items() if name in here}, here)

    def last_good(self, like: PyTree) -> int | None:
        """Return the newest step that can be restored; None if there is none. A collective."""
        for step in reversed(steps_saved(self._workdir)):
            with contextlib.suppress(CheckpointError):
                self.restore(step, like)
                return step
        return None

    def diverged(self, what: str, state: PyTree, like: PyTree = None) -> Diverged:
        """Return the error of a diverged run, with `what` and the last good checkpoint. A collective.

        Checkpoints are restored as `like` to find a good one, after the state's arrays have been deleted to free memory.
        """
        with contextlib.suppress(CheckpointError):
            self.finish()  # Writing may still read the arrays.
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state) if like is None else like
        for x in jax.tree.leaves(state):
            if isinstance(x, jax.Array):
                x.delete()
        good = self.last_good(like)
        kept = "no good checkpoint was saved" if good is None else f"the last good checkpoint is of step {good}"
        return Diverged(
            f"{what}: training has diverged; {kept}. Lower schedule.learning_rate, raise schedule.warmup_steps or set clip_norm"
        )

    def _called(self, step: int) -> str:
        return f"checkpoint {self._directory / str(step)}"

    def _unusable(self, step: int, why: str) -> str:
        return f"{self._called(step)} cannot be restored, {why}; {self._fix(step)}"

    def _damaged(self, step: int, why: str) -> Damaged:
        return Damaged(f"{self._called(step)} is damaged ({why}); {self._fix(step)}", why)

    def _fix(self, step: int) -> str:
        if not self._own:
            return "choose another --resume_from"
        others = [other for other in steps_saved(self._workdir) if other < step]
        return f"move it away to continue from step {max(others)}" if others else "start again in another --workdir"

    def set_aside(self, steps: list[int]) -> None:
        """Rename damaged checkpoints of this run to `STEP.damaged`. A collective."""
        if jax.process_index() == 0:
            for step in steps:
                aside = self._directory / f"{step}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                (self._directory / str(step)).rename(aside)
        _in_any_process(False)  # Waits for process 0.
        assert self._manager is not None
        self._manager.reload()


# -- Checksums and descriptions of arrays ---------------------------------------------------------------------------


def _mixed(word: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer, a bijection of uint32 in which every bit of the input affects every bit of the result."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> shift)) * jnp.uint32(factor)
    return word ^ (word >> 16)


@jax.jit
def checksums(state: PyTree) -> jax.Array:
    """Return a checksum of each array in `state`, uint32 [arrays]: Σ_i mixed(word_i ⊕ mixed(i)) mod 2³².

    Orbax's files have no checksums. A sum does not depend on the order, so each device sums its own shards; words are mixed first, so that
    several changes do not cancel.
    """

    def one(x):
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32))
        words, index = words.astype(jnp.uint32), jax.lax.iota(jnp.uint32, words.size).reshape(words.shape)
        return jnp.sum(_mixed(words ^ _mixed(index)), dtype=jnp.uint32)

    return jnp.stack([one(x) for x in jax.tree.leaves(state)])


def extra_checksum(extra: dict[str, Any]) -> int:
    """Return the checksum of a checkpoint's metadata."""
    checksum_names = ("checksums", "counters_checksum")
    covered = {name: value for name, value in extra.items() if name not in checksum_names}
    return zlib.crc32(json.dumps(covered, sort_keys=True).encode())


def arrays_of(state: PyTree) -> Described:
    """Return the arrays of a state.

    Raises:
        CheckpointError: if the state cannot be saved: two arrays would have the same name, or one holds typed PRNG keys.
    """
    flat = [(".".join(map(str, path)), x) for path, x in ocp.tree.to_flat_dict(state).items() if hasattr(x, "dtype")]
    errors.refuse(_unnameable(flat))
    return {name: [np.dtype(x.dtype).name, *x.shape] for name, x in flat}


def _unnameable(flat: list[tuple[str, Any]]) -> Iterator[str]:
    """Yield why arrays cannot be saved under these names."""
    names = [name for name, _ in flat]
    for name, x in flat:
        if names.count(name) > 1:
            yield f"two arrays of the state are called {name!r} in a checkpoint; use names without dots"
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            yield f"{name} has dtype {x.dtype}, which checkpoints cannot hold; keep jax.random.key_data(key) instead"


def difference(there: Described, here: Described) -> str:
    """Return how the first different array of two states differs; empty if there is none."""
    shown = lambda array: f"{array[0]}{array[1:]}" if array else "missing"
    for name in [*here, *(there.keys() - here.keys())]:
        if (saved := there.get(name)) != (present := here.get(name)):
            return f"{name} is {shown(saved)} there and {shown(present)} here"
    return ""


def fix(there: Described, here: Described) -> str:
    """Return the fix for two different states, for an error message."""
    without_width = lambda arrays: {name: [dtype.replace("64", "32"), *shape] for name, (dtype, *shape) in arrays.items()}
    if difference(without_width(there), without_width(here)):
        return "use the model, optimizer, method and number of workers that saved it"
    return f"set JAX_ENABLE_X64={int(not jax.config.read('jax_enable_x64'))}"


_finite = jax.jit(codecs.finite)


def finite(state: PyTree) -> bool:
    """Return whether all floating-point values of a state are finite; each device checks its shards. A collective."""
    return bool(_finite(state))
