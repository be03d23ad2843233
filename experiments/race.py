"""The race: which method reaches a loss first on a slow network, with every method tuned alike.

    python -m experiments.race --task=lm --out=runs/race
    python -m experiments.race --task=translation --multi30k=data/multi30k --out=runs/race
    python -m experiments.race --task=lm --out=runs/race --smoke

Four workers, one per emulated host. Time to target is the product of two measurements, each of which has its own file of results:

1. *Loss against steps*, from simulated workers: the arithmetic of real ones, without a network. `--results` is the results log. Every
   row is tuned alike in shorter runs with a separate seed: three learning rates, further ones while the best is at an edge, then the
   row's other options, then rates √2 below and above the best. The best setting is trained with each seed. A row that does not reach
   the target is trained for 1.5 and then 2 times as many steps.
2. *Seconds per step*, from real processes on the emulated cluster, measured by `experiments.race_steps` at several bandwidths and
   added to TASK_steps.json.

The targets are losses of the first row, fp32 all-reduce: its final loss and its loss after half of the steps, of the worst seed, so
that all of its seeds reach them. Without `--step_times`, the file of the second measurement, the command ends with losses and steps.
"""

from collections.abc import Mapping
import math
import pathlib
import statistics
from typing import Any, NamedTuple

from absl import flags

from decjax import files
from experiments import curves, script, seeds, sweep, trials
from experiments.methods import HOSTS
from experiments.results_log import ResultsLog
from launch import command

FLAGS = flags.FLAGS

TUNING_SEED, SEEDS = 99, 3
LENGTHS = (1.0, 1.5, 2.0)  # of a row's runs, relative to the first row's
FINE = 2**0.5  # ratio of the last learning rates that are tried

REDUCE, LOCAL, GOSSIP = "all-reduce", "local steps", "gossip"  # families, each with a color
FAMILY_COLORS = {REDUCE: script.COLORS[1], LOCAL: script.COLORS[2], GOSSIP: script.COLORS[0]}
FP32 = "all-reduce fp32"
ONE_PEER, INT4 = "topology=one_peer_exponential", "reducer=codec,codec=int4"
ADAMW, MUON = "adamw", "muon"
OUTER = ("0.5, 0.5", "1.0, 0.0", "0.7, 0.9")  # rate and momentum of an outer step


class Row(NamedTuple):
    """A method of the race.

    Attributes:
        shorthand: of a config file.
        family: one of `REDUCE`, `LOCAL` and `GOSSIP`.
        optimizer: comparisons are within one optimizer.
        outer: rates and momenta of its outer step that are tried; (): it has none.
    """

    shorthand: str
    family: str
    optimizer: str = ADAMW
    outer: tuple[str, ...] = ()


ROWS = {
    FP32: Row("method=allreduce", REDUCE),
    "all-reduce bf16": Row("method=allreduce,reducer=codec,codec=bfloat16", REDUCE),
    "all-reduce int8": Row("method=allreduce,reducer=codec,codec=int8", REDUCE),
    "PowerSGD, rank 4": Row("method=allreduce,reducer=powersgd,rank=4", REDUCE),
    "PowerSGD, rank 32": Row("method=allreduce,reducer=powersgd,rank=32", REDUCE),
    "0/1 Adam": Row("method=zero_one_adam", REDUCE),
    "all-reduce, one step stale": Row("method=allreduce,stale", REDUCE),
    "gossip fp32": Row(ONE_PEER, GOSSIP),
    "gossip bf16": Row(f"{ONE_PEER},codec=bfloat16", GOSSIP),
    "gossip int8": Row(f"{ONE_PEER},codec=int8", GOSSIP),
    "gossip int4, CHOCO": Row(f"{ONE_PEER},mixer=choco,codec=int4", GOSSIP),
    "gossip int8, AccumAdamW": Row(f"{ONE_PEER},codec=int8,optimizer=accum_adamw", GOSSIP),
    "DiLoCo int4, H = 4": Row(f"method=diloco,every=4,{INT4}", LOCAL, outer=OUTER),
    "DiLoCo int4, H = 16": Row(f"method=diloco,every=16,{INT4}", LOCAL, outer=OUTER),
    "all-reduce fp32, Muon": Row("method=allreduce,optimizer=muon", REDUCE, MUON),
    "all-reduce int8, Muon": Row("method=allreduce,reducer=codec,codec=int8,optimizer=muon", REDUCE, MUON),
    "gossip int8, Muon": Row(f"{ONE_PEER},codec=int8,optimizer=muon", GOSSIP, MUON),
    "MuLoCo int4, H = 4": Row(f"method=diloco,every=4,{INT4},optimizer=muon", LOCAL, MUON, OUTER),
    "MuLoCo int4, H = 16": Row(f"method=diloco,every=16,{INT4},optimizer=muon", LOCAL, MUON, OUTER),
}


