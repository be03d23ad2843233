"""From a config to a trainer or a run, as `launch.train` does it."""

import jax

from decjax import config as parts
from decjax import train


def spec_of(config) -> parts.RunSpec:
    return parts.resolve(config, jax.device_count())


def trainer_of(config) -> train.Trainer:
    return train.Trainer(spec_of(config))


def run_of(config, workdir, resume_from=None) -> train.Run:
    return train.Run(trainer_of(config), workdir, resume_from)
