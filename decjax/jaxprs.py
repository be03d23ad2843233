"""JAX programs as data."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core


def close(program: core.Jaxpr, consts: Sequence[Any]) -> Any:
    """Return the program with the values of its constants, as `jax.extend.core.jaxpr_as_fun` takes it."""
    return core.ClosedJaxpr(program, consts)  # pyright: ignore[reportPrivateImportUsage]  # JAX 0.12 has one class for both.
