"""Outputs of commands: each is tried before the work starts, and neither a smoke run nor a subset of rows replaces full results.

And how a signal ends an experiment.
"""

from collections.abc import Callable
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import threading
from typing import Any, NamedTuple
import warnings

from absl import flags, logging
import pytest

from experiments import script, trials
from experiments.bench.cluster import group
from launch import command
from tests import commands
from tests.help_test import MODULES

STARTED = [module for module in MODULES if module.startswith("experiments.")]
WRITTEN = ("out", "workdir", "results", "pages")  # names of flags that are outputs in every experiment


class Command(NamedTuple):
    """A command that only reads its flags."""

    flags: dict[str, Any]  # by name
    start: Callable[..., str]  # with these arguments: the one-line refusal, or "" if they are accepted


@pytest.fixture
def defined(monkeypatch, capsys):
    """`defined(module)` defines the flags of a command, in place of those of previously imported commands."""
    held = flags.FLAGS._flags()
    others = {name: flag for name, flag in held.items() if not _is_of_every_command(name)}
    before, verbosity = set(held) - set(others), logging.get_verbosity()
    for name in others:
        del held[name]

    def define(module):
        real, reached = (command if module == "experiments.compare" else script), []
        run = real.run

        def start(*arguments):
            for name in held:
                held[name].unparse()
            reached.clear()
            monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                run(lambda *_: reached.append(module))
            code, said = ended.value.code, capsys.readouterr().err
            assert (not code and reached) or (code == 2 and not reached and said.count("\n") == 1), (module, arguments, code, said)
            return said if code else ""

        monkeypatch.setattr(real, "run", lambda main, errors=(): None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # another test has imported the module
            runpy.run_module(module, run_name="__main__")
        return Command(dict(held), start)

    monkeypatch.setattr(command.app, "run", lambda main, flags_parser: sys.exit(main(flags_parser(sys.argv))))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(command, "_leaving", lambda: None)
    yield define
    logging.set_verbosity(verbosity)
    for name in set(held) - before:
        if not (flags.FLAGS.find_module_defining_flag(name) or "").startswith("launch."):  # of modules imported meanwhile
            del held[name]
    held.update(others)


def _is_of_every_command(name):
    return (flags.FLAGS.find_module_defining_flag(name) or "").startswith(("absl", "launch.command"))


def outputs(found):
    return {name: flag.parser.kind for name, flag in found.items() if isinstance(flag.parser, command.Output)}


def needed(found, tmp_path, but=""):
    """The flag that some commands require."""
    return [f"--out={tmp_path / 'out'}"] if but != "out" and outputs(found).get("out") == "folder" else []


def test_there_are_many_of_them():
    assert len(STARTED) > 30


@pytest.mark.parametrize("module", STARTED)
def test_every_output_is_tried_before_the_work(module, defined, tmp_path):
    (tmp_path / "file").write_text("mine")
    found, start = defined(module)
    assert {*outputs(found)} == {name for name in WRITTEN if name in found}
    for name, kind in outputs(found).items():
        rest = needed(found, tmp_path, but=name)
        wrong = ["", " ", "/proc/none/x", tmp_path / "file/x", "/" + "x" * 300]
        wrong += [tmp_path / "file"] if kind == "folder" else [tmp_path, tmp_path / "none/x.png"]
        wrong += [tmp_path / "x", tmp_path / "x.docx"] if kind == "figure" else []
        for text in wrong:
            said = start(*rest, f"--{name}={text}")
            assert re.match(f"error: --{name}[= ]", said) and "; " in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("module", STARTED)
def test_numbers_are_finite(module, defined, tmp_path):
    found, start = defined(module)
    for name, flag in found.items():
        if "float" in flag.flag_type():
            for value in "nan", "inf", "-inf":
                said = start(*needed(found, tmp_path), f"--{name}={value}")
                assert re.search(f"--{name}={value}", said), said


@pytest.mark.parametrize("module", STARTED)
def test_neither_smoke_runs_nor_parts_replace_whole_results(module, defined, tmp_path):
    (found, start), page, file = defined(module), tmp_path / "pages/a.md", tmp_path / "whole.png"
    page.parent.mkdir()
    for path in page, file:
        path.write_text("whole")
    parts = ["--smoke"] if "smoke" in found else []
    parts += [f"--{name}={one_of(flag)}" for name, flag in found.items() if hasattr(flag, "is_complete")]
    assert bool(parts) or not {"smoke", "row", "only"} & set(found)
    kinds = outputs(found) | ({"results": "folder"} if "--smoke" not in parts else {})
    for argument in parts:
        if "pages" in found:
            said = start(*needed(found, tmp_path), argument, f"--pages={page.parent}")
            assert said.startswith(f"error: {argument} would write") and "--pages=" in said, said
        for name in (name for name, kind in kinds.items() if kind != "folder" and (name != "results" or argument == "--smoke")):
            said = start(*needed(found, tmp_path, but=name), argument, f"--{name}={file}")
            assert said.startswith(f"error: {argument} would ") and f"--{name}={file}" in said, said
            if name != "results":
                assert not start(argument, f"--{name}={tmp_path / 'new.png'}")
    assert page.read_text() == file.read_text() == "whole"


def one_of(flag):
    """A value that selects a subset."""
    if isinstance(flag.default, list):
        return flag.default[0] if flag.default else "dirichlet_0.1"
    return flag.default - 1


@pytest.mark.parametrize("module", STARTED)
def test_results_are_written_in_one_place(module):
    """Only then can smoke runs and subsets be told from full results."""
    text = (commands.ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert "FLAGS.pages" not in text
    assert 'command.FOLDER, "out"' not in text or "FLAGS.out" not in text
    assert not re.search(r"(draw|save)\(str\(out", text)


@pytest.mark.parametrize("argument, folder", [("", ""), ("--smoke", "smoke"), ("--row=a", "part"), ("--smoke --row=a", "smoke")])
def test_smoke_runs_and_parts_have_results_of_their_own(argument, folder, monkeypatch, tmp_path):
    values = flags.FlagValues()
    flags.DEFINE(command.FOLDER, "out", None, "", flag_values=values)
    flags.DEFINE_bool("smoke", False, "", flag_values=values)
    flags.DEFINE_multi_string("row", [], "", flag_values=values)
    monkeypatch.setattr(script.flags, "FLAGS", values)
    script.selects("row")
    (tmp_path / "found.json").write_text("whole")
    values(["command", f"--out={tmp_path}", *argument.split()])
    table = script.table("", "loss")
    script.publish("found", table, lambda path: pathlib.Path(path).touch(), loss=1.5)
    assert {path.name for path in (tmp_path / folder).iterdir() if path.is_file()} == {"found.json", "found.png"}
    assert "1.5" in (tmp_path / folder / "found.json").read_text()
    assert ((tmp_path / "found.json").read_text() == "whole") == bool(argument)


def test_results_of_a_failure_stay_as_they_were(tmp_path):
    script.save(str(path := tmp_path / "found.json"), loss=1.5)
    whole = path.read_text()
    with pytest.raises(TypeError):
        script.save(str(path), loss=object())
    assert path.read_text() == whole and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("submitted", [2, 9], ids=["while runs are being submitted", "when all are"])
def test_a_signal_ends_the_trainings_and_is_told_in_one_line(submitted, monkeypatch, tmp_path, capsys):
    started, both = [], threading.Event()

    def train(trial, cores, count):
        started.append(process := subprocess.Popen(["sleep", "600"]))
        if len(started) == 2:
            both.set()
        return process

    def runs():
        for seed in range(9):
            if seed == submitted:
                interrupt()
            yield trials.Trial(tmp_path / str(seed), "configs/lm.py")
        if submitted == 9:
            interrupt()

    def interrupt():
        assert both.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    def main():
        trials.Pool(2).make(runs())

    monkeypatch.setattr(trials, "start", train)
    monkeypatch.setattr(command.app, "run", lambda main, flags_parser: main(["command"]))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    flags.FLAGS.mark_as_parsed()
    with pytest.raises(SystemExit) as ended:
        script.run(main)
    assert ended.value.code == 128 + signal.SIGTERM
    assert re.fullmatch("error: interrupted by SIGTERM; the same command .*\n", capsys.readouterr().err)
    assert [process.wait(60) for process in started] == [-signal.SIGTERM] * 2


def test_a_command_in_the_box_that_a_signal_stopped_ends_this_one_too():
    group.done("calibration", 0)
    with pytest.raises(group.Failed, match="calibration ended with exit code 2; the same command continues"):
        group.done("calibration", 2)
    with pytest.raises(SystemExit) as ended:
        group.done("calibration", 143)
    assert ended.value.code == 143
