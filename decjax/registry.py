"""Parts by name: what a config may choose from, and what each choice takes.

A part is a factory, entered under a kind and a name where it is defined:

    @registry.register("mixer", "choco", needs="a doubly stochastic topology, a contractive codec")
    def choco(topology, channel=Channel(), *, codec="int8", gamma=None, rounds=1): ...

Parameters that the kind names in `KINDS` are supplied by whoever builds the part; all others are its options. So the signature is
the section of a config, the docstring is the help, and no part is listed anywhere else: modules of the package in which a kind is
at home are imported when the kind is first asked for, and parts of one's own are entered by importing the file that holds them.

A name, option or value that cannot be raises a ValueError: in one line the value, what is allowed and what to do.
"""

import ast
from collections.abc import Callable, Iterable, Mapping
import functools
import importlib
import inspect
import os
import pkgutil
import types
import typing
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A kind of parts."""

    context: tuple[str, ...]  # parameters that are no options: they are supplied by whoever builds the part
    home: str  # the package whose modules are searched


KINDS = {
    "task": Kind(("model",), "decjax.tasks"),
    "model": Kind(("divide",), "decjax.models"),
    "method": Kind(("inner", "mixer", "reducer", "num_workers", "learning_rate", "share", "clip"), "decjax.optim"),
    "optimizer": Kind(("learning_rate",), "decjax.optim"),
    "schedule": Kind(("steps",), "decjax.optim"),
    "mixer": Kind(("topology", "channel"), "decjax.gossip"),
    "reducer": Kind(("channel",), "decjax.reduce"),
    "codec": Kind((), "decjax.codecs"),
    "topology": Kind(("num_workers",), "decjax.topology"),
}


class Option(NamedTuple):
    """An option of a part."""

    default: Any  # as in the signature
    kind: type | None  # type of its values; None where the signature does not say
    optional: bool  # whether None, for "decide by yourself" or "none", is a value


class Part(NamedTuple):
    """A factory under its name."""

    kind: str
    name: str
    factory: Callable[..., Any]
    traits: Mapping[str, Any]  # what a table should tell of it, such as what it needs

    @property
    def options(self) -> dict[str, Option]:
        """Its options, in the order of the signature; what no config can hold, such as a function, is none."""
        return {
            name: option
            for name, parameter in _signature(self.factory).parameters.items()
            if not _is_supplied(self.kind, parameter) and (option := _option(parameter))
        }

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]


_parts: dict[str, dict[str, Part]] = {kind: {} for kind in KINDS}
_fallbacks: dict[str, tuple[Callable[[str], Callable | None], Callable[[], tuple[str, ...]]]] = {}


def register(kind: str, name: str, **traits: Any) -> Callable[[Callable], Callable]:
    """Enters a factory under a name; used as a decorator, it leaves the factory as it is.

    Raises:
        ValueError: if the kind is unknown, another part has the name, or a parameter is neither context nor has a default.
    """
    _check_kind(kind)

    def enter(factory):
        for parameter in _signature(factory).parameters.values():
            if not _is_supplied(kind, parameter) and parameter.default is parameter.empty:
                raise ValueError(
                    f"{kind} {shown(name)}: nobody supplies parameter {parameter.name!r}; give it a default, or a name of "
                    f"{', '.join(KINDS[kind].context) or 'none'}"
                )
        known = _parts[kind].get(name)
        if known and not _is_anew(factory, known.factory):
            raise ValueError(
                f"{kind} {shown(name)} is taken by {known.factory.__module__}.{known.factory.__qualname__}; use another name"
            )
        _parts[kind][name] = Part(kind, name, factory, traits)
        return factory

    return enter


def fallback(kind: str, find: Callable[[str], Callable | None], names: Callable[[], tuple[str, ...]]) -> None:
    """Where to look for factories of a kind that are entered under no name, as those of another library.

    Args:
        kind: one of `KINDS`.
        find: returns the factory of a name, or None.
        names: returns the names that `find` knows and lists should show.
    """
    _fallbacks[kind] = find, names


def names(kind: str) -> tuple[str, ...]:
    """All names of a kind, those of other libraries last."""
    _search(kind)
    own = tuple(_parts[kind])
    return own + tuple(name for name in _fallbacks[kind][1]() if name not in own) if kind in _fallbacks else own


def part(kind: str, name: str) -> Part:
    """The part of a name."""
    _search(kind)
    if isinstance(name, str) and name in _parts[kind]:
        return _parts[kind][name]
    if isinstance(name, str) and kind in _fallbacks and (factory := _fallbacks[kind][0](name)):
        return Part(kind, name, factory, {})
    raise ValueError(
        f"{kind} {shown(name)} is unknown; use one of {', '.join(_parts[kind])}" + (" or an optax optimizer" * (kind in _fallbacks))
    )


def parse(what: str, text: str) -> tuple[str, dict[str, Any]]:
    """Reads `name` or `name(key=value, …)`; values are Python literals, bare words, or such calls, which are kept as text.

    Args:
        what: is named in errors, as "codec".
        text: such as "topk(fraction=0.01,values=int4)".
    """
    example = f"{what} {shown(text)} must read like 'name' or 'name(option=1,other=word)'"
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError(example)
        given: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in given:
                raise ValueError(
                    f"{what} {shown(text)}: option {keyword.arg} is given twice; leave one out" if keyword.arg else example
                )
            bare = isinstance(keyword.value, ast.Name | ast.Call)
            given[keyword.arg] = ast.unparse(keyword.value) if bare else ast.literal_eval(keyword.value)
        return node.func.id, given
    except (SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise ValueError(example) from error
    except ValueError as error:
        raise error if str(error).startswith(what) else ValueError(example) from error


def call(name: str, options: Mapping[str, Any]) -> str:
    """The inverse of `parse`: "name(key=value,…)"."""
    return f"{name}({','.join(f'{key}={shown(value)}' for key, value in options.items())})" if options else name


def complete(kind: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a part: the given ones, checked and in their type, and the defaults of the others."""
    chosen = part(kind, name)
    known = chosen.options
    # Configs of older runs hold the None of what was an option then, as muon's trees: it is the default anyway.
    absent = {parameter.name for parameter in _signature(chosen.factory).parameters.values() if parameter.default is None}
    given = {option: value for option, value in given.items() if option in known or value is not None or option not in absent}
    if unknown := [option for option in given if option not in known]:
        fix = f"use {', '.join(known)}" if known else "it has none, leave it out"
        raise ValueError(f"{kind} {shown(name)} has no option {unknown[0]!r}; {fix}")
    missing = [option for option, (default, *_) in known.items() if default is inspect.Parameter.empty and option not in given]
    if missing:
        raise ValueError(f"{kind} {shown(name)} needs option {missing[0]!r}; give it, as {name}({missing[0]}=…)")
    return fill(f"{kind} {shown(name)} option ", given, known)


