"""What travels of a pytree when messages are encoded: the codec, the buckets that it is shown, its noise, and the bytes."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import numpy as np

from decjax import buckets, codecs
from decjax.channel import Channel
from decjax.gossip.rounds import is_mean, layout_of, sent_bytes
from decjax.topology import Topology


@dataclasses.dataclass(frozen=True)
class Messages:
    """How a pytree travels, coded."""

    topology: Topology
    codec: codecs.Codec
    channel: Channel

    @property
    def group_size(self) -> int:
        """L of the rounds that send messages."""
        return max((round_.group_size for round_ in self.topology.rounds if not is_mean(round_)), default=1)

    def layout(self, params: Any) -> buckets.Layout:
        """The buckets of a pytree.

        Raises:
            ValueError: if the codec does not make it smaller.
        """
        layout = layout_of(params, self.topology, 0 if self.codec.traits.matrix else self.channel.bucket_bytes, self.channel.alone)
        encoded, plain = self._message_bytes(layout), layout.num_bytes / self.group_size
        if layout.buckets and encoded >= plain and self.codec.name != "identity":
            raise ValueError(
                f"codec {self.codec.name!r} makes messages of {encoded} bytes of parameters that have {plain:.0f}; "
                "use fewer bits or values, another codec such as 'int8', or none"
            )
        return layout

    def _message_bytes(self, layout: buckets.Layout) -> int:
        sizes = [bucket.size // self.group_size for bucket in layout.buckets]
        return sum(
            self.codec.num_bytes(self.shape(layout, b, size), codecs.working_dtype(layout.buckets[b].dtype))
            for b, size in enumerate(sizes)
        )

    def shape(self, layout: buckets.Layout, bucket: int, size: int) -> tuple[int, ...]:
        """What the codec is shown of a bucket: values in a row, or an array as it is if the codec makes that smaller."""
        if not self.codec.traits.matrix:
            return (size,)
        found = layout.buckets[bucket]  # Of one array.
        return codecs.seen_shape(self.codec, layout.shapes[found.leaves[0]], codecs.working_dtype(found.dtype))

    def init(self, layout: buckets.Layout, shares: list[jax.Array]) -> tuple:
        return tuple(self.codec.init(self.shape(layout, b, x.size), x.dtype) for b, x in enumerate(shares))

    def encode(self, x_P: jax.Array, shape: tuple[int, ...], state: Any, count: jax.Array, position: int) -> Any:
        key = None
        if self.codec.traits.random:
            # Members of a node draw alike: simulated ones all hold the whole mean, and have to stay equal.
            node = self.channel.axis.index // self.group_size
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.channel.seed), node), count)
            key = jax.random.fold_in(key, position)
        return self.codec.encode(x_P.reshape(shape), state, key)

    def decode(self, shape: tuple[int, ...], dtype) -> Callable[[Any], jax.Array]:
        return lambda message: self.codec.decode(message, shape, dtype).ravel()

    def num_bytes(self, params: Any, indices: list[int]) -> np.ndarray:
        """Bytes that each worker sends in the given rounds, [N]."""
        layout = self.layout(params)
        message_bytes = self._message_bytes(layout)
        return sum(sent_bytes(self.topology.rounds[index], layout, message_bytes) for index in indices)
