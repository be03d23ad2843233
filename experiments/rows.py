"""Tables that compare runs of `launch.train`, one for each row."""

from collections.abc import Sequence
import pathlib
from typing import NamedTuple

from absl import flags
import rich.box

from experiments import script, trials
from launch import command

flags.disclaim_key_flags()  # as in `script`
BYTES, STAGE_BYTES = "bytes_per_step_per_worker", "bytes_between_stages_per_step_per_worker"


class Row(NamedTuple):
    """A run that is a row of a table."""

    name: str  # in the table
    shorthand: str  # of the config file
    fields: tuple[str, ...]  # of the config, as FIELD=VALUE
    reference: str  # the row that its loss is compared with: the uncompressed method of its family


Summaries = dict[str, dict[str, float] | None]  # by the row's name; None: it diverged


def choose(rows: tuple[Row, ...], names: list[str]) -> list[Row]:
    """Return the rows of these names and those that they are compared with; all rows if there are no names."""
    return script.choose(rows, names, *(row.reference for row in rows if row.name in names))


def trial(row: Row, config: str, workdir: pathlib.Path, steps: int, fields: Sequence[str]) -> trials.Trial:
    """Return the run of a row on a config file, with further fields such as "seed=1" of the config."""
    if wrong := [field for field in fields if "=" not in field]:
        command.fail(f"--field={wrong[0]} is not FIELD=VALUE; write as in --field=seed=1")
    shorthand = ",".join(filter(None, (row.shorthand, f"steps={steps}")))
    return trials.trial(workdir, row.name, f"{config}:{shorthand}", dict(field.split("=", 1) for field in (*row.fields, *fields)))


def train(rows: list[Row], config: str, workdir: pathlib.Path, steps: int, fields: Sequence[str]) -> Summaries:
    """Train all rows, unless that is done; print their losses and return their summaries."""
    pool = trials.Pool()

    def summary(row: Row) -> dict[str, float] | None:
        run = trial(row, config, workdir, steps, fields)
        summary = run.summary() if pool.train(run) else None
        script.show(f"{row.name}: {summary['eval_loss']:.4f}" if summary else f"{row.name}: diverged")
        return summary

    return dict(zip((row.name for row in rows), pool.map(summary, rows), strict=True))


def table(columns: Sequence[str], markdown: bool, title: str | None = None) -> script.Table:
    """Return an empty table for rows, as Markdown or for a terminal."""
    return script.table(*columns, box=rich.box.MARKDOWN if markdown else rich.box.SIMPLE_HEAD, title=title)


def define_flags(workdir: str, steps: int) -> None:
    """Define the flags of every experiment that is a table of runs."""
    script.define("row")
    flags.DEFINE(command.FOLDER, "workdir", workdir, "A directory for each run goes here.")
    flags.DEFINE_integer("steps", steps, "Steps of each run.", lower_bound=1)
    flags.DEFINE_multi_string("field", [], "A field of the config for all runs, as --field=seed=1; may be repeated.")
    flags.DEFINE_bool("markdown", False, "Print tables as Markdown.")
