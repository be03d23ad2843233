"""The examples in docs/adding and docs/guides/own_loop.md run as shown.

Files are written where a page says, outside of the package; the page's commands train with them by name and fail with the errors
shown, and its tests pass.
"""

import ast
import contextlib
import importlib
import io
import json
import os
import pathlib
import re
import shlex
import sys

import jax
import ml_collections
import numpy as np
import pytest

from decjax import config as parts
from decjax import registry, train
from launch import config_file
from tests import commands

DOCS = commands.ROOT / "docs"
PAGES = {  # kind -> name of its example
    "mixer": "fragments", "codec": "nf4", "reducer": "majority", "topology": "small_world", "optimizer": "cautious_adamw",
    "task": "moons",
}  # fmt: skip
MOST_LINES = 40  # including blank lines
METHODS_OF_A_TASK = 9  # further lines of the class: blank lines between methods, and their signatures
TINY = dict(simulate="", workers="4", smoke="")  # instead of the command's message
STEPS = 12
pytestmark = pytest.mark.usefixtures("quick_compilation", "forgotten_parts")


def text_of(page):
    return (DOCS / "guides/adding_a_part.md" if page == "index" else DOCS / "adding" / f"{page}.md").read_text()


def files_of(page):
    """Return the files of a page: code blocks preceded by their names."""
    return dict(re.findall(r"`(mine/\w+\.py)`[^`]*```python\n(.*?)```", text_of(page), re.DOTALL))


def part_of(page):
    """Return the file that holds the part."""
    (name,) = [name for name in files_of(page) if not name.endswith("_test.py")]
    return name


def commands_of(page):
    """Return the arguments of every `launch.train` on a page."""
    lines = [line for line in text_of(page).splitlines() if line.startswith("    python -m launch.train ")]
    return [shlex.split(line)[3:] for line in lines]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The user's directory: the files of all pages, on Python's path."""
    folder = tmp_path_factory.mktemp("user")
    for name, code in [pair for page in PAGES for pair in files_of(page).items()]:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def config_of(arguments, folder, **instead):
    """Return the config of a command's arguments; keys of its shorthand may be replaced."""
    given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    path, _, short = given["config"].partition(":")
    pieces = [piece for piece in registry.split(short) if piece and piece.partition("=")[0] not in instead]
    pieces += [f"{key}={value}" if value else key for key, value in instead.items()]
    config = config_file.get_config(f"{folder / path}:{','.join(pieces)}")
    assert not config_file.misplaced(config, arguments)
    for name, value in given.items():
        if name.startswith("config."):
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(value)
            config.update_from_flattened_dict({name: value}, "config.")
    return config


@pytest.mark.parametrize("page", PAGES)
def test_the_example_is_short(page):
    lines = files_of(page)[part_of(page)].splitlines()
    assert len(files_of(page)) == 2 and len(lines) <= MOST_LINES + METHODS_OF_A_TASK * (page == "task")
    assert max(map(len, lines)) <= 132


@pytest.mark.parametrize("page", PAGES)
def test_it_is_trained_with_by_name(page, folder):
    first, *others = commands_of(page)
    for arguments in (first, *others):
        parts.resolve(config_of(arguments, folder))
    spec = parts.resolve(config_of(first, folder, **TINY))
    assert PAGES[page] in json.dumps(spec.document)
    assert registry.file_of(registry.part(page, PAGES[page]).factory) == str(folder / part_of(page))
    trainer = train.Trainer(spec)
    state, losses = trainer.init(), []
    for step in range(STEPS):
        state, loss_N = trainer.step(state, trainer.batch(step), step)
        losses.append(np.asarray(loss_N).mean())
    assert np.mean(losses[-3:]) < losses[0]


def test_a_command_trains_as_it_stands(folder):
    """The config file is loaded twice, by launch.train and by its flag, and registers its part both times."""
    (arguments, *_) = commands_of("mixer")
    there = os.path.relpath(folder, commands.ROOT)  # As users write it: the two loaders resolve it to different paths.
    tiny = ",".join(f"{key}={value}" if value else key for key, value in TINY.items())
    config = arguments[0].replace("--config=", f"--config={there}/")
    told = commands.run("launch.train", f"{config},{tiny}", f"--workdir={folder / 'run'}")
    assert told.returncode == 0 and "averaged model after 20 steps" in told.stdout, told.stderr


def test_the_tests_of_the_pages_pass(folder):
    told = commands.run("pytest", "-n0", "-p", "no:cacheprovider", str(folder / "mine"), PYTHONPATH=str(folder))
    count = sum(code.count("\ndef test_") for page in PAGES for code in files_of(page).values())
    passed = re.search(r"(\d+) passed", told.stdout)
    assert told.returncode == 0 and passed and int(passed[1]) >= count >= 2 * len(PAGES) - 2, told.stdout


# page -> (replacement in its file, arguments of a command): one for each error it shows, in order.
MISTAKES = {
    "mixer": [({}, ":mixer=fragments(pieces=0)"), ({}, ":mixer=fragments(parts=2)")],
    "codec": [({"def delta(": "def unused("}, ":mixer=choco,codec=nf4")],
    "reducer": [({}, ":method=allreduce,reducer=majority(beta=0.5)")],
    "topology": [({}, ":topology=small_world,workers=7"), ({") / 4": ") / 3.2"}, ":topology=small_world")],
    "optimizer": [({}, ":optimizer=cautious_adamw(beta2=0.5)"), ({}, ":optimizer=cautious_adamw(b2=1.0)")],
    "task": [({}, " --config.data.width=3"), ({}, ":depth=3")],
}


