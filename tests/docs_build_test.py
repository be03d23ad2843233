"""`make docs` fails on a dead link, and prints nothing on success."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
VENV = pathlib.Path(sys.executable).parents[1]
pytest.importorskip("mkdocs", reason="make docs installs mkdocs")


@pytest.fixture
def build(tmp_path):
    """Run the Makefile's recipe on a one-page site with the settings of mkdocs.yml."""
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\nplugins: []\nextra_css: []\nextra: {{}}\nnav: [index.md]\n"
    )
    (tmp_path / "docs").mkdir()
    installed = tmp_path / "venv" / "installed-docs"
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "bin").symlink_to(VENV / "bin")

    def build(page):
        (tmp_path / "docs" / "index.md").write_text(page)
        command = ["make", "docs", "VENV=venv", "--old-file", str(installed.relative_to(tmp_path)), "--no-print-directory"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return build


@pytest.mark.parametrize("link", ["missing.md", "#missing", "/missing"])
def test_a_dead_link_fails(build, link):
    done = build(f"# Page\n\n[link]({link})\n")
    assert done.returncode != 0 and link in done.stdout and "Aborted" in done.stdout


def test_a_page_without_mistakes_is_built_silently(build, tmp_path):
    done = build("# Page\n\n[link](#page)\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "site" / "index.html").exists()
