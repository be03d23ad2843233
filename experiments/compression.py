"""What compression costs in loss: all-reduce, exact gossip and their compressed forms, on the byte-level language model.

    python -m experiments.compression --workdir=runs/compression --markdown

One run of configs/lm.py for each row: 8 workers, equal steps, equal data, the learning rate of the uncompressed method. Runs
that have finished are not repeated. Bytes are those of the compiled program's messages, means over workers and steps. Loss is
that of the averaged model on all of the validation text, and compared with the uncompressed method that mixes in the same
order.

CHOCO by itself takes a cautious step, half of what its codec keeps of noise. Here, where the period of the graph averages
exactly, signs bear the whole step (γ = 1); values of top-k do not.
"""

import pathlib
from typing import NamedTuple

from absl import flags
import rich.table

from experiments import rows as rows_lib
from experiments import script, trials
from experiments.rows import Row
from experiments.script import Check

FLAGS = flags.FLAGS

GOSSIP, ATC, REDUCE = "exact gossip", "exact gossip, atc", "all-reduce"


def gossip(name: str, shorthand: str = "", *fields: str) -> Row:
    """A row of gossip over the one-peer exponential graph."""
    return Row(name, shorthand, fields, ATC if "order=atc" in shorthand else GOSSIP)


def reduce(name: str, shorthand: str, *fields: str) -> Row:
    """A row of a method that averages over all workers."""
    return Row(name, shorthand, fields, REDUCE)


ROWS = (
    reduce(REDUCE, "method=allreduce"),
    reduce("PowerSGD, rank 4", "method=allreduce,reducer=powersgd,rank=4"),
    reduce("PowerSGD, rank 1", "method=allreduce,reducer=powersgd,rank=1"),
    reduce("DeMo", "method=allreduce,reducer=demo"),
    reduce("SparseLoCo", "method=sparseloco"),
    reduce(
        "DiLoCo, every 4 steps, sign",
        "method=diloco,every=4,reducer=codec,codec=scaled_sign",
        "method.outer_learning_rate=1.0",
        "method.outer_momentum=0.0",
    ),
    gossip(GOSSIP),
    gossip("int8", "codec=int8"),
    gossip("int4", "codec=int4"),
    gossip("int4, CHOCO", "codec=int4,mixer=choco"),
    gossip("int8, CHOCO", "codec=int8,mixer=choco"),
    gossip("fp8, CHOCO", "codec=float8_e4m3,mixer=choco"),
    gossip("sign, CHOCO", "codec=scaled_sign,mixer=choco"),
    gossip("top-k 1 %, CHOCO", "codec=topk,mixer=choco"),
    gossip(ATC, "order=atc"),
    gossip("int8, atc", "codec=int8,order=atc"),
    gossip("int4, CHOCO, atc", "codec=int4,mixer=choco,order=atc"),
    gossip("sign, CHOCO, atc, γ = 1", "codec=scaled_sign,mixer=choco,order=atc", "mixer.gamma=1.0"),
    gossip("PowerGossip, rank 1", "mixer=power_gossip,rank=1"),
    gossip("PowerGossip, rank 2", "mixer=power_gossip,rank=2"),
    gossip("PowerGossip, rank 4", "mixer=power_gossip,rank=4"),
)


class Cost(NamedTuple):
    """What a row's compression gains and costs, relative to the uncompressed method."""

    row: Row
    fewer: float  # how many times fewer bytes
    loss: float  # by how many percent the loss is higher


def costs(rows: list[Row], summaries: rows_lib.Summaries) -> list[Cost]:
    """Gains and costs of all compressed rows that ran."""
    sent = "bytes_per_step_per_worker"
    compared = [(row, summaries[row.name], summaries[row.reference]) for row in rows if row.name != row.reference]
    return [
        Cost(row, reference[sent] / summary[sent], 100 * (summary["eval_loss"] / reference["eval_loss"] - 1))
        for row, summary, reference in compared
        if summary and reference
    ]


def tabulate(rows: list[Row], summaries: rows_lib.Summaries, markdown: bool) -> rich.table.Table:
    """A table of bytes, their ratio to the uncompressed method's, loss, and its difference from the uncompressed method's."""
    table = rows_lib.table(("", "kB per step", "times fewer", "loss", "to the uncompressed"), markdown)
    of = {cost.row.name: cost for cost in costs(rows, summaries)}
    for row in rows:
        cells, cost = ("", "", "diverged", ""), of.get(row.name)
        if summary := summaries[row.name]:
            fewer, more = (f"{cost.fewer:.1f}", f"{cost.loss:+.1f} %") if cost else ("", "")
            cells = (f"{summary['bytes_per_step_per_worker'] / 1e3:.1f}", fewer, f"{summary['eval_loss']:.4f}", more)
        table.add_row(row.name, *cells)
    return table


def checks(found: list[Cost]) -> list[Check]:
    """The checks: by how many percent compression may raise the loss."""

    def best(what, bound, chosen):
        cost = min((cost for cost in found if chosen(cost)), key=lambda cost: cost.loss, default=None)
        return [Check(f"{what}: {cost.row.name}", f"{cost.fewer:.0f} ×", cost.loss, bound, True)] if cost else []

    return [
        *best("8 bits, % of loss", 0.5, lambda cost: cost.row.name.startswith("int8")),
        *best("4 bits, % of loss", 0.5, lambda cost: cost.row.name.startswith("int4")),
        *best("gossip, 30 × fewer bytes", 2.0, lambda cost: cost.row.reference != REDUCE and cost.fewer >= 30),
        *best("all-reduce, 100 × fewer bytes", 2.0, lambda cost: cost.row.reference == REDUCE and cost.fewer >= 100),
    ]


def main() -> int:
    rows = rows_lib.choose(ROWS, FLAGS.row)
    summaries = rows_lib.train(rows, "configs/lm.py", pathlib.Path(FLAGS.workdir), FLAGS.steps, FLAGS.field)
    script.show(tabulate(rows, summaries, FLAGS.markdown), script.tabulate(checks(costs(rows, summaries))))
    return 0 if all(summaries.values()) else 1


if __name__ == "__main__":
    rows_lib.define_flags(workdir="runs/compression", steps=3000)
    script.run(main, errors=(trials.Broken, OSError))
