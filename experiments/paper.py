"""The claims of arXiv 2410.11998 on tasks of this machine's size: makes what is missing, then tables and figures.

    python -m experiments.paper --out=runs/paper --multi30k=data/multi30k --cifar10=data/cifar10 --shakespeare=data/shakespeare.txt
    python -m experiments.paper --out=runs/paper --only=noise_floor,digits
    python -m experiments.paper --smoke

Parts: noise_floor; stability, the largest learning rates; quality at equal tokens on each of translation, cifar, digits, python
(the standard library's sources as text) and shakespeare; gap, gap_longer, gap_both, gap_shakespeare and gap_translation, where the
gap of gossip that overlaps comes from; and the ablations graphs, window, strength, distance, workers and batch. Runs are made
two at a time, or as many as --together says. Their results are appended to a results log; runs in it are not repeated, and
its tables need no data. experiments/results/paper.jsonl is the results log of the pages:

    python -m experiments.paper --out=runs/paper --only=digits --results=experiments/results/paper.jsonl --pages=docs
"""

from collections.abc import Callable
import pathlib
from typing import Any

from absl import flags

from experiments import noise_floor, quality, script, stability, sweep, tiny, trials
from experiments.results_log import ResultsLog
from experiments.studies import CHECKSUMS, PAPER
from launch import command

FLAGS = flags.FLAGS
PARTS = ("noise_floor", "stability", *PAPER)
TINY = {"multi30k": tiny.multi30k, "cifar10": tiny.cifar10, "shakespeare": tiny.text}  # data of smoke runs
OF_PAGES = "not needed for runs that are in the results log."
Draw = Callable[[str], None]  # draws a figure to a path


def check() -> None:
    """End the command if a part is unknown, or if no part reads the data of a flag."""
    script.check_names("only", FLAGS.only, PARTS)
    for flag in TINY:
        readers = [part for part, study in PAPER.items() if study.data == flag]
        if FLAGS[flag].value and FLAGS.only and not set(readers) & set(FLAGS.only):
            command.fail(
                f"--{flag}={FLAGS[flag].value} has no effect with --only={','.join(FLAGS.only)}; leave it out, or add {readers[0]}"
            )


def chosen(out: pathlib.Path, log: ResultsLog) -> dict[str, str]:
    """Return the parts to make, and the data of each; "" if it needs none.

    A part of --only that lacks its data ends the command. Without --only, parts that lack their data are left out.
    """
    found: dict[str, str] = {}
    for part in FLAGS.only or PARTS:
        needed = PAPER[part].data if part in PAPER else ""
        data = data_of(part, out, log) if needed else ""
        if needed and not data and FLAGS.only:
            command.fail(f"--only={part} needs --{needed}=PATH, its data; give it, or take {part} out of --only")
        if needed and not data:
            script.show(f"{part} is left out: it needs --{needed}")
        else:
            found[part] = data
    script.check_tables(*found)
    return found


def data_of(part: str, out: pathlib.Path, log: ResultsLog) -> str:
    """Return the path of a part's data.

    Without its flag, synthetic data for a smoke run; otherwise the checksum of the pages' data if the results log has all runs with
    them, or "".
    """
    flag = PAPER[part].data
    if path := FLAGS[flag].value:
        script.check_path(flag, str(path))
        return str(path)
    if FLAGS.smoke:
        return str(TINY[flag](out / "data" / flag))
    try:
        quality.run(quality.Runs(out, log.recorded(), part, CHECKSUMS[flag], smoke=False))
    except trials.NoData:
        return ""
    return CHECKSUMS[flag]


def make(part: str, data: str, out: pathlib.Path, log: ResultsLog, smoke: bool) -> tuple[script.Table, Draw, dict[str, Any]]:
    """Return (table, function that draws the figure, all numbers) of a part; `data` as in `chosen`."""
    if part == "noise_floor":
        floors = noise_floor.run(out, log, smoke)
        return noise_floor.tabulate(floors), lambda path: noise_floor.draw(path, floors), dict(floors)
    if part == "stability":
        limits = stability.run(smoke)
        return stability.tabulate(limits), lambda path: stability.draw(path, smoke), dict(limits)
    found = quality.run(quality.Runs(out, log, part, data, smoke))
    rows = {method: result._asdict() for method, result in found.items()}
    return quality.tabulate(part, found), lambda path: quality.draw(path, part, found), rows


def main() -> None:
    out = script.folder()
    check()
    log = ResultsLog.of(out, FLAGS.results, trials.Pool(FLAGS.together))
    for part, data in chosen(out, log).items():
        table, draw, numbers = make(part, data, out, log, FLAGS.smoke)
        script.show(part, table)
        script.publish(part, table, draw, **numbers)


if __name__ == "__main__":
    script.define("out", "results", "pages", "smoke", out="runs/paper")
    flags.DEFINE_list("only", [], "Parts to make; none: all.")
    flags.DEFINE_string("multi30k", None, f"Folder of Multi30k's parallel files; {OF_PAGES}")
    flags.DEFINE_string("cifar10", None, f"Folder of CIFAR-10's binary version; {OF_PAGES}")
    flags.DEFINE_string("shakespeare", None, f"A text for which no rate was tuned; {OF_PAGES}")
    flags.DEFINE_integer("together", trials.TOGETHER, "Runs at a time; a GPU with 16 cores makes 12.", lower_bound=1)
    script.run(main, sweep.ERRORS)
