"""The directions in which samples vary most: principal component analysis, without a mean.

    C = xᵀx / M = Σ_k λ_k e_k e_kᵀ,  λ_1 ≥ … ≥ λ_D ≥ 0        E = (e_1 … e_R)
    (1/M) ‖x − x E Eᵀ‖² = λ_{R+1} + … + λ_D                    no projection onto R directions loses less

The second moments C are not centered, so that x E Eᵀ needs no bias. A caller that stores a bias subtracts the mean of x first.
"""

import jax
import jax.numpy as jnp


def principal(x_MxD: jax.Array, R: int) -> tuple[jax.Array, jax.Array]:
    """Return (E [D, R] of orthonormal columns, the D − R discarded eigenvalues, largest first), in the dtype of x.

    The entry of largest magnitude of each column is positive. Where M < D, the last columns are some orthonormal ones, as good as any
    others. A value of x that is not finite makes all of E NaN.

    Args:
        x_MxD: M samples of D features, in float32 at least.
        R: from 1 to D; with R = D nothing is lost but for rounding.

    Reference: Yu et al. 2024, arXiv 2405.18146; Yu and Wu 2023, doi 10.1609/aaai.v37i9.26304; both for centered features.
    """
    M, D = x_MxD.shape
    if not 1 <= R <= D:
        raise ValueError(f"rank {R} of {D} features: must be from 1 to {D}")
    if not M:
        raise ValueError(f"no sample of {D} features; give at least one")
    value_D, vector_DxD = jnp.linalg.eigh(x_MxD.T @ x_MxD / M)  # in ascending order
    vector_DxD, value_D = vector_DxD[:, ::-1], jnp.maximum(value_D[::-1], 0)
    largest_1xD = jnp.take_along_axis(vector_DxD, jnp.abs(vector_DxD).argmax(axis=0)[None], axis=0)
    return (vector_DxD * jnp.where(largest_1xD < 0, -1, 1))[:, :R], value_D[R:]
