"""PowerSGD in iterations of one side: every message is one factor, and the next works on what is left."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from decjax import codecs
from decjax.codecs.codec import dot
from decjax.options import Count
from decjax.reduce import low_rank
from decjax.typing import DType, Shape


class OneSidedState(NamedTuple):
    """State of `OneSided`; one entry for each array that is compressed, in the order of the tree's leaves.

    Attributes:
        error: e_IxJ, what this worker has not sent.
        rows, columns: the last factors p_IxR and q_JxR, the same on all workers.
    """

    error: tuple[jax.Array, ...]
    rows: tuple[jax.Array, ...]
    columns: tuple[jax.Array, ...]


class OneSided(low_rank.Factored, name="powersgd_one_sided"):
    """PowerSGD whose K iterations each send one factor and go on with what is left, from the two sides of the matrices in turns.

        A_i = G_i + e_i, Y = 0;  then K times, of the two lines in turns:
            Q̂ = orth(Q);   P_i = A_i Q̂;     P = (1/N) Σ_i P_i;   Y ← Y + P Q̂ᵀ;   A_i ← A_i − P_i Q̂ᵀ
            P̂ = orth(P);   Q_i = A_iᵀ P̂;    Q = (1/N) Σ_i Q_i;   Y ← Y + P̂ Qᵀ;   A_i ← A_i − P̂ Q_iᵀ
        averaged = Y;     e_i = A_i

    Symbols are those of `powersgd`. With K = 2 a step sends as many bytes as there, and both messages carry values, where
    PowerSGD's first one only finds the basis of the second: where singular values fall fast, less is left unsent. With K = 1 a
    step sends half of that, with K odd the next step starts with the other side. A worker sends 2(N−1)/N · R values for each row,
    and for each column, of a matrix and iteration of that side, in K collectives per step.

    Attributes:
        channel: how gradients travel; its seed determines the first factors.
        rank: R; for a matrix with a smaller side, that side.
        iterations: K.
        gate: ρ; arrays with (I + J)R ≥ ρIJ are averaged uncompressed. Infinity compresses all matrices.
        wire_dtype: floating-point type in which the factors travel, such as "bfloat16"; None: that of the arithmetic.

    Reference: the form of the library of PowerSGD's authors (`powersgd` on PyPI, num_iters_per_step); Vogels et al. 2019, arXiv
    1905.13727, for the method.
    """

    needs = "matrices"
    messages = "a thin matrix for each iteration, the rest as it is"
    memory = "1 copy, thin matrices"

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
        leaves, treedef = jax.tree.flatten(grads)
        plan = self._plan(grads)
        matrices, dense, dtype = plan
        left = [leaves[i].reshape(I, J).astype(dtype) + e for (i, (I, J, _)), e in zip(matrices.items(), state.error)]
        sent, factors = [jnp.zeros_like(a) for a in left], [state.rows, state.columns]
        unsent, rest, received = [leaves[i].astype(dtype) for i in dense], [], []
        for turn in self._turns(phase):
            side = (turn + 1) % 2  # of the basis: columns first
            bases, own = self._project(plan, left, factors[side], side)
            means, others = low_rank.means_with(unsent, own, self.channel.axis, self._wire or dtype)
            left = [a - _spread(x, basis, side) for a, x, basis in zip(left, own, bases)]
            sent = [y + _spread(x, basis, side) for y, x, basis in zip(sent, means, bases)]
            factors[1 - side], rest, unsent = tuple(means), rest + others, []
            received += means + others
        # Equal on all workers, since it is computed from means.
        finite = jnp.stack([jnp.isfinite(x).all() for x in received]).all()
        for i, mean in zip((*matrices, *dense), (*(jnp.where(finite, y, jnp.nan) for y in sent), *rest)):
            leaves[i] = mean.reshape(leaves[i].shape).astype(leaves[i].dtype)
        new = OneSidedState(tuple(left), *factors)
        return treedef.unflatten(leaves), jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)

    def _project(self, plan: low_rank.Plan, left: list, factors: tuple[jax.Array, ...], side: int) -> tuple[list, list]:
        """Return the bases of a side that the last factors span, and this worker's matrices projected on them, as they will travel."""
        fresh = [self._fresh(factor.shape, i, side, factor.dtype) for i, factor in zip(plan.matrices, factors)]
        bases = low_rank.orthogonalized([low_rank.unit(codecs.revived(q, new)) for q, new in zip(factors, fresh)])
        # (BᵀA)ᵀ rather than AᵀB: compilers for CPUs transpose large matrices slowly.
        own = [dot(a, basis) if side else dot(basis.T, a).T for a, basis in zip(left, bases)]
        return bases, [x.astype(self._wire or plan.dtype).astype(plan.dtype) for x in own]

    def num_bytes(self, params, num_workers, phase=0):
        return self._message_bytes(params, num_workers, [turn % 2 for turn in self._turns(phase)])


def _spread(factor: jax.Array, basis: jax.Array, side: int) -> jax.Array:
    """Return the matrix of a factor and the basis of the columns (side 1) or rows (side 0)."""
    return low_rank.product(factor, basis.T) if side else low_rank.product(basis, factor.T)
