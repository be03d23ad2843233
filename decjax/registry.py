"""Parts by name: what a config may choose from, and the options of each choice.

A part is a class, a frozen dataclass, that is registered under the kind of its base class and a name:

    class Choco(Mixer, name="choco"):
        messages = "compressed changes"                 # a trait, for tables and checks
        requires = (DOUBLY_STOCHASTIC, CONTRACTIVE)     # checked when a part is made

        codec: Codec | str = "int8"                     # an option: a field of the config section
        rounds: Count = 1                               # `Count` declares the range

Fields that `KINDS` lists for a kind are supplied by the code that builds the part; all others are its options. So the class is the
section of a config, its annotations are the checks and its docstring is the help. An annotation may have the help as well, as
`Annotated[Count, "rounds per step"]`, for options that several parts share. Functions that return a part are registered by
`register`. Nothing is listed anywhere else: all modules of a kind's package are imported when the kind is first used, those of
`decjax.contrib` when a name is not found there. Your own parts are registered by importing the file that defines them.

An unknown name or option, or a value that an annotation does not allow, raises a ValueError of one line: the value, what is allowed
and what to do.
"""

import ast
from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import importlib
import inspect
import math
import operator
import os
import pkgutil
import re
import typing
from typing import Any, ClassVar, NamedTuple, TypeVar

from decjax import options as option_types
from decjax.options import LARGEST, Range, check_choice, check_range, choices_of, members, range_of, shown, signature_of

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Kind(NamedTuple):
    """A kind of parts.

    Attributes:
        context: parameters of a factory that are not options: the code that builds the part supplies them.
        home: the package whose modules are imported to find the parts.
    """

    context: tuple[str, ...]
    home: str


KINDS = {
    "task": Kind(("model",), "decjax.tasks"),
    "model": Kind(("divide", "product"), "decjax.models"),
    "source": Kind(("task", "axis", "num_workers", "batch_size", "clips"), "decjax.pipeline"),
    "product": Kind((), "decjax.models"),
    "method": Kind(
        ("inner", "mixer", "reducer", "num_workers", "learning_rate", "share", "clip", "norm", "channel", "units"), "decjax.optim"
    ),
    "optimizer": Kind(("learning_rate",), "decjax.optim"),
    "wrapper": Kind(("inner", "num_stages", "stages"), "decjax.optim"),
    "schedule": Kind(("steps",), "decjax.optim"),
    "mixer": Kind(("topology", "channel"), "decjax.gossip"),
    "reducer": Kind(("channel",), "decjax.reduce"),
    "codec": Kind((), "decjax.codecs"),
    "topology": Kind(("num_workers",), "decjax.topology"),
    "stages": Kind(("spec",), "decjax.config"),
}


CONTRIB = "decjax.contrib"
NONE = ("auto", "none", "")  # words that stand for None


class Option(NamedTuple):
    """An option of a part.

    Attributes:
        default: as in the signature of the factory; `inspect.Parameter.empty` if there is none.
        kind: type of the values; None where the signature does not say.
        optional: whether None is a value, as for "none" or "derive it".
        choices: the allowed words; (): any.
        range: of numbers; None: any that is finite.
        help: what the docstring, or else the annotation, says about it.
    """

    default: Any
    kind: type | None
    optional: bool = False
    choices: tuple[str, ...] = ()
    range: Range | None = None
    help: str = ""

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def type(self) -> str:
        """The type and range, as in "int, at least 1, or none"."""
        words = [
            "|".join(self.choices) or (self.kind.__name__ if self.kind else "any"),
            *([str(self.range)] if self.range and str(self.range) else []),
        ]
        return ", ".join(words) + ((", or none" if len(words) > 1 else " or none") if self.optional else "")


class Requirement(NamedTuple):
    """What a part needs of another one that it is made with.

    Attributes:
        of: the field with the other part, such as "topology".
        needs: such as "a doubly stochastic topology".
        holds: whether the other part fulfills it.
        fix: what to use instead.
    """

    of: str
    needs: str
    holds: Callable[[Any], bool]
    fix: str


class Entry(NamedTuple):
    """A factory with the kind and name that it is registered under.

    Attributes:
        kind: one of `KINDS`.
        name: unique within its kind.
        factory: builds the part from its context and options.
        traits: its properties for tables and checks, such as `needs` or `static`.
    """

    kind: str
    name: str
    factory: Callable[..., Any]
    traits: Mapping[str, Any]

    @property
    def options(self) -> dict[str, Option]:
        """The options by name, in the order of the signature; without those that no config can hold, such as functions."""
        supplied = KINDS[self.kind].context
        return {name: option for name, option in options_of(self.factory).items() if name not in supplied}

    @property
    def summary(self) -> str:
        """The first line of the factory's docstring."""
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]


