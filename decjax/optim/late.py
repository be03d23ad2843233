"""Gradients that come late, and the later the nearer their stage is to the input: a pipeline whose stages do not wait.

    x_s ← x_s − α d(g_s(t − τ_s)),   τ_s = δ (S − 1 − s)

with g_s(t) the gradient of stage s at the parameters of step t. In a pipeline that never drains, a stage has taken further steps before
the gradient of a batch comes back to it: S − 1 − s of them if every batch is a step (δ = 1). The first τ_s steps of a stage change
nothing. The last stage is never late, and δ = 0 is the synchronous pipeline.

This is a simulation: the stages still compute in step, and each holds back δ (S − 1) gradients, so it shows what being late does to the
loss and not the time that it saves. All stages take their gradient at the parameters of the same step, whereas in an asynchronous pipeline
the forward pass of a later stage may see newer ones.

Reference: arXiv 2401.01728 (Ravnest), which averages the parameters of several such pipelines every few steps.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax.mesh.axis import STAGES, Axis
from decjax.optim.memories import transformation


class LateState(NamedTuple):
    """State of `late_gradients`.

    Attributes:
        count: steps so far, an int32 scalar.
        inner: state of the optimizer.
        waiting: the last K gradients of this stage, leaves [K, …]; that of step t is entry t mod K.
    """

    count: jax.Array
    inner: Any
    waiting: Any


def late_gradients(
    inner: optax.GradientTransformation, num_stages: int, delay: int = 1, stages: Axis = STAGES
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that is given this stage's gradient of τ_s steps ago (equations: `decjax.optim.late`).

    Args:
        inner: any optax optimizer, clipping included.
        num_stages: S.
        delay: δ ≥ 1, steps by which a stage is later than the next one.
        stages: the axis of the stages, over which the update is mapped.

    Raises:
        ValueError: for a delay of less than one step.
    """
    if delay < 1:
        raise ValueError(f"delay={delay}: gradients are late by at least one step; without a delay use the optimizer itself")
    form = _Late(optax.with_extra_args_support(inner), num_stages, delay, stages)
    return transformation(form.init, form.update, moves=False)


@dataclasses.dataclass(frozen=True)
class _Late:
    """The functions of `late_gradients`."""

    inner: optax.GradientTransformationExtraArgs
    num_stages: int
    delay: int
    stages: Axis

    @property
    def held(self) -> int:
        """K, gradients that a stage holds back: as many as the first one needs."""
        return self.delay * (self.num_stages - 1)

    def init(self, params):
        waiting = jax.tree.map(lambda x: jnp.zeros((self.held, *x.shape), x.dtype), params)
        return LateState(jnp.zeros((), jnp.int32), self.inner.init(params), waiting)

    def update(self, grads, state, params=None, **extra):
        late = self.delay * (self.num_stages - 1 - self.stages.index)
        due = jax.tree.map(lambda g, held: jnp.where(late == 0, g, held[(state.count - late) % self.held]), grads, state.waiting)
        updates, inner = self.inner.update(due, state.inner, params, **extra)
        begun = state.count >= late
        updates = jax.tree.map(lambda u: jnp.where(begun, u, jnp.zeros_like(u)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(begun, new, old), inner, state.inner)
        waiting = jax.tree.map(lambda held, g: held.at[state.count % self.held].set(g), state.waiting, grads)
        count: Any = optax.safe_increment(state.count)
        return updates, LateState(count, inner, waiting)
