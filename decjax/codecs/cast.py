"""Casts to narrower floating-point numbers.

    identity                    x itself
    bfloat16, float16           x rounded to nearest: 16 bits a value
    float8_e4m3, float8_e5m2    x/c rounded to nearest; c scales each block's largest magnitude to the largest number of the format

Messages hold the numbers' bits as unsigned integers: some backends widen short floats in collectives, and would send twice as much.

Reference: Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from decjax import registry
from decjax.codecs.codec import Codec, Traits, by_rows, from_rows, magnitude, rows, scale_bytes


def _rounded_bits(x: jax.Array, dtype: Any) -> jax.Array:
    # Compilers may remove a cast and the cast back; a sender's error memory would then be zero although values were rounded.
    narrow = jax.lax.optimization_barrier(x.astype(dtype))
    return jax.lax.bitcast_convert_type(narrow, f"uint{8 * narrow.dtype.itemsize}")


def _cast(name: str, dtype: Any, traits: Traits) -> Codec:
    return Codec(
        name=name,
        encode=lambda x, state, key: _rounded_bits(x, dtype),
        decode=lambda message, shape, out: jax.lax.bitcast_convert_type(message, dtype).astype(out),
        num_bytes=lambda shape, out: 2 * math.prod(shape),
        traits=traits,
    )


@registry.register("codec", "identity", messages="values as they are")
def identity() -> Codec:
    """Values as they are: no error, and no compression."""
    return Codec(
        name="identity",
        encode=lambda x, state, key: x,
        decode=lambda message, shape, dtype: message.astype(dtype),
        num_bytes=lambda shape, dtype: jnp.dtype(dtype).itemsize * math.prod(shape),
        traits=Traits(linear=True, unbiased=lambda size: 0.0, contractive=lambda shape: 1.0),
    )


@registry.register("codec", "bfloat16", messages="2 bytes a value")
def bfloat16() -> Codec:
    """Values rounded to the nearest bfloat16: a relative error of at most 2⁻⁸, and the range of float32."""
    return _cast("bfloat16", jnp.bfloat16, Traits(contractive=lambda shape: 1 - 2.0**-16))


@registry.register("codec", "float16", messages="2 bytes a value")
def float16() -> Codec:
    """Values rounded to the nearest float16: a relative error of at most 2⁻¹¹ between 6·10⁻⁵ and 65504.

    Smaller magnitudes have an absolute error of at most 3·10⁻⁸, larger ones become infinite; so the codec is not contractive, and
    gradients may need a loss scale.
    """
    return _cast("float16", jnp.float16, Traits())


def _float8(name: str, dtype: Any, block: int) -> Codec:
    if block < 1:
        raise ValueError(f"{name} block={block} must be at least 1 value; 256 is the default")
    info = jnp.finfo(dtype)
    largest, precision = float(info.max), info.nmant + 1

    def encode(x, state, key):
        def coded(x_MxB, start):
            scale_Mx1 = magnitude(x_MxB) / largest
            # Below the smallest normal number there is no inverse: such a block decodes to zeros.
            inverse_Mx1 = jnp.where(scale_Mx1 < jnp.finfo(scale_Mx1.dtype).tiny, 0, 1 / scale_Mx1)
            # e4m3 has no infinity: larger numbers become NaN, and rounding may make a quotient slightly too large.
            return _rounded_bits(jnp.clip(x_MxB * inverse_Mx1, -largest, largest), dtype), scale_Mx1[:, 0]

        values_MxB, scales_M = by_rows(coded, x, block)
        return {"values": values_MxB.ravel()[: x.size], "scales": scales_M}

    def decode(message, shape, out):
        values = jax.lax.bitcast_convert_type(message["values"], dtype).astype(message["scales"].dtype)
        return from_rows(rows(values, block) * message["scales"][:, None], shape, out)

    def num_bytes(shape, out):
        return math.prod(shape) + scale_bytes(shape, out, block)

    def delta(shape):
        # Errors are 2^−p relative to normal numbers, and half the smallest subnormal step for the others.
        count = min(block, max(1, math.prod(shape)))
        return 1 - (4.0**-precision + count * (float(info.smallest_subnormal) / 2 / largest) ** 2)

    return Codec(name=name, encode=encode, decode=decode, num_bytes=num_bytes, traits=Traits(contractive=delta))


@registry.register("codec", "float8_e4m3", messages="8 bits a value, a scale per block")
def float8_e4m3(block: int = 256) -> Codec:
    """8-bit floats with 3 bits mantissa: a relative error of at most 2⁻⁴ down to 3·10⁻⁵ of the block's largest magnitude.

    Args:
        block: values that share a scale, at least 1.
    """
    return _float8("float8_e4m3", jnp.float8_e4m3fn, block)


@registry.register("codec", "float8_e5m2", messages="8 bits a value, a scale per block")
def float8_e5m2(block: int = 256) -> Codec:
    """8-bit floats with 2 bits mantissa: a relative error of at most 2⁻³ down to 10⁻⁹ of the block's largest magnitude.

    Args:
        block: values that share a scale, at least 1.
    """
    return _float8("float8_e5m2", jnp.float8_e5m2, block)
