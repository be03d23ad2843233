"""The scripts in examples/ train as their first lines say, and docs/tutorials/ shows the difference between the Flax scripts."""

import difflib
import os
import re
import subprocess
import sys

import pytest

from tests import commands

EXAMPLES = commands.ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
MOST_LINES = 80


def test_the_list_of_examples():
    assert NAMES == ["diloco", "flax_after", "flax_before", "gossip_cnn", "own_loop", "powersgd"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_documented(name):
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) <= MOST_LINES and max(map(len, lines)) <= 132
    assert f"examples/{name}.py" in (commands.ROOT / "docs/get_started.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_an_example_learns(name):
    (first, *_) = re.findall(r"^((?:\w+=\w+ )?python -m examples\.\w+)$", (EXAMPLES / f"{name}.py").read_text(), re.MULTILINE)
    *variables, _, _, module = first.split()
    assert module == f"examples.{name}"
    environment = os.environ | dict(variable.split("=") for variable in variables)
    command = [sys.executable, "-m", module]
    ran = subprocess.run(command, cwd=commands.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", ran.stdout, re.MULTILINE)]
    assert len(losses) >= 4 and losses[-1] < 0.5 * losses[0], ran.stdout
    accuracies = [float(accuracy) for accuracy in re.findall(r"(?:accuracy|model|worker 0) (\d\.\d{3})", ran.stdout)]
    assert all(accuracy > 0.8 for accuracy in accuracies) and (accuracies or "averaged model: loss" in ran.stdout), ran.stdout


def test_the_page_shows_the_difference():
    before, after = ((EXAMPLES / f"flax_{name}.py").read_text().splitlines() for name in ("before", "after"))
    lines = difflib.unified_diff(before, after, "examples/flax_before.py", "examples/flax_after.py", n=1, lineterm="")
    difference = "".join(f"{line.rstrip()}\n" for line in lines)
    (shown,) = re.findall(r"```diff\n(.*?)```", (commands.ROOT / "docs/tutorials/gpu_nodes.md").read_text(), re.DOTALL)
    assert shown == difference, f"put this into the page:\n{difference}"
    code = [line[1:] for line in shown.splitlines()[2:] if line[:1] == "+" and "-m examples" not in line and '"""' not in line]
    assert len(list(filter(str.strip, code))) <= 12
