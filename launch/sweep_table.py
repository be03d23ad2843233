"""Tables of a sweep: results over seeds, progress of its runs, and a live table while it is running."""

from collections.abc import Callable
import contextlib
import datetime
import statistics
import time

import rich.console
import rich.live
import rich.markup
import rich.table

from launch import command
from launch.members import Member, Progress

SEED = "seed"  # key over which the spread is computed
PERIOD_S = 1.0  # between updates of the live table


def mean_and_spread(values: list[float], digits: int) -> str:
    """Format mean ± sample standard deviation; without the latter if all values are equal."""
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(set(values)) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def results(members: list[Member]) -> rich.table.Table:
    """Return a table with one row per setting, over its seeds."""
    keys = [key for key in members[0].values if key != SEED]
    settings: dict[tuple, list[dict | None]] = {}
    for member in members:
        settings.setdefault(tuple(member.values[key] for key in keys), []).append(member.summary())
    table = command.table(*(key.rpartition(".")[2] for key in keys), words=len(keys))
    table.caption = (
        "mean ± sample standard deviation over n finished runs; "
        "local spread: best to worst worker's own evaluation loss; MB/step: sent per worker"
    )
    for header in ("n", "eval_loss", "local spread", "time, s", "MB/step"):
        table.add_column(header, justify="right", overflow="fold")
    for setting, summaries in settings.items():
        done = [summary for summary in summaries if summary]
        table.add_row(
            *map(rich.markup.escape, setting),
            f"{len(done)}" + (f"/{len(summaries)}" if len(done) < len(summaries) else ""),
            mean_and_spread([summary["eval_loss"] for summary in done], 4),
            mean_and_spread([summary["local_eval_loss_max"] - summary["local_eval_loss_min"] for summary in done], 4),
            mean_and_spread([summary["time_s"] for summary in done], 0),
            mean_and_spread([summary["bytes_per_step_per_worker"] / 1e6 for summary in done], 3),
        )
    return table


def unfinished(members: list[Member]) -> rich.table.Table | None:
    """Return a table with one row per run in progress; None if there is none."""
    in_progress = [(member, progress) for member in members if not member.summary() and (progress := member.progress())]
    if not in_progress:
        return None
    waiting = sum(not member.summary() for member in members) - len(in_progress)
    table = command.table(
        "not finished", "step", "loss", "last change", caption=f"{waiting} more have not started" if waiting else None
    )
    for member, progress in in_progress:
        table.add_row(rich.markup.escape(member.name), *_numbers(progress), f"{_time(progress.age_s)} ago")
    return table


def _numbers(progress: Progress | None) -> tuple[str, str]:
    if progress is None:
        return "–", "–"
    return f"{progress.step}/{progress.steps}", "–" if progress.loss is None else f"{progress.loss:.4f}"


def _time(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


class Live:
    """Live table of the runs in progress, below permanent lines; without a terminal, permanent lines only.

    Args:
        console: to print to.
        state: returns the runs in progress with their start times, and a line about the other runs.
    """

    def __init__(self, console: rich.console.Console, state: Callable[[], tuple[list[tuple[Member, float]], str]]):
        self._console, self._state, self._looked_s = console, state, 0.0
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self._live = rich.live.Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "Live":
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):  # The terminal may be gone.
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text, markup=False)

    def look(self, again: bool = False) -> None:
        """Update the table, at most once per `PERIOD_S` unless `again`."""
        if self._is_live and (again or time.monotonic() - self._looked_s >= PERIOD_S):
            self._looked_s = time.monotonic()
            self._live.update(self._table(), refresh=True)

    def _table(self) -> rich.table.Table:
        running, others = self._state()
        table = command.table("run", "step", "loss", "running for", caption=others)
        for member, begun_s in running:
            table.add_row(rich.markup.escape(member.name), *_numbers(member.progress()), _time(time.monotonic() - begun_s))
        return table
