"""Gradient clipping where a device may hold only a part of the gradient, such as one pipeline stage."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_by_global_norm(max_norm: float, norm: Callable[[Any], jax.Array] = optax.global_norm) -> optax.GradientTransformation:
    """Clips the gradient to a largest norm: g ← g · min(1, c / ‖g‖).

    Args:
        max_norm: c > 0.
        norm: the ℓ2 norm of the whole gradient, computed from the part that one device holds; pipeline stages sum over each other's
            parts here. With the default this is `optax.clip_by_global_norm`.
    """

    def update(grads, state, params=None):
        del params
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm(grads), jnp.finfo(jnp.float32).tiny))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]
