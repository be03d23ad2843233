"""Independent subnetwork training: the hidden units are divided among the workers, and each trains only the network of its own units."""

from collections.abc import Sequence
import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax.channel import Channel
from decjax.optim.local_updates import LocalUpdates
from decjax.optim.memories import increment
from decjax.options import Range, check
from decjax.registry import Requirement
from decjax.typing import PyTree


class SubnetworkState(NamedTuple):
    """State of a worker's own steps.

    Attributes:
        step: steps so far, an int32 scalar; it gives the round.
        inner: state of the optimizer.
    """

    step: jax.Array
    inner: PyTree


class IndependentSubnetworks(LocalUpdates, name="ist"):
    """Independent subnetwork training: each worker trains the network of its own hidden units for H steps, then units are reassigned.

    In round r, unit u of a layer with U hidden units belongs to worker π_r(u) mod N, with π_r a permutation of the units that is the same
    on all workers. With m_i = 1 on the parameters of worker i's units and on those that belong to no unit, else 0:

        x_i ← x_i − α m_i ⊙ d_i(∇F_i(m_i ⊙ x_i))                               in every step
        units:   x ← a + Σ_i (x_i − a);    others:   x ← a + (1/N) Σ_i (x_i − a)       in every H-th, the end of a round

    with the anchor a, the parameters at the end of the round before. No two workers change the same unit, so the sum is exact. Zero
    parameters in front of a unit and behind it remove the unit: its activation is 0 (with ReLU or GELU), and so are all gradients
    through it.

    The form here computes with the whole matrices, most of them zeros, and all-reduces changes that are zero except for a worker's own
    units; the papers' systems send and compute 1/N of it. Its expected fixed point is not the optimum: on F = ½ xᵀLx − bᵀx, whose
    coordinates are the units, a gradient sees the product of two coordinates only in rounds in which one worker has both, with
    probability p = (P/N − 1)/(P − 1), so x settles where (D + p (L − D)) x = b, D the diagonal of L.

    Attributes:
        channel: the axis of the workers, and the seed of the permutations.
        units: the parameters of hidden units; see `tasks.Task.units`.
        every: H, steps of a round.

    References: Yuan et al. 2019, arXiv 1910.02120 (IST); Shulgin and Richtárik 2023, arXiv 2306.16484 (its bias).
    """

    requires = (Requirement("units", "a model with hidden units", bool, "use model 'mlp' or 'decoder'"),)
    messages = "changes, every H steps"
    memory = "1 copy"
    data = "any"

    channel: Channel
    units: Sequence[tuple[str, int]]

    def _axis(self, path: jax.tree_util.KeyPath) -> int | None:
        """Return the axis of an array along which its units are, counted from the end; None if it belongs to none."""
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return next((axis for end, axis in self.units if name.endswith(end)), None)

    def _masked(self, tree: PyTree, step: jax.Array) -> PyTree:
        """Return m_i ⊙ tree in the round of a step. Arrays with equally many units have the same ones, such as those around a layer."""
        key = jax.random.fold_in(jax.random.key(self.channel.seed), step // self.every)

        def of_leaf(path, x):
            if (axis := self._axis(path)) is None:
                return x
            U = x.shape[axis]
            own_U = jax.random.permutation(jax.random.fold_in(key, U), U) % self.num_workers == self.channel.axis.index
            return x * own_U.astype(x.dtype).reshape(*(1,) * (x.ndim + axis), -1, *(1,) * (-1 - axis))

        return jax.tree_util.tree_map_with_path(of_leaf, tree)

    @property
    def view(self):
        return lambda params, state: self._masked(params, state.inner.step)

    @functools.cached_property
    def optimizer(self):
        inner = optax.with_extra_args_support(self.inner)

        def init(params):
            for path, x in jax.tree_util.tree_leaves_with_path(params):
                if (axis := self._axis(path)) is not None:
                    what = f"method 'ist' with workers={self.num_workers}: the hidden units of a layer"
                    check(what, x.shape[axis], Annotated[int, Range(self.num_workers)])
            return SubnetworkState(jnp.zeros((), jnp.int32), inner.init(params))

        def update(updates, state, params=None, **extra):
            updates, after = inner.update(self._masked(updates, state.step), state.inner, params, **extra)
            return self._masked(updates, state.step), SubnetworkState(increment(state.step), after)

        return optax.GradientTransformationExtraArgs(init, update)

    @property
    def outer(self):
        N = self.num_workers
        summed = lambda path, x: x if self._axis(path) is None else N * x
        return optax.chain(
            optax.stateless(lambda changes, params: jax.tree_util.tree_map_with_path(summed, changes)), optax.sgd(1.0)
        )
