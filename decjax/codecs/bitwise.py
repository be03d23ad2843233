"""Codecs on the bits of a float32: its sign alone, or its sign and exponent."""

import math

import jax
import jax.numpy as jnp

from decjax import noise
from decjax.codecs import bits
from decjax.codecs.codec import Codec, by_rows, from_rows, rows, scale_bytes
from decjax.options import Count
from decjax.typing import DType


def _sign_bits(x: jax.Array) -> jax.Array:
    return bits.pack((x.ravel() >= 0).astype(jnp.uint8), 1)


def _signs(packed: jax.Array, size: int, dtype: DType) -> jax.Array:
    return 2 * bits.unpack(packed, 1, size).astype(dtype) - 1


class Sign(Codec, name="sign"):
    """The sign of each value, ±1, in one bit; 0 counts as positive.

    For majority votes and sign descent, where the optimizer alone sets the size of a step: x̂ does not approximate x, so the codec is
    not contractive. NaN and infinity are decoded to ±1 as well.

    Reference: Bernstein et al. 2018, "signSGD".
    """

    messages = "1 bit a value"

    def encode(self, x, state, key):
        return _sign_bits(x)

    def decode(self, message, shape, dtype):
        return _signs(message, math.prod(shape), dtype).reshape(shape)

    def num_bytes(self, shape, dtype):
        return bits.packed_bytes(math.prod(shape), 1)


class ScaledSign(Codec, name="scaled_sign"):
    """The sign of each value times the mean magnitude of its block of n values: x̂ = (‖x‖₁/n) sgn(x).

    ‖x − x̂‖² = (1 − δ)‖x‖² with δ = ‖x‖₁²/(n‖x‖₂²), which is at least 1/n, and about 2/π for normal values.

    Attributes:
        block: n, values that share a scale.

    Reference: Karimireddy et al. 2019, "Error feedback fixes signSGD", Lemma 8, where a whole tensor is one block.
    """

    messages = "1 bit a value, a scale per block"

    block: Count = 1024

    def encode(self, x, state, key):
        def means(x_MxB, start):  # Values are divided before they are added, since a sum of large ones may overflow.
            return (jnp.abs(x_MxB) * (1 / min(self.block, max(1, x.size - start)))).sum(axis=1)

        return {"signs": _sign_bits(x), "scales": by_rows(means, x, self.block)}

    def decode(self, message, shape, dtype):
        scales_M = message["scales"]
        signs_MxB = rows(_signs(message["signs"], math.prod(shape), scales_M.dtype), self.block)
        return from_rows(signs_MxB * scales_M[:, None], shape, dtype)

    def num_bytes(self, shape, dtype):
        return bits.packed_bytes(math.prod(shape), 1) + scale_bytes(shape, dtype, self.block)

    def delta(self, shape):
        return 1 / min(self.block, max(1, math.prod(shape)))


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
