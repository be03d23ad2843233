"""Import rules of the architecture's table, and what only `mesh` may contain; checked with `ast`."""

import ast
import importlib
import io
import pathlib
import sys
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOP_LEVEL = ("configs", "decjax", "experiments", "launch", "tests")

# Part of decjax -> the other parts it may import. A new part must be added here.
BASE = {"options", "typing", "program", "mesh", "buckets", "codecs", "channel", "phases", "registry", "noise"}
MAY_IMPORT = {
    "options": set(),
    "typing": set(),
    "registry": {"options"},
    "errors": set(),
    "files": set(),
    "signals": set(),
    "topology": {"options", "registry"},
    "schedules": {"options"},
    "program": {"typing"},
    "costmodel": {"options", "files", "topology"},
    "mesh": {"options", "typing", "program"},
    "phases": set(),
    "buckets": {"typing"},
    "noise": set(),
    "principal": set(),
    "codecs": {"options", "typing", "registry", "noise"},
    "channel": {"options", "typing", "mesh", "buckets", "codecs"},
    "gossip": BASE | {"topology"},
    "reduce": BASE,
    "optim": {"options", "typing", "gossip", "reduce", "mesh", "buckets", "channel", "phases", "registry"},
    "pipeline": BASE | {"principal", "reduce", "schedules"},
    "models": {"options", "typing", "registry", "files", "errors"},
    "tasks": {"options", "typing", "models", "registry", "files", "errors"},
}
MAY_IMPORT["config"] = set(MAY_IMPORT)
MAY_IMPORT["train"] = set(MAY_IMPORT)
MAY_IMPORT["measure"] = set(MAY_IMPORT)
MAY_IMPORT["elastic"] = set(MAY_IMPORT) - {"measure"}
MAY_IMPORT["contrib"] = set(MAY_IMPORT)  # the core does not import contrib
NUMPY_ONLY = (
    "decjax.options",
    "decjax.registry",
    "decjax.files",
    "decjax.signals",
    "decjax.topology",
    "decjax.schedules",
    "decjax.costmodel.profile",
    "decjax.costmodel.groups",
    "decjax.costmodel.json_files",
    "decjax.costmodel.methods",
    "decjax.costmodel.exchange",
    "decjax.costmodel.model",
    "decjax.costmodel.simulator",
    "decjax.costmodel.plan",
    "decjax.contrib.layouts",
    "decjax.contrib.random_graphs",
)

# Module of another directory -> the modules of this repository it may import, and everything below them.
OUTSIDE = {
    "launch": (
        *(
            f"decjax.{part}"
            for part in (
                "config",
                "contrib",
                "costmodel",
                "elastic",
                "errors",
                "files",
                "measure",
                "models",
                "options",
                "registry",
                "signals",
                "tasks",
                "topology",
                "train",
                "typing",
            )
        ),
        "launch",
    ),
    "configs": ("configs", "decjax.config", "decjax.registry"),
    "experiments.dssfn": ("decjax", "experiments"),  # trains without gradients, in its own loop
    "experiments.oracles": ("decjax", "configs", "experiments"),  # these examine single parts
    # A config with its own task.
    "experiments.paced": ("configs", "decjax.config", "decjax.contrib.quadratics", "decjax.options", "decjax.tasks"),
    "experiments.bench": ("decjax", "configs", "launch", "experiments"),
    "experiments": (
        "decjax.contrib.layouts",
        "decjax.costmodel",
        "decjax.files",
        "decjax.topology",
        "experiments",
        "launch.command",
        "launch.cluster",
        "launch.network",
        "launch.processes",
    ),
}
CONFIGS_OTHERS = {"ml_collections", "collections", "typing"}
EXPERIMENTS_THIRD_PARTY = {"absl", "matplotlib", "numpy", "rich", "scipy"}  # flags, figures, numbers, tables, fits

