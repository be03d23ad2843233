"""The whole training step of GPT-2.5B or 8.3B, compiled for 128 devices that are not there: bytes to others, and memory.

    python -m experiments.bench.optimus_step                          # GPT-2.5B, 4 workers × 4 stages × 8
    python -m experiments.bench.optimus_step --arg=size=8.3b,fused=false
    python -m experiments.bench.optimus_step --devices=8 --arg=size=tiny

The devices are forced ones of the CPU backend, so nothing is computed, and no array of the model is ever made; the program is the
one that they would run. Bytes are read from it, per device of each stage and step (those of the CPU backend, which widens 16-bit
sums to 32); those within tensor-parallel groups are not counted, see `program.hlo`. Memory is the compiler's own account for one device.
"""

import time

from absl import flags
import jax
import numpy as np

from configs import gpt_optimus
from decjax import config as parts
from decjax import train
from decjax.program import hlo
from decjax.train import engine
from experiments import script

FLAGS = flags.FLAGS


def lowered(argument: str):
    """(trainer, lowered program of the last step) of a shorthand of configs/gpt_optimus.py."""
    trainer = train.Trainer(parts.resolve(gpt_optimus.get_config(argument)))
    spec, workers = trainer.spec, trainer.workers
    tokens = trainer.setup.task.examples(spec.batch_per_worker)
    batch = jax.ShapeDtypeStruct((workers.num_workers, workers.stages, *tokens.shape), tokens.dtype, sharding=workers.stacked)
    step = engine.whole_step(trainer.step_parts, trainer.method.phase(spec.steps - 1))
    return trainer, step.lower(trainer.abstract, batch, np.int32(0))


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", FLAGS.devices)
    begun = time.monotonic()
    trainer, program = lowered(FLAGS.arg)
    between = time.monotonic()
    executable = program.compile()
    sent = hlo.bytes_by_stage(hlo.text(executable), trainer.workers.sizes)
    columns = ("stage", *(f"to another {axis}" for axis in sent))
    rows = script.table(*columns, left=0, title="MB that a device sends in a step", title_justify="left")
    for stage in range(trainer.workers.stages):
        rows.add_row(str(stage), *(f"{sent_NxS[0, stage] / trainer.workers.tensor / 1e6:.3f}" for sent_NxS in sent.values()))
    memory = executable.memory_analysis()
    script.show(
        rows,
        f"{parts.size(trainer.spec.document).params / 1e9:.3f}e9 parameters; a device holds {memory.argument_size_in_bytes / 1e9:.2f} GB "
        f"of state and needs {memory.temp_size_in_bytes / 1e9:.2f} GB beside it; lowered in {between - begun:.0f} s, "
        f"compiled in {time.monotonic() - between:.0f} s",
    )


if __name__ == "__main__":
    flags.DEFINE_string("arg", "size=2.5b", "Argument of configs/gpt_optimus.py.")
    flags.DEFINE_integer("devices", 128, "How many the layout has.")
    script.run(main, errors=(ValueError,))
