"""Block quantization: whole numbers of a few bits and one scale per block of values.

    x̂ = (c/L) ⌊L x/c + u⌋,   c = max |x| or ‖x‖₂ over a block

with u = ½ (nearest) or u uniform in [0, 1) (stochastic, unbiased), and L = 2^(b−1) − 1, or an option of the codec.

Nearest rounding changes a value by at most its own magnitude and by at most c/2L, and the largest not at all. With n values in a
block and c = max |x| the worst block has n − 1 values c/2L, so that

    ‖x − x̂‖² ≤ (1 − δ)‖x‖²,   δ = 1 / (1 + (n−1)/4L²).

Stochastic rounding of a value v in the lowest cell has variance v(c/L − v), and at most (c/2L)² in any other; the worst block gives

    E‖x − x̂‖² ≤ ω‖x‖²,   ω = (√(1 + (n−1)/L²) − 1)/2.

Scales are float32, or float64 for float64 values. A block whose largest magnitude is below L times the smallest normal number is
decoded to zeros.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp

from decjax import noise, registry
from decjax.codecs import bits
from decjax.codecs.codec import Codec, Traits, by_rows, from_rows, magnitude, rows, scale_bytes

ROUNDINGS = ("nearest", "stochastic")


def quantized(name: str, *, levels: int, width: int, block: int, rounding: str, euclidean: bool = False) -> Codec:
    """A codec of the module's equation with L = `levels`, numbers of `width` bits, and largest magnitudes or norms as scales."""
    if block < 8 or block % 8:
        raise ValueError(f"{name} block={block} must be a positive multiple of 8, so that blocks end where bytes do; try 256")
    if rounding not in ROUNDINGS:
        raise ValueError(f"{name} rounding={rounding!r} is unknown; use one of {', '.join(ROUNDINGS)}")
    form = _Quantized(levels, width, block, rounding == "stochastic", euclidean)
    traits = Traits(unbiased=form.omega, random=True) if form.stochastic else Traits(contractive=form.delta)
    return Codec(name=name, encode=form.encode, decode=form.decode, num_bytes=form.num_bytes, traits=traits)


@dataclasses.dataclass(frozen=True)
class _Quantized:
    """The codec's functions."""

    levels: int
    width: int
    block: int
    stochastic: bool
    euclidean: bool

    def encode(self, x, state, key):
        seed = noise.words(key) if self.stochastic else None
        codes_MxB, scales_M = by_rows(functools.partial(self.coded, seed), x, self.block)
        return {"codes": bits.pack(codes_MxB.ravel(), self.width)[: bits.packed_bytes(x.size, self.width)], "scales": scales_M}

    def coded(self, seed, x_MxB, start):
        """Codes and scales of some blocks; `start` is the index of their first value, and `seed` that of the rounding, if it is random."""
        scale_Mx1 = magnitude(x_MxB)
        tiny = self.levels * jnp.finfo(x_MxB.dtype).tiny
        if self.euclidean:  # Of x/max, whose squares neither overflow nor vanish.
            unit_MxB = x_MxB * jnp.where(scale_Mx1 < tiny, 0, 1 / scale_Mx1)
            scale_Mx1 = scale_Mx1 * jnp.sqrt(jnp.square(unit_MxB).sum(axis=1, keepdims=True))
        shift = noise.uniform(x_MxB.shape, seed, start) if seed is not None else 0.5
        # Shifted to positive numbers, where the cast to integers rounds down; sums of floats may reach the next number.
        steps_MxB = x_MxB * jnp.where(scale_Mx1 < tiny, 0, self.levels / scale_Mx1) + (shift + self.levels)
        return jnp.minimum(steps_MxB.astype(jnp.int32), 2 * self.levels).astype(jnp.uint8), scale_Mx1[:, 0] / self.levels

    def decode(self, message, shape, dtype):
        codes = bits.unpack(message["codes"], self.width, math.prod(shape))
        steps_MxB = rows(codes.astype(message["scales"].dtype), self.block) - self.levels
        return from_rows(steps_MxB * message["scales"][:, None], shape, dtype)

    def num_bytes(self, shape, dtype):
        return bits.packed_bytes(math.prod(shape), self.width) + scale_bytes(shape, dtype, self.block)

    def omega(self, size):
        n = min(self.block, max(1, size))
        if self.euclidean:
            return min(n / self.levels**2, math.sqrt(n) / self.levels)
        return (math.sqrt(1 + (n - 1) / self.levels**2) - 1) / 2

    def delta(self, shape):
        n = min(self.block, max(1, math.prod(shape)))
        return 1 / (1 + (n - 1) / (2 * self.levels) ** 2)


