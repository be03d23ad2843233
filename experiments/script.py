"""What experiments share: flags, result folders, tables, bounds of figures, plots and JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import io
import json
import math
import os
import pathlib
import re
from typing import Any, NamedTuple, Protocol, TypeVar

from absl import flags
import rich.box
import rich.console
from rich.padding import PaddingDimensions
from rich.table import Table

from decjax import files
from launch import command, processes

flags.disclaim_key_flags()  # Flags that `define` makes are those of the calling command, as --help shows them.


class Named(Protocol):
    """A row of a table of an experiment."""

    @property
    def name(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=Named)


def run(main: Callable[[], int | None], errors: tuple[type[Exception], ...] = ()) -> None:
    """Run `main` as a command without positional arguments.

    Commands define flags under `if __name__ == '__main__'`, because tests import several experiments into one process.
    """

    def without_arguments(argv: list[str]) -> int | None:
        command.options_only(argv)
        if (pages := _given("pages")) and not any(pathlib.Path(pages).rglob("*.md")):
            command.fail(f"pages={pages!r} has no Markdown pages; give their folder, as --pages=docs, or leave it out")
        check_part()
        return main()

    with processes.unwinding_signals():
        command.run(without_arguments, errors)


def _given(name: str) -> Any:
    """Return the value of a flag; None if the command does not have it."""
    return getattr(flags.FLAGS, name, None)


def define(*names: str, out: str | None = None, rows: Sequence[Named] = ()) -> None:
    """Define flags that several experiments have.

    Args:
        *names: of "out", a folder; "json", which is --out as a file; "results", "pages", "smoke", "row", "rate" and "peers".
        out: default of --out; without one the flag is required.
        rows: that the help of --row names.
    """
    for name in names:
        match name:
            case "out":
                text = "Run directories, results and figures go here; finished runs are not repeated."
                flags.DEFINE(command.FOLDER, "out", out, text, required=out is None)
            case "json":
                flags.DEFINE(command.FILE, "out", None, "JSON of everything measured.")
            case "results":
                flags.DEFINE(command.FILE, "results", None, "Results log, a file of JSON lines; none: OUT/results.jsonl.")
            case "pages":
                text = "Folder whose Markdown pages, at any depth, receive the tables, and its folder images the figures; none: no pages."
                flags.DEFINE(command.FOLDER, "pages", None, text)
            case "smoke":
                flags.DEFINE_bool("smoke", False, "Run end to end with tiny models and synthetic data, in minutes.")
            case "row":
                named = f", of {'; '.join(row.name for row in rows)}" if rows else ""
                flags.DEFINE_multi_string("row", [], f"Row of the table{named}; may be repeated; none: all rows.")
                selects("row")
            case "peers":
                text = "Python interpreter with experiments/requirements-peers.txt; none: without the rows of PyTorch."
                flags.DEFINE_string("peers", None, text)


# -- Results ----------------------------------------------------------------------------------------------------------


def selects(name: str, is_complete: Callable[[Any], bool] | None = None) -> None:
    """Declare that a flag may restrict the results to a part, which never replaces complete results.

    Args:
        name: of the flag.
        is_complete: whether the results are complete with a value of the flag. By default a list is complete if it contains the
            flag's default, or if both are empty, and a count if it is at least the default.
    """
    flag: Any = flags.FLAGS[name]
    default = flag.default

    def includes_default(value: list[str] | float) -> bool:
        if isinstance(value, list):
            return set(default) <= set(value) if default else not value
        return value >= default

    flag.is_complete = is_complete or includes_default


def part() -> str:
    """Return the flag that restricts the results to a part of the rows or to tiny models; empty if they are complete."""
    if _given("smoke"):
        return "--smoke"
    for name in flags.FLAGS:
        flag: Any = flags.FLAGS[name]
        if hasattr(flag, "is_complete") and not flag.is_complete(flag.value):
            return f"--{name}={flag.value[0] if isinstance(flag.value, list) else flag.value}"
    return ""


def check_part() -> None:
    """End a command that would replace complete results by a part. Within folders, `publish` separates the two."""
    if not (flag := part()):
        return
    what = "figures of tiny models" if flag == "--smoke" else "a part of the rows"
    if pages := _given("pages"):
        command.fail(f"{flag} would write {what} into --pages={pages}; leave out one of them")
    if flag == "--smoke" and (log := _given("results")):
        command.fail(f"{flag} would add runs of tiny models to --results={log}; leave out one of them")
    for name in flags.FLAGS:
        parser, path = flags.FLAGS[name].parser, _given(name)
        if isinstance(parser, command.Output) and parser.kind != "folder" and path and os.path.isfile(path) and name != "results":
            command.fail(f"{flag} would write {what} over --{name}={path}, which exists; give another --{name}, or remove the file")


def folder() -> pathlib.Path:
    """Return the folder of runs and results: --out, or its folder "smoke" in smoke runs."""
    out = pathlib.Path(flags.FLAGS.out)
    return out / "smoke" if _given("smoke") else out


def publish(name: str, table: Table, draw: Callable[[str], None] | None = None, /, **numbers: object) -> None:
    """Write a result: `numbers` to NAME.json and a figure to NAME.png in `folder()`, and the table and the figure to --pages.

    Args:
        name: of the result.
        table: of the result, see `fill`.
        draw: writes the figure to a path.
        **numbers: of the result. Incomplete results are written to the folder "part" of `folder()`.
    """
    out = folder() / "part" if part() not in ("", "--smoke") else folder()
    out.mkdir(parents=True, exist_ok=True)
    save(str(out / f"{name}.json"), **numbers)
    if draw:
        draw(str(out / f"{name}.png"))
    show(f"wrote {out / name}.json" + (" and .png" if draw else ""))
    fill(name, table)
    if draw:
        draw_on_pages(name, draw)


def draw_on_pages(name: str, draw: Callable[[str], None]) -> None:
    """Write a figure to the images of --pages, if that flag is given."""
    if pages := _given("pages"):
        images = pathlib.Path(pages) / "images"
        images.mkdir(exist_ok=True)
        draw(str(images / f"{name}.png"))


def check_names(flag: str, names: Sequence[str], known: Sequence[str] | Mapping[str, object]) -> None:
    """End a command if a flag has a name that is not known."""
    if unknown := [name for name in names if name not in known]:
        separator = "; " if any("," in name for name in known) else ", "
        command.fail(f"--{flag}={unknown[0]} is unknown; use some of {separator.join(known)}")


def choose(rows: Sequence[AnyRow], names: Sequence[str], *always: str, flag: str = "row") -> list[AnyRow]:
    """Return the rows with a name in `names`, of a flag, or in `always`; all rows if `names` is empty."""
    check_names(flag, names, [row.name for row in rows])
    return [row for row in rows if not names or row.name in (*names, *always)]


def save(path: str | None, **fields: object) -> None:
    """Write the keyword arguments to a file as a JSON object; do nothing if `path` is None."""
    if path:
        files.write_whole(path, json.dumps(_finite(fields), indent=2) + "\n")


def _finite(value: object) -> object:
    """Replace numbers that JSON does not have by None."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def claim(out: pathlib.Path, **options: object) -> None:
    """Save the common options of the runs in a folder; end a command whose options differ from those saved there."""
    path = out / "options.json"
    try:
        before = files.read_json(path) if path.exists() else {}
    except ValueError as error:
        command.fail(f"{path} cannot be read ({error}); give another --out")
    for name, value in options.items():
        if before.get(name, value) != value:
            flag = f"--{name}" if name in flags.FLAGS else name
            now, then = (f"no {flag}" if option is None else f"{flag}={option}" for option in (value, before[name]))
            command.fail(f"{now}: the runs in {out} have {then}; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, json.dumps(before | options))


def check_path(flag: str, path: str) -> None:
    """End a command whose data do not exist, before it takes hours."""
    if not os.path.exists(os.path.expanduser(path)):  # Unlike pathlib's functions, os.path's raise nothing on an invalid path.
        command.fail(f"--{flag}={path} does not exist; give the path of the data")


# -- Tables -----------------------------------------------------------------------------------------------------------


def table(
    *columns: str,
    left: int = 1,
    box: rich.box.Box = rich.box.MARKDOWN,
    title: str | None = None,
    padding: PaddingDimensions = (0, 1),
) -> Table:
    """Return an empty table whose first `left` columns are left-aligned (text), the others right-aligned (numbers)."""
    table = Table(box=box, title=title, title_justify="left", padding=padding)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    return table


def show(*items: Table | str) -> None:
    """Print tables and lines, 140 characters wide on any terminal, so that tables can be copied to the documentation."""
    console = rich.console.Console(width=140, highlight=False)
    for item in items:
        console.print(item, markup=False)


def markdown(table: Table) -> str:
    """Return a table as lines of Markdown."""
    console = rich.console.Console(width=1000, highlight=False, record=True, file=io.StringIO())
    console.print(table, markup=False)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines() if line.strip())


