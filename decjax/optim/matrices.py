"""Which arrays of a model are matrices, or stacks of them, for updates that treat a matrix as one."""

import jax

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
