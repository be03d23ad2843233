"""How the nodes of a graph should be divided: accuracy and loss of the averaged model, by partition, with even and with uneven steps.

    python -m experiments.partitions --out=runs/partitions --pages=docs/results

Four workers learn to classify the nodes of a graph of four communities (configs/nodes.py), each from its own nodes and the edges between
them (arXiv 2305.09887), and are judged on the whole graph. Each seed has a graph of its own. The rate is that of the config for all of
them. Runs that are finished are not made again.
"""

import itertools
import pathlib
import statistics
from typing import Any

from absl import flags

from experiments import oracles, script, seeds, trials
from launch import command

FLAGS = flags.FLAGS

WHOLE = "all nodes on one worker"
PARTITIONS = {"random": "random", "random clusters": "super", "few edges cut": "min_cut"}
PACES = {"H steps each": "even", "H/2 to H steps": "spread(slowest=0.5)"}


def trial(out: pathlib.Path, kind: str, pace: str, seed: int) -> trials.Trial:
    """One run."""
    layout = "workers=1,method=local" if kind == WHOLE else f"workers=4,partition={PARTITIONS[kind]},method=tma(pace='{pace}')"
    fields = {"seed": seed, "data.graph": f"blocks(seed={seed})", "eval.local": False}
    return trials.trial(out, f"{kind} {pace} {seed}", f"configs/nodes.py:{layout},simulate,steps={FLAGS.steps}", fields)


def tabulate(found: dict[tuple[str, str], list[dict[str, Any]]]) -> Any:
    """A row for each partition."""
    measured = [f"{what}, {pace}" for pace in PACES for what in ("accuracy, %", "nats")]
    table = script.table("nodes", "edges kept, %", "discrepancy", *measured)
    for kind in (WHOLE, *PARTITIONS):
        runs = {pace: found[kind, pace] for pace in paces(kind)}
        kept = 100 * statistics.mean(run["kept_edges"] for run in runs["even"])
        apart = [oracles.discrepancy(PARTITIONS[kind], seed) for seed in range(FLAGS.seeds)] if kind != WHOLE else [0.0]
        cells = []
        for each in runs.values():
            cells += [seeds.spread([100 * run["eval_accuracy"] for run in each]).text(1)]
            cells += [seeds.spread([run["eval_loss"] for run in each]).text(3)]
        table.add_row(kind, f"{kept:.0f}", f"{statistics.mean(apart):.2g}", *cells, *[""] * (len(measured) - len(cells)))
    return table


def paces(kind: str) -> tuple[str, ...]:
    """What a partition is trained with."""
    return ("even",) if kind == WHOLE else tuple(PACES.values())


def main() -> None:
    out = script.folder()
    script.check_tables("partitions")
    kinds = [(kind, pace) for kind in (WHOLE, *PARTITIONS) for pace in paces(kind)]
    runs = {pair: [trial(out, *pair, seed) for seed in range(FLAGS.seeds)] for pair in kinds}
    trials.Pool().make_all(itertools.chain(*runs.values()))
    script.report("partitions", tabulate({pair: [run.summary() for run in each] for pair, each in runs.items()}))


if __name__ == "__main__":
    flags.DEFINE(command.FOLDER, "out", None, "Run directories go here.", required=True)
    flags.DEFINE_integer("steps", 300, "Of a run.", lower_bound=10)  # A round of the config.
    flags.DEFINE_integer("seeds", 5, "Runs of each kind, on a graph each.", lower_bound=1)
    flags.DEFINE(command.FOLDER, "pages", None, script.PAGES)
    script.run(main, (trials.Broken, OSError))
