"""Waiting time of a pipeline: the time of a step compared with the bubble formula.

    python -m experiments.bench.bubble

Two stages on two forced CPU devices in one process, a core each. They alternate with two workers without communication that take the
same microbatches of the same model, also a core each, so that interference between cores affects both. A worker passes through all
layers, a stage through half of them, so that a pipeline without bubbles takes half of a worker's time, and one of GPipe or 1F1B, with
M microbatches and S stages,

    (M + S − 1) / M

times as long. Figures are medians over the rounds of the ratio within a round. For more stages than cores the second table has the
bubble of the schedule, its ticks ÷ 2M.
"""

import statistics

from absl import flags
import jax

from configs import lm
from decjax import schedules, train
from experiments import script
from experiments.bench.cluster import systems
from experiments.bench.timing import Stepper

_MICROBATCHES = flags.DEFINE_list("microbatches", ["2", "4", "8", "16"], "M, one row each.")
_SCHEDULE = flags.DEFINE_enum("schedule", "1f1b", ("gpipe", "1f1b"), "Schedule of the pipeline.")
_REMAT = flags.DEFINE_bool("remat", False, "Recompute forward passes in backward passes.")
_WIDTH = flags.DEFINE_enum("width", "192", ("192", "384"), "Width of the model, which has eight layers.")
_ROUNDS = flags.DEFINE_integer("rounds", 8, "Timed steps of each.", lower_bound=1)
STAGES = 2
HEADS = {192: 4, 384: 6}  # by width


def stepper(argument: str, M: int, **fields: object) -> Stepper:
    """Return a stepper with M microbatches of two sequences; `argument` is a further shorthand of configs/lm.py."""
    config = lm.get_config(f"method=local,microbatches={M},{argument}")
    width = int(_WIDTH.value)
    model = dict(width=width, hidden=4 * width, heads=HEADS[width], depth=8, context=128)
    config.update_from_flattened_dict({f"model.{name}": value for name, value in model.items()} | fields)
    return Stepper(config)


def ratios(M: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a worker's step, and the median ratio of a pipeline's step to half of it."""
    alone = stepper(f"workers={STAGES}", M)
    divided = stepper(f"workers=1,stages={STAGES},schedule={_SCHEDULE.value}", M, **{"pipeline.remat": _REMAT.value})
    for each in (alone, divided) * 2:
        each.step()
    times_s = [(alone.step(), divided.step()) for _ in range(rounds)]
    return statistics.median(s for s, _ in times_s), statistics.median(STAGES * t / s for s, t in times_s)


def counted(M: int = 16) -> script.Table:
    """Return the ticks of every schedule ÷ those in which a stage computes."""
    kinds: dict[str, tuple[schedules.Name, int]] = {
        "gpipe": ("gpipe", 1),
        "1f1b": ("1f1b", 1),
        "interleaved, 2 chunks": ("interleaved", 2),
    }
    title = f"ticks ÷ ticks of work, {M} microbatches"
    table = script.table("stages", *kinds, "(M + S − 1) / M", left=0, title=title)
    for S in (2, 4, 8):
        found = [schedules.make(name, S, M, C).num_ticks / (2 * M * C) for name, C in kinds.values()]
        table.add_row(str(S), *(f"{ratio:.3f}" for ratio in (*found, (M + S - 1) / M)))
    return table


def main() -> None:
    systems.use_one_thread()  # Each device uses one core.
    jax.config.update("jax_num_cpu_devices", STAGES)
    columns = ("microbatches", "a worker's step, ms", "pipeline ÷ half of it", "(M + S − 1) / M", "difference")
    table = script.table(*columns, left=0)
    for M in map(int, _MICROBATCHES.value):
        worker_s, ratio = ratios(M, _ROUNDS.value)
        formula = (M + STAGES - 1) / M
        table.add_row(str(M), script.ms(worker_s), f"{ratio:.3f}", f"{formula:.3f}", script.difference(ratio, formula))
    script.show(table, counted())


if __name__ == "__main__":
    script.run(main, errors=(train.TrainingError, ValueError))