SMOKE_ROWS = ("gossip int8", "MuLoCo int4, H = 4")


class Task(NamedTuple):
    """A task of the race.

    Attributes:
        config: the config file.
        batch_size: examples per step, of all workers together.
        steps: of fp32 all-reduce.
        tuning_steps: of the runs that tune.
        every: steps between evaluations.
        rates: learning rates that are tried first, by optimizer.
        rate: of the links, for the headline.
        unit: of the loss.
        fields: further fields of the config.
        score: entry of the summary for the score on test data; empty: none.
    """

    config: str
    batch_size: int
    steps: int
    tuning_steps: int
    every: int
    rates: Mapping[str, tuple[float, ...]]
    rate: str
    unit: str
    fields: Mapping[str, Any] = {}
    score: str = ""


TASKS = {
    "lm": Task(
        "configs/lm.py",
        batch_size=16,
        steps=2500,
        tuning_steps=800,
        every=50,
        rates={ADAMW: (8e-3, 1.6e-2, 3.2e-2), MUON: (2e-2, 4e-2, 8e-2)},
        rate="20mbit",
        unit="nats/byte",
        fields={"data.sample_bytes": 0},
    ),
    "translation": Task(
        "configs/translation.py",
        batch_size=32,
        steps=1500,
        tuning_steps=500,
        every=50,
        rates={ADAMW: (2e-3, 4e-3, 8e-3), MUON: (5e-3, 1e-2, 2e-2)},
        rate="100mbit",
        unit="nats/token",
        score="eval_bleu",
    ),
}


class Setting(NamedTuple):
    """What tuning decides."""

    rate: float
    outer: str = ""  # "rate, momentum"

    def __str__(self) -> str:
        return f"{self.rate:.3g}" + (f" ({self.outer})" if self.outer else "")


class Curve(NamedTuple):
    """The result of a run."""

    steps: int
    losses: list[tuple[int, float]]  # (step, validation loss of the averaged model)
    sent: float  # bytes per worker and step
    score: float | None = None

    @property
    def last(self) -> float:
        """The final loss."""
        return self.losses[-1][1]


def read(run: trials.Trial) -> dict[str, Any]:
    """Return the entry of a run in the results log."""
    summary = run.summary()
    scores = {name: value for name, value in summary.items() if name == "eval_bleu"}
    losses = [(row["step"], round(row["loss"], 5)) for row in run.rows("eval")]
    return {"losses": losses, "eval_loss": summary["eval_loss"], "bytes": summary["bytes_per_step_per_worker"], **scores}


def steps_to(losses: list[tuple[int, float]], target: float) -> float:
    """Return the step after which the loss stays below the target, as `curves.reached`; infinite: never."""
    points = [curves.Point(step, 0.0, loss) for step, loss in losses]
    step = curves.reached(points, target, lambda point: point.step)
    return math.inf if math.isnan(step) else step


class Race(NamedTuple):
    """The runs of a task."""

    task: Task
    out: pathlib.Path
    log: ResultsLog
    data: str  # path; empty: the task's own
    smoke: bool  # tiny models, few steps, one rate
    seeds: int = SEEDS  # runs of each row

    @property
    def steps(self) -> int:
        """Steps of the first row."""
        return 10 if self.smoke else self.task.steps

    def curve(self, name: str, setting: Setting, seed: int, steps: int) -> Curve | None:
        """Return the result of a run, which is trained if it is missing; None if it diverged."""
        task = self.task
        shorthand = f"{ROWS[name].shorthand},workers={HOSTS},simulate,steps={steps}" + ",smoke" * self.smoke
        fields = {"schedule.learning_rate": setting.rate, "seed": seed, "batch_size": task.batch_size, **task.fields}
        fields |= {"eval.every": 5 if self.smoke else task.every, "eval.local": False, "checkpoint.every": 10**9}
        for option, value in zip(("learning_rate", "momentum"), setting.outer.split(", ") if setting.outer else ()):
            fields[f"method.outer_{option}"] = float(value)
        if self.data:
            fields["data.path"] = self.data
        run = trials.trial(self.out, f"{name} {setting} {seed} {steps}", f"{task.config}:{shorthand}", fields)
        numbers = self.log.result(run, read)
        return None if numbers is None else Curve(steps, numbers["losses"], numbers["bytes"], numbers.get(task.score))

    def tune(self, name: str) -> tuple[Setting, dict[Setting, float]]:
        """Return the best setting, and the loss of each that was tried, infinite if it diverged."""
        row, tried = ROWS[name], {}
        steps = self.steps if self.smoke else self.task.tuning_steps

        def measure(rate: float, outer: str) -> float:
            setting = Setting(float(f"{rate:.3g}"), outer)
            if setting not in tried:
                curve = self.curve(name, setting, TUNING_SEED, steps)
                tried[setting] = curve.last if curve else math.inf
            return tried[setting]

        first = row.outer[0] if row.outer else ""
        grid = self.task.rates[row.optimizer]
        rate, _ = seeds.best_rate(lambda rate: measure(rate, first), grid[:1] if self.smoke else grid)
        if not self.smoke:
            outer = min(row.outer or [""], key=lambda outer: measure(rate, outer))
            for factor in (1 / FINE, FINE):
                measure(rate * factor, outer)
        return min(tried, key=lambda setting: tried[setting]), tried

    def ends(self, name: str, setting: Setting, steps: int, target: float) -> bool:
        """Return whether the first seed of a row reaches the target in so many steps, or diverges."""
        first = self.curve(name, setting, 0, steps)
        return first is None or steps_to(first.losses, target) < math.inf

    def targets(self, results: Mapping[str, "Result"]) -> tuple[float, float]:
        """Return the losses that the first row has at the end and after half of its steps, the largest over its seeds."""
        first = [curve for curve in results[FP32].curves if curve]
        if not first:
            raise trials.Broken(f"all runs of {FP32} diverged, so there is no target; use smaller learning rates")
        return max(curve.last for curve in first), max(loss_at(curve.losses, self.steps / 2) for curve in first)

    def result(self, name: str, target: float = math.inf) -> "Result":
        """Tune a row and train it with its seeds, for the fewest steps with which its first seed reaches the target."""
        setting, tried = self.tune(name)
        lengths = LENGTHS[:1] if self.smoke or name == FP32 else LENGTHS
        steps = next(
            (steps for steps in (round(length * self.steps) for length in lengths) if self.ends(name, setting, steps, target)),
            round(lengths[-1] * self.steps),
        )
        return Result(setting, tried, steps, [self.curve(name, setting, seed, steps) for seed in range(self.seeds)])