@pytest.mark.parametrize("page", PAGES)
def test_errors_are_those_of_the_page(page, folder, tmp_path):
    shown = re.findall(r"^    error: (.*)$", text_of(page), re.MULTILINE)
    assert len(shown) == len(MISTAKES[page])
    for expected, (changes, argument) in zip(shown, MISTAKES[page]):
        code = files_of(page)[part_of(page)]
        for old, new in changes.items():
            assert old in code
            code = code.replace(old, new)
        path = tmp_path / pathlib.Path(part_of(page)).name
        path.write_text(code)
        with forgotten(page):
            told = complaint(f"--config={path}{argument}").replace(str(tmp_path), "mine")
        assert re.fullmatch(re.escape(expected).replace("…", ".*"), told), told


@contextlib.contextmanager
def forgotten(kind):
    """The page's own part has been replaced by then."""
    known = registry._parts[kind].pop(PAGES[kind], None)
    yield
    registry._parts[kind].pop(PAGES[kind], None)
    if known:
        registry._parts[kind][PAGES[kind]] = known


def complaint(command):
    """Return what launch.train would print for its arguments."""
    arguments = command.split()
    try:
        if told := config_file.complaint(arguments):
            return told
        parts.resolve(config_of(arguments, pathlib.Path("/")))
    except parts.ConfigError as error:
        return str(error)
    return ""


def test_the_topology_page_prints_what_it_shows(folder):
    text = text_of("topology")
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "print(" in code]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    shown = [line.split() for line in text.splitlines() if re.match(r"    \d+ (small_world|ring|torus) ", line)]
    assert shown and [line.split() for line in printed.getvalue().splitlines()] == shown


def test_the_code_of_the_overview_runs(folder):
    scope = {"config": ml_collections.ConfigDict()}
    for code in re.findall(r"```python\n(.*?)```", text_of("index"), re.DOTALL):
        exec(code, scope)
    assert registry.part("schedule", "constant").options.keys() == {"learning_rate"}
    assert registry.part("mixer", "fragments").factory is sys.modules["mine.fragments"].Fragments


def test_the_errors_of_the_overview_are_told(folder):
    document = parts.resolve(config_of(["--config=mine/fragments.py:mixer=fragments"], folder, **TINY)).document
    changes = {
        "mixer 'fragments' has no option": dict(mixer=document["mixer"] | {"part": 2}),
        "mixer 'fragments':": dict(mixer=document["mixer"] | {"pieces": "four"}),
        "topology": dict(topology="small_word"),
    }
    for start, change in changes.items():
        (shown,) = re.findall(rf"^    ({start} .*)$", text_of("index"), re.MULTILINE)
        with pytest.raises(parts.ConfigError, match=re.escape(shown.removesuffix("…"))):
            parts.resolve(document | change)


def test_another_file_may_not_take_the_name(folder, tmp_path):
    """The same file may be loaded again under any name; a copy of it registers a different part."""
    for _ in range(2):
        config_file.load_module(str(folder / part_of("mixer")))
    copy = tmp_path / "copied.py"
    copy.write_text(files_of("mixer")[part_of("mixer")].replace("class Fragments", "class PiecesInTurn"))
    with pytest.raises(config_file.ConfigFileError, match="mixer 'fragments' is taken by config_file.Fragments; use another name"):
        config_file.load_module(str(copy))


# -- In your own loop -------------------------------------------------------------------------------------------------


def blocks(heading):
    """The code of a section of docs/guides/own_loop.md, one string per block."""
    _, _, section = (DOCS / "guides" / "own_loop.md").read_text().partition(f"\n{heading}\n")
    found = re.findall(r"```python\n(.*?)```", re.split(r"\n##* ", section)[0], re.DOTALL)
    assert found
    return found


def test_the_trainer_of_the_page_trains():
    scope = {}
    (code,) = blocks("## The trainer")
    assert len(list(filter(str.strip, code.splitlines()))) <= 10
    exec(code, scope)
    assert scope["trainer"].evaluate(scope["state"]).averaged["accuracy"] > 0.9


@pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "devices"])
def test_the_loop_of_the_page_learns_goes_on_and_is_saved(simulate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    (code,) = blocks("## Your own loss and step")
    code = code if simulate else code.replace("make_workers(8, simulate=True)", "make_workers(jax.device_count())")
    exec(code, scope)
    assert scope["workers"].simulated == simulate
    learned = float(scope["loss_N"].mean())
    assert learned < 0.2
    (traced,) = blocks("### Phases")
    exec(traced, scope)
    assert scope["loss_N"].mean() < 1.5 * learned
    (saving,) = blocks("## Averages, distances, checkpoints")
    exec(saving, scope)
    jax.tree.map(np.testing.assert_array_equal, scope["saved"], {"params": scope["params"], "state": scope["state"]})
    up_NxDxH = np.asarray(scope["params"]["up"])
    np.testing.assert_allclose(scope["average"]["up"], up_NxDxH.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert 0 < scope["distance"] < 1 and scope["newest"] == scope["number"] and scope["counters"]
    *models, with_statistics = blocks("## Flax")
    for model in models:
        exec(model, scope)
        exec(code[code.index("params = workers.stack") :].replace("range(300)", "range(30)"), scope)
        assert scope["loss_N"].mean() < 0.5
    exec(with_statistics, scope)
    assert scope["loss_N"].mean() < 0.5 and any(np.ptp(x, axis=0).any() for x in jax.tree.leaves(scope["statistics"]))
