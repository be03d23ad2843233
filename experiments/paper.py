"""The claims of arXiv 2410.11998 on tasks of this machine's size: makes what is missing, then tables and figures.

    python -m experiments.paper --out=runs/paper --multi30k=data/multi30k --cifar10=data/cifar10 --shakespeare=data/shakespeare.txt
    python -m experiments.paper --out=runs/paper --only=noise_floor,digits
    python -m experiments.paper --out=runs/smoke --only=digits --smoke

Parts: noise_floor; stability, the largest learning rates; quality at equal tokens on each of translation, cifar, digits, python
(the standard library's sources as text) and shakespeare; gap, gap_longer, gap_both, gap_shakespeare and gap_translation, where the
gap of gossip that overlaps comes from; and the ablations graphs, window, strength, distance, workers and batch. Trainings are made
two at a time, or as many as --together says. What they came to is appended to a file, the book, and is not made again;
experiments/results/paper.jsonl is the book of the pages:

    python -m experiments.paper --out=runs/paper --only=digits --book=experiments/results/paper.jsonl --pages=docs/results
"""

from collections.abc import Callable
import pathlib
from typing import Any

from absl import flags

from experiments import noise_floor, quality, script, stability, trials
from experiments.studies import PAPER
from launch import command

FLAGS = flags.FLAGS
PARTS = ("noise_floor", "stability", *PAPER)


def chosen() -> list[str]:
    """The parts to make; an error if one is unknown or lacks its data."""
    parts = FLAGS.only or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        command.fail(f"--only={unknown[0]} is unknown; use some of {', '.join(PARTS)}")
    for part in parts:
        if part in PAPER and (needed := PAPER[part].data):
            if not (path := FLAGS[needed].value):
                command.fail(f"{part} needs --{needed}; give the path of its data, or leave it out: --only={PARTS[0]}")
            script.check_path(needed, str(path))
    script.check_tables(FLAGS.pages, *parts)
    return parts


def make(part: str, out: pathlib.Path, book: trials.Book) -> tuple[Any, Callable[[str], None], dict[str, Any]]:
    """(table, function that draws the figure to a path, all numbers) of a part."""
    if part == "noise_floor":
        floors = noise_floor.run(out, book, FLAGS.smoke)
        return noise_floor.tabulate(floors), lambda path: noise_floor.draw(path, floors), dict(floors)
    if part == "stability":
        limits = stability.run(FLAGS.smoke)
        return stability.tabulate(limits), lambda path: stability.draw(path, FLAGS.smoke), dict(limits)
    flag = PAPER[part].data
    data: str = FLAGS[flag].value if flag else ""  # pyright: ignore[reportAssignmentType]
    found = quality.run(quality.Trainings(out, book, part, data, FLAGS.smoke))
    rows = {method: result._asdict() for method, result in found.items()}
    return quality.tabulate(part, found), lambda path: quality.draw(path, part, found), rows


def main() -> None:
    out, parts = command.folder("out", FLAGS.out), chosen()
    trials.at_a_time(FLAGS.together)
    book = trials.book(out, FLAGS.book)
    for part in parts:
        table, draw, numbers = make(part, out, book)
        script.show(part, table)
        draw(str(out / f"{part}.png"))
        script.save(str(out / f"{part}.json"), **numbers)
        if FLAGS.pages:
            script.publish(FLAGS.pages, part, table, draw)


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Run directories, tables as JSON, and figures go here.", required=True)
    flags.DEFINE_list("only", [], "Parts to make; none: all.")
    flags.DEFINE_string("multi30k", None, "Folder of Multi30k's parallel files.")
    flags.DEFINE_string("cifar10", None, "Folder of CIFAR-10's binary version.")
    flags.DEFINE_string("shakespeare", None, "A text that no rate of the config files was tuned on, such as Tiny Shakespeare.")
    flags.DEFINE_string("book", None, "File of JSON lines with what trainings came to; none: OUT/book.jsonl.")
    flags.DEFINE_string("pages", None, script.PAGES)
    flags.DEFINE_integer("together", trials.TOGETHER, "Trainings at a time; a GPU with 16 cores makes 12.", lower_bound=1)
    flags.DEFINE_bool("smoke", False, "The whole way with tiny models, in minutes.")
    script.run(main, (trials.Broken, OSError))
