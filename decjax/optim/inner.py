"""The optimizer that a method wraps, which runs on a single worker: clipping, skipped updates, and checks."""

from collections.abc import Callable
import inspect
import re
from typing import Any, Optional

import jax
import jax.numpy as jnp
import optax

from decjax.optim.memories import check_outermost, is_communicating
from decjax.options import Decay, NonNegative
from decjax.typing import PyTree


def clip_by_global_norm(max_norm: float, norm: Callable[[PyTree], jax.Array] = optax.global_norm) -> optax.GradientTransformation:
    """Clip the gradient to a largest norm: g ← g · min(1, c / ‖g‖).

    Args:
        max_norm: c > 0.
        norm: the ℓ2 norm of the whole gradient, computed from the part that one device holds; pipeline stages sum over each other's
            parts here. With the default this is `optax.clip_by_global_norm`.
    """

    def clip(updates, params=None):
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm(updates), jnp.finfo(jnp.float32).tiny))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates)

    return optax.stateless(clip)


def apply_if_finite(inner: optax.GradientTransformation, max_consecutive_errors: int) -> optax.GradientTransformationExtraArgs:
    """Skip the update where the gradient is not finite, for use inside `decentralize` and similar methods.

    It is `optax.apply_if_finite` with a check: the worker omits its update d_i and still communicates. In `decentralize`, order "awc":

        x_i ← Σ_j w_ij x_j − α d_i     if ∇F_i is finite, else     x_i ← Σ_j w_ij x_j

    Args:
        inner: an optimizer that does not communicate.
        max_consecutive_errors: how many updates in a row may be skipped; the next one is applied even if it is not finite.

    Raises:
        ValueError: from `init`, if `inner` communicates: a worker that skips would leave the others waiting for its message.

    Example:
        >>> mixer = decjax.gossip.exact(decjax.topology.make("ring", 8))
        >>> tx = decjax.decentralize(decjax.apply_if_finite(optax.adamw(1e-3), 5), mixer)
    """
    wrapped = optax.apply_if_finite(inner, max_consecutive_errors)

    def init(params):
        state = wrapped.init(params)
        check_outermost(state)
        return state

    return optax.GradientTransformationExtraArgs(init, wrapped.update)


def of_one_worker(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with extra arguments supported and two checks.

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

    def update(updates, state, params=None, **extra_args):
        updates, state = inner.update(updates, state, params, **extra_args)
        check_shapes(updates, params)
        return updates, state

    return optax.GradientTransformationExtraArgs(init, update)


def check_shapes(updates: PyTree, params: PyTree) -> None:
    """Raise a ValueError if an update has another shape than its array."""
    moved, fixed = jax.tree.leaves(updates), jax.tree.leaves(params)
    for u, x in zip(moved, fixed) if len(moved) == len(fixed) else ():
        if jnp.shape(u) != jnp.shape(x):
            raise ValueError(
                f"the optimizer's update has shape {jnp.shape(u)} for parameters of shape {jnp.shape(x)}: it needs another gradient, "
                "such as that of each example; give it that, or use another optimizer"
            )


def with_ranges(signature: inspect.Signature, **ranges: Any) -> inspect.Signature:
    """Return the signature of an optax optimizer with the ranges of decay rates, λ, ε and others by name; optax declares types only."""

    def ranged(parameter: inspect.Parameter) -> inspect.Parameter:
        decays = re.fullmatch(r"(adam_)?b[12]|momentum", parameter.name)
        known = Decay if decays else NonNegative if re.fullmatch(r"weight_decay|eps(_root)?", parameter.name) else None
        allowed = ranges.get(parameter.name, known)
        if allowed is None or not isinstance(parameter.default, int | float | None):
            return parameter
        return parameter.replace(annotation=Optional[allowed] if parameter.default is None else allowed)  # noqa: UP045

    return signature.replace(parameters=list(map(ranged, signature.parameters.values())))