@registry.register("codec", "integers", messages="2 to 8 bits a value, a scale per block")
def integers(bits: int = 8, block: int = 256, rounding: str = "nearest") -> Codec:
    """Each value rounded to one of 2^b − 1 multiples of its block's scale, in b bits; the error is at most c/(2^b − 2).

    c is the block's largest magnitude.

    Args:
        bits: b, from 2 to 8.
        block: values that share a scale, a multiple of 8.
        rounding: "nearest", or "stochastic": unbiased, with up to twice the error.
    """
    if bits not in range(2, 9):
        raise ValueError(f"integers bits={bits!r} must be a whole number from 2 to 8; 'sign' sends 1 bit, 'bfloat16' 16")
    return quantized(f"int{bits}", levels=2 ** (bits - 1) - 1, width=bits, block=block, rounding=rounding)


@registry.register("codec", "int8", messages="8 bits a value, a scale per block")
def int8(block: int = 256, rounding: str = "nearest") -> Codec:
    """Each value rounded to −127 … 127 times its block's scale, in 8 bits; the error is at most c/254.

    c is the block's largest magnitude. Scales add 1/8 bit a value. The same as `integers(8)`.

    Args:
        block: values that share a scale, a multiple of 8.
        rounding: "nearest", or "stochastic": unbiased, with up to twice the error.
    """
    return integers(8, block, rounding)


@registry.register("codec", "int4", messages="4 bits a value, a scale per block")
def int4(block: int = 256, rounding: str = "nearest") -> Codec:
    """Each value rounded to −7 … 7 times its block's scale, in 4 bits; the error is at most c/14.

    c is the block's largest magnitude. The same as `integers(4)`.

    Args:
        block: values that share a scale, a multiple of 8.
        rounding: "nearest", or "stochastic": unbiased, with up to twice the error.
    """
    return integers(4, block, rounding)


@registry.register("codec", "int2", messages="2 bits a value, a scale per block")
def int2(block: int = 256, rounding: str = "nearest") -> Codec:
    """Each value rounded to −1, 0 or 1 times its block's scale, in 2 bits; the error is at most c/2.

    c is the block's largest magnitude. The same as `integers(2)`.

    Args:
        block: values that share a scale, a multiple of 8.
        rounding: "nearest", or "stochastic": unbiased, with up to twice the error.
    """
    return integers(2, block, rounding)


@registry.register("codec", "qsgd", messages="2 to 8 bits a value, a norm per block")
def qsgd(levels: int = 7, block: int = 256) -> Codec:
    """QSGD: each value rounded at random, without bias, to a multiple of its block's Euclidean norm over s.

    x̂ = ‖x‖₂ sgn(x) ξ/s with ξ one of the two whole numbers next to s|x|/‖x‖₂. Unbiased with ω = min(n/s², √n/s) for n values in a
    block. The 2s + 1 numbers take ⌈log₂(2s+1)⌉ bits; there is no entropy coding.

    Args:
        levels: s, from 1 to 127.
        block: n, values that share a norm, a multiple of 8.

    Reference: Alistarh et al. 2017, "QSGD", Lemma 3.1.
    """
    if levels not in range(1, 128):
        raise ValueError(f"qsgd levels={levels!r} must be a whole number from 1 to 127, since a number takes at most 8 bits")
    return quantized("qsgd", levels=levels, width=(2 * levels).bit_length(), block=block, rounding="stochastic", euclidean=True)


@registry.register("codec", "ternary", messages="2 bits a value, a scale per block")
def ternary(block: int = 256) -> Codec:
    """TernGrad: each value rounded at random, without bias, to −c, 0 or c, its block's largest magnitude; 2 bits a value.

    x̂ = c·b with b in {−1, 0, 1} and |b| = 1 with probability |x|/c. Unbiased with ω = (√n − 1)/2 for n values in a block.

    Args:
        block: n, values that share a scale, a multiple of 8.

    Reference: Wen et al. 2017, "TernGrad", with a scale per block instead of per tensor.
    """
    return quantized("ternary", levels=1, width=2, block=block, rounding="stochastic")
