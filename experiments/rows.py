"""Trainings that a table compares: a row is a run of `launch.train`, in a process of its own.

Runs that have finished are not repeated, so an interrupted table goes on where it was.
"""

import json
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

from absl import flags
import rich.box
import rich.table

from experiments import script, trials


class Row(NamedTuple):
    """A training run that is a row of a table."""

    name: str  # in the table
    shorthand: str  # of the config file
    fields: tuple[str, ...]  # of the config, as in the flags --config.FIELD=VALUE
    reference: str  # the row that its loss is compared with: the uncompressed method of its family


Summaries = dict[str, dict[str, float] | None]  # by the row's name; None: failed


def choose(rows: tuple[Row, ...], names: list[str]) -> list[Row]:
    """The rows of these names and those that they are compared with; all rows if there are no names."""
    return script.choose(rows, names, *(row.reference for row in rows if row.name in names))


def directory(row: Row, workdir: pathlib.Path, *what: Any) -> pathlib.Path:
    """The work directory of a row's run; `what` are the other arguments of `train`: with others it is another run."""
    return workdir / f"{trials.name_of(row.name)}_{trials.checksum(repr((row, what)))}"


def train(rows: list[Row], config: str, workdir: pathlib.Path, steps: int, extra: list[str]) -> Summaries:
    """The summaries of all rows, each of which is trained unless it is finished; prints every loss.

    Every run takes `steps` steps of a config file such as configs/lm.py, with `extra` flags such as --config.seed=1.
    """
    summaries = {}
    for row in rows:
        path = directory(row, workdir, config, steps, extra) / "summary.json"
        out = f"--workdir={path.parent}"
        summary = summaries[row.name] = written(path, "launch.train", out, row, config, steps, extra, stdout=subprocess.DEVNULL)
        script.show(f"{row.name}: {summary['eval_loss']:.4f}" if summary else f"{row.name}: failed")
    return summaries


def written(
    path: pathlib.Path, module: str, out: str, row: Row, config: str, steps: int, extra: list[str], stdout: int | None = None
) -> Any | None:
    """The content of the JSON file `path` that a module writes for a row; None if the module fails.

    The module is run unless the file exists. Its output goes to `stdout`, as in `subprocess.run`.
    """
    shorthand = ",".join(filter(None, (row.shorthand, f"steps={steps}")))
    fields = (f"--config.{field}" for field in row.fields)
    line = [sys.executable, "-m", module, f"--config={config}:{shorthand}", out, *fields, *extra]
    if not path.exists() and subprocess.run(line, stdout=stdout, check=False).returncode:
        return None
    return json.loads(path.read_text())


def table(columns: tuple[str, ...], markdown: bool, title: str | None = None) -> rich.table.Table:
    """An empty table for rows, as Markdown or for a terminal."""
    box = rich.box.MARKDOWN if markdown else rich.box.SIMPLE_HEAD
    return script.table(*columns, box=box, title=title, title_justify="left")


def define_flags(workdir: str, steps: int) -> None:
    """Defines the flags of every experiment that is a table of runs."""
    flags.DEFINE_string("workdir", workdir, "A directory for each run goes here.")
    flags.DEFINE_integer("steps", steps, "Of each run.", lower_bound=1)
    flags.DEFINE_multi_string("row", [], "A row to train, with what it is compared with; may be repeated; none: all.")
    flags.DEFINE_multi_string("field", [], "A further flag for all runs, as --field=--config.seed=1.")
    flags.DEFINE_bool("markdown", False, "Print tables as Markdown.")
