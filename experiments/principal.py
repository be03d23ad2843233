"""Whether autoencoders between stages learn faster from principal directions than from random ones, and what narrow messages cost.

    python -m experiments.principal --out=runs/principal --pages=docs/results

A simulated pipeline of four stages (configs/lm.py, four layers of width 64) sends a quarter of its width over three boundaries. The
encoders start from random directions, or from the principal ones of the initial model's activations (pipeline.autoencoder_init).
Three seeds; two learning rates. Runs that are finished are not made again. Longer ones of two starts alone:

    python -m experiments.principal --out=runs/principal --steps=600 --rate=0.006 --start=random --start=principal
"""

import itertools
import pathlib
from typing import Any

from absl import flags

from experiments import script, seeds, trials
from launch import command

FLAGS = flags.FLAGS

LAYOUT = "workers=2,simulate,stages=4,microbatches=2,method=allreduce"
STARTS = {"random": "autoencoder=16", "principal": "autoencoder=16,autoencoder_init=pca", "no autoencoder": ""}
SHOWN = 4  # evaluations of a run


def trial(out: pathlib.Path, start: str, rate: float, seed: int) -> trials.Trial:
    """One run."""
    fields = {
        "seed": seed,
        "schedule.learning_rate": rate,
        "eval.every": FLAGS.steps // SHOWN,
        "eval.num_windows": 64,
        "eval.local": False,
        "checkpoint.every": FLAGS.steps,
        "data.sample_bytes": 0,
        "model.context": 64,
    }
    shorthand = ",".join(filter(None, (LAYOUT, f"steps={FLAGS.steps}", STARTS[start])))
    return trials.trial(out, f"{start} {rate} {seed}", f"configs/lm.py:{shorthand}", fields)


def tabulate(found: dict[Any, list[float]], steps: list[int]) -> Any:
    """A row for each start and rate, a column for each evaluation."""
    table = script.table("directions at the start", "rate", *(f"{step} steps" for step in steps))
    for start, rate in itertools.product(FLAGS.start, map(float, FLAGS.rate)):
        of_seeds = [found[start, rate, seed] for seed in range(FLAGS.seeds)]
        table.add_row(start, f"{rate:g}", *(seeds.spread(list(losses)).text(3) for losses in zip(*of_seeds, strict=True)))
    return table


def main() -> None:
    out = script.folder()
    script.check_tables("principal")
    for name, given in (("start", FLAGS.start), ("rate", FLAGS.rate)):
        if len(set(given)) < len(given):
            command.fail(f"--{name}={max(given, key=given.count)} is given twice; leave one out")
    keys: list[Any] = list(itertools.product(FLAGS.start, map(float, FLAGS.rate), range(FLAGS.seeds)))
    runs = [trial(out, *key) for key in keys]
    trials.Pool().make_all(runs)
    rows = {key: run.rows("eval") for key, run in zip(keys, runs, strict=True)}
    losses = {key: [row["loss"] for row in own] for key, own in rows.items()}
    script.report("principal", tabulate(losses, [row["step"] for row in rows[keys[0]]]))


if __name__ == "__main__":
    flags.DEFINE(command.FOLDER, "out", None, "Run directories go here.", required=True)
    flags.DEFINE_multi_enum("start", list(STARTS), list(STARTS), "Directions at the start.")
    script.selects("start")
    flags.DEFINE_multi_float("rate", [6e-3, 1.2e-2], "Peaks of the learning rate.", lower_bound=0.0)
    script.selects("rate")
    flags.DEFINE_integer("steps", 200, "Of a run.", lower_bound=SHOWN)
    flags.DEFINE_integer("seeds", 3, "Runs of each kind.", lower_bound=1)
    flags.DEFINE(command.FOLDER, "pages", None, script.PAGES)
    script.run(main, (trials.Broken, OSError))
