"""Aliases for annotations."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

PyTree = Any  # arrays, or containers of such
Shape = tuple[int, ...]
Arrays = Sequence[jax.Array]
DType = jax.typing.DTypeLike


class Device(Protocol):
    """A `jax.Device`, which JAX exports in a form that type checkers refuse in annotations."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    @property
    def process_index(self) -> int: ...


class Jitted(Protocol):
    """A function of pytrees that is compiled on its first call, or beforehand by `lower(*args).compile()`."""

    def __call__(self, *args: PyTree) -> PyTree: ...

    def lower(self, *args: PyTree) -> Any: ...
