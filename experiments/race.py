"""The race: which method reaches a loss first on a slow network, with every method tuned alike.

    python -m experiments.race --task=lm --out=runs/race
    python -m experiments.race --task=translation --multi30k=data/multi30k --out=runs/race
    python -m experiments.race --task=lm --out=runs/race --smoke

Four workers, one per emulated host. Time to target is the product of two measurements, each of which has its own file of results:

1. *Loss against steps*, from simulated workers: the arithmetic of real ones, without a network. `--results` is the results log. Every
   row is tuned alike in shorter runs with a separate seed: three learning rates, further ones while the best is at an edge, then the
   row's other options, then rates √2 below and above the best. The best setting is trained with each seed. A row of which a seed misses
   the first target is trained for 1.5 and then 2 times as many steps. Rows of PyTorch are tuned and trained in the same way, by
   `experiments.race_peers` on four processes; `--peer_results` is its file.
2. *Seconds per step*, from real processes on the emulated cluster, measured by `experiments.race_steps` at several bandwidths;
   `--step_times` is its file.

The targets are a loss of the task and the final loss of the first row, fp32 all-reduce; for translation its final loss and its loss
after half of the steps. Losses of the first row are those of its worst seed, so that all of its seeds reach them. Without
`--step_times` the command ends with losses and steps.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import itertools
import math
import pathlib
import statistics
from typing import Any, NamedTuple

from absl import flags

from decjax import files
from experiments import race_rows, script, seeds, sweep, trials
from experiments.methods import HOSTS
from experiments.race_rows import FP32, PEERS, ROWS, Curve, Result, Runs, Setting, Task, loss_at, steps_to
from experiments.results_log import ResultsLog
from launch import command, network

FLAGS = flags.FLAGS

FAMILY_COLORS = {
    race_rows.REDUCE: script.COLORS[1],
    race_rows.LOCAL: script.COLORS[2],
    race_rows.GOSSIP: script.COLORS[0],
    race_rows.PYTORCH: script.COLORS[7],
}
SMOKE_ROWS = ("gossip int8", "MuLoCo int4, H = 4")


def read(run: trials.Trial) -> dict[str, Any]:
    """Return the entry of a run in the results log."""
    summary = run.summary()
    scores = {name: value for name, value in summary.items() if name == "eval_bleu"}
    losses = [(row["step"], round(row["loss"], 5)) for row in run.rows("eval")]
    return {"losses": losses, "eval_loss": summary["eval_loss"], "bytes": summary["bytes_per_step_per_worker"], **scores}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Race(Runs):
    """The runs of decjax."""

    out: pathlib.Path
    log: ResultsLog
    data: str = ""  # path; empty: the task's own

    def trial(self, name: str, setting: Setting, seed: int, steps: int, simulate: bool = True) -> trials.Trial:
        """Return a run, whose workers are simulated or real processes."""
        task = self.task
        shorthand = f"{ROWS[name].shorthand},workers={HOSTS}" + ",simulate" * simulate + f",steps={steps}" + ",smoke" * self.smoke
        fields = {**setting.fields, "seed": seed, "batch_size": task.batch_size, **task.fields}
        fields |= {"eval.every": 5 if self.smoke else task.every, "eval.local": False, "checkpoint.every": 10**9}
        if self.data:
            fields["data.path"] = self.data
        return trials.trial(self.out, f"{name} {setting} {seed} {steps}", f"{task.config}:{shorthand}", fields)

    def curve(self, name: str, setting: Setting, seed: int, steps: int) -> Curve | None:
        numbers = self.log.result(self.trial(name, setting, seed, steps), read)
        return None if numbers is None else Curve(steps, numbers["losses"], numbers["bytes"], numbers.get(self.task.score))

    def results(self, names: Collection[str] = ROWS) -> dict[str, Result]:
        """Return the results of the first row, which sets the targets, and of the named rows."""
        first = self.result(FP32)
        target, _ = self.targets(first)
        names = [name for name in ROWS if name != FP32 and name in names]
        return {FP32: first} | dict(zip(names, self.log.pool.map(lambda name: self.result(name, target), names), strict=True))


def tabulate(task: Task, results: Mapping[str, Result], targets: Sequence[float]) -> script.Table:
    """Return the losses of all rows and their steps to the targets."""
    columns = ("bytes per step", "steps", f"final {task.unit}", *(f"steps to {target:.3f}" for target in targets))
    scores = [task.score.removeprefix("eval_").upper()] if task.score else []
    table = script.table("", *columns, *scores, "setting", "tried")
    for name, result in results.items():
        ended, complete = result.ended, len(result.ended) == len(result.curves)
        sent = next((curve.sent for curve in ended), None)
        table.add_row(
            name,
            "" if sent is None else f"{sent:,.0f}",
            str(result.steps),
            seeds.spread([curve.last for curve in ended]).text(3) if complete else "diverged",
            *(", ".join(_steps(steps_to(curve.losses, target)) for curve in ended) for target in targets),
            *(seeds.spread([curve.score or math.nan for curve in ended]).text(1) for _ in scores),
            str(result.setting),
            "; ".join(f"{setting}: {loss:.3f}" for setting, loss in result.tried.items()),
        )
    return table


def _steps(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.0f}"


# -- With the seconds of a step ---------------------------------------------------------------------------------------


class Finish(NamedTuple):
    """When a row reaches a target.

    Attributes:
        times_s: one for each seed; infinite: never.
        speedups: the first row's mean time, divided by each.
    """

    times_s: list[float]
    speedups: list[float]

    @property
    def reached(self) -> bool:
        """Whether all seeds reach the target."""
        return bool(self.times_s) and all(map(math.isfinite, self.times_s))


class StepTimes(NamedTuple):
    """Seconds per step and bytes that a host sends per step, of each row at each rate, as `experiments.race_steps` measured them."""

    path: str
    measured: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @classmethod
    def read(cls, path: str) -> "StepTimes":
        return cls(path, measured(path, "experiments.race_steps"))

    @property
    def rates(self) -> list[str]:
        """All rates, from slow to fast."""
        return sorted((rate for rate in self.measured if rate != race_rows.JITTER), key=bytes_per_s)

    def at(self, rate: str) -> dict[str, float]:
        """Return the median seconds per step of each row at a rate."""
        if rate not in self.measured:
            known = ", ".join(self.rates)
            raise trials.Broken(
                f"{self.path} has no step times at {rate}, only at {known}; measure them with experiments.race_steps"
            )
        return {name: statistics.median(numbers["step_s"]) for name, numbers in self.measured[rate].items()}

    def with_jitter(self) -> dict[str, float]:
        """Return the same of the rows with jitter, at the task's rate; {}: not measured."""
        rows = self.at(race_rows.JITTER) if race_rows.JITTER in self.measured else {}
        suffix = f", {race_rows.JITTER}"
        return {name.removesuffix(suffix): step_s for name, step_s in rows.items() if name.endswith(suffix)}

    def predicted_s(self, name: str, rate: str) -> float:
        """Return the seconds of a step at a rate, predicted from the fastest rate: its wire time is bytes ÷ bandwidth.

        Messages of gossip and of stale all-reduce travel while the next gradient is computed, so the longer of the two counts; other
        methods wait for them, so both do.
        """
        fastest = self.rates[-1]
        numbers = self.measured[fastest][name]
        wire_s = [numbers["sent_bytes"] / bytes_per_s(each) for each in (rate, fastest)]
        longest_s = statistics.median(numbers["step_s"])
        overlaps = name in ROWS and (ROWS[name].family == race_rows.GOSSIP or "stale" in ROWS[name].shorthand)
        return max(longest_s, wire_s[0]) if overlaps else longest_s - wire_s[1] + wire_s[0]


