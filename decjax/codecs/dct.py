"""The largest coefficients of a chunked cosine transform, as in DeMo.

A matrix is cut into chunks of c×c values, a vector into chunks of c; each is transformed by the orthonormal DCT-II,

    X = D x Dᵀ,   D_ui = √(2/c) cos(π u (2i + 1)/2c),   D_0i = √(1/c),

and of its coefficients the largest are sent. The transform keeps lengths, so that ‖x − x̂‖² ≤ (1 − k/c²)‖x‖².
A side shorter than c has chunks of its own length; the last chunk of a longer one is filled with zeros.

Reference: Peng et al. 2024, "DeMo: decoupled momentum optimization", which takes the largest divisor up to c instead.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from decjax import registry
from decjax.codecs import bits
from decjax.codecs.codec import Codec, Traits, matrix_shape, working_dtype
from decjax.codecs.sparse import check_fraction, largest, made_values


def _basis(length: int, dtype) -> jax.Array:
    u_L = np.arange(length)
    basis_LxL = np.sqrt(2 / length) * np.cos(np.pi * u_L[:, None] * (2 * u_L + 1) / (2 * length))
    basis_LxL[0] = np.sqrt(1 / length)
    return jnp.asarray(basis_LxL, dtype)


@registry.register("codec", "dct", messages="the largest cosine coefficients of each chunk")
def dct(fraction: float = 1 / 128, chunk: int = 64, values: Codec | str = "identity") -> Codec:
    """The largest share φ of the cosine coefficients of every chunk.

    Args:
        fraction: φ; of a chunk of C coefficients ⌈φC⌉ are sent.
        chunk: c.
        values: the form of the coefficients that are sent.
    """
    check_fraction("dct", fraction)
    values = made_values("dct", values)
    if chunk < 1:
        raise ValueError(f"dct chunk={chunk} must be at least 1 value; 64 is the default")
    form = _Chunked(fraction, chunk, values)
    traits = Traits(contractive=form.delta if values.traits.contractive else None, matrix=True)
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
        del state, key
        (I, J), (c, d), (m, n), k = self.plan(x.shape)
        dtype = working_dtype(x.dtype)
        x_IxJ = jnp.pad(x.reshape(I, J).astype(dtype), ((0, m * c - I), (0, n * d - J)))
        coefficients_MxC = jnp.einsum(
            "ui,minj,vj->mnuv", _basis(c, dtype), x_IxJ.reshape(m, c, n, d), _basis(d, dtype), precision=jax.lax.Precision.HIGHEST
        ).reshape(m * n, c * d)
        magnitude_MxC = jnp.where(jnp.isnan(coefficients_MxC), jnp.inf, jnp.abs(coefficients_MxC))
        where_Mxk = largest(magnitude_MxC, k)
        sent_Mxk = jnp.take_along_axis(coefficients_MxC, where_Mxk, axis=1)
        return {"values": self.values.encode(sent_Mxk.ravel(), (), None), "where": where_Mxk.astype(bits.index_dtype(c * d))}

    def decode(self, message, shape, dtype):
        (I, J), (c, d), (m, n), k = self.plan(shape)
        wide = working_dtype(dtype)
        sent_Mxk = self.values.decode(message["values"], (m * n * k,), wide).reshape(m * n, k)
        coefficients_MxC = (
            jnp.zeros((m * n, c * d), wide)
            .at[jnp.arange(m * n)[:, None], message["where"].astype(jnp.int32)]
            .set(sent_Mxk, unique_indices=True)
        )
        x_IxJ = jnp.einsum(
            "ui,mnuv,vj->minj",
            _basis(c, wide),
            coefficients_MxC.reshape(m, n, c, d),
            _basis(d, wide),
            precision=jax.lax.Precision.HIGHEST,
        ).reshape(m * c, n * d)
        return x_IxJ[:I, :J].reshape(shape).astype(dtype)

    def num_bytes(self, shape, dtype):
        _, chunks, grid, k = self.plan(shape)
        count = math.prod(grid) * k
        return self.values.num_bytes((count,), working_dtype(dtype)) + count * bits.index_dtype(math.prod(chunks)).itemsize

    def delta(self, shape):
        contractive = self.values.traits.contractive
        assert contractive is not None  # Or nobody is told of this.
        _, chunks, grid, k = self.plan(shape)
        return k / math.prod(chunks) * contractive((math.prod(grid) * k,))
