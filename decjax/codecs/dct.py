"""The largest coefficients of a chunked cosine transform, as in DeMo.

A matrix is cut into chunks of c×c values, a vector into chunks of c; each is transformed by the orthonormal DCT-II,

    X = D x Dᵀ,   D_ui = √(2/c) cos(π u (2i + 1)/2c),   D_0i = √(1/c),

and its k largest coefficients are sent. The transform preserves norms, so ‖x − x̂‖² ≤ (1 − k/c²)‖x‖².
A side shorter than c has chunks of its own length; the last chunk of a longer side is filled with zeros.

Reference: Peng et al. 2024, "DeMo: decoupled momentum optimization", which takes the largest divisor up to c instead.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from decjax import registry
from decjax.codecs import bits
from decjax.codecs.codec import HIGHEST, Codec, Traits, matrix_shape, working_dtype
from decjax.codecs.sparse import combined, comparable_magnitude, largest, made_values


def _basis(length: int, dtype) -> jax.Array:
    u_L = np.arange(length)
    basis_LxL = np.sqrt(2 / length) * np.cos(np.pi * u_L[:, None] * (2 * u_L + 1) / (2 * length))
    basis_LxL[0] = np.sqrt(1 / length)
    return jnp.asarray(basis_LxL, dtype)


@registry.register("codec", "dct", messages="the largest cosine coefficients of each chunk")
def dct(fraction: float = 1 / 128, chunk: int = 64, values: Codec | str = "identity") -> Codec:
    """The largest ⌈φC⌉ of the C cosine coefficients of every chunk of an array, as in DeMo.

    A matrix is cut into chunks of c×c values, a vector into chunks of c.

    Args:
        fraction: φ in (0, 1].
        chunk: c ≥ 1, the side of a chunk in values.
        values: codec of the coefficients that are sent, one without state, key or matrices, such as `int8`.
    """
    values = made_values("dct", values, fraction)
    if chunk < 1:
        raise ValueError(f"dct chunk={chunk} must be at least 1 value; 64 is the default")
    form = _Chunked(fraction, chunk, values)
    traits = Traits(contractive=combined(form.kept, form.count, values), matrix=True)
    return Codec(name="dct", encode=form.encode, decode=form.decode, num_bytes=form.num_bytes, traits=traits)


@dataclasses.dataclass(frozen=True)
class _Chunked:
    """The codec's functions."""

    fraction: float
    chunk: int
    values: Codec

    def plan(self, shape):
        """Sides of the matrix, of a chunk, the grid of chunks, and coefficients sent of each."""
        sides = matrix_shape(tuple(shape)) or (1, math.prod(shape))
        chunks = tuple(max(1, min(self.chunk, side)) for side in sides)
        grid = tuple(-(-side // length) for side, length in zip(sides, chunks))
        return sides, chunks, grid, math.ceil(self.fraction * math.prod(chunks))

    def encode(self, x, state, key):
        (I, J), (c, d), (m, n), k = self.plan(x.shape)
        dtype = working_dtype(x.dtype)
        x_IxJ = jnp.pad(x.reshape(I, J).astype(dtype), ((0, m * c - I), (0, n * d - J)))
        x_mxcxnxd = x_IxJ.reshape(m, c, n, d)
        coefficients = jnp.einsum("ui,minj,vj->mnuv", _basis(c, dtype), x_mxcxnxd, _basis(d, dtype), precision=HIGHEST)
        coefficients_MxC = coefficients.reshape(m * n, c * d)
        where_Mxk = largest(comparable_magnitude(coefficients_MxC), k)
        sent_Mxk = jnp.take_along_axis(coefficients_MxC, where_Mxk, axis=1)
        return {"values": self.values.encode(sent_Mxk.ravel(), (), None), "where": where_Mxk.astype(bits.index_dtype(c * d))}

    def decode(self, message, shape, dtype):
        (I, J), (c, d), (m, n), k = self.plan(shape)
        wide = working_dtype(dtype)
        sent_Mxk = self.values.decode(message["values"], (m * n * k,), wide).reshape(m * n, k)
        nothing_MxC = jnp.zeros((m * n, c * d), wide)
        places = jnp.arange(m * n)[:, None], message["where"].astype(jnp.int32)
        coefficients = nothing_MxC.at[places].set(sent_Mxk, unique_indices=True).reshape(m, n, c, d)
        x_mxcxnxd = jnp.einsum("ui,mnuv,vj->minj", _basis(c, wide), coefficients, _basis(d, wide), precision=HIGHEST)
        return x_mxcxnxd.reshape(m * c, n * d)[:I, :J].reshape(shape).astype(dtype)

    def count(self, shape):
        _, _, grid, k = self.plan(shape)
        return math.prod(grid) * k

    def kept(self, shape):
        _, chunks, _, k = self.plan(shape)
        return k / math.prod(chunks)

    def num_bytes(self, shape, dtype):
        count, index = self.count(shape), bits.index_dtype(math.prod(self.plan(shape)[1]))
        return self.values.num_bytes((count,), working_dtype(dtype)) + count * index.itemsize
