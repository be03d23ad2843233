"""States of mixers and reducers within states of optax."""

from collections.abc import Callable
import functools
from typing import Any

import optax


def init_memory(init: Callable[[Any], Any], params: Any) -> Any:
    """`init(params)`, the state of a mixer or reducer, or what `optax.tree.map_params` is to see of it.

    That function gives `init` a placeholder for the parameters, to find the fields of a state that are shaped like them. What
    mixers and reducers remember lies in buckets, whose number the placeholder does not tell: it counts as one field of another
    shape, to which `transform_non_params` is applied as a whole.
    """
    if not isinstance(params, _placeholder()):
        return init(params)
    try:
        return () if init(params) == () else 0
    except ValueError:  # It needs arrays, or a worker axis, so it remembers something.
        return 0


@functools.cache
def _placeholder() -> type:
    """The type of that placeholder, which optax does not export."""
    seen = []
    optax.tree.map_params(lambda params: seen.append(type(params)) or (), lambda x: x, ())
    return seen[0]