def bytes_per_s(rate: str) -> float:
    """Return a rate such as "20mbit" in bytes per second."""
    return network.bits_per_s(rate) / 8


def readable(rate: str) -> str:
    """Return a rate such as "20mbit" as "20 Mbit/s"."""
    return f"{bytes_per_s(rate) * 8e-6:g} Mbit/s"


def finishes(results: Mapping[str, Result], step_s: Mapping[str, float], target: float) -> dict[str, Finish]:
    """Return when each row with a step time reaches a target."""
    times_s = {
        name: [step_s[name] * steps_to(curve.losses, target) if curve else math.inf for curve in result.curves]
        for name, result in results.items()
        if name in step_s
    }
    first_s = statistics.fmean(times_s[FP32])
    return {name: Finish(times, [first_s / time_s for time_s in times]) for name, times in times_s.items()}


def tabulate_times(results: Mapping[str, Result], step_s: Mapping[str, float], targets: Sequence[float]) -> script.Table:
    """Return step times, times to the first target and speed-ups to all with the interval of the mean, and losses at equal time.

    A run that has ended by then counts with its final loss.
    """
    end_s = results[FP32].steps * step_s[FP32]
    columns = [f"speed-up to {target:.3f}" for target in targets]
    table = script.table("", "ms per step", f"loss after {end_s:.0f} s", f"s to {targets[0]:.3f}", *columns, "setting")
    ends = [finishes(results, step_s, target) for target in targets]
    for name, result in results.items():
        if name not in step_s:
            continue
        at_end = [loss_at(curve.losses, end_s / step_s[name]) if curve else math.nan for curve in result.curves]
        table.add_row(
            name,
            script.ms(step_s[name]),
            "diverged" if any(map(math.isnan, at_end)) else seeds.spread(at_end).text(3),
            _mean(ends[0][name].times_s, 0),
            *(_mean(of[name].speedups, 2) for of in ends),
            f"{result.setting}, {result.steps} steps",
        )
    return table


