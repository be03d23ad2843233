"""`make docs` fails on any mistake in pages, docstrings and notebooks, and prints nothing on success; links of README work."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
VENV = pathlib.Path(sys.executable).parents[1]
MODULE = '''"""A module."""


def double(x: int) -> int:
    """Return twice a number{text}.

    Args:
        {name}: the number.

    Returns:
        Its double.
    """
    return 2 * x
'''
PAGE = "# Page\n\n::: module.double\n\n"


@pytest.fixture
def build(tmp_path):
    """Run the Makefile's recipe on a page, a module and a notebook with the settings of mkdocs.yml."""
    pytest.importorskip("mkdocs", reason="make docs installs mkdocs")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("javascripts", "stylesheets"):
        shutil.copytree(ROOT / "docs" / folder, tmp_path / "docs" / folder)
    installed = tmp_path / "venv" / "installed-docs"
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "bin").symlink_to(VENV / "bin")

    def build(page="", text="", name="x", cell=None):
        pages = ["index.md"] + ["notebook.ipynb"] * (cell is not None)
        settings = {"INHERIT": f"{ROOT}/mkdocs.yml", "nav": pages, "hooks": [f"{ROOT}/tests/site_links.py"]}
        (tmp_path / "mkdocs.yml").write_text(json.dumps(settings))
        (tmp_path / "docs" / "index.md").write_text(PAGE + page)
        (tmp_path / "module.py").write_text(MODULE.format(text=text, name=name))
        if cell is not None:
            cells = [{"cell_type": "markdown", "metadata": {}, "id": "a", "source": cell}]
            notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
            (tmp_path / "docs" / "notebook.ipynb").write_text(json.dumps(notebook))
        command = ["make", "docs", "VENV=venv", "--old-file", str(installed.relative_to(tmp_path)), "--no-print-directory"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return build


@pytest.mark.parametrize(
    "mistake, named",
    [
        ({"page": "[link](missing.md)"}, "missing.md"),
        ({"page": "[link](/missing)"}, "/missing"),
        ({"page": "![image](missing.png)"}, "missing.png"),
        ({"page": '<a href="missing.html">link</a>'}, "missing.html"),
        ({"page": "[link](#missing)"}, "#missing"),
        ({"page": "[link][module.missing]"}, "module.missing"),
        ({"page": "::: module.missing"}, "module.missing"),
        ({"text": " as [this][module.missing]"}, "module.missing"),
        ({"name": "missing"}, "Parameter 'missing' does not appear in the function signature"),
        ({"cell": "# Notebook\n\n[link](missing.md)"}, "missing"),
        ({"cell": "# Notebook\n\n[link](index.md#missing)"}, "#missing"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else re.sub(r"\W+", "_", value),
)
def test_a_mistake_fails(build, mistake, named):
    done = build(**mistake)
    assert done.returncode != 0 and named in done.stdout, done.stdout


def test_pages_without_mistakes_are_built_silently(build, tmp_path):
    done = build(
        page="[link](#page), [link](notebook.ipynb), [double][module.double]",
        text=" like [this][module.double]",
        cell="# Notebook\n\n[link](index.md#page)",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "site" / "index.html").exists()


def anchors(path):
    """Return the anchors of the headings of a page, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_of_the_site_work(name):
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()) if "://" not in target]
    assert targets
    for target in targets:
        file, _, anchor = target.partition("#")
        path = ROOT / (file or name)
        assert path.exists() and (not anchor or anchor in anchors(path)), target
