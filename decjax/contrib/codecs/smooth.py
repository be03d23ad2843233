"""The codec "zfp", for neighboring values that vary smoothly."""

import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from decjax.codecs import bits
from decjax.codecs.codec import Codec, by_rows, from_rows
from decjax.options import Range

_NEGABINARY = np.uint32(0xAAAAAAAA)
_FORWARD_4x4 = np.array([[4, 4, 4, 4], [5, 1, -1, -5], [-4, 4, 4, -4], [-2, 6, -6, 2]], np.int32)
_INVERSE_4x4 = np.array([[4, 6, -4, -1], [4, 2, 4, 5], [4, -2, 4, -5], [4, -6, -4, 1]], np.float32) / 64


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)


def _scale(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x·2^exponent in two steps: the power itself may be no float32."""
    half = exponent >> 1
    return x * _power_of_two(half) * _power_of_two(exponent - half)


class Zfp(Codec, name="zfp"):
    """ZFP: blocks of four neighboring values in 4·rate bits, of which 8 are the block's exponent; for smooth arrays.

        i = ⌊x 2^(26−e)⌉,  2^e > max |x|       one exponent byte per block
        X = T i,  T = [4 4 4 4; 5 1 −1 −5; −4 4 4 −4; −2 6 −6 2]
        u = negabinary(X), rounded             its leading rate − 2 of 32 bits

    Where neighbors vary smoothly, all of X but the first is small, and the errors of x̂ = T⁻¹X are smooth as well. For any values,

        ‖x − x̂‖∞ ≤ 60·2^(−rate) max |x| over the block.

    Differences from the reference implementation: its lifting steps, which divide T by 16 and round in between, are one product of
    integers that fit in 32 bits here; and where it encodes bit planes with group tests, and so gives more bits to larger coefficients,
    all coefficients have the same number of bits here. Values are taken as float32.

    Attributes:
        rate: number of bits a value.

    Reference: Lindstrom 2014, "Fixed-rate compressed floating-point arrays".
    """

    messages = "any number of bits a value"

    rate: Annotated[int, Range(4, 24)] = 8

    @property
    def _planes(self) -> int:
        """The number of leading bits that are kept of each negabinary integer."""
        return self.rate - 2

    @property
    def _dropped(self) -> int:
        return 32 - self._planes

    @property
    def _middle(self) -> int:
        """The middle of the interval that all integers with the same leading digits form around their common number."""
        low = -(2 * (2**self._dropped - 1) // 3 if self._dropped % 2 == 0 else (2**self._dropped - 2) // 3)  # where it begins
        return low + 2 ** (self._dropped - 1)

    def encode(self, x, state, key):
        kept_Mx4, exponent_M = by_rows(self._coded, x.astype(jnp.float32), 4)
        return {"planes": bits.pack(kept_Mx4.ravel(), self._planes), "exponents": exponent_M}

    def _coded(self, x_Mx4: jax.Array, start: int) -> tuple[jax.Array, jax.Array]:
        """Return the leading bits and the exponents of some blocks."""
        exponent_M = (jax.lax.bitcast_convert_type(jnp.abs(x_Mx4), jnp.int32) >> 23).max(axis=1)
        fixed_Mx4 = jnp.round(_scale(x_Mx4, (152 - exponent_M)[:, None])).astype(jnp.int32)
        transformed_Mx4 = (fixed_Mx4[:, None, :] * _FORWARD_4x4).sum(axis=2)
        negabinary_Mx4 = (transformed_Mx4 + self._middle).astype(jnp.uint32) + _NEGABINARY ^ _NEGABINARY
        return negabinary_Mx4 >> self._dropped, exponent_M.astype(jnp.uint8)

    def decode(self, message, shape, dtype):
        exponent_M = message["exponents"].astype(jnp.int32)
        kept = bits.unpack(message["planes"], self._planes, 4 * exponent_M.size).astype(jnp.uint32).reshape(-1, 4)
        transformed_Mx4 = ((kept << self._dropped ^ _NEGABINARY) - _NEGABINARY).astype(jnp.int32).astype(jnp.float32)
        fixed_Mx4 = (transformed_Mx4[:, None, :] * _INVERSE_4x4).sum(axis=2)
        x_Mx4 = _scale(fixed_Mx4, (exponent_M - 152)[:, None])
        # 0 stands for zeros and numbers below the normal ones, 255 for infinity and NaN.
        x_Mx4 = jnp.where(exponent_M[:, None] == 0, 0, jnp.where(exponent_M[:, None] == 255, jnp.nan, x_Mx4))
        return from_rows(x_Mx4, shape, dtype)

    def num_bytes(self, shape, dtype):
        blocks = math.ceil(math.prod(shape) / 4)
        return bits.packed_bytes(4 * blocks, self._planes) + blocks

    def delta(self, shape):
        lost = 4 * (60 * 2.0**-self.rate) ** 2
        return 1 - lost if lost < 1 else None
