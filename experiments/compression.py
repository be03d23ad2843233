"""What compression costs in loss: all-reduce, exact gossip and their compressed forms, on the byte-level language model.

    python -m experiments.compression --workdir=runs/compression --markdown

One run of configs/lm.py for each row: 8 workers, equal steps, equal data, the learning rate of the uncompressed method. Runs that have
finished are not repeated, so an interrupted table goes on where it was. Bytes are those of the compiled program's messages, means over
workers and steps. Loss is that of the averaged model on all of the validation text.
"""

import json
import pathlib
import subprocess
import sys
from typing import NamedTuple

from absl import flags
import rich.box
import rich.console
import rich.table

from launch import command


class Row(NamedTuple):
    """A run.

    Attributes:
        name: what the table calls it.
        shorthand: of configs/lm.py.
        fields: of the config, as flags set them.
        reference: the row that its loss is compared with: the uncompressed method of its family.
    """

    name: str
    shorthand: str
    fields: tuple[str, ...]
    reference: str


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


def train(row: Row, directory: pathlib.Path, steps: int, extra: list[str]) -> dict[str, float] | None:
    """The summary of a row's run, which is trained unless it is there; None if it fails."""
    summary = directory / "summary.json"
    if not summary.exists():
        shorthand = ",".join(part for part in (row.shorthand, f"steps={steps}") if part)
        done = subprocess.run([sys.executable, "-m", "launch.train", f"--config=configs/lm.py:{shorthand}", f"--workdir={directory}",
                               *(f"--config.{field}" for field in row.fields), *extra], stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            return None
    return json.loads(summary.read_text())


def tabulate(rows: list[Row], summaries: dict[str, dict[str, float] | None], markdown: bool) -> rich.table.Table:
    """Bytes, their ratio to the uncompressed method, loss, and by how much it differs."""
    table = rich.table.Table(box=rich.box.MARKDOWN if markdown else rich.box.SIMPLE_HEAD)
    for column in ("", "kB per step", "times fewer", "loss", "to the uncompressed"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        summary, reference = summaries.get(row.name), summaries.get(row.reference)
        if summary is None:
            table.add_row(row.name, "", "", "failed", "")
            continue
        sent, loss = summary["bytes_per_step_per_worker"], summary["eval_loss"]
        compared = reference is not None and row.name != row.reference
        table.add_row(row.name, f"{sent / 1e3:.1f}", f"{reference['bytes_per_step_per_worker'] / sent:.1f}" if compared else "",
                      f"{loss:.4f}", f"{100 * (loss / reference['eval_loss'] - 1):+.2f} %" if compared else "")
    return table


def main(argv: list[str]) -> int:
    chosen = flags.FLAGS
    if argv:
        command.fail(f"unexpected argument {argv[0]!r}; options start with --")
    if unknown := set(chosen.row) - {row.name for row in ROWS}:
        command.fail(f"row={sorted(unknown)[0]!r} is unknown; the rows are: {'; '.join(row.name for row in ROWS)}")
    wanted = {row.reference for row in ROWS if row.name in chosen.row} | set(chosen.row)
    rows = [row for row in ROWS if not wanted or row.name in wanted]
    console = rich.console.Console(highlight=False)
    summaries = {}
    for row in rows:
        directory = pathlib.Path(chosen.workdir) / "".join(c if c.isalnum() else "_" for c in row.name)
        summaries[row.name] = train(row, directory, chosen.steps, chosen.field)
        console.print(f"{row.name}: {summaries[row.name]['eval_loss']:.4f}" if summaries[row.name] else f"{row.name}: failed")
    console.print(tabulate(rows, summaries, chosen.markdown))
    return 0 if all(summaries.values()) else 1


if __name__ == "__main__":
    # Defined here, because tests import several experiments.
    flags.DEFINE_string("workdir", "runs/compression", "A directory for each run goes here.")
    flags.DEFINE_integer("steps", 3000, "Of each run.", lower_bound=1)
    flags.DEFINE_multi_string("row", [], "A row to train, with what it is compared with; may be repeated; none: all.")
    flags.DEFINE_multi_string("field", [], "A further flag for all runs, as --field=--config.seed=1.")
    flags.DEFINE_bool("markdown", False, "Print the table as Markdown.")
    command.run(main, errors=(OSError,))
