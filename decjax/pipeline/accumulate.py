"""Gradients added up over microbatches: in float32, or in the parameters' type where that is wider, and rounded once."""

from typing import Any

import jax
import jax.numpy as jnp

from decjax.buckets import wide_dtype


def zeros(params: Any) -> Any:
    """The sum of no gradients."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x)), params)


def add(total: Any, grads: Any, share: Any = 1.0) -> Any:
    """The sum with `share` times these gradients added."""
    return jax.tree.map(lambda total, x: total + jnp.asarray(share, total.dtype) * x.astype(total.dtype), total, grads)


def rounded(total: Any, params: Any) -> Any:
    """The sum in the types of the parameters."""
    return jax.tree.map(lambda x, param: x.astype(param.dtype), total, params)
