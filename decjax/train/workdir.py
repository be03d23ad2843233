"""The work directory of a run: its config, its locks and its checkpoints.

A work directory belongs to one config: `config.json` is written first, and compared on each later start.
"""

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import json
import pathlib
import time
from typing import TextIO
import uuid

from flax import traverse_util
import jax
from jax.experimental import multihost_utils

from decjax import config as config_lib
from decjax import files
from decjax.errors import CheckpointError, ConfigError, of_system
from decjax.train import metrics

# Fields that may differ between a run and its continuation; they change training at most by rounding.
FREE_KEYS = ("eval.", "checkpoint.", "elastic.", "log_every", "data.sample_bytes", "engine")
ATTEMPTS, PAUSE_S = 40, 0.05  # of locking a directory, which another process of the same launch may be preparing


def claim(
    workdir: pathlib.Path, config: dict, advise: Callable[[pathlib.Path], str] = lambda folder: "", launch: str = ""
) -> contextlib.ExitStack:
    """Make `workdir` the directory of a run with this config, or check that it is. A collective.

    Process 0 checks the directory, creates it and writes the resolved config; the others wait for it. A directory
    without checkpoints may be claimed with another config; then the metrics of the previous config are removed.

    Args:
        workdir: the directory.
        config: the resolved config.
        advise: returns further advice for a directory of another run, after a comma.
        launch: name of a launch whose processes all claim the directory and share the lock; empty: process 0 claims it for all.

    Returns:
        A context that locks the directory until it is closed.

    Raises:
        CheckpointError: if the directory cannot be written, is in use, or belongs to a run with another config.
    """
    with contextlib.ExitStack() as held:
        if launch or jax.process_index() == 0:
            document = json.loads(json.dumps(config))
            _check(workdir, document, advise)
            _take(workdir, document, launch, held)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("decjax-claim")
        return held.pop_all()


@contextlib.contextmanager
def writing(workdir: pathlib.Path) -> Iterator[None]:
    """Context manager in which no other process of this launch writes to the directory; waits for one that does, such as a frozen one."""
    files.check_regular(workdir / ".writer")
    with (workdir / ".writer").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # The kernel releases it when the process ends.
        yield


def _check(workdir: pathlib.Path, config: dict, advise: Callable[[pathlib.Path], str]) -> None:
    """Raise a CheckpointError if a run with this config may not start or continue in the directory."""
    path, folder = workdir / "config.json", workdir / "checkpoints"
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file where a folder must be; move it away, or choose another --workdir")
    saved = steps_saved(workdir)
    if saved and not path.exists():
        raise CheckpointError(f"{workdir} holds checkpoints but no config.json: not a run of decjax; choose another --workdir")
    if saved:
        try:
            there = config_lib.read(files.read_json(path)).document
            before, now = (traverse_util.flatten_dict(document, sep=".") for document in (there, config))
        except (ValueError, AttributeError, KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); repair it, or choose another --workdir") from error
        if differing := [
            f"{key}: {before.get(key)!r} there, {now.get(key)!r} here"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not key.startswith(FREE_KEYS)
        ]:
            raise CheckpointError(
                f"{workdir} holds a run with another config ({'; '.join(differing)}); choose another --workdir{advise(workdir)}"
            )
    elif path.exists() and '"workers"' not in files.read_text(path):
        raise CheckpointError(f"{path} is not of a run of decjax; choose another --workdir")
    elif lost := _lost(workdir):
        raise CheckpointError(
            f"{workdir} holds {lost} but no checkpoints to continue from; put them back, or choose another --workdir"
        )


def _take(workdir: pathlib.Path, config: dict, launch: str, held: contextlib.ExitStack) -> None:
    """Lock the directory for a launch until `held` is closed, and prepare it for this config."""

    def prepare():
        if not steps_saved(workdir):
            (workdir / "metrics.jsonl").unlink(missing_ok=True)  # First, because `_lost` compares them with the old config.
        files.write_whole(workdir / "config.json", json.dumps(config, indent=2) + "\n")

    try:
        workdir.mkdir(parents=True, exist_ok=True)
        files.check_regular(workdir / ".lock")
        _lock(held.enter_context((workdir / ".lock").open("a+", errors="replace")), launch, prepare)
    except BlockingIOError as error:
        raise CheckpointError(
            f"workdir {str(workdir)!r} is in use by a run that is still going; wait for it, or choose another --workdir"
        ) from error
    except OSError as error:
        raise CheckpointError(f"workdir {str(workdir)!r} cannot be written: {of_system(error)}") from error


def _lock(file: TextIO, launch: str, prepare: Callable[[], None]) -> None:
    """Lock a directory for a launch, whose processes share the lock. The first of them calls `prepare`.

    The first holds the lock exclusively until it has written the launch's name to the file. Therefore no other launch can get the
    directory between two processes of this one, even if those that hold the lock die one after the other.

    Raises:
        BlockingIOError: if a process of another launch has the lock.
    """
    name = launch or uuid.uuid4().hex
    for attempts_left in reversed(range(ATTEMPTS if launch else 1)):
        if _named(file) == name:
            fcntl.flock(file, fcntl.LOCK_SH)
            if _named(file) == name:
                return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not attempts_left:
                raise
            time.sleep(PAUSE_S)  # The first process of this launch may hold it exclusively.
            continue
        if _named(file) != name:
            prepare()
            file.truncate(0)
            file.write(name)
            file.flush()
        fcntl.flock(file, fcntl.LOCK_SH)
        if _named(file) == name:
            return
    raise BlockingIOError


def _named(file: TextIO) -> str:
    file.seek(0)
    return file.read()


def _lost(workdir: pathlib.Path) -> str:
    """Return evidence that checkpoints are missing; empty if the run may have ended before the first."""
    if (workdir / "summary.json").exists():
        return "a finished run"
    try:
        every = files.read_json(workdir / "config.json")["checkpoint"]["every"]
        steps = [row["step"] for row in metrics.read(workdir)]
        # A checkpoint is complete before the next one is started, and so before any later row.
        saved = [step for step in steps if step % every == 0 and step + every < max(steps)]
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return ""
    return f"metrics of steps after {saved[-1]}, which was saved," if saved else ""


def differing(theirs: config_lib.RunSpec, ours: config_lib.RunSpec) -> str:
    """Return how two runs differ in the parts that determine the state's arrays: in names or, if these agree, in options."""
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
        if (theirs.source is None) != (ours.source is None):
            named["tables"] = tuple("whole" if spec.source is None else "divided" for spec in (theirs, ours))
        if bool(theirs.clip_norm) != bool(ours.clip_norm):
            named["clip_norm"] = theirs.clip_norm, ours.clip_norm
    return "; ".join(f"{name}: {there!r} there, {here!r} here" for name, (there, here) in named.items())


def steps_saved(workdir: pathlib.Path) -> list[int]:
    """Return the steps of all complete checkpoints, including damaged ones, in ascending order."""
    return files.numbers_in(workdir / "checkpoints")
