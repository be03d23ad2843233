"""Quality at equal tokens (arXiv 2410.11998, Tables 2 and 3, in kind): is gossip as good as all-reduce after as many tokens?

16 simulated workers in nodes of four. All methods mix while they compute (order "awc"). Each has the rate that was best of its
grid in a run with a seed of its own; a grid whose best is at its edge is extended. Then the seeds.
"""

import math
import pathlib
import statistics
from typing import NamedTuple

from experiments import script, trials
from experiments.trials import Spread, Trial

WORKERS, NODE, WINDOW = 16, 4, 8
LEAD, OTHERS = 3, 1  # seeds of the rows that the claim is about, and of the others
TUNING_SEED = 99
GRAPHS = {"complete": "complete", "AER": "alternating_exponential_ring", "one-peer": "one_peer_exponential"}
ACCUM = f"accum_adamw(window={WINDOW})"


class Method(NamedTuple):
    """A row: its shorthand and how many seeds it has."""

    shorthand: str
    seeds: int


ALL_REDUCE = "all-reduce, AdamW"
METHODS = {
    ALL_REDUCE: Method("method=allreduce,optimizer=adamw", LEAD),
    **{f"D-Adam, {name}": Method(f"topology={graph}", OTHERS if name == "complete" else LEAD) for name, graph in GRAPHS.items()},
    **{
        f"AccumAdam, {name}": Method(f"topology={graph},optimizer={ACCUM}", OTHERS if name == "complete" else LEAD)
        for name, graph in GRAPHS.items()
    },
}


class Study(NamedTuple):
    """A task on which the methods are compared."""

    config: str  # config file
    metric: str  # of summary.json
    unit: str
    higher: bool  # whether more is better
    grid: tuple[float, ...]  # learning rates
    steps: int
    fields: dict[str, object]
    data: str = ""  # flag with the data's path; "": none is needed
    tuned_on: str = "eval_loss"  # less is better: rates are not chosen by what the table shows of the test set


STUDIES = {
    "translation": Study("configs/translation.py", "eval_bleu", "BLEU", True, (2e-3, 4e-3, 8e-3), 2000, {}, "multi30k"),
    "cifar": Study(
        "configs/cifar.py", "eval_accuracy", "accuracy", True, (4e-3, 8e-3, 1.6e-2), 1000, {"data.validation": 0.1}, "cifar10"
    ),
    "digits": Study("configs/digits.py", "eval_accuracy", "accuracy", True, (1e-2, 2e-2, 4e-2), 300, {}),
    "python": Study("configs/lm.py", "eval_loss", "nats/byte", False, (8e-3, 1.6e-2, 3.2e-2), 3000, {}),
    "shakespeare": Study("configs/lm.py", "eval_loss", "nats/byte", False, (8e-3, 1.6e-2, 3.2e-2), 3000, {}, "shakespeare"),
}


class Result(NamedTuple):
    """A row of the table."""

    rate: float
    tried: dict[float, float]  # learning rate -> what it was tuned on
    values: list[float]  # a seed each

    @property
    def spread(self) -> Spread:
        """Mean and σ of the seeds."""
        return trials.spread(self.values)


def trial(out: pathlib.Path, study: str, method: str, rate: float, seed: int, data: str, smoke: bool) -> Trial:
    """One training of a study."""
    given = STUDIES[study]
    size = ["smoke"] if smoke else [f"steps={given.steps}"]
    shorthand = ",".join([METHODS[method].shorthand, f"workers={WORKERS},local_size={NODE},simulate", *size])
    fields = (
        {"schedule.learning_rate": rate, "seed": seed} | ({} if smoke else given.fields) | ({"data.path": data} if data else {})
    )
    name = trials.name_of(f"{method} {rate:.3g} {seed}")
    return Trial(out / study / name, f"{given.config}:{shorthand}", tuple(fields.items()))


def tune(out: pathlib.Path, study: str, method: str, data: str, smoke: bool) -> tuple[float, dict[float, float]]:
    """(best rate, loss of each that was tried); a run that diverged has an infinite one."""

    def measure(rate):
        made = trial(out, study, method, rate, TUNING_SEED, data, smoke)
        return made.summary()[STUDIES[study].tuned_on] if trials.train(made) else math.inf

    return trials.best_rate(measure, STUDIES[study].grid[:1] if smoke else STUDIES[study].grid)


def run(out: pathlib.Path, study: str, data: str, smoke: bool = False) -> dict[str, Result]:
    """Every method's result on a task; with `smoke` two methods, tiny models and one rate."""
    methods = (ALL_REDUCE, "AccumAdam, AER") if smoke else tuple(METHODS)
    tuned = dict(zip(methods, trials.together(lambda method: tune(out, study, method, data, smoke), methods), strict=True))
    of = {
        method: [
            trial(out, study, method, tuned[method][0], seed, data, smoke) for seed in range(1 if smoke else METHODS[method].seeds)
        ]
        for method in methods
    }
    trials.train_all(each for made in of.values() for each in made)
    metric, found = STUDIES[study].metric, {}
    for method, (rate, tried) in tuned.items():
        found[method] = Result(rate, tried, [each.summary()[metric] for each in of[method] if each.finished])
    return found


def verdict(result: Result, reference: Result) -> str:
    """Whether a row equals all-reduce in the sense of these pages."""
    if len(result.values) < 2 or len(reference.values) < 2:
        return "one seed"
    return "equal" if trials.equal(result.spread, reference.spread) else "not equal"


def tabulate(study: str, found: dict[str, Result]):
    """Mean ± 2σ over the seeds, the difference from all-reduce, and the rates that were tried."""
    given, first = STUDIES[study], found[ALL_REDUCE]
    digits = 4 if given.unit != "BLEU" else 2
    table = script.table("", given.unit, "to all-reduce", "", "rate", "rates tried")
    for method, result in found.items():
        same = method == ALL_REDUCE
        table.add_row(
            method,
            result.spread.text(digits) if result.values else "diverged",
            "" if same or not result.values else f"{result.spread.mean - first.spread.mean:+.{digits}f}",
            "" if same or not result.values else verdict(result, first),
            f"{result.rate:.3g}",
            ", ".join(f"{rate:.3g}: {loss:.4f}" for rate, loss in sorted(result.tried.items())),
        )
    return table


def draw(path: str, study: str, found: dict[str, Result]) -> None:
    """A dot for each seed and a bar for the mean, method by method."""
    given = STUDIES[study]
    with script.panels(path, 1, (6.5, 0.45 * len(found) + 1.2)) as (figure, (axis,)):
        for row, (method, result) in enumerate(reversed(found.items())):
            color = script.COLORS[0 if method == ALL_REDUCE else 1 if method.startswith("D-") else 2]
            axis.plot(result.values, [row] * len(result.values), "o", color=color, alpha=0.7)
            if result.values:
                axis.plot([statistics.fmean(result.values)] * 2, [row - 0.25, row + 0.25], color=color, linewidth=2)
        axis.set_yticks(range(len(found)), list(reversed(found)))
        axis.set(xlabel=given.unit)
        script.dress(figure, f"{study}: {WORKERS} workers, equal tokens; dots are seeds, bars means")
