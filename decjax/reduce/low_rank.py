"""What reducers of low rank share: which arrays they see as matrices, their factors, and means of many small matrices."""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs, mesh, noise
from decjax.codecs.codec import dot

FEW_COLUMNS = 8  # products of up to so many columns are computed as sums of outer products


class Plan(NamedTuple):
    """Which leaves of a tree are compressed.

    Attributes:
        matrices: position of a leaf -> (I, J, R), its shape as a matrix and its rank.
        dense: positions of the other floating-point leaves.
        dtype: of the arithmetic, float32 or wider.
    """

    matrices: dict[int, tuple[int, int, int]]
    dense: tuple[int, ...]
    dtype: Any


def plan(name: str, tree: Any, rank: int, gate: float) -> Plan:
    """The matrices of a tree with (I + J)R < ρIJ; ValueError, which names the reducer, if there are none."""
    leaves = jax.tree.leaves(tree)
    floating = [i for i, leaf in enumerate(leaves) if leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating)]
    views = {i: view for i in floating if (view := codecs.matrix_shape(leaves[i].shape))}
    matrices = {i: (I, J, min(rank, I, J)) for i, (I, J) in views.items() if (I + J) * rank < gate * I * J}
    if not matrices:
        least = max((min(view) for view in views.values()), default=0)
        most = max((math.ceil(gate * I * J / (I + J)) - 1 for I, J in views.values()), default=0)
        raise ValueError(
            f"{name} rank={rank} makes no array smaller: the smaller sides of the matrices are at most {least}; "
            + (f"use a rank of at most {most}, or reducer 'mean'" if most else "use reducer 'mean'")
        )
    dtype = jnp.result_type(jnp.float32, *(leaves[i].dtype for i in floating))
    return Plan(matrices, tuple(i for i in floating if i not in matrices), dtype)


def check_options(name: str, rank: int, gate: float) -> None:
    """ValueError for a rank or a gate that no matrix can have."""
    if rank < 1:
        raise ValueError(f"{name} rank={rank}: must be at least 1; 4 is a common choice")
    if not gate > 0:
        raise ValueError(f"{name} gate={gate}: must be positive; 1 compresses whatever gets smaller")


def wire_type(name: str, wire_dtype: str | None) -> np.dtype | None:
    """The type in which factors travel; ValueError if it is none of floating point."""
    try:
        wire = jnp.dtype(wire_dtype) if wire_dtype else None
    except TypeError:
        wire = np.dtype(bool)
    if wire is not None and not jnp.issubdtype(wire, jnp.floating):
        raise ValueError(f"{name} wire_dtype={wire_dtype!r} is no floating-point type; use 'bfloat16', 'float16' or none")
    return wire


def message_bytes(plan: Plan, params: Any, num_workers: int, sides: Sequence[int], wire_dtype: Any) -> np.ndarray:
    """Bytes that each worker sends in a message of factors for each of the sides (0: I×R, 1: J×R), and one of the other arrays, (N,)."""
    wire = None if wire_dtype == plan.dtype else wire_dtype
    leaves = jax.tree.leaves(params)
    messages = [(sum(view[side] * view[2] for view in plan.matrices.values()), wire) for side in sides]
    messages.append((sum(leaves[i].size for i in plan.dense), None))
    return np.full(num_workers, sum(mesh.mean_bytes(size, plan.dtype, num_workers, wire) for size, wire in messages))


def first_factor(shape: tuple[int, ...], seed: int, i: int, dtype: Any) -> jax.Array:
    """The first factor of leaf i: pseudorandom numbers in [−1, 1), by a hash that is much cheaper than random bits."""
    return 2 * noise.uniform(shape, (jnp.uint32(seed % 2**32), jnp.uint32(i))).astype(dtype) - 1


def product(p_IxR: jax.Array, q_RxJ: jax.Array) -> jax.Array:
    """The matrix P Q; for few columns a sum of outer products, which the compiler fuses with what uses it."""
    if len(q_RxJ) > FEW_COLUMNS:
        return dot(p_IxR, q_RxJ)
    total: Any = sum(p_I[:, None] * q_J[None] for p_I, q_J in zip(p_IxR.T, q_RxJ))
    return total


def means(arrays: list[jax.Array], axis: mesh.Axis, wire_dtype: Any = None) -> list[jax.Array]:
    """The means over all workers of arrays of one dtype, sent as one message."""
    if not arrays:
        return []
    joint = axis.mean(arrays[0].ravel() if len(arrays) == 1 else jnp.concatenate([x.ravel() for x in arrays]), wire_dtype)
    ends = np.cumsum([x.size for x in arrays])
    return [joint[end - x.size : end].reshape(x.shape) for x, end in zip(arrays, ends)]


def means_with(
    rest: list[jax.Array], factors: list[jax.Array], axis: mesh.Axis, wire_dtype: Any
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Means of factors and of the rest, in one message where they are of one type."""
    if wire_dtype != factors[0].dtype:  # There is at least one matrix.
        return means(factors, axis, wire_dtype), means(rest, axis)
    joint = means([*factors, *rest], axis)
    return joint[: len(factors)], joint[len(factors) :]


def orthogonalized(bases: list[jax.Array]) -> list[jax.Array]:
    """For each matrix orthonormal columns of the same span, dependent ones replaced by arbitrary ones; equal shapes at once."""
    orthogonal = list(bases)
    for shape in dict.fromkeys(p.shape for p in bases):
        positions = [i for i, p in enumerate(bases) if p.shape == shape]
        for i, p in zip(positions, jnp.linalg.qr(jnp.stack([bases[i] for i in positions]))[0]):
            orthogonal[i] = p
    return orthogonal


def unit(q_JxR: jax.Array) -> jax.Array:
    """The matrix with columns scaled to length one."""
    return q_JxR / jnp.linalg.norm(q_JxR, axis=0, keepdims=True)
