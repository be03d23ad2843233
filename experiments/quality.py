"""Run a study: tune each method's learning rate in runs with a seed of their own, then train it with seeds 0, 1, …

A grid whose best rate is at its edge is extended.
"""

from collections.abc import Mapping, Sequence
import math
import pathlib
import statistics
from typing import Any, NamedTuple

from experiments import script, seeds, trials
from experiments.results_log import ResultsLog
from experiments.seeds import Spread
from experiments.studies import STUDIES, Study
from experiments.trials import Trial

TUNING_SEED = 99


class Result(NamedTuple):
    """A row of a table."""

    rate: float
    tried: dict[float, float]  # learning rate -> what it was tuned on
    values: list[float | None]  # a seed each; None: it diverged
    distances: Sequence[float] = ()  # consensus distance in the middle of the run, of each seed that did not diverge

    @property
    def ended(self) -> list[float]:
        """The values of the seeds that did not diverge."""
        return [value for value in self.values if value is not None]

    @property
    def spread(self) -> Spread:
        """Mean and σ of these seeds."""
        return seeds.spread(self.ended)


def read(trial: Trial) -> dict[str, Any]:
    """What is kept of a run: its summary, and its consensus distance in the middle."""
    rows = trial.rows("train")
    return trial.summary() | {"consensus_distance": rows[len(rows) // 2]["consensus_distance"]}


class Runs(NamedTuple):
    """The runs of a study."""

    out: pathlib.Path  # run directories
    log: ResultsLog  # their results
    name: str  # of the study
    data: str  # path of the data; "": none
    smoke: bool  # tiny models, the first and the last row, one rate, one seed

    @property
    def study(self) -> Study:
        """What is compared."""
        return STUDIES[self.name]

    @property
    def rows(self) -> list[str]:
        """The methods' names."""
        names = list(self.study.rows)
        return [names[0], names[-1]] if self.smoke else names

    def trial(self, method: str, rate: float, seed: int) -> Trial:
        """One run; with the tuning's seed it may be a shorter one."""
        study, row = self.study, self.study.rows[method]
        steps = study.tuning_steps if study.tuning_steps and seed == TUNING_SEED else study.steps
        size = "smoke" if self.smoke else f"steps={round(row.longer * steps)}"
        shorthand = ",".join(filter(None, (row.shorthand, study.shorthand, "simulate", size)))
        # Tiny models may lack the options of the study's model.
        common = {name: value for name, value in study.fields.items() if not (self.smoke and name.startswith("model."))}
        fields = {"schedule.learning_rate": rate, "seed": seed, "eval.local": False, **common, **row.fields}
        fields |= study.tuning_fields if seed == TUNING_SEED and not self.smoke else {}
        fields |= {"data.path": self.data} if self.data else {}
        return trials.trial(self.out / self.name, f"{method} {rate:.3g} {seed}", f"{study.config}:{shorthand}", fields)

    def grid(self, method: str) -> tuple[float, ...]:
        """The learning rates that a method is tuned with at first."""
        return (self.study.rows[method].grid or self.study.grid)[: 1 if self.smoke else None]

    def tune(self, method: str) -> tuple[float, dict[float, float]]:
        """(best rate, loss of each that was tried); one that diverged has an infinite loss. The only rate of a grid is not tried."""
        if len(self.grid(method)) == 1 and not self.smoke:
            return self.grid(method)[0], {}

        def measure(rate: float) -> float:
            numbers = self.log.result(self.trial(method, rate, TUNING_SEED), read)
            return numbers["eval_loss"] if numbers else math.inf

        return seeds.best_rate(measure, self.grid(method))

    def made(self, rates: Mapping[str, float]) -> dict[str, list[dict[str, Any] | None]]:
        """What `read` finds, for each seed of each method; None for one that diverged."""
        of = [(method, seed) for method in rates for seed in range(1 if self.smoke else self.study.rows[method].seeds)]
        numbers = self.log.pool.map(lambda each: self.log.result(self.trial(each[0], rates[each[0]], each[1]), read), of)
        found: dict[str, list[dict[str, Any] | None]] = {method: [] for method in rates}
        for (method, _), own in zip(of, numbers, strict=True):
            found[method].append(own)
        return found


def run(runs: Runs) -> dict[str, Result]:
    """Every method's result; makes what is missing, two runs at a time."""
    source = runs
    if other := runs.study.rates:
        source = runs._replace(name=other, data=runs.data if STUDIES[other].data else "")
    like = {method: runs.study.rows[method].like or method for method in runs.rows}
    tunings = list(dict.fromkeys(like.values()))
    # All grids at first, so that no core waits while one method tries its rates one after the other.
    grids = [(method, rate) for method in tunings for rate in source.grid(method) if len(source.grid(method)) > 1]
    source.log.pool.map(lambda each: source.log.result(source.trial(each[0], each[1], TUNING_SEED), read), grids)
    found = dict(zip(tunings, source.log.pool.map(source.tune, tunings), strict=True))
    tuned, metric = {method: found[other] for method, other in like.items()}, runs.study.metric
    made = runs.made({method: rate for method, (rate, _) in tuned.items()})
    check_texts(runs.name, made)
    return {
        method: Result(
            rate,
            tried,
            [numbers[metric] if numbers else None for numbers in made[method]],
            [numbers["consensus_distance"] for numbers in made[method] if numbers],
        )
        for method, (rate, tried) in tuned.items()
    }


def check_texts(name: str, made: Mapping[str, list[dict[str, Any] | None]]) -> None:
    """Refuses rows of different texts: the text of configs/lm.py is the standard library of the Python that runs."""
    texts = {numbers.get("corpus_order1_entropy") for rows in made.values() for numbers in rows if numbers}
    if len(texts) > 1:
        raise trials.Broken(f"{name}: rows have different texts (another Python's library?); give another --results and --out")


# -- What is shown ----------------------------------------------------------------------------------------------------


def verdict(result: Result, reference: Result) -> str:
    """Whether a row equals the reference, as `seeds.equal` means it, differs by more than both intervals, or neither.

    A row with a seed that diverged differs.
    """
    if len(result.values) < 2 or len(reference.values) < 2:
        return "one seed"
    if None in (*result.values, *reference.values) or seeds.apart(result.spread, reference.spread):
        return "not equal"
    return "equal" if seeds.equal(result.spread, reference.spread) else "undecided"


def cell(result: Result, digits: int) -> str:
    """As "27.71 ± 0.09", and how many seeds diverged, if any did."""
    lost = result.values.count(None)
    said = [result.spread.text(digits)] if result.ended else []
    return ", ".join(said + ([f"{lost} of {len(result.values)} diverged"] if lost else []))


def tried(result: Result) -> str:
    """As "0.01: 1.5000, 0.02: 1.4000"."""
    return ", ".join(f"{rate:.3g}: {loss:.4f}" for rate, loss in sorted(result.tried.items()))


def tabulate(name: str, found: dict[str, Result]) -> Any:
    """Mean ± 2σ over the seeds, the difference from the first row or the one that it names, Ξ, and the rates that were tried."""
    unit, rows = STUDIES[name].unit, STUDIES[name].rows
    digits, own = 2 if unit == "BLEU" else 4, any(row.against for row in rows.values())
    table = script.table(
        "", f"{unit}, mean ± 2σ", "to all-reduce" if own else "to the first row", "", "Ξ", "learning rate", "learning rates tried"
    )
    for method, result in found.items():
        reference = rows[method].against or next(iter(found))
        first = found.get(reference, result)
        compared = method != reference in found and result.ended and first.ended  # A smoke run may lack the reference.
        apart = result.spread.mean - first.spread.mean if compared else 0.0
        relative = f" ({100 * apart / first.spread.mean:+.1f} %)" if compared and unit.startswith("nats") else ""
        edge = " (edge)" if len(result.tried) > 1 and result.rate in (min(result.tried), max(result.tried)) else ""
        table.add_row(
            method,
            cell(result, digits),
            f"{apart:+.{digits}f}{relative}" if compared else "",
            verdict(result, first) if compared else "",
            f"{statistics.fmean(result.distances):.2g}" if result.distances else "",
            f"{result.rate:.3g}{edge}",
            f"as {like}" if (like := rows[method].like) else tried(result),
        )
    return table


def draw(path: str, name: str, found: dict[str, Result]) -> None:
    """A dot for each seed and a bar for the mean, method by method."""
    with script.panels(path, 1, (6.5, 0.45 * len(found) + 1.2)) as (figure, (axis,)):
        for row, (method, result) in enumerate(reversed(found.items())):
            color = script.COLORS[0 if method.startswith("all-reduce") else 2 if method.startswith("Accum") else 1]
            axis.plot(result.ended, [row] * len(result.ended), "o", color=color, alpha=0.7)
            if result.ended:
                axis.plot([result.spread.mean] * 2, [row - 0.25, row + 0.25], color=color, linewidth=2)
        if (first := next(iter(found.values()))).ended:
            axis.axvline(first.spread.mean, color="0.5", linewidth=0.8, linestyle="--", zorder=0)
        axis.set_yticks(range(len(found)), list(reversed(found)))
        axis.set(xlabel=STUDIES[name].unit)
        script.dress(figure, f"{name}: dots are seeds, bars means, the line is the mean of the first row")
