"""Draw the figures of the pages again from recorded results, and fill in their tables; nothing is trained.

    python -m experiments.figures --pages=docs
    python -m experiments.figures --pages=docs --figures=outer,goodput

The results are those in experiments/results; stability and paper_runtime are computed. Figures of which no results are recorded are
listed with the reason.
"""

from collections.abc import Callable, Mapping
import contextlib
import functools
import pathlib
from typing import NamedTuple

from absl import flags

from experiments import (
    fault_runs,
    goodput,
    gpu,
    heterogeneity,
    outer,
    paper,
    paper_runtime,
    quality,
    race,
    race_rows,
    script,
    sweep,
    trials,
)
from experiments.results_log import ResultsLog
from experiments.studies import CHECKSUMS, STUDIES, Study

FLAGS = flags.FLAGS
RECORDED = pathlib.Path(__file__).parent / "results"
RUNS = pathlib.Path("runs")  # of run directories, none of which is read


class Figure(NamedTuple):
    """A figure of the pages."""

    draw: Callable[[str], None]  # to a path
    tables: Mapping[str, script.Table | str] = {}  # of the same results, by name


def recorded(name: str) -> ResultsLog:
    """Return a recorded results log."""
    return ResultsLog(RECORDED / f"{name}.jsonl").recorded()


def data_of(part: str) -> str:
    """Return the checksum of the data of a study; "" if it needs none."""
    return CHECKSUMS[STUDIES[part].data] if part in STUDIES and STUDIES[part].data else ""


def of_paper(part: str) -> Figure:
    """Return the figure of a part of experiments.paper."""
    table, draw, _ = paper.make(part, data_of(part), RUNS, recorded("paper"), smoke=False)
    return Figure(draw, {part: table})


def of_heterogeneity(name: str, parts: Mapping[str, Study]) -> Figure:
    """Return the figure of some parts of experiments.heterogeneity."""
    log = recorded("heterogeneity")
    results = {part: quality.run(quality.Runs(RUNS, log, part, data_of(part), smoke=False)) for part in parts}
    tables = {name: heterogeneity.joint(results)}
    if name == "heterogeneity":
        tables["heterogeneity_order"] = heterogeneity.order(results)
    return Figure(lambda path: heterogeneity.draw(path, results), tables)


def of_outer() -> Figure:
    """Return the figure of experiments.outer."""
    runs = outer.Runs(RUNS, recorded("outer"), smoke=False)
    results = {name: runs.result(name) for name in outer.ROWS}
    return Figure(lambda path: outer.draw(path, results), {"outer": outer.tabulate(results)})


def of_goodput() -> Figure:
    """Return the figure of experiments.goodput."""
    read = lambda row, per_hour: fault_runs.read(goodput.path_of(RECORDED / "goodput", row, per_hour))
    calm, faulty = ({row.name: read(row, per_hour) for row in goodput.ROWS} for per_hour in (0.0, goodput.PER_HOUR))
    table = goodput.tabulate({name: (goodput.figures(calm[name]), goodput.figures(faulty[name])) for name in calm})
    return Figure(lambda path: goodput.draw(path, faulty), {"goodput": table})


def of_race(task: str) -> Figure:
    """Return the figure of a task of experiments.race, with the rows whose runs are all recorded."""
    runs = race.Race(race_rows.TASKS[task], out=RUNS, log=recorded(f"race/{task}"))
    results = {race_rows.FP32: runs.result(race_rows.FP32)}
    targets = runs.targets(results[race_rows.FP32])
    for name in race_rows.ROWS:
        with contextlib.suppress(trials.NoData):
            results[name] = runs.result(name, targets[0])
    path = RECORDED / "race" / f"{task}_peers.json"
    results |= race.peer_results(str(path) if path.exists() else None)
    times = race.StepTimes.read(str(RECORDED / "race" / f"{task}_steps.json"))
    table, draw = race.figures(runs, results, times)[f"race_{task}"]
    return Figure(draw, {f"race_{task}": table, f"race_{task}_tuning": race.tabulate(runs.task, results, targets)})


def of_paper_runtime() -> Figure:
    """Return the figure of experiments.paper_runtime, whose table is for a terminal."""
    return Figure(lambda path: paper_runtime.plot(path, paper_runtime.fitted(list(paper_runtime.CLUSTERS))))


def of_gpu() -> Figure:
    """Return the figure of experiments.gpu."""
    results = gpu.read(RECORDED / "gpu.jsonl")
    return Figure(lambda path: gpu.draw(path, results), gpu.blocks(results))


FIGURES: dict[str, Callable[[], Figure]] = {
    **{part: functools.partial(of_paper, part) for part in paper.PARTS},
    **{name: functools.partial(of_heterogeneity, name, parts) for parts, name in heterogeneity.KINDS},
    "outer": of_outer,
    "goodput": of_goodput,
    "paper_runtime": of_paper_runtime,
    "race_lm": functools.partial(of_race, "lm"),
    **({"gpu": of_gpu} if gpu.curves(gpu.read(RECORDED / "gpu.jsonl")) else {}),
}
COMPUTED = ("stability", "paper_runtime")  # without results, most of the time
# Other figures of the pages, and why they are not drawn here.
UNRECORDED = {
    "concepts": "a drawing",
    "lm": "run directories that are not recorded; experiments.compare draws it",
    "optimus": "run directories that are not recorded; experiments.optimus draws it",
}


def main() -> None:
    script.check_names("figures", FLAGS.figures, FIGURES)
    for name in FLAGS.figures or FIGURES:
        figure = FIGURES[name]()
        script.draw_on_pages(name, figure.draw)
        for of, table in figure.tables.items():
            script.fill(of, table)
        script.show(f"wrote {name}.png" + "".join(f", table {of}" for of in figure.tables))
    if not FLAGS.figures:
        script.show(*(f"not drawn: {name}, {reason}" for name, reason in UNRECORDED.items()))


if __name__ == "__main__":
    script.define("pages")
    flags.mark_flag_as_required("pages")
    flags.DEFINE_list("figures", [], f"Figures to draw, of {', '.join(FIGURES)}; none: all.")
    script.run(main, sweep.ERRORS)
