"""Codecs with a scale for each block of values: whole numbers of a few bits, short floats, signs."""

import functools
import math
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp

from decjax import noise
from decjax.codecs import bits, scalar
from decjax.codecs.codec import Codec, by_rows, from_rows, magnitude, rows, working_dtype
from decjax.options import LARGEST, Count, Range
from decjax.typing import DType

Block = Annotated[int, Range(8, LARGEST, multiple=8)]  # blocks end where bytes do


class Scaled(Codec):
    """Base of codecs with a scale for each block of values: a float32, or for float64 values a float64.

    Attributes:
        block: n, values that share a scale.
    """

    _width: ClassVar[int]  # bits of a value

    block: Count = 256

    def num_bytes(self, shape, dtype):
        size, scale = math.prod(shape), jnp.dtype(working_dtype(dtype))
        return bits.packed_bytes(size, self._width) + math.ceil(size / self.block) * scale.itemsize

    def _length(self, size: int) -> int:
        """Return the number of values in a block of an array of `size` values."""
        return min(self.block, max(1, size))


class Quantized(Scaled):
    """Base of block quantizers.

        x̂ = (c/L) ⌊L x/c + u⌋,   c = max |x| or ‖x‖₂ over a block

    with u = ½ (nearest) or u uniform in [0, 1) (stochastic, unbiased), and L = 2^(b−1) − 1 unless a subclass defines it.

    Nearest rounding changes a value by at most its own magnitude and by at most c/2L, and the largest not at all. With n values in a
    block and c = max |x| the worst block has n − 1 values c/2L, so that

        ‖x − x̂‖² ≤ (1 − δ)‖x‖²,   δ = 1 / (1 + (n−1)/4L²).

    Stochastic rounding of a value v in the lowest cell has variance v(c/L − v), and at most (c/2L)² in any other; the worst block
    gives

        E‖x − x̂‖² ≤ ω‖x‖²,   ω = (√(1 + (n−1)/L²) − 1)/2.

    A block whose largest magnitude is below L times the smallest normal number is decoded to zeros.
    """

    _levels: ClassVar[int]  # L
    _euclidean: ClassVar[bool] = False  # whether c is ‖x‖₂

    block: Block = 256

    def encode(self, x, state, key):
        seed = noise.words(key) if self.random else None
        codes_MxB, scales_M = by_rows(functools.partial(self._coded, seed), x, self.block)
        return {"codes": bits.pack(codes_MxB.ravel(), self._width)[: bits.packed_bytes(x.size, self._width)], "scales": scales_M}

    def _coded(self, seed, x_MxB, start) -> tuple[jax.Array, jax.Array]:
        """Return codes and scales of some blocks; `start` is the index of their first value, and `seed` that of random rounding."""
        scale_Mx1 = magnitude(x_MxB)
        tiny = self._levels * jnp.finfo(x_MxB.dtype).tiny
        if self._euclidean:  # Of x/max, whose squares neither overflow nor vanish.
            unit_MxB = x_MxB * jnp.where(scale_Mx1 < tiny, 0, 1 / scale_Mx1)
            scale_Mx1 = scale_Mx1 * jnp.sqrt(jnp.square(unit_MxB).sum(axis=1, keepdims=True))
        shift = noise.uniform(x_MxB.shape, seed, start) if seed is not None else 0.5
        # Shifted to positive numbers, where the cast to integers rounds down; sums of floats may reach the next number.
        steps_MxB = x_MxB * jnp.where(scale_Mx1 < tiny, 0, self._levels / scale_Mx1) + (shift + self._levels)
        return jnp.minimum(steps_MxB.astype(jnp.int32), 2 * self._levels).astype(jnp.uint8), scale_Mx1[:, 0] / self._levels

    def decode(self, message, shape, dtype):
        codes = bits.unpack(message["codes"], self._width, math.prod(shape))
        steps_MxB = rows(codes.astype(message["scales"].dtype), self.block) - self._levels
        return from_rows(steps_MxB * message["scales"][:, None], shape, dtype)

    def omega(self, size):
        n = self._length(size)
        return (math.sqrt(1 + (n - 1) / self._levels**2) - 1) / 2 if self.random else None

    def delta(self, shape):
        n = self._length(math.prod(shape))
        return None if self.random else 1 / (1 + (n - 1) / (2 * self._levels) ** 2)


class _Rounded(Quantized):
    """Base of integers of b bits.

    Attributes:
        rounding: "nearest", or "stochastic": unbiased, with up to twice the error.
    """

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self):
        self._derive(random=self.rounding == "stochastic")


class Integers(_Rounded, name="integers"):
    """Each value rounded to one of 2^b − 1 multiples of its block's scale, in b bits; the error is at most c/(2^b − 2).

    c is the block's largest magnitude, here and for `int8`, `int4` and `int2`.

    Attributes:
        bits: b.
    """

    messages = "2 to 8 bits a value, a scale per block"

    bits: Annotated[int, Range(2, 8)] = 8

    def __post_init__(self):
        super().__post_init__()
        self._derive(_width=self.bits, _levels=2 ** (self.bits - 1) - 1)


class Int8(_Rounded, name="int8"):
    """Each value rounded to −127 … 127 times its block's scale, in 8 bits; the error is at most c/254. Scales add 1/8 bit a value."""

    messages = "8 bits a value, a scale per block"
    _width, _levels = 8, 127


