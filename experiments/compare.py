"""Compare runs: loss against step and time, disagreement of the workers, and a table.

    python -m experiments.compare runs/allreduce runs/gossip runs/local --out=compare.png
    python -m experiments.compare sweeps/graphs/*/ --markdown >table.md

Reads the output of `launch.train` (config.json, metrics.jsonl, summary.json), also of unfinished runs. Files among the arguments,
such as the sweep.json of a sweep, are skipped. Light lines are the training loss, averaged over the workers, as a running mean over a
twentieth of the logged values; dark lines with markers are the validation loss of the averaged model. In the table, tokens/s (images/s,
…; items/s of runs that count different ones) is the median over the logged intervals, so that compilation does not count, and a loss
with a * is that of the last periodic evaluation of an unfinished run. Losses of different tasks are not compared.
"""

import json
import os
import pathlib
import statistics
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags
import numpy as np
import rich.box
import rich.console
import rich.markup

from decjax import files
from experiments import script
from launch import command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OUT = flags.DEFINE(command.FIGURE, "out", None, "Where to write the figure, such as compare.png or .pdf; none: the table only.")
_MARKDOWN = flags.DEFINE_bool("markdown", False, "Print the table as Markdown.")

MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", ":")  # for more runs than colors
SMOOTHED_SHARE = 20  # the running mean is over 1/20 of the logged values

UNINFORMATIVE = ("eval.", "checkpoint.", "elastic.", "log_every", "data.sample_bytes")  # fields that do not change the training
DECENTRALIZED_ONLY = ("topology.",)  # fields without effect on other methods
KINDS = ("train", "eval")
# Units of losses by task, as in `Task.metrics`: building a task takes seconds.
UNITS = {"lm": "nats/byte", "images": "nats", "translation": "nats/token"}
NUMBERS_OF_ROW = ("step", "time_s", "loss", "consensus_distance", "bytes_sent_per_worker")
OPTIONAL = {"loss_min", "loss_max", "workers"}  # numbers that a row may lack
NUMBERS_OF_SUMMARY = ("eval_loss", "local_eval_loss_min", "local_eval_loss_max", "time_s", "bytes_per_step_per_worker")
LONGEST_LABEL = 40  # characters; otherwise the names of directories are used
NAME_FIRST = ("task", "method", "method.name", "topology", "topology.name", "mixer.name", "reducer.name", "optimizer.name")


class RunError(Exception):
    """A directory that cannot be compared; the message is one line."""


class Record(NamedTuple):
    """The contents of one run's directory."""

    directory: pathlib.Path
    config: dict[str, Any]  # flat: "optimizer.name"
    train: list[dict[str, Any]]  # rows of metrics.jsonl
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any] | None  # None: not finished

    @property
    def task(self) -> str:
        return str(self.config.get("task", "lm"))

    @property
    def unit(self) -> str:
        """Return the unit of its losses; "" if they have none."""
        return "nats/token" if self.config.get("data.tokenizer") == "bpe" else UNITS.get(self.task, "")

    @property
    def last(self) -> dict[str, Any]:
        return max(self.train + self.evaluations, key=lambda row: row["step"])

    @property
    def losses(self) -> tuple[float | None, ...]:
        """Return the validation losses of the averaged model, the best worker and the worst one; None before an evaluation."""
        if self.summary:
            return tuple(self.summary[key] for key in NUMBERS_OF_SUMMARY[:3])
        evaluated = self.evaluations[-1] if self.evaluations else {}
        return tuple(evaluated.get(key) for key in ("loss", "loss_min", "loss_max"))


def flatten(config: dict, prefix: str = "") -> dict[str, Any]:
    """Return a nested dict with dotted names: {"a.b": 1} for {"a": {"b": 1}}."""
    flat = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def parse(text: str, numbers: tuple[str, ...] = ()) -> dict[str, Any]:
    """Parse a JSON object; raise a ValueError unless it has finite numbers of these names, a valid step, and a kind."""
    content = files.parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(f"{type(content).__name__} instead of an object")
    for name in (*numbers, *(OPTIONAL & content.keys() if numbers else ())):
        value = content.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"{name} is no number")
    if "step" in numbers and not (content["step"] >= 1 and content.get("kind") in KINDS):
        raise ValueError(f"it needs a step of at least 1 and a kind, {' or '.join(KINDS)}")
    return content


