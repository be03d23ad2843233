"""Aliases for annotations."""

from collections.abc import Sequence
from typing import Any

import jax

PyTree = Any  # arrays, or containers of such
Shape = tuple[int, ...]
Arrays = Sequence[jax.Array]
DType = jax.typing.DTypeLike
