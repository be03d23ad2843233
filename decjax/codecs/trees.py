"""A codec on a whole pytree: many small arrays become few messages.

Floating-point leaves are encoded in parts. A codec that sees values in a row gets the large leaves one by one, and the small ones
joined to one vector per dtype; a matrix codec gets every leaf that it makes smaller, and the joined rest. The parts' messages are
joined once more, so that a tree's message is one vector per type of number: codes, indices, scales.
"""

from collections.abc import Callable
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decjax.codecs.codec import Codec, seen_shape

JOIN_BYTES = 2**18  # Joining larger leaves would cost copies and save no latency.


class TreeCodec(NamedTuple):
    """A codec for pytrees of one structure; its functions are those of `Codec` without the shapes.

    Attributes:
        init: `init() -> state`.
        encode: `encode(tree, state, key) -> message`, a dict from dtype names to vectors.
        decode: `decode(message, like) -> tree`; leaves that are not floating point come from `like`.
        advance: `advance(state, message) -> state`.
        num_bytes: of a message.
    """

    init: Callable[[], Any]
    encode: Callable[[Any, Any, jax.Array | None], dict[str, jax.Array]]
    decode: Callable[[dict[str, jax.Array], Any], Any]
    advance: Callable[[Any, dict[str, jax.Array]], Any]
    num_bytes: int


class _Part(NamedTuple):
    leaves: tuple[int, ...]  # positions in the flattened tree
    shape: tuple[int, ...]
    dtype: Any


def _suits(codec: Codec, leaf: Any, join_bytes: int) -> bool:
    """Whether a leaf is a part of its own."""
    if codec.traits.matrix:
        return len(seen_shape(codec, leaf.shape, leaf.dtype)) > 1
    return leaf.size * jnp.dtype(leaf.dtype).itemsize > join_bytes


def on_tree(codec: Codec, like: Any, join_bytes: int = JOIN_BYTES) -> TreeCodec:
    """The codec on pytrees such as `like`.

    Args:
        codec: for each part.
        like: pytree of arrays or `ShapeDtypeStruct`s.
        join_bytes: leaves of at most this size are joined, where the codec sees values in a row.
    """
    leaves, treedef = jax.tree.flatten(like)
    floating = [i for i, leaf in enumerate(leaves) if leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating)]
    alone = [i for i in floating if _suits(codec, leaves[i], join_bytes)]
    parts = [_Part((i,), tuple(leaves[i].shape), leaves[i].dtype) for i in alone]
    by_dtype = sorted(set(floating) - set(alone), key=lambda i: (str(leaves[i].dtype), i))
    for _, group in itertools.groupby(by_dtype, key=lambda i: str(leaves[i].dtype)):
        group = tuple(group)
        parts.append(_Part(group, (sum(leaves[i].size for i in group),), leaves[group[0]].dtype))

    def init():
        return tuple(codec.init(part.shape, part.dtype) for part in parts)

    def messages(tree, state, key):
        values = treedef.flatten_up_to(tree)
        encoded = []
        for number, (part, part_state) in enumerate(zip(parts, state, strict=True)):
            x = jnp.concatenate([values[i].ravel() for i in part.leaves]) if len(part.leaves) > 1 else values[part.leaves[0]]
            part_key = jax.random.fold_in(key, number) if codec.traits.random else None
            encoded.append(codec.encode(x.reshape(part.shape), part_state, part_key))
        return encoded

    def encode(tree, state, key):
        joined = {}
        for x in jax.tree.leaves(messages(tree, state, key)):
            joined.setdefault(str(x.dtype), []).append(x.ravel())
        return {dtype: vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors) for dtype, vectors in joined.items()}

    shapes = jax.eval_shape(messages, like, jax.eval_shape(init), jax.eval_shape(lambda: jax.random.key(0)))

    def split(joined):
        """The parts' messages."""
        starts, arrays = dict.fromkeys(joined, 0), []
        flat, message_def = jax.tree.flatten(shapes)
        for x in flat:
            dtype = str(x.dtype)
            arrays.append(jax.lax.slice(joined[dtype], (starts[dtype],), (starts[dtype] + x.size,)).reshape(x.shape))
            starts[dtype] += x.size
        return message_def.unflatten(arrays)

    def decode(message, like):
        values = treedef.flatten_up_to(like)
        for part, part_message in zip(parts, split(message), strict=True):
            x = codec.decode(part_message, part.shape, part.dtype).ravel()
            start = 0
            for i in part.leaves:
                size = math.prod(leaves[i].shape)
                values[i] = jax.lax.slice(x, (start,), (start + size,)).reshape(leaves[i].shape)
                start += size
        return treedef.unflatten(values)

    def advance(state, message):
        return tuple(codec.advance(*each) for each in zip(state, split(message), strict=True))

    return TreeCodec(init, encode, decode, advance, sum(codec.num_bytes(part.shape, part.dtype) for part in parts))
