"""The optimizer that a method wraps: it runs on a single worker, and its updates have the shapes of the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from decjax.optim.memories import is_communicating


def of_one_worker(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with extra arguments supported and two checks.

    Raises:
        ValueError: from `init`, if the optimizer communicates itself; from `update`, if an update has another shape than its array, as
            with optimizers that need a gradient per example, such as `optax.contrib.dpsgd`.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        state = inner.init(params)
        if is_communicating(state):
            raise ValueError("an optimizer that communicates is wrapped in another one that does; wrap the plain optimizer once")
        return state

    def update(grads, state, params=None, **extra: Any):
        updates, state = inner.update(grads, state, params, **extra)
        check_shapes(updates, params)
        return updates, state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def check_shapes(updates: Any, params: Any) -> None:
    """Raise a ValueError if an update has another shape than its array."""
    moved, fixed = jax.tree.leaves(updates), jax.tree.leaves(params)
    for u, x in zip(moved, fixed) if len(moved) == len(fixed) else ():
        if jnp.shape(u) != jnp.shape(x):
            raise ValueError(
                f"the optimizer's update has shape {jnp.shape(u)} for parameters of shape {jnp.shape(x)}: it needs another gradient, "
                "such as that of each example; give it that, or use another optimizer"
            )