_parts: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
_fallbacks: dict[str, tuple[Callable[[str], Callable | None], Callable[[], tuple[str, ...]]]] = {}


def register(kind: str, name: str, **traits: Any) -> Callable[[F], F]:
    """Register a function that makes a part under a kind and a name, with traits; a decorator.

    The function is returned with checks of its arguments.

    Raises:
        ValueError: if the kind is unknown, another part has the name, or a parameter is neither context nor has a default.
    """
    _check_kind(kind)

    def enter(factory):
        called = f"{kind} {shown(name)}"
        built = option_types.checked(factory, called)
        _enter(Entry(kind, name, built, traits))
        return built

    return enter


def _enter(entry: Entry) -> None:
    kind, name, factory = entry.kind, entry.name, entry.factory
    for parameter in signature_of(factory).parameters.values():
        if not _is_supplied(kind, parameter) and parameter.default is parameter.empty:
            raise ValueError(
                f"{kind} {shown(name)}: parameter {parameter.name!r} has no default; give it one, or a name that a {kind} is "
                f"called with: {', '.join(KINDS[kind].context) or 'there is none'}"
            )
    known = _parts[kind].get(name)
    if known and not _is_same(factory, known.factory):
        raise ValueError(
            f"{kind} {shown(name)} is taken by {known.factory.__module__}.{known.factory.__qualname__}; use another name"
        )
    _parts[kind][name] = entry


@typing.dataclass_transform(frozen_default=True)
@dataclasses.dataclass(frozen=True)
class Part:
    """Base class of the kinds of parts; subclasses are frozen dataclasses, and those with a `name` are registered.

    Attributes:
        kind: one of `KINDS`.
        name: unique within the kind, or what errors call a part that is not registered.
        requires: what it needs of the parts that it is made with.
    """

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""
    requires: ClassVar[tuple[Requirement, ...]] = ()

    def __init_subclass__(cls, *, kind: str = "", name: str = "", **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.kind, cls.name = kind or cls.kind, name or cls.name
        dataclasses.dataclass(frozen=True, kw_only=bool(name))(cls)
        if name:
            check = lambda result, arguments: arguments["self"].check_requirements()
            cls.__init__ = option_types.checked(cls.__init__, f"{cls.kind} {shown(name)}", check)
            _check_kind(cls.kind)
            _enter(Entry(cls.kind, name, cls, _class_traits(cls)))

    def check_requirements(self, *more: Requirement) -> None:
        """Raise a ValueError if a part that this one is made with lacks what `requires`, or one of `more`, declares."""
        for of, needs, holds, fix in (*self.requires, *more):
            other = getattr(self, of)
            if not holds(other):
                raise ValueError(f"{self} needs {needs}, got {of} {shown(getattr(other, 'name', '') or str(other))}; {fix}")

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}" if self.name else f"this {self.kind}"


def of_field(path: str) -> Any:
    """Return a property that is an attribute of a field, as "codec.name", for parts that wrap another one."""
    return property(operator.attrgetter(path))


