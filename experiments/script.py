"""Functions that experiments share: start, folders of results, tables, checks of expected figures, plots and JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import io
import json
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

from absl import flags
import rich.box
import rich.console
import rich.table

from decjax import files
from launch import command, processes


def run(main: Callable[[], int | None], errors: tuple[type[Exception], ...] = ()) -> None:
    """Runs `main` as a command that takes flags and no arguments.

    Flags are defined under `if __name__ == '__main__'`, because tests import several experiments into one process.
    """

    def without_arguments(argv: list[str]) -> int | None:
        command.options_only(argv)
        if pages := _given("pages"):
            check_pages(pages)
        check_part()
        return main()

    with processes.unwinding_signals():
        command.run(without_arguments, errors)


def _given(name: str) -> Any:
    """The value of a flag; None if the command does not have it."""
    return getattr(flags.FLAGS, name, None)


# -- Where results go -------------------------------------------------------------------------------------------------


def selects(flag: str, is_whole: Callable[[Any], bool] | None = None) -> None:
    """Declares that a flag selects a part of the results, unless `is_whole(value)`; such results never replace complete ones.

    By default a list is whole if it contains the flag's default, or if both are empty, and a count if it is at least the default.
    """
    defined: Any = flags.FLAGS[flag]
    usual = defined.default

    def is_usual(value: Any) -> bool:
        if isinstance(usual, list):
            return set(usual) <= set(value) if usual else not value
        return value >= usual

    defined.is_whole = is_whole or is_usual


def part() -> str:
    """The flag that restricts this command's results to a part of the rows or to tiny models; empty: they are complete."""
    if _given("smoke"):
        return "--smoke"
    for name in flags.FLAGS:
        flag: Any = flags.FLAGS[name]
        if hasattr(flag, "is_whole") and not flag.is_whole(flag.value):
            return f"--{name}={flag.value[0] if isinstance(flag.value, list) else flag.value}"
    return ""


def check_part() -> None:
    """Ends a command whose flags would replace complete results by a part of them. In folders, `publish` keeps the two apart."""
    if not (flag := part()):
        return
    what = "figures of tiny models" if flag == "--smoke" else "a part of the rows"
    if pages := _given("pages"):
        command.fail(f"{flag} would write {what} into --pages={pages}; leave out one of them")
    if flag == "--smoke" and (book := _given("book")):
        command.fail(f"{flag} would add trainings of tiny models to --book={book}; leave out one of them")
    for name in flags.FLAGS:
        parser, path = flags.FLAGS[name].parser, _given(name)
        if isinstance(parser, command.Output) and parser.kind != "folder" and path and os.path.isfile(path) and name != "book":
            command.fail(f"{flag} would write {what} over --{name}={path}, which exists; give another --{name}, or remove the file")


def folder() -> pathlib.Path:
    """Where runs and results go: --out. A smoke run has a folder of its own in it."""
    out = pathlib.Path(flags.FLAGS.out)
    return out / "smoke" if _given("smoke") else out


def publish(name: str, found: rich.table.Table, draw: Callable[[str], None] | None = None, /, **numbers: Any) -> None:
    """Writes a result: the numbers as NAME.json and the figure that `draw(path)` makes as NAME.png into the folder of `folder()`, or
    that of a part into its folder "part"; the table and the figure also into --pages."""
    out = folder() / "part" if part() not in ("", "--smoke") else folder()
    out.mkdir(parents=True, exist_ok=True)
    save(str(out / f"{name}.json"), **numbers)
    if draw:
        draw(str(out / f"{name}.png"))
    show(f"wrote {out / name}.json" + (" and .png" if draw else ""))
    fill(name, found)
    if draw and (pages := _given("pages")):
        images = pathlib.Path(pages).parent / "images"
        images.mkdir(exist_ok=True)
        draw(str(images / f"{name}.png"))


# -- Rows and numbers -------------------------------------------------------------------------------------------------


def choose(rows: Sequence[Any], names: Sequence[str], *beside: str) -> list[Any]:
    """The rows of these names and of the names in `beside`; all rows if there are no names."""
    if unknown := set(names) - {row.name for row in rows}:
        command.fail(f"row={sorted(unknown)[0]!r} is unknown; the rows are: {'; '.join(row.name for row in rows)}")
    return [row for row in rows if not names or row.name in (*names, *beside)]


def save(path: str | None, **found: Any) -> None:
    """Writes the keyword arguments as a JSON object to a file; does nothing if `path` is None."""
    if path:
        files.write_whole(path, json.dumps(_finite(found), indent=2) + "\n")


