"""Measure the loss that GraVAC costs: a convolutional network and an LSTM, compared with the same runs without compression.

    python -m experiments.gravac --out=runs/gravac --pages=docs

A small ResNet on scikit-learn's digits (configs/digits.py) and an LSTM on text (configs/lm.py), four simulated workers, all-reduce with
AdamW at the config's rate. GraVAC climbs from no codec over bfloat16, int8 and int4 to five of a hundred values. Simulated workers have
no speed that could be measured, so it takes 1 ÷ bytes, which climbs as far as the gain allows; `experiments.bench.gravac` measures.
Finished runs are not repeated.
"""

import itertools

from experiments import script, seeds, sweep

LAYOUT = "workers=4,simulate,method=allreduce"
MODELS = {
    "ResNet, digits": (f"configs/digits.py:{LAYOUT}", 150, {}),
    "LSTM, text": (f"configs/lm.py:model=lstm,{LAYOUT}", 400, {"model.width": 64, "model.context": 64, "data.sample_bytes": 0}),
}
REDUCERS = {
    "none": ("mean", {}),
    "GraVAC": ("gravac", {"reducer.window": 15, "reducer.ladder": "bfloat16; int8; int4; topk(fraction=0.05)"}),
}


def config(model: str, reducer: str, _: int) -> tuple[str, dict[str, object]]:
    """Return the config and the fields of a model and a reducer."""
    file, steps, fields = MODELS[model]
    name, options = REDUCERS[reducer]
    common = {"eval.every": steps, "eval.local": False, "checkpoint.every": steps, "steps": steps}
    return f"{file},reducer={name}", common | fields | options


def main() -> None:
    runs = sweep.train("gravac", itertools.product(MODELS, REDUCERS), config, may_diverge=True)
    table = script.table("model", "compression", "loss, nats", "MB per step", left=2)
    for (model, reducer), of_seeds in runs.items():
        sent = [run.summary()["bytes_per_step_per_worker"] / 1e6 for run in of_seeds]
        table.add_row(model, reducer, seeds.text(of_seeds, "eval_loss", 3), f"{seeds.spread(sent).mean:.3f}" if sent else "")
    script.report("gravac", table)


if __name__ == "__main__":
    sweep.define()
    script.run(main, sweep.ERRORS)
