"""Figures and tables of the pages are those of the recorded results."""

import shutil

from matplotlib import image
import numpy as np
import pytest

from experiments import figures
from tests import commands

DOCS = commands.ROOT / "docs"


def test_every_figure_of_the_pages_is_drawn_or_has_a_reason():
    assert {*figures.FIGURES, *figures.UNRECORDED} == {path.stem for path in (DOCS / "images").iterdir()}
    assert not {*figures.FIGURES} & {*figures.UNRECORDED}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A copy of the pages without figures, and with empty tables, after the command."""
    pages = tmp_path_factory.mktemp("pages")
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("*.png"), dirs_exist_ok=True)
    names = [name for name in figures.FIGURES if name not in figures.COMPUTED]
    for page in pages.rglob("*.md"):
        text = page.read_text()
        for name in (*names, "heterogeneity_order"):
            before, start, rest = text.partition(f"<!-- table {name} -->\n")
            text = before + start + rest[rest.index("<!-- end -->") :] if start else text
        page.write_text(text)
    done = commands.run("experiments.figures", f"--pages={pages}", f"--figures={','.join(names)}")
    assert done.returncode == 0, done.stderr
    return pages


def test_the_tables_of_the_pages_are_those_of_the_results(drawn):
    for path in sorted(drawn.rglob("*.md")):
        assert path.read_text() == (DOCS / path.relative_to(drawn)).read_text(), path


def test_the_figures_of_the_pages_are_those_of_the_results(drawn):
    pngs = sorted((drawn / "images").glob("*.png"))
    assert len(pngs) == len(figures.FIGURES) - len(figures.COMPUTED)
    for path in pngs:
        new, old = (image.imread(str(each)) for each in (path, DOCS / "images" / path.name))
        assert new.shape == old.shape and np.abs(new - old).mean() < 0.01, path.name
