"""Flat buckets: a pytree of many arrays as a few long vectors, and back.

Every array that is sent costs latency, so exchanges and codecs work on buckets. Which leaves a bucket holds, in which order and
with how much padding depends only on the tree's structure, shapes and dtypes: a `Layout` is static and hashable.
Leaves that are not floating point (counters, keys) are never averaged and stay out of the buckets.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

from decjax.typing import DType, PyTree

Array = jax.Array | jax.ShapeDtypeStruct


def is_floating(x: Array) -> bool:
    """Return whether an array is averaged and stepped: floating-point arrays are; counters, masks and keys are not."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def wide_dtype(x: Array) -> jnp.dtype:
    """Return the type of arithmetic with an array: float32, or that of the array if it is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def in_float32(fn: Callable[..., PyTree], tree: PyTree, *rest: PyTree) -> PyTree:
    """Map `fn` over floating-point leaves, which are passed to `fn` in float32 or wider; other leaves of `tree` are returned unchanged."""
    wide = lambda x: x.astype(wide_dtype(x))
    return jax.tree.map(lambda x, *others: fn(wide(x), *map(wide, others)) if is_floating(x) else x, tree, *rest)


def of_floating(fn: Callable[..., PyTree], tree: PyTree, *rest: PyTree) -> PyTree:
    """Map as `in_float32` does, with results rounded once, to the types of `tree`."""
    return jax.tree.map(lambda new, x: new.astype(x.dtype), in_float32(fn, tree, *rest), tree)


def cast(tree: PyTree, dtype: DType) -> PyTree:
    """Return a tree with its floating-point arrays in another type."""
    return jax.tree.map(lambda x: x.astype(dtype) if is_floating(x) else x, tree)


# Default size of a bucket. Small arrays are joined; joining large ones would cost copies and save hardly any latency.
BUCKET_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Which leaves of a pytree one array holds: the leaves in order, then zeros."""

    dtype: str  # name of the dtype, the same for all its leaves
    leaves: tuple[int, ...]  # positions in the flattened tree
    shape: tuple[int, ...]  # with padding: [P] for a vector, [I, J] for a leaf that stays a matrix
    padding: int  # zeros at the end of a vector, or rows of zeros at the end of a matrix

    @property
    def size(self) -> int:
        """Number of values, padding included."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, padding included."""
        return self.size * jnp.dtype(self.dtype).itemsize