def _mean(values: list[float], digits: int) -> str:
    """Return the mean and the half of its interval; if only some runs reach the target, how many, and "never" if none do."""
    reached = [value for value in values if math.isfinite(value) and value]
    if not reached:
        return "never"
    if len(reached) < len(values):
        return f"{len(reached)} of {len(values)} seeds"
    spread = seeds.spread(values)
    return f"{spread.mean:.{digits}f}" + (f" ± {spread.error:.{digits}f}" if spread.size > 1 else "")


def ranked(ends: Mapping[str, Finish]) -> list[str]:
    """Return the rows that reach the target, the fastest first."""
    return sorted((name for name in ends if ends[name].reached), key=lambda name: statistics.fmean(ends[name].times_s))


def leaders(ends: Mapping[str, Finish]) -> list[str]:
    """Return the first row, and the fastest of each family and optimizer."""
    every, lead = ROWS | PEERS, dict[tuple[str, str], str]()
    for name in ranked(ends):
        if name != FP32:
            lead.setdefault((every[name].family, every[name].optimizer), name)
    return [FP32, *lead.values()]


# -- Against bandwidth ------------------------------------------------------------------------------------------------


class Crossover(NamedTuple):
    """Bandwidth above which the first of two rows is no longer faster, in Mbit/s, with an interval; nan: at no measured rate."""

    at: float
    low: float
    high: float


def crossover(rates: Sequence[float], ratios: Sequence[float], error: float) -> Crossover:
    """Return where a ratio of times, which grows with the bandwidth, passes 1.

    Args:
        rates: bandwidths, ascending.
        ratios: time of the first row ÷ time of the second at each rate.
        error: relative error of the ratios, which gives the interval.
    """

    def passes(factor: float) -> float:
        for (rate, ratio), (next_rate, next_ratio) in itertools.pairwise(zip(rates, ratios, strict=True)):
            before, after = math.log(ratio * factor), math.log(next_ratio * factor)
            if before < 0 <= after:
                share = before / (before - after)
                return math.exp(math.log(rate) + share * (math.log(next_rate) - math.log(rate)))
        return math.nan

    return Crossover(passes(1.0), passes(1.0 + error), passes(1.0 - error))


