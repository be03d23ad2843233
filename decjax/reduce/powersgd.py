"""PowerSGD: the mean of a rank-R approximation, found by one step of power iteration over all workers at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from decjax import codecs
from decjax.codecs.codec import dot
from decjax.reduce import low_rank


class PowerSGDState(NamedTuple):
    """State of `PowerSGD`; one entry for each array that is compressed, in the order of the tree's leaves.

    Attributes:
        error: e_IxJ, what this worker has not sent.
        factor: q_JxR, the same on all workers.
    """

    error: tuple[jax.Array, ...]
    factor: tuple[jax.Array, ...]


class PowerSGD(low_rank.Factored, name="powersgd"):
    """PowerSGD: the mean of rank-R approximations of the gradients, with error feedback.

        A_i = G_i + e_i;     P = orth( (1/N) Σ_i A_i Q );     Q_i = A_iᵀ P;     Q = (1/N) Σ_i Q_i
        averaged = P Qᵀ;     e_i = A_i − P Q_iᵀ

    G_i is a worker's gradient, e_i its error, Q the last step's factor, the same on all workers. Arrays of two or more dimensions are
    seen as matrices I×J, cut where I + J is least; others, and those that would not get smaller, are averaged uncompressed, in one
    message with all P. A worker sends 2(N−1)/N · (I + J)R values of a matrix instead of 2(N−1)/N · IJ, in two collectives per step.
    Each worker keeps what it did not send, Σ sent + e = Σ G, so errors stay bounded. (PyTorch's hook keeps A_i − P Qᵀ, which includes
    the other workers' deviations and grows as a random walk.) `init` and `num_bytes` raise ValueError if nothing would be compressed.

    Differences from the paper: columns of Q are normalized before use, which changes no span and keeps products of small gradients
    from underflowing; a column that is zero compared with the others, and would stay zero for ever, is redrawn.

    Attributes:
        channel: how gradients travel; its seed determines the first factors.
        rank: R; for a matrix with a smaller side, that side.
        gate: ρ; arrays with (I + J)R ≥ ρIJ are averaged uncompressed. Infinity compresses all matrices.
        wire_dtype: floating-point type in which the factors travel, such as "bfloat16"; None: that of the arithmetic. Errors include
            what the cast of a worker's own Q_i loses, but not the rounding of the mean Q, which is the same on all workers. Narrow
            values are summed in float32, by all-to-all and all-gather.

    Reference: Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2.

    Examples:
        >>> tx = decjax.synchronize(optax.adamw(1e-3), decjax.reduce.powersgd(rank=4))
    """

    needs = "matrices"
    messages = "thin matrices, the rest as it is"
    memory = "1 copy, thin matrices"

    def init(self, params):
        matrices, _, dtype = self._plan(params)
        return PowerSGDState(
            tuple(jnp.zeros((I, J), dtype) for I, J, _ in matrices.values()),
            tuple(self._first((J, R), i, dtype) for i, (_, J, R) in matrices.items()),
        )

    def reduce(self, grads, state: PowerSGDState, phase=0):
        leaves, treedef = jax.tree.flatten(grads)
        matrices, dense, dtype = self._plan(grads)
        wire = self._wire or dtype
        targets = [leaves[i].reshape(I, J).astype(dtype) + e for (i, (I, J, _)), e in zip(matrices.items(), state.error)]
        factors = [low_rank.unit(codecs.revived(q, self._first(q.shape, i, q.dtype))) for i, q in zip(matrices, state.factor)]
        bases, rest = low_rank.means_with(
            [leaves[i].astype(dtype) for i in dense], [dot(a, q) for a, q in zip(targets, factors)], self.channel.axis, wire
        )
        received = [*bases, *rest]
        bases = low_rank.orthogonalized(bases)
        # PᵀA rather than AᵀP: compilers for CPUs transpose large matrices slowly.
        own = [dot(p.T, a).astype(wire).astype(dtype) for p, a in zip(bases, targets)]
        means = low_rank.means(own, self.channel.axis, wire)

        # Equal on all workers, since it is computed from means.
        finite = jnp.stack([jnp.isfinite(x).all() for x in (*received, *means)]).all()
        products = (low_rank.product(jnp.where(finite, p, jnp.nan), q) for p, q in zip(bases, means))
        for i, mean in zip((*matrices, *dense), (*products, *rest)):
            leaves[i] = mean.reshape(leaves[i].shape).astype(leaves[i].dtype)
        error = tuple(jnp.where(finite, a - low_rank.product(p, q), e) for a, p, q, e in zip(targets, bases, own, state.error))
        factor = tuple(jnp.where(finite, q.T, old) for q, old in zip(means, state.factor))
        return treedef.unflatten(leaves), PowerSGDState(error, factor)

    def num_bytes(self, params, num_workers, phase=0):
        return self._message_bytes(params, num_workers, [0, 1])
