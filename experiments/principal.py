"""Whether autoencoders between stages learn faster from principal directions than from random ones, and what narrow messages cost.

    python -m experiments.principal --out=runs/principal --pages=docs

A simulated pipeline of four stages (configs/lm.py, four layers of width 64) sends a quarter of its width over three boundaries. The
encoders start from random directions, or from the principal ones of the initial model's activations (pipeline.autoencoder_init).
Finished runs are not repeated. Longer runs of two starts alone:

    python -m experiments.principal --out=runs/principal --steps=600 --rate=0.006 --start=random --start=principal
"""

from absl import flags

from experiments import script, seeds, sweep
from launch import command

FLAGS = flags.FLAGS
LAYOUT = "workers=2,simulate,stages=4,microbatches=2,method=allreduce"
STARTS = {"random": ",autoencoder=16", "principal": ",autoencoder=16,autoencoder_init=pca", "no autoencoder": ""}
EVALUATIONS = 4  # of a run


def config(start: str, rate: float, _: int) -> tuple[str, dict[str, object]]:
    """Return the config and the fields of a start and a learning rate."""
    return f"configs/lm.py:{LAYOUT},steps={FLAGS.steps}{STARTS[start]}", {
        "schedule.learning_rate": rate,
        "eval.every": FLAGS.steps // EVALUATIONS,
        "eval.num_windows": 64,
        "eval.local": False,
        "checkpoint.every": FLAGS.steps,
        "data.sample_bytes": 0,
        "model.context": 64,
    }


def main() -> None:
    for name, values in (("start", FLAGS.start), ("rate", FLAGS.rate)):
        if len(set(values)) < len(values):
            command.fail(f"--{name}={max(values, key=values.count)} is given twice; leave one out")
    settings = [(start, float(rate)) for start in FLAGS.start for rate in FLAGS.rate]
    runs = sweep.train("principal", settings, config)
    rows = {setting: [run.rows("eval") for run in of_seeds] for setting, of_seeds in runs.items()}
    steps = [row["step"] for row in next(iter(rows.values()))[0]]
    table = script.table("initial directions", "rate", *(f"{step} steps" for step in steps))
    for (start, rate), of_seeds in rows.items():
        losses = [seeds.spread([row["loss"] for row in evaluation]) for evaluation in zip(*of_seeds, strict=True)]
        table.add_row(start, f"{rate:g}", *(spread.text(3) for spread in losses))
    script.report("principal", table)


if __name__ == "__main__":
    sweep.define()
    flags.DEFINE_multi_enum("start", list(STARTS), list(STARTS), "Directions at the start.")
    script.selects("start")
    flags.DEFINE_multi_float("rate", [6e-3, 1.2e-2], "Peaks of the learning rate.", lower_bound=0.0)
    script.selects("rate")
    flags.DEFINE_integer("steps", 200, "Steps of a run.", lower_bound=EVALUATIONS)
    script.run(main, sweep.ERRORS)
