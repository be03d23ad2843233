"""Tables that compare runs of `launch.train`, one a row."""

from collections.abc import Sequence
import pathlib
from typing import NamedTuple

from absl import flags
import rich.box
import rich.table

from experiments import script, trials
from launch import command


class Row(NamedTuple):
    """A run that is a row of a table."""

    name: str  # in the table
    shorthand: str  # of the config file
    fields: tuple[str, ...]  # of the config, as FIELD=VALUE
    reference: str  # the row that its loss is compared with: the uncompressed method of its family


Summaries = dict[str, dict[str, float] | None]  # by the row's name; None: it diverged


def choose(rows: tuple[Row, ...], names: list[str]) -> list[Row]:
    """The rows of these names and those that they are compared with; all rows if there are no names."""
    return script.choose(rows, names, *(row.reference for row in rows if row.name in names))


def trial(row: Row, config: str, workdir: pathlib.Path, steps: int, fields: Sequence[str]) -> trials.Trial:
    """The run of a row: so many steps of a config file such as configs/lm.py, with further fields such as "seed=1" of the config."""
    shorthand = ",".join(filter(None, (row.shorthand, f"steps={steps}")))
    if wrong := [field for field in fields if "=" not in field]:
        command.fail(f"--field={wrong[0]} is not FIELD=VALUE; write as in --field=seed=1")
    given = dict(field.split("=", 1) for field in (*row.fields, *fields))
    return trials.trial(workdir, row.name, f"{config}:{shorthand}", given)


def train(rows: list[Row], config: str, workdir: pathlib.Path, steps: int, fields: Sequence[str]) -> Summaries:
    """The summaries of all rows, each of which is trained unless it is finished; prints every loss."""
    pool = trials.Pool()

    def summary(row):
        run = trial(row, config, workdir, steps, fields)
        found = run.summary() if pool.train(run) else None
        script.show(f"{row.name}: {found['eval_loss']:.4f}" if found else f"{row.name}: diverged")
        return found

    return dict(zip((row.name for row in rows), pool.map(summary, rows), strict=True))


def table(columns: tuple[str, ...], markdown: bool, title: str | None = None) -> rich.table.Table:
    """An empty table for rows, as Markdown or for a terminal."""
    box = rich.box.MARKDOWN if markdown else rich.box.SIMPLE_HEAD
    return script.table(*columns, box=box, title=title, title_justify="left")


def define_flags(workdir: str, steps: int) -> None:
    """Defines the flags of every experiment that is a table of runs."""
    flags.DEFINE(command.FOLDER, "workdir", workdir, "A directory for each run goes here.")
    flags.DEFINE_integer("steps", steps, "Of each run.", lower_bound=1)
    flags.DEFINE_multi_string("row", [], "A row to train, with what it is compared with; may be repeated; none: all.")
    script.selects("row")
    flags.DEFINE_multi_string("field", [], "A field of the config for all runs, as --field=seed=1; may be repeated.")
    flags.DEFINE_bool("markdown", False, "Print tables as Markdown.")