def _finite(value: Any) -> Any:
    """With None for every number that JSON does not know."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- Tables -----------------------------------------------------------------------------------------------------------


def table(*columns: str, left: int = 1, box: rich.box.Box = rich.box.MARKDOWN, **options: Any) -> rich.table.Table:
    """An empty table whose first `left` columns are aligned to the left (texts), the others to the right (numbers)."""
    made = rich.table.Table(box=box, **options)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < left else "right")
    return made


def show(*found: rich.table.Table | str) -> None:
    """Prints tables and lines 140 characters wide, also on a narrow terminal, so that tables can be copied to the documentation."""
    console = rich.console.Console(width=140, highlight=False)
    for each in found:
        console.print(each, markup=False)


def markdown(found: rich.table.Table) -> str:
    """A table as lines of Markdown."""
    console = rich.console.Console(width=1000, highlight=False, record=True, file=io.StringIO())
    console.print(found, markup=False)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines() if line.strip())


PAGES = "Folder of Markdown pages whose tables are written anew, and figures in the folder images beside it; none: no pages."


def check_pages(pages: str) -> None:
    """Ends a command whose tables would be written nowhere, before it takes hours."""
    if not any(pathlib.Path(pages).glob("*.md")):
        command.fail(f"pages={pages!r} has no Markdown pages; give their folder, as --pages=docs/results, or leave it out")


def check_tables(*names: str) -> None:
    """Ends a command that would measure tables for which no page of --pages has a place."""
    if not (pages := _given("pages")):
        return
    try:
        text = "".join(page.read_text() for page in pathlib.Path(pages).glob("*.md"))
    except (OSError, UnicodeDecodeError) as error:
        command.fail(f"--pages={pages}: a page cannot be read ({error}); mend it, or leave --pages out")
    if homeless := [name for name in names if not _between(name).search(text)]:
        command.fail(
            f"--pages={pages}: no page has the line <!-- table {homeless[0]} --> and <!-- end --> below it; add them, or leave --pages out"
        )


def _between(name: str) -> re.Pattern:
    """What stands between the lines of a table, with these lines as groups."""
    return re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)


def claim(out: pathlib.Path, **options: Any) -> None:
    """Keeps in a folder what its runs have in common, flags or not; ends a command whose own options differ from those kept there."""
    path = out / "options.json"
    try:
        before = files.read_json(path) if path.exists() else {}
    except ValueError as error:
        command.fail(f"{path} cannot be read ({error}); give another --out")
    for name, value in options.items():
        if before.get(name, value) != value:
            flag = f"--{name}" if name in flags.FLAGS else name
            given, kept = (f"no {flag}" if each is None else f"{flag}={each}" for each in (value, before[name]))
            command.fail(f"{given}: the runs in {out} have {kept}; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, json.dumps(before | options))


def check_path(flag: str, path: str) -> None:
    """Ends a command whose data are not there, before it takes hours."""
    if not os.path.exists(os.path.expanduser(path)):  # Unlike pathlib's functions, os.path's raise nothing on an invalid path.
        command.fail(f"--{flag}={path} does not exist; give the path of the data")


def fill(name: str, found: rich.table.Table) -> None:
    """Writes a table between `<!-- table NAME -->` and `<!-- end -->` in those pages of --pages that have these lines, if it is given."""
    for page in sorted(pathlib.Path(pages).glob("*.md")) if (pages := _given("pages")) else ():
        before = page.read_text()
        after = _between(name).sub(lambda match: f"{match[1]}{markdown(found)}\n{match[2]}", before)
        if after != before:
            files.write_whole(page, after)


def ms(seconds: float) -> str:
    """Seconds as a text in whole milliseconds."""
    return f"{seconds * 1e3:.0f}"


def difference(value: float, reference: float, digits: int = 1) -> str:
    """The relative difference of a value from a reference as a text, in percent of the reference."""
    return f"{100 * (value / reference - 1):+.{digits}f} %"


# -- What is asked of figures -----------------------------------------------------------------------------------------


class Check(NamedTuple):
    """A bound that a figure should keep: at most, or at least, so much; nan does not meet it."""

    what: str  # the figure's name
    at: str  # under which condition
    figure: float
    bound: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether the figure keeps the bound."""
        return self.figure <= self.bound if self.at_most else self.figure >= self.bound


def tabulate(found: list[Check]) -> rich.table.Table:
    """A table of checks: figure, bound, and whether it is met."""
    made = table("figure", "at", "measured", "asked", "met")
    for check in found:
        bound = f"{'≤' if check.at_most else '≥'} {check.bound:.2f}"
        made.add_row(check.what, check.at, f"{check.figure:.2f}", bound, "yes" if check.met else "NO")
    return made


# -- Plots ------------------------------------------------------------------------------------------------------------

# Okabe and Ito's palette, which colour-blind readers can tell apart, without its yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A8A")


@contextlib.contextmanager
def panels(path: str, count: int, size: tuple[float, float], dpi: int = 150) -> Iterator[tuple[Any, Any]]:
    """A figure with `count` axes beside each other, to draw on; it is written to `path` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=size, layout="constrained", squeeze=False)
    yield figure, axes[0]
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def dress(figure: Any, caption: str) -> None:
    """Gives a figure light grids, no frames, and a caption on top."""
    for axis in figure.axes:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(caption, fontsize=9, color="0.35")
