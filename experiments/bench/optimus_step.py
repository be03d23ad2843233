"""The training step of GPT-2.5B or 8.3B, compiled for 128 simulated devices: bytes that a device sends, and memory.

    python -m experiments.bench.optimus_step                          # GPT-2.5B, 4 workers × 4 stages × 8
    python -m experiments.bench.optimus_step --arg=size=8.3b,fused=false
    python -m experiments.bench.optimus_step --devices=8 --arg=size=tiny

The program is compiled for forced devices of the CPU backend; nothing is computed, and no array of the model is created. Bytes are read
from the program, per device of each stage and step (the CPU backend widens 16-bit sums to 32); those within tensor-parallel groups are
not counted, see `program.hlo`. Memory is the compiler's estimate for one device.
"""

import time
from typing import cast

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


def lowered(argument: str) -> tuple[train.Trainer, jax.stages.Lowered]:
    """Return (trainer, lowered program of the last step) of a shorthand of configs/gpt_optimus.py."""
    trainer = train.Trainer(parts.resolve(gpt_optimus.get_config(argument)))
    spec, workers = trainer.spec, trainer.workers
    tokens = trainer.setup.task.examples(spec.batch_per_worker)
    batch = jax.ShapeDtypeStruct((workers.num_workers, workers.stages, *tokens.shape), tokens.dtype, sharding=workers.stacked)
    step = cast(jax.stages.Wrapped, engine.whole_step(trainer.step_parts, trainer.method.phase(spec.steps - 1)))
    return trainer, step.lower(trainer.abstract, batch, np.int32(0))


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", FLAGS.devices)
    start_s = time.monotonic()
    trainer, program = lowered(FLAGS.arg)
    lowered_s = time.monotonic()
    executable = program.compile()
    memory = executable.memory_analysis()
    assert memory is not None
    sent = hlo.bytes_by_stage(hlo.text(executable), trainer.workers.sizes)
    columns = ("stage", *(f"to another {axis}" for axis in sent))
    rows = script.table(*columns, left=0, title="MB that a device sends in a step")
    for stage in range(trainer.workers.stages):
        rows.add_row(str(stage), *(f"{sent_NxS[0, stage] / trainer.workers.tensor / 1e6:.3f}" for sent_NxS in sent.values()))
    script.show(
        rows,
        f"{parts.size(trainer.spec.document).params / 1e9:.3f}e9 parameters; a device holds {memory.argument_size_in_bytes / 1e9:.2f} GB "
        f"of state and needs {memory.temp_size_in_bytes / 1e9:.2f} GB in addition; lowered in {lowered_s - start_s:.0f} s, "
        f"compiled in {time.monotonic() - lowered_s:.0f} s",
    )


if __name__ == "__main__":
    flags.DEFINE_string("arg", "size=2.5b", "Argument of configs/gpt_optimus.py.")
    flags.DEFINE_integer("devices", 128, "Number of devices of the layout.")
    script.run(main, errors=(ValueError,))
