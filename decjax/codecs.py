"""Point-to-point messages: what an array looks like on the wire.

A `Codec` turns a flat vector into a message, a pytree of arrays of real size, and back:

    bfloat16    x rounded: 16 bits a value
    int8        round(127 x / s) with s = max |x| over a block of 256 values: 8 bits a value, and 1/8 for the scales
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Codec(NamedTuple):
    """A message format.

    Attributes:
        encode: `encode(x_P) -> message`, a pytree of arrays.
        decode: `decode(message, size, dtype) -> x_P`.
        num_bytes: `num_bytes(size, dtype) -> int`, of the message of `size` values.
    """

    encode: Callable[[jax.Array], Any]
    decode: Callable[[Any, int, Any], jax.Array]
    num_bytes: Callable[[int, Any], int]


def bfloat16() -> Codec:
    """Values rounded to the nearest bfloat16, a relative error of at most 2⁻⁸."""
    return Codec(lambda x_P: x_P.astype(jnp.bfloat16), lambda message, size, dtype: message.astype(dtype),
                 lambda size, dtype: 2 * size)


def int8(block: int = 256) -> Codec:
    """Whole numbers −127 … 127 times a scale per block: an error of at most s/254, s the block's largest magnitude.

    Args:
        block: values that share a float32 scale.
    """
    def encode(x_P):
        padded = jnp.pad(x_P.astype(jnp.float32), (0, -x_P.size % block)).reshape(-1, block)
        scale_Mx1 = jnp.abs(padded).max(axis=1, keepdims=True) / 127
        # A block of zeros has scale 0, and zeros are what it decodes to.
        steps = jnp.round(padded / jnp.where(scale_Mx1 > 0, scale_Mx1, 1)).astype(jnp.int8)
        return {"values": steps.ravel()[:x_P.size], "scales": scale_Mx1[:, 0]}

    def decode(message, size, dtype):
        padded = jnp.pad(message["values"], (0, -size % block)).reshape(-1, block)
        return (padded * message["scales"][:, None]).ravel()[:size].astype(dtype)

    return Codec(encode, decode, lambda size, dtype: size + 4 * math.ceil(size / block))


CODECS = {"bfloat16": bfloat16, "int8": int8}


def names() -> tuple[str, ...]:
    """All names that `make` takes."""
    return tuple(CODECS)


def make(name: str, **options: Any) -> Codec:
    """The codec of that name.

    Raises:
        ValueError: naming the codecs there are.
    """
    if name not in CODECS:
        raise ValueError(f"codec {name!r} is unknown; use one of {', '.join(CODECS)}")
    return CODECS[name](**options)
