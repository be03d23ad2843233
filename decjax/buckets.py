"""Flat buckets: a pytree of many arrays as a few long vectors, and back.

A message costs latency per array, so exchanges and codecs work on buckets. Which leaves a bucket holds, in which order and
with how much padding depends only on the tree's structure, shapes and dtypes: a `Layout` is static and hashable.
Leaves that are not floating point (counters, keys) are never averaged and stay out of the buckets.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

# Small arrays travel together, large ones alone: joining large ones would cost copies and save no latency.
BUCKET_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One flat vector: leaves in order, then `padding` zeros.

    Attributes:
        dtype: dtype name of all its leaves.
        leaves: positions in the flattened tree.
        padding: zeros at the end.
        size: values, padding included.
    """

    dtype: str
    leaves: tuple[int, ...]
    padding: int
    size: int

    @property
    def num_bytes(self) -> int:
        return self.size * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a pytree is cut into buckets."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def pack(self, tree: Any, *, flat: bool = True) -> list[jax.Array]:
        """The tree's floating-point leaves as flat vectors, one per bucket.

        Unless `flat`, the leaf of a bucket that holds but one keeps its shape, and so the way it is divided within a
        tensor-parallel group, which would have to gather it first.
        """
        leaves = self.treedef.flatten_up_to(tree)
        vectors = []
        for bucket in self.buckets:
            if not flat and len(bucket.leaves) == 1 and not bucket.padding:
                vectors.append(leaves[bucket.leaves[0]])
                continue
            parts = [jnp.ravel(leaves[i]) for i in bucket.leaves]
            if bucket.padding:
                parts.append(jnp.zeros(bucket.padding, bucket.dtype))
            vectors.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts))
        return vectors

    def unpack(self, vectors: list[jax.Array], like: Any) -> Any:
        """The inverse of `pack`; leaves that are in no bucket come from `like`."""
        leaves = list(self.treedef.flatten_up_to(like))
        for bucket, vector in zip(self.buckets, vectors, strict=True):
            if vector.ndim != 1:
                leaves[bucket.leaves[0]] = vector
                continue
            start = 0
            for i in bucket.leaves:
                size = math.prod(self.shapes[i])
                leaves[i] = jax.lax.slice(vector, (start,), (start + size,)).reshape(self.shapes[i])
                start += size
        return self.treedef.unflatten(leaves)


def layout(tree: Any, *, bucket_bytes: int, multiple_of: int = 1, alone: Sequence[str] = ()) -> Layout:
    """Cuts a pytree into buckets of one dtype each, of about `bucket_bytes`, in leaf order.

    A leaf is never split: a bucket is closed when the next leaf would make it longer than `bucket_bytes`.

    Args:
        tree: pytree of arrays or `ShapeDtypeStruct`s.
        bucket_bytes: target size of a bucket in bytes; 0 puts every leaf in a bucket of its own.
        multiple_of: every bucket is padded to a multiple of this many values.
        alone: ends of the paths of leaves that get a bucket each, whatever their size.

    Returns:
        The `Layout`.
    """
    paths, treedef = jax.tree.flatten_with_path(tree)
    leaves = [leaf for _, leaf in paths]
    own = {i for i, (path, _) in enumerate(paths) if jax.tree_util.keystr(path, simple=True, separator="/").endswith(tuple(alone))}
    floating = [i for i, leaf in enumerate(leaves) if leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating)]
    buckets = []
    # A stable sort by dtype keeps leaf order within each dtype.
    for dtype, group in itertools.groupby(sorted(floating, key=lambda i: str(leaves[i].dtype)), key=lambda i: str(leaves[i].dtype)):
        open_bucket, num_bytes = [], 0
        for i in group:
            leaf_bytes = leaves[i].size * jnp.dtype(dtype).itemsize
            if open_bucket and (num_bytes + leaf_bytes > bucket_bytes or own & {i, open_bucket[-1]}):
                buckets.append(_close(open_bucket, dtype, leaves, multiple_of))
                open_bucket, num_bytes = [], 0
            open_bucket.append(i)
            num_bytes += leaf_bytes
        buckets.append(_close(open_bucket, dtype, leaves, multiple_of))
    return Layout(treedef, tuple(leaf.shape for leaf in leaves), tuple(buckets))


def _close(indices, dtype, leaves, multiple_of) -> Bucket:
    size = sum(leaves[i].size for i in indices)
    padding = -size % multiple_of
    return Bucket(dtype, tuple(indices), padding, size + padding)
