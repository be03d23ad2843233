"""Measure the loss that GraVAC costs: a convolutional network and an LSTM, compared with the same runs without compression.

    python -m experiments.gravac --out=runs/gravac --pages=docs/results

A small ResNet on scikit-learn's digits (configs/digits.py) and an LSTM on text (configs/lm.py), four simulated workers, all-reduce with
AdamW at the config's rate. GraVAC climbs from no codec over bfloat16, int8 and int4 to five of a hundred values. Simulated workers have
no speed that could be measured, so it takes 1 ÷ bytes, which climbs as far as the gain allows; `experiments.bench.gravac` measures.
Runs that are finished are not made again.
"""

import itertools
import pathlib
from typing import Any

from absl import flags

from experiments import script, seeds, trials
from launch import command

FLAGS = flags.FLAGS

LAYOUT = "workers=4,simulate,method=allreduce"
MODELS = {
    "ResNet, digits": (f"configs/digits.py:{LAYOUT}", {"steps": 150}),
    "LSTM, text": (
        f"configs/lm.py:model=lstm,{LAYOUT}",
        {"steps": 400, "model.width": 64, "model.context": 64, "data.sample_bytes": 0},
    ),
}
REDUCERS = {
    "none": ("mean", {}),
    "GraVAC": ("gravac", {"reducer.window": 15, "reducer.ladder": "bfloat16; int8; int4; topk(fraction=0.05)"}),
}


def trial(out: pathlib.Path, model: str, reducer: str, seed: int) -> trials.Trial:
    """One run."""
    config, fields = MODELS[model]
    name, options = REDUCERS[reducer]
    steps = fields["steps"]
    own = {"seed": seed, "eval.every": steps, "eval.local": False, "checkpoint.every": steps} | fields | options
    return trials.trial(out, f"{model} {reducer} {seed}", f"{config},reducer={name}", own)


def tabulate(found: dict[tuple[str, str], list[dict[str, Any]] | None]) -> Any:
    """A row for each model and way of compressing."""
    table = script.table("model", "compression", "loss, nats", "bytes a step, MB", left=2)
    for (model, reducer), summaries in found.items():
        if summaries is None:
            table.add_row(model, reducer, "diverged", "")
            continue
        loss = seeds.spread([each["eval_loss"] for each in summaries])
        sent = seeds.spread([each["bytes_per_step_per_worker"] / 1e6 for each in summaries])
        table.add_row(model, reducer, loss.text(3), f"{sent.mean:.3f}")
    return table


def main() -> None:
    out = script.folder()
    script.check_tables("gravac")
    keys = list(itertools.product(MODELS, REDUCERS, range(FLAGS.seeds)))
    runs = [trial(out, *key) for key in keys]
    ended = dict(zip(keys, trials.Pool().make(runs), strict=True))
    found = {}
    for model, reducer in itertools.product(MODELS, REDUCERS):
        own = [(run, ended[key]) for key, run in zip(keys, runs, strict=True) if key[:2] == (model, reducer)]
        found[model, reducer] = [run.summary() for run, _ in own] if all(good for _, good in own) else None
    script.report("gravac", tabulate(found))


if __name__ == "__main__":
    flags.DEFINE(command.FOLDER, "out", None, "Run directories go here.", required=True)
    flags.DEFINE_integer("seeds", 3, "Runs of each kind.", lower_bound=1)
    flags.DEFINE(command.FOLDER, "pages", None, script.PAGES)
    script.run(main, (trials.Broken, OSError))
