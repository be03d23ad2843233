"""Mutation tests: small faults are put into the library one at a time, and a test must fail for each.

    pip install pytest-cov
    python -m pytest --cov=decjax --cov-context=test --cov-report= --junitxml=durations.xml
    python -m tests.mutants --count=100 --seed=0 --out=mutants.jsonl

Each mutant is written to a copy of the tree, where the quickest tests that execute its lines run, as many as take `--budget_s`
seconds together. If no test executes them in its own process, the tests of the function run, or else the test files that are named
like the module or its package. A test that also fails without the mutant does not count. The same command continues from --out, and
prints the surviving mutants.
"""

import argparse
import ast
import collections
from collections.abc import Iterator
import difflib
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = "gossip reduce codecs optim topology mesh train elastic config contrib".split()
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
OPTIONS = dict(
    count=100, seed=0, budget_s=60.0, timeout_s=900.0, out="mutants.jsonl", coverage=".coverage", durations="durations.xml"
)
SKIPPED = (ast.JoinedStr, ast.Raise, ast.arguments, ast.Import, ast.ImportFrom)  # nodes whose children are not mutated


def changes(node: ast.AST, rng: random.Random) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind, replacement) for each mutation of a node."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in SWAPPED:
            yield "comparison", ast.Compare(left, [SWAPPED[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in SWAPPED:
            yield "arithmetic", ast.BinOp(left, SWAPPED[type(op)](), right)
        case ast.BoolOp(op, values):
            yield "connective", ast.BoolOp(SWAPPED[type(op)](), values)
        case ast.Constant(value) if type(value) in (int, float):
            yield "constant", ast.Constant(value + rng.choice((-1, 1)))
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield "condition", ast.UnaryOp(ast.Not(), test)
        case ast.Raise() | ast.AugAssign() | ast.Expr(ast.Call()):
            yield "statement", ast.Pass()
        case ast.Call(fn, [first, second, *rest], keywords) if not {ast.Starred} & {type(first), type(second)}:
            yield "arguments", ast.Call(fn, [second, first, *rest], keywords)


def mutants(path: pathlib.Path, rng: random.Random) -> list[tuple[str, str]]:
    """Return (kind, source) of all mutants of a file."""
    source, mutated = path.read_text(), []
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node):
        for kind, other in changes(node, rng):
            old = node.test if kind == "condition" else node
            begin, end = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(other))
            text = text if kind in ("statement", "constant") else f"({text})"
            mutated.append((kind, (source.encode()[:begin] + text.encode() + source.encode()[end:]).decode()))
        if not isinstance(node, SKIPPED):
            for name, value in ast.iter_fields(node):
                if name not in ("annotation", "returns"):
                    for child in value if isinstance(value, list) else [value]:
                        if isinstance(child, ast.AST):
                            visit(child)

    visit(ast.parse(source))
    return mutated


class Tests:
    """The tests that execute a line, from the files that pytest-cov and `--junitxml` write."""

    def __init__(self, coverage_file: str, durations_file: str):
        import coverage

        self._data = coverage.CoverageData(coverage_file)
        self._data.read()
        self._root = next(path for path in self._data.measured_files() if path.endswith("decjax/__init__.py")).removesuffix(
            "decjax/__init__.py"
        )
        self._seconds: dict[str, float] = collections.defaultdict(float)
        for case in xml.etree.ElementTree.parse(durations_file).iter("testcase"):
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            self._seconds[name] += float(case.attrib["time"])

    def of(self, path: pathlib.Path, lines: range, budget_s: float) -> list[str]:
        """Return the quickest tests of some lines of a file, or of their function, as many as take `budget_s` seconds together."""
        contexts = self._data.contexts_by_lineno(f"{self._root}{path.relative_to(ROOT)}")
        for span in (lines, _function(path, lines)):
            names = {context.rpartition("|")[0] for line in span for context in contexts.get(line, ())} & self._seconds.keys()
            quickest = sorted(names, key=lambda name: (self._seconds[name], name))
            totals_s = itertools.accumulate(self._seconds[name] for name in quickest)
            if names:
                return [name for name, total_s in zip(quickest, totals_s) if total_s <= budget_s] or quickest[:1]
        files = {test for name in (path.stem, path.parent.name) for test in (ROOT / "tests").glob(f"{name}*_test.py")}
        return sorted(str(test.relative_to(ROOT)) for test in files)


def _function(path: pathlib.Path, lines: range) -> range:
    """Return the lines of the innermost function around some lines of a file; none outside of functions."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    spans = [range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in functions]
    return min((span for span in spans if lines.start in span), key=len, default=range(0))


def failing(copy: pathlib.Path, tests: list[str], timeout_s: float, *options: str) -> str | None:
    """Return the first test that fails, or "timeout"; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *options, *tests]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "timeout"
    match = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return None if done.returncode in (0, 5) else match[1] if match else f"exit code {done.returncode}"  # 5: no tests


def fate(copy: pathlib.Path, path: pathlib.Path, source: str, tests: list[str], timeout_s: float) -> str:
    """Return the test that kills a mutant, or "survived"."""
    if not tests:
        return "survived, no test executes it"
    place, original, options = copy / path.relative_to(ROOT), path.read_text(), []
    while True:
        place.write_text(source)
        killer = failing(copy, tests, timeout_s, *options)
        place.write_text(original)
        if not killer:
            return "survived"
        single = "::" in killer  # otherwise a timeout, or a file that cannot be imported
        if not failing(copy, [killer] if single else tests, timeout_s, *options):
            return killer
        if not single:
            return f"unknown: {killer}, also without the mutant"
        options += ["--deselect", killer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    arguments = parser.parse_args()
    rng, out = random.Random(arguments.seed), pathlib.Path(arguments.out)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    files_of = {
        name: sorted(path for path in (ROOT / "decjax" / name).rglob("*.py") if path.name != "__init__.py") for name in PACKAGES
    }
    known = Tests(arguments.coverage, arguments.durations)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = pathlib.Path(folder, "tree")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "site", "__pycache__"))
        os.environ["DECJAX_TEST_CACHE"] = os.environ.get("DECJAX_TEST_CACHE") or folder
        for index in range(arguments.count):
            paths = files_of[PACKAGES[index % len(PACKAGES)]]
            (path,) = rng.choices(paths, [path.stat().st_size for path in paths])
            kind, source = rng.choice(mutants(path, rng))
            header, *diff = [*difflib.unified_diff(path.read_text().splitlines(), source.splitlines(), lineterm="", n=0)][2:]
            first, _, count = re.match(r"@@ -(\d+)(,(\d+))? ", header).groups()
            lines = range(int(first), int(first) + int(count or 1))
            mutant = {"file": str(path.relative_to(ROOT)), "kind": kind, "diff": diff}
            if not any(mutant.items() <= row.items() for row in rows):
                tests = known.of(path, lines, arguments.budget_s)
                rows.append(mutant | {"fate": fate(copy, path, source, tests, arguments.timeout_s)})
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(f"{index + 1}/{arguments.count} {mutant['file']} {kind}: {rows[-1]['fate']}", flush=True)
    survivors = [row for row in rows if row["fate"].startswith(("survived", "unknown"))]
    for row in survivors:
        print("", f"{row['file']}: {row['fate']}", *row["diff"], sep="\n")
    print(f"\n{len(rows) - len(survivors)} of {len(rows)} killed; kinds:", dict(collections.Counter(row["kind"] for row in rows)))


if __name__ == "__main__":
    main()
