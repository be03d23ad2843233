"""Mutation tests: small faults are put into the library one at a time, and a test must fail for each.

    python -m tests.mutants --count=100 --seed=0 --out=mutants.jsonl

Each mutant is written to a copy of the tree, where the tests that mention definitions of its file run: quick ones first, then slow
ones. A test that also fails without the mutant does not count. The same command continues from --out, and prints the surviving
mutants.
"""

import argparse
import ast
import collections
from collections.abc import Iterator
import difflib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = "gossip reduce codecs optim topology mesh train elastic config".split()
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
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


def tests_of(path: pathlib.Path, most: int) -> list[str]:
    """Return test files by number of mentions of a file's definitions; if there are none, of its package."""
    defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for names in ({path.stem, *(name for name in defined if name[0] != "_")} - {"__init__"}, {path.parent.name}):
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b") if names else None
        count = {test: len(pattern.findall(test.read_text())) for test in (ROOT / "tests").glob("*_test.py")} if pattern else {}
        if ranked := sorted((test for test in count if count[test]), key=lambda test: (-count[test], test.name)):
            return [str(test.relative_to(ROOT)) for test in ranked[:most]]
    return []


def failing(copy: pathlib.Path, tests: list[str], timeout_s: float, *options: str) -> str | None:
    """Return the first test that fails, or "timeout"; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *options, *tests]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "timeout"
    match = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return None if done.returncode in (0, 5) else match[1] if match else f"exit code {done.returncode}"  # 5: no tests


def fate(copy: pathlib.Path, path: pathlib.Path, source: str, arguments) -> str:
    """Return the test that kills a mutant, or "survived"."""
    tests, place, original = tests_of(path, arguments.most), copy / path.relative_to(ROOT), path.read_text()
    for marker in ("not slow", "slow"):
        options = ["-m", marker]
        while True:
            place.write_text(source)
            killer = failing(copy, tests, arguments.timeout_s, *options)
            place.write_text(original)
            if not killer:
                break
            single = "::" in killer  # otherwise a timeout, or a file that cannot be imported
            if not failing(copy, [killer] if single else tests, arguments.timeout_s, *options):
                return killer
            if not single:
                return f"unknown: {killer}, also without the mutant"
            options += ["--deselect", killer]
    return "survived"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"count": 100, "seed": 0, "most": 6, "timeout_s": 900.0, "out": "mutants.jsonl"}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    arguments = parser.parse_args()
    rng, out = random.Random(arguments.seed), pathlib.Path(arguments.out)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    files_of = {
        name: sorted(path for path in (ROOT / "decjax" / name).glob("*.py") if path.name != "__init__.py") for name in PACKAGES
    }
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = pathlib.Path(folder, "tree")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "site", "__pycache__"))
        os.environ["DECJAX_TEST_CACHE"] = os.environ.get("DECJAX_TEST_CACHE") or folder
        for index in range(arguments.count):
            paths = files_of[PACKAGES[index % len(PACKAGES)]]
            (path,) = rng.choices(paths, [path.stat().st_size for path in paths])
            kind, source = rng.choice(mutants(path, rng))
            diff = [*difflib.unified_diff(path.read_text().splitlines(), source.splitlines(), lineterm="", n=0)][3:]
            mutant = {"file": str(path.relative_to(ROOT)), "kind": kind, "diff": diff}
            if not any(mutant.items() <= row.items() for row in rows):
                rows.append(mutant | {"fate": fate(copy, path, source, arguments)})
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(f"{index + 1}/{arguments.count} {mutant['file']} {kind}: {rows[-1]['fate']}", flush=True)
    survivors = [row for row in rows if row["fate"].startswith(("survived", "unknown"))]
    for row in survivors:
        print("", f"{row['file']}: {row['fate']}", *row["diff"], sep="\n")
    print(f"\n{len(rows) - len(survivors)} of {len(rows)} killed:", dict(collections.Counter(row["kind"] for row in rows)))


if __name__ == "__main__":
    main()
