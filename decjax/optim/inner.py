"""The optimizer that a method wraps: it runs on a single worker, and its updates have the shapes of the parameters."""

import inspect
import re
from typing import Any, Union

import jax
import jax.numpy as jnp
import optax

from decjax.optim.memories import is_communicating
from decjax.options import Decay, NonNegative


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


def with_ranges(signature: inspect.Signature) -> inspect.Signature:
    """The signature of an optimizer of optax, which declares types only, with the ranges of its decay rates and of λ and ε."""

    def ranged(parameter: inspect.Parameter) -> inspect.Parameter:
        decays = re.fullmatch(r"(adam_)?b[12]|momentum", parameter.name)
        allowed = Decay if decays else NonNegative if re.fullmatch(r"weight_decay|eps", parameter.name) else None
        if allowed is None or not isinstance(parameter.default, float | None):
            return parameter
        optional: Any = Union[allowed, None]  # noqa: UP007  Annotations have no operator | here.
        return parameter.replace(annotation=optional if parameter.default is None else allowed)

    return signature.replace(parameters=list(map(ranged, signature.parameters.values())))
