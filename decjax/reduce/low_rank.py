"""What reducers of low rank share: their options, matrices and factors, and means of many small matrices."""

from collections.abc import Sequence
import functools
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, codecs, mesh, noise
from decjax.codecs.codec import dot
from decjax.options import Positive, Range
from decjax.reduce.reducer import Reducer
from decjax.typing import DType, PyTree, Shape

Rank = Annotated[int, Range(1, 2**14)]

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


class Factored(Reducer):
    """Base of reducers that send thin factors of matrices.

    Attributes:
        channel: how gradients travel; its seed determines the first factors.
        rank: R; for a matrix with a smaller side, that side.
        gate: ρ; arrays with (I + J)R ≥ ρIJ are averaged uncompressed. Infinity compresses all matrices.
        wire_dtype: floating-point type in which the factors travel, such as "bfloat16"; None: that of the arithmetic.
    """

    rank: Rank = 4
    gate: Positive = 1.0
    wire_dtype: str | None = None

    def __post_init__(self):
        _ = self._wire

    @functools.cached_property
    def _wire(self) -> np.dtype | None:
        try:
            wire = jnp.dtype(self.wire_dtype) if self.wire_dtype else None
        except TypeError:
            wire = np.dtype(bool)
        if wire is not None and not jnp.issubdtype(wire, jnp.floating):
            raise ValueError(f"{self}: wire_dtype={self.wire_dtype!r} is no floating-point type; use 'bfloat16', 'float16' or none")
        return wire

    def _plan(self, tree: PyTree) -> Plan:
        """Return the matrices of a tree with (I + J)R < ρIJ; ValueError if there are none."""
        buckets.check(tree)
        leaves = jax.tree.leaves(tree)
        floating = [i for i, leaf in enumerate(leaves) if leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating)]
        views = {i: view for i in floating if (view := codecs.matrix_shape(leaves[i].shape))}
        matrices = {i: (I, J, min(self.rank, I, J)) for i, (I, J) in views.items() if (I + J) * self.rank < self.gate * I * J}
        if not matrices:
            least = max((min(view) for view in views.values()), default=0)
            most = max((math.ceil(self.gate * I * J / (I + J)) - 1 for I, J in views.values()), default=0)
            raise ValueError(
                f"{self}: rank={self.rank} makes no array smaller: the smaller sides of the matrices are at most {least}; "
                + (f"use a rank of at most {most}, or reducer 'mean'" if most else "use reducer 'mean'")
            )
        dtype = jnp.result_type(jnp.float32, *(leaves[i].dtype for i in floating))
        return Plan(matrices, tuple(i for i in floating if i not in matrices), dtype)

    def _first(self, shape: Shape, position: int, dtype: DType) -> jax.Array:
        return first_factor(shape, self.channel.seed, position, dtype)

    def _message_bytes(self, params: PyTree, num_workers: int, sides: Sequence[int]) -> np.ndarray:
        """Return the bytes, (N,), that each worker sends in a message of factors per side (0: I×R, 1: J×R), and one of the others."""
        plan, leaves = self._plan(params), jax.tree.leaves(params)
        wire = None if self._wire == plan.dtype else self._wire
        messages = [(sum(view[side] * view[2] for view in plan.matrices.values()), wire) for side in sides]
        messages.append((sum(leaves[i].size for i in plan.dense), None))
        return np.full(num_workers, sum(mesh.mean_bytes(size, plan.dtype, num_workers, wire) for size, wire in messages))


def first_factor(shape: Shape, seed: int, i: int, dtype: DType) -> jax.Array:
    """Return the first factor of leaf i: pseudorandom numbers in [−1, 1), by a hash that is much cheaper than random bits."""
    return 2 * noise.uniform(shape, (jnp.uint32(seed % 2**32), jnp.uint32(i))).astype(dtype) - 1


def product(p_IxR: jax.Array, q_RxJ: jax.Array) -> jax.Array:
    """Return the matrix P Q; for few columns a sum of outer products, which the compiler fuses with what uses it."""
    if len(q_RxJ) > FEW_COLUMNS:
        return dot(p_IxR, q_RxJ)
    total: Any = sum(p_I[:, None] * q_J[None] for p_I, q_J in zip(p_IxR.T, q_RxJ))
    return total


def means(arrays: list[jax.Array], axis: mesh.Axis, wire_dtype: DType | None = None) -> list[jax.Array]:
    """Return the means over all workers of arrays of one dtype, sent as one message."""
    if not arrays:
        return []
    joint = axis.mean(arrays[0].ravel() if len(arrays) == 1 else jnp.concatenate([x.ravel() for x in arrays]), wire_dtype)
    ends = np.cumsum([x.size for x in arrays])
    return [joint[end - x.size : end].reshape(x.shape) for x, end in zip(arrays, ends)]


def means_with(
    rest: list[jax.Array], factors: list[jax.Array], axis: mesh.Axis, wire_dtype: DType
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the means of factors and of the rest, in one message where they are of one type."""
    if wire_dtype != factors[0].dtype:  # There is at least one matrix.
        return means(factors, axis, wire_dtype), means(rest, axis)
    joint = means([*factors, *rest], axis)
    return joint[: len(factors)], joint[len(factors) :]


def orthogonalized(bases: list[jax.Array]) -> list[jax.Array]:
    """Return for each matrix orthonormal columns of the same span, dependent ones replaced by arbitrary ones; equal shapes at once."""
    orthogonal = list(bases)
    for shape in dict.fromkeys(p.shape for p in bases):
        positions = [i for i, p in enumerate(bases) if p.shape == shape]
        for i, p in zip(positions, jnp.linalg.qr(jnp.stack([bases[i] for i in positions]))[0]):
            orthogonal[i] = p
    return orthogonal


def unit(q_JxR: jax.Array) -> jax.Array:
    """Return the matrix with columns scaled to length one."""
    return q_JxR / jnp.linalg.norm(q_JxR, axis=0, keepdims=True)