def tabulate_crossovers(results: Mapping[str, Result], times: StepTimes, names: Sequence[str], target: float) -> script.Table:
    """Return for each pair of rows which is faster to the target at the slowest and the fastest rate, and where they are equal."""
    rates = times.rates
    ends = {rate: finishes(results, times.at(rate), target) for rate in rates}
    megabits = [bytes_per_s(rate) * 8e-6 for rate in rates]
    table = script.table(
        "", "", f"faster at {readable(rates[0])}", f"faster at {readable(rates[-1])}", "equal at, Mbit/s", "interval", left=4
    )
    for one, other in itertools.combinations(names, 2):
        spreads = [[seeds.spread(ends[rate][name].times_s) for rate in rates] for name in (one, other)]
        ratios = [first.mean / second.mean for first, second in zip(*spreads, strict=True)]
        errors = [math.hypot(*(each.error / each.mean for each in pair)) for pair in zip(*spreads, strict=True)]
        error = max((error for error in errors if math.isfinite(error)), default=0.0)
        found = crossover(megabits, ratios, error) if ratios[0] < 1 else crossover(megabits, [1 / ratio for ratio in ratios], error)
        faster = [one if ratio < 1 else other for ratio in (ratios[0], ratios[-1])]
        numbers = [f"{value:.0f}" if math.isfinite(value) else "—" for value in found]
        table.add_row(one, other, *faster, numbers[0], f"{numbers[1]} to {numbers[2]}" if numbers[0] != "—" else "")
    return table


def draw_bandwidths(path: str, results: Mapping[str, Result], times: StepTimes, names: Sequence[str], target: float) -> None:
    """Draw the time to the target against bandwidth: measured points on predicted lines."""
    megabits = [bytes_per_s(rate) * 8e-6 for rate in times.rates]
    steps = {name: statistics.fmean(steps_to(curve.losses, target) for curve in results[name].ended) for name in names}
    with script.panels(path, 1, (7.0, 4.6), "lower is better; points: measured, lines: predicted") as (axis,):
        for name in names:
            style = _style(name)
            measured_s = [steps[name] * times.at(rate)[name] for rate in times.rates]
            predicted_s = [steps[name] * times.predicted_s(name, rate) for rate in times.rates]
            axis.plot(megabits, predicted_s, linewidth=1.2, **style)
            axis.plot(megabits, measured_s, "o", markersize=5, color=style["color"])
            axis.annotate(
                name, (megabits[0], measured_s[0]), xytext=(-6, 0), textcoords="offset points", ha="right", va="center", fontsize=8
            )
        axis.set(xscale="log", yscale="log", xlabel="bandwidth of each host, Mbit/s", ylabel=f"seconds to a loss of {target:.3f}")
        axis.set_xlim(left=megabits[0] / 8)  # Room for the names.


# -- Figures ----------------------------------------------------------------------------------------------------------


def _style(name: str) -> dict[str, Any]:
    """Return the color of a row's family, and a dashed line for optimizers other than AdamW."""
    row = (ROWS | PEERS)[name]
    return {
        "color": "0.2" if name == FP32 else FAMILY_COLORS[row.family],
        "linestyle": "-" if row.optimizer == race_rows.ADAMW else "--",
    }


def draw(path: str, unit: str, results: Mapping[str, Result], times: StepTimes, rate: str, target: float) -> None:
    """Draw losses against time of the leaders, and the speed-ups of all rows to a target, also with jitter where it was measured."""
    step_s = times.at(rate)
    panels = [finishes(results, step_s, target)]
    if jitter_s := times.with_jitter():
        panels.append(finishes(results, jitter_s, target))
    caption = "lower is better (lines); longer is better (bars)"
    with script.panels(path, 1 + len(panels), (6.0, 4.0 * (1 + len(panels))), caption, stacked=True) as axes:
        for name in leaders(panels[0]):
            curve = results[name].ended[0]
            x_s = [step_s[name] * step for step, _ in curve.losses]
            axes[0].plot(x_s, [loss for _, loss in curve.losses], linewidth=1.7, label=name, **_style(name))
        axes[0].axhline(target, color="0.5", linewidth=0.8, linestyle=":")
        axes[0].set(xscale="log", xlabel=f"seconds of training at {readable(rate)}", ylabel=f"validation loss, {unit}")
        axes[0].set_ylim(top=min(axes[0].get_ylim()[1], 2.5 * target))
        axes[0].legend(frameon=False)
        for axis, ends, suffix in zip(axes[1:], panels, ("", ", with compute jitter")):
            _bars(axis, ends)
            axis.set(xlabel=f"speed-up over {FP32} to {target:.3f} {unit}{suffix}")