COLLECTIVES = {
    "ppermute",
    "pshuffle",
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "all_gather",
    "psum_scatter",
    "all_to_all",
    "ragged_all_to_all",
    "pbroadcast",
    "pswapaxes",
    "axis_index",
}
MESH_MAKERS = {"make_mesh", "shard_map", "pmap", "Mesh", "AbstractMesh", "PartitionSpec", "NamedSharding"}

# Class name -> the modules of decjax that may each define one; any other name is unique.
HOMONYMS = {
    # The effect of a method, or of a boundary between stages, in a run and in the cost model.
    "Method": ["decjax.costmodel.methods", "decjax.optim.method"],
    "Boundary": ["decjax.contrib.layouts.layout", "decjax.pipeline.boundary"],
    # Private to each model and task, used in its module only.
    "Block": ["decjax.contrib.images.resnet", "decjax.models.decoder"],
    "Examples": ["decjax.contrib.images.task", "decjax.contrib.quadratics.task"],
    # A program of a step, and one of a member of an elastic run.
    "Program": ["decjax.elastic.programs", "decjax.train.engine"],
}

# Retired names -> the modules that may still contain them.
RETIRED = {
    "rematerialize": (),  # "remat"
    "critical": (),  # "epilogue"
    "axis_name": ("decjax.mesh",),  # a `mesh.Axis`; JAX has arguments of this name
    "FLEETING": (),
    "TreeCodec": (),
    "decjax.runtime": (),  # `decjax.costmodel`
}


