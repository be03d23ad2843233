"""launch/parts.py as a user runs it, and its tables against the registry."""

import inspect
import io
import re

import pytest
import rich.console

from decjax import registry
from launch import parts
from tests import commands


def run(*arguments):
    result = commands.run("launch.parts", *arguments, COLUMNS="160")
    assert max(map(len, result.stdout.splitlines()), default=0) <= parts.WIDTH
    return result


def words(text):
    return " ".join(text.split())


def test_all_kinds_with_their_parts():
    result = run()
    assert result.returncode == 0 and not result.stderr
    for kind in registry.KINDS:
        assert f"\n {kind} " in result.stdout
    for name in registry.names("topology"):
        assert f" {name}" in result.stdout


def test_a_kind_with_summaries_and_traits():
    result = run("topology")
    assert result.returncode == 0 and not result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(" exponential ")]
    assert "Self and the workers" in line and "directed, static" in line
    assert "needs: a power of two workers" in words(result.stdout)


def test_a_part_with_options_defaults_and_docstring():
    result = run("topology", "matcha")
    assert result.returncode == 0 and not result.stderr
    rows = [words(line) for line in result.stdout.splitlines()]
    assert "budget float, more than 0 and at most 1 0.5" in rows and "base str ring" in rows
    assert "rounds int, at least 1 and at most 1024, or none None" in rows
    assert "Reference: Wang et al." in result.stdout
    assert "It has no options." in run("topology", "ring").stdout


def test_options_hold_what_a_config_can():
    """Options inherited from optax, functions, trees and arguments of optimizer constructors are left out."""
    found = {name: registry.part("optimizer", name).options for name in registry.names("optimizer")}
    assert "muon" in found and not [name for name in found if name.startswith("scale_by_")]
    assert found["lbfgs"].keys() == {"memory_size", "scale_init_precond"} and "hessian_diagonal_fn" not in found["sophia"]
    assert "muon_weight_dimension_numbers" not in found["muon"] and found["muon"]["ns_coeffs"].default[0] == 3.4445
    assert found["sgd"]["momentum"][:3] == (None, float, True) and found["adamw"]["mu_dtype"].kind is str
    assert found["muon"]["preconditioning"].choices[0] == "frobenius"
    assert not [entry for options in found.values() for entry in options.values() if " at 0x" in str(entry.default)]


@pytest.mark.parametrize("kind", registry.KINDS)
def test_docstrings_tell_of_every_option(kind):
    """Only decjax's own parts: docstrings of optax and of other tests' parts are out of scope."""
    known = [registry.part(kind, name) for name in registry.names(kind)]
    own = [part for part in known if part.factory.__module__.startswith("decjax.")]
    assert own
    for part in own:
        told = inspect.getdoc(part.factory) or ""
        untold = [name for name, option in part.options.items() if not option.help and not re.search(rf"\b{name}\b", told)]
        assert untold == [], part.name


def lines(shown, columns):
    """Return what a console of so many columns prints."""
    terminal = rich.console.Console(file=io.StringIO(), width=columns)
    for each in shown:
        terminal.print(each, markup=False)
    return [line.rstrip() for line in terminal.file.getvalue().splitlines()]


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("kind", registry.KINDS)
def test_listings_fit_and_break_no_word_at_100_columns(kind, columns):
    known = {word for name in registry.names(kind) for word in _words_of(registry.part(kind, name))}
    for shown in (parts.kinds(), parts.parts(kind)):
        found = lines(shown, columns)
        assert max(map(len, found)) <= columns
    printed = {word for line in found[3:] for word in line.split()}
    assert columns < 100 or printed - known - set(registry.names(kind)) == set()


def _words_of(part):
    return {word for text in (part.summary, *parts._traits(part)) for word in text.split()}


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("kind", registry.KINDS)
def test_each_part_fits_and_says_what_its_docstring_says(kind, columns):
    for name in registry.names(kind):
        told = inspect.getdoc(registry.part(kind, name).factory) or ""
        found = lines(parts.part(kind, name, columns), columns)
        assert max(map(len, found)) <= columns, name
        assert columns < 100 or words(told) in words(" ".join(found)), name


def test_an_entry_that_is_too_long_is_wrapped_with_what_continues_it():
    told = """Says what it is.

Args:
    rank: R, which is told in a line that is longer than the terminal, of which the rest
        comes here, in a second line.
    gate: short,
        and continued.

    >>> as_it(   is)"""
    assert (
        parts.wrapped(told, 60)
        == """Says what it is.

Args:
    rank: R, which is told in a line that is longer than the
        terminal, of which the rest comes here, in a second
        line.
    gate: short,
        and continued.

    >>> as_it(   is)"""
    )


def test_whatever_is_registered_is_listed(monkeypatch):
    monkeypatch.setitem(registry._parts, "topology", dict(registry._parts["topology"]))

    @registry.register("topology", "of_ones_own", static=True, directed=False, needs="patience")
    def of_ones_own(num_workers, depth=(1, 2), share: float | None = None):
        del num_workers, depth, share

    (table,) = parts.parts("topology")
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    row = cells[0].index("of_ones_own")
    assert [column[row] for column in cells] == ["of_ones_own", "", "static\nneeds: patience"]
    *lines, table = parts.part("topology", "of_ones_own")
    terminal = rich.console.Console(file=io.StringIO(), record=True, width=100)
    terminal.print(*lines)
    description = terminal.export_text()
    assert description.splitlines()[:3] == ["topology of_ones_own", "static", "needs: patience"]
    assert "no description" in description
    rows = [[str(cell) for cell in column.cells] for column in table.columns]
    assert rows == [["depth", "share"], ["any", "float or none"], ["(1, 2)", "None"]]


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("colour",), "kind 'colour' is unknown; use one of task, model, "),
        (("topology", "rings"), "topology 'rings' is unknown; use one of complete, ring, "),
        (("topology", "ring", "n"), "unexpected argument 'n'"),
        (("--colour",), "colour"),
    ],
)
def test_mistakes_are_one_line(arguments, problem):
    result = run(*arguments)
    assert result.returncode == 2 and not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and problem in line
