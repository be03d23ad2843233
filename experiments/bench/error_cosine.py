"""The assumption of lazy error propagation: cosines of the error and the change from message to message, over a run.

    python -m experiments.bench.error_cosine --config=configs/gpt_optimus.py:size=tiny --out=cosines.json

The config is trained with a probed boundary, whose messages are the same. Written are steps and, of every stage that sends compressed
gradients, the cosine at each of them: {"step": [K], "cosines": {stage: [K, messages]}}, of worker 0.
"""

import dataclasses
import json

from absl import flags
import jax
import ml_collections
from ml_collections import config_flags
import numpy as np

from decjax import config as parts
from decjax import files, train
from decjax.config import setup as setups
from decjax.contrib.probe import Probed
from experiments import script
from launch import command

FLAGS = flags.FLAGS


def record(config: ml_collections.ConfigDict, every: int) -> dict[str, object]:
    """Train, and return the steps and cosines, read from the probes every so many steps."""
    setup = parts.resolve(config).setup.place()
    watched = setups.make_source(setup.spec, setup.task, setup.source.division, watch=Probed)
    trainer, taken, read = train.Trainer(dataclasses.replace(setup, source=watched)), [], []
    state = trainer.init()
    for step in range(setup.spec.steps):
        state, _ = jax.block_until_ready(trainer.step(state, trainer.batch(step), step))
        if (step + 1) % every == 0:
            taken.append(step + 1)
            read.append(np.asarray(state.source.cosine_CxM[0]))
    of_stage_SxKxM = np.moveaxis(np.array(read), 1, 0).reshape(setup.workers.stages, len(taken), -1)
    found = {s: cosine_KxM[:, ~np.isnan(cosine_KxM).all(axis=0)] for s, cosine_KxM in enumerate(of_stage_SxKxM)}
    return dict(step=taken, cosines={s: cosine_KxM.tolist() for s, cosine_KxM in found.items() if cosine_KxM.size})


def main() -> None:
    jax.config.update("jax_num_cpu_devices", parts.read(FLAGS.config).devices)
    files.write_whole(FLAGS.out, json.dumps(record(FLAGS.config, FLAGS.every)))


if __name__ == "__main__":
    config_flags.DEFINE_config_file(
        "config", "configs/gpt_optimus.py:size=tiny", "Config file, with an optional shorthand after a colon."
    )
    flags.DEFINE(command.FILE, "out", "cosines.json", "JSON file of the cosines.")
    flags.DEFINE_integer("every", 5, "Steps between two readings.", lower_bound=1)
    script.run(main, errors=(train.TrainingError, OSError))
