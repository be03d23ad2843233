"""The reducer "dion"."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from decjax import buckets, codecs
from decjax.codecs.codec import dot
from decjax.optim import matrices
from decjax.options import Decay
from decjax.reduce.low_rank import Rank, first_factor
from decjax.reduce.reducer import Mean, Reducer
from decjax.typing import DType, PyTree, Shape


def stacks(tree: PyTree, rest: str = matrices.REST) -> dict[int, tuple[int, int, int]]:
    """Return (number of matrices, I, J) of each leaf that is a matrix or a stack of matrices I×J, by its position."""
    shapes = {}
    for position, (path, x) in enumerate(jax.tree.leaves_with_path(tree)):
        if x.size and jnp.issubdtype(x.dtype, jnp.floating) and (axes := matrices.matrix_axes(path, x, rest)):
            rows = math.prod(x.shape[axis] for axis in axes)
            shapes[position] = x.size // (rows * x.shape[-1]), rows, x.shape[-1]
    return shapes


class DionState(NamedTuple):
    """State of `Dion`; one entry for each array that is a matrix or a stack of L matrices I×J, in the order of the tree's leaves.

    Attributes:
        momentum: M_i, [L, I, J], of this worker.
        factor: Q, [L, J, R], the same on all workers.
    """

    momentum: tuple[jax.Array, ...]
    factor: tuple[jax.Array, ...]


class Dion(Reducer, name="dion"):
    """Dion: for matrices an orthonormal update of rank R, of which only the factors are averaged; use optimizer "dion".

        B_i = M_i + G_i;     P = orth( (1/N) Σ_i B_i Q );     R_i = B_iᵀ P;     R = (1/N) Σ_i R_i
        M_i = B_i − (1 − μ) P R_iᵀ;     Q = R with columns of length one;     averaged = sqrt(J/I) P Qᵀ

    A matrix I×J has its outputs in its last axis. M_i is both momentum and memory: what the rank leaves out stays in it, and what is
    sent decays by μ. Momenta of workers differ, and their mean is that of one worker with the mean gradient, so the update is too.
    (With P Rᵀ instead of P R_iᵀ the mean is the same, and each worker's deviation from it would be a random walk.)

    A worker sends 2(N−1)/N · (I + J)R values of a matrix instead of 2(N−1)/N · IJ, and everything else uncompressed.

    Attributes:
        channel: how gradients travel; its seed determines the first Q.
        rank: R; for a matrix with a smaller side, that side.
        momentum: μ.
        rest: names, between bars; arrays with one of them in their path are averaged, and so are vectors.

    Reference: Ahn et al. 2025, arXiv 2504.05295, algorithm 1, with the exchange of its data-parallel form.
    """

    optimizer = "dion"
    needs = "matrices, optimizer dion"
    messages = "two thin matrices, the rest uncompressed"
    memory = "1 copy of the matrices, thin matrices"
    source = "arXiv 2504.05295"

    rank: Rank = 16
    momentum: Decay = 0.95
    rest: str = matrices.REST

    def _plan(self, tree: PyTree) -> tuple[dict[int, tuple[int, int, int]], DType]:
        """Return (stacks of matrices by position, dtype of the arithmetic); ValueError if there is no matrix."""
        buckets.check(tree)
        shapes, leaves = stacks(tree, self.rest), jax.tree.leaves(tree)
        if not shapes:
            raise ValueError(f"{self} updates matrices, and the parameters have none; use reducer 'mean'")
        return shapes, jnp.result_type(jnp.float32, *(leaves[i].dtype for i in shapes))

    @functools.cached_property
    def _mean(self) -> Mean:
        return Mean(self.channel)

    def _fresh(self, shape: Shape, position: int, dtype: DType) -> jax.Array:
        return first_factor(shape, self.channel.seed, position, dtype)

    def init(self, params):
        plan, dtype = self._plan(params)
        return DionState(
            tuple(jnp.zeros(stack, dtype) for stack in plan.values()),
            tuple(self._fresh((L, J, min(self.rank, I, J)), i, dtype) for i, (L, I, J) in plan.items()),
        )

    def reduce(self, grads, state: DionState, phase=0):
        leaves, treedef = jax.tree.flatten(grads)
        plan, dtype = self._plan(grads)
        others = [leaf for i, leaf in enumerate(leaves) if i not in plan]
        sums = [leaves[i].reshape(stack).astype(dtype) + m for (i, stack), m in zip(plan.items(), state.momentum)]
        first = [dot(b, q) for b, q in zip(sums, state.factor)]
        (bases, others), _ = self._mean.reduce((first, others), ())
        bases = [jnp.linalg.qr(p)[0] for p in bases]
        own = [dot(b.mT, p) for b, p in zip(sums, bases)]
        means, _ = self._mean.reduce(own, ())

        # Equal on all workers, since it is computed from means.
        finite = codecs.finite((bases, means, [x for x in others if jnp.issubdtype(x.dtype, jnp.floating)]))
        factors = tuple(self._unit(r, i) for i, r in zip(plan, means))
        for i, p, q in zip(plan, bases, factors):
            _, I, J = plan[i]
            leaves[i] = ((J / I) ** 0.5 * dot(jnp.where(finite, p, jnp.nan), q.mT)).reshape(leaves[i].shape).astype(leaves[i].dtype)
        for i, mean in zip((i for i in range(len(leaves)) if i not in plan), others):
            leaves[i] = mean if jnp.issubdtype(mean.dtype, jnp.integer) else jnp.where(finite, mean, jnp.nan)
        momenta = tuple(b - (1 - self.momentum) * dot(p, r.mT) for b, p, r in zip(sums, bases, own))
        new = DionState(momenta, factors)
        return treedef.unflatten(leaves), jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)

    def _unit(self, r_LxJxR: jax.Array, position: int) -> jax.Array:
        """Return the matrices with columns of length one; columns that are zero are redrawn."""
        fresh = self._fresh(r_LxJxR.shape, position, r_LxJxR.dtype)
        revived = jax.vmap(codecs.revived)(r_LxJxR, fresh)
        return revived / jnp.linalg.norm(revived, axis=1, keepdims=True)

    def num_bytes(self, params, num_workers, phase=0):
        plan, dtype = self._plan(params)
        shapes = [(L, I, J, min(self.rank, I, J)) for L, I, J in plan.values()]
        first = [jax.ShapeDtypeStruct((L, I, R), dtype) for L, I, _, R in shapes]
        second = [jax.ShapeDtypeStruct((L, J, R), dtype) for L, _, J, R in shapes]
        others = [leaf for i, leaf in enumerate(jax.tree.leaves(params)) if i not in plan]
        return self._mean.num_bytes((first, others), num_workers) + self._mean.num_bytes(second, num_workers)
