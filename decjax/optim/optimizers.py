"""Optimizers and learning-rate schedules by name: decjax's own, and all of optax and optax.contrib that take a learning rate."""

from collections.abc import Callable
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from decjax import registry
from decjax.optim.accumulated import accumulated_adamw
from decjax.optim.inner import check_shapes, with_ranges
from decjax.options import Decay, Fraction, NonNegative, signature_of

registry.register("optimizer", "accum_adamw", source="arXiv 2410.11998")(accumulated_adamw)


@registry.register("optimizer", "sgdm")
def momentum_sgd(
    learning_rate: optax.Schedule, *, momentum: Decay = 0.9, weight_decay: NonNegative = 0.0
) -> optax.GradientTransformation:
    """SGD with momentum, whose weight decay is added to the gradient: m ← βm + g + λx;  x ← x − αm.

    Args:
        learning_rate: α, by step.
        momentum: β in [0, 1).
        weight_decay: λ.
    """
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate, momentum=momentum))


@registry.register("optimizer", "sign")
def sign_descent(learning_rate: optax.Schedule, *, weight_decay: NonNegative = 0.0) -> optax.GradientTransformation:
    """Sign descent, x ← (1 − αλ) x − α sign(g), the step that DeMo takes.

    Args:
        learning_rate: α, by step.
        weight_decay: λ.
    """
    return optax.chain(optax.scale_by_sign(), optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate))


def _find(name: str) -> Callable | None:
    for module in (optax, optax.contrib):
        found = getattr(module, name, None)
        if inspect.isfunction(found) and "learning_rate" in inspect.signature(found).parameters:
            made: Any = functools.wraps(found)(functools.partial(_made, name, found))
            made.__signature__ = with_ranges(signature_of(found))
            return made
    return None


def _made(name: str, factory: Callable, *args: Any, **options: Any) -> optax.GradientTransformation:
    """An optimizer of optax, checked on a small array: in a config its update gets only gradients, state and parameters."""
    optimizer = factory(*args, **options)
    params = {"x": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    try:
        updates = jax.eval_shape(lambda x: optimizer.update(x, optimizer.init(x), x)[0], params)
        check_shapes(updates, params)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer {name!r} cannot be used in a config, whose update has only the mean gradient, the state and the parameters: "
            f"{' '.join(str(error).split())[:200]}; use another, such as 'adamw', or your own loop"
        ) from error
    return _with_key_data(optimizer)


def _with_key_data(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with the data of JAX's default random keys in its state, which a checkpoint can hold, in place of the keys."""

    def update(updates, state, params: Any = None):
        like = jax.eval_shape(optimizer.init, params)
        state = jax.tree.map(lambda x, key: jax.random.wrap_key_data(x) if _is_key(key) else x, state, like)
        updates, state = optimizer.update(updates, state, params)
        return updates, _keyless(state)

    has_keys = any(map(_is_key, jax.tree.leaves(jax.eval_shape(optimizer.init, {"x": jax.ShapeDtypeStruct((2, 3), jnp.float32)}))))
    return optax.GradientTransformation(lambda params: _keyless(optimizer.init(params)), update) if has_keys else optimizer


def _keyless(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _names() -> tuple[str, ...]:
    """Names of optax's optimizers; their building blocks `scale_by_…` are left out."""
    known = {name for module in (optax, optax.contrib) for name in dir(module) if not name.startswith(("_", "scale_by_"))}
    return tuple(sorted(filter(_find, known)))


registry.fallback("optimizer", _find, _names)


@registry.register("schedule", "cosine")
def cosine(steps: int, *, learning_rate: float = 1e-3, warmup_steps: int = 0, final_fraction: Fraction = 0.0) -> optax.Schedule:
    """Learning rate by step: a linear warm-up from 0 to the peak, then half a cosine down to a fraction of it at the last step.

    Args:
        steps: length of the run.
        learning_rate: the peak, > 0.
        warmup_steps: steps of the warm-up, fewer than `steps`; 0: start at the peak.
        final_fraction: learning rate of the last step ÷ the peak, in [0, 1].

    Raises:
        ValueError: if an option lies outside its range.
    """
    _check_rate(steps, learning_rate, warmup_steps)
    start = 0.0 if warmup_steps else learning_rate
    return optax.warmup_cosine_decay_schedule(start, learning_rate, warmup_steps, steps, final_fraction * learning_rate)


@registry.register("schedule", "inverse_sqrt")
def inverse_sqrt(steps: int, *, learning_rate: float = 1e-3, warmup_steps: int = 100) -> optax.Schedule:
    """Learning rate by step t: a linear warm-up over w steps, then α sqrt(w/t) (Vaswani et al. 2017, arXiv 1706.03762, section 5.3).

    Args:
        steps: length of the run.
        learning_rate: α, the peak, > 0.
        warmup_steps: w ≥ 1, fewer than `steps`.

    Raises:
        ValueError: if an option lies outside its range.
    """
    _check_rate(steps, learning_rate, warmup_steps, least=1)
    return lambda step: learning_rate * jnp.minimum(step / warmup_steps, jnp.sqrt(warmup_steps / jnp.maximum(step, 1)))


def _check_rate(steps, learning_rate, warmup_steps, least=0):
    if not least <= warmup_steps < steps:
        raise ValueError(
            f"schedule.warmup_steps={warmup_steps} must be at least {least} and less than steps={steps}; use {max(least, steps // 10)}"
        )
    if not learning_rate > 0:
        raise ValueError(f"schedule.learning_rate={learning_rate} must be positive")
