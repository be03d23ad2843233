"""Starting from the replicas of another run."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from decjax import config, files, registry
from decjax.errors import CheckpointError, ConfigError
from decjax.train import checkpoint
from decjax.train import state as state_lib
from decjax.train import workdir as workdir_lib
from decjax.train.members import Members
from decjax.train.trainer import Trainer

LAYOUT = ("stages", "chunks", "layers", "autoencoder")  # fields of a pipeline that determine the layout of the parameters


class Origin(NamedTuple):
    """Another run to start from."""

    folder: pathlib.Path  # its work directory
    checkpoints: checkpoint.Checkpoints
    step: int  # of the newest checkpoint, which may be damaged
    num_workers: int
    has_weights: bool  # whether its replicas have weights, as with push-sum


def find(folder: pathlib.Path, checkpoints: checkpoint.Checkpoints, trainer: Trainer) -> Origin:
    """Return the run in a folder; raise a CheckpointError if there is none, or if its model or pipeline stages differ."""
    ours, step = trainer.spec, checkpoints.latest()
    try:
        theirs = config.read(files.read_json(folder / "config.json"))
    except (ValueError, ConfigError) as error:
        problem = f"{folder / 'config.json'} cannot be read: not a run of decjax ({error})"
        raise CheckpointError(f"{problem}; choose another --resume_from") from error
    if differing := [
        f"pipeline.{name}={there!r} there, {here!r} here"
        for name in LAYOUT
        if (there := getattr(theirs.pipeline, name)) != (here := getattr(ours.pipeline, name))
    ]:
        raise CheckpointError(f"{folder} has a model divided otherwise ({'; '.join(differing)}); start with the same division")
    if ours.trait("source", "divided") and theirs.workers != ours.workers:
        raise CheckpointError(
            f"{folder} has tables divided among {theirs.workers} workers, not {ours.workers}; use workers={theirs.workers}"
        )
    if step is None:
        raise CheckpointError(f"{folder} has no complete checkpoint; choose another --resume_from")
    if unlike := checkpoints.unlike(step, state_lib.kept(trainer.abstract, trainer.setup.source.lasts)):
        differing = workdir_lib.differing(theirs, ours) or unlike
        raise CheckpointError(
            f"{folder} is a run of something else ({differing}); choose another --resume_from, or set the same here"
        )
    has_weights = theirs.mixer is not None and registry.part("mixer", theirs.mixer.name).traits.get("weights", False)
    return Origin(folder, checkpoints, step, theirs.workers, has_weights)


@contextlib.contextmanager
def opened(folder: str | os.PathLike | None, trainer: Trainer, steps: int) -> Iterator[Origin | None]:
    """Context manager with the run to start from, None without a folder; CheckpointError if it has taken `steps` already."""
    if folder is None:
        yield None
        return
    with checkpoint.Checkpoints(pathlib.Path(folder), read_only=True) as checkpoints:
        origin = find(pathlib.Path(folder), checkpoints, trainer)
        if origin.step >= steps:
            raise CheckpointError(f"{folder} has done {origin.step} of steps={steps}; set more steps to continue from there")
        yield origin


def replicas(origin: Origin, members: Members) -> tuple[int, Any, str]:
    """Return (step, this process's part of a state made from another run's replicas, a message about them)."""
    n, num_workers, trainer = origin.num_workers, members.spec.workers, members.trainer
    step, (state, weight_N), damage = origin.checkpoints.newest(lambda step: _read(origin, step, trainer))
    # Mixers start from one model on all workers, here the average of the replicas.
    params = trainer.setup.source.gathered(state["params"])
    average = jax.tree.map(lambda mean, x: np.asarray(mean, x.dtype), state_lib.mean_over_workers(params, weight_N), params)
    note = (
        f"{damage}starting from step {step} of {origin.folder}; {n} replicas became {num_workers}, "
        "mixer and reducer state are reset"
    )
    return step, members.place(state_lib.resize(state, members.init(average), num_workers, weight_N)), note


def _read(origin: Origin, step: int, trainer: Trainer) -> tuple[Any, np.ndarray | None]:
    """Read (the part of another run's replicas to continue from, their weights [N] or None) as NumPy arrays."""
    n, workers = origin.num_workers, trainer.workers

    def read(like):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype, sharding=workers.replicated), like)
        return jax.tree.map(np.asarray, origin.checkpoints.restore(step, like, partial=True)[0])

    state = read(state_lib.kept(trainer.abstract, trainer.setup.source.lasts))
    if not origin.has_weights:
        return state, None
    # y_i of the replicas, equal on all stages of a worker.
    weight = jax.ShapeDtypeStruct((n, workers.stages)[: workers.num_axes], np.float32)
    weight = read({"opt_state": {"mixer": {"weight": weight}}})["opt_state"]["mixer"]["weight"]
    return state, weight.reshape(n, -1)[:, 0]


def advice(folder: pathlib.Path, trainer: Trainer) -> str:
    """Return advice on starting from the newest checkpoint in a folder; empty if `trainer` cannot."""
    more = ""
    if jax.process_count() == 1:  # Reading checkpoints needs all processes, and only the first one calls this.
        try:
            with checkpoint.Checkpoints(folder, read_only=True) as checkpoints:
                done = find(folder, checkpoints, trainer).step
        except CheckpointError:
            return ""
        more = f" and more than {done} steps" if done >= trainer.spec.steps else ""
    return f", and --resume_from={folder}{more} to start from its parameters"