def _place(name: str) -> re.Pattern[str]:
    """Return the pattern of a table in a page, with the lines before and after it as groups."""
    return re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)


def check_tables(*names: str) -> None:
    """End a command if the pages of --pages lack a place for one of its tables."""
    if not (pages := _given("pages")):
        return
    try:
        text = "".join(page.read_text() for page in pathlib.Path(pages).rglob("*.md"))
    except (OSError, UnicodeDecodeError) as error:
        command.fail(f"--pages={pages}: a page cannot be read ({error}); repair it, or leave --pages out")
    if missing := [name for name in names if not _place(name).search(text)]:
        command.fail(
            f"--pages={pages}: no page has the line <!-- table {missing[0]} --> and <!-- end --> below it; add them, or leave --pages out"
        )


def fill(name: str, table: Table | str) -> None:
    """Write a table, or Markdown, between `<!-- table NAME -->` and `<!-- end -->` in the pages of --pages that have these lines."""
    text = table if isinstance(table, str) else markdown(table)
    for page in sorted(pathlib.Path(pages).rglob("*.md")) if (pages := _given("pages")) else ():
        before = page.read_text()
        after = _place(name).sub(lambda match: f"{match[1]}{text}\n{match[2]}", before)
        if after != before:
            files.write_whole(page, after)


