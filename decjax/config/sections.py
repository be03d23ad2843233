"""Sections of a config: the name of a part and exactly its options."""

from collections.abc import Mapping
from typing import Any

import ml_collections
from ml_collections import config_dict

from decjax import registry

# Around any reducer that codes what it sends: the plain mean before step `start`; and in a pipeline, which stages compress: the
# first so many, or "auto" by the cost model with the profile of a cluster.
AROUND_REDUCER = {"start": registry.Option(0, int, False)}
AROUND_STAGES = {"stages": registry.Option("", str, False), "cluster": registry.Option("", str, False)}


def fields(kind: str, name: str, stages: int = 1) -> dict[str, registry.Option]:
    """The fields of a part's section besides its name."""
    part = registry.part(kind, name)
    if kind != "reducer" or part.traits.get("exact"):
        return part.options
    return part.options | AROUND_REDUCER | (AROUND_STAGES if stages > 1 and not part.traits.get("adaptive") else {})


def section(kind: str, name: str, stages: int = 1, **given: Any) -> ml_collections.ConfigDict:
    """The section of a part: its name and all its options; what is not given has the signature's default.

    Args:
        kind, name: of the part; see `decjax.registry`.
        stages: S of a pipeline.
        **given: options.

    Raises:
        ValueError: in one line, naming the option or value.
    """
    known = fields(kind, name, stages)
    values = check(kind, name, given, stages)
    made = ml_collections.ConfigDict() if kind == "task" else ml_collections.ConfigDict({"name": name})
    for option, value in values.items():
        placed = config_dict.placeholder(known[option].kind or object) if known[option].optional else value
        made[option] = placed
        if known[option].optional and value is not None:
            made[option] = value
    return made


def choose(kind: str, text: str, stages: int = 1, **defaults: Any) -> ml_collections.ConfigDict:
    """The section of a part in call form, as "choco(codec=int4)".

    Args:
        kind: of the part.
        text: its name, and options that go before the defaults.
        stages: S of a pipeline.
        **defaults: options of this config, of which the part may lack some.

    Raises:
        ValueError: in one line, naming the option or value.
    """
    name, given = registry.parse(kind, text)
    known = fields(kind, name, stages)
    return section(kind, name, stages, **{option: value for option, value in defaults.items() if option in known} | given)


def check(kind: str, name: str, given: Mapping[str, Any], stages: int = 1) -> dict[str, Any]:
    """The values of all fields, checked and in their type; see `registry.complete`."""
    around = {
        option: entry for option, entry in fields(kind, name, stages).items() if option not in registry.part(kind, name).options
    }
    own = {option: value for option, value in given.items() if option not in around}
    found = registry.complete(kind, name, own)
    return found | {
        option: registry.checked(f"{kind}.{option}", given[option], entry) if option in given else entry.default
        for option, entry in around.items()
    }
