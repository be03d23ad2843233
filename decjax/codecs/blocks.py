"""Codecs with a scale for each block of values: whole numbers of a few bits, short floats, signs; and quantization to a bound."""

import functools
import math
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp

from decjax import noise
from decjax.codecs import bits, scalar
from decjax.codecs.codec import Codec, by_rows, from_rows, magnitude, rows, working_dtype
from decjax.options import LARGEST, Count, Natural, Range
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


class Bounded(Codec, name="bounded"):
    """Each value rounded to a multiple of 2e, so that |x − x̂| ≤ e for every value; those for which that fails are sent unchanged.

        x̂ = 2e′ ⌊x/2e′⌉,   whole numbers of b bits: |x| ≤ 2e′L, L = 2^(b−1) − 1

    In floating-point arithmetic, rounding to the nearest multiple of 2e sometimes errs by slightly more than e. So e′ = e(1 − 2⁻²⁰L)
    is used, which leaves room for the rounding of x/2e′, of 2e′·c and of x̂ to float32; where x̂ has a shorter type, the error of its
    rounding is checked value by value.

    A value for which this fails (too large, infinite, NaN) is an outlier. Each group of g values has room for a few outliers; a group
    with more of them is sent raw. No message of a fixed size smaller than x can keep a bound for all x, so this message has room for
    all groups raw, of which only those marked in "overflow" need to travel: `static_bytes` is false. With raw=False there is no such
    room and the size is fixed; in a group with too many outliers, those without room are clipped to ±2e′L, or become NaN if one of
    the group's values is not finite.

    Attributes:
        bound: e, the absolute error that is allowed; in Python also a traced scalar, which is not checked, so that the bound can change
            from step to step in one program. Both ends need the same one.
        bits_per_value: b, bits of each value's multiple.
        group: g, values of a group. Groups are strided: value p belongs to group p mod M, M the number of groups.
        outliers: number of outliers that a group has room for, at most g; at least 1 if `raw` is False.
        raw: whether a group with more outliers is sent unchanged, which makes messages vary in size; if False, they are clipped.

    Reference: Tao et al. 2017, "SZ", linear-scaling quantization without its predictor.
    """

    messages = "a few bits a value, and outliers"

    bound: Annotated[float, Range(1e-30, math.inf, below=True)] = 1e-3
    bits_per_value: Annotated[int, Range(2, 12)] = 8
    group: Annotated[int, Range(1, 2**16)] = 256
    outliers: Natural = 2
    raw: bool = True

    def __post_init__(self):
        least = 0 if self.raw else 1
        if not least <= self.outliers <= self.group:
            raise ValueError(f"{self}: outliers={self.outliers} must be from {least} to group={self.group} with raw={self.raw}")

    @property
    def static_bytes(self):
        return not self.raw

    @property
    def _levels(self) -> int:
        """L."""
        return 2 ** (self.bits_per_value - 1) - 1

    def _plan(self, size: int) -> tuple[int, int]:
        """Return the number of groups, and of values in each: about equal, at most g."""
        M = math.ceil(size / self.group)
        return M, math.ceil(size / max(1, M))

    def _step(self, dtype: DType) -> jax.Array:
        return jnp.asarray(2 * self.bound * (1 - self._levels * 2.0**-20), dtype)

    def encode(self, x, state, key):
        M, G = self._plan(x.size)
        x_GxM = jnp.pad(x.ravel(), (0, M * G - x.size)).reshape(G, M)
        wide_GxM = x_GxM.astype(working_dtype(x.dtype))
        width = self._step(wide_GxM.dtype)
        code_GxM = jnp.clip(jnp.round(wide_GxM * (1 / width)), -self._levels, self._levels)
        info = jnp.finfo(x.dtype)
        # As a receiver will decode it in x's own type. Compilers may remove a cast to that type and back.
        arrived_GxM = jax.lax.reduce_precision(code_GxM * width, info.nexp, info.nmant)
        fits_GxM = jnp.abs(wide_GxM - arrived_GxM) <= width / 2 * (1 + self._levels * 2.0**-21)
        place_GxM = jax.lax.broadcasted_iota(jnp.int32, x_GxM.shape, 0)
        where, before = [], jnp.full(M, G)
        for _ in range(self.outliers):  # From the last outlier to the first. A place that none takes holds the group's first value.
            before = jnp.where(fits_GxM | (place_GxM >= before), -1, place_GxM).max(axis=0, initial=-1)
            where.append(jnp.maximum(before, 0))
        where_OxM = jnp.stack(where) if where else jnp.zeros((0, M), jnp.int32)
        outlier_OxM = jnp.take_along_axis(x_GxM, where_OxM, axis=0)
        if not self.raw:  # A clipped infinity must not be decoded to a number.
            outlier_OxM = jnp.where(jnp.isfinite(x_GxM).all(axis=0), outlier_OxM, jnp.nan)
        message = {
            "codes": bits.pack((code_GxM + self._levels).astype(jnp.uint32).ravel(), self.bits_per_value),
            "outliers": outlier_OxM,
            "where": where_OxM.astype(bits.index_dtype(G)),
        }
        if self.raw:
            overflow_M = (~fits_GxM & (place_GxM < before)).any(axis=0)
            message |= {"overflow": bits.pack(overflow_M.astype(jnp.uint8), 1), "raw": jnp.where(overflow_M, x_GxM, 0)}
        return message

    def decode(self, message, shape, dtype):
        size = math.prod(shape)
        M, G = self._plan(size)
        wide = working_dtype(message["outliers"].dtype)
        codes = bits.unpack(message["codes"], self.bits_per_value, G * M).reshape(G, M)
        x_GxM = ((codes.astype(wide) - self._levels) * self._step(wide)).astype(dtype)
        place_GxM = jax.lax.broadcasted_iota(message["where"].dtype, x_GxM.shape, 0)
        for place_M, value_M in zip(message["where"], message["outliers"]):
            x_GxM = jnp.where(place_GxM == place_M, value_M.astype(dtype), x_GxM)
        if self.raw:
            overflow_M = bits.unpack(message["overflow"], 1, M) > 0
            x_GxM = jnp.where(overflow_M, message["raw"].astype(dtype), x_GxM)
        return x_GxM.ravel()[:size].reshape(shape)

    def num_bytes(self, shape, dtype):
        (M, G), item = self._plan(math.prod(shape)), jnp.dtype(dtype).itemsize
        coded = bits.packed_bytes(G * M, self.bits_per_value) + M * self.outliers * (item + bits.index_dtype(G).itemsize)
        return coded + (bits.packed_bytes(M, 1) + M * G * item if self.raw else 0)
