"""Methods for different data on each worker: does the order that their papers claim hold?

    python -m experiments.heterogeneity --out=runs/heterogeneity
    gzip -dc data/multi30k/train.en.gz > multi30k.en
    python -m experiments.heterogeneity --out=runs/heterogeneity --text=multi30k.en \\
        --only=multi30k_ring,multi30k_exponential,multi30k_complete
    python -m experiments.heterogeneity --out=runs/smoke --smoke

Parts: dirichlet_10, dirichlet_1 and dirichlet_0.1, handwritten digits whose classes are divided among 16 workers on a ring by a
Dirichlet distribution, the more unevenly the smaller its α; and multi30k_ring, multi30k_exponential and multi30k_complete, a language
model of Multi30k's English sentences on 8 workers. Every method has the rate that was best of its grid on each part of the digits, or on
the ring, in a run with a separate seed, and then three seeds. Runs in the results log are not repeated.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import NamedTuple

from absl import flags

from experiments import quality, script, seeds, studies, sweep
from experiments.quality import Result
from experiments.results_log import ResultsLog
from launch import command

FLAGS = flags.FLAGS
PARTS = (*studies.DIRICHLET, *studies.MULTI30K)
KINDS = ((studies.DIRICHLET, "heterogeneity"), (studies.MULTI30K, "multi30k_lm"))  # with their tables


class Claim(NamedTuple):
    """A paper's claim that one method is better than another where data differ."""

    better: str
    worse: str
    source: str


CLAIMS = (
    Claim(studies.QG, studies.DSGDM, "arXiv 2102.04761"),
    Claim(studies.DECENTLAM, studies.DSGDM, "arXiv 2104.11981"),
    Claim(studies.D2, studies.DSGD, "arXiv 1803.07068"),
    Claim(studies.TRACKING, studies.DSGD, "arXiv 1607.03218"),
    Claim(studies.RELAY, studies.DSGDM, "arXiv 2110.04175"),
    Claim(studies.RELAY, studies.QG, "arXiv 2110.04175"),
    Claim(studies.ALL_REDUCE_SGDM, studies.QG, ""),
)


def title(part: str) -> str:
    """Return the heading of a part, such as "Dirichlet, α = 0.1" or "Multi30k, ring"."""
    data, _, how = part.partition("_")
    return f"{data.capitalize()}, {'α = ' if part in studies.DIRICHLET else ''}{how}"


def joint(found: Mapping[str, Mapping[str, Result]]) -> script.Table:
    """Return a row for each method, a column for each part: mean ± 2σ over the seeds, and the rate."""
    table = script.table("", *(f"{title(part)}: {studies.STUDIES[part].unit} (rate)" for part in found))
    for method in dict.fromkeys(method for of in found.values() for method in of):
        cells = [f"{quality.cell(of[method], 4)} ({of[method].rate:.3g})" if method in of else "" for of in found.values()]
        table.add_row(method, *cells)
    return table


def judged(claim: Claim, of: Mapping[str, Result]) -> str:
    """Return how far the better one is ahead, in accuracy, and whether intervals of ± 2σ of the means are apart."""
    better, worse = of[claim.better], of[claim.worse]
    if lost := [name for name in (claim.better, claim.worse) if None in of[name].values]:
        return f"{lost[0]} diverged"
    ahead = better.spread.mean - worse.spread.mean
    apart = seeds.apart(better.spread, worse.spread)
    return f"{ahead:+.4f}, {'yes' if apart and ahead > 0 else 'NO' if apart else 'undecided'}"


def order(found: Mapping[str, Mapping[str, Result]], claims: Sequence[Claim] = CLAIMS) -> script.Table:
    """Return the papers' claims and the results; a claim is undecided if the intervals overlap."""
    parts = {part: of for part, of in found.items() if part in studies.DIRICHLET}
    table = script.table("claim", "source", *map(title, parts), left=2)
    for claim in claims:
        if all({claim.better, claim.worse} <= of.keys() for of in parts.values()):
            table.add_row(f"{claim.better} above {claim.worse}", claim.source, *(judged(claim, of) for of in parts.values()))
    return table


def draw(path: str, found: Mapping[str, Mapping[str, Result]]) -> None:
    """Draw a panel for each part."""
    rows = list(dict.fromkeys(method for of in found.values() for method in of))[::-1]
    size = 2.0 + 2.6 * len(found), 0.35 * len(rows) + 1.2
    with script.panels(path, len(found), size, "Dots are seeds, bars their means") as axes:
        for axis, (part, of) in zip(axes, found.items(), strict=True):
            quality.draw_rows(axis, of, rows)
            axis.set_yticks(range(len(rows)), rows if axis is axes[0] else [""] * len(rows))
            axis.set(xlabel=studies.STUDIES[part].unit, title=title(part))


def is_whole(parts: Sequence[str]) -> bool:
    """Whether parts, by default those of the digits, fill all columns of their tables."""
    return not parts or all(len(set(parts) & set(kind)) in (0, len(kind)) for kind, _ in KINDS)


def main() -> None:
    out, parts = script.folder(), FLAGS.only or list(studies.DIRICHLET)
    script.check_names("only", parts, PARTS)
    if not FLAGS.text and (needy := [part for part in parts if part in studies.MULTI30K]):
        command.fail(f"{needy[0]} needs --text; give the path of a file with Multi30k's English sentences")
    if FLAGS.text and not set(parts) & set(studies.MULTI30K):
        command.fail(f"--text={FLAGS.text} has no effect without a part of Multi30k; leave it out, or add --only=multi30k_ring")
    if FLAGS.text and not pathlib.Path(FLAGS.text).is_file():
        command.fail(f"--text={FLAGS.text} is no file; give the path of a file with Multi30k's English sentences")
    script.check_tables(*(name for kind, name in KINDS if set(parts) & set(kind)))
    log, found = ResultsLog.of(out, FLAGS.results), {}
    for part in parts:
        data = FLAGS.text if part in studies.MULTI30K else ""
        found[part] = quality.run(quality.Runs(out, log, part, data, FLAGS.smoke))
        script.show(part, quality.tabulate(part, found[part]))
    for kind, name in KINDS:
        if of := {part: rows for part, rows in found.items() if part in kind}:
            script.show(joint(of), *([order(of)] if kind is studies.DIRICHLET else []))
            numbers = {part: {m: r._asdict() for m, r in rows.items()} for part, rows in of.items()}
            script.publish(name, joint(of), lambda path, of=of: draw(path, of), **numbers)
    if set(studies.DIRICHLET) & set(found):
        script.fill("heterogeneity_order", order(found))


if __name__ == "__main__":
    script.define("out", "results", "pages", "smoke")
    flags.DEFINE_list("only", [], "Parts to make; none: those of the digits.")
    script.selects("only", is_whole)
    flags.DEFINE_string("text", None, "A text file of Multi30k's English sentences.")
    script.run(main, sweep.ERRORS)
