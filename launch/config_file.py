"""Config files as modules: `configs/lm.py:workers=8` is the file and the argument of its `get_config`."""

from collections.abc import Iterator, Sequence
import contextlib
import difflib
import importlib.util
import re
import types
from typing import Any

import ml_collections

WORDS = {
    "topology": "topology",
    "codec": "codec",
    "backward": "codec",
    "forward": "codec",
}  # field -> kind of the part in call form
SHORTHAND = ("method", "mixer", "reducer", "optimizer")  # sections of parts that have a key of their own in a shorthand
DETERMINED = {"schedule.learning_rate": "scale"}  # field -> the key of a shorthand of which it is the result


class _AnyKey:
    """The keys of a shorthand: all names but paths of fields."""

    def __contains__(self, key: str) -> bool:
        return "." not in key


ANY_KEY = _AnyKey()
MOST = 8  # names in a list of suggestions


class ConfigFileError(Exception):
    """A config file that does not exist, fails on import or refuses its argument, told in one line."""


def load_module(path: str) -> types.ModuleType:
    """The config file as a module."""
    from decjax import files  # With it comes JAX.

    try:
        files.check_regular(path)
        spec = importlib.util.spec_from_file_location("config_file", path)
        if spec is None or spec.loader is None:
            raise ImportError("its name does not end in .py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # Whatever a config file does wrong.
        raise ConfigFileError(
            f"config file {path!r} cannot be loaded ({' '.join(str(error).split())}); give a Python file with get_config"
        ) from error
    return module


def get_config(text: str) -> ml_collections.ConfigDict:
    """The config that `PATH.py:ARGUMENT` stands for."""
    path, _, argument = text.partition(":")
    module = load_module(path)
    try:
        return module.get_config(argument)
    except (Exception, SystemExit) as error:
        raise ConfigFileError(f"config {text!r}: {error}") from error


def value_of(option: str, argv: Sequence[str]) -> str | None:
    """Return the last value of an option in a command line; None if it has none."""
    last = None
    for argument, following in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        if name in (f"--{option}", f"-{option}"):
            last = value if equals else following
    return last


def complaint(argv: Sequence[str]) -> str:
    """What is wrong with the file, shorthand or fields of a command line's --config, which the flag's parser would bury; empty:
    nothing."""
    try:
        if (text := value_of("config", argv)) is not None:
            return misplaced(get_config(text), argv) or overridden(text, argv)
    except ConfigFileError as error:
        return str(error)
    return ""


# -- Fields -----------------------------------------------------------------------------------------------------------


def misplaced(config: Any, argv: Sequence[str]) -> str:
    """What is wrong with the paths of --config.PATH=VALUE in a command line; empty: all are fields of the config."""
    if isinstance(config, ml_collections.ConfigDict):
        for path, value in fields(argv):
            if problem := _misplaced(config, path, value):
                return problem
    return ""


def overridden(text: str, argv: Sequence[str]) -> str:
    """Which key of a shorthand has no effect because a field that it determines is set by itself; empty: none."""
    from decjax import registry

    pairs = (part.strip().partition("=") for part in registry.split(text.partition(":")[2]))
    keys = {key: value for key, _, value in pairs}
    for path, _ in fields(argv):
        if (key := DETERMINED.get(path)) in keys:
            return f"{key}={keys[key]} changes nothing with --config.{path}; leave one of them out"
    return ""


def fields(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(path, value) of each --config.PATH=VALUE before a lone `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    for argument, behind in zip(argv[:end], [*argv[1:end], ""], strict=False):
        if found := re.fullmatch(r"--?(?:no)?config\.([^=]+)(=?)(.*)", argument, re.DOTALL):
            yield found[1], found[3] if found[2] else behind


def _misplaced(config: Any, path: str, value: str) -> str:
    node: Any = config
    names = path.split(".")
    for depth, name in enumerate(names):
        if "[" in name:  # An item of a tuple: the flag's parser knows.
            return ""
        if not isinstance(node, ml_collections.ConfigDict):
            return _through_a_value(".".join(names[:depth]), node, ".".join(names[depth:]), value)
        if name not in node:
            return f"config.{path} is unknown{_instead(config, names, depth)}"
        node = node[name]
    if isinstance(node, ml_collections.ConfigDict) and not value.lstrip().startswith("{"):
        other = f"; choose another behind the config file's name and a colon, as {path}=NAME" if path in SHORTHAND else ""
        return f"--config.{path}={value!r} must be a section; set its fields, {', '.join(node)}, one by one{other}"
    return ""


def _through_a_value(path: str, held: Any, option: str, value: str) -> str:
    """The answer to --config.PATH.OPTION=VALUE where the field at `path` holds a plain value."""
    what = f"--config.{path}.{option}: {path} is"
    kind = WORDS.get(path.rpartition(".")[2])
    if kind is None or not isinstance(held, str | None):
        return f"{what} a plain value, {held!r}, and has no fields; write --config.{path}=VALUE"
    from decjax import registry  # Of which some kinds import JAX.

    takers = _takers(kind, option)
    name, _, options = (held or "").partition("(")
    if not takers:
        return f"{what} a word with its options in brackets, and no {kind} has {option}; python -m launch.parts {kind} lists them"
    others: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # What the file holds is refused later.
        others = registry.parse(kind, held or "")[1] if options and name in takers else {}
    call = ",".join(f"{key}={text}" for key, text in {**others, option: value or "VALUE"}.items())
    return f"{what} a word with its options in brackets; write --config.{path}='{name if name in takers else takers[0]}({call})'"


def _takers(kind: str, option: str) -> list[str]:
    """Names of the parts of a kind that have an option."""
    from decjax import registry

    return [name for name in registry.names(kind) if option in registry.part(kind, name).options]


def _instead(config: Any, names: list[str], depth: int) -> str:
    """What to say behind "config.a.b is unknown", of which the first `depth` names are sections: what there is, and where the
    field belongs."""
    from decjax import registry

    if not depth and (absent := _absent(config, names[0])):
        return f": {absent}"
    section = config
    for name in names[:depth]:
        section = section[name]
    near = _near(config, section, names, depth)
    meant = f"did you mean {' or '.join(near)}?" if near else ""
    if not depth:
        return f"; {meant or f'the config has {_listed(list(config), len(config))}'}"
    what, belongs = f"config.{'.'.join(names[:depth])}", ""
    kind = "task" if names[0] == "data" else names[0]
    part = config.get("task") if kind == "task" else section.get("name")
    if depth == 1 and kind in registry.KINDS and isinstance(part, str):
        what, others = f"{kind} {part!r}", [name for name in _takers(kind, names[1]) if name != part]
        belongs = f"{names[1]} belongs to {_listed(others)}" if others else ""
    has = [name for name in section if name != "name"]
    return f": {what} has {_listed(has, len(has)) or 'no fields'}" + "".join(f"; {hint}" for hint in (meant, belongs) if hint)


def _absent(config: Any, name: str) -> str:
    """Why the config lacks a section that others have; empty: none has it."""
    from decjax import registry

    if name == "source":
        return "the gradient comes from the whole model or its stages; use the shorthand divided, as configs/clicks.py:divided"
    if name == "model":
        return f"task {config.get('task')!r} has none"
    needed = "mixer" if name == "topology" else name
    methods = {method: registry.part("method", method).traits.get("chooses", ()) for method in registry.names("method")}
    if others := [method for method, chooses in methods.items() if needed in chooses]:
        chosen = config.method.get("name", "") if "method" in config else ""
        has = " and ".join(methods.get(chosen, ())) or "none of its own"
        return f"method {chosen!r} has {has}, no {name}; methods with {name}: {_listed(others)}"
    return ""


def _near(config: Any, section: Any, names: list[str], depth: int) -> list[str]:
    """Fields elsewhere that are called like the unknown one, or those here that are spelled nearly so."""
    known = [path for path in _paths(config) if path.rpartition(".")[2] != "name"]
    for name in (names[-1], names[depth]):
        if same := [path for path in known if path.rpartition(".")[2] == name]:
            return same
    if not depth:
        return difflib.get_close_matches(".".join(names), known, cutoff=0.75)
    start = ".".join(names[:depth])
    return [f"{start}.{name}" for name in difflib.get_close_matches(names[depth], list(section), cutoff=0.75)]


def _paths(config: Any, start: str = "") -> Iterator[str]:
    for name in config:
        yield start + name
        if isinstance(config[name], ml_collections.ConfigDict):
            yield from _paths(config[name], f"{start}{name}.")


def _listed(names: list[str], most: int = MOST) -> str:
    return ", ".join([*names[:most], *(["…"] if len(names) > most else [])])
