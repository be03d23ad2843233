"""Codecs of structure: a matrix as two thin ones, the largest cosine coefficients, neighboring values that vary smoothly."""

import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from decjax import noise
from decjax.codecs import bits
from decjax.codecs.codec import HIGHEST, Codec, OfValues, by_rows, dot, finite, from_rows, matrix_shape, working_dtype
from decjax.codecs.sparse import comparable_magnitude, largest
from decjax.options import Count, Range, Share
from decjax.typing import DType, Shape


def revived(found_JxR: jax.Array, fresh_JxR: jax.Array) -> jax.Array:
    """Return `found_JxR` with columns scaled to magnitude 1, for the next power step; useless ones become those of `fresh_JxR`.

    A column is useless if it is zero, since it would stay zero, or consists of rounding errors only. If any column is not
    finite, all are replaced.
    """
    info = jnp.finfo(found_JxR.dtype)
    largest_R = jnp.abs(found_JxR).max(axis=0)
    alive_R = largest_R > jnp.maximum(info.eps * largest_R.max(), info.tiny)
    return jnp.where(alive_R[None], found_JxR / jnp.where(alive_R, largest_R, 1)[None], fresh_JxR)


class LowRank(OfValues, name="low_rank"):
    """Each matrix as the product of two thin ones of rank R, found by a power iteration over messages; vectors unchanged.

        A = x as I×J;   P = orth(A Q);   Q ← Aᵀ P;   x̂ = P Qᵀ = P Pᵀ A

    A tensor is encoded as the matrix I×J of `matrix_shape`. The message is P and Q, R(I + J) values instead of I·J. The state is Qᵀ,
    [R, J], of the last finite message, and () for a vector. The next power step starts from it, so over many messages of a slowly
    changing matrix P approaches the span of its leading singular vectors. Columns of Q are scaled to magnitude 1, so that A Q does not
    underflow; a column that has become zero (of a zero matrix, or one of lower rank) is replaced by its first value.

    ‖x − x̂‖² ≤ ‖x‖² always, since P Pᵀ projects. From a random Q at least R/min(I, J) of the energy ‖x‖² is kept on average. If the
    factors are encoded by `values`, x̂ is the product of the decoded factors.

    Attributes:
        rank: R, at most min(I, J) of every matrix that is encoded.

    Reference: Vogels et al. 2019, "PowerSGD", Algorithm 1, with the error of x̂ = P Pᵀ A as sent.
    """

    messages = "two thin matrices"
    state_key = "tensor"
    matrix = True

    rank: Count = 4

    def _view(self, shape: Shape) -> tuple[int, int] | None:
        matrix = matrix_shape(tuple(shape))
        if matrix and self.rank > min(matrix):
            raise ValueError(
                f"low_rank rank={self.rank} exceeds {min(matrix)}, the smaller side of {tuple(shape)} as a "
                f"{matrix[0]}x{matrix[1]} matrix; use rank={min(matrix)} or less"
            )
        return matrix

    def _start(self, columns: int, dtype: DType) -> jax.Array:
        return noise.uniform((self.rank, columns), (jnp.uint32(columns), jnp.uint32(self.rank))).astype(dtype) - 0.5

    def init(self, shape, dtype):
        matrix = self._view(shape)
        return self._start(matrix[1], working_dtype(dtype)) if matrix else ()

    def encode(self, x, state, key):
        if not (matrix := self._view(x.shape)):
            return {"dense": x}
        a_IxJ = x.reshape(matrix).astype(working_dtype(x.dtype))
        p_IxR = jnp.linalg.qr(dot(a_IxJ, state.T))[0]
        # Pᵀ A instead of Aᵀ P: XLA on CPUs is ten times slower where the large matrix is transposed.
        q_RxJ = dot(p_IxR.T, a_IxJ)
        return {"p": self.inner.encode(p_IxR, (), None), "q": self.inner.encode(q_RxJ, (), None)}

    def decode(self, message, shape, dtype):
        if not (matrix := self._view(shape)):
            return message["dense"].astype(dtype)
        p_IxR = self.inner.decode(message["p"], (matrix[0], self.rank), working_dtype(dtype))
        q_RxJ = self.inner.decode(message["q"], (self.rank, matrix[1]), working_dtype(dtype))
        return dot(p_IxR, q_RxJ).reshape(shape).astype(dtype)

    def advance(self, state, message):
        if "dense" in message:
            return state
        new_RxJ = self.inner.decode(message["q"], state.shape, state.dtype)
        alive_RxJ = revived(new_RxJ.T, self._start(new_RxJ.shape[1], new_RxJ.dtype).T).T
        return jnp.where(finite((message, new_RxJ)), alive_RxJ, state)

    def num_bytes(self, shape, dtype):
        if not (matrix := self._view(shape)):
            return jnp.dtype(dtype).itemsize * math.prod(shape)
        return sum(self.inner.num_bytes((size, self.rank), working_dtype(dtype)) for size in matrix)

    def delta(self, shape):
        if not self.inner.contractive:
            return None
        if not (matrix := self._view(shape)):
            return 1.0
        kept = self.rank / min(matrix)
        lost = max(1 - (self.inner.delta((size, self.rank)) or 0) for size in matrix) ** 0.5  # ‖P̂ − P‖ ≤ lost ‖P‖, and of Q
        # ‖P̂Q̂ − PQ‖ ≤ ε‖Q‖; and (√(1−κ) + ε√κ)² ≤ (1+ε)(1 − (1−ε)κ) of a share κ = ‖Q‖²/‖x‖² kept.
        epsilon = lost * (1 + self.rank**0.5 * (1 + lost))
        return max(0.0, 1 - (1 + epsilon) * (1 - (1 - epsilon) * kept))


