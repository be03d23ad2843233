"""Checkpoints with Orbax: the state of every worker, bit for bit, and the run's counters (time, bytes).

A work directory belongs to one config: `config.json` is written first, and compared on every later start.
"""

import asyncio
import contextlib
import fcntl
import functools
import json
import pathlib
from typing import Any
import zlib

from absl import logging
from flax import traverse_util
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from decjax import codecs
from decjax import config as config_lib
from decjax.errors import CheckpointError, ConfigError, Diverged
from decjax.train import metrics

# Fields that may differ between a run and its continuation; except for rounding, none of them changes the result of training.
FREE_KEYS = ("eval.", "checkpoint.", "log_every", "data.sample_bytes", "engine")
VERSION = 2  # of the checksums; checkpoints without this entry are of version 1


def claim(workdir: pathlib.Path, config: dict) -> contextlib.ExitStack:
    """Makes `workdir` the directory of a run with this config, or checks that it already is. A collective.

    Process 0 checks the directory, creates it and writes the resolved config; the others wait for it. A directory in which nothing
    was saved yet may be claimed with another config; the metrics that are there belong to the config before, and are removed.

    Returns:
        What keeps other runs out until it is closed.

    Raises:
        CheckpointError: if the directory cannot be written, is in use, or belongs to a run with another config.
    """
    with contextlib.ExitStack() as held:
        if jax.process_index() == 0:
            document = json.loads(json.dumps(config))
            _check(workdir, document)
            _take(workdir, document, held)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("decjax-claim")
        return held.pop_all()


def _check(workdir: pathlib.Path, config: dict) -> None:
    """Raises a CheckpointError if the directory is not one in which a run with this config may begin or go on."""
    path, folder = workdir / "config.json", workdir / "checkpoints"
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file where a folder must be; move it away, or choose another --workdir")
    saved = has_checkpoints(workdir)
    if saved and not path.exists():
        raise CheckpointError(f"{workdir} holds checkpoints but no config.json: not a run of decjax; choose another --workdir")
    if saved:
        try:
            there = config_lib.read(json.loads(path.read_text())).document
            before, now = (traverse_util.flatten_dict(document, sep=".") for document in (there, config))
        except (OSError, ValueError, AttributeError, KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); repair it, or choose another --workdir") from error
        if differing := [
            f"{key}: {before.get(key)!r} there, {now.get(key)!r} here"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not key.startswith(FREE_KEYS)
        ]:
            raise CheckpointError(
                f"{workdir} holds a run with another config ({'; '.join(differing)}); choose another "
                f"--workdir, and --resume_from={workdir} to start from its parameters"
            )
    elif path.exists() and '"workers"' not in path.read_text(errors="replace"):
        raise CheckpointError(f"{path} is not of a run of decjax; choose another --workdir")
    elif lost := _lost(workdir):
        raise CheckpointError(
            f"{workdir} holds {lost} but no checkpoints, from which it could go on; put them back, or choose another --workdir"
        )


