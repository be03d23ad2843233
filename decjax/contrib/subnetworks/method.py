"""Independent subnetwork training: the hidden units are dealt out to the workers, and each trains the network of its own units alone.

In round r, unit u of a layer with U hidden units belongs to worker π_r(u) mod N, with π_r a permutation of the units that all workers know.
With m_i = 1 on the parameters of worker i's units and on those that belong to no unit, else 0:

    x_i ← x_i − α m_i ⊙ d_i(∇F_i(m_i ⊙ x_i))                               in every step
    units:   x ← a + Σ_i (x_i − a);    others:   x ← a + (1/N) Σ_i (x_i − a)       in every H-th, the end of a round

with the anchor a, the parameters at the end of the round before. No two workers change the same unit, so the sum is exact. A parameter
m_i ⊙ x = 0 in front of a unit and behind it removes the unit: its activation is 0 (with ReLU or GELU), and so are all gradients through it.

The form here computes with the whole matrices, most of them zeros, and all-reduces changes that are zero but for a worker's own units; the
papers' systems send and compute 1/N of it. Its expected fixed point is not the optimum: on F = ½ xᵀLx − bᵀx, whose coordinates are the
units, a gradient sees the product of two coordinates only in rounds that give both to one worker, with probability
p = (P/N − 1)/(P − 1), so x settles where (D + p (L − D)) x = b, D the diagonal of L.

References: Yuan et al. 2019, arXiv 1910.02120 (IST); Shulgin and Richtárik 2023, arXiv 2306.16484 (its bias).
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import reduce, registry
from decjax.channel import Channel
from decjax.optim.local_updates import local_updates
from decjax.optim.memories import increment
from decjax.optim.method import OldMethod, averaging


class SubnetworkState(NamedTuple):
    """State of a worker's own steps.

    Attributes:
        step: steps so far, an int32 scalar; it gives the round.
        inner: state of the optimizer.
    """

    step: jax.Array
    inner: Any


@registry.register(
    "method",
    "ist",
    chooses=("reducer", "optimizer"),
    step="x_i ← x_i − α m_i d_i(∇F_i(m_i x_i)), disjoint sums every H steps",
    messages="changes, every H steps",
    memory="1 copy",
    needs="a model with hidden units",
    data="any",
    source="arXiv 1910.02120",
)
def ist(
    inner: optax.GradientTransformation,
    reducer: reduce.Reducer,
    num_workers: int,
    channel: Channel,
    units: Sequence[tuple[str, int]],
    *,
    every: int = 30,
) -> OldMethod:
    """Independent subnetwork training: each worker trains the network of its own hidden units for H steps; then units are dealt anew.

    Equations, and what is less here than in the papers' systems: `decjax.contrib.subnetworks`.

    Args:
        every: H, steps of a round.

    Raises:
        ValueError: if the model names no hidden units; from the state's `init`, if a layer has fewer units than there are workers.

    References: Yuan et al. 2019, arXiv 1910.02120; Shulgin and Richtárik 2023, arXiv 2306.16484.
    """
    if not units:
        raise ValueError("method 'ist' deals out hidden units, and this model names none; use model 'mlp' or 'decoder'")
    form = _Dealt(optax.with_extra_args_support(inner), tuple(units), num_workers, channel, every)
    own = optax.GradientTransformationExtraArgs(form.init, form.update)  # pyright: ignore[reportArgumentType]
    summed: Any = optax.stateless(form.summed)
    tx = local_updates(own, reduce.every(reducer, every), optax.chain(summed, optax.sgd(1.0)))
    return averaging(tx, reduce.every(reducer, every), num_workers)._replace(every=every, view=form.view)


@dataclasses.dataclass(frozen=True)
class _Dealt:
    """The functions of a worker's own steps."""

    inner: optax.GradientTransformationExtraArgs
    units: tuple[tuple[str, int], ...]
    num_workers: int
    channel: Channel
    every: int

    def axis(self, path: Any) -> int | None:
        """The axis of an array along which its units lie, counted from the end; None: it belongs to none."""
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return next((axis for end, axis in self.units if name.endswith(end)), None)

    def masked(self, tree: Any, count: jax.Array) -> Any:
        """m_i ⊙ tree in the round of a step. Arrays with equally many units have the same ones, as those before and behind a layer."""
        key = jax.random.fold_in(jax.random.key(self.channel.seed), count // self.every)

        def of_leaf(path, x):
            if (axis := self.axis(path)) is None:
                return x
            U = x.shape[axis]
            own_U = jax.random.permutation(jax.random.fold_in(key, U), U) % self.num_workers == self.channel.axis.index
            return x * own_U.astype(x.dtype).reshape(*(1,) * (x.ndim + axis), -1, *(1,) * (-1 - axis))

        return jax.tree_util.tree_map_with_path(of_leaf, tree)

    def view(self, params: Any, state: Any) -> Any:
        """The network of a worker's own units, from the state of the whole method."""
        return self.masked(params, state.inner.step)

    def summed(self, changes: Any, params: Any = None) -> Any:
        """The sum over workers of the changes of units, and the mean of others, from the mean of all."""
        del params
        N = self.num_workers
        return jax.tree_util.tree_map_with_path(lambda path, x: x if self.axis(path) is None else N * x, changes)

    def init(self, params):
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            if (axis := self.axis(path)) is not None and x.shape[axis] < self.num_workers:
                raise ValueError(
                    f"method 'ist': a layer of {x.shape[axis]} hidden units is fewer than workers={self.num_workers}; use a wider "
                    "layer or fewer workers"
                )
        return SubnetworkState(jnp.zeros((), jnp.int32), self.inner.init(params))

    def update(self, grads, state, params=None, **extra):
        updates, inner = self.inner.update(self.masked(grads, state.step), state.inner, params, **extra)
        step = increment(state.step)
        return self.masked(updates, state.step), SubnetworkState(step, inner)
