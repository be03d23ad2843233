"""Rows and tasks of the race, and how a row is tuned and trained alike, whichever system runs it; see `experiments.race`."""

import abc
from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

from experiments import seeds, trials

TUNING_SEED, SEEDS = 99, 3
LENGTHS = (1.0, 1.5, 2.0)  # of a row's runs, relative to the first row's
FINE = 2**0.5  # ratio of the last learning rates that are tried

REDUCE, LOCAL, GOSSIP, PYTORCH = "all-reduce", "local steps", "gossip", "PyTorch"  # families, each with a color
FP32 = "all-reduce fp32"
ONE_PEER, INT4 = "topology=one_peer_exponential", "reducer=codec,codec=int4"
ADAMW, MUON = "adamw", "muon"
JITTER = "jitter"  # in files of step times: instead of a rate, and at the end of names of rows
OUTER = ("0.5, 0.5", "1.0, 0.0", "0.7, 0.9")  # rate and momentum of an outer step


class Row(NamedTuple):
    """A method of the race.

    Attributes:
        shorthand: of a config file; of PyTorch, the name of a method of `experiments.bench.cluster.torch_train`.
        family: one of `REDUCE`, `LOCAL`, `GOSSIP` and `PYTORCH`.
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
PEERS = {
    "PyTorch DDP fp32": Row("ddp", PYTORCH),
    "PyTorch DDP fp16": Row("float16", PYTORCH),
    "PyTorch DDP, PowerSGD rank 4": Row("power_sgd", PYTORCH),
    "decent-dp one-peer exponential": Row("decent_dp", PYTORCH),
    "torchft DiLoCo, H = 16": Row("diloco", PYTORCH, outer=OUTER),
}


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
        target: the loss that decides; nan: that of the first row at the end.
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
    target: float = math.nan
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
        target=1.10,
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

    @property
    def fields(self) -> dict[str, float]:
        """The fields of a config that it sets."""
        outer = map(float, filter(None, self.outer.split(", ")))
        return dict(zip(("schedule.learning_rate", "method.outer_learning_rate", "method.outer_momentum"), (self.rate, *outer)))


class Curve(NamedTuple):
    """The result of a run."""

    steps: int
    losses: list[tuple[int, float]]  # (step, validation loss of the averaged model)
    sent: float | None = None  # bytes per worker and step
    score: float | None = None

    @property
    def last(self) -> float:
        """The final loss."""
        return self.losses[-1][1]


class Result(NamedTuple):
    """Results of a row."""

    setting: Setting
    tried: dict[str, float]  # the loss with each setting
    steps: int
    curves: list[Curve | None]  # one for each seed; None: it diverged

    @property
    def ended(self) -> list[Curve]:
        """The runs that did not diverge."""
        return [curve for curve in self.curves if curve]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Result":
        """Return a result from JSON."""
        curves = [curve and Curve(curve[0], [(step, loss) for step, loss in curve[1]], *curve[2:]) for curve in document["curves"]]
        return cls(Setting(*document["setting"]), document["tried"], document["steps"], curves)


def steps_to(losses: Sequence[tuple[int, float]], target: float) -> float:
    """Return after how many steps the loss stays below the target, interpolated between evaluations; infinite: never.

    A single good evaluation among worse ones does not count: losses of small models vary between evaluations.
    """
    above = [k for k, (_, loss) in enumerate(losses) if loss > target]
    if not above:
        return losses[0][0]
    if above[-1] + 1 == len(losses):
        return math.inf
    (before, high), (after, low) = losses[above[-1] : above[-1] + 2]
    return before + (high - target) / (high - low) * (after - before)


def loss_at(losses: Sequence[tuple[int, float]], step: float) -> float:
    """Return the loss at a step, interpolated between evaluations."""
    before = max((each for each in losses if each[0] <= step), default=losses[0])
    after = min((each for each in losses if each[0] >= step), default=losses[-1])
    share = (step - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
    return before[1] + share * (after[1] - before[1])


@dataclasses.dataclass(frozen=True)
class Runs(abc.ABC):
    """The runs of a task."""

    task: Task
    seeds: int = SEEDS  # runs of each row
    smoke: bool = False  # tiny models, few steps, one rate

    @abc.abstractmethod
    def curve(self, name: str, setting: Setting, seed: int, steps: int) -> Curve | None:
        """Return the result of a run, which is trained if it is missing; None if it diverged."""

    @property
    def steps(self) -> int:
        """Steps of the first row."""
        return 10 if self.smoke else self.task.steps

    def tune(self, name: str) -> tuple[Setting, dict[Setting, float]]:
        """Return the best setting, and the loss of each that was tried, infinite if it diverged."""
        row, tried = (ROWS | PEERS)[name], {}
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

    def reaches(self, name: str, setting: Setting, steps: int, target: float) -> bool:
        """Return whether all runs of a row that do not diverge reach the target in so many steps; the first that misses it is the last."""
        curves = (self.curve(name, setting, seed, steps) for seed in range(self.seeds))
        return all(curve is None or steps_to(curve.losses, target) < math.inf for curve in curves)

    def targets(self, first: Result) -> tuple[float, float]:
        """Return the task's target and the first row's final loss; without a target, its losses at the end and after half of its steps.

        Losses of the first row are the largest over its seeds.
        """
        if not first.ended:
            raise trials.Broken(f"all runs of {FP32} diverged, so there is no target; use smaller learning rates")
        final = max(curve.last for curve in first.ended)
        if self.smoke or math.isnan(self.task.target):
            return final, max(loss_at(curve.losses, self.steps / 2) for curve in first.ended)
        return self.task.target, final

    def result(self, name: str, target: float = math.inf) -> Result:
        """Tune a row and train it with its seeds, for the fewest steps with which all of them reach the target."""
        setting, tried = self.tune(name)
        lengths = LENGTHS[:1] if self.smoke or name == FP32 else LENGTHS
        steps = next(
            (steps for steps in (round(length * self.steps) for length in lengths) if self.reaches(name, setting, steps, target)),
            round(lengths[-1] * self.steps),
        )
        curves = [self.curve(name, setting, seed, steps) for seed in range(self.seeds)]
        return Result(setting, {str(setting): loss for setting, loss in tried.items()}, steps, curves)