def delegates(field: str, *names: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator by which attributes are those of a field, for parts that wrap another one."""

    def with_attributes(cls):
        for name in names:
            setattr(cls, name, of_field(f"{field}.{name}"))
        return cls

    return with_attributes


def _class_traits(cls: type[Part]) -> dict[str, Any]:
    """The class attributes of a part that are no fields, functions or descriptors, by name."""
    fields = {field.name for field in dataclasses.fields(cls)} | {"kind", "name", "requires"}
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(Part)]):
        found |= {
            name: value
            for name, value in vars(base).items()
            if not name.startswith("_") and name not in fields and not callable(value) and not hasattr(value, "__get__")
        }
    if needs := [requirement.needs for requirement in cls.requires]:
        found.setdefault("needs", ", ".join(needs))
    return found


def options_of(factory: Callable) -> dict[str, Option]:
    """Return the options of a function, or of a dataclass as its fields, by name, without those that no config can hold."""
    told = _help(factory)
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name: option._replace(help=told.get(name, "") or option_types.help_of(parameter.annotation))
        for name, parameter in signature_of(factory).parameters.items()
        if parameter.kind not in variadic and (option := _option(parameter))
    }


def _help(factory: Callable) -> dict[str, str]:
    """What docstrings, those of base classes included, say about each argument in their sections Args or Attributes."""
    found: dict[str, str] = {}
    for documented in reversed(factory.__mro__) if inspect.isclass(factory) else [factory]:
        section = re.search(r"^(?:Args|Attributes):\n((?: .*\n?|\n)*)", inspect.getdoc(documented) or "", re.MULTILINE)
        entries = re.findall(r"^ +(\w+): ((?:.|\n(?! +\w+: ))*)", section[1], re.MULTILINE) if section else ()
        found |= {name: " ".join(text.split()) for name, text in entries}
    return found


def fallback(kind: str, find: Callable[[str], Callable | None], names: Callable[[], tuple[str, ...]]) -> None:
    """Add a second source of factories to a kind, for names that are not registered, such as those of another library.

    Args:
        kind: one of `KINDS`.
        find: `find(name)` returns the factory of that name, or None.
        names: `names()` returns the names to show in lists.
    """
    _fallbacks[kind] = find, names


def names(kind: str) -> tuple[str, ...]:
    """Return the names of all parts of a kind; those of `decjax.contrib`, then those of other libraries come last."""
    _search(kind)
    _search_contrib()
    own = tuple(sorted(_parts[kind], key=lambda name: _parts[kind][name].factory.__module__.startswith(CONTRIB)))
    return own + tuple(name for name in _fallbacks[kind][1]() if name not in own) if kind in _fallbacks else own


def part(kind: str, name: str) -> Entry:
    """Return the part of that kind and name; a ValueError if there is none."""
    _search(kind)
    if isinstance(name, str) and name not in _parts[kind]:
        if kind in _fallbacks and (factory := _fallbacks[kind][0](name)):
            return Entry(kind, name, factory, {})
        _search_contrib()
    if isinstance(name, str) and name in _parts[kind]:
        return _parts[kind][name]
    raise ValueError(
        f"{kind} {shown(name)} is unknown; use one of {', '.join(_parts[kind])}" + (" or an optax optimizer" * (kind in _fallbacks))
    )


def partners(kind: str, name: str, other: str) -> tuple[str, ...]:
    """Return the parts of another kind that a part goes with; it is enough that one of the two names the other in a trait.

    Tasks and models are such: a task has the trait `models`, and a model may have the trait `tasks`. Contrib is not searched: its
    tasks and models are imported together.

    Example:
        >>> partners("model", "decoder", "task")
        ('lm',)
    """
    named = part(kind, name).traits.get(f"{other}s", ())
    _search(other)
    return tuple(each for each, entry in _parts[other].items() if each in named or name in entry.traits.get(f"{kind}s", ()))


def parse(what: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and options in a call form, `name` or `name(key=value, …)`.

    Values are Python literals; bare words and nested calls are kept as text.

    Args:
        what: kind of the part, for error messages.
        text: such as "topk(fraction=0.01,values=int4)".

    Raises:
        ValueError: if the text has another form, or gives an option twice.
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


def literal(text: str) -> Any:
    """Return the Python literal that a text stands for, such as a number; the text itself if it stands for none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def split(text: str) -> list[str]:
    """Return the parts of a text between commas, except for those inside brackets: codec=topk(fraction=0.01,values=int4) is one part."""
    parts: list[str] = []
    for piece in text.split(","):
        if parts and parts[-1].count("(") > parts[-1].count(")"):
            parts[-1] += "," + piece
        else:
            parts.append(piece)
    return parts


def call(name: str, options: Mapping[str, Any]) -> str:
    """Return the call form "name(key=value,…)" of a name and options, which `parse` reads."""
    return f"{name}({','.join(f'{key}={shown(value)}' for key, value in options.items())})" if options else name


def complete(kind: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a part: the given values, checked and converted to their type, and the defaults of the others.

    An unknown option, a value of the wrong type, or an option without default that is not given raises ValueError.
    """
    chosen = part(kind, name)
    known = chosen.options
    if unknown := [option for option in given if option not in known]:
        fix = f"use {', '.join(known)}" if known else "leave it out, it has no options"
        raise ValueError(f"{kind} {shown(name)} has no option {unknown[0]!r}; {fix}")
    missing = [name for name, option in known.items() if option.is_required and name not in given]
    if missing:
        raise ValueError(f"{kind} {shown(name)} needs option {missing[0]!r}; give it, as {name}({missing[0]}=…)")
    return fill(f"{kind} {shown(name)}: ", given, known)


def fill(what: str, given: Mapping[str, Any], known: Mapping[str, Option]) -> dict[str, Any]:
    """Return a value for each known option: the given one, checked, or its default. `what` precedes the option's name in errors."""
    return {
        name: checked(f"{what}{name}", given[name], option) if name in given else option.default
        for name, option in known.items()
        if name in given or not option.is_required
    }


def make(kind: str, chosen: Any, /, *context: Any, **given: Any) -> Any:
    """Make a part.

    Args:
        kind: one of `KINDS`.
        chosen: a name, a call form such as "int8(block=64)", or an object that is built already, which is returned as it is.
        *context: positional arguments of the factory.
        **given: options, and further context by name.

    Raises:
        ValueError: for an unknown kind, name or option, or a value that the factory refuses.
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


def _is_same(factory: Callable, known: Callable) -> bool:
    """Whether both are one definition: a notebook cell that runs again, or a config file that its flag imports under a second name."""
    if factory.__qualname__ != known.__qualname__:
        return False
    return factory.__module__ == known.__module__ or file_of(factory) == file_of(known) is not None


def file_of(factory: Callable) -> str | None:
    """The file that defines a function, or a class with methods."""
    functions = vars(factory).values() if inspect.isclass(factory) else [factory]
    paths = [inspect.unwrap(function).__code__.co_filename for function in functions if inspect.isfunction(function)]
    return next((os.path.abspath(path) for path in paths if not path.startswith("<")), None)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; use one of {', '.join(KINDS)}")


@functools.cache
def _search(kind: str) -> None:
    """Import every module of the kind's package, which registers its parts."""
    _check_kind(kind)
    package = importlib.import_module(KINDS[kind].home)
    for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
        importlib.import_module(f"{package.__name__}.{module.name}")


def _is_supplied(kind: str, parameter: inspect.Parameter) -> bool:
    """Whether a parameter is no option: it is context, or stands for any number of parameters."""
    return parameter.name in KINDS[kind].context or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def _option(parameter: inspect.Parameter) -> Option | None:
    """The option of a parameter, its type read from the default or, where that is None, from the annotation.

    None if its values are no words, numbers, booleans or tuples of such, as functions and pytrees.
    """
    default, types = parameter.default, members(parameter.annotation)
    allowed = range_of(parameter.annotation)
    plain = [kind for kind in (str, float, int, bool) if kind in types]
    if default is None or default is inspect.Parameter.empty:
        if any(typing.get_origin(member) in (Iterable, Mapping) for member in types):
            return None
        has_tuple = any(tuple in (member, typing.get_origin(member)) for member in types)
        kind = plain[0] if plain else str if parameter.name.endswith("dtype") else tuple if has_tuple else None
        return Option(default, kind, default is None, (), allowed) if kind else None
    if isinstance(default, bool | int | float | str):
        return Option(default, type(default), type(None) in types, choices_of(parameter.annotation), allowed)
    return Option(default, None, type(None) in types) if isinstance(default, tuple) and _is_plain(default) else None


def _is_plain(value: Any) -> bool:
    """Whether a config can hold it: a word, a number, a boolean, None, or a tuple of such."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def checked(what: str, value: Any, option: Option) -> Any:
    """Return a value of an option, in the option's type; a ValueError names it by `what` if it has another type.

    Where None is a value, "auto", "none" and "" stand for it. Whole numbers become floats and lists tuples where the type is such.
    """
    kind = option.kind
    if value is None or (option.optional and value in NONE):
        if option.optional:
            return None
        raise ValueError(f"{what}=None must be a value such as {option.default!r}")
    if kind is None:
        return value
    check_choice(what, value, option.choices)
    if kind is tuple and isinstance(value, list):  # As in a JSON file.
        return tuple(value)
    default = "" if option.default in (None, "", inspect.Parameter.empty) else f"; the default is {option.default!r}"
    if kind is float and (value in ("nan", "inf") or (isinstance(value, float) and not math.isfinite(value))):
        raise ValueError(f"{what}={value} must be finite{default}")
    if not _is_of(kind, value):
        meant = {bool: "True or False", int: "a whole number", float: "a number", str: "a word", tuple: "a tuple, as (2,4)"}[kind]
        raise ValueError(f"{what}={shown(value)} must be {meant}{default}")
    if kind in (int, float):
        check_range(what, value, option.range or (Range(-LARGEST, LARGEST) if kind is int else None))
    return float(value) if kind is float else value


def _is_of(kind: type, value: Any) -> bool:
    """Whether a value has the type of an option; whole numbers are numbers, and built parts may stand for their names."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is str:
        return not isinstance(value, int | float | list | dict)
    return isinstance(value, int if kind is int else int | float if kind is float else kind)


@functools.cache
def _search_contrib() -> None:
    """Import the packages of `decjax.contrib`, which registers their parts."""
    for module in pkgutil.iter_modules(importlib.import_module(CONTRIB).__path__):
        importlib.import_module(f"{CONTRIB}.{module.name}")
