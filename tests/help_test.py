"""--help of every command summarizes it in one line, and has examples that its flags accept."""

import ast
import functools
import pathlib
import re
import shlex

import pytest

from launch import config_file
from tests import commands

STARTED = re.compile(r"^    (?:command|script)\.run\(", re.MULTILINE)


def modules():
    """Commands for users; others with a main part, as in experiments/bench/cluster, are started by them."""
    found = [path for top in ("launch", "experiments", "experiments/bench") for path in sorted((commands.ROOT / top).glob("*.py"))]
    return [".".join(path.relative_to(commands.ROOT).with_suffix("").parts) for path in found if STARTED.search(path.read_text())]


MODULES = [module for module in modules() if module != "experiments.script"]


def docstring(module):
    return ast.get_docstring(ast.parse((commands.ROOT / f"{module.replace('.', '/')}.py").read_text()), clean=False)


def examples(text):
    """Return the command lines of a docstring as (module, its words, the words after `--`)."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("    ") and (command := re.search(r"\bpython -m ([\w.]+)(.*)", line)):
            words = shlex.split(command[2], comments=True)
            cut = words.index("--") if "--" in words else len(words)
            found.append((command[1], words[:cut], words[cut + 1 :]))
    return found


@functools.cache
def told(module):
    result = commands.run(module, "--helpfull")
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def known(module):
    """Return the names of its flags."""
    return {
        name
        for names in re.findall(r"^ +-\w,--(?:\[no\])?(\w+)|^ +--(?:\[no\])?(\w+)", told(module), re.MULTILINE)
        for name in names
    }


def check(module, words):
    """Check that a command has the flags and files of an example, and its config the shorthand."""
    for word in words:
        if flag := re.match(r"--(\w+)", word):
            assert flag[1] in known(module), f"{module} has no --{flag[1]}"
        if path := re.search(r"configs/[\w/]+\.\w+", word):
            assert (commands.ROOT / path[0]).exists(), path[0]
        if text := re.fullmatch(r"--(?:config|model)=(configs/\w+\.py.*)", word):
            config = config_file.get_config(text[1])
            assert config_file.misplaced(config, words) == ""


@pytest.mark.parametrize("module", MODULES)
def test_help_answers_in_one_line_and_has_an_example_that_works(module):
    text = docstring(module)
    first, second, *_ = text.splitlines()
    assert len(first) > 30 and first[-1] in ".?" and not second, "the first line is a sentence by itself"
    assert first in told(module)
    own = [words for name, words, _ in examples(text) if name == module]
    assert own and not any(re.search(r"…|[A-Z]{4,}", word) for words in own for word in words), "an example that is complete"
    for name, words, passed in examples(text):
        assert f"python -m {name}" in told(module)
        check(name, words)
        started = [word.partition("=")[2] for word in words if word.startswith("--module=")] or ["launch.train"]
        check(started[0], passed)


@pytest.mark.parametrize(
    "module, names",
    [
        ("launch.train", ("coordinator", "num_processes", "process_index")),
        ("launch.calibrate", ("coordinator", "num_processes", "process_index")),
        ("launch.local", ("num_processes", "[no]elastic", "chaos", "module")),
        ("launch.sweep", ("parallel", "processes", "sweep")),
    ],
)
def test_help_shows_the_flags_that_another_module_defines(module, names):
    shown = commands.run(module, "--help").stdout
    assert [name for name in names if f"  --{name}: " not in shown] == []


def test_all_commands_are_seen():
    assert {"launch.train", "launch.cluster", "experiments.compare", "experiments.bench.codecs"} <= set(MODULES)
    assert pathlib.Path(commands.ROOT / "launch/train.py").exists() and len(MODULES) > 20


@pytest.mark.parametrize(
    "text, found",
    [
        ("    python -m a.b --c=1  # what it does", [("a.b", ["--c=1"], [])]),
        ("    srun -N4 python -m a.b --c=1 -- --d", [("a.b", ["--c=1"], ["--d"])]),
        ("    python -m a.b --c=1 \\\n        --d='1 2'", [("a.b", ["--c=1", "--d=1 2"], [])]),
        ("prose about `python -m a.b --e`", []),
    ],
)
def test_examples_are_read(text, found):
    assert examples(text) == found
