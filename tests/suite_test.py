"""The suite knows its own tests."""

import pathlib
import random

import pytest

from tests import conftest, mutants

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("line", [line for listed in conftest.MARKED.values() for line in listed])
def test_what_is_listed_is_there(line):
    file, _, case = line.partition("::")
    name = case.partition("[")[0]
    assert f"def {name}(" in (TESTS / file).read_text() if case else (TESTS / file).exists()


def test_mutants_are_programs_with_one_change(tmp_path):
    (path := tmp_path / "module.py").write_text(
        "def f(x):\n    if x < 2 and 'é':\n        f(x, 'é')\n    x += 3\n    return x * x\n"
    )
    found = mutants.mutants(path, random.Random(0))
    assert {kind for kind, _ in found} == {
        "comparison",
        "connective",
        "condition",
        "constant",
        "statement",
        "arguments",
        "arithmetic",
    }
    for _, source in found:
        compile(source, "module.py", "exec")
        lines = zip(source.splitlines(), path.read_text().splitlines(), strict=True)
        assert sum(ours != theirs for ours, theirs in lines) == 1
