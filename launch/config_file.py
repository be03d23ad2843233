"""Config files as modules: `configs/lm.py:workers=8` is the file and the argument of its `get_config`."""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import difflib
import importlib.util
import re
import types

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
    """A config file that does not exist, fails on import or refuses its argument, on one line."""


def load_module(path: str) -> types.ModuleType:
    """Return the config file as a module."""
    from decjax import files  # It imports JAX.

    try:
        files.check_regular(path)
        spec = importlib.util.spec_from_file_location("config_file", path)
        if spec is None or spec.loader is None:
            raise ImportError("its name does not end in .py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # A config file may raise anything.
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise ConfigFileError(f"config file {path!r} cannot be loaded ({reason}); give a Python file with get_config") from error
    return module


def get_config(text: str) -> ml_collections.ConfigDict:
    """Return the config of `PATH.py:ARGUMENT`."""
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
    """Return what is wrong with the --config of a command line, which the flag's parser would report in a traceback; empty: nothing."""
    try:
        if (text := value_of("config", argv)) is not None:
            return misplaced(get_config(text), argv) or overridden(text, argv)
    except ConfigFileError as error:
        return str(error)
    return ""


# -- Fields -----------------------------------------------------------------------------------------------------------


def misplaced(config: object, argv: Sequence[str]) -> str:
    """Return what is wrong with the paths of --config.PATH=VALUE in a command line; empty: all are fields of the config."""
    if not isinstance(config, ml_collections.ConfigDict):
        return ""
    sections = config.to_dict()
    return next(filter(None, (_misplaced(sections, path, value) for path, value in fields(argv))), "")


def overridden(text: str, argv: Sequence[str]) -> str:
    """Return which key of a shorthand has no effect because --config.PATH sets the field that it determines; empty: none."""
    from decjax import registry

    pairs = (part.strip().partition("=") for part in registry.split(text.partition(":")[2]))
    keys = {key: value for key, _, value in pairs}
    for path, _ in fields(argv):
        if (key := DETERMINED.get(path)) in keys:
            return f"{key}={keys[key]} has no effect with --config.{path}; leave one of them out"
    return ""


def fields(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (path, value) of each --config.PATH=VALUE before a lone `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    for argument, following in zip(argv[:end], [*argv[1:end], ""], strict=False):
        if match := re.fullmatch(r"--?(?:no)?config\.([^=]+)(=?)(.*)", argument, re.DOTALL):
            yield match[1], match[3] if match[2] else following


def _misplaced(config: dict, path: str, value: str) -> str:
    node: object = config
    names = path.split(".")
    for depth, name in enumerate(names):
        if "[" in name:  # An item of a tuple, which the flag's parser checks.
            return ""
        if not isinstance(node, dict):
            return _through_a_value(".".join(names[:depth]), node, ".".join(names[depth:]), value)
        if name not in node:
            return f"config.{path} is unknown{_instead(config, names, depth)}"
        node = node[name]
    if isinstance(node, dict) and not value.lstrip().startswith("{"):
        other = f", or choose another {path} in the shorthand: --config=FILE.py:{path}=NAME" if path in SHORTHAND else ""
        return f"--config.{path}={value!r}: {path} is a section with the fields {', '.join(node)}; set one of them{other}"
    return ""


def _through_a_value(path: str, held: object, option: str, value: str) -> str:
    """Return what is wrong with --config.PATH.OPTION=VALUE where the field at `path` holds a plain value."""
    what = f"--config.{path}.{option}: {path} is"
    kind = WORDS.get(path.rpartition(".")[2])
    if kind is None or not isinstance(held, str | None):
        return f"{what} a plain value, {held!r}, and has no fields; write --config.{path}=VALUE"
    from decjax import registry  # Some kinds import JAX.

    takers = _takers(kind, option)
    if not takers:
        return f"{what} a name with options in parentheses, and no {kind} has {option}; python -m launch.parts {kind} lists them"
    name, options = takers[0], {}
    with contextlib.suppress(ValueError):  # An invalid value of the file is refused later.
        chosen, given = registry.parse(kind, held or "")
        name, options = (chosen, given) if chosen in takers else (name, {})
    call = ",".join(f"{key}={text}" for key, text in {**options, option: value or "VALUE"}.items())
    return f"{what} a name with options in parentheses; write --config.{path}='{name}({call})'"


def _takers(kind: str, option: str) -> list[str]:
    """Return the names of the parts of a kind that have an option."""
    from decjax import registry

    return [name for name in registry.names(kind) if option in registry.part(kind, name).options]


def _instead(config: dict, names: list[str], depth: int) -> str:
    """Return what follows "config.a.b is unknown", of which the first `depth` names are sections: suggestions."""
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


def _absent(config: dict, name: str) -> str:
    """Return why the config lacks a section that others have; empty: none has it."""
    from decjax import registry

    if name == "source":
        return "the gradient comes from the whole model or its stages; use the shorthand divided, as configs/clicks.py:divided"
    if name == "model":
        return f"task {config.get('task')!r} has none"
    needed = "mixer" if name == "topology" else name
    methods = {method: registry.part("method", method).traits.get("chooses", ()) for method in registry.names("method")}
    if others := [method for method, chooses in methods.items() if needed in chooses]:
        chosen = config["method"].get("name", "") if "method" in config else ""
        has = " and ".join(methods.get(chosen, ())) or "none of its own"
        return f"method {chosen!r} has {has}, no {name}; methods with {name}: {_listed(others)}"
    return ""


def _near(config: dict, section: Iterable[str], names: list[str], depth: int) -> list[str]:
    """Return fields elsewhere with the name of the unknown one, or those here with a similar spelling."""
    known = [path for path in _paths(config) if path.rpartition(".")[2] != "name"]
    for name in (names[-1], names[depth]):
        if same := [path for path in known if path.rpartition(".")[2] == name]:
            return same
    if not depth:
        return difflib.get_close_matches(".".join(names), known, cutoff=0.75)
    return [".".join([*names[:depth], name]) for name in difflib.get_close_matches(names[depth], list(section), cutoff=0.75)]


def _paths(config: dict, start: str = "") -> Iterator[str]:
    for name in config:
        yield start + name
        if isinstance(config[name], dict):
            yield from _paths(config[name], f"{start}{name}.")


def _listed(names: list[str], most: int = MOST) -> str:
    return ", ".join([*names[:most], *(["…"] if len(names) > most else [])])