def _read(path: pathlib.Path, fix: str) -> str:
    try:
        return files.read_text(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); give directories that launch.train has written") from error
    except ValueError as error:
        raise RunError(f"{path} cannot be read ({error}); {fix}") from error


def _read_json(path: pathlib.Path, fix: str, numbers: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the JSON object in a file; `fix` ends the message if it is damaged."""
    try:
        return parse(_read(path, fix), numbers)
    except ValueError as error:
        raise RunError(f"{path} cannot be read ({error}); {fix}") from error


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return all rows of `metrics.jsonl`; raise a RunError if there are none, or one is damaged.

    An incomplete last line of a running or killed run is ignored.
    """
    lines, rows = _read(path, "restore it from a copy").splitlines(keepends=True), []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse(line, NUMBERS_OF_ROW))
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                continue
            raise RunError(f"{path}, line {number} is damaged ({error}): {line.strip()[:60]!r}; remove the line") from error
    if not rows:
        raise RunError(f"{path} has no complete line yet; wait for the first logged step")
    return rows


def load(directory: pathlib.Path) -> Record:
    """Read a run's directory."""
    if not directory.is_dir():
        raise RunError(f"{directory} is not a directory; give directories that launch.train has written")
    config = flatten(_read_json(directory / "config.json", "restore it from a copy, or train again in another --workdir"))
    rows = read_metrics(directory / "metrics.jsonl")
    path = directory / "summary.json"
    fix = "remove it and run the same training command again, which writes it again"
    summary = _read_json(path, fix, NUMBERS_OF_SUMMARY) if path.exists() else None
    train, evaluations = ([row for row in rows if row["kind"] == kind] for kind in KINDS)
    return Record(directory, config, train, evaluations, summary)


def _identity(run: Record) -> dict[str, Any]:
    """Return the fields of a config that determine the training, by which runs are named."""
    config = {key: value for key, value in run.config.items() if not key.startswith(UNINFORMATIVE)}
    if config.get("method", "decentralized") != "decentralized":
        config = {key: value for key, value in config.items() if not key.startswith(DECENTRALIZED_ONLY)}
    sizes: list[Any] = [config.get(key) for key in ("batch_size", "workers")]
    if all(type(size) is int and 0 < size < 2**53 for size in sizes):  # Per worker, or it would differ whenever these do.
        config["batch_size"] = sizes[0] / sizes[1]
    return config


def _part(key: str, value: object) -> str:
    """Return a field in a label: 'ring' for the name of a part, 'seed=1' for anything else."""
    number = f"{value:g}" if isinstance(value, float) else str(value)
    return str(value) if key in NAME_FIRST else f"{key.removesuffix('.name').rpartition('.')[2]}={number}"


def labels(runs: list[Record]) -> list[str]:
    """Return a label for each run: the fields in which configs differ, with its directory's name if others have the same.

    If one is longer than `LONGEST_LABEL`, all labels are directory names.
    """
    identities = [_identity(run) for run in runs]
    keys = set().union(*identities)
    keys = [*(key for key in NAME_FIRST if key in keys), *sorted(keys.difference(NAME_FIRST))]
    differing = [
        key
        for key in keys
        if len({json.dumps(identity[key]) for identity in identities if key in identity}) > 1
        or (key in NAME_FIRST and any(key not in identity for identity in identities))
    ]
    named = [" ".join(_part(key, identity[key]) for key in differing if key in identity) for identity in identities]
    candidates = [
        run.directory.name if not name else name if named.count(name) == 1 else f"{name} ({run.directory.name})"
        for name, run in zip(named, runs, strict=True)
    ]
    if max(map(len, candidates)) <= LONGEST_LABEL:
        return candidates
    folders = [run.directory.name for run in runs]
    return folders if len({*folders}) == len(runs) else [str(run.directory) for run in runs]


