"""experiments/related: every row's oracle holds, on small samples; what it writes; unknown rows."""

import pytest

from experiments import related
from tests import commands


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page that the command has filled with all rows."""
    path = tmp_path_factory.mktemp("pages") / "related.md"
    path.write_text("before\n<!-- table related -->\n<!-- end -->\nafter\n")
    done = commands.run("experiments.related", "--smoke", f"--pages={path.parent}", OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return path.read_text()


@pytest.mark.parametrize("row", related.ROWS, ids=lambda row: row.name)
def test_oracle_holds(row, page):
    (cells,) = [line.split("|") for line in page.splitlines() if line.startswith(f"| {row.name}, {row.source} ")]
    assert cells[5].strip() == "yes" and float(cells[3]) <= row.most


def test_page_keeps_what_is_around_the_table(page):
    assert page.startswith("before\n") and page.endswith("after\n") and "`python -m launch.plan --links=" in page


def test_unknown_system_is_refused():
    done = commands.run("experiments.related", "--only=warp drive")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "warp drive" in done.stderr
