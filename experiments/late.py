"""What late gradients cost: loss of pipelines whose stages do not wait for each other, by delay and averaging interval.

    python -m experiments.late --out=runs/late --pages=docs

Two pipelines of four stages on eight forced CPU devices (configs/lm.py, four layers) train on the same text, as Ravnest does
(arXiv 2401.01728): stage s applies gradients δ(3 − s) steps late, and the parameters are averaged every R steps. With δ = 0 stages wait
for each other. All runs have the same learning rate. Finished runs are not repeated.
"""

import itertools

from absl import flags

from experiments import script, seeds, sweep

FLAGS = flags.FLAGS
DELAYS, ROUNDS = (0, 1, 2, 4), (1, 10, 50)


def config(delay: int, every: int, _: int) -> tuple[str, dict[str, object]]:
    """Return the config and the fields of a delay δ and an averaging interval R."""
    method = f"method=diloco(every={every},outer_learning_rate=1.0,outer_momentum=0.0)"
    shorthand = f"workers=2,stages=4,microbatches=2,{method},steps={FLAGS.steps}" + (f",delay={delay}" if delay else "")
    return f"configs/lm.py:{shorthand}", {
        "eval.every": FLAGS.steps,
        "eval.local": False,
        "checkpoint.every": FLAGS.steps,
        "data.sample_bytes": 0,
        "schedule.learning_rate": FLAGS.learning_rate,
    }


def main() -> None:
    runs = sweep.train("late", itertools.product(DELAYS, ROUNDS), config, may_diverge=True)
    table = script.table("first stage late by", *(f"R = {every}" for every in ROUNDS))
    for delay in DELAYS:
        table.add_row(f"{3 * delay} steps", *(seeds.text(runs[delay, every], "eval_loss", 3) for every in ROUNDS))
    script.report("late", table)


if __name__ == "__main__":
    sweep.define()
    flags.DEFINE_integer("steps", 600, "Steps of a run.", lower_bound=max(ROUNDS))
    flags.DEFINE_float("learning_rate", 6e-3, "Peak learning rate.", lower_bound=0.0)
    script.run(main, sweep.ERRORS)
