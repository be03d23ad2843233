"""Reducers that send thin factors of matrices: PowerSGD, and its form in iterations of one side."""

from collections.abc import Iterable, Sequence
import functools
import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, codecs, mesh, noise
from decjax.codecs.codec import dot
from decjax.options import Count, Positive, Range
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
    dtype: DType


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
            raise ValueError(
                f"{self}: wire_dtype={self.wire_dtype!r} must be a floating-point type; use 'bfloat16', 'float16' or none"
            )
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

    def _targets(self, grads: PyTree, error: tuple[jax.Array, ...]) -> tuple[Plan, list[jax.Array], list[jax.Array]]:
        """Return the plan, the matrices G_i + e_i, and the other arrays, all in the type of the arithmetic."""
        plan, leaves = self._plan(grads), jax.tree.leaves(grads)
        targets = [leaves[i].reshape(I, J).astype(plan.dtype) + e for (i, (I, J, _)), e in zip(plan.matrices.items(), error)]
        return plan, targets, [leaves[i].astype(plan.dtype) for i in plan.dense]

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


def replaced(tree: PyTree, positions: Iterable[int], arrays: Iterable[jax.Array]) -> PyTree:
    """Return a tree with the leaves at some positions replaced by arrays, in the shapes and types of the leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    for i, x in zip(positions, arrays):
        leaves[i] = x.reshape(leaves[i].shape).astype(leaves[i].dtype)
    return treedef.unflatten(leaves)


def all_finite(arrays: Iterable[jax.Array]) -> jax.Array:
    """Return whether all values are finite; equal on all workers for means."""
    return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()


def product(p_IxR: jax.Array, q_RxJ: jax.Array) -> jax.Array:
    """Return the matrix P Q; for few columns a sum of outer products, which the compiler fuses with what uses it."""
    if len(q_RxJ) > FEW_COLUMNS:
        return dot(p_IxR, q_RxJ)
    return jnp.asarray(sum(p_I[:, None] * q_J[None] for p_I, q_J in zip(p_IxR.T, q_RxJ)))


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


class PowerSGDState(NamedTuple):
    """State of `PowerSGD`; one entry for each array that is compressed, in the order of the tree's leaves.

    Attributes:
        error: e_IxJ, what this worker has not sent.
        factor: q_JxR, the same on all workers.
    """

    error: tuple[jax.Array, ...]
    factor: tuple[jax.Array, ...]


class PowerSGD(Factored, name="powersgd"):
    """PowerSGD: the mean of rank-R approximations of the gradients, with error feedback.

        A_i = G_i + e_i;     P = orth( (1/N) Σ_i A_i Q );     Q_i = A_iᵀ P;     Q = (1/N) Σ_i Q_i
        averaged = P Qᵀ;     e_i = A_i − P Q_iᵀ

    G_i is a worker's gradient, e_i its error, Q the last step's factor, the same on all workers. Arrays of two or more dimensions are
    seen as matrices I×J, cut where I + J is least; others, and those that would not get smaller, are averaged uncompressed, in one
    message with all P. A worker sends 2(N−1)/N · (I + J)R values of a matrix instead of 2(N−1)/N · IJ, in two collectives per step.
    Each worker keeps what it did not send, Σ sent + e = Σ G, so errors stay bounded. (PyTorch's hook keeps A_i − P Qᵀ, which includes
    the other workers' deviations and grows as a random walk.) `init` and `num_bytes` raise ValueError if nothing would be compressed.

    Differences from the paper: columns of Q are normalized before use, which changes no span and keeps products of small gradients
    from underflowing; a column that is negligible compared with the others would stay zero, and is redrawn.

    Attributes:
        wire_dtype: floating-point type in which the factors travel, such as "bfloat16"; None: that of the arithmetic. Errors include
            what the cast of a worker's own Q_i loses, but not the rounding of the mean Q, which is the same on all workers. Narrow
            values are summed in float32, by all-to-all and all-gather.

    Reference: Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2.

    Examples:
        >>> tx = decjax.synchronize(optax.adamw(1e-3), decjax.reduce.powersgd(rank=4))
    """

    needs = "matrices"
    messages = "thin matrices, the rest uncompressed"
    memory = "1 copy, thin matrices"
    sharded = True

    def init(self, params):
        matrices, _, dtype = self._plan(params)
        return PowerSGDState(
            tuple(jnp.zeros((I, J), dtype) for I, J, _ in matrices.values()),
            tuple(self._first((J, R), i, dtype) for i, (_, J, R) in matrices.items()),
        )

    def reduce(self, grads, state: PowerSGDState, phase=0):
        (matrices, dense, dtype), targets, others = self._targets(grads, state.error)
        wire = self._wire or dtype
        factors = [unit(codecs.revived(q, self._first(q.shape, i, q.dtype))) for i, q in zip(matrices, state.factor)]
        bases, rest = means_with(others, [dot(a, q) for a, q in zip(targets, factors)], self.channel.axis, wire)
        received = [*bases, *rest]
        bases = orthogonalized(bases)
        # PᵀA rather than AᵀP: compilers for CPUs transpose large matrices slowly.
        own = [dot(p.T, a).astype(wire).astype(dtype) for p, a in zip(bases, targets)]
        columns = means(own, self.channel.axis, wire)
        finite = all_finite((*received, *columns))
        products = [product(jnp.where(finite, p, jnp.nan), q) for p, q in zip(bases, columns)]
        averaged = replaced(grads, (*matrices, *dense), (*products, *rest))
        error = tuple(jnp.where(finite, a - product(p, q), e) for a, p, q, e in zip(targets, bases, own, state.error))
        factor = tuple(jnp.where(finite, q.T, old) for q, old in zip(columns, state.factor))
        return averaged, PowerSGDState(error, factor)

    def num_bytes(self, params, num_workers, phase=0):
        return self._message_bytes(params, num_workers, [0, 1])


class OneSidedState(NamedTuple):
    """State of `OneSided`; one entry for each array that is compressed, in the order of the tree's leaves.

    Attributes:
        error: e_IxJ, what this worker has not sent.
        rows, columns: the last factors p_IxR and q_JxR, the same on all workers.
    """

    error: tuple[jax.Array, ...]
    rows: tuple[jax.Array, ...]
    columns: tuple[jax.Array, ...]


class OneSided(Factored, name="powersgd_one_sided"):
    """PowerSGD whose K iterations each send one factor and continue with the remainder, on alternating sides of the matrices.

        A_i = G_i + e_i, Y = 0;  then K times, of the two lines in turns:
            Q̂ = orth(Q);   P_i = A_i Q̂;     P = (1/N) Σ_i P_i;   Y ← Y + P Q̂ᵀ;   A_i ← A_i − P_i Q̂ᵀ
            P̂ = orth(P);   Q_i = A_iᵀ P̂;    Q = (1/N) Σ_i Q_i;   Y ← Y + P̂ Qᵀ;   A_i ← A_i − P̂ Q_iᵀ
        averaged = Y;     e_i = A_i

    Symbols are those of `powersgd`. With K = 2 a step sends as many bytes as there, and both messages carry values, where
    PowerSGD's first one only finds the basis of the second: where singular values fall fast, less is left unsent. With K = 1 a
    step sends half of that, with K odd the next step starts with the other side. A worker sends 2(N−1)/N · R values for each row,
    and for each column, of a matrix and iteration of that side, in K collectives per step.

    Attributes:
        iterations: K.

    Reference: the form of the library of PowerSGD's authors (`powersgd` on PyPI, num_iters_per_step); Vogels et al. 2019, arXiv
    1905.13727, for the method.
    """

    needs = "matrices"
    messages = "a thin matrix for each iteration, the rest uncompressed"
    memory = "1 copy, thin matrices"
    sharded = True

    iterations: Count = 2

    @property
    def phases(self):
        return range(1 + self.iterations % 2)

    def phase(self, step):
        return step % len(self.phases)

    def _turns(self, phase: int | None) -> range:
        return range((phase or 0) * self.iterations, ((phase or 0) + 1) * self.iterations)

    def _fresh(self, shape: Shape, i: int, side: int, dtype: DType) -> jax.Array:
        return self._first(shape, 2 * i + side, dtype)

    def init(self, params):
        matrices, _, dtype = self._plan(params)
        factors = [tuple(self._fresh((view[side], view[2]), i, side, dtype) for i, view in matrices.items()) for side in (0, 1)]
        return OneSidedState(tuple(jnp.zeros(view[:2], dtype) for view in matrices.values()), *factors)

    def reduce(self, grads, state: OneSidedState, phase=0):
        plan, left, unsent = self._targets(grads, state.error)
        sent, factors = [jnp.zeros_like(a) for a in left], [state.rows, state.columns]
        rest, received = [], []
        for turn in self._turns(phase):
            side = (turn + 1) % 2  # of the basis: columns first
            bases, own = self._project(plan, left, factors[side], side)
            averages, others = means_with(unsent, own, self.channel.axis, self._wire or plan.dtype)
            left = [a - _spread(x, basis, side) for a, x, basis in zip(left, own, bases)]
            sent = [y + _spread(x, basis, side) for y, x, basis in zip(sent, averages, bases)]
            factors[1 - side], rest, unsent = tuple(averages), rest + others, []
            received += averages + others
        finite = all_finite(received)
        averaged = replaced(grads, (*plan.matrices, *plan.dense), (*(jnp.where(finite, y, jnp.nan) for y in sent), *rest))
        new = OneSidedState(tuple(left), *factors)
        return averaged, jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)

    def _project(
        self, plan: Plan, left: list[jax.Array], factors: tuple[jax.Array, ...], side: int
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the bases of a side that the last factors span, and this worker's matrices projected on them, as they will travel."""
        fresh = [self._fresh(factor.shape, i, side, factor.dtype) for i, factor in zip(plan.matrices, factors)]
        bases = orthogonalized([unit(codecs.revived(q, new)) for q, new in zip(factors, fresh)])
        # (BᵀA)ᵀ rather than AᵀB: compilers for CPUs transpose large matrices slowly.
        own = [dot(a, basis) if side else dot(basis.T, a).T for a, basis in zip(left, bases)]
        return bases, [x.astype(self._wire or plan.dtype).astype(plan.dtype) for x in own]

    def num_bytes(self, params, num_workers, phase=0):
        return self._message_bytes(params, num_workers, [turn % 2 for turn in self._turns(phase)])


def _spread(factor: jax.Array, basis: jax.Array, side: int) -> jax.Array:
    """Return the matrix of a factor and the basis of the columns (side 1) or rows (side 0)."""
    return product(factor, basis.T) if side else product(basis, factor.T)
