"""What the exchange costs: a step of the main job with gossip and with all-reduce, against one that sends nothing.

    python -m experiments.bench.step_overhead

Eight workers on eight forced CPU devices in one process. The three kinds of step take turns, each on a state of its own, so
that whatever else the machine does falls on all of them alike; every row is the median over the rounds of the ratio to the
round's step without communication. Phases of the one-peer exponential graph alternate as in training.
"""

import statistics

from absl import flags
import jax
import rich.box
import rich.console
import rich.table

from configs import lm
from decjax import config as parts
from decjax import train
from experiments.bench.stepper import Stepper
from launch import command

_CONFIG = flags.DEFINE_string("config_argument", "", "Shorthand of configs/lm.py for all three, as workers=4.")
_BATCH_SIZES = flags.DEFINE_list("batch_sizes", ["2", "4", "8"], "Sequences per worker and step.")
_ROUNDS = flags.DEFINE_integer("rounds", 24, "Timed steps of each kind.")
METHODS = {
    "no communication": "method=local",
    "one-peer exponential": "topology=one_peer_exponential",
    "all-reduce": "method=allreduce",
}


def stepper(argument: str, batch_size: int) -> Stepper:
    """One method on the main job's model."""
    config = lm.get_config(",".join(filter(None, (_CONFIG.value, argument))))
    config.batch_size = batch_size * (config.workers or parts.SIMULATED_WORKERS)
    return Stepper(config)


def measure(batch_size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round for every method; the warm-up visits each phase once."""
    steppers = {name: stepper(argument, batch_size) for name, argument in METHODS.items()}
    for each in steppers.values():
        for _ in range(4):
            each.step()
    times = {name: [] for name in METHODS}
    for k in range(rounds):
        names = list(METHODS)
        for name in names[k % 3 :] + names[: k % 3]:  # Nobody always goes first.
            times[name].append(steppers[name].step())
    return times


def main(argv: list[str]) -> None:
    del argv
    jax.config.update("jax_num_cpu_devices", parts.SIMULATED_WORKERS)
    table = rich.table.Table(box=rich.box.MARKDOWN, title="time of a step, ratio to the step without communication")
    for column in ("sequences per worker", "no communication, ms", *list(METHODS)[1:]):
        table.add_column(column, justify="right")
    for batch_size in map(int, _BATCH_SIZES.value):
        times = measure(batch_size, _ROUNDS.value)
        local, *others = times.values()
        ratios = [statistics.median(t / base for t, base in zip(other, local)) for other in others]
        table.add_row(str(batch_size), f"{statistics.median(local) * 1e3:.0f}", *(f"{ratio:.3f}" for ratio in ratios))
    rich.console.Console(width=120).print(table)


if __name__ == "__main__":
    command.run(main, errors=(train.TrainingError,))
