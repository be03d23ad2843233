"""Casts: narrower floating-point numbers."""

import math

import jax.numpy as jnp

from decjax.codecs.codec import Codec, Traits


def bfloat16() -> Codec:
    """Values rounded to the nearest bfloat16, a relative error of at most 2⁻⁸."""
    return Codec(
        name="bfloat16",
        encode=lambda x, state, key: x.astype(jnp.bfloat16),
        decode=lambda message, shape, dtype: message.astype(dtype),
        num_bytes=lambda shape, dtype: 2 * math.prod(shape),
        traits=Traits(contractive=lambda shape: 1 - 2.0**-16))
