"""The codec "low_rank": a matrix as two thin ones."""

import math

import jax
import jax.numpy as jnp

from decjax import noise
from decjax.codecs.codec import OfValues, dot, finite, matrix_shape, working_dtype
from decjax.options import Count
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