def fill(what: str, given: Mapping[str, Any], known: Mapping[str, Option]) -> dict[str, Any]:
    """The values of all options that are known, as of `complete`; in errors, `what` stands before an option's name."""
    return {
        name: checked(f"{what}{name}", given[name], option) if name in given else option.default for name, option in known.items()
    }


def make(kind: str, chosen: Any, /, *context: Any, **given: Any) -> Any:
    """Builds a part.

    Args:
        kind: one of `KINDS`.
        chosen: its name, its call form as "int8(block=64)", or a part that is built already, which is returned.
        *context: positional arguments of the factory.
        **given: options, and further context by name.
    """
    _check_kind(kind)
    if not isinstance(chosen, str):
        return chosen
    name, options = parse(kind, chosen)
    if twice := options.keys() & given.keys():
        raise ValueError(f"{kind} {shown(chosen)}: option {min(twice)} is given twice; leave one out")
    by_name = KINDS[kind].context[len(context) :]
    options = complete(kind, name, options | {key: value for key, value in given.items() if key not in by_name})
    factory = part(kind, name).factory
    takes = inspect.signature(factory).parameters
    try:
        return factory(*context, **{key: given[key] for key in by_name if key in given and key in takes}, **options)
    except TypeError as error:  # As a type of numbers that does not exist.
        raise ValueError(
            f"{kind} {shown(name)}: {shown(' '.join(str(error).split()))}; python -m launch.parts {kind} {name} says more"
        ) from error


