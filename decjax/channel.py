"""How arrays travel between workers: along which axis, in which buckets, encoded by which codec.

A Channel is configuration only; `mesh.Axis` performs the sends along the topology's edges.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, Literal

import jax

from decjax import buckets, codecs, mesh, options
from decjax.options import Natural
from decjax.typing import PyTree


def check_num_workers(of_topology: int | None, size: int | None) -> None:
    """Raise a ValueError if a topology is for another number of workers than there are; None: unknown."""
    if None not in (of_topology, size) and of_topology != size:
        raise ValueError(
            f"the mixer's topology is for {of_topology} workers, but there are {size}; use topology.make(name, {size})"
        )


@options.checked_class
@dataclasses.dataclass(frozen=True)
class Channel:
    """How a pytree travels between workers; configuration only.

    Attributes:
        axis: the worker axis, as `Workers.axis`; by default the one over which the function that communicates is mapped.
        bucket_bytes: arrays are joined to buckets of up to this many bytes, each of which is one message; 0: each array is sent
            separately.
        seed: PRNG seed, such as for stochastic rounding.
        alone: arrays whose path ends with one of these have a bucket each. Copies of an array in different trees, as a
            tied embedding in the first and in the last pipeline stage, are then encoded alike.
        dtype: floating-point type in which mixer `exact` and reducer `mean` send values; None: that of the arrays. Mixing then adds
            Σ_j w_ij (C(x_j) − C(x_i)) to x_i, with C the cast, so that the mean over workers is kept.
    """

    axis: mesh.Axis = mesh.MAPPED
    bucket_bytes: Natural = buckets.BUCKET_BYTES
    seed: int = 0
    alone: tuple[str, ...] = ()
    dtype: Literal["bfloat16", "float16"] | None = None

    def check(self, tree: PyTree, num_workers: int | None = None) -> None:
        """Raise a ValueError if arrays of the tree cannot be averaged, or the axis has another number of workers than a topology."""
        buckets.check(tree)
        check_num_workers(num_workers, self.axis.known_size)

    def sent_by(self, stages: Sequence[int]) -> "Channel":
        """Return this channel with only these pipeline stages sending; see `mesh.Axis.sent_by`."""
        return dataclasses.replace(self, axis=self.axis.sent_by(stages))

    def layout(self, tree: PyTree, **how: Any) -> buckets.Layout:
        """Return the buckets in which a tree travels; `how` are further arguments of `buckets.layout`."""
        how.setdefault("bucket_bytes", self.bucket_bytes)
        return buckets.layout(tree, **how)

    def cast(self, tree: PyTree) -> PyTree:
        """Return a tree as it travels uncompressed: its floating-point arrays in `dtype`."""
        return buckets.cast(tree, self.dtype) if self.dtype else tree

    def key(self, count: jax.Array, group_size: int = 1) -> jax.Array:
        """Return this worker's random key in step `count`, a function of (seed, worker, count); each `group_size` workers share one.

        Where devices divide a worker's arrays, the key of a shard also depends on its place.
        """
        worker = jax.random.fold_in(jax.random.key(self.seed), self.axis.index // group_size)
        return mesh.own_shard_key(jax.random.fold_in(worker, count))

    def coded(self, codec: codecs.Codec, group_size: int = 1, multiple_of: int = 1) -> "Coded":
        """Return this channel with a codec that encodes its messages; for the arguments see `Coded`."""
        return Coded(self, codec, group_size, multiple_of)


@dataclasses.dataclass(frozen=True)
class Coded:
    """A channel with the codec that encodes its messages.

    All members of a node draw the same random numbers, so that simulated workers, each of which holds the whole bucket, stay equal.
    """

    channel: Channel
    codec: codecs.Codec
    group_size: int = 1  # L, members of a node; each sends 1/L of a bucket
    multiple_of: int = 1  # buckets are padded to a multiple of this many values

    def layout(self, tree: PyTree) -> buckets.Layout:
        """Return the buckets of a pytree; with a codec of matrices, each array has a bucket of its own.

        Raises:
            ValueError: if the encoded messages are not smaller than the arrays.
        """
        each = {"bucket_bytes": 0} if self.codec.matrix else {}
        layout = self.channel.layout(tree, multiple_of=self.multiple_of, alone=self.channel.alone, **each)
        coded, plain = self.num_bytes(layout), layout.num_bytes / self.group_size
        if layout.buckets and coded >= plain and self.codec.name != "identity":
            raise ValueError(
                f"codec {self.codec.name!r} makes messages of {coded} bytes from {plain:.0f} bytes of parameters; "
                "use fewer bits or values, another codec such as 'int8', or none"
            )
        return layout

    def codecs(self, layout: buckets.Layout) -> list[codecs.Codec]:
        """Return the codec of each bucket. Buckets are vectors; a codec of matrices is wrapped to encode the array in the bucket."""
        if not self.codec.matrix:
            return [self.codec] * len(layout.buckets)

        def of_array(bucket):
            shape = codecs.seen_shape(self.codec, layout.shapes[bucket.leaves[0]], codecs.working_dtype(bucket.dtype))
            return codecs.Reshaped(self.codec, lambda *_: shape)

        return [of_array(bucket) for bucket in layout.buckets]

    def num_bytes(self, layout: buckets.Layout) -> int:
        """Return the bytes of one worker's messages, all buckets together."""
        return sum(
            codec.num_bytes((bucket.size // self.group_size,), codecs.working_dtype(bucket.dtype))
            for codec, bucket in zip(self.codecs(layout), layout.buckets)
        )

    def init(self, layout: buckets.Layout, shares: Sequence[jax.Array]) -> tuple:
        """Return the initial codec state of each bucket, for this worker's shares of them."""
        return tuple(codec.init(x.shape, x.dtype) for codec, x in zip(self.codecs(layout), shares, strict=True))

    def key(self, count: jax.Array, position: int) -> jax.Array | None:
        """Return the random key that encodes the message at a position in step `count`; None for a codec without random numbers."""
        return jax.random.fold_in(self.channel.key(count, self.group_size), position) if self.codec.random else None
