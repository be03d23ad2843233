"""Parses the argument of a config file, as in `configs/lm.py:workers=12,topology=torus,smoke`."""

from decjax import registry


def parse(arg: str, keys: dict) -> dict:
    """A dict of the values in a text of comma-separated `key=value` pairs.

    Args:
        arg: the text after the colon, possibly empty.
        keys: the type of each key: `int`, `str`, a tuple of valid words, or `bool` for a key that may stand alone, such as `smoke`.

    Raises:
        ValueError: if a key is unknown or given twice, or a value is not of its type.
    """
    given = {}
    for part in filter(None, (part.strip() for part in registry.split(arg or ""))):
        key, equals, value = part.partition("=")
        if key not in keys:
            raise ValueError(f"config argument {key!r} is unknown; use some of {', '.join(keys)}")
        if key in given:
            raise ValueError(f"config argument {key!r} is given twice; leave one out")
        kind = keys[key]
        if kind is bool:
            if value not in ("", "true", "false"):
                raise ValueError(f"config argument {key}={value!r}: write {key}, {key}=true or {key}=false")
            given[key] = value != "false"
        elif not equals or not value:
            raise ValueError(f"config argument {key!r} needs a value, as {key}=…")
        elif isinstance(kind, tuple) and value not in kind:
            raise ValueError(f"config argument {key}={value!r}: use one of {', '.join(kind)}")
        elif kind is int:
            try:
                given[key] = int(value)
            except ValueError:
                raise ValueError(f"config argument {key}={value!r}: must be a whole number") from None
        else:
            given[key] = value
    return given
