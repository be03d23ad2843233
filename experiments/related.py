"""The systems of related papers: what of each runs here, by which command, and the figure that says whether it is right.

    python -m experiments.related
    python -m experiments.related --only=DT-FM --smoke

Each row has an oracle: a property of the system that is known beforehand, such as an exact limit or a bound. The exit code is 1 if one
does not hold. `experiments.oracles` computes the figures. docs/research/related.md is made by

    python -m experiments.related --pages=docs
"""

import shlex
import time

from absl import flags

from experiments import script
from experiments.oracles import ROWS, Row

FLAGS = flags.FLAGS


def tabulate(figures: dict[Row, tuple[float, float]], last: str) -> script.Table:
    """Return a row for each system; the last column is "to try", for a page, or "took, s", for a terminal."""
    table = script.table("system", "oracle", "figure", "bound", "met", last, left=2)
    table.columns[-1].justify = "left"
    for row, (figure, took_s) in figures.items():
        words = " ".join(map(shlex.quote, row.command.split()))
        command = row.command if row.command.startswith("none") else f"`python -m {words}`"
        met = "yes" if figure <= row.most else "NO"
        shown = {"to try": command, "took, s": f"{took_s:.1f}"}[last]
        table.add_row(f"{row.name}, arXiv {row.source}", row.oracle, f"{figure:.2g}", f"≤ {row.most:g}", met, shown)
    return table


def main() -> int:
    script.check_tables("related")
    figures = {}
    for row in script.choose(ROWS, FLAGS.only, flag="only"):
        start_s = time.monotonic()
        figures[row] = row.measure(FLAGS.smoke), time.monotonic() - start_s
        script.show(f"{row.name}: {row.command}")
    script.show(tabulate(figures, "took, s"))
    script.fill("related", tabulate(figures, "to try"))
    return 0 if all(figure <= row.most for row, (figure, _) in figures.items()) else 1


if __name__ == "__main__":
    flags.DEFINE_multi_string("only", [], f"Systems, of {'; '.join(row.name for row in ROWS)}; may be repeated; none: all.")
    script.selects("only")
    script.define("smoke", "pages")
    script.run(main, (ValueError, OSError))
