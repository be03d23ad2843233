"""Dion: an orthonormal update of rank R in the place of the average gradient, whose two thin factors are what is averaged."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs, registry
from decjax.channel import Channel
from decjax.codecs.codec import dot
from decjax.reduce import low_rank, matrices
from decjax.reduce import reducer as reducer_lib


class DionState(NamedTuple):
    """State of `dion`; one entry for each array that is a matrix or a stack of L matrices I×J, in the order of the tree's leaves.

    Attributes:
        momentum: M_i, [L, I, J], of this worker.
        factor: Q, [L, J, R], the same on all workers.
    """

    momentum: tuple[jax.Array, ...]
    factor: tuple[jax.Array, ...]


@registry.register(
    "reducer",
    "dion",
    optimizer="dion",
    needs="matrices, optimizer dion",
    messages="two thin matrices, the rest as it is",
    memory="1 copy of the matrices, thin matrices",
    source="arXiv 2504.05295",
)
def dion(channel: Channel = Channel(), *, rank: int = 16, momentum: float = 0.95, rest: str = matrices.REST) -> reducer_lib.Reducer:
    """Dion: for matrices an orthonormal update of rank R, of which only the factors are averaged; use optimizer "dion".

        B_i = M_i + G_i;     P = orth( (1/N) Σ_i B_i Q );     R_i = B_iᵀ P;     R = (1/N) Σ_i R_i
        M_i = B_i − (1 − μ) P R_iᵀ;     Q = R with columns of length one;     averaged = sqrt(J/I) P Qᵀ

    A matrix I×J has its outputs in its last axis. M_i is both momentum and memory: what the rank leaves out stays in it whole, and what
    is sent decays by μ. Momenta of workers differ, and their mean is that of one worker with the mean gradient, so the update is too.
    (With P Rᵀ in the place of P R_iᵀ the mean is the same, and each worker's deviation from it would be a random walk.)

    A worker sends 2(N−1)/N · (I + J)R values of a matrix instead of 2(N−1)/N · IJ, and all else as it is, the mean gradient. Any data.

    Args:
        channel: how gradients travel; its seed determines the first Q.
        rank: R; for a matrix with a smaller side, that side.
        momentum: μ in [0, 1).
        rest: names, between bars; arrays with one of them in their path are averaged, and so are vectors.

    Reference: Ahn et al. 2025, arXiv 2504.05295, algorithm 1, with the exchange of its data-parallel form.
    """
    if rank < 1:
        raise ValueError(
            f"reducer 'dion' with rank={rank}: must be at least 1; a quarter of the matrices' width is a common choice"
        )
    if not 0 <= momentum < 1:
        raise ValueError(f"reducer 'dion' with momentum={momentum}: must be at least 0 and less than 1; use 0.95")
    form = _Dion(channel, rank, momentum, rest)
    return reducer_lib.Reducer(form.init, form.reduce, form.num_bytes)


@dataclasses.dataclass(frozen=True)
class _Dion:
    """The functions of the reducer."""

    channel: Channel
    rank: int
    mu: float
    rest: str

    def plan(self, tree: Any) -> tuple[dict[int, tuple[int, int, int]], Any]:
        """(stacks of matrices by position, the dtype of the arithmetic); ValueError if there is no matrix."""
        found, leaves = matrices.stacks(tree, self.rest), jax.tree.leaves(tree)
        if not found:
            raise ValueError("reducer 'dion' updates matrices, and the parameters have none; use reducer 'mean'")
        return found, jnp.result_type(jnp.float32, *(leaves[i].dtype for i in found))

    @property
    def mean(self) -> reducer_lib.Reducer:
        return reducer_lib.mean(self.channel)

    def fresh(self, shape: tuple[int, ...], position: int, dtype: Any) -> jax.Array:
        return low_rank.first_factor(shape, self.channel.seed, position, dtype)

    def init(self, params: Any) -> DionState:
        plan, dtype = self.plan(params)
        return DionState(
            tuple(jnp.zeros(stack, dtype) for stack in plan.values()),
            tuple(self.fresh((L, J, min(self.rank, I, J)), i, dtype) for i, (L, I, J) in plan.items()),
        )

    def reduce(self, grads: Any, state: DionState, phase: int = 0) -> tuple[Any, DionState]:
        leaves, treedef = jax.tree.flatten(grads)
        plan, dtype = self.plan(grads)
        others = [leaf for i, leaf in enumerate(leaves) if i not in plan]
        sums = [leaves[i].reshape(stack).astype(dtype) + m for (i, stack), m in zip(plan.items(), state.momentum)]
        first = [dot(b, q) for b, q in zip(sums, state.factor)]
        (bases, others), _ = self.mean.reduce((first, others), ())
        bases = [jnp.linalg.qr(p)[0] for p in bases]
        own = [dot(b.mT, p) for b, p in zip(sums, bases)]
        means, _ = self.mean.reduce(own, ())

        # Equal on all workers, since it is computed from means.
        finite = codecs.finite((bases, means, [x for x in others if jnp.issubdtype(x.dtype, jnp.floating)]))
        factors = tuple(self.unit(r, i) for i, r in zip(plan, means))
        for i, p, q in zip(plan, bases, factors):
            _, I, J = plan[i]
            leaves[i] = ((J / I) ** 0.5 * dot(jnp.where(finite, p, jnp.nan), q.mT)).reshape(leaves[i].shape).astype(leaves[i].dtype)
        for i, mean in zip((i for i in range(len(leaves)) if i not in plan), others):
            leaves[i] = mean if jnp.issubdtype(mean.dtype, jnp.integer) else jnp.where(finite, mean, jnp.nan)
        momenta = tuple(b - (1 - self.mu) * dot(p, r.mT) for b, p, r in zip(sums, bases, own))
        new = DionState(momenta, factors)
        return treedef.unflatten(leaves), jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)

    def unit(self, r_LxJxR: jax.Array, position: int) -> jax.Array:
        """The matrices with columns of length one; columns that are zero are drawn anew."""
        fresh = self.fresh(r_LxJxR.shape, position, r_LxJxR.dtype)
        revived = jax.vmap(codecs.revived)(r_LxJxR, fresh)
        return revived / jnp.linalg.norm(revived, axis=1, keepdims=True)

    def num_bytes(self, params: Any, num_workers: int, phase: int = 0) -> np.ndarray:
        plan, dtype = self.plan(params)
        shapes = [(L, I, J, min(self.rank, I, J)) for L, I, J in plan.values()]
        first = [jax.ShapeDtypeStruct((L, I, R), dtype) for L, I, _, R in shapes]
        second = [jax.ShapeDtypeStruct((L, J, R), dtype) for L, _, J, R in shapes]
        others = [leaf for i, leaf in enumerate(jax.tree.leaves(params)) if i not in plan]
        return self.mean.num_bytes((first, others), num_workers) + self.mean.num_bytes(second, num_workers)
