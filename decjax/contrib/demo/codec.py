"""The codec "dct": the largest cosine coefficients."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from decjax.codecs import bits
from decjax.codecs.codec import HIGHEST, OfValues, matrix_shape, working_dtype
from decjax.codecs.sparse import comparable_magnitude, largest
from decjax.options import Count, Share
from decjax.typing import DType, Shape


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
