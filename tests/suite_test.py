"""The suite knows its own tests."""

import pathlib

import pytest

from tests import conftest

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("line", [line for listed in conftest.MARKED.values() for line in listed])
def test_what_is_listed_is_there(line):
    file, _, case = line.partition("::")
    name = case.partition("[")[0]
    assert f"def {name}(" in (TESTS / file).read_text() if case else (TESTS / file).exists()
