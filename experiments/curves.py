"""Curves of runs: their losses and seconds, read from run directories, as a table and a figure."""

from collections.abc import Callable, Mapping, Sequence
import itertools
import json
import math
import pathlib
import statistics
from typing import NamedTuple

from experiments import script, trials

NEAR = 0.05  # nats above a goal: a second goal, which is not at the flat end of the run that sets it


class Point(NamedTuple):
    """The averaged model at one moment of a run."""

    step: int
    time_s: float  # of training so far
    loss: float  # on validation data


def read(workdir: pathlib.Path) -> list[Point]:
    """Return the validation losses of a run, with the seconds of training up to each.

    Rates are logged without compilation and evaluation; tokens ÷ rate are the seconds of the steps since the last row.
    """
    points, time_s, step = [], 0.0, 0
    config = json.loads((workdir / "config.json").read_text())
    tokens = config["batch_size"] * (config["model"].get("context") or config["data"]["length"])
    for row in trials.Trial(workdir).rows():
        if row["kind"] == "train":
            time_s += (row["step"] - step) * tokens / row["tokens_per_s"]
            step = row["step"]
        else:
            points.append(Point(row["step"], time_s, row["loss"]))
    return points


def reached(points: Sequence[Point], loss: float, get: Callable[[Point], float] = lambda point: point.time_s) -> float:
    """Return when a run reached a loss and stayed below it, in seconds or as `get` says, interpolated between evaluations; nan: never.

    A single good evaluation among worse ones does not count: losses of small models vary between evaluations.
    """
    above = [k for k, point in enumerate(points) if point.loss > loss]
    if not above:
        return get(points[0]) if points else math.nan
    if above[-1] + 1 == len(points):
        return math.nan
    before, after = points[above[-1] : above[-1] + 2]
    share = (before.loss - loss) / (before.loss - after.loss)
    return get(before) + share * (get(after) - get(before))


class Result(NamedTuple):
    """Results of a method, one for each round; None where there is no forecast."""

    runs: list[list[Point]]
    step_s: list[float]
    predicted_step_s: list[float] | None  # by the cost model
    to_loss_s: list[float]  # seconds to the loss that all-reduce ended with
    near_s: list[float]  # the same to `NEAR` above it
    predicted_to_loss_s: list[float] | None
    scores: Sequence[float] = ()  # of the averaged model on test data, for tasks that have one


def tabulate(found: Mapping[str, Result], score: str = "") -> script.Table:
    """Return the seconds to the loss that the first method, all-reduce, ends with, and the speed-up, measured and predicted.

    `score` is the name of the runs' final score; "": none.
    """
    table = script.table(
        "",
        "ms per step",
        "predicted",
        "final loss",
        *([f"final {score}"] if score else []),
        "seconds to all-reduce's loss",
        "speed-up",
        "predicted",
        "error",
        f"speed-up to {NEAR:g} nats above it",
    )
    first = next(iter(found.values()))
    for name, result in found.items():
        ratios = _ratios(first.to_loss_s, result.to_loss_s)
        own_s = result.predicted_to_loss_s
        predicted = _ratios(first.predicted_to_loss_s or [], own_s) if own_s else []
        table.add_row(
            name,
            ", ".join(map(script.ms, result.step_s)),
            ", ".join(map(script.ms, result.predicted_step_s or [])),
            ", ".join(f"{run[-1].loss:.3f}" for run in result.runs),
            *([", ".join(f"{value:.1f}" for value in result.scores)] if score else []),
            ", ".join("never" if math.isnan(time_s) else f"{time_s:.0f}" for time_s in result.to_loss_s),
            _times(ratios),
            _times(predicted) if predicted else "",
            ", ".join(_error(*each) for each in zip(predicted, ratios)) if result is not first else "",
            _times(_ratios(first.near_s, result.near_s)),
        )
    return table


def _ratios(reference_s: Sequence[float], own_s: Sequence[float]) -> list[float]:
    """Return the speed-up of each round; nan if the loss was never reached."""
    return [reference / own for reference, own in zip(reference_s, own_s, strict=True)]


def _error(predicted: float, ratio: float) -> str:
    return "–" if math.isnan(predicted * ratio) else script.difference(predicted, ratio)


def _times(ratios: Sequence[float]) -> str:
    """Return the mean of several speed-ups, and each in parentheses."""
    own = ", ".join("never" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in ratios)
    return own if math.isnan(sum(ratios)) or len(ratios) == 1 else f"{statistics.mean(ratios):.2f} ({own})"


def draw(path: str, found: Mapping[str, Result], title: str, unit: str) -> None:
    """Draw loss against seconds, a panel for each round, up to the first loss of all-reduce and 1.2 times its duration.

    Methods without a forecast are dashed; a dot marks where a method reaches all-reduce's final loss.
    """
    caption = f"{title}\ndots and legend: when each method reaches the final loss of all-reduce and stays below it"
    first = next(iter(found.values())).runs
    top, end_s = max(run[0].loss for run in first), max(run[-1].time_s for run in first)
    with script.panels(path, len(first), (5.5 * len(first), 4.5), caption) as axes:
        for k, axis in enumerate(axes):
            goal = first[k][-1].loss
            axis.axhline(goal, color="0.5", linewidth=0.8, linestyle="--")
            for color, (name, result) in zip(itertools.cycle(script.COLORS), found.items()):
                time_s, run = result.to_loss_s[k], result.runs[k]
                label = f"{name}: {'never' if math.isnan(time_s) else f'{time_s:.0f} s'}"
                style = dict(color=color, linewidth=1.6, alpha=0.9, linestyle="--" if result.predicted_step_s is None else "-")
                axis.plot([point.time_s for point in run], [point.loss for point in run], label=label, **style)
                axis.plot(time_s, goal, "o", color=color, markersize=7, zorder=3)
            axis.set(xlabel="seconds of training", xlim=(0, 1.2 * end_s))
            axis.set_title(f"seed {k}", fontsize=10)
            axis.set_ylim(top=top + 0.02 * abs(top))
            axis.legend(fontsize=8, framealpha=0.85, edgecolor="none")
        axes[0].set_ylabel(f"validation loss, {unit}")