def shown(value: Any) -> str:
    """A value in an error: as it is written, or its beginning."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…"


def _is_anew(factory: Callable, known: Callable) -> bool:
    """Whether both are one definition: a cell of a notebook that runs again, or a config file, which its flag imports a second time
    under another name."""
    files = [os.path.abspath(one.__code__.co_filename) if hasattr(one, "__code__") else one for one in (factory, known)]
    return factory.__qualname__ == known.__qualname__ and (factory.__module__ == known.__module__ or files[0] == files[1])


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; use one of {', '.join(KINDS)}")


@functools.cache
def _search(kind: str) -> None:
    """Imports every module of the kind's home."""
    _check_kind(kind)
    package = importlib.import_module(KINDS[kind].home)
    for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
        importlib.import_module(f"{package.__name__}.{module.name}")


def _signature(factory: Callable) -> inspect.Signature:
    try:
        return inspect.signature(factory, eval_str=True)
    except (NameError, TypeError):  # Annotations that are there for type checkers only.
        return inspect.signature(factory)


def _is_supplied(kind: str, parameter: inspect.Parameter) -> bool:
    """Whether it comes from whoever builds the part, or stands for any number of parameters: neither is an option."""
    return parameter.name in KINDS[kind].context or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def _option(parameter: inspect.Parameter) -> Option | None:
    """An option from its default, or where that is None, from its annotation; None: its values are not plain, or trees."""
    default, members = parameter.default, (parameter.annotation,)
    if typing.get_origin(parameter.annotation) in (types.UnionType, typing.Union):
        members = typing.get_args(parameter.annotation)
    plain = [kind for kind in (str, float, int, bool) if kind in members]
    if default is None or default is inspect.Parameter.empty:
        if any(typing.get_origin(member) in (Iterable, Mapping) for member in members):
            return None
        has_tuple = any(tuple in (member, typing.get_origin(member)) for member in members)
        kind = plain[0] if plain else str if parameter.name.endswith("dtype") else tuple if has_tuple else None
        return Option(default, kind, default is None) if kind else None
    if isinstance(default, bool | int | float | str):
        return Option(default, type(default), type(None) in members)
    return Option(default, None, type(None) in members) if isinstance(default, tuple) and _is_plain(default) else None


def _is_plain(value: Any) -> bool:
    """Whether a config can hold it: a word, a number, a boolean, None, or a tuple of such."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def checked(what: str, value: Any, option: Option) -> Any:
    """The value, as its type asks."""
    kind = option.kind
    if value is None or (option.optional and value in ("auto", "none", "")):
        if option.optional:
            return None
        raise ValueError(f"{what}=None must be a value such as {option.default!r}")
    if kind is None:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and not isinstance(value, bool | int | float):
        return value  # A word, or a part that is built already.
    if not isinstance(value, str) and isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    if kind is tuple and isinstance(value, list):  # As in a JSON file.
        return tuple(value)
    meant = {bool: "True or False", int: "a whole number", float: "a number", str: "a word", tuple: "a tuple, as (2,4)"}[kind]
    example = "" if option.default is None or option.default is inspect.Parameter.empty else f", such as {option.default!r}"
    raise ValueError(f"{what}={shown(value)} must be {meant}{example}")