def below(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def imported(tree: ast.AST, module: str, is_package: bool = False) -> list[str]:
    """Dotted names of everything imported, at any depth; relative imports are made absolute."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            anchor = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (anchor, node.module)))
            names += [f"{origin}.{alias.name}" for alias in node.names]
    return names


def import_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """Yield a module's imports that the table forbids."""
    names = imported(ast.parse(source), module, is_package)
    own = [name for name in names if name.split(".")[0] in TOP_LEVEL]
    third_party = [name for name in names if name.split(".")[0] not in {*TOP_LEVEL, *sys.stdlib_module_names}]
    faults = []
    if module.split(".")[0] == "decjax":
        faults += [name for name in own if not below(name, "decjax")]
        if module != "decjax":
            part = module.split(".")[1]
            if part not in MAY_IMPORT:
                return [f"decjax.{part} is not in the table of parts"]
            allowed = MAY_IMPORT[part] | {part}
            faults += [name for name in own if below(name, "decjax") and [*name.split("."), ""][1] not in allowed]
            if part != "config":  # elsewhere, a run is plain values
                faults += [name for name in third_party if below(name, "ml_collections")]
        if any(below(module, parent) for parent in NUMPY_ONLY):
            faults += [name for name in third_party if not below(name, "numpy")]
        return faults
    parent = next(parent for parent in OUTSIDE if below(module, parent))
    faults += [name for name in own if not any(below(name, allowed) for allowed in OUTSIDE[parent])]
    if parent == "configs":
        faults += [name for name in names if name not in own and name.split(".")[0] not in CONFIGS_OTHERS]
    if parent == "experiments":
        faults += [name for name in third_party if name.split(".")[0] not in EXPERIMENTS_THIRD_PARTY]
    return faults


def dotted(node: ast.AST) -> str:
    """`jax.lax.psum` as text; empty for anything but a chain of names."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def strings(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def mesh_faults(source: str) -> list[str]:
    """Yield collectives, mesh construction and literal axis names, which only `decjax.mesh` may contain.

    `jax.lax.axis_size` is allowed: it is a static int and sends nothing.
    """
    tree = ast.parse(source)
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname}
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            first, *rest = dotted(node).split(".")
            name = ".".join([aliases.get(first, first), *rest])
            if below(name, "jax") and name.split(".")[-1] in COLLECTIVES | MESH_MAKERS:
                faults.append(name)
        named = []
        if isinstance(node, ast.keyword) and node.arg:
            named = [(node.arg, node.value)]
        elif isinstance(node, ast.arguments):
            positional = node.posonlyargs + node.args
            named = [(a.arg, d) for a, d in zip(positional[::-1], node.defaults[::-1])]
            named += [(a.arg, d) for a, d in zip(node.kwonlyargs, node.kw_defaults) if d]
        elif isinstance(node, ast.Assign):
            named = [(dotted(target), node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value:
            named = [(dotted(node.target), node.value)]
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "Axis":
            named += [("axis", argument) for argument in node.args]
        faults += [f"{name}={text!r}" for name, value in named if "axis" in name.lower() for text in strings(value)]
    return faults


def config_faults(source: str) -> list[str]:
    """Yield fields read from an object called config, which only `decjax.config` may do; methods of its module are allowed."""
    tree = ast.parse(source)
    imported_names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute | ast.Subscript):
            continue
        owner = dotted(node.value)
        own = owner == "config" and "config" not in imported_names
        if own or (owner.endswith(".config") and owner != "jax.config"):
            found.append(ast.unparse(node))
    return found


def modules(top: str) -> list[tuple[str, pathlib.Path]]:
    found = []
    for path in sorted((ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


SOURCES = [
    pytest.param(module, path, id=module) for top in ("decjax", "launch", "configs", "experiments") for module, path in modules(top)
]


@pytest.mark.parametrize("module, path", SOURCES)
def test_imports_follow_the_table(module, path):
    assert import_faults(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize("module, path", [p for p in SOURCES if p.values[0].startswith("decjax.")])
def test_only_mesh_holds_collectives_and_axis_names(module, path):
    faults = mesh_faults(path.read_text())
    seen = {"decjax.mesh.axis": {"jax.lax.ppermute", "jax.lax.psum"}, "decjax.mesh.workers": {"jax.shard_map"}}
    if below(module, "decjax.mesh"):
        assert seen.get(module, set()) <= set(faults), "the check sees nothing there"
    else:
        assert faults == []


@pytest.mark.parametrize("module, path", [p for p in SOURCES if p.values[0].startswith("decjax.")])
def test_only_config_reads_configs(module, path):
    faults = config_faults(path.read_text())
    assert faults == [] or below(module, "decjax.config")


@pytest.mark.parametrize(
    "source, faults",
    [
        ("def f(config):\n  return config.optimizer.window", ["config.optimizer"]),
        ("def f(config):\n  return config['steps']", ["config['steps']"]),
        ("class A:\n  def f(self):\n    return self.config.steps", ["self.config.steps"]),
        ("import jax\njax.config.update('x', 1)", []),
        ("from decjax import config\nspec = config.resolve(x)", []),
    ],
)
def test_a_field_of_a_config_is_seen(source, faults):
    assert config_faults(source) == faults


def test_no_module_of_leftovers():
    names = {path.stem for _, path in modules("decjax")} | {path.parent.name for _, path in modules("decjax")}
    assert "mesh" in names and not names & {"utils", "util", "helpers", "helper", "common", "misc"}


def test_a_class_name_stands_for_one_class():
    found = {}
    for module, path in modules("decjax"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert {name: places for name, places in found.items() if len(places) > 1} == HOMONYMS


def retired_names(source: str, module: str) -> set[str]:
    """Yield retired words among names, imports and one-word strings such as fields and flags; prose may contain them."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    words = {token.string.strip("'\"") for token in tokens if token.type in (tokenize.NAME, tokenize.STRING)}
    words |= {".".join(name.split(".")[:2]) for name in imported(ast.parse(source), module)}
    return {word for word, places in RETIRED.items() if word in words and not any(below(module, place) for place in places)}


@pytest.mark.parametrize("module, path", [p for p in SOURCES if not p.values[0].startswith("experiments")])
def test_retired_names_are_gone(module, path):
    assert retired_names(path.read_text(), module) == set()


@pytest.mark.parametrize(
    "module, source, words",
    [
        ("decjax.config.resolve", "from decjax.runtime import plan", {"decjax.runtime"}),
        ("configs.lm", "config.boundary.when = 'critical'  # rematerialize", {"critical"}),
        ("launch.train", 'def f(axis_name): "On a critical path."', {"axis_name"}),
        ("decjax.mesh.axis", "def f(axis_name): ...", set()),
    ],
)
def test_a_retired_name_is_seen(module, source, words):
    assert retired_names(source, module) == words


@pytest.mark.parametrize(
    "module, source, fault",
    [
        ("decjax.gossip", "from configs import lm", "configs.lm"),
        ("decjax.gossip", "from decjax import config", "decjax.config"),
        ("decjax.config.setup", "from decjax import train", "decjax.train"),
        ("decjax.train.run", "from decjax import measure", "decjax.measure"),
        ("decjax.train.run", "import ml_collections", "ml_collections"),
        ("decjax.train.run", "from decjax.contrib import placement", "decjax.contrib.placement"),
        ("decjax.pipeline.source", "from decjax import models", "decjax.models"),
        ("decjax.train.loop", "import launch.train", "launch.train"),
        ("decjax.mesh", "def f():\n  from experiments.bench import step_overhead", "experiments.bench.step_overhead"),
        ("decjax.models", "from decjax import gossip", "decjax.gossip"),
        ("decjax.models.lm", "from decjax.optim.decentralize import decentralize", "decjax.optim.decentralize.decentralize"),
        ("decjax.models", "import decjax", "decjax"),
        ("decjax.reduce", "from decjax import topology", "decjax.topology"),
        ("decjax.gossip", "from decjax import reduce", "decjax.reduce"),
        ("decjax.optim.decentralize", "from decjax import train", "decjax.train"),
        ("decjax.optim.decentralize", "from .. import codecs", "decjax.codecs"),
        ("decjax.codecs.sign", "from decjax.mesh import Axis", "decjax.mesh.Axis"),
        ("decjax.topology.graphs", "import jax.numpy as jnp", "jax.numpy"),
        ("decjax.topology.graphs", "import scipy", "scipy"),
        ("decjax.schedules", "import jax", "jax"),
        ("decjax.costmodel.model", "import jax", "jax"),
        ("decjax.tasks.text", "import ml_collections", "ml_collections"),
        ("decjax.tasks.lm", "from decjax import mesh", "decjax.mesh"),
        ("decjax.leftovers", "import numpy", "decjax.leftovers is not in the table of parts"),
        ("configs.lm", "import jax", "jax"),
        ("configs.lm", "import json", "json"),
        ("configs.lm", "from decjax import train", "decjax.train"),
        ("launch.train", "from decjax import gossip", "decjax.gossip"),
        ("launch.train", "from decjax import training", "decjax.training"),
        ("launch.train", "from configs import lm", "configs.lm"),
        ("experiments.seeds", "from decjax import train", "decjax.train"),
        ("experiments.seeds", "from launch import train", "launch.train"),
        ("experiments.seeds", "from launch import sweep", "launch.sweep"),
        ("experiments.seeds", "import jax", "jax"),
        ("experiments.bench.step", "from tests import conftest", "tests.conftest"),
    ],
)
def test_a_forbidden_import_is_seen(module, source, fault):
    assert import_faults(source, module) == [fault]


@pytest.mark.parametrize(
    "module, source",
    [
        ("decjax", "from decjax import gossip\nfrom decjax.optim import decentralize"),
        ("decjax.train.run", "import jax\nfrom decjax import config, gossip, mesh, models"),
        ("decjax.config.resolve", "import jax\nimport ml_collections\nfrom decjax import optim, tasks"),
        ("decjax.measure.profiling", "from decjax import config, train"),
        ("decjax.topology.graphs", "import math\nimport numpy as np\nfrom decjax.topology import schedule\nfrom . import build"),
        ("decjax.costmodel.fit", "import jax\nfrom decjax import topology"),
        ("configs.lm", "import ml_collections\nfrom configs import shorthand\nfrom decjax import config, registry"),
        ("launch.train", "import jax\nfrom decjax import train\nfrom launch import command"),
        ("experiments.seeds", "import json\nimport numpy as np\nfrom decjax import costmodel\nfrom launch import command"),
        ("experiments.speedup", "from launch import cluster"),
        ("experiments.bench.step", "import jax\nfrom configs import lm\nfrom decjax import gossip\nfrom launch import command"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert import_faults(source, module) == []


@pytest.mark.parametrize(
    "source, fault",
    [
        ("import jax\njax.lax.psum(x, a)", "jax.lax.psum"),
        ("from jax import lax\nlax.ppermute(x, a, p)", "jax.lax.ppermute"),
        ("from jax.lax import all_gather as join\njoin(x, a)", "jax.lax.all_gather"),
        ("import jax.lax as L\ntotal = map(L.pmean, xs)", "jax.lax.pmean"),
        ("import jax\njax.make_mesh((2,), a)", "jax.make_mesh"),
        ("def f(x, *, axis_name='worker'): pass", "axis_name='worker'"),
        ("def f(x, axis_name=('node', LOCAL), y=0): pass", "axis_name='node'"),
        ("f(x, axis_name='worker')", "axis_name='worker'"),
        ("AXIS_NAME = 'stage'", "AXIS_NAME='stage'"),
        ("axis_name: str = 'stage'", "axis_name='stage'"),
        ("channel = Channel(mesh.Axis(('node', LOCAL)))", "axis='node'"),
    ],
)
def test_a_collective_or_axis_name_is_seen(source, fault):
    assert mesh_faults(source) == [fault]


def test_harmless_names_pass():
    assert (
        mesh_faults(
            "import jax\nMETHODS = ('local',)\nn = axis.size\ny = axis.all_gather(x)\n"
            "def f(axis=mesh.WORKERS, method='local'): pass"
        )
        == []
    )


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lengths(node: ast.AST, inside: bool = False):
    """Return (name, lines, limit) of every function; nested functions, and the outer one with everything in it, have lower limits."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, FUNCTIONS)
        if is_function:
            holds = any(isinstance(inner, FUNCTIONS) for inner in ast.walk(child) if inner is not child)
            yield child.name, child.end_lineno - child.lineno + 1, 40 if inside or holds else 60
        yield from lengths(child, inside or is_function)


@pytest.mark.parametrize(
    "module, path", [p for p in SOURCES if p.values[0].startswith(("decjax", "launch", "experiments", "configs"))]
)
def test_files_and_functions_are_short(module, path):
    text = path.read_text()
    assert text.count("\n") <= 700
    assert not [(name, lines) for name, lines, most in lengths(ast.parse(text)) if lines > most]


@pytest.mark.parametrize(
    "source, expected",
    [
        ("def f(x):\n  return x", [("f", 2, 60)]),
        ("class A:\n  def f(self):\n    return lambda x: x", [("f", 2, 60)]),
        ("def f(x):\n  if x:\n    def g():\n      return x\n    return g", [("f", 5, 40), ("g", 2, 40)]),
        ("class A:\n  def f(self):\n    return 0\n  def g(self):\n    return 1", [("f", 2, 60), ("g", 2, 60)]),
    ],
)
def test_a_nest_of_functions_counts_whole(source, expected):
    assert list(lengths(ast.parse(source))) == expected


@pytest.mark.parametrize("face", sorted((ROOT / "decjax").rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_what_a_package_shows_is_exported(face):
    """Type checkers treat other imports of a typed package as private."""
    tree = ast.parse(face.read_text())
    shown = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("decjax.")
        for alias in node.names
        if alias.name[0] != "_"
    }
    module = importlib.import_module(".".join(face.parent.relative_to(ROOT).parts))
    exported = set(getattr(module, "__all__", ()))
    assert shown <= exported and all(hasattr(module, name) for name in exported)