def throughputs(row: dict[str, Any]) -> dict[str, float]:
    """Return the throughput in a row by what it counts, such as {"tokens": 1000.0} per second."""
    return {
        key.removesuffix("_per_s"): value for key, value in row.items() if key.endswith("_per_s") and isinstance(value, int | float)
    }


def items(runs: list[Record]) -> str:
    """Return what the throughput of all runs counts, such as "tokens"; "items" if they differ."""
    counted = {item for run in runs for row in run.train for item in throughputs(row)}
    return counted.pop() if len(counted) == 1 else "items"


def loss_unit(runs: list[Record]) -> str:
    """Return the unit of the runs' losses, such as "nats/byte"; empty if they are of several tasks, or of one without a unit."""
    kinds = {(run.task, run.unit) for run in runs}
    return kinds.pop()[1] if len(kinds) == 1 else ""


def cells(runs: list[Record], names: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) of the table as text; "–" where a run has no value yet."""
    header = ["run", "steps", "eval loss", "to first", "workers' loss", "consensus", "time, s", f"{items(runs)}/s", "MB/step"]
    first = runs[0].losses[0]
    rows = []
    for run, name in zip(runs, names, strict=True):
        last, summary, (loss, low, high) = run.last, run.summary, run.losses
        compared = "–"
        if loss is not None and first is not None and (run.task, run.unit) == (runs[0].task, runs[0].unit):
            compared = script.difference(loss, first, 2).replace("-", "−")
        rates = [rate for row in run.train for rate in throughputs(row).values()]
        sent = summary["bytes_per_step_per_worker"] if summary else last["bytes_sent_per_worker"] / last["step"]
        rows.append(
            [
                name,
                f"{last['step']}" if summary else f"{last['step']} of {run.config.get('steps')}",
                "–" if loss is None else f"{loss:.4f}" + ("" if summary else "*"),
                "first" if run is runs[0] else compared,
                "–" if low is None else f"{low:.3f} to {high:.3f}",
                f"{last['consensus_distance']:.1e}" if last["consensus_distance"] else "0",
                f"{(summary or last)['time_s']:.0f}",
                f"{statistics.median(rates):,.0f}" if rates else "–",
                f"{sent / 1e6:.3g}",
            ]
        )
    return header, rows


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table, aligned so that it is also legible as text."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widest, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [" | ".join([name.ljust(widest), *map(str.rjust, numbers, widths)]) for name, *numbers in rows]
    rule = "|".join([":" + "-" * (widest + 1), *("-" * (width + 1) + ":" for width in widths)])
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def table(header: list[str], rows: list[list[str]]) -> script.Table:
    """Return the table for a terminal."""
    drawn = script.table(*header, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in drawn.columns:
        column.overflow = "fold"
    drawn.columns[0].min_width = min(20, max(len(row[0]) for row in rows))
    for row in rows:
        drawn.add_row(*map(rich.markup.escape, row))
    return drawn


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centered running mean over a twentieth of the values, over fewer of them at both ends."""
    reach = len(values) // SMOOTHED_SHARE // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    middle = np.arange(len(values))
    first, behind = np.maximum(middle - reach, 0), np.minimum(middle + reach + 1, len(values))
    return (total[behind] - total[first]) / (behind - first)


