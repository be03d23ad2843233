"""Codecs of single values: casts to narrower floats, the sign, the sign and exponent.

Messages hold the numbers' bits as unsigned integers: some backends widen short floats in collectives, and would send twice as much.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from decjax import noise
from decjax.codecs import bits
from decjax.codecs.codec import Codec
from decjax.typing import DType


def rounded_bits(x: jax.Array, dtype: DType) -> jax.Array:
    """Return the bits of values rounded to a floating-point type."""
    # Compilers may remove a cast and the cast back; a sender's error memory would then be zero although values were rounded.
    narrow = jax.lax.optimization_barrier(x.astype(dtype))
    return jax.lax.bitcast_convert_type(narrow, f"uint{8 * narrow.dtype.itemsize}")


class Identity(Codec, name="identity"):
    """Uncompressed values: no error, and no compression."""

    messages = "uncompressed values"
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
        return rounded_bits(x, self._dtype)

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


def sign_bits(x: jax.Array) -> jax.Array:
    """Return the signs of values, packed: 1 for values of at least 0."""
    return bits.pack((x.ravel() >= 0).astype(jnp.uint8), 1)


def signs(packed: jax.Array, size: int, dtype: DType) -> jax.Array:
    """Return ±1 for each of the bits that `sign_bits` has packed."""
    return 2 * bits.unpack(packed, 1, size).astype(dtype) - 1


class Sign(Codec, name="sign"):
    """The sign of each value, ±1, in one bit; 0 counts as positive.

    For majority votes and sign descent, where the optimizer alone sets the size of a step: x̂ does not approximate x, so the codec is
    not contractive. NaN and infinity are decoded to ±1 as well.

    Reference: Bernstein et al. 2018, "signSGD".
    """

    messages = "1 bit a value"

    def encode(self, x, state, key):
        return sign_bits(x)

    def decode(self, message, shape, dtype):
        return signs(message, math.prod(shape), dtype).reshape(shape)

    def num_bytes(self, shape, dtype):
        return bits.packed_bytes(math.prod(shape), 1)


class Natural(Codec, name="natural"):
    """Each value rounded at random, without bias, to one of the two nearest powers of two: sign and exponent, 9 bits.

    A float32 of magnitude 2^e (1 + m) is rounded up with probability m. In its bits that is one addition: a random number added to
    the mantissa carries into the exponent with that probability. Unbiased with ω = 1/8. Values are taken as float32; those above 2¹²⁷
    are rounded down, since the next power is infinite.

    Reference: Horváth et al. 2019, "Natural compression for distributed deep learning", Theorem 1.
    """

    messages = "9 bits a value"
    random = True

    def encode(self, x, state, key):
        pattern_P = jax.lax.bitcast_convert_type(x.ravel().astype(jnp.float32), jnp.uint32)
        mantissa = jnp.uint32(2**23 - 1)
        exponent_P = pattern_P >> 23 & 0xFF
        # The exponents 254 and 255 are left alone: the last numbers, infinity and NaN, whose mantissa must stay non-zero.
        drawn_P = jnp.where(exponent_P < 254, noise.bits(pattern_P.shape, noise.words(key)) & mantissa, 0)
        code_P = pattern_P + drawn_P >> 23
        return {"exponents": code_P.astype(jnp.uint8), "signs": bits.pack((code_P >> 8).astype(jnp.uint8), 1)}

    def decode(self, message, shape, dtype):
        sign_P = bits.unpack(message["signs"], 1, math.prod(shape)).astype(jnp.uint32) << 31
        pattern_P = sign_P | message["exponents"].astype(jnp.uint32) << 23
        return jax.lax.bitcast_convert_type(pattern_P, jnp.float32).reshape(shape).astype(dtype)

    def num_bytes(self, shape, dtype):
        return math.prod(shape) + bits.packed_bytes(math.prod(shape), 1)

    def omega(self, size):
        return 1 / 8
