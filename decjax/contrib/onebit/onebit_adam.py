"""1-bit Adam: the variance is frozen after some steps, from which on workers average compressed momenta instead of gradients."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import reduce
from decjax.buckets import of_floating
from decjax.optim.memories import communicating, increment, init_memory, transformation, transient
from decjax.optim.method import Reducing
from decjax.options import Decay, NonNegative
from decjax.registry import of_field
from decjax.typing import PyTree


@communicating
@transient("reducer")
class OnebitAdamState(NamedTuple):
    """State of `scale_by_onebit_adam`; the trees have the shapes of the parameters.

    Attributes:
        step: t, updates so far, an int32 scalar.
        warm_steps: T, how many of them were warm-up steps, an int32 scalar.
        mu: m, the momentum, the same on all workers.
        nu: v, the variance.
        reducer: state of the reducer.
    """

    step: jax.Array
    warm_steps: jax.Array
    mu: PyTree
    nu: PyTree
    reducer: PyTree


def scale_by_onebit_adam(
    reducer: reduce.Reducer, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """Return 1-bit Adam's update direction, averaged over all workers (equations: `OnebitAdam`), without the learning rate.

    The update takes a static `phase`, `reducer.phase(step)`. Leaves that are not floating point are not updated.

    Args:
        reducer: a `reduce.start_at`, which averages exactly before its first step (the warm-up) and compresses from then on.
        b1: β1 in [0, 1), decay of the momentum.
        b2: β2 in [0, 1), decay of the variance in the warm-up.
        eps: ε, added outside of the root.

    Raises:
        ValueError: if the reducer has no warm-up, in which the variance is estimated.

    Example:
        >>> one_bit = decjax.reduce.coded(codec="int8")
        >>> reducer = decjax.reduce.start_at(one_bit, 100, before=decjax.reduce.mean())
        >>> tx = optax.chain(scale_by_onebit_adam(reducer), optax.scale_by_learning_rate(1e-3))
    """
    if len(reducer.phases) < 2 or reducer.phases[0] != reduce.BEFORE:
        raise ValueError(
            "1-bit Adam needs warm steps, in which it estimates its variance: give reduce.start_at(…), or reducer.start, of at least "
            "1 step"
        )
    if reducer.usage:
        raise ValueError("1-bit Adam needs a reducer whose messages are known beforehand; use 'codec' instead of 'gravac'")

    direction = _OnebitMomentum(reducer, b1, b2, eps)
    return transformation(direction.init, direction.update, moves=False)


@dataclasses.dataclass(frozen=True)
class _OnebitMomentum:
    """The functions of `scale_by_onebit_adam`."""

    reducer: reduce.Reducer
    b1: float
    b2: float
    eps: float

    def init(self, params):
        zero, (mu, nu) = jnp.zeros((), jnp.int32), (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return OnebitAdamState(zero, zero, mu, nu, init_memory(self.reducer.init, params))

    def update(self, grads, state, params=None, *, phase=None, **extra):
        due = reduce.due_phase(self.reducer, phase)
        if due == reduce.BEFORE:
            averaged, memory = self.reducer.reduce(grads, state.reducer, due)
            nu = of_floating(lambda v, g: self.b2 * v + (1 - self.b2) * g**2, state.nu, averaged)
            new = state._replace(mu=self.momentum(state.mu, averaged), nu=nu, warm_steps=increment(state.warm_steps))
        else:
            mu, memory = self.reducer.reduce(self.momentum(state.mu, grads), state.reducer, due)
            new = state._replace(mu=mu)
        new = new._replace(step=increment(state.step))
        corrections = dict(correction1=1 - self.b1**new.step, correction2=1 - self.b2**new.warm_steps)
        updates = of_floating(functools.partial(_scaled, eps=self.eps, **corrections), new.mu, new.nu)
        finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves((new.mu, new.nu))]).all()
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
        return updates, new._replace(reducer=memory)

    def momentum(self, mu: PyTree, grads: PyTree) -> PyTree:
        return of_floating(lambda m, g: self.b1 * m + (1 - self.b1) * g, mu, grads)


def _scaled(m: jax.Array, v: jax.Array, *, eps: float, correction1: jax.Array, correction2: jax.Array) -> jax.Array:
    """m̂ / (√v̂ + ε); zero where v is."""
    has_variance = v > 0
    root = jnp.sqrt(jnp.where(has_variance, v, 1) / correction2.astype(v.dtype))
    # A momentum that is not finite stays so, for divergence to be seen.
    return jnp.where(has_variance | ~jnp.isfinite(m), m / correction1.astype(m.dtype) / (root + eps), 0)


class OnebitAdam(Reducing, name="onebit_adam"):
    """1-bit Adam: Adam for the first steps, then its variance is frozen and the workers' momenta are averaged in compressed form.

    In the T warm-up steps it is Adam of the averaged gradient ḡ. From then on, with v the frozen variance, C a codec and e_j its error,

        m_i = β1 m + (1−β1) g_i;     m = (1/N) Σ_j C(m_j + e_j);     x ← x − α m̂ / (√v̂ + ε)

    so that m is the same on all workers after the average. Freezing v makes the update linear in the gradients, which error feedback
    needs. Where the reducer averages shard by shard, as in the paper, the mean is compressed once more, with error feedback of its own.
    Bias corrections: m̂ = m / (1−β1^t), v̂ = v / (1−β2^T). A coordinate whose gradient was zero in all warm-up steps has v = 0, and is
    not updated.

    T is the reducer's `start`.

    Attributes:
        learning_rate: α, by step.
        clip: of each worker's gradient.
        b1: β1, decay of the momentum.
        b2: β2, decay of the variance until it is frozen.
        eps: ε, added outside of the root.
        weight_decay: λ, decoupled.

    Reference: Tang et al. 2021, arXiv 2102.02888, algorithm 1.
    """

    warm = True
    default_reducer = "codec(codec=scaled_sign,form='shards')"

    learning_rate: optax.Schedule
    clip: optax.GradientTransformation
    b1: Decay = 0.9
    b2: Decay = 0.99
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0

    @functools.cached_property
    def chain(self) -> optax.GradientTransformationExtraArgs:
        """The whole optimizer."""
        return optax.chain(
            self.clip,
            scale_by_onebit_adam(self.reducer, self.b1, self.b2, self.eps),
            optax.add_decayed_weights(self.weight_decay),
            optax.scale_by_learning_rate(self.learning_rate),
        )

    init = of_field("chain.init")
    update = of_field("chain.update")
