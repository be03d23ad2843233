"""The examples of docs/guides/adding_a_part.md run as shown.

Files are written where the page says, outside of the package. The page's commands train with them by name and fail with the errors
shown; and each part is compared with its equations in NumPy.
"""

import ast
import contextlib
import importlib
import json
import os
import pathlib
import re
import shlex
import sys

import jax
import ml_collections
import numpy as np
import optax
import pytest

from decjax import codecs, registry, topology, train
from decjax import config as parts
from launch import config_file
from tests import commands, quadratics, reducers, tasks_test

PAGE = (commands.ROOT / "docs/guides/adding_a_part.md").read_text()
EXAMPLES = {  # kind -> name and file of its example
    "mixer": ("fragments", "mine/fragments.py"),
    "codec": ("nf4", "mine/nf4.py"),
    "reducer": ("majority", "mine/majority.py"),
    "topology": ("small_world", "mine/small_world.py"),
    "optimizer": ("cautious_adamw", "mine/cautious.py"),
    "task": ("moons", "mine/moons.py"),
}
FILES = dict(re.findall(r"`(mine/\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [shlex.split(line)[3:] for line in PAGE.splitlines() if line.startswith("    python -m launch.train ")]
MOST_LINES = {"task": 55}  # including blank lines; others: 45
TINY = dict(simulate="", workers="4", smoke="")  # instead of the command's values
STEPS = 12
pytestmark = pytest.mark.usefixtures("quick_compilation", "forgotten_parts")


def commands_of(kind):
    """Return the arguments of every command that trains with an example."""
    return [arguments for arguments in COMMANDS if EXAMPLES[kind][1] in arguments[0]]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The user's directory: the files of the page, on Python's path."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine").mkdir()
    for name, code in FILES.items():
        (folder / name).write_text(code)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def config_of(arguments, folder, **instead):
    """Return the config of a command's arguments; keys of its shorthand may be replaced."""
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    path, _, short = flags["config"].partition(":")
    pieces = [piece for piece in registry.split(short) if piece and piece.partition("=")[0] not in instead]
    pieces += [f"{key}={value}" if value else key for key, value in instead.items()]
    config = config_file.get_config(f"{folder / path}:{','.join(pieces)}")
    assert not config_file.misplaced(config, arguments)
    for name, value in flags.items():
        if name.startswith("config."):
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(value)
            config.update_from_flattened_dict({name: value}, "config.")
    return config


def test_the_page_has_one_file_for_each_example():
    assert sorted(FILES) == sorted(file for _, file in EXAMPLES.values())


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_example_is_short(kind):
    lines = FILES[EXAMPLES[kind][1]].splitlines()
    assert len(lines) <= MOST_LINES.get(kind, 45) and max(map(len, lines)) <= 132


@pytest.mark.parametrize("kind", EXAMPLES)
def test_it_is_trained_with_by_name(kind, folder):
    name, file = EXAMPLES[kind]
    first, *others = commands_of(kind)
    for arguments in (first, *others):
        parts.resolve(config_of(arguments, folder))
    spec = parts.resolve(config_of(first, folder, **TINY))
    assert name in json.dumps(spec.document)
    assert registry.file_of(registry.part(kind, name).factory) == str(folder / file)
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
    done = commands.run("launch.train", f"{config},{tiny}", f"--workdir={folder / 'run'}")
    assert done.returncode == 0 and "averaged model after 20 steps" in done.stdout, done.stderr


def test_the_code_of_using_a_part_runs(folder):
    scope = {"config": ml_collections.ConfigDict()}
    section = PAGE.partition("## Using a part")[2].partition("\n## ")[0]
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(code, scope)
    assert registry.part("mixer", "fragments").factory is sys.modules["mine.fragments"].Fragments
    assert registry.make("codec", "nf4(block=32)") == sys.modules["mine.nf4"].NF4(block=32)


# -- Errors -----------------------------------------------------------------------------------------------------------

SHOWN = re.findall(r"^    error: (.*)$", PAGE, re.MULTILINE)
MISTAKES = [  # (kind, replacement in its file, arguments of a command, error)
    ("mixer", {}, ":mixer=fragments(pieces=0)", SHOWN[0]),
    ("mixer", {}, ":mixer=fragments(parts=2)", SHOWN[1]),
    (
        "codec",
        {"def delta(": "def unused("},
        ":mixer=choco,codec=nf4",
        "mixer 'choco' needs a contractive codec, got codec 'nf4'; use 'int8', or mixer 'exact'",
    ),
    ("reducer", {}, ":method=allreduce,reducer=majority(beta=0.5)", "reducer 'majority' has no option 'beta'; use momentum"),
    (
        "topology",
        {},
        ":topology=small_world,workers=7",
        "topology 'small_world' pairs workers, got 7; use 8 workers, or 'base_k' for any number",
    ),
    (
        "topology",
        {") / 4": ") / 3.2"},
        ":topology=small_world",
        "topology 'small_world': matrix 0 is not stochastic: row 0 sums to 1.25 and column 0 to 1.25",
    ),
    ("optimizer", {}, ":optimizer=cautious_adamw(b2=1.0)", "optimizer 'cautious_adamw': b2=1.0 must be at least 0 and less than 1"),
    ("task", {}, " --config.data.width=3", "config.data.width is unknown: task 'moons' has hidden, noise"),
]


@pytest.mark.parametrize("kind, changes, arguments, expected", MISTAKES)
def test_errors_are_one_line_with_the_fix(kind, changes, arguments, expected, folder, tmp_path):
    name, file = EXAMPLES[kind]
    code = FILES[file]
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    path = tmp_path / pathlib.Path(file).name
    path.write_text(code)
    with forgotten(kind, name):
        error = complaint(f"--config={path}{arguments}").replace(str(tmp_path), "mine")
    assert expected in error and "\n" not in error, error


@contextlib.contextmanager
def forgotten(kind, name):
    """Remove the example's part, and afterwards the part that has replaced it."""
    before = registry._parts[kind].pop(name, None)
    yield
    registry._parts[kind].pop(name, None)
    if before:
        registry._parts[kind][name] = before


def complaint(command):
    """Return what launch.train would print for its arguments."""
    arguments = command.split()
    try:
        if error := config_file.complaint(arguments):
            return error
        parts.resolve(config_of(arguments, pathlib.Path("/")))
    except parts.ConfigError as error:
        return str(error)
    return ""


def test_another_file_may_not_take_the_name(folder, tmp_path):
    """The same file may be loaded again under any name; a copy of it registers a different part."""
    file = EXAMPLES["mixer"][1]
    for _ in range(2):
        config_file.load_module(str(folder / file))
    copy = tmp_path / "copied.py"
    copy.write_text(FILES[file].replace("class Fragments", "class PiecesInTurn"))
    with pytest.raises(config_file.ConfigFileError, match="mixer 'fragments' is taken by config_file.Fragments; use another name"):
        config_file.load_module(str(copy))


# -- Parts against their equations ------------------------------------------------------------------------------------


def example(kind):
    """Return the module of an example."""
    return importlib.import_module(EXAMPLES[kind][1].removesuffix(".py").replace("/", "."))


def test_mixer_averages_one_fragment_per_step():
    graph, P = topology.make("one_peer_exponential", quadratics.N), quadratics.P
    x_NxP = np.random.default_rng(0).normal(size=(quadratics.N, P))
    make = lambda channel: example("mixer").Fragments(graph, channel, pieces=2)
    path, _ = quadratics.mixed(make, x_NxP, steps=20, mode="simulated")
    half = -(-P // 2)
    for step, mixed_NxP in enumerate(path):
        fragment = slice(0, half) if step % 2 == 0 else slice(half, P)
        x_NxP[:, fragment] = graph.matrix(step // 2) @ x_NxP[:, fragment]
        np.testing.assert_allclose(mixed_NxP, x_NxP, rtol=0, atol=1e-12)


def test_codec_sends_the_nearest_levels():
    x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    levels, codec = example("codec").LEVELS, example("codec").NF4(block=8)
    message = jax.jit(codec.encode)(x, (), None)
    assert codecs.message_bytes(message) == codec.num_bytes(x.shape, x.dtype) == 18 + 5 * 4
    x_MxB = np.pad(x.ravel(), (0, 5)).reshape(5, 8)
    scale_Mx1 = np.abs(x_MxB).max(axis=1, keepdims=True)
    nearest_MxB = levels[np.abs((x_MxB / scale_Mx1)[..., None] - levels).argmin(axis=-1)]
    decoded = jax.jit(codec.decode, static_argnums=(1, 2))(message, x.shape, x.dtype)
    np.testing.assert_allclose(decoded.ravel(), (nearest_MxB * scale_Mx1).ravel()[:35], rtol=1e-6)
    assert ((decoded - x) ** 2).sum() <= (1 - codec.delta(x.shape)) * (x**2).sum()


def test_codec_keeps_values_that_are_not_finite():
    codec = example("codec").NF4(block=4)
    through = jax.jit(lambda x: codec.decode(codec.encode(x, (), None), x.shape, x.dtype))
    for bad in (np.inf, -np.inf, np.nan):
        assert not np.isfinite(through(np.array([1.0, bad, 3.0], np.float32))).all()


@reducers.x64
def test_reducer_returns_the_sign_of_most_momenta():
    run = reducers.Runner(lambda channel: example("reducer").Majority(channel, momentum=0.5), "simulated")
    momenta_NxP = 0.0
    for step in range(20):
        momenta_NxP = 0.5 * momenta_NxP + 0.5 * reducers.flat(reducers.gradients(step))
        expected_P = np.sign(np.sign(momenta_NxP).sum(axis=0))
        np.testing.assert_array_equal(reducers.flat(run(reducers.gradients(step))), np.tile(expected_P, (reducers.N, 1)))


@reducers.x64
def test_reducer_drops_a_gradient_that_is_not_finite():
    run, grads = reducers.Runner(example("reducer").Majority, "simulated"), reducers.gradients(0)
    run(grads)
    before = reducers.flat(run.state)
    grads["a"][2] = np.nan  # Of the third worker alone.
    assert np.isnan(reducers.flat(run(grads))).all() and before.any()
    np.testing.assert_array_equal(reducers.flat(run.state), before)


@pytest.mark.parametrize("n", [2, 6, 8, 64])
def test_topology_averages_with_both_neighbors_and_one_partner(n):
    graph = example("topology").small_world(n, seed=3)
    W_NxN = graph.matrix(0)
    for i in range(n):
        far = W_NxN[i].copy()
        for j in (i, i - 1, (i + 1) % n):
            far[j] -= 1 / 4
        (partner,) = np.flatnonzero(far)
        assert partner != i and far[partner] == 1 / 4
    assert topology.is_doubly_stochastic(graph) and graph.is_symmetric and topology.is_mixing(graph.rounds)


def test_topology_has_the_spectral_gap_of_the_page():
    graphs = example("topology").small_world(64), topology.make("ring", 64)
    shown = re.search(r"small_world\(64\)\)` is ([\d.]+), that of a ring of 64 workers ([\d.]+):", PAGE)
    assert shown and [round(topology.spectral_gap(graph), 3) for graph in graphs] == [float(gap) for gap in shown.groups()]


def test_optimizer_follows_the_equations():
    rate, b1, b2, eps, decay = 0.1, 0.9, 0.99, 1e-8, 0.01
    tx = example("optimizer").cautious_adamw(optax.constant_schedule(rate), b2=b2, weight_decay=decay)
    x = np.random.default_rng(0).normal(size=7).astype(np.float32)
    params, state, update, m, v = x, tx.init(x), jax.jit(tx.update), 0.0, 0.0
    for t in range(1, 31):
        g = np.random.default_rng(t).normal(size=7).astype(np.float32) + x
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        mask = u * g > 0
        x = x - rate * (u * mask / max(mask.mean(), 1e-3) + decay * x)
        updates, state = update(g, state, params)
        params = params + updates
        np.testing.assert_allclose(params, x, rtol=0, atol=1e-4)


def test_task_keeps_the_contract():
    example("task")
    tasks_test.test_contract("moons", None)


def test_points_are_on_two_half_circles():
    batch = example("task").Moons(noise=0.0).load(4, 64, 0).batch(worker=2, step=7)
    center_Bx2 = np.where(batch["y"][:, None] == 1, [1.0, 0.5], [0.0, 0.0])
    np.testing.assert_allclose(np.hypot(*(batch["x"] - center_Bx2).T), 1.0, atol=1e-6)
