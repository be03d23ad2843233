"""Parses the argument of a config file, as in `configs/lm.py:workers=12,topology=torus,smoke`."""

from collections.abc import Mapping
from typing import Any

from decjax import config, registry
from decjax.registry import Option

KINDS = ("method", "mixer", "reducer", "optimizer", "topology")  # parts that a shorthand chooses by their names


def keys(own: Mapping[str, Option]) -> dict[str, Option]:
    """Return the keys of a shorthand: plain fields of a config, parts, `smoke`, `scale`, and a config file's own ones."""
    plain = {key: option for key, _, _, option in config.shorthand_keys()}
    shared = {"smoke": Option(False, bool), "scale": Option("linear", str, False, ("linear", "sqrt"))}
    return plain | {kind: Option("", str) for kind in KINDS} | shared | dict(own)


def parse(arg: str, own: Mapping[str, Option] | None = None) -> dict[str, Any]:
    """Return the values in a text of comma-separated `key=value` pairs; `key` alone stands for `key=true`.

    Values of unknown keys stay text; `base.get_config` places them as options of the chosen parts.

    Raises:
        ValueError: if a key is given twice, or a value is not of its type or out of range.
    """
    known, given = keys(own or {}), {}
    for part in filter(None, (part.strip() for part in registry.split(arg or ""))):
        key, equals, value = part.partition("=")
        if key in given:
            raise ValueError(f"shorthand key {key!r} is given twice; leave one out")
        if equals and not value:
            raise ValueError(f"shorthand key {key!r} needs a value, as {key}=…")
        given[key] = from_text(key, value, known[key]) if key in known else value
    return given


def from_text(key: str, text: str, option: Option) -> Any:
    """Return the value of an option that a text stands for; an empty one stands for true."""
    what = f"shorthand {key}"
    if option.kind is bool:
        return registry.checked(what, {"": True, "true": True, "false": False}.get(text, text), option)
    if not text:
        raise ValueError(f"{what!r} needs a value, as {key}=…")
    if option.kind in (int, float, tuple, None):
        return registry.checked(what, registry.literal(text), option)
    return registry.checked(what, text, option)
