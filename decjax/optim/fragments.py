"""Cuts a pytree into parts of about equal bytes, each of which has a part of every array."""

from collections.abc import Sequence
import itertools
from typing import Any

import jax

from decjax.buckets import is_floating

Index = tuple[slice, ...]


def indices(tree: Any, count: int) -> list[list[Index | None]]:
    """For each of `count` parts where it lies in each leaf of the tree; None where it has nothing of a leaf.

    An array is cut along the first of its axes that `count` divides, so stacked layers into whole layers where it divides their number;
    else along its longest axis, into parts that differ by a row; an array without an axis of that length belongs to one part as it is.
    Leaves that are not floating point belong to no part.

    Raises:
        ValueError: if a part has nothing.
    """
    parts: list[list[Index | None]] = [[] for _ in range(count)]
    positions = itertools.count()  # of floating-point leaves, so that others change nothing
    for leaf in jax.tree.leaves(tree):
        found = _cut(leaf.shape, count, next(positions)) if leaf.size and is_floating(leaf) else [None] * count
        for part, index in zip(parts, found):
            part.append(index)
    if not all(any(index is not None for index in part) for part in parts):
        raise ValueError(f"{count} parts of the parameters: some would be empty; use fewer fragments, or less delay")
    return parts


def _cut(shape: tuple[int, ...], count: int, position: int) -> list[Index | None]:
    whole = tuple(slice(0, size) for size in shape)
    fitting = [axis for axis, size in enumerate(shape) if size % count == 0]
    longest = max(range(len(shape)), key=lambda axis: shape[axis], default=None)
    if not fitting and (longest is None or shape[longest] < count):
        return [whole if part == position % count else None for part in range(count)]
    axis = fitting[0] if fitting else longest
    assert axis is not None
    ends = [shape[axis] * part // count for part in range(count + 1)]
    return [(*whole[:axis], slice(start, end), *whole[axis + 1 :]) for start, end in itertools.pairwise(ends)]


def take(tree: Any, part: Sequence[Index | None]) -> list[Any]:
    """The arrays of a part, or their shapes if the tree has shapes."""
    return [_taken(leaf, index) for leaf, index in zip(jax.tree.leaves(tree), part, strict=True) if index is not None]


def _taken(leaf: Any, index: Index) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct([along.stop - along.start for along in index], leaf.dtype)
    return leaf[index]


def put(tree: Any, part: Sequence[Index | None], arrays: Sequence[jax.Array]) -> Any:
    """The tree with other values in a part."""
    leaves, treedef = jax.tree.flatten(tree)
    given = iter(arrays)
    return treedef.unflatten(
        leaf if index is None else leaf.at[index].set(next(given)) for leaf, index in zip(leaves, part, strict=True)
    )