class Result(NamedTuple):
    """Results of a row."""

    setting: Setting
    tried: dict[Setting, float]
    steps: int
    curves: list[Curve | None]  # one for each seed; None: it diverged


def loss_at(losses: list[tuple[int, float]], step: float) -> float:
    """Return the loss at a step, interpolated between evaluations."""
    before = max((each for each in losses if each[0] <= step), default=losses[0])
    after = min((each for each in losses if each[0] >= step), default=losses[-1])
    share = (step - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
    return before[1] + share * (after[1] - before[1])


def tabulate(race: Race, results: Mapping[str, Result]) -> script.Table:
    """Return the losses of all rows and their steps to the targets."""
    targets = race.targets(results)
    columns = ("bytes per step", "steps", f"final {race.task.unit}", *(f"steps to {target:.3f}" for target in targets))
    table = script.table("", *columns, "setting", "tried")
    for name, result in results.items():
        ended = [curve for curve in result.curves if curve]
        table.add_row(
            name,
            f"{ended[0].sent:,.0f}" if ended else "",
            str(result.steps),
            seeds.spread([curve.last for curve in ended]).text(3) if len(ended) == len(result.curves) else "diverged",
            *(", ".join(_steps(steps_to(curve.losses, target)) for curve in ended) for target in targets),
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


def step_times(path: str, rate: str) -> dict[str, float]:
    """Return the median seconds per step of each row at a rate, as `experiments.race_steps` measured them."""
    measured = files.read_json(pathlib.Path(path))
    if rate not in measured:
        raise trials.Broken(
            f"{path} has no step times at {rate}, only at {', '.join(measured)}; measure them with experiments.race_steps"
        )
    return {name: statistics.median(numbers["step_s"]) for name, numbers in measured[rate].items()}


def finishes(results: Mapping[str, Result], step_s: Mapping[str, float], target: float) -> dict[str, Finish]:
    """Return when each row with a step time reaches a target."""
    times_s = {
        name: [step_s[name] * steps_to(curve.losses, target) if curve else math.inf for curve in result.curves]
        for name, result in results.items()
        if name in step_s
    }
    first_s = statistics.fmean(times_s[FP32])
    return {name: Finish(times, [first_s / time_s for time_s in times]) for name, times in times_s.items()}


def tabulate_times(race: Race, results: Mapping[str, Result], step_s: Mapping[str, float]) -> script.Table:
    """Return step times, times to both targets with the interval of the mean, and losses at equal time."""
    targets = race.targets(results)
    end_s = race.steps * step_s[FP32]
    columns = [f"speed-up to {target:.3f}" for target in targets]
    table = script.table("", "ms per step", f"loss after {end_s:.0f} s", "time to target, s", *columns, "setting")
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
            *(_mean(of[name].speedups, 2) if of[name].reached else "never" for of in ends),
            f"{result.setting}, {result.steps} steps",
        )
    return table


def _mean(values: list[float], digits: int) -> str:
    """Return the mean and the half of its interval; "never" if a value is infinite."""
    if not values or not all(map(math.isfinite, values)):
        return "never"
    spread = seeds.spread(values)
    return f"{spread.mean:.{digits}f}" + (f" ± {spread.error:.{digits}f}" if spread.size > 1 else "")


def _color(name: str) -> str:
    return "0.2" if name == FP32 else FAMILY_COLORS[ROWS[name].family]


def draw(path: str, race: Race, results: Mapping[str, Result], step_s: Mapping[str, float]) -> None:
    """Draw the loss against time of the fastest row of each family and optimizer, and the speed-up of all rows to the first target."""
    target, _ = race.targets(results)
    ends = finishes(results, step_s, target)
    ranked = sorted((name for name in ends if ends[name].reached), key=lambda name: statistics.fmean(ends[name].times_s))
    lead: dict[tuple[str, str], str] = {}
    for name in (FP32, *ranked):
        lead.setdefault((ROWS[name].family, ROWS[name].optimizer) if name != FP32 else ("", ""), name)
    with script.panels(path, 2, (11.0, 4.8), "lower is better (left); longer is better (right)") as (lines, bars):
        for name in lead.values():
            curve = next(curve for curve in results[name].curves if curve)
            x_s = [step_s[name] * step for step, _ in curve.losses]
            style = dict(color=_color(name), linestyle="-" if ROWS[name].optimizer == ADAMW else "--")
            lines.plot(x_s, [loss for _, loss in curve.losses], linewidth=1.7, label=name, **style)
        lines.axhline(target, color="0.5", linewidth=0.8, linestyle=":")
        lines.set(xscale="log", xlabel="seconds of training", ylabel=f"validation loss, {race.task.unit}")
        lines.set_ylim(top=min(lines.get_ylim()[1], 2.5 * target))
        lines.legend(frameon=False, fontsize=8)
        means = [statistics.fmean(ends[name].speedups) for name in ranked]
        errors = [0.0 if len(ends[name].speedups) < 2 else seeds.spread(ends[name].speedups).error for name in ranked]
        colors = [_color(name) for name in ranked]
        bars.barh(range(len(ranked)), means, xerr=errors, color=colors, height=0.7, error_kw=dict(linewidth=1, ecolor="0.3"))
        bars.set_yticks(range(len(ranked)), ranked, fontsize=8)
        bars.invert_yaxis()
        bars.axvline(1.0, color="0.3", linewidth=0.8)
        bars.set(xlabel=f"speed-up over {FP32} to a loss of {target:.3f}")


def main() -> None:
    out = script.folder() / FLAGS.task
    script.check_names("row", FLAGS.row, ROWS)
    if FLAGS.task == "translation" and not FLAGS.multi30k:
        command.fail("--multi30k is missing; give the folder of Multi30k's parallel files")
    chosen = FLAGS.row or (SMOKE_ROWS if FLAGS.smoke else ROWS)
    names = [name for name in ROWS if name == FP32 or name in chosen]
    if FLAGS.task != "translation" and FLAGS.multi30k:
        command.fail(f"--multi30k={FLAGS.multi30k} has no effect with --task={FLAGS.task}; leave it out")
    task, log = TASKS[FLAGS.task], ResultsLog.of(out, FLAGS.results, trials.Pool(FLAGS.together))
    step_s = step_times(FLAGS.step_times, task.rate) if FLAGS.step_times else {}
    race = Race(task, out, log, FLAGS.multi30k or "", FLAGS.smoke, 1 if FLAGS.smoke else FLAGS.seeds)
    results = {FP32: race.result(FP32)}
    target, _ = race.targets(results)
    others = race.log.pool.map(lambda name: race.result(name, target), names[1:])
    results |= dict(zip(names[1:], others, strict=True))
    script.show(tabulate(race, results))
    if not step_s:
        return
    table = tabulate_times(race, results, step_s)
    script.show(table)
    rows = {
        name: result._asdict() | {"tried": {str(key): loss for key, loss in result.tried.items()}}
        for name, result in results.items()
    }
    script.publish(f"race_{FLAGS.task}", table, lambda path: draw(path, race, results, step_s), step_s=step_s, **rows)


if __name__ == "__main__":
    script.define("out", "row", "results", "pages", "smoke")
    flags.DEFINE_enum("task", "lm", list(TASKS), "Task to learn.")
    flags.DEFINE_string("step_times", None, "File of experiments.race_steps; none: loss against steps only.")
    flags.DEFINE_string("multi30k", None, "Folder of Multi30k's parallel files, for --task=translation.")
    flags.DEFINE_integer("seeds", SEEDS, "Runs of each row.", lower_bound=1)
    flags.DEFINE_integer("together", trials.TOGETHER, "Runs at a time.", lower_bound=1)
    script.run(main, sweep.ERRORS)
