"""Types of options with their ranges, and checks of a function's arguments against its annotations.

An annotation declares everything that a value must satisfy:

    def choco(topology: Topology, *, codec: Codec | str = "int8", gamma: Share | None = None, rounds: Count = 1): ...

`Share` is a float in (0, 1], `Count` an int of at least 1; `Annotated[int, Range(2, 8)]` declares a range that has no name here, and
`Literal["awc", "atc"]` the allowed words. `checked` refuses wrong arguments of a function, `decjax.registry` those of parts and configs.
All of them raise a ValueError of one line with the value and what is allowed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import inspect
import math
import numbers
import operator
import types
import typing
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

LARGEST = 2**31 - 1  # of whole numbers


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; without `low` itself if `above`, without `high` itself if `below`.

    If `multiple` is not 0, only its multiples.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    multiple: int = 0

    def __contains__(self, value: float) -> bool:
        fits = not self.multiple or value % self.multiple == 0
        above = self.low < value if self.above else self.low <= value
        return fits and above and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        high = math.inf if self.high == LARGEST else self.high
        if self.low == self.high:
            return f"{self.low:.15g}"
        bounds = [f"{'more than' if self.above else 'at least'} {self.low:.15g}"] if self.low > -math.inf else []
        bounds += [f"{'less than' if self.below else 'at most'} {high:.15g}"] if high < math.inf else []
        return " and ".join(bounds + ([f"a multiple of {self.multiple}"] if self.multiple else []))


Count = Annotated[int, Range(1, LARGEST)]
Natural = Annotated[int, Range(0, LARGEST)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, above=True)]
Decay = Annotated[float, Range(0, 1, below=True)]

EXAMPLES = {  # class -> code that creates an instance
    "Axis": "workers.axis",
    "Channel": "decjax.Channel(workers.axis)",
    "Codec": "decjax.codecs.make('int8')",
    "GradientTransformation": "optax.adamw(1e-3)",
    "GradientTransformationExtraArgs": "optax.adamw(1e-3)",
    "Mixer": "decjax.gossip.exact(topology)",
    "Reducer": "decjax.reduce.mean()",
    "RunSpec": "decjax.config.resolve(config)",
    "Topology": "decjax.topology.make('ring', 8)",
    "Workers": "decjax.make_workers(8)",
}
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
WORDS = {str: "a word", int: "a whole number", float: "a number", bool: "True or False", type(None): "None"}


def checked(function: F, called: str = "", then: Callable[[Any, Mapping[str, Any]], Any] | None = None) -> F:
    """Wrap a function to check its arguments; a wrong one raises a ValueError that names the value and what is allowed.

    Classes, numbers and their ranges, strings, functions and unions of those are checked.

    Args:
        function: to be wrapped.
        called: its name in errors; by default that of the function.
        then: maps (result, arguments) to the result that is returned instead.
    """
    name = called or function.__name__

    @functools.cache
    def signature():  # Evaluated on the first call, since annotations may be defined after the function.
        return signature_of(function)

    @functools.wraps(function)
    def with_check(*args, **kwargs):
        try:
            bound = signature().bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Raises the error of Python.
        for argument, value in bound.arguments.items():
            parameter = signature().parameters[argument]
            if parameter.kind in _VARIADIC or value is parameter.default:
                continue
            check(f"{name}: {argument}", value, parameter.annotation)
        result = function(*args, **kwargs)
        if then is None:
            return result
        bound.apply_defaults()
        return then(result, bound.arguments)

    return typing.cast(F, with_check)


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


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself, without `Annotated`."""
    parts = typing.get_args(annotation) if typing.get_origin(annotation) in (types.UnionType, typing.Union) else (annotation,)
    return tuple(typing.get_args(part)[0] if typing.get_origin(part) is Annotated else part for part in parts)


def range_of(annotation: Any) -> Range | None:
    """Return the range that an annotation declares, also as a member of a union."""
    return next((data for data in _metadata(annotation) if isinstance(data, Range)), None)


def _metadata(annotation: Any) -> Iterator[Any]:
    parts = typing.get_args(annotation) if typing.get_origin(annotation) in (types.UnionType, typing.Union) else (annotation,)
    return (data for part in parts if typing.get_origin(part) is Annotated for data in typing.get_args(part)[1:])


def help_of(annotation: Any) -> str:
    """Return the text that an annotation has, as `Annotated[int, "seed of the random draws"]`, also as a member of a union; or ""."""
    return next((data for data in _metadata(annotation) if isinstance(data, str)), "")


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the words that an annotation allows, also as a member of a union; () if it allows any."""
    return sum((typing.get_args(member) for member in members(annotation) if typing.get_origin(member) is typing.Literal), ())


def check(what: str, value: Any, annotation: Any) -> None:
    """Raise a ValueError for a value that does not have the type of an annotation, or is none of its words or outside of its range."""
    if not is_a(value, annotation):
        raise ValueError(f"{what}{_described(value)} must be {_type_name(annotation)}")
    check_choice(what, value, choices_of(annotation))
    check_range(what, value, range_of(annotation))


def check_choice(what: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise a ValueError for a word that is not one of the choices; () allows any."""
    if choices and isinstance(value, str) and value not in choices:
        raise ValueError(f"{what}={shown(value)} is unknown; use one of {', '.join(choices)}")


def check_range(what: str, value: Any, allowed: Range | None) -> None:
    """Raise a ValueError if a number lies outside its range. Traced numbers are not checked."""
    number = typing.cast(float, value)  # Converted, a huge whole number would overflow.
    if allowed and isinstance(value, numbers.Real) and not isinstance(value, bool) and number not in allowed:
        is_huge = number > LARGEST == allowed.high
        raise ValueError(f"{what}={shown(value)} must be {f'at most {LARGEST}' if is_huge else allowed}")


def is_a(value: Any, expected: Any) -> bool:
    """Return whether a value has the type of an annotation; True if the annotation cannot be checked."""
    parts = members(expected)
    if len(parts) > 1:
        return any(is_a(value, part) for part in parts)
    expected = next(iter(parts))
    origin = typing.get_origin(expected)
    if origin is typing.Literal:
        return is_a(value, type(typing.get_args(expected)[0]))
    if expected is Callable or (origin is not None and issubclass(origin, Callable)):
        return callable(value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is not None and issubclass(origin, Iterable):
        return isinstance(value, Iterable) and not isinstance(value, str)
    if expected is None:
        return value is None
    if expected is Any or not inspect.isclass(expected) or expected is inspect.Parameter.empty or hasattr(expected, "dtype"):
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
    return " or ".join(dict.fromkeys(map(_word, members(expected))))


def _word(member: Any) -> str:
    if member in WORDS or member is None:
        return WORDS.get(member, "None")
    if member is Callable or typing.get_origin(member) is not None:
        return "a function" if is_a(len, member) else "a mapping" if is_a({}, member) and not is_a([], member) else "a sequence"
    name = member.__name__
    return _a(name) + (f" (such as {EXAMPLES[name]})" if name in EXAMPLES else "")


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def shown(value: Any) -> str:
    """Return `repr(value)` on one line for an error message, cut to 100 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}…"
