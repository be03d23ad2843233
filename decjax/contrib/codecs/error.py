"""The codec "bounded", whose errors are within a bound."""

import math
from typing import Annotated

import jax
import jax.numpy as jnp

from decjax.codecs import bits
from decjax.codecs.codec import Codec, working_dtype
from decjax.options import Natural, Range
from decjax.typing import DType


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
