"""What compression costs in loss: all-reduce, exact gossip and their compressed forms, on the byte-level language model.

    python -m experiments.compression --workdir=runs/compression --markdown

One run of configs/lm.py for each row: 8 workers, equal steps, equal data, the learning rate of the uncompressed method. Runs that
have finished are not repeated. Bytes are those of the compiled program's messages, means over workers and steps. Loss is that of
the averaged model on all of the validation text.
"""

import pathlib

from absl import flags
import rich.console
import rich.table

from experiments import rows as rows_lib
from experiments.rows import Row
from launch import command

GOSSIP, REDUCE = "exact gossip", "all-reduce"


def gossip(name: str, shorthand: str = "", *fields: str) -> Row:
    """A row of gossip over the one-peer exponential graph, in order "awc"."""
    return Row(name, shorthand, fields, GOSSIP)


def reduce(name: str, shorthand: str, *fields: str) -> Row:
    """A row that averages over all workers."""
    return Row(name, shorthand, fields, REDUCE)


ROWS = (
    reduce(REDUCE, "method=allreduce"),
    reduce("PowerSGD, rank 4", "method=allreduce,reducer=powersgd,rank=4"),
    reduce("PowerSGD, rank 1", "method=allreduce,reducer=powersgd,rank=1"),
    reduce("DeMo", "method=allreduce,reducer=demo"),
    reduce("SparseLoCo", "method=sparseloco"),
    gossip(GOSSIP),
    gossip("int8", "codec=int8"),
    gossip("int4", "codec=int4"),
    gossip("int4, CHOCO", "codec=int4,mixer=choco"),
    gossip("fp8, CHOCO", "codec=float8_e4m3,mixer=choco"),
    gossip("sign, CHOCO", "codec=scaled_sign,mixer=choco"),
    gossip("top-k 1 %, CHOCO", "codec=topk,mixer=choco"),
    gossip("PowerGossip, rank 1", "mixer=power_gossip,rank=1"),
    gossip("PowerGossip, rank 2", "mixer=power_gossip,rank=2"),
    gossip("PowerGossip, rank 4", "mixer=power_gossip,rank=4"),
)


def tabulate(rows: list[Row], summaries: rows_lib.Summaries, markdown: bool) -> rich.table.Table:
    """Bytes, their ratio to the uncompressed method, loss, and by how much it differs."""
    table = rows_lib.table(("", "kB per step", "times fewer", "loss", "to the uncompressed"), markdown)
    for row in rows:
        summary, reference = summaries.get(row.name), summaries.get(row.reference) if row.name != row.reference else None
        if summary is None:
            table.add_row(row.name, "", "", "failed", "")
            continue
        sent = summary["bytes_per_step_per_worker"]
        table.add_row(row.name, f"{sent / 1e3:.1f}", f"{reference['bytes_per_step_per_worker'] / sent:.1f}" if reference else "",
                      f"{summary['eval_loss']:.4f}", rows_lib.difference(summary['eval_loss'], reference))
    return table


def main(argv: list[str]) -> int:
    chosen = flags.FLAGS
    if argv:
        command.fail(f"unexpected argument {argv[0]!r}; options start with --")
    rows, console = rows_lib.choose(ROWS, chosen.row), rich.console.Console(highlight=False)
    summaries = rows_lib.train(rows, "configs/lm.py", pathlib.Path(chosen.workdir), chosen.steps, chosen.field, console)
    console.print(tabulate(rows, summaries, chosen.markdown))
    return 0 if all(summaries.values()) else 1


if __name__ == "__main__":
    rows_lib.define_flags(workdir="runs/compression", steps=3000)
    command.run(main, errors=(OSError,))
