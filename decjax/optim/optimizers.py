"""Optimizers and learning-rate schedules by name: those of decjax, and all of optax and optax.contrib that take a learning rate."""

from collections.abc import Callable
import functools
import inspect
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from decjax import registry
from decjax.optim import matrices
from decjax.optim.accumulated import accumulated_adamw
from decjax.optim.inner import check_shapes, with_ranges
from decjax.options import Decay, Fraction, NonNegative, Positive, Range, signature_of
from decjax.typing import PyTree

POLYNOMIALS = ("standard", "dion")  # Newton-Schulz coefficients that optax knows by name

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


@registry.register("optimizer", "muon", memory="1 copy of matrices, 2 of the rest", source="arXiv 2502.16982, in DiLoCo 2505.23725")
def muon(learning_rate: optax.ScalarOrSchedule, *, rest: str = matrices.REST, **options: Any) -> optax.GradientTransformation:
    """Muon: matrices step by the orthogonalized momentum, O = UVᵀ for M = UΣVᵀ; other arrays step by AdamW.

        M ← βM + (1 − β)G;     A = βM/(1 − β^(t+1)) + (1 − β)G/(1 − β^t);     X ← X − α sqrt(max(1, J/I)) O(A)

    for step t = 1, 2, … and X of shape I×J, with O by Newton-Schulz iterations; `nesterov=False` has A = M/(1 − β^t). The bias corrections
    1 − β^t are those of optax. The papers' code has none: its A is βM + (1 − β)G, whose two terms have other weights in the first steps.
    O does not depend on the scale of A, so without Nesterov's momentum both are the same.

    Arrays of three dimensions are stacks of matrices, as the scanned layers of a transformer; those of more are convolutions, whose last
    axis is J and whose others are I. `method=diloco,optimizer=muon` is MuLoCo: H local steps of Muon, then DiLoCo's outer step.

    Args:
        learning_rate: α, a number or a function of the step.
        rest: names, between bars; arrays with one of them in their path take AdamW's step, and so do vectors.
        **options: those of `optax.contrib.muon`, which does the rest: {options}.

    Raises:
        ValueError: for unknown polynomials.

    References: Liu et al. 2025, arXiv 2502.16982; Thérien et al. 2025, arXiv 2505.23725 (MuLoCo).
    """
    if not _are_polynomials(coefficients := options.get("ns_coeffs", POLYNOMIALS[0])):
        raise ValueError(
            f"optimizer 'muon': ns_coeffs={registry.shown(coefficients)} must be three numbers, several times three, or one of "
            f"{', '.join(POLYNOMIALS)}"
        )
    of_array = functools.partial(_dimension_numbers, rest)
    numbers = lambda params: jax.tree.map_with_path(of_array, params)
    return optax.contrib.muon(learning_rate, **{"muon_weight_dimension_numbers": numbers, **options})


def _are_polynomials(value: PyTree) -> bool:
    """Whether a value has the coefficients of Newton-Schulz iterations, or names them."""
    if isinstance(value, str):
        return value in POLYNOMIALS
    try:
        shape = np.shape(np.asarray(value, float))
    except (TypeError, ValueError):  # No numbers, or rows of different lengths.
        return False
    return len(shape) in (1, 2) and shape[0] > 0 and shape[-1] == 3


def _dimension_numbers(rest: str, path: tuple, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    """Return which axes of an array are the rows and columns of a matrix; None if it is no matrix."""
    rows = matrices.matrix_axes(path, x, rest)
    return optax.contrib.MuonDimensionNumbers(rows, (x.ndim - 1,)) if rows else None


def _with_options_of_optax() -> None:
    """Show the options of `optax.contrib.muon` in the signature, which is the section of a config, and in the docstring."""
    own = inspect.signature(muon).parameters
    others = [p for p in inspect.signature(optax.contrib.muon).parameters.values() if p.name not in own]
    given = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in others]
    signature = inspect.Signature([own["learning_rate"], own["rest"], *given])
    setattr(muon, "__signature__", with_ranges(signature, beta=Decay, ns_steps=Annotated[int, Range(1, 2**8)]))  # noqa: B010
    muon.__doc__ = str(muon.__doc__).replace("{options}", ", ".join(p.name for p in given))


