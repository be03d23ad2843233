"""What low rank costs a click model: by principal directions of the layers' outputs, and by singular values of their weights.

    python -m experiments.low_rank_clicks --out=runs/low_rank_clicks --pages=docs

A DLRM (configs/clicks.py, vectors of 16, hidden layers of 64) is trained with several seeds. `launch.compress` then compresses all its
layers and tables at equal ranks in both ways, as Yu et al. do (arXiv 2405.18146), without retraining it. Finished runs are not repeated.
"""

import json
import subprocess

from absl import flags

from experiments import script, seeds, sweep, trials
from launch import processes

FLAGS = flags.FLAGS
FRACTIONS = (0.125, 0.25, 0.5, 0.75)
WAYS = {
    "weights": "low_rank(fraction=F)",
    "outputs, no mean": "principal(fraction=F,centred=false)",
    "outputs": "principal(fraction=F)",
}
AS_TRAINED = "as trained"
Forms = dict[str, dict[str, float]]  # bytes and metrics of a model, by form


def config(task: str, _: int) -> tuple[str, dict[str, object]]:
    """Return the config and the fields of all runs."""
    fields = {"eval.every": FLAGS.steps, "checkpoint.every": FLAGS.steps, "model.width": 16, "model.hidden": 64}
    return f"configs/{task}.py:simulate,steps={FLAGS.steps}", fields


def form(way: str, fraction: float) -> str:
    """Return a form at a fraction of the rank."""
    return WAYS[way].replace("F", str(fraction))


def compressed(run: trials.Trial) -> Forms:
    """Compress a run's model to every form."""
    file = run.workdir / "compressed.json"
    forms = ";".join(form(way, fraction) for fraction in FRACTIONS for way in WAYS)
    line = processes.python("launch.compress", [f"--workdir={run.workdir}", f"--forms={forms}", f"--out={file}"])
    if subprocess.run(line, stdout=subprocess.DEVNULL, check=False).returncode:
        raise trials.Broken(f"{' '.join(line)} failed")
    return json.loads(file.read_text())["forms"]


def tabulate(models: list[Forms]) -> script.Table:
    """Return a row for each fraction: relative bytes, and log-loss minus that of the model as trained."""
    table = script.table(
        "fraction of the rank", "bytes, weights", "bytes, outputs", *(f"log-loss, {way}" for way in WAYS), "outputs better in"
    )
    for fraction in FRACTIONS:
        losses = {way: [forms[form(way, fraction)]["loss"] - forms[AS_TRAINED]["loss"] for forms in models] for way in WAYS}
        sizes = (models[0][form(way, fraction)]["bytes"] / models[0][AS_TRAINED]["bytes"] for way in ("weights", "outputs"))
        better = sum(a < b for a, b in zip(losses["outputs"], losses["weights"], strict=True))
        cells = (f"+{seeds.spread(increases).text(4)}" for increases in losses.values())
        table.add_row(f"{fraction:g}", *(f"{100 * size:.1f} %" for size in sizes), *cells, f"{better} of {len(models)}")
    return table


def main() -> None:
    (runs,) = sweep.train("low_rank_clicks", [("clicks",)], config).values()
    models = list(map(compressed, runs))
    script.show(f"log-loss as trained: {seeds.spread([forms[AS_TRAINED]['loss'] for forms in models]).text(4)} nats")
    script.report("low_rank_clicks", tabulate(models))


if __name__ == "__main__":
    sweep.define()
    flags.DEFINE_integer("steps", 1000, "Steps of a run.", lower_bound=20)
    script.run(main, sweep.ERRORS)