def column(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    """Return the values of one key in all rows."""
    return np.array([row[key] for row in rows], float)


def draw_loss(axis: "Axes", run: Record, against: str, style: dict[str, Any]) -> None:
    """Draw the training loss light, the validation loss of the averaged model dark with markers."""
    light: dict[str, Any] = {**style, "marker": "" if len(run.train) > 1 else ".", "label": None, "alpha": 0.4, "linewidth": 1.1}
    axis.plot(column(run.train, against), smooth(column(run.train, "loss")), **light)
    axis.plot(column(run.evaluations, against), column(run.evaluations, "loss"), markersize=4, linewidth=1.6, **style)


def draw_workers(axis: "Axes", run: Record, style: dict[str, Any]) -> None:
    """Draw the number of workers in each step."""
    if rows := [row for row in run.train if "workers" in row]:
        steps: dict[str, Any] = {**style, "marker": "", "drawstyle": "steps-pre", "linewidth": 1.4}
        axis.plot(column(rows, "time_s"), column(rows, "workers"), **steps)
    axis.set(title="workers", xlabel="time, s", ylim=(0, None))
    axis.locator_params(axis="y", integer=True)


def plot(runs: list[Record], names: list[str], path: str) -> None:
    """Draw loss against step, loss against time, consensus distance, and the workers of elastic runs that lost some."""
    elastic = any(len({row["workers"] for row in run.train if "workers" in row}) > 1 for run in runs)
    caption = (
        "dark with markers: validation loss of the averaged model; light: training loss, running mean over a twentieth of the run"
    )
    with script.panels(path, 3 + elastic, (13 + 4 * elastic, 4.6), caption) as (by_step, by_time, distance, *workers):
        for i, (run, name) in enumerate(zip(runs, names, strict=True)):
            again, i = divmod(i, len(script.COLORS))
            style = dict(color=script.COLORS[i], marker=MARKERS[i], linestyle=LINES[again % len(LINES)])
            draw_loss(by_step, run, "step", style | dict(label=name if run.summary else f"{name} (unfinished)"))
            draw_loss(by_time, run, "time_s", style)
            apart_N, steps_N = column(run.train, "consensus_distance"), column(run.train, "step")
            style["marker"] = "" if len(run.train) > 1 else "."
            distance.plot(steps_N[apart_N > 0], apart_N[apart_N > 0], linewidth=1.4, **style)
            for axis in workers:
                draw_workers(axis, run, style)
        _label_axes(by_step, by_time, distance, runs, names)
        by_step.figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=9)


def _label_axes(by_step: "Axes", by_time: "Axes", distance: "Axes", runs: list[Record], names: list[str]) -> None:
    together = [name for run, name in zip(runs, names, strict=True) if not any(row["consensus_distance"] for row in run.train)]
    zero = "\n(zero throughout: " + ", ".join(together) + ")" if together else ""
    loss = ", ".join(filter(None, ("loss", loss_unit(runs))))
    by_step.set(title="loss against step", xlabel="step", ylabel=loss)
    by_time.set(title="loss against time", xlabel="time, s", ylabel=loss)
    distance.set(title="disagreement of the workers", xlabel=f"step{zero}", ylabel="consensus distance")
    if len(together) < len(runs):
        distance.set_yscale("log")
    else:
        distance.set_yticks([])
    for axis in (by_step, by_time, distance):
        axis.margins(x=0.02)
    if all(len(run.evaluations) > 1 for run in runs):  # Cuts off the high losses of the first steps.
        bottom = by_step.get_ylim()[0]
        top = max(run.evaluations[0]["loss"] for run in runs)
        for axis in (by_step, by_time):
            axis.set_ylim(bottom, top + 0.2 * (top - bottom))


def main(argv: list[str]) -> int:
    if not argv:
        command.fail("no runs; give the directories that launch.train has written")
    paths = [pathlib.Path(os.path.normpath(path)) for path in argv]
    if any(path.is_dir() for path in paths):  # A pattern such as sweeps/graphs/* also matches files.
        paths = [path for path in paths if not path.is_file()]
    runs = [load(path) for path in paths]
    names = labels(runs)
    header, rows = cells(runs, names)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    if _MARKDOWN.value or not console.is_terminal:
        console.print(markdown(header, rows), markup=False)
    else:
        console.print(table(header, rows), soft_wrap=False)
    if not all(run.summary for run in runs):
        console.print("* unfinished run: its last periodic evaluation, on fewer validation examples", markup=False)
    if _OUT.value:
        plot(runs, names, _OUT.value)
        console.print(f"wrote {_OUT.value}", markup=False)
    return 0


if __name__ == "__main__":
    command.run(main, errors=(RunError, OSError, RecursionError))