def check(tree: PyTree) -> None:
    """Raise a ValueError for arrays of numbers that cannot be averaged: complex ones, and floats of 8 bits or fewer."""
    for path, x in jax.tree.leaves_with_path(tree):
        dtype = getattr(x, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and (not is_floating(x) or jnp.finfo(dtype).bits < 16):
            fix = (
                "store its real and imaginary parts as two arrays" if jnp.issubdtype(dtype, jnp.complexfloating) else "use bfloat16"
            )
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "the array"
            raise ValueError(f"{name} of type {dtype} cannot be averaged over workers, only real numbers of 16 bits or more; {fix}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a pytree is cut into buckets; made by `layout`."""

    treedef: PyTree  # structure of the tree
    shapes: tuple[tuple[int, ...], ...]  # of all leaves of the tree
    buckets: tuple[Bucket, ...]  # in the order of the packed arrays
    num_shards: int = 0  # N; packed arrays are [N, …], N equal parts of a bucket's values or rows. 0: not divided

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets together."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def parts(self) -> list[jax.ShapeDtypeStruct]:
        """Return shape and dtype, float32 or wider, of each array that a codec encodes: of every bucket, or of one shard of it."""
        N = max(1, self.num_shards)
        return [
            jax.ShapeDtypeStruct((bucket.shape[0] // N, *bucket.shape[1:]), jnp.promote_types(bucket.dtype, jnp.float32))
            for bucket in self.buckets
        ]

    def pack(self, tree: PyTree, *, flat: bool = True, wide: bool = False) -> list[jax.Array]:
        """Return the tree's floating-point leaves as one array per bucket.

        Args:
            tree: pytree of arrays.
            flat: whether every bucket becomes a vector. If False, a leaf that is alone in its bucket keeps its shape, and so stays
                divided within a tensor-parallel group, which would have to gather it to make it a vector.
            wide: whether narrower values are converted to float32.
        """
        leaves = self.treedef.flatten_up_to(tree)
        return [self._packed(bucket, leaves, flat, wide) for bucket in self.buckets]

    def _packed(self, bucket: Bucket, leaves: list[jax.Array], flat: bool, wide: bool) -> jax.Array:
        if not flat and len(bucket.leaves) == 1 and not bucket.padding:
            return leaves[bucket.leaves[0]]
        length, *rest = bucket.shape
        parts = [leaves[i].reshape(-1, *rest) for i in bucket.leaves]
        if bucket.padding:
            parts.append(jnp.zeros((bucket.padding, *rest), bucket.dtype))
        x = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if wide else x
        return x.reshape(self.num_shards, length // self.num_shards, *rest) if self.num_shards else x

    def unpack(self, arrays: Sequence[jax.Array], like: PyTree, *, wide: bool = False) -> PyTree:
        """Return the pytree that `pack` made these arrays of, in the dtypes of its leaves; leaves in no bucket are those of `like`.

        With `wide` values keep the dtype of the arrays.
        """
        leaves = list(self.treedef.flatten_up_to(like))
        for bucket, x in zip(self.buckets, arrays, strict=True):
            x = x if wide else x.astype(bucket.dtype)
            if len(bucket.leaves) == 1 and not bucket.padding:
                leaves[bucket.leaves[0]] = x.reshape(self.shapes[bucket.leaves[0]])
                continue
            vector, start = x.ravel(), 0
            for i in bucket.leaves:
                size = math.prod(self.shapes[i])
                leaves[i] = jax.lax.slice(vector, (start,), (start + size,)).reshape(self.shapes[i])
                start += size
        return self.treedef.unflatten(leaves)


def layout(
    tree: PyTree,
    *,
    bucket_bytes: int,
    multiple_of: int = 1,
    alone: Sequence[str] = (),
    matrix: Callable[[Array], tuple[int, int] | None] | None = None,
    num_shards: int = 0,
) -> Layout:
    """Return the layout of a pytree in buckets of one dtype each, of up to `bucket_bytes`, in leaf order.

    A leaf is never split, so one larger than `bucket_bytes` has a bucket of its own.

    Args:
        tree: pytree of arrays or `ShapeDtypeStruct`s.
        bucket_bytes: target size of a bucket in bytes; 0 puts every leaf in a bucket of its own.
        multiple_of: every bucket is padded to a multiple of this many values.
        alone: leaves whose path ends with one of these get a bucket each, whatever their size.
        matrix: maps a leaf to (I, J) if it stays a matrix I×J in a bucket of its own, otherwise to None. Matrices come first.
        num_shards: N, parts that each bucket is divided into; buckets are padded to a multiple of N values, or rows. 0: none.
    """
    check(tree)
    paths, treedef = jax.tree.flatten_with_path(tree)
    leaves = [leaf for _, leaf in paths]
    multiple_of = num_shards or multiple_of
    own = {i for i, (path, _) in enumerate(paths) if jax.tree_util.keystr(path, simple=True, separator="/").endswith(tuple(alone))}
    floating = [i for i, leaf in enumerate(leaves) if leaf.size and is_floating(leaf)]
    matrices = {i: shape for i in floating if (shape := matrix and matrix(leaves[i]))}
    buckets = [_bucket([i], leaves, multiple_of, shape) for i, shape in matrices.items()]
    # A stable sort by dtype keeps leaf order within each dtype.
    joined = sorted((i for i in floating if i not in matrices), key=lambda i: str(leaves[i].dtype))
    for dtype, group in itertools.groupby(joined, key=lambda i: str(leaves[i].dtype)):
        open_bucket, num_bytes = [], 0
        for i in group:
            leaf_bytes = leaves[i].size * jnp.dtype(dtype).itemsize
            if open_bucket and (num_bytes + leaf_bytes > bucket_bytes or own & {i, open_bucket[-1]}):
                buckets.append(_bucket(open_bucket, leaves, multiple_of))
                open_bucket, num_bytes = [], 0
            open_bucket.append(i)
            num_bytes += leaf_bytes
        buckets.append(_bucket(open_bucket, leaves, multiple_of))
    return Layout(treedef, tuple(leaf.shape for leaf in leaves), tuple(buckets), num_shards)


def _bucket(indices: list[int], leaves: list[Array], multiple_of: int, shape: tuple[int, ...] | None = None) -> Bucket:
    length, *rest = shape or (sum(leaves[i].size for i in indices),)
    padding = -length % multiple_of
    return Bucket(str(leaves[indices[0]].dtype), tuple(indices), (length + padding, *rest), padding)