def _take(workdir: pathlib.Path, config: dict, held: contextlib.ExitStack) -> None:
    """Locks the directory, until `held` is closed, and makes it one of this config."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = held.enter_context((workdir / ".lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not has_checkpoints(workdir):
            (workdir / "metrics.jsonl").unlink(missing_ok=True)  # First: `_lost` judges them by the config that is there.
        metrics.write_whole(workdir / "config.json", json.dumps(config, indent=2) + "\n")
    except BlockingIOError as error:
        raise CheckpointError(
            f"workdir {str(workdir)!r} is in use by a run that is still going; wait for it, or choose another --workdir"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"workdir {str(workdir)!r} cannot be written ({error.strerror}); choose a --workdir that you own"
        ) from error


def _lost(workdir: pathlib.Path) -> str:
    """Evidence that a run had checkpoints which are now missing; empty if it may have ended before the first."""
    if (workdir / "summary.json").exists():
        return "a finished run"
    try:
        every = json.loads((workdir / "config.json").read_text())["checkpoint"]["every"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    steps = [row["step"] for row in metrics.read(workdir)]
    saved = [step for step in steps if step % every == 0 and step < max(steps)]  # A later row exists only once these were saved.
    return f"metrics of steps after {saved[-1]}, which was saved," if saved else ""


def differing(theirs: config_lib.RunSpec, ours: config_lib.RunSpec) -> str:
    """How two runs differ in the parts that determine the arrays of a state: in their names, or if those agree in their options."""
    kinds = ("task", "model", "optimizer", "method")
    pairs = {kind: (getattr(theirs, kind), getattr(ours, kind)) for kind in kinds}
    named = {kind: tuple(choice and choice.name for choice in pair) for kind, pair in pairs.items()}
    named = {kind: names for kind, names in named.items() if names[0] != names[1]}
    if not named:
        for kind, (there, here) in pairs.items():
            if there and here:
                named |= {
                    f"{kind}.{name}": (there.options.get(name), value)
                    for name, value in here.options.items()
                    if there.options.get(name) != value
                }
    return "; ".join(f"{name}: {there!r} there, {here!r} here" for name, (there, here) in named.items())


def has_checkpoints(workdir: pathlib.Path) -> bool:
    """Whether a work directory has at least one checkpoint."""
    folder = workdir / "checkpoints"
    return folder.is_dir() and any(child.name.isdigit() for child in folder.iterdir())


def _mixed(word: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer, a bijection of uint32 in which every bit of the input affects every bit of the result."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> shift)) * jnp.uint32(factor)
    return word ^ (word >> 16)


@functools.partial(jax.jit, static_argnames="version")
def checksums(state: Any, version: int = VERSION) -> jax.Array:
    """A checksum of every array in `state`, uint32 [arrays]: Σ_i mixed(word_i ⊕ mixed(i)) mod 2³².

    Orbax's files have none. A sum does not depend on the order, so each device sums its own shards; words are mixed first, so that
    several changes do not cancel. Checkpoints of version 1 have Σ_i (2i + 1) · word_i, in which two flipped signs cancel.
    """

    def one(x):
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32))
        words, index = words.astype(jnp.uint32), jax.lax.iota(jnp.uint32, words.size).reshape(words.shape)
        return jnp.sum(words * (2 * index + 1) if version == 1 else _mixed(words ^ _mixed(index)), dtype=jnp.uint32)

    return jnp.stack([one(x) for x in jax.tree.leaves(state)])


def _counters_checksum(counters: dict) -> int:
    return zlib.crc32(json.dumps(counters, sort_keys=True).encode())


_finite = jax.jit(codecs.finite)


def finite(state: Any) -> bool:
    """Whether every floating-point value of a state is finite; each device checks its own shards. A collective."""
    return bool(_finite(state))


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


class Checkpoints:
    """The checkpoints in a run's work directory, of which the newest `keep` are kept (None: all); `read_only` for another run's."""

    def __init__(self, workdir: pathlib.Path, *, keep: int | None = None, read_only: bool = False):
        self._directory, self._read_only = (workdir / "checkpoints").absolute(), read_only
        if read_only and not self._directory.is_dir():
            raise CheckpointError(f"{workdir} has no checkpoints; give the --workdir of a run that saved some")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=not read_only, read_only=read_only, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, counters: dict) -> None:
        """Writes a checkpoint; it counts only once it is complete. A collective.

        Raises:
            Diverged: if a value of the state is not finite, in parameters or any other part; nothing is written then.
            CheckpointError: if the disk is full, or the directory can no longer be written.
        """
        if not finite(state):
            raise self.diverged(f"the state of step {step} is not finite", state)
        extra = {
            "version": VERSION,
            "counters": counters,
            "counters_checksum": _counters_checksum(counters),
            "checksums": np.asarray(checksums(state)).tolist(),
        }
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra))
        try:
            with _errors_once():
                self._manager.save(step, force=True, args=args)
                self._manager.wait_until_finished()
        except (OSError, ValueError) as error:  # TensorStore raises ValueErrors, whose text ends with the cause.
            reason = " ".join(str(error).split())[-100:]
            raise CheckpointError(
                f"checkpoint of step {step} cannot be written in {self._directory} (… {reason}); make room "
                "there, and the same command continues from the last whole checkpoint"
            ) from error

    def restore(self, step: int, like: Any, partial: bool = False) -> tuple[Any, dict]:
        """(state, counters) of a saved step, read and verified.

        Args:
            step: one that was saved.
            like: arrays or `ShapeDtypeStruct`s whose structure, shapes, dtypes and shardings the state must have.
            partial: whether `like` may lack some of the saved arrays.

        Raises:
            CheckpointError: if the checkpoint is damaged, not finite, or that of another program or model.
        """
        try:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            state = ocp.args.StandardRestore(like)
            if partial:
                state = ocp.args.PyTreeRestore(
                    like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
                )
            with _errors_once():
                restored = self._manager.restore(step, args=ocp.args.Composite(state=state, extra=ocp.args.JsonRestore()))
            state, extra = restored["state"], restored["extra"]
            counters, saved_sums, version = extra["counters"], extra["checksums"], extra.get("version", 1)
        except Exception as error:  # Orbax and TensorStore raise many types of errors for a damaged file.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise self._unusable(step, f"it is damaged or of another model, optimizer or method ({reason})") from error
        if version not in (1, VERSION):
            raise self._unusable(step, f"its checksums are of version {version}, and this decjax knows those up to {VERSION}")
        sums = np.asarray(checksums(state, version)).tolist()
        if not set(sums) <= set(saved_sums) if partial else sums != saved_sums:
            raise self._unusable(step, "it is damaged: its checksums do not match its arrays")
        if version > 1 and extra.get("counters_checksum") != _counters_checksum(counters):
            raise self._unusable(step, "it is damaged: its checksum does not match its counters")
        if not finite(state):
            raise self._unusable(step, "its state is not finite: training had diverged")
        return state, counters

    def unlike(self, step: int, like: Any) -> str:
        """The name of the first array of `like` that a saved step lacks or has in another shape per worker; empty: none."""
        try:
            with _errors_once(), ocp.StandardCheckpointer() as reader:
                saved = reader.metadata(self._directory / str(step) / "state").item_metadata.tree
            saved = ocp.tree.to_flat_dict(saved, sep=".")
        except Exception:  # Such as for a damaged file, for which `restore` raises a better error.
            return ""
        for name, x in ocp.tree.to_flat_dict(like, sep=".").items():
            if hasattr(x, "shape") and (name not in saved or saved[name].shape[1:] != x.shape[1:]):
                return name
        return ""

    def last_good(self, like: Any) -> int | None:
        """The newest step that can be restored, found by restoring it; None if there is none. A collective."""
        for step in sorted(self._manager.all_steps(), reverse=True):
            with contextlib.suppress(CheckpointError):
                self.restore(step, like)
                return step
        return None

    def diverged(self, what: str, state: Any) -> Diverged:
        """The error that ends a diverged run: what was seen, and the last good checkpoint. A collective.

        The arrays of the state are deleted, to make room for those that are restored to find that checkpoint.
        """
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        for x in jax.tree.leaves(state):
            if isinstance(x, jax.Array):
                x.delete()
        good = self.last_good(like)
        kept = "no good checkpoint was saved" if good is None else f"the last good checkpoint is of step {good}"
        return Diverged(
            f"{what}: training has diverged; {kept}. Lower schedule.learning_rate, raise schedule.warmup_steps or set clip_norm"
        )

    def _unusable(self, step: int, why: str) -> CheckpointError:
        others = [other for other in self._manager.all_steps() if other < step]
        way_out = f"move it away to continue from step {max(others)}" if others else "start again in another --workdir"
        if self._read_only:  # The checkpoint belongs to another run.
            way_out = "choose another --resume_from"
        return CheckpointError(f"checkpoint {self._directory / str(step)} cannot be restored, {why}; {way_out}")

    def close(self) -> None:
        """Ends the use of the directory."""
        self._manager.close()
