"""The newest checkpoint of a run, for commands that read it and change nothing."""

import pathlib

from decjax import config as parts
from decjax import files, train
from decjax.train import checkpoint
from launch import command


def document(workdir: pathlib.Path) -> dict:
    """Return the config of a run; a UserError if the directory holds none."""
    with command.refusing(f"workdir {str(workdir)!r} holds no run", "give the --workdir of launch.train"):
        return files.read_json(workdir / "config.json")


def simulated(config: dict) -> parts.RunSpec:
    """Return the run of a config with all workers on one device; no step is taken, so options that exclude `simulate` may stay."""
    return parts.resolve(config).replace(simulate=True, tensor=1, tensor_codec="")


def newest(workdir: pathlib.Path, trainer: train.Trainer) -> tuple[int, train.State]:
    """Return the step and the state of a run's newest complete checkpoint; a UserError if there is none."""
    with checkpoint.Checkpoints(workdir, read_only=True) as saved:
        problem = f"workdir {str(workdir)!r} has no complete checkpoint"
        command.check((saved.latest() is not None, problem, "train until the first one"))
        step, (state, _), _ = saved.newest(lambda step: saved.restore(step, like=trainer.abstract))
    return step, state
