"""Checks of a function's arguments against its annotations, so that a wrong argument raises a one-line error at the call."""

from collections.abc import Callable, Iterable, Mapping
import functools
import inspect
import operator
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

EXAMPLES = {  # class -> code that creates an instance
    "Axis": "workers.axis",
    "Channel": "decjax.Channel(workers.axis)",
    "Codec": "'int8'",
    "GradientTransformation": "optax.adamw(1e-3)",
    "GradientTransformationExtraArgs": "optax.adamw(1e-3)",
    "Mixer": "decjax.gossip.exact(topology)",
    "Reducer": "decjax.reduce.mean()",
    "Topology": "decjax.topology.make('ring', 8)",
    "Workers": "decjax.make_workers(8)",
}
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
WORDS = {str: "a word", int: "a whole number", float: "a number", bool: "True or False", type(None): "None"}


def checked(function: F, called: str = "", then: Callable[[Any, Mapping[str, Any]], Any] | None = None) -> F:
    """Wrap a function to check the types of its arguments; a wrong one raises a ValueError that names the value and the type.

    Only classes, numbers, strings, functions and unions of those are checked.

    Args:
        function: to be wrapped.
        called: its name in errors; by default that of the function.
        then: maps (result, arguments) to the result that is returned instead.
    """

    @functools.cache
    def signature():  # Evaluated on the first call, since annotations may be defined after the function.
        return signature_of(function)

    @functools.wraps(function)
    def with_check(*args, **kwargs):
        try:
            bound = signature().bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Raises the error of Python.
        for name, value in bound.arguments.items():
            parameter = signature().parameters[name]
            if parameter.kind not in _VARIADIC and value is not parameter.default and not is_a(value, parameter.annotation):
                raise ValueError(
                    f"{called or function.__name__}: {name}{_described(value)} must be {_type_name(parameter.annotation)}"
                )
        result = function(*args, **kwargs)
        if then is None:
            return result
        bound.apply_defaults()
        return then(result, bound.arguments)

    return with_check  # pyright: ignore[reportReturnType]


def checked_class(cls: type[T]) -> type[T]:
    """Apply `checked` to the arguments of a class; a decorator."""
    cls.__init__ = checked(cls.__init__, cls.__name__)
    return cls


def signature_of(function: Callable) -> inspect.Signature:
    """Return the signature, with annotations evaluated if possible."""
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, TypeError):  # Some annotations exist for type checkers only.
        return inspect.signature(function)


def is_a(value: Any, expected: Any) -> bool:
    """Return whether a value has the type of an annotation; True if the annotation cannot be checked."""
    origin = typing.get_origin(expected)
    if origin in (types.UnionType, typing.Union):
        return any(is_a(value, member) for member in typing.get_args(expected))
    if origin is typing.Literal:
        return is_a(value, type(typing.get_args(expected)[0]))
    if expected is Callable or (origin is not None and issubclass(origin, Callable)):
        return callable(value)
    if origin is not None and issubclass(origin, Iterable):
        return isinstance(value, Iterable) and not isinstance(value, str)
    if expected is None:
        return value is None
    if not inspect.isclass(expected) or expected is inspect.Parameter.empty or hasattr(expected, "dtype"):
        return True  # Arrays have many types.
    if expected in (int, float, bool):
        return _is_number(value, expected)
    return isinstance(value, expected)


def _is_number(value: Any, kind: type) -> bool:
    dtype = str(getattr(value, "dtype", type(value).__name__))  # Arrays may be traced.
    if kind is bool or dtype.startswith("bool"):
        return kind is bool and dtype.startswith("bool")
    if kind is float:
        return getattr(value, "shape", ()) == () and dtype.startswith(("float", "int", "uint", "bfloat"))
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _described(value: Any) -> str:
    plain = value is None or isinstance(value, bool | int | float | str)
    return f"={shown(value)}" if plain else f", {_a(type(value).__name__)},"


def _type_name(expected: Any) -> str:
    members = typing.get_args(expected) if typing.get_origin(expected) in (types.UnionType, typing.Union) else (expected,)
    return " or ".join(dict.fromkeys(map(_word, members)))


def _word(member: Any) -> str:
    if member in WORDS or member is None:
        return WORDS.get(member, "None")
    if member is Callable or typing.get_origin(member) is not None:
        return "a function" if is_a(len, member) else "a sequence"
    name = member.__name__
    return _a(name) + (f" (such as {EXAMPLES[name]})" if name in EXAMPLES else "")


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def shown(value: Any) -> str:
    """Return `repr(value)` on one line for an error message, cut to 100 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}…"
