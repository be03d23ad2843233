"""Late gradients: the asynchronous pipeline, simulated.

Reference: arXiv 2401.01728 (Ravnest), which averages the parameters of several such pipelines every few steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import registry
from decjax.mesh.axis import STAGES, Axis
from decjax.optim.memories import increment, transformation
from decjax.options import Count
from decjax.typing import PyTree


class LateState(NamedTuple):
    """State of `late_gradients`.

    Attributes:
        step: steps so far, an int32 scalar.
        inner: state of the optimizer.
        waiting: the last K gradients of this stage, leaves [K, …]; that of step t is entry t mod K.
    """

    step: jax.Array
    inner: PyTree
    waiting: PyTree


@registry.register("wrapper", "late")
def late_gradients(
    inner: optax.GradientTransformation, num_stages: int, stages: Axis = STAGES, *, delay: Count = 1
) -> optax.GradientTransformationExtraArgs:
    """Pass an optimizer each stage's gradient of τ_s steps ago, as in a pipeline whose stages do not wait for each other.

        x_s ← x_s − α d(g_s(t − τ_s)),   τ_s = δ (S − 1 − s)

    g_s(t) is the gradient of stage s at the parameters of step t. In a pipeline that never drains, a stage has taken S − 1 − s further
    steps before the gradient of a batch returns to it, if every batch is a step (δ = 1). The first τ_s steps of a stage change nothing.

    This is a simulation: the stages still compute in lockstep, and each stores K = δ (S − 1) gradients. It reproduces the effect of the
    delay on the loss, not the time saved. All stages take their gradient at the parameters of the same step, whereas in an asynchronous
    pipeline the forward pass of a later stage may use newer parameters.

    Args:
        inner: any optax optimizer, clipping included.
        num_stages: S.
        stages: the axis of the stages, over which the update is mapped.
        delay: δ, steps by which the gradients of a stage are later than those of the next one.
    """
    inner = optax.with_extra_args_support(inner)
    K = delay * (num_stages - 1)

    def init(params):
        waiting = jax.tree.map(lambda x: jnp.zeros((K, *x.shape), x.dtype), params)
        return LateState(jnp.zeros((), jnp.int32), inner.init(params), waiting)

    def update(grads, state, params=None, **extra):
        late = delay * (num_stages - 1 - stages.index)
        due = jax.tree.map(lambda g, stored: jnp.where(late == 0, g, stored[(state.step - late) % K]), grads, state.waiting)
        updates, inner_state = inner.update(due, state.inner, params, **extra)
        begun = state.step >= late
        updates = jax.tree.map(lambda u: jnp.where(begun, u, jnp.zeros_like(u)), updates)
        inner_state = jax.tree.map(lambda new, old: jnp.where(begun, new, old), inner_state, state.inner)
        waiting = jax.tree.map(lambda stored, g: stored.at[state.step % K].set(g), state.waiting, grads)
        return updates, state._replace(step=increment(state.step), inner=inner_state, waiting=waiting)

    return transformation(init, update, moves=False)
