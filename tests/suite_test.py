"""The lists of tests name existing tests."""

import pathlib
import random
import subprocess
import time

import pytest

from tests import commands, conftest, mutants

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("line", [line for listed in conftest.MARKED.values() for line in listed])
def test_what_is_listed_is_there(line):
    file, _, case = line.partition("::")
    name = case.partition("[")[0]
    assert f"def {name}(" in (TESTS / file).read_text() if case else (TESTS / file).exists()


def test_mutants_are_programs_with_one_change(tmp_path):
    (path := tmp_path / "module.py").write_text(
        "def f(x):\n    if x < 2 and 'é':\n        f(x, 'é')\n    x += 3\n    return x * x\n"
    )
    found = mutants.mutants(path, random.Random(0))
    assert {kind for kind, _ in found} == {
        "comparison",
        "connective",
        "condition",
        "constant",
        "statement",
        "arguments",
        "arithmetic",
    }
    for _, source in found:
        compile(source, "module.py", "exec")
        lines = zip(source.splitlines(), path.read_text().splitlines(), strict=True)
        assert sum(ours != theirs for ours, theirs in lines) == 1


def test_orphans_are_ended_and_the_server_of_commands_is_not():
    commands.run("launch.parts", "codec")
    orphan = int(subprocess.run(["sh", "-c", "sleep 999 >&2 & echo $!"], stdout=subprocess.PIPE, text=True, check=True).stdout)
    stays = subprocess.Popen(["sleep", "999"], env={})
    conftest.end_what_is_left()
    deadline = time.monotonic() + 60
    while (state := pathlib.Path(f"/proc/{orphan}/stat")).exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stays.poll() is None and commands.run("launch.parts", "codec").returncode == 0
    stays.kill()
    stays.wait()
