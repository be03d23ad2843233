"""Functions shared by experiments: start, result folders, tables, bounds of figures, plots and JSON."""

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
    """Run `main` as a command without positional arguments.

    Commands define flags under `if __name__ == '__main__'`, because tests import several experiments into one process.
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
    """Return the value of a flag; None if the command does not have it."""
    return getattr(flags.FLAGS, name, None)


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

    def includes_default(value: Any) -> bool:
        if isinstance(default, list):
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


def publish(name: str, table: rich.table.Table, draw: Callable[[str], None] | None = None, /, **numbers: Any) -> None:
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
    if draw and (pages := _given("pages")):
        images = pathlib.Path(pages).parent / "images"
        images.mkdir(exist_ok=True)
        draw(str(images / f"{name}.png"))


# -- Rows and numbers -------------------------------------------------------------------------------------------------


def choose(rows: Sequence[Any], names: Sequence[str], *always: str) -> list[Any]:
    """Return the rows with a name in `names` or `always`; all rows if `names` is empty."""
    if unknown := set(names) - {row.name for row in rows}:
        command.fail(f"row={sorted(unknown)[0]!r} is unknown; the rows are: {'; '.join(row.name for row in rows)}")
    return [row for row in rows if not names or row.name in (*names, *always)]


def save(path: str | None, **fields: Any) -> None:
    """Write the keyword arguments to a file as a JSON object; do nothing if `path` is None."""
    if path:
        files.write_whole(path, json.dumps(_finite(fields), indent=2) + "\n")


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- Tables -----------------------------------------------------------------------------------------------------------


def table(*columns: str, left: int = 1, box: rich.box.Box = rich.box.MARKDOWN, **options: Any) -> rich.table.Table:
    """Return an empty table whose first `left` columns are left-aligned (text), the others right-aligned (numbers)."""
    table = rich.table.Table(box=box, **options)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    return table


def show(*items: rich.table.Table | str) -> None:
    """Print tables and lines, 140 characters wide on any terminal, so that tables can be copied to the documentation."""
    console = rich.console.Console(width=140, highlight=False)
    for item in items:
        console.print(item, markup=False)


def markdown(table: rich.table.Table) -> str:
    """Return a table as lines of Markdown."""
    console = rich.console.Console(width=1000, highlight=False, record=True, file=io.StringIO())
    console.print(table, markup=False)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines() if line.strip())


PAGES = "Folder of Markdown pages whose tables are replaced, and whose figures are in ../images; none: no pages."


def check_pages(pages: str) -> None:
    """End a command if --pages has no pages, before it takes hours."""
    if not any(pathlib.Path(pages).glob("*.md")):
        command.fail(f"pages={pages!r} has no Markdown pages; give their folder, as --pages=docs/results, or leave it out")


def check_tables(*names: str) -> None:
    """End a command if the pages of --pages lack a place for one of its tables."""
    if not (pages := _given("pages")):
        return
    try:
        text = "".join(page.read_text() for page in pathlib.Path(pages).glob("*.md"))
    except (OSError, UnicodeDecodeError) as error:
        command.fail(f"--pages={pages}: a page cannot be read ({error}); repair it, or leave --pages out")
    if missing := [name for name in names if not _table(name).search(text)]:
        command.fail(
            f"--pages={pages}: no page has the line <!-- table {missing[0]} --> and <!-- end --> below it; add them, or leave --pages out"
        )


def _table(name: str) -> re.Pattern:
    """The pattern of a table in a page, with the lines before and after it as groups."""
    return re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)


def claim(out: pathlib.Path, **options: Any) -> None:
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


def fill(name: str, table: rich.table.Table) -> None:
    """Write a table between `<!-- table NAME -->` and `<!-- end -->` in the pages of --pages that have these lines."""
    for page in sorted(pathlib.Path(pages).glob("*.md")) if (pages := _given("pages")) else ():
        before = page.read_text()
        after = _table(name).sub(lambda match: f"{match[1]}{markdown(table)}\n{match[2]}", before)
        if after != before:
            files.write_whole(page, after)


def report(name: str, table: rich.table.Table) -> None:
    """Print a table and write it to its place in --pages."""
    show(table)
    fill(name, table)


def ms(seconds: float) -> str:
    """Return seconds as whole milliseconds."""
    return f"{seconds * 1e3:.0f}"


def difference(value: float, reference: float, digits: int = 1) -> str:
    """Return the difference of a value from a reference, in percent of the reference."""
    return f"{100 * (value / reference - 1):+.{digits}f} %"


# -- Bounds of figures ------------------------------------------------------------------------------------------------


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


def tabulate(checks: list[Check]) -> rich.table.Table:
    """Return a table of checks: figure, bound, and whether it is met."""
    rows = table("figure", "at", "measured", "asked", "met")
    for check in checks:
        bound = f"{'≤' if check.at_most else '≥'} {check.bound:.2f}"
        rows.add_row(check.what, check.at, f"{check.figure:.2f}", bound, "yes" if check.met else "NO")
    return rows


# -- Plots ------------------------------------------------------------------------------------------------------------

# Okabe and Ito's color-blind-safe palette without its yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A8A")


@contextlib.contextmanager
def panels(path: str, count: int, size: tuple[float, float], dpi: int = 150) -> Iterator[tuple[Any, Any]]:
    """Context manager with a figure and its `count` axes in a row; the figure is written to `path` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=size, layout="constrained", squeeze=False)
    yield figure, axes[0]
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def dress(figure: Any, caption: str) -> None:
    """Give a figure light grids, no frames, and a caption on top."""
    for axis in figure.axes:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(caption, fontsize=9, color="0.35")
