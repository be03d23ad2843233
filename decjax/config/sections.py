"""Sections of a config as `ConfigDict`s: a part's name and exactly its options, or the plain fields of a declared section."""

from collections.abc import Mapping
from typing import Any, cast

import ml_collections
from ml_collections import config_dict

from decjax import registry
from decjax.config.spec import SECTIONS, Averaging, RunSpec, around, plain_fields


def defaults() -> ml_collections.ConfigDict:
    """Return a config with every plain field that has a default."""
    config = ml_collections.ConfigDict(_values(plain_fields(RunSpec)))
    for name, section in SECTIONS.items():
        config[name] = _values(plain_fields(section))
    return config


def _values(options: Mapping[str, registry.Option]) -> dict[str, Any]:
    return {name: option.default for name, option in options.items() if not option.is_required}


def fields(kind: str, name: str) -> dict[str, registry.Option]:
    """Return all fields of a part's section but its name."""
    extra = {field: plain_fields(Averaging)[field] for field in around(name)} if kind == "reducer" else {}
    return registry.part(kind, name).options | extra


def section(kind: str, name: str, **given: Any) -> ml_collections.ConfigDict:
    """Return the config section of a part: its name and all its options, with the declared defaults for those not given.

    Args:
        kind: kind of the part, such as "optimizer"; see `decjax.registry`.
        name: of the part.
        **given: options.

    Raises:
        ValueError: if there is no such part or option, or a value is of the wrong type or out of range.

    Example:
        >>> section("mixer", "choco", codec="int4").codec
        'int4'
    """
    known = fields(kind, name)
    values = registry.complete(
        kind, name, {option: value for option, value in given.items() if option not in around_of(kind, name)}
    )
    values |= registry.fill(f"{kind}.", given, {option: known[option] for option in around_of(kind, name)})
    made = ml_collections.ConfigDict() if kind == "task" else ml_collections.ConfigDict({"name": name})
    for option, value in values.items():
        if known[option].optional:
            made[option] = config_dict.placeholder(known[option].kind or object)
        if value is not None:
            made[option] = value
    return made


def around_of(kind: str, name: str) -> tuple[str, ...]:
    """Return the fields of a part's section that are not options of the part."""
    return around(name) if kind == "reducer" else ()


def pretrained(folder: str, context: int) -> ml_collections.ConfigDict:
    """Return the config section of the model in a folder of Hugging Face.

    Args:
        folder: with config.json and safetensors, of Llama, Qwen2 or GPT-2.
        context: T, at most; shorter if that of the model is.

    Raises:
        ValueError: if there is no such model.
    """
    from decjax.models import huggingface  # Most configs need no files of models.

    name, options = huggingface.options(folder)
    made = section("model", name, **options, pretrained=folder)
    made.context = min(cast(int, made.context), context)
    return made


def choose(kind: str, text: str, **defaults: Any) -> ml_collections.ConfigDict:
    """Return the config section of a part in call form, such as "choco(codec=int4)".

    Args:
        kind: kind of the part.
        text: its name, and options in brackets.
        **defaults: values of options that the text does not give; those that the part does not have are ignored.
    """
    name, given = registry.parse(kind, text)
    known = fields(kind, name)
    return section(kind, name, **{option: value for option, value in defaults.items() if option in known} | given)
