"""tests/commands.py: its forks behave like the command."""

import os
import signal
import subprocess
import sys

import pytest

from tests import commands


@pytest.mark.parametrize("arguments, code", [(["--workers=4"], 0), (["--workers=0"], 2), (["--help"], 0)])
def test_a_fork_is_the_command(arguments, code):
    command = ["launch.topologies", *arguments]
    ours = commands.run(*command, COLUMNS="100")
    theirs = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=commands.ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "100"},
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
    assert ours.returncode == code and ours.stdout + ours.stderr


def test_an_interrupt_during_imports_is_one_line():
    code = "import launch, signal; signal.signal(signal.SIGINT, signal.default_int_handler); signal.raise_signal(signal.SIGINT)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGINT and result.stderr == "error: interrupted before anything began\n"
