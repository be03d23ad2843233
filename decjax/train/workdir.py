"""The work directory of a run: its config and its locks, and the run whose replicas it starts from.

A work directory belongs to one config: `config.json` is written first, and compared on each later start.
"""

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import functools
import json
import os
import pathlib
import time
from typing import NamedTuple, TextIO
import uuid

from flax import traverse_util
import jax
from jax.experimental import multihost_utils
import numpy as np

from decjax import config as config_lib
from decjax import errors, files, registry
from decjax.errors import CheckpointError, ConfigError, of_system
from decjax.train import checkpoint, metrics
from decjax.train import state as state_lib
from decjax.train.checkpoint import steps_saved
from decjax.train.members import Members
from decjax.train.trainer import Trainer
from decjax.typing import PyTree

# Fields that may differ between a run and its continuation; they change training at most by rounding.
FREE_KEYS = ("eval.", "checkpoint.", "elastic.", "log_every", "data.sample_bytes", "engine", "fsdp", "across_hosts")
MOST_DIFFERING = 6  # fields of two configs that an error lists
ATTEMPTS, PAUSE_S = 40, 0.05  # of locking a directory, which another process of the same launch may be preparing
LAYOUT = ("stages", "chunks", "layers", "autoencoder")  # fields of a pipeline that determine the layout of the parameters


def claim(
    workdir: pathlib.Path, config: dict, advise: Callable[[pathlib.Path], str] = lambda folder: "", launch: str = ""
) -> contextlib.ExitStack:
    """Make `workdir` the directory of a run with this config, or check that it is. A collective.

    Process 0 checks the directory, creates it and writes the resolved config; the others wait for it. A directory
    without checkpoints may be claimed with another config; then the metrics of the previous config are removed.

    Args:
        workdir: the directory.
        config: the resolved config.
        advise: returns further advice for a directory of another run, after a semicolon.
        launch: name of a launch whose processes all claim the directory and share the lock; empty: process 0 claims it for all.

    Returns:
        A context that locks the directory until it is closed.

    Raises:
        CheckpointError: if the directory cannot be written, is in use, or belongs to a run with another config.
    """
    with contextlib.ExitStack() as held:
        if launch or jax.process_index() == 0:
            document = json.loads(json.dumps(config))
            errors.refuse(_problems(workdir, document, advise))
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


def _problems(workdir: pathlib.Path, config: dict, advise: Callable[[pathlib.Path], str]) -> Iterator[str]:
    """Yield why a run with this config may not start or continue in the directory."""
    path, folder, other = workdir / "config.json", workdir / "checkpoints", "choose another --workdir"
    if folder.exists() and not folder.is_dir():
        yield f"{folder} is a file where a folder must be; move it away, or {other}"
    if steps_saved(workdir):
        if not path.exists():
            yield f"{workdir} holds checkpoints but no config.json: not a run of decjax; {other}"
        saved = _read_config(path, f"repair it, or {other}").document
        before, now = (traverse_util.flatten_dict(document, sep=".") for document in (saved, config))
        keys = [key for key in sorted(before.keys() | now.keys()) if not key.startswith(FREE_KEYS)]
        if differing := _differing({key: (before.get(key), now.get(key)) for key in keys}):
            yield f"{workdir} holds a run with another config ({differing}); {other}{advise(workdir)}"
    elif path.exists() and '"workers"' not in files.read_text(path):
        yield f"{path} is not of a run of decjax; {other}"
    elif lost := _lost(workdir):
        yield f"{workdir} holds {lost} but no checkpoints to continue from; put them back, or {other}"


