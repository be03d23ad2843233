"""How to divide the nodes of a graph: accuracy and loss of the averaged model, by partition, with even and with uneven steps.

    python -m experiments.partitions --out=runs/partitions --pages=docs

Four workers learn to classify the nodes of a graph of four communities (configs/nodes.py), each from its local nodes and the edges between
them (arXiv 2305.09887), and are evaluated on the whole graph. Each seed has a graph of its own. All runs have the learning rate of the
config. Finished runs are not repeated.
"""

import statistics

from absl import flags

from experiments import oracles, script, seeds, sweep

FLAGS = flags.FLAGS
WHOLE = "all nodes on one worker"
PARTITIONS = {"random": "random", "random clusters": "super", "few edges cut": "min_cut"}
PACES = {"H steps each": "even", "H/2 to H steps": "spread(slowest=0.5)"}
SETTINGS = [(WHOLE, "even"), *((kind, pace) for kind in PARTITIONS for pace in PACES.values())]


def config(kind: str, pace: str, seed: int) -> tuple[str, dict[str, object]]:
    """Return the config and the fields of a partition and a pace."""
    layout = "workers=1,method=local" if kind == WHOLE else f"workers=4,partition={PARTITIONS[kind]},method=tma(pace='{pace}')"
    return f"configs/nodes.py:{layout},simulate,steps={FLAGS.steps}", {"eval.local": False, "data.graph": f"blocks(seed={seed})"}


def main() -> None:
    runs = sweep.train("partitions", SETTINGS, config)
    measured = [f"{what}, {pace}" for pace in PACES for what in ("accuracy, %", "nats")]
    table = script.table("nodes", "edges kept, %", "discrepancy", *measured)
    for kind in (WHOLE, *PARTITIONS):
        kept = 100 * statistics.mean(run.summary()["kept_edges"] for run in runs[kind, "even"])
        apart = [oracles.discrepancy(PARTITIONS[kind], seed) for seed in range(FLAGS.seeds)] if kind != WHOLE else [0.0]
        cells = []
        for of_seeds in (runs[setting] for setting in SETTINGS if setting[0] == kind):
            cells += [seeds.text(of_seeds, "eval_accuracy", 1, scale=100), seeds.text(of_seeds, "eval_loss", 3)]
        table.add_row(kind, f"{kept:.0f}", f"{statistics.mean(apart):.2g}", *cells, *[""] * (len(measured) - len(cells)))
    script.report("partitions", table)


if __name__ == "__main__":
    sweep.define(seeds=5)
    flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=10)  # A round of the config.
    script.run(main, sweep.ERRORS)
