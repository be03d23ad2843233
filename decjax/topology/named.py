"""Topologies by name."""

import functools
from typing import Any

from decjax import registry
from decjax.options import checked
from decjax.topology import schedule


def names() -> tuple[str, ...]:
    """The names of all topologies that `make` builds."""
    return registry.names("topology")


def options(name: str) -> dict[str, object]:
    """The options of a named topology with their defaults; ValueError for an unknown name."""
    return {option: entry.default for option, entry in registry.part("topology", name).options.items()}


@functools.partial(checked, called="topology.make")
def make(name: str, num_workers: int, /, **chosen: Any) -> schedule.Topology:
    """The topology of a name for N workers.

    Args:
      name: one of `names()`, or a call form such as "base_k(k=2)".
      num_workers: N >= 1; for one worker every topology is the identity.
      **chosen: options of that topology, see `options(name)`. Equal options give equal topologies; random ones take a `seed`.

    Raises:
      ValueError: for an unknown name or option, a size that the graph does not exist for, or a bad option value.

    Examples:
      >>> make("hierarchical", 16, local_size=4, outer="base_k(k=3)").matrix(0).shape
      (16, 16)
    """
    return registry.make("topology", name, num_workers, **chosen)
