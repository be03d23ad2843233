"""Which arrays of a model are matrices, or stacks of them, for updates that treat a matrix as one."""

import math

import jax

from decjax.typing import PyTree

REST = "embedding|head|scale|bias"
"""Names in paths of arrays that are updated entry by entry though they may have two dimensions."""


def matrix_axes(path: tuple, x: jax.Array | jax.ShapeDtypeStruct, rest: str = REST) -> tuple[int, ...] | None:
    """Return the axes that are a matrix's rows, of an array whose last axis is the columns; None if it is no matrix.

    Axes before these count matrices: arrays of three dimensions are stacks, as the scanned layers of a transformer. Those of more are
    convolutions, whose last axis is the outputs and whose others are the rows.

    Args:
        path: of the array, as of `jax.tree.map_with_path`.
        x: the array or its shape.
        rest: names, between bars; an array with one of them in its path is no matrix.
    """
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if x.ndim < 2 or set(rest.split("|")).intersection(names):
        return None
    return (x.ndim - 2,) if x.ndim < 4 else tuple(range(x.ndim - 1))


def stacks(tree: PyTree, rest: str = REST) -> dict[int, tuple[int, int, int]]:
    """Return (number of matrices, I, J) of each leaf that is a matrix or a stack of matrices I×J, by its position."""
    shapes = {}
    for position, (path, x) in enumerate(jax.tree.leaves_with_path(tree)):
        if x.size and jax.numpy.issubdtype(x.dtype, jax.numpy.floating) and (axes := matrix_axes(path, x, rest)):
            rows = math.prod(x.shape[axis] for axis in axes)
            shapes[position] = x.size // (rows * x.shape[-1]), rows, x.shape[-1]
    return shapes