def report(name: str, table: Table) -> None:
    """Print a table and write it to its place in --pages."""
    show(table)
    fill(name, table)


def ms(seconds: float) -> str:
    """Return seconds as whole milliseconds."""
    return f"{seconds * 1e3:.0f}"


def difference(value: float, reference: float, digits: int = 1) -> str:
    """Return the difference of a value from a reference, in percent of the reference."""
    return f"{100 * (value / reference - 1):+.{digits}f} %"


class Check(NamedTuple):
    """An upper or lower bound of a figure; nan does not meet it."""

    what: str  # name of the figure
    at: str  # condition
    figure: float
    bound: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether the figure meets the bound."""
        return self.figure <= self.bound if self.at_most else self.figure >= self.bound


def tabulate(checks: list[Check]) -> Table:
    """Return a table of checks: figure, bound, and whether it is met."""
    rows = table("figure", "at", "measured", "bound", "met")
    for check in checks:
        bound = f"{'≤' if check.at_most else '≥'} {check.bound:.2f}"
        rows.add_row(check.what, check.at, f"{check.figure:.2f}", bound, "yes" if check.met else "NO")
    return rows


# -- Plots ------------------------------------------------------------------------------------------------------------

# Okabe and Ito's color-blind-safe palette without its yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A8A")


@contextlib.contextmanager
def panels(
    path: str, count: int, size: tuple[float, float], caption: str = "", dpi: int = 150, stacked: bool = False
) -> Iterator[Any]:
    """Context manager with the `count` axes of a figure in a row, or below each other; at the end the figure is written to `path`.

    A figure with a caption has light grids and no frames.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(*(count, 1) if stacked else (1, count), figsize=size, layout="constrained", squeeze=False)
    yield axes.ravel()
    for axis in figure.axes if caption else ():
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    if caption:
        figure.suptitle(caption, fontsize=9, color="0.35")
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
