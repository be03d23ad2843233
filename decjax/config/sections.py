"""Sections of a config: the name of a part and exactly its options, or plain fields whose defaults give their types."""

from collections.abc import Mapping
from typing import Any

import ml_collections
from ml_collections import config_dict

from decjax import registry

# Fields for compressed messages between pipeline stages: the codec of gradients or of activations, and its options.
BOUNDARY: dict[str, dict[str, Any]] = {
    "backward": dict(backward="", when="epilogue", error="carry"),
    "forward": dict(forward="", forward_error="none", slots=0, reuse_indices=False),
}
# Fields for embedding tables that are divided among the workers: bounds of vectors and of their gradients, and, if there are any, options.
TABLES: dict[str, Any] = dict(forward="", backward="")
BOUNDED: dict[str, Any] = dict(bits=8, outliers=2, start=1.0, within=0, decay="stepwise")
# Additional fields of any reducer that compresses: the exact mean is used before step `start`. In a pipeline, `stages` says how
# many of the first stages compress, or "auto": as many as the cost model finds best with the profile `cluster`.
AROUND_REDUCER = {"start": 0}
AROUND_STAGES = {"stages": "", "cluster": ""}


def fill(what: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values of plain fields: the given ones, checked and converted to the type of their default, and the others' defaults."""
    if unknown := [name for name in given if name not in defaults]:
        raise ValueError(f"{what}.{unknown[0]} is unknown here; use some of {', '.join(defaults) or 'none'}")
    return registry.fill(f"{what}.", given, _plain(defaults))


def _plain(defaults: Mapping[str, Any]) -> dict[str, registry.Option]:
    return {name: registry.Option(default, type(default), False) for name, default in defaults.items()}


def tables(given: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of the section of divided tables, the given ones and the usual others; those of `BOUNDED` only where there are bounds.

    Raises:
        ValueError: if a field is unknown, or of another type.
    """
    has_bounds = any(given.get(kind) for kind in TABLES)
    return fill("tables", given, TABLES | (BOUNDED if has_bounds else {}))


def around(kind: str, name: str, stages: int = 1) -> dict[str, Any]:
    """Defaults of the additional fields in a part's section, which are not options of the part itself."""
    traits = registry.part(kind, name).traits
    if kind != "reducer" or traits.get("exact"):
        return {}
    return AROUND_REDUCER | (AROUND_STAGES if stages > 1 and not traits.get("adaptive") else {})


def fields(kind: str, name: str, stages: int = 1) -> dict[str, registry.Option]:
    """All fields of a part's section but its name."""
    return registry.part(kind, name).options | _plain(around(kind, name, stages))


def check(kind: str, name: str, given: Mapping[str, Any], stages: int = 1) -> dict[str, Any]:
    """The values of all fields of a part's section, checked and converted to their types."""
    others = around(kind, name, stages)
    own = {option: value for option, value in given.items() if option not in others}
    return registry.complete(kind, name, own) | registry.fill(f"{kind}.", given, _plain(others))


def section(kind: str, name: str, stages: int = 1, **given: Any) -> ml_collections.ConfigDict:
    """The config section of a part: its name and all its options, with the signature's defaults for those not given.

    Args:
        kind: kind of the part, such as "optimizer"; see `decjax.registry`.
        name: of the part.
        stages: S of a pipeline; reducers have additional fields there.
        **given: options.

    Raises:
        ValueError: if there is no such part or option, or a value is of the wrong type.

    Example:
        >>> section("mixer", "choco", codec="int4").codec
        'int4'
    """
    known = fields(kind, name, stages)
    made = ml_collections.ConfigDict() if kind == "task" else ml_collections.ConfigDict({"name": name})
    for option, value in check(kind, name, given, stages).items():
        if known[option].optional:
            made[option] = config_dict.placeholder(known[option].kind or object)
        if value is not None:
            made[option] = value
    return made


def choose(kind: str, text: str, stages: int = 1, **defaults: Any) -> ml_collections.ConfigDict:
    """The config section of a part written as a text with options, such as "choco(codec=int4)".

    Args:
        kind: kind of the part.
        text: its name, and options in brackets.
        stages: S of a pipeline.
        **defaults: values of options that the text does not give; those that the part does not have are ignored.
    """
    name, given = registry.parse(kind, text)
    known = fields(kind, name, stages)
    return section(kind, name, stages, **{option: value for option, value in defaults.items() if option in known} | given)
