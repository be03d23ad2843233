"""Run a study: tune each method's learning rate in runs with a separate seed, then train it with seeds 0, 1, …

A grid whose best rate is at its edge is extended.
"""

from collections.abc import Iterable, Mapping, Sequence
import math
import pathlib
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments import script, seeds, trials
from experiments.results_log import ResultsLog
from experiments.seeds import Spread
from experiments.studies import STUDIES, Study
from experiments.trials import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TUNING_SEED = 99
Numbers = dict[str, Any]  # results of a run, by name


class Result(NamedTuple):
    """Results of a row of a table."""

    rate: float
    tried: dict[float, float]  # learning rate -> what it was tuned on
    values: list[float | None]  # one for each seed; None: it diverged
    distances: Sequence[float] = ()  # consensus distance in the middle of the run, of each seed that did not diverge

    @property
    def ended(self) -> list[float]:
        """Return the values of the seeds that did not diverge."""
        return [value for value in self.values if value is not None]

    @property
    def spread(self) -> Spread:
        return seeds.spread(self.ended)


def read(trial: Trial) -> Numbers:
    """Return the results of a run: its summary, and its consensus distance in the middle."""
    rows = trial.rows("train")
    return trial.summary() | {"consensus_distance": rows[len(rows) // 2]["consensus_distance"]}


class Runs(NamedTuple):
    """The runs of a study."""

    out: pathlib.Path  # folder of run directories
    log: ResultsLog
    name: str  # of the study
    data: str  # path of the data; "": none
    smoke: bool  # tiny models, the first and the last row, one rate, one seed

    @property
    def study(self) -> Study:
        return STUDIES[self.name]

    @property
    def rows(self) -> list[str]:
        """Return the names of the methods."""
        names = list(self.study.rows)
        return [names[0], names[-1]] if self.smoke else names

    def trial(self, method: str, rate: float, seed: int) -> Trial:
        """Return a run; with the seed of tuning it may be shorter."""
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

    def results(self, keys: Iterable[tuple[str, float, int]]) -> list[Numbers | None]:
        """Return the results of runs by (method, rate, seed); None for one that diverged. Missing ones are trained."""
        return self.log.pool.map(lambda key: self.log.result(self.trial(*key), read), keys)

    def grid(self, method: str) -> tuple[float, ...]:
        """Return the learning rates that tuning starts with."""
        return (self.study.rows[method].grid or self.study.grid)[: 1 if self.smoke else None]

    def tune(self, method: str) -> tuple[float, dict[float, float]]:
        """Return (best rate, loss of each rate, infinite if it diverged). The only rate of a grid is not trained."""
        if len(self.grid(method)) == 1 and not self.smoke:
            return self.grid(method)[0], {}

        def measure(rate: float) -> float:
            numbers = self.log.result(self.trial(method, rate, TUNING_SEED), read)
            return numbers["eval_loss"] if numbers else math.inf

        return seeds.best_rate(measure, self.grid(method))

    def made(self, rates: Mapping[str, float]) -> dict[str, list[Numbers | None]]:
        """Return the results of each seed of each method; None for one that diverged."""
        counts = {method: 1 if self.smoke else self.study.rows[method].seeds for method in rates}
        numbers = iter(self.results([(method, rates[method], seed) for method in rates for seed in range(counts[method])]))
        return {method: [next(numbers) for _ in range(counts[method])] for method in rates}


def run(runs: Runs) -> dict[str, Result]:
    """Return every method's result; train missing runs, two at a time."""
    source = runs
    if other := runs.study.rates:
        source = runs._replace(name=other, data=runs.data if STUDIES[other].data else "")
    like = {method: runs.study.rows[method].like or method for method in runs.rows}
    tunings = list(dict.fromkeys(like.values()))
    # All grids at first, so that no core waits while one method tries its rates one after the other.
    source.results([(row, rate, TUNING_SEED) for row in tunings for rate in source.grid(row) if len(source.grid(row)) > 1])
    rates = dict(zip(tunings, source.log.pool.map(source.tune, tunings), strict=True))
    tuned, metric = {method: rates[other] for method, other in like.items()}, runs.study.metric
    made = runs.made({method: rate for method, (rate, _) in tuned.items()})
    check_texts(runs.name, made)
    results = {}
    for method, numbers in made.items():
        values = [each[metric] if each else None for each in numbers]
        rate, tried = tuned[method]
        results[method] = Result(rate, tried, values, [each["consensus_distance"] for each in numbers if each])
    return results


def check_texts(name: str, made: Mapping[str, list[Numbers | None]]) -> None:
    """Refuse rows of different texts: the text of configs/lm.py is the standard library of the Python that runs."""
    texts = {numbers.get("corpus_order1_entropy") for rows in made.values() for numbers in rows if numbers}
    if len(texts) > 1:
        raise trials.Broken(f"{name}: rows have different texts (another Python's library?); give another --results and --out")


def verdict(result: Result, reference: Result) -> str:
    """Return whether a row equals the reference (`seeds.equal`), differs by more than both intervals, or neither.

    A row with a seed that diverged differs.
    """
    if len(result.values) < 2 or len(reference.values) < 2:
        return "one seed"
    if None in (*result.values, *reference.values) or seeds.apart(result.spread, reference.spread):
        return "not equal"
    return "equal" if seeds.equal(result.spread, reference.spread) else "undecided"


def cell(result: Result, digits: int) -> str:
    """Return a text such as "27.71 ± 0.09", with the number of seeds that diverged, if any did."""
    lost = result.values.count(None)
    value = [result.spread.text(digits)] if result.ended else []
    return ", ".join(value + ([f"{lost} of {len(result.values)} diverged"] if lost else []))


def tabulate(name: str, results: dict[str, Result]) -> script.Table:
    """Return mean ± 2σ over the seeds, the difference from the first row or the one that it names, Ξ, and the rates."""
    unit, rows = STUDIES[name].unit, STUDIES[name].rows
    digits, own = 2 if unit == "BLEU" else 4, any(row.against for row in rows.values())
    table = script.table(
        "", f"{unit}, mean ± 2σ", "vs. all-reduce" if own else "vs. first row", "", "Ξ", "learning rate", "tuning losses"
    )
    for method, result in results.items():
        reference = rows[method].against or next(iter(results))
        first = results.get(reference, result)
        compared = method != reference in results and result.ended and first.ended  # A smoke run may lack the reference.
        apart = result.spread.mean - first.spread.mean if compared else 0.0
        relative = f" ({100 * apart / first.spread.mean:+.1f} %)" if compared and unit.startswith("nats") else ""
        edge = " (edge)" if len(result.tried) > 1 and result.rate in (min(result.tried), max(result.tried)) else ""
        tried = ", ".join(f"{rate:.3g}: {loss:.4f}" for rate, loss in sorted(result.tried.items()))
        table.add_row(
            method,
            cell(result, digits),
            f"{apart:+.{digits}f}{relative}" if compared else "",
            verdict(result, first) if compared else "",
            f"{statistics.fmean(result.distances):.2g}" if result.distances else "",
            f"{result.rate:.3g}{edge}",
            f"as {like}" if (like := rows[method].like) else tried,
        )
    return table


def draw_rows(axis: "Axes", results: Mapping[str, Result], rows: Sequence[str]) -> None:
    """Draw a dot for each seed and a bar for the mean of each row, from the bottom up."""
    for number, method in enumerate(rows):
        if method in results and (result := results[method]).ended:
            color = script.COLORS[0 if method.startswith("all-reduce") else 2 if method.startswith("Accum") else 1]
            axis.plot(result.ended, [number] * len(result.ended), "o", color=color, alpha=0.7)
            axis.plot([result.spread.mean] * 2, [number - 0.25, number + 0.25], color=color, linewidth=2)


def draw(path: str, name: str, results: dict[str, Result]) -> None:
    """Draw the rows of a study."""
    caption = f"{name}: dots are seeds, bars means, the line is the mean of the first row"
    with script.panels(path, 1, (6.5, 0.45 * len(results) + 1.2), caption) as (axis,):
        rows = list(results)[::-1]
        draw_rows(axis, results, rows)
        if (first := results[rows[-1]]).ended:
            axis.axvline(first.spread.mean, color="0.5", linewidth=0.8, linestyle="--", zorder=0)
        axis.set_yticks(range(len(rows)), rows)
        axis.set(xlabel=STUDIES[name].unit)
