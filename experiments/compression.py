"""What compression costs in loss: all-reduce, exact gossip and their compressed forms, on the byte-level language model.

    python -m experiments.compression --workdir=runs/compression --markdown

One run of configs/lm.py for each row: 8 workers, equal steps, equal data, the learning rate of the uncompressed method. Finished runs
are not repeated. Bytes are those of the compiled program's messages, means over workers and steps. Loss is that of the averaged
model on all of the validation text, and compared with the uncompressed method that mixes in the same order.

By default CHOCO takes a cautious step, half of the fraction of noise that its codec keeps. Here, where a period of the graph averages
exactly, the full step (γ = 1) is stable with signs, but not with top-k.
"""

import pathlib
from typing import NamedTuple

from absl import flags

from experiments import rows as rows_lib
from experiments import script, sweep
from experiments.rows import Row
from experiments.script import Check

FLAGS = flags.FLAGS

GOSSIP, ATC, REDUCE = "exact gossip", "exact gossip, atc", "all-reduce"


def gossip(name: str, shorthand: str = "", *fields: str) -> Row:
    """Return a row of gossip over the one-peer exponential graph."""
    return Row(name, shorthand, fields, ATC if "order=atc" in shorthand else GOSSIP)


def reduce(name: str, shorthand: str, *fields: str) -> Row:
    """Return a row of a method that averages over all workers."""
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
    """Gain and cost of a row's compression, relative to the uncompressed method."""

    row: Row
    fewer: float  # times fewer bytes
    loss: float  # increase of the loss in percent


def costs(rows: list[Row], summaries: rows_lib.Summaries) -> list[Cost]:
    """Return gains and costs of all compressed rows that ran."""
    compared = [(row, summaries[row.name], summaries[row.reference]) for row in rows if row.name != row.reference]
    return [
        Cost(row, reference[rows_lib.BYTES] / summary[rows_lib.BYTES], 100 * (summary["eval_loss"] / reference["eval_loss"] - 1))
        for row, summary, reference in compared
        if summary and reference
    ]


def tabulate(rows: list[Row], summaries: rows_lib.Summaries, markdown: bool) -> script.Table:
    """Return bytes and loss of each row, with their relation to those of the uncompressed method."""
    table = rows_lib.table(("", "kB per step", "times fewer", "loss", "vs. uncompressed"), markdown)
    of = {cost.row.name: cost for cost in costs(rows, summaries)}
    for row in rows:
        cells, cost = ("", "", "diverged", ""), of.get(row.name)
        if summary := summaries[row.name]:
            fewer, more = (f"{cost.fewer:.1f}", f"{cost.loss:+.1f} %") if cost else ("", "")
            cells = (f"{summary[rows_lib.BYTES] / 1e3:.1f}", fewer, f"{summary['eval_loss']:.4f}", more)
        table.add_row(row.name, *cells)
    return table


def checks(found: list[Cost]) -> list[Check]:
    """Return the checks of the increase of the loss, in percent, for the best row of each kind."""
    kinds = (
        ("8 bits, % of loss", 0.5, [cost for cost in found if cost.row.name.startswith("int8")]),
        ("4 bits, % of loss", 0.5, [cost for cost in found if cost.row.name.startswith("int4")]),
        ("gossip, 30 × fewer bytes", 2.0, [cost for cost in found if cost.row.reference != REDUCE and cost.fewer >= 30]),
        ("all-reduce, 100 × fewer bytes", 2.0, [cost for cost in found if cost.row.reference == REDUCE and cost.fewer >= 100]),
    )
    best = [(what, bound, min(costs, key=lambda cost: cost.loss)) for what, bound, costs in kinds if costs]
    return [Check(f"{what}: {cost.row.name}", f"{cost.fewer:.0f} ×", cost.loss, bound, True) for what, bound, cost in best]


def main() -> int:
    rows = rows_lib.choose(ROWS, FLAGS.row)
    summaries = rows_lib.train(rows, "configs/lm.py", pathlib.Path(FLAGS.workdir), FLAGS.steps, FLAGS.field)
    script.show(tabulate(rows, summaries, FLAGS.markdown), script.tabulate(checks(costs(rows, summaries))))
    return 0 if all(summaries.values()) else 1


if __name__ == "__main__":
    rows_lib.define_flags(workdir="runs/compression", steps=3000)
    script.run(main, sweep.ERRORS)
