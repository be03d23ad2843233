"""PowerSGD: the mean of a rank-R approximation, found by one step of power iteration over all workers at once."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs, mesh, noise, registry
from decjax.channel import Channel
from decjax.codecs.codec import dot
from decjax.reduce import reducer as reducer_lib

FEW_COLUMNS = 8  # products of up to so many columns are computed as sums of outer products


class PowerSGDState(NamedTuple):
    """State of `powersgd`; one entry for each array that is compressed, in the order of the tree's leaves.

    Attributes:
        error: e_IxJ, what this worker has not sent.
        factor: q_JxR, the same on all workers.
    """

    error: tuple[jax.Array, ...]
    factor: tuple[jax.Array, ...]


class _Plan(NamedTuple):
    """Which leaves of a tree are compressed."""

    matrices: dict[int, tuple[int, int, int]]  # position of a leaf -> I, J, R
    dense: tuple[int, ...]  # positions of the other floating-point leaves
    dtype: Any  # of the arithmetic, float32 or wider


@registry.register(
    "reducer", "powersgd", needs="matrices", messages="thin matrices, the rest as it is", memory="1 copy, thin matrices"
)
def powersgd(
    channel: Channel = Channel(), *, rank: int = 4, gate: float = 1.0, wire_dtype: str | None = None
) -> reducer_lib.Reducer:
    """PowerSGD: the mean of rank-R approximations of the gradients, with error feedback.

        A_i = G_i + e_i;     P = orth( (1/N) Σ_i A_i Q );     Q_i = A_iᵀ P;     Q = (1/N) Σ_i Q_i
        averaged = P Qᵀ;     e_i = A_i − P Q_iᵀ

    G_i is a worker's gradient, e_i its error, Q the last step's factor, the same on all workers. Arrays of two or more dimensions are
    seen as matrices I×J, cut where I + J is least; others, and those that would not get smaller, are averaged as they are, in one
    message with all P. A worker sends 2(N−1)/N · (I + J)R values of a matrix instead of 2(N−1)/N · IJ, in two collectives per step.
    Each worker keeps what it did not send, Σ sent + e = Σ G, so errors stay bounded. (PyTorch's hook keeps A_i − P Qᵀ, which includes
    the other workers' deviations and grows as a random walk.) `init` and `num_bytes` raise ValueError if nothing would be compressed.

    Differences from the paper: columns of Q are normalized before use, which changes no span and keeps products of small gradients
    from underflowing; a column that is zero compared with the others, and would stay zero for ever, is drawn anew.

    Args:
        channel: how gradients travel; its seed determines the first factors.
        rank: R; for a matrix with a smaller side, that side.
        gate: ρ; arrays with (I + J)R ≥ ρIJ are averaged as they are. Infinity compresses all matrices.
        wire_dtype: floating-point type in which the factors travel, such as "bfloat16"; None: that of the arithmetic. Errors include
            what the cast of a worker's own Q_i loses, but not the rounding of the mean Q, which is the same on all workers. Narrow
            values are summed in float32, by all-to-all and all-gather.

    Reference: Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2.

    Examples:
        >>> tx = decjax.synchronize(optax.adamw(1e-3), decjax.reduce.powersgd(rank=4))
    """
    if rank < 1:
        raise ValueError(f"PowerSGD rank={rank}: must be at least 1; 4 is a common choice")
    if not gate > 0:
        raise ValueError(f"PowerSGD gate={gate}: must be positive; 1 compresses whatever gets smaller")
    try:
        wire = jnp.dtype(wire_dtype) if wire_dtype else None
    except TypeError:
        wire = np.dtype(bool)
    if wire is not None and not jnp.issubdtype(wire, jnp.floating):
        raise ValueError(f"PowerSGD wire_dtype={wire_dtype!r} is no floating-point type; use 'bfloat16', 'float16' or none")
    power = _PowerSGD(channel, rank, gate, wire)
    return reducer_lib.Reducer(power.init, power.reduce, power.num_bytes)


@dataclasses.dataclass(frozen=True)
class _PowerSGD:
    """The functions of the reducer."""

    channel: Channel
    rank: int
    gate: float
    wire_dtype: np.dtype | None

    def _plan(self, tree: Any) -> _Plan:
        leaves, rank, gate = jax.tree.leaves(tree), self.rank, self.gate
        floating = [i for i, leaf in enumerate(leaves) if leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating)]
        views = {i: view for i in floating if (view := codecs.matrix_shape(leaves[i].shape))}
        matrices = {i: (I, J, min(rank, I, J)) for i, (I, J) in views.items() if (I + J) * rank < gate * I * J}
        if not matrices:
            least = max((min(view) for view in views.values()), default=0)
            most = max((math.ceil(gate * I * J / (I + J)) - 1 for I, J in views.values()), default=0)
            raise ValueError(
                f"PowerSGD rank={rank} makes no array smaller: the smaller sides of the matrices are at most {least}; "
                + (f"use a rank of at most {most}, or reducer 'mean'" if most else "use reducer 'mean'")
            )
        dtype = jnp.result_type(jnp.float32, *(leaves[i].dtype for i in floating))
        return _Plan(matrices, tuple(i for i in floating if i not in matrices), dtype)

    def _factor(self, shape: tuple[int, ...], i: int, dtype: Any) -> jax.Array:
        """The first Q of leaf i: pseudorandom numbers in [−1, 1), by a hash that is much cheaper than random bits."""
        return 2 * noise.uniform(shape, (jnp.uint32(self.channel.seed % 2**32), jnp.uint32(i))).astype(dtype) - 1

    def init(self, params: Any) -> PowerSGDState:
        matrices, _, dtype = self._plan(params)
        return PowerSGDState(
            tuple(jnp.zeros((I, J), dtype) for I, J, _ in matrices.values()),
            tuple(self._factor((J, R), i, dtype) for i, (_, J, R) in matrices.items()),
        )

    def reduce(self, grads: Any, state: PowerSGDState, phase: int = 0) -> tuple[Any, PowerSGDState]:
        leaves, treedef = jax.tree.flatten(grads)
        matrices, dense, dtype = self._plan(grads)
        wire = self.wire_dtype or dtype
        targets = [leaves[i].reshape(I, J).astype(dtype) + e for (i, (I, J, _)), e in zip(matrices.items(), state.error)]
        factors = [_unit(codecs.revived(q, self._factor(q.shape, i, q.dtype))) for i, q in zip(matrices, state.factor)]
        bases, rest = self._first([dot(a, q) for a, q in zip(targets, factors)], [leaves[i].astype(dtype) for i in dense], wire)
        received = [*bases, *rest]
        bases = _orthogonalized(bases)
        # PᵀA rather than AᵀP: compilers for CPUs transpose large matrices slowly.
        own = [dot(p.T, a).astype(wire).astype(dtype) for p, a in zip(bases, targets)]
        means = _means(own, self.channel.axis, wire)

        # Equal on all workers, since it is computed from means.
        finite = jnp.stack([jnp.isfinite(x).all() for x in (*received, *means)]).all()
        products = (_product(jnp.where(finite, p, jnp.nan), q) for p, q in zip(bases, means))
        for i, mean in zip((*matrices, *dense), (*products, *rest)):
            leaves[i] = mean.reshape(leaves[i].shape).astype(leaves[i].dtype)
        error = tuple(jnp.where(finite, a - _product(p, q), e) for a, p, q, e in zip(targets, bases, own, state.error))
        factor = tuple(jnp.where(finite, q.T, old) for q, old in zip(means, state.factor))
        return treedef.unflatten(leaves), PowerSGDState(error, factor)

    def _first(self, bases: list[jax.Array], rest: list[jax.Array], wire: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """Means of the Ps and of the rest, in one message where they are of one type."""
        axis = self.channel.axis
        if wire != bases[0].dtype:  # There is at least one matrix.
            return _means(bases, axis, wire), _means(rest, axis)
        means = _means([*bases, *rest], axis)
        return means[: len(bases)], means[len(bases) :]

    def num_bytes(self, params: Any, num_workers: int, phase: int = 0) -> np.ndarray:
        leaves = jax.tree.leaves(params)
        matrices, dense, dtype = self._plan(params)
        wire = None if self.wire_dtype == dtype else self.wire_dtype
        messages = [
            (sum(I * R for I, _, R in matrices.values()), wire),
            (sum(J * R for _, J, R in matrices.values()), wire),
            (sum(leaves[i].size for i in dense), None),
        ]
        return np.full(num_workers, sum(mesh.mean_bytes(size, dtype, num_workers, wire) for size, wire in messages))


def _product(p_IxR: jax.Array, q_RxJ: jax.Array) -> jax.Array:
    """The matrix P Q; for few columns a sum of outer products, which the compiler fuses with what uses it."""
    if len(q_RxJ) > FEW_COLUMNS:
        return dot(p_IxR, q_RxJ)
    product: Any = sum(p_I[:, None] * q_J for p_I, q_J in zip(p_IxR.T, q_RxJ))
    return product


def _means(arrays: list[jax.Array], axis: mesh.Axis, wire_dtype: Any = None) -> list[jax.Array]:
    """The means over all workers of arrays of one dtype, sent as one message."""
    if not arrays:
        return []
    joint = axis.mean(arrays[0].ravel() if len(arrays) == 1 else jnp.concatenate([x.ravel() for x in arrays]), wire_dtype)
    ends = np.cumsum([x.size for x in arrays])
    return [joint[end - x.size : end].reshape(x.shape) for x, end in zip(arrays, ends)]


def _orthogonalized(bases: list[jax.Array]) -> list[jax.Array]:
    """For each matrix orthonormal columns of the same span, dependent ones replaced by arbitrary ones; equal shapes at once."""
    orthogonal = list(bases)
    for shape in dict.fromkeys(p.shape for p in bases):
        positions = [i for i, p in enumerate(bases) if p.shape == shape]
        for i, p in zip(positions, jnp.linalg.qr(jnp.stack([bases[i] for i in positions]))[0]):
            orthogonal[i] = p
    return orthogonal


def _unit(q_JxR: jax.Array) -> jax.Array:
    """The matrix with columns scaled to length one."""
    return q_JxR / jnp.linalg.norm(q_JxR, axis=0)
