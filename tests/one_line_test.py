"""A config field and an option of a part are each declared on one line and nowhere else."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
USE = """
from configs import lm
from decjax import config

spec = config.resolve(lm.get_config("smoke,workers=2,pause_s=1.5,mixer=choco(codec=dct(overlap=0.25))"))
assert spec.pause_s == spec.document["pause_s"] == 1.5 and "overlap=0.25" in spec.mixer.options["codec"]
for shorthand in ("pause_s=-1", "mixer=choco(codec=dct(overlap=2))"):
    try:
        config.resolve(lm.get_config(f"smoke,workers=2,{shorthand}"))
        raise SystemExit(f"{shorthand} is not refused")
    except (ValueError, config.ConfigError) as error:
        print(error)
"""


def insert(path: pathlib.Path, above: str, line: str) -> None:
    """Insert one line above another."""
    text = path.read_text()
    assert text.count(above) == 1
    path.write_text(text.replace(above, f"{line}\n{above}"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the packages with two added lines."""
    folder = tmp_path_factory.mktemp("tree")
    for package in ("decjax", "configs", "launch"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    insert(folder / "decjax/config/spec.py", "    simulate: bool = False\n", "    pause_s: NonNegative = 0.0")
    insert(folder / "decjax/contrib/demo/codec.py", "    chunk: Count = 64\n", "    overlap: Share = 1.0")
    return folder


def python(tree: pathlib.Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=tree, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_they_are_listed(tree):
    assert "pause_s" in python(tree, "-m", "launch.parts", "config")
    told = python(tree, "-m", "launch.parts", "codec", "dct")
    assert "overlap" in told and "more than 0 and at most 1" in told


def test_they_are_checked_and_set_by_the_shorthand(tree):
    refused = python(tree, "-c", USE).splitlines()
    assert refused[0] == "shorthand pause_s=-1 must be at least 0"
    assert "overlap=2 must be more than 0 and at most 1" in refused[1]