def _read_config(path: pathlib.Path, fix: str) -> config_lib.RunSpec:
    """Return the config of a run; raise a CheckpointError with the fix if it cannot be read."""
    try:
        return config_lib.read(files.read_json(path))
    except (ValueError, AttributeError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {fix}") from error


def _differing(pairs: dict[str, tuple[object, object]]) -> str:
    """Return the first pairs whose values differ, as text; the names of parts come first."""
    by_rank = sorted(pairs.items(), key=lambda pair: not pair[0].endswith(("name", "task", "topology")))
    differing = [f"{name}: {there!r} there, {here!r} here" for name, (there, here) in by_rank if there != here]
    more = len(differing) - MOST_DIFFERING
    return "; ".join([*differing[:MOST_DIFFERING], *([f"and {more} more"] if more > 0 else [])])


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


# -- Another run to start from ----------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """Another run to start from."""

    folder: pathlib.Path  # its work directory
    checkpoints: checkpoint.Checkpoints
    step: int  # of the newest checkpoint, which may be damaged
    num_workers: int
    has_weights: bool  # whether its replicas have weights, as with push-sum


def _find(folder: pathlib.Path, checkpoints: checkpoint.Checkpoints, trainer: Trainer) -> Origin:
    """Return the run in a folder; raise a CheckpointError if `trainer` cannot start from it."""
    theirs, step = _read_config(folder / "config.json", "choose another --resume_from"), checkpoints.latest()
    errors.refuse(_unlike(folder, theirs, step, checkpoints, trainer))
    assert step is not None
    has_weights = theirs.mixer is not None and registry.part("mixer", theirs.mixer.name).traits.get("weights", False)
    return Origin(folder, checkpoints, step, theirs.workers, has_weights)


def _unlike(
    folder: pathlib.Path, theirs: config_lib.RunSpec, step: int | None, checkpoints: checkpoint.Checkpoints, trainer: Trainer
) -> Iterator[str]:
    """Yield why a trainer cannot start from a run: there is no checkpoint, or its model or pipeline stages differ."""
    ours = trainer.spec
    layout = {f"pipeline.{name}": (getattr(theirs.pipeline, name), getattr(ours.pipeline, name)) for name in LAYOUT}
    if differing := _differing(layout):
        yield f"{folder} has a model divided otherwise ({differing}); start with the same division"
    if ours.trait("source", "divided") and theirs.workers != ours.workers:
        yield f"{folder} has tables divided among {theirs.workers} workers, not {ours.workers}; use workers={theirs.workers}"
    if step is None:
        yield f"{folder} has no complete checkpoint; choose another --resume_from"
    elif unlike := checkpoints.unlike(step, state_lib.kept(trainer.abstract, trainer.setup.source.lasts)):
        differing = _differing(_choices(theirs, ours)) or unlike
        yield f"{folder} is a run of something else ({differing}); choose another --resume_from, or set the same here"


def _choices(theirs: config_lib.RunSpec, ours: config_lib.RunSpec) -> dict[str, tuple[object, object]]:
    """Return the values of two runs that determine the state's arrays: names of parts or, if these agree, their options."""
    kinds = ("task", "model", "optimizer", "method")
    pairs = {kind: (getattr(theirs, kind), getattr(ours, kind)) for kind in kinds}
    names = {kind: tuple(choice and choice.name for choice in pair) for kind, pair in pairs.items()}
    if any(there != here for there, here in names.values()):
        return names
    options = {
        f"{kind}.{name}": (there.options.get(name), value)
        for kind, (there, here) in pairs.items()
        if there and here
        for name, value in here.options.items()
    }
    if (theirs.source is None) != (ours.source is None):
        options["tables"] = "whole" if theirs.source is None else "divided", "whole" if ours.source is None else "divided"
    if bool(theirs.clip_norm) != bool(ours.clip_norm):
        options["clip_norm"] = theirs.clip_norm, ours.clip_norm
    return options


@contextlib.contextmanager
def opened(folder: str | os.PathLike | None, trainer: Trainer, steps: int) -> Iterator[Origin | None]:
    """Context manager with the run to start from, None without a folder; CheckpointError if it has taken `steps` already."""
    if folder is None:
        yield None
        return
    with checkpoint.Checkpoints(pathlib.Path(folder), read_only=True) as checkpoints:
        origin = _find(pathlib.Path(folder), checkpoints, trainer)
        if origin.step >= steps:
            raise CheckpointError(f"{folder} has done {origin.step} of steps={steps}; set more steps to continue from there")
        yield origin


def replicas(origin: Origin, members: Members) -> tuple[int, PyTree, str]:
    """Return (step, this process's part of a state made from another run's replicas, a message about them)."""
    n, num_workers, trainer = origin.num_workers, members.spec.workers, members.trainer
    step, (state, weight_N), damage = origin.checkpoints.newest(lambda step: _read(origin, step, trainer))

    def averaged(params):  # Mixers start from one model on all workers, here the average of the replicas.
        params = trainer.setup.source.gathered(params)
        return jax.tree.map(lambda mean, x: mean.astype(x.dtype), state_lib.mean_over_workers(params, weight_N), params)

    resized = functools.partial(state_lib.resize, num_workers=num_workers, weight_N=weight_N)
    layouts = trainer.workers.shared, trainer.workers.shardings
    average, kept = (
        jax.jit(fn, out_shardings=layout(jax.eval_shape(fn, given)))(given)
        for fn, layout, given in zip((averaged, resized), layouts, (state["params"], state), strict=True)
    )
    note = (
        f"{damage}starting from step {step} of {origin.folder}; {n} replicas became {num_workers}, "
        "mixer and reducer state are reset"
    )
    return step, members.local(state_lib.resumed(kept, members.init(average))), note


def _read(origin: Origin, step: int, trainer: Trainer) -> tuple[PyTree, np.ndarray | None]:
    """Read (the part of another run's replicas to continue from, their weights [N] or None); all devices divide its arrays."""
    n, workers = origin.num_workers, trainer.workers

    def read(like):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), like)
        like = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), like, workers.scattered(like))
        return origin.checkpoints.restore(step, like, partial=True)[0]

    state = read(state_lib.kept(trainer.abstract, trainer.setup.source.lasts))
    if not origin.has_weights:
        return state, None
    # y_i of the replicas, equal on all stages of a worker.
    weight = jax.ShapeDtypeStruct((n, workers.stages)[: workers.num_axes], np.float32)
    weight = read({"opt_state": {"mixer": {"weight": weight}}})["opt_state"]["mixer"]["weight"]
    return state, np.asarray(weight).reshape(n, -1)[:, 0]


def advice(folder: pathlib.Path, trainer: Trainer) -> str:
    """Return advice on starting from the newest checkpoint in a folder; empty if `trainer` cannot."""
    steps = ""
    if jax.process_count() == 1:  # Reading checkpoints needs all processes, and only the first one calls this.
        try:
            with checkpoint.Checkpoints(folder, read_only=True) as checkpoints:
                done = _find(folder, checkpoints, trainer).step
        except CheckpointError:
            return ""
        steps = f" and set more than {done} steps" if done >= trainer.spec.steps else ""
    return f"; to start from its parameters, add --resume_from={folder}{steps}"
