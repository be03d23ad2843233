"""experiments/related: every row's oracle holds on small samples; its output; unknown rows."""

import types

import pytest

from experiments import related, script
from tests import commands

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("row", related.ROWS, ids=lambda row: row.name)
def test_oracle_holds(row):
    assert row.measure(True) <= row.most


def test_a_page_gets_the_table_and_keeps_what_is_around_it(tmp_path, monkeypatch):
    page = tmp_path / "related.md"
    page.write_text("before\n<!-- table related -->\n<!-- end -->\nafter\n")
    refused = commands.run("experiments.related", "--smoke", "--only=FCGS", f"--pages={tmp_path}")
    assert refused.returncode == 2 and "--smoke would write figures of tiny models" in refused.stderr
    given = types.SimpleNamespace(only=[], smoke=False, pages=str(tmp_path))
    monkeypatch.setattr(script.flags, "FLAGS", given)
    monkeypatch.setattr(related, "FLAGS", given)
    monkeypatch.setattr(related, "ROWS", [row for row in related.ROWS if row.name in ("FCGS", "PowerGossip")])
    assert related.main() == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "`python -m launch.train --config=configs/lm.py:" in text
    (cells,) = [line.split("|") for line in text.splitlines() if line.startswith("| FCGS, ")]
    assert cells[5].strip() == "yes" and 0 <= float(cells[3]) <= 0.02


def test_no_cell_of_the_table_divides_itself():
    assert not [row.name for row in related.ROWS if "|" in "".join((row.name, row.source, row.command, row.oracle))]


def test_pages_that_are_none_are_refused_before_anything_is_measured(tmp_path):
    done = commands.run("experiments.related", "--smoke", "--only=FCGS", f"--pages={tmp_path / 'none'}")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "has no Markdown pages; give their folder, as --pages=docs" in line and not done.stdout


def test_unknown_system_is_refused():
    done = commands.run("experiments.related", "--only=warp drive")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "warp drive" in done.stderr
