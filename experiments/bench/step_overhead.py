"""Overhead of communication: a step of the byte-level LM with gossip and with all-reduce, compared with one without.

    python -m experiments.bench.step_overhead

Eight workers on eight forced CPU devices in one process. The three kinds of step take turns, each on a state of its own, so that other
load on the machine affects all of them; every row is the median over the rounds of the ratio to the round's step without communication.
Phases of the one-peer exponential graph alternate as in training.
"""

import statistics

from absl import flags
import jax

from configs import lm
from decjax import config as parts
from decjax import train
from experiments import script
from experiments.bench.timing import Stepper, take_turns
from experiments.methods import ALONE, ONE_PEER, SHORTHANDS, SYNC

_CONFIG = flags.DEFINE_string("config_argument", "", "Shorthand of configs/lm.py for all three, as workers=4.")
_BATCH_SIZES = flags.DEFINE_list("batch_sizes", ["2", "4", "8"], "Sequences per worker and step.")
_ROUNDS = flags.DEFINE_integer("rounds", 24, "Timed steps of each kind.")
METHODS = (ALONE, ONE_PEER, SYNC)


def stepper(argument: str, batch_size: int) -> Stepper:
    """Return the stepper of a method on the model of configs/lm.py."""
    config = lm.get_config(",".join(filter(None, (_CONFIG.value, argument))))
    config.batch_size = batch_size * (config.workers or parts.SIMULATED_WORKERS)
    return Stepper(config)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", parts.SIMULATED_WORKERS)
    title = "time of a step, ratio to the step without communication"
    table = script.table("sequences per worker", "no communication, ms", *METHODS[1:], left=0, title=title)
    for batch_size in map(int, _BATCH_SIZES.value):
        steppers = {name: stepper(SHORTHANDS[name], batch_size).step for name in METHODS}
        local, *others = take_turns(steppers, _ROUNDS.value, warm_up=4).values()  # The warm-up visits each phase once.
        ratios = [statistics.median(t / base for t, base in zip(other, local)) for other in others]
        table.add_row(str(batch_size), script.ms(statistics.median(local)), *(f"{ratio:.3f}" for ratio in ratios))
    script.show(table)


if __name__ == "__main__":
    script.run(main, errors=(train.TrainingError,))
