"""Muon for the matrices of a model, stacked ones too, and AdamW for the rest; inside of DiLoCo it is MuLoCo."""

from collections.abc import Callable
import functools
import inspect
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib

from decjax import registry
from decjax.optim.inner import with_ranges
from decjax.reduce import matrices

POLYNOMIALS = ("standard", "dion")  # Newton-Schulz coefficients that optax knows by name.
MAX_ITERATIONS = 2**8  # All are unrolled.


@registry.register("optimizer", "muon", memory="1 copy of matrices, 2 of the rest", source="arXiv 2502.16982, in DiLoCo 2505.23725")
def muon(learning_rate: optax.ScalarOrSchedule, *, rest: str = matrices.REST, **options: Any) -> optax.GradientTransformation:
    """Muon: matrices step by the orthogonalized momentum, O = UVᵀ for M = UΣVᵀ; what is no matrix steps by AdamW.

        M ← βM + (1 − β)G;     A = βM/(1 − β^(t+1)) + (1 − β)G/(1 − β^t);     X ← X − α sqrt(max(1, J/I)) O(A)

    for step t = 1, 2, … and X of shape I×J, with O by Newton-Schulz iterations; `nesterov=False` has A = M/(1 − β^t). The bias corrections
    1 − β^t are those of optax. The papers' code has none: its A is βM + (1 − β)G, whose two terms have other weights in the first steps.
    O does not depend on the scale of A, so without Nesterov's momentum both are the same.

    Arrays of three dimensions are stacks of matrices, as the scanned layers of a transformer; those of more are convolutions, whose last
    axis is J and whose others are I. `method=diloco,optimizer=muon` is MuLoCo: H local steps of Muon, then DiLoCo's outer step; it
    sends and remembers what `diloco` does. A worker sees its own gradients only, on any data.

    Args:
        learning_rate: α, a number or a function of the step.
        rest: names, between bars; arrays with one of them in their path take AdamW's step, and so do vectors.
        **options: those of `optax.contrib.muon`, which is used for all of it: {options}.

    Raises:
        ValueError: for polynomials that optax has not, or numbers out of range.

    References: Liu et al. 2025, arXiv 2502.16982; Thérien et al. 2025, arXiv 2505.23725 (MuLoCo).
    """
    _check(**options)
    of_array = functools.partial(_dimension_numbers, rest)
    numbers: Callable[[Any], Any] = lambda params: jax.tree.map_with_path(of_array, params)
    chosen: dict[str, Any] = {"muon_weight_dimension_numbers": numbers} | options
    return optax.contrib.muon(learning_rate, **chosen)


def _check(ns_coeffs: Any = POLYNOMIALS[0], ns_steps: Any = 1, beta: Any = 0.0, **others: Any) -> None:
    """Raises a ValueError for what optax would take, or refuse in the first step, or without the option's name."""
    if not _are_polynomials(ns_coeffs):
        raise ValueError(
            f"optimizer 'muon': ns_coeffs={registry.shown(ns_coeffs)} must be three numbers, several times three, or one of "
            f"{', '.join(POLYNOMIALS)}"
        )
    if isinstance(ns_steps, int) and not 1 <= ns_steps <= MAX_ITERATIONS:
        raise ValueError(f"optimizer 'muon': ns_steps={ns_steps} must be at least 1 and at most {MAX_ITERATIONS}")
    if isinstance(beta, int | float) and not 0 <= beta < 1:
        raise ValueError(f"optimizer 'muon': beta={beta} must be at least 0 and less than 1")


def _are_polynomials(value: Any) -> bool:
    """Whether these are coefficients of Newton-Schulz iterations, or a name of such."""
    if isinstance(value, str):
        return value in POLYNOMIALS
    try:
        shape = np.shape(np.asarray(value, float))
    except (TypeError, ValueError):  # No numbers, or rows of different lengths.
        return False
    return len(shape) in (1, 2) and shape[0] > 0 and shape[-1] == 3


def _dimension_numbers(rest: str, path: Any, x: Any) -> Any:
    """Which axes of an array are the rows and columns of a matrix; None for one that is none."""
    rows = matrices.matrix_axes(path, x, rest)
    return optax.contrib.MuonDimensionNumbers(rows, (x.ndim - 1,)) if rows else None


def _with_options_of_optax() -> None:
    """Shows the options of `optax.contrib.muon` in the signature, which is the section of a config, and in the docstring."""
    own = inspect.signature(muon).parameters
    others = [p for p in inspect.signature(optax.contrib.muon).parameters.values() if p.name not in own]
    given = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in others]
    muon.__signature__ = with_ranges(inspect.Signature([own["learning_rate"], own["rest"], *given]))  # pyright: ignore[reportFunctionMemberAccess]
    muon.__doc__ = str(muon.__doc__).replace("{options}", ", ".join(p.name for p in given))


_with_options_of_optax()