class Int4(_Rounded, name="int4"):
    """Each value rounded to −7 … 7 times its block's scale, in 4 bits; the error is at most c/14."""

    messages = "4 bits a value, a scale per block"
    _width, _levels = 4, 7


class Int2(_Rounded, name="int2"):
    """Each value rounded to −1, 0 or 1 times its block's scale, in 2 bits; the error is at most c/2."""

    messages = "2 bits a value, a scale per block"
    _width, _levels = 2, 1


class Qsgd(Quantized, name="qsgd"):
    """QSGD: each value rounded at random, without bias, to a multiple of its block's Euclidean norm over s.

    x̂ = ‖x‖₂ sgn(x) ξ/s with ξ one of the two whole numbers next to s|x|/‖x‖₂. Unbiased with ω = min(n/s², √n/s) for n values in a
    block. The 2s + 1 numbers take ⌈log₂(2s+1)⌉ bits; there is no entropy coding.

    Attributes:
        levels: s.

    Reference: Alistarh et al. 2017, "QSGD", Lemma 3.1.
    """

    messages = "2 to 8 bits a value, a norm per block"
    random = True
    _euclidean = True

    levels: Annotated[int, Range(1, 127)] = 7

    def __post_init__(self):
        self._derive(_width=(2 * self.levels).bit_length(), _levels=self.levels)

    def omega(self, size):
        n = self._length(size)
        return min(n / self.levels**2, math.sqrt(n) / self.levels)


class Ternary(Quantized, name="ternary"):
    """TernGrad: each value rounded at random, without bias, to −c, 0 or c, its block's largest magnitude; 2 bits a value.

    x̂ = c·b with b in {−1, 0, 1} and |b| = 1 with probability |x|/c. Unbiased with ω = (√n − 1)/2 for n values in a block.

    Reference: Wen et al. 2017, "TernGrad", with a scale per block instead of per tensor.
    """

    messages = "2 bits a value, a scale per block"
    random = True
    _width, _levels = 2, 1


class _Float8(Scaled):
    """Base of casts of x/c to a type of one byte; c scales each block's largest magnitude to the largest number of the type."""

    _dtype: ClassVar[DType]
    _width = 8

    @property
    def _largest(self) -> float:
        return float(jnp.finfo(self._dtype).max)

    def encode(self, x, state, key):
        def coded(x_MxB, start):
            scale_Mx1 = magnitude(x_MxB) / self._largest
            # Below the smallest normal number there is no inverse: such a block decodes to zeros.
            inverse_Mx1 = jnp.where(scale_Mx1 < jnp.finfo(scale_Mx1.dtype).tiny, 0, 1 / scale_Mx1)
            # e4m3 has no infinity: larger numbers become NaN, and rounding may make a quotient slightly too large.
            return scalar.rounded_bits(jnp.clip(x_MxB * inverse_Mx1, -self._largest, self._largest), self._dtype), scale_Mx1[:, 0]

        values_MxB, scales_M = by_rows(coded, x, self.block)
        return {"values": values_MxB.ravel()[: x.size], "scales": scales_M}

    def decode(self, message, shape, dtype):
        values = jax.lax.bitcast_convert_type(message["values"], self._dtype).astype(message["scales"].dtype)
        return from_rows(rows(values, self.block) * message["scales"][:, None], shape, dtype)

    def delta(self, shape):
        # Errors are 2^−p relative to normal numbers, and half the smallest subnormal step for the others.
        info, count = jnp.finfo(self._dtype), self._length(math.prod(shape))
        return 1 - (4.0 ** -(info.nmant + 1) + count * (float(info.smallest_subnormal) / 2 / self._largest) ** 2)


class Float8E4M3(_Float8, name="float8_e4m3"):
    """8-bit floats with 3 bits mantissa: a relative error of at most 2⁻⁴ down to 3·10⁻⁵ of the block's largest magnitude."""

    messages = "8 bits a value, a scale per block"
    _dtype = jnp.float8_e4m3fn


class Float8E5M2(_Float8, name="float8_e5m2"):
    """8-bit floats with 2 bits mantissa: a relative error of at most 2⁻³ down to 10⁻⁹ of the block's largest magnitude."""

    messages = "8 bits a value, a scale per block"
    _dtype = jnp.float8_e5m2


class ScaledSign(Scaled, name="scaled_sign"):
    """The sign of each value times the mean magnitude of its block of n values: x̂ = (‖x‖₁/n) sgn(x).

    ‖x − x̂‖² = (1 − δ)‖x‖² with δ = ‖x‖₁²/(n‖x‖₂²), which is at least 1/n, and about 2/π for normal values.

    Reference: Karimireddy et al. 2019, "Error feedback fixes signSGD", Lemma 8, where a whole tensor is one block.
    """

    messages = "1 bit a value, a scale per block"
    _width = 1

    block: Count = 1024

    def encode(self, x, state, key):
        def means(x_MxB, start):  # Values are divided before they are added, since a sum of large ones may overflow.
            return (jnp.abs(x_MxB) * (1 / min(self.block, max(1, x.size - start)))).sum(axis=1)

        return {"signs": scalar.sign_bits(x), "scales": by_rows(means, x, self.block)}

    def decode(self, message, shape, dtype):
        scales_M = message["scales"]
        signs_MxB = rows(scalar.signs(message["signs"], math.prod(shape), scales_M.dtype), self.block)
        return from_rows(signs_MxB * scales_M[:, None], shape, dtype)

    def delta(self, shape):
        return 1 / self._length(math.prod(shape))
