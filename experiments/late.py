"""What late gradients cost: loss of pipelines whose stages do not wait for each other, by how late they are and how rarely they average.

    python -m experiments.late --out=runs/late --pages=docs/results

Two pipelines of four stages on eight forced CPU devices (configs/lm.py, four layers) train on the same text, as Ravnest does
(arXiv 2401.01728): stage s applies gradients δ(3 − s) steps late, and the parameters are averaged every R steps. δ = 0 waits, as usual.
The rate is that of the config for all of them; three seeds. Runs that are finished are not made again.
"""

import itertools
import pathlib
from typing import Any

from absl import flags

from experiments import script, seeds, trials
from launch import command

FLAGS = flags.FLAGS

LAYOUT = "workers=2,stages=4,microbatches=2"
DELAYS, ROUNDS = (0, 1, 2, 4), (1, 10, 50)


def trial(out: pathlib.Path, delay: int, every: int, seed: int) -> trials.Trial:
    """One run."""
    method = f"method=diloco(every={every},outer_learning_rate=1.0,outer_momentum=0.0)"
    fields = {
        "seed": seed,
        "eval.every": FLAGS.steps,
        "eval.local": False,
        "checkpoint.every": FLAGS.steps,
        "data.sample_bytes": 0,
        "schedule.learning_rate": FLAGS.learning_rate,
    }
    shorthand = f"{LAYOUT},{method},steps={FLAGS.steps}" + (f",delay={delay}" if delay else "")
    return trials.trial(out, f"{delay} {every} {seed}", f"configs/lm.py:{shorthand}", fields)


def tabulate(found: dict[tuple[int, int], seeds.Spread | None]) -> Any:
    """A row for each delay, a column for each number of steps between averages."""
    table = script.table("first stage late by", *(f"R = {every}" for every in ROUNDS))
    for delay in DELAYS:
        cells = (found[delay, every] for every in ROUNDS)
        table.add_row(f"{3 * delay} steps", *(each.text(3) if each else "diverged" for each in cells))
    return table


def main() -> None:
    out = script.folder()
    script.check_tables("late")
    keys = list(itertools.product(DELAYS, ROUNDS, range(FLAGS.seeds)))
    runs = [trial(out, *key) for key in keys]
    ended = dict(zip(keys, trials.Pool().make(runs), strict=True))
    losses = {key: run.summary()["eval_loss"] for key, run in zip(keys, runs, strict=True) if ended[key]}
    found = {}
    for delay, every in itertools.product(DELAYS, ROUNDS):
        own = [loss for (d, R, _), loss in losses.items() if (d, R) == (delay, every)]
        found[delay, every] = seeds.spread(own) if len(own) == FLAGS.seeds else None
    script.report("late", tabulate(found))


if __name__ == "__main__":
    flags.DEFINE(command.FOLDER, "out", None, "Run directories go here.", required=True)
    flags.DEFINE_integer("steps", 600, "Of a run.", lower_bound=max(ROUNDS))
    flags.DEFINE_integer("seeds", 3, "Runs of each kind.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 6e-3, "Peak, for all.", lower_bound=0.0)
    flags.DEFINE(command.FOLDER, "pages", None, script.PAGES)
    script.run(main, (trials.Broken, OSError))