def _bars(axis: Any, ends: Mapping[str, Finish]) -> None:
    """Draw the speed-ups of all rows that reach the target as bars, the fastest at the top."""
    names = ranked(ends)
    spreads = [seeds.spread(ends[name].speedups) for name in names]
    axis.barh(
        range(len(names)),
        [each.mean for each in spreads],
        xerr=[each.error if each.size > 1 else 0.0 for each in spreads],
        color=[_style(name)["color"] for name in names],
        height=0.7,
        error_kw=dict(linewidth=1, ecolor="0.3"),
    )
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.axvline(1.0, color="0.3", linewidth=0.8)


def measured(path: str, command: str) -> dict[str, Any]:
    """Return what a command has measured, from its file."""
    try:
        return files.read_json(pathlib.Path(path))
    except ValueError as error:
        raise trials.Broken(f"{path} cannot be read ({error}); give a file of {command}") from error


def peer_results(path: str | None) -> dict[str, Result]:
    """Return the results of the rows of PyTorch in a file of `experiments.race_peers`; {} without one."""
    return {name: Result.of(document) for name, document in measured(path, "experiments.race_peers").items()} if path else {}


def main() -> None:
    out = script.folder() / FLAGS.task
    script.check_names("row", FLAGS.row, ROWS)
    if FLAGS.task == "translation" and not FLAGS.multi30k:
        command.fail("--multi30k is missing; give the folder of Multi30k's parallel files")
    if FLAGS.task != "translation" and FLAGS.multi30k:
        command.fail(f"--multi30k={FLAGS.multi30k} has no effect with --task={FLAGS.task}; leave it out")
    task, log = race_rows.TASKS[FLAGS.task], ResultsLog.of(out, FLAGS.results, trials.Pool(FLAGS.together))
    times, peers = StepTimes.read(FLAGS.step_times) if FLAGS.step_times else None, peer_results(FLAGS.peer_results)
    race = Race(task, 1 if FLAGS.smoke else FLAGS.seeds, FLAGS.smoke, out=out, log=log, data=FLAGS.multi30k or "")
    results = race.results(FLAGS.row or (SMOKE_ROWS if FLAGS.smoke else ROWS)) | peers
    script.report(f"race_{FLAGS.task}_tuning", tabulate(task, results, race.targets(results[FP32])))
    for name, (table, draw) in (figures(race, results, times) if times else {}).items():
        script.show(table)
        script.publish(name, table, draw)


def figures(race: Race, results: Mapping[str, Result], times: StepTimes) -> dict[str, tuple[script.Table, Callable[[str], None]]]:
    """Return the tables with times and what draws their figures, by name."""
    task, targets = race.task, race.targets(results[FP32])
    step_s, name = times.at(task.rate), pathlib.Path(task.config).stem
    lead = [
        row for row in leaders(finishes(results, step_s, targets[0])) if all(row in times.measured[rate] for rate in times.rates)
    ]
    return {
        f"race_{name}": (
            tabulate_times(results, step_s, targets),
            lambda path: draw(path, task.unit, results, times, task.rate, targets[0]),
        ),
        f"race_{name}_bandwidth": (
            tabulate_crossovers(results, times, lead, targets[0]),
            lambda path: draw_bandwidths(path, results, times, lead, targets[0]),
        ),
    }


if __name__ == "__main__":
    script.define("out", "row", "results", "pages", "smoke")
    flags.DEFINE_enum("task", "lm", list(race_rows.TASKS), "Task to learn.")
    flags.DEFINE_string("step_times", None, "File of experiments.race_steps; none: loss against steps only.")
    flags.DEFINE_string("peer_results", None, "File of experiments.race_peers; none: without the rows of PyTorch.")
    flags.DEFINE_string("multi30k", None, "Folder of Multi30k's parallel files, for --task=translation.")
    flags.DEFINE_integer("seeds", race_rows.SEEDS, "Runs of each row.", lower_bound=1)
    flags.DEFINE_integer("together", trials.TOGETHER, "Runs at a time.", lower_bound=1)
    script.run(main, sweep.ERRORS)
