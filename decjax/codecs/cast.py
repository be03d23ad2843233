"""Casts to narrower floating-point numbers.

Messages hold the numbers' bits as unsigned integers: some backends widen short floats in collectives, and would send twice as much.

Reference: Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from decjax.codecs.codec import Codec, by_rows, from_rows, magnitude, rows, scale_bytes
from decjax.options import Count
from decjax.typing import DType


def _rounded_bits(x: jax.Array, dtype: DType) -> jax.Array:
    # Compilers may remove a cast and the cast back; a sender's error memory would then be zero although values were rounded.
    narrow = jax.lax.optimization_barrier(x.astype(dtype))
    return jax.lax.bitcast_convert_type(narrow, f"uint{8 * narrow.dtype.itemsize}")


class Identity(Codec, name="identity"):
    """Uncompressed values: no error, and no compression."""

    messages = "values as they are"
    linear = True

    def encode(self, x, state, key):
        return x

    def decode(self, message, shape, dtype):
        return message.astype(dtype)

    def num_bytes(self, shape, dtype):
        return jnp.dtype(dtype).itemsize * math.prod(shape)

    def delta(self, shape):
        return 1.0

    def omega(self, size):
        return 0.0


class _Cast(Codec):
    """Base of casts to a type of two bytes."""

    _dtype: ClassVar[DType]

    def encode(self, x, state, key):
        return _rounded_bits(x, self._dtype)

    def decode(self, message, shape, dtype):
        return jax.lax.bitcast_convert_type(message, self._dtype).astype(dtype)

    def num_bytes(self, shape, dtype):
        return 2 * math.prod(shape)


class BFloat16(_Cast, name="bfloat16"):
    """Values rounded to the nearest bfloat16: a relative error of at most 2⁻⁸, and the range of float32."""

    messages = "2 bytes a value"
    _dtype = jnp.bfloat16

    def delta(self, shape):
        return 1 - 2.0**-16


class Float16(_Cast, name="float16"):
    """Values rounded to the nearest float16: a relative error of at most 2⁻¹¹ between 6·10⁻⁵ and 65504.

    Smaller magnitudes have an absolute error of at most 3·10⁻⁸, larger ones become infinite; so the codec is not contractive, and
    gradients may need a loss scale.
    """

    messages = "2 bytes a value"
    _dtype = jnp.float16


class _Float8(Codec):
    """Base of casts of x/c to a type of one byte; c scales each block's largest magnitude to the largest number of the type."""

    _dtype: ClassVar[DType]

    block: Count = 256

    @property
    def _largest(self) -> float:
        return float(jnp.finfo(self._dtype).max)

    def encode(self, x, state, key):
        def coded(x_MxB, start):
            scale_Mx1 = magnitude(x_MxB) / self._largest
            # Below the smallest normal number there is no inverse: such a block decodes to zeros.
            inverse_Mx1 = jnp.where(scale_Mx1 < jnp.finfo(scale_Mx1.dtype).tiny, 0, 1 / scale_Mx1)
            # e4m3 has no infinity: larger numbers become NaN, and rounding may make a quotient slightly too large.
            return _rounded_bits(jnp.clip(x_MxB * inverse_Mx1, -self._largest, self._largest), self._dtype), scale_Mx1[:, 0]

        values_MxB, scales_M = by_rows(coded, x, self.block)
        return {"values": values_MxB.ravel()[: x.size], "scales": scales_M}

    def decode(self, message, shape, dtype):
        values = jax.lax.bitcast_convert_type(message["values"], self._dtype).astype(message["scales"].dtype)
        return from_rows(rows(values, self.block) * message["scales"][:, None], shape, dtype)

    def num_bytes(self, shape, dtype):
        return math.prod(shape) + scale_bytes(shape, dtype, self.block)

    def delta(self, shape):
        # Errors are 2^−p relative to normal numbers, and half the smallest subnormal step for the others.
        info, count = jnp.finfo(self._dtype), min(self.block, max(1, math.prod(shape)))
        return 1 - (4.0 ** -(info.nmant + 1) + count * (float(info.smallest_subnormal) / 2 / self._largest) ** 2)


class Float8E4M3(_Float8, name="float8_e4m3"):
    """8-bit floats with 3 bits mantissa: a relative error of at most 2⁻⁴ down to 3·10⁻⁵ of the block's largest magnitude.

    Attributes:
        block: values that share a scale.
    """

    messages = "8 bits a value, a scale per block"
    _dtype = jnp.float8_e4m3fn


class Float8E5M2(_Float8, name="float8_e5m2"):
    """8-bit floats with 2 bits mantissa: a relative error of at most 2⁻³ down to 10⁻⁹ of the block's largest magnitude.

    Attributes:
        block: values that share a scale.
    """

    messages = "8 bits a value, a scale per block"
    _dtype = jnp.float8_e5m2
