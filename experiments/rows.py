"""Trainings that a table compares: a row is a run of `launch.train`, in a process of its own.

Runs that have finished are not repeated, so an interrupted table goes on where it was.
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
        shorthand: of the config file.
        fields: of the config, as flags set them.
        reference: the row that its loss is compared with: the uncompressed method of its family.
    """

    name: str
    shorthand: str
    fields: tuple[str, ...]
    reference: str


Summaries = dict[str, dict[str, float] | None]  # by the row's name; None: failed


def choose(rows: tuple[Row, ...], names: list[str]) -> list[Row]:
    """The rows of these names, with what they are compared with; all, if there are no names."""
    if unknown := set(names) - {row.name for row in rows}:
        command.fail(f"row={sorted(unknown)[0]!r} is unknown; the rows are: {'; '.join(row.name for row in rows)}")
    wanted = {row.reference for row in rows if row.name in names} | set(names)
    return [row for row in rows if not wanted or row.name in wanted]


def directory(row: Row, workdir: pathlib.Path) -> pathlib.Path:
    return workdir / "".join(c if c.isalnum() else "_" for c in row.name)


def train(
    rows: list[Row], config: str, workdir: pathlib.Path, steps: int, extra: list[str], console: rich.console.Console
) -> Summaries:
    """The summaries of all rows, each trained unless it is finished.

    Args:
        rows: to train.
        config: the file, as configs/lm.py.
        workdir: a directory for each run goes here.
        steps: of each run.
        extra: further flags of all runs, as --config.seed=1.
        console: is told every loss.
    """
    summaries = {}
    for row in rows:
        summary = summaries[row.name] = _train(row, config, directory(row, workdir), steps, extra)
        console.print(f"{row.name}: {summary['eval_loss']:.4f}" if summary else f"{row.name}: failed")
    return summaries


def _train(row, config, directory, steps, extra) -> dict[str, float] | None:
    summary = directory / "summary.json"
    if not summary.exists():
        shorthand = ",".join(part for part in (row.shorthand, f"steps={steps}") if part)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "launch.train",
                f"--config={config}:{shorthand}",
                f"--workdir={directory}",
                *(f"--config.{field}" for field in row.fields),
                *extra,
            ],
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            return None
    return json.loads(summary.read_text())


def difference(loss: float, reference: dict[str, float] | None) -> str:
    """By how much a loss differs from the reference's; empty without one."""
    return f"{100 * (loss / reference['eval_loss'] - 1):+.2f} %" if reference else ""


def table(columns: tuple[str, ...], markdown: bool, title: str | None = None) -> rich.table.Table:
    """An empty table; all columns but the first are numbers."""
    made = rich.table.Table(box=rich.box.MARKDOWN if markdown else rich.box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        made.add_column(column, justify="right" if column else "left")
    return made


def define_flags(workdir: str, steps: int) -> None:
    """What every table of runs takes; called where an experiment is the command, because tests import several of them."""
    flags.DEFINE_string("workdir", workdir, "A directory for each run goes here.")
    flags.DEFINE_integer("steps", steps, "Of each run.", lower_bound=1)
    flags.DEFINE_multi_string("row", [], "A row to train, with what it is compared with; may be repeated; none: all.")
    flags.DEFINE_multi_string("field", [], "A further flag for all runs, as --field=--config.seed=1.")
    flags.DEFINE_bool("markdown", False, "Print tables as Markdown.")