def _basis(length: int, dtype: DType) -> jax.Array:
    u_L = np.arange(length)
    basis_LxL = np.sqrt(2 / length) * np.cos(np.pi * u_L[:, None] * (2 * u_L + 1) / (2 * length))
    basis_LxL[0] = np.sqrt(1 / length)
    return jnp.asarray(basis_LxL, dtype)


class Dct(OfValues, name="dct"):
    """The largest ⌈φC⌉ of the C cosine coefficients of every chunk of an array, as in DeMo.

    A matrix is cut into chunks of c×c values, a vector into chunks of c; each is transformed by the orthonormal DCT-II,

        X = D x Dᵀ,   D_ui = √(2/c) cos(π u (2i + 1)/2c),   D_0i = √(1/c).

    The transform preserves norms, so ‖x − x̂‖² ≤ (1 − k/C)‖x‖² for k = ⌈φC⌉ coefficients. A side shorter than c has chunks of its own
    length; the last chunk of a longer side is filled with zeros.

    Attributes:
        fraction: φ.
        chunk: c, the side of a chunk in values.

    Reference: Peng et al. 2024, "DeMo: decoupled momentum optimization", which takes the largest divisor up to c instead.
    """

    messages = "the largest cosine coefficients of each chunk"
    matrix = True

    fraction: Share = 1 / 128
    chunk: Count = 64

    def _plan(self, shape: Shape) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, ...], int]:
        """Return the sides of the matrix, those of a chunk, the grid of chunks, and the number of coefficients sent of each."""
        sides = matrix_shape(tuple(shape)) or (1, math.prod(shape))
        chunks = tuple(max(1, min(self.chunk, side)) for side in sides)
        grid = tuple(-(-side // length) for side, length in zip(sides, chunks))
        return sides, chunks, grid, math.ceil(self.fraction * math.prod(chunks))

    def encode(self, x, state, key):
        (I, J), (c, d), (m, n), k = self._plan(x.shape)
        dtype = working_dtype(x.dtype)
        x_IxJ = jnp.pad(x.reshape(I, J).astype(dtype), ((0, m * c - I), (0, n * d - J)))
        x_mxcxnxd = x_IxJ.reshape(m, c, n, d)
        coefficients = jnp.einsum("ui,minj,vj->mnuv", _basis(c, dtype), x_mxcxnxd, _basis(d, dtype), precision=HIGHEST)
        coefficients_MxC = coefficients.reshape(m * n, c * d)
        where_Mxk = largest(comparable_magnitude(coefficients_MxC), k)
        sent_Mxk = jnp.take_along_axis(coefficients_MxC, where_Mxk, axis=1)
        return {"values": self.inner.encode(sent_Mxk.ravel(), (), None), "where": where_Mxk.astype(bits.index_dtype(c * d))}

    def decode(self, message, shape, dtype):
        (I, J), (c, d), (m, n), k = self._plan(shape)
        wide = working_dtype(dtype)
        sent_Mxk = self.inner.decode(message["values"], (m * n * k,), wide).reshape(m * n, k)
        nothing_MxC = jnp.zeros((m * n, c * d), wide)
        places = jnp.arange(m * n)[:, None], message["where"].astype(jnp.int32)
        coefficients = nothing_MxC.at[places].set(sent_Mxk, unique_indices=True).reshape(m, n, c, d)
        x_mxcxnxd = jnp.einsum("ui,mnuv,vj->minj", _basis(c, wide), coefficients, _basis(d, wide), precision=HIGHEST)
        return x_mxcxnxd.reshape(m * c, n * d)[:I, :J].reshape(shape).astype(dtype)

    def num_bytes(self, shape, dtype):
        _, chunks, grid, k = self._plan(shape)
        count, index = math.prod(grid) * k, bits.index_dtype(math.prod(chunks))
        return self.inner.num_bytes((count,), working_dtype(dtype)) + count * index.itemsize

    def delta(self, shape):
        _, chunks, grid, k = self._plan(shape)
        of_values = self.inner.delta((math.prod(grid) * k,))
        return None if of_values is None else k / math.prod(chunks) * of_values


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
