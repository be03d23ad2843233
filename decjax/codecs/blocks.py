"""Block quantization: whole numbers and one scale per block of values."""

import math

import jax.numpy as jnp

from decjax.codecs.codec import Codec, Traits


def int8(block: int = 256) -> Codec:
    """Whole numbers −127 … 127 times a scale per block: an error of at most s/254, s the block's largest magnitude.

    Args:
        block: values that share a float32 scale.
    """
    def encode(x, state, key):
        del state, key
        padded = jnp.pad(x.ravel().astype(jnp.float32), (0, -x.size % block)).reshape(-1, block)
        scale_Mx1 = jnp.abs(padded).max(axis=1, keepdims=True) / 127
        # A block of zeros has scale 0, and zeros are what it decodes to.
        steps = jnp.round(padded / jnp.where(scale_Mx1 > 0, scale_Mx1, 1)).astype(jnp.int8)
        return {"values": steps.ravel()[:x.size], "scales": scale_Mx1[:, 0]}

    def decode(message, shape, dtype):
        size = math.prod(shape)
        padded = jnp.pad(message["values"], (0, -size % block)).reshape(-1, block)
        return (padded * message["scales"][:, None]).ravel()[:size].reshape(shape).astype(dtype)

    return Codec(
        name="int8", encode=encode, decode=decode,
        num_bytes=lambda shape, dtype: math.prod(shape) + 4 * math.ceil(math.prod(shape) / block),
        traits=Traits(contractive=lambda shape: 1 - min(block, max(1, math.prod(shape))) / 254**2))
