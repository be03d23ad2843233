"""What low rank costs a model of clicks: by principal directions of what layers put out, and by singular values of their weights.

    python -m experiments.low_rank_clicks --out=runs/low_rank_clicks --pages=docs/results

A DLRM (configs/clicks.py, vectors of 16, hidden layers of 64) is trained with three seeds. `launch.compress` then compresses all its
layers and tables at equal ranks in both ways, as Yu et al. do (arXiv 2405.18146), without retraining it. Runs that are
finished are not made again.
"""

import json
import pathlib
import subprocess
from typing import Any

from absl import flags

from experiments import script, seeds, trials
from launch import command, processes

FLAGS = flags.FLAGS

FRACTIONS = (0.125, 0.25, 0.5, 0.75)
WAYS = {
    "weights": "low_rank(fraction=F)",
    "outputs, no mean": "principal(fraction=F,centred=false)",
    "outputs": "principal(fraction=F)",
}
AS_TRAINED = "as trained"


def trial(out: pathlib.Path, seed: int) -> trials.Trial:
    """One run."""
    fields = {"seed": seed, "eval.every": FLAGS.steps, "checkpoint.every": FLAGS.steps, "model.width": 16, "model.hidden": 64}
    return trials.trial(out, f"clicks {seed}", f"configs/clicks.py:simulate,steps={FLAGS.steps}", fields)


def form(way: str, fraction: float) -> str:
    """A form at a fraction of the rank."""
    return way.replace("F", str(fraction))


def compressed(run: trials.Trial) -> dict[str, dict[str, float]]:
    """Bytes and metrics of a run's model by form."""
    file = run.workdir / "compressed.json"
    forms = ";".join(form(way, fraction) for fraction in FRACTIONS for way in WAYS.values())
    line = processes.python("launch.compress", [f"--workdir={run.workdir}", f"--forms={forms}", f"--out={file}"])
    if subprocess.run(line, stdout=subprocess.DEVNULL, check=False).returncode:
        raise trials.Broken(f"{' '.join(line)} failed")
    return json.loads(file.read_text())["forms"]


def tabulate(found: list[dict[str, dict[str, float]]]) -> Any:
    """A row for each fraction: bytes that are left, and log-loss minus that of the model as trained."""
    table = script.table(
        "fraction of the rank", "bytes, weights", "bytes, outputs", *(f"log-loss, {name}" for name in WAYS), "outputs better in"
    )
    for fraction in FRACTIONS:
        losses, kept = {}, {}
        for name, way in WAYS.items():
            own = [(forms[form(way, fraction)], forms[AS_TRAINED]) for forms in found]
            losses[name] = [made["loss"] - whole["loss"] for made, whole in own]
            kept[name] = f"{100 * own[0][0]['bytes'] / own[0][1]['bytes']:.1f} %"
        better = sum(a < b for a, b in zip(losses["outputs"], losses["weights"], strict=True))
        cells = (f"+{seeds.spread(each).text(4)}" for each in losses.values())
        table.add_row(f"{fraction:g}", kept["weights"], kept["outputs"], *cells, f"{better} of {len(found)}")
    return table


def main() -> None:
    out = script.folder()
    script.check_tables("low_rank_clicks")
    runs = [trial(out, seed) for seed in range(FLAGS.seeds)]
    trials.Pool().make_all(runs)
    found = list(map(compressed, runs))
    script.show(f"log-loss as trained: {seeds.spread([forms[AS_TRAINED]['loss'] for forms in found]).text(4)} nats")
    script.report("low_rank_clicks", tabulate(found))


if __name__ == "__main__":
    flags.DEFINE(command.FOLDER, "out", None, "Run directories go here.", required=True)
    flags.DEFINE_integer("steps", 1000, "Of a run.", lower_bound=20)
    flags.DEFINE_integer("seeds", 3, "Runs.", lower_bound=1)
    flags.DEFINE(command.FOLDER, "pages", None, script.PAGES)
    script.run(main, (trials.Broken, OSError))