_with_options_of_optax()


def _find(name: str) -> Callable | None:
    for module in (optax, optax.contrib):
        found = getattr(module, name, None)
        if inspect.isfunction(found) and "learning_rate" in inspect.signature(found).parameters:
            made = functools.wraps(found)(functools.partial(_made, name, found))
            setattr(made, "__signature__", with_ranges(signature_of(found)))  # noqa: B010
            return made
    return None


def _made(name: str, factory: Callable, *args: Any, **options: Any) -> optax.GradientTransformation:
    """Return an optax optimizer, checked on a small array: in a config its update gets only gradients, state and parameters."""
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
    """Return the optimizer with key data instead of JAX's random keys in its state, which a checkpoint can hold."""

    def update(updates, state, params=None):
        like = jax.eval_shape(optimizer.init, params)
        state = jax.tree.map(lambda x, key: jax.random.wrap_key_data(x) if _is_key(key) else x, state, like)
        updates, state = optimizer.update(updates, state, params)
        return updates, _keyless(state)

    has_keys = any(map(_is_key, jax.tree.leaves(jax.eval_shape(optimizer.init, {"x": jax.ShapeDtypeStruct((2, 3), jnp.float32)}))))
    return optax.GradientTransformation(lambda params: _keyless(optimizer.init(params)), update) if has_keys else optimizer


def _keyless(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _names() -> tuple[str, ...]:
    """Return the names of optax's optimizers, without their building blocks `scale_by_…`."""
    known = {name for module in (optax, optax.contrib) for name in dir(module) if not name.startswith(("_", "scale_by_"))}
    return tuple(sorted(filter(_find, known)))


registry.fallback("optimizer", _find, _names)


@registry.register("schedule", "cosine")
def cosine(steps: int, *, learning_rate: Positive = 1e-3, warmup_steps: int = 0, final_fraction: Fraction = 0.0) -> optax.Schedule:
    """Learning rate by step: a linear warm-up from 0 to the peak, then half a cosine down to a fraction of it at the last step.

    Args:
        steps: length of the run.
        learning_rate: the peak.
        warmup_steps: steps of the warm-up, fewer than `steps`; 0: start at the peak.
        final_fraction: learning rate of the last step ÷ the peak, in [0, 1].

    Raises:
        ValueError: if an option lies outside its range.
    """
    _check_warmup(steps, warmup_steps)
    start = 0.0 if warmup_steps else learning_rate
    return optax.warmup_cosine_decay_schedule(start, learning_rate, warmup_steps, steps, final_fraction * learning_rate)


@registry.register("schedule", "inverse_sqrt")
def inverse_sqrt(steps: int, *, learning_rate: Positive = 1e-3, warmup_steps: int = 100) -> optax.Schedule:
    """Learning rate by step t: a linear warm-up over w steps, then α sqrt(w/t) (Vaswani et al. 2017, arXiv 1706.03762, section 5.3).

    Args:
        steps: length of the run.
        learning_rate: α, the peak.
        warmup_steps: w ≥ 1, fewer than `steps`.

    Raises:
        ValueError: if an option lies outside its range.
    """
    _check_warmup(steps, warmup_steps, least=1)
    return lambda step: learning_rate * jnp.minimum(step / warmup_steps, jnp.sqrt(warmup_steps / jnp.maximum(step, 1)))


def _check_warmup(steps: int, warmup_steps: int, least: int = 0) -> None:
    if not least <= warmup_steps < steps:
        raise ValueError(
            f"schedule.warmup_steps={warmup_steps} must be at least {least} and less than steps={steps}; use {max(least, steps // 10)}"
        )
