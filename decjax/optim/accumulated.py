"""AccumAdam: Adam whose moments are updated once per window of s steps, while parameters are updated in every step.

With g the gradient of step t (counted from 1) and k = ⌈t/s⌉ the number of the window:

    B ← B + g/s
    x ← x − α · [(β1 M + (1−β1) g) / (1−β1^k)] / ( sqrt((β2 V + (1−β2) g²) / (1−β2^k)) + ε )
    if t mod s == 0:  M ← β1 M + (1−β1) B;   V ← β2 V + (1−β2) B²;   B ← 0

Each of N workers sees a batch b that is N times smaller than the global one; its gradient noise adds σ²/b to Adam's second moment.
Here V averages squares of the window's *mean* gradient, which lowers that share to σ²/(s·b). Within a window M and V are constant;
the current gradient enters only the update of x. s = 1 is Adam. In the first s steps the update is g/(|g| + ε), the sign of the
gradient, so warm up the learning rate. The state takes three times the memory of the parameters.

Reference: arXiv 2410.11998 (AccumAdam).
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax.buckets import is_floating, wide_dtype
from decjax.optim.memories import increment
from decjax.typing import DType, PyTree


class AccumulatedAdamState(NamedTuple):
    """State of `scale_by_accumulated_adam`; the trees have the shapes of the parameters.

    Attributes:
        step: t, updates so far, an int32 scalar; t mod s is the position in the window.
        mu: M, first moment of the windows' mean gradients.
        nu: V, second moment of the windows' mean gradients.
        window_mean: B, the sum of this window's gradients so far, divided by s.
    """

    step: jax.Array
    mu: PyTree
    nu: PyTree
    window_mean: PyTree


def scale_by_accumulated_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, window: int = 4, mu_dtype: DType | None = None
) -> optax.GradientTransformation:
    """Return AccumAdam's update direction, without the learning rate (equations: `decjax.optim.accumulated`).

    Leaves that are not floating point get zero updates.

    Args:
        b1: β1 in [0, 1), decay of the first moment, per window. Adam's β1 to the power of s lets a gradient act for as many steps as
            with Adam; in short runs, a larger β1 learns slowly.
        b2: β2 in [0, 1), decay of the second moment, per window.
        eps: ε, added outside of the root.
        window: s ≥ 1 steps; about 4 for 8 workers, 8 for 16 to 32. A traced value (`optax.inject_hyperparams`) is not checked.
        mu_dtype: dtype in which M is stored, as in `optax.scale_by_adam`; None: that of the parameters.

    Raises:
        ValueError: if the window is less than 1.
    """
    if not isinstance(window, jax.Array) and window < 1:
        raise ValueError(f"AccumAdam window={window} steps: must be at least 1, which is Adam")

    direction = _AccumulatedAdam(b1, b2, eps, window, mu_dtype)
    return optax.GradientTransformation(direction.init, direction.update)


@dataclasses.dataclass(frozen=True)
class _AccumulatedAdam:
    """The functions of `scale_by_accumulated_adam`."""

    b1: float
    b2: float
    eps: float
    window: int
    mu_dtype: DType | None

    def init(self, params):
        mu = optax.tree.zeros_like(params, dtype=self.mu_dtype)
        nu, window_mean = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return AccumulatedAdamState(jnp.zeros((), jnp.int32), mu, nu, window_mean)

    def update(self, updates, state, params=None):
        step = increment(state.step)
        num_windows = (step + self.window - 1) // self.window
        corrections = 1 - self.b1**num_windows, 1 - self.b2**num_windows
        of_leaf = functools.partial(self.of_leaf, corrections, step % self.window == 0)
        results = jax.tree.map(of_leaf, updates, state.mu, state.nu, state.window_mean)
        updates, *moments = jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0,) * 4), results)
        return updates, AccumulatedAdamState(step, *moments)

    def of_leaf(self, corrections: Sequence[jax.Array], ends: jax.Array, *leaf: jax.Array) -> tuple[jax.Array, ...]:
        """Return a leaf's update, M, V and B from g, M, V and B; `ends` says whether the window ends with this step."""
        g, *before = leaf
        if not is_floating(before[1]):
            return jnp.zeros_like(before[1]), *before
        b1, b2 = self.b1, self.b2
        g, m, v, b = (x.astype(wide_dtype(x)) for x in leaf)
        m_now, v_now = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        # The corrections are float32; casting them keeps float64 and bfloat16 trees in their type.
        m_hat, v_hat = (x / correction.astype(x.dtype) for x, correction in zip((m_now, v_now), corrections))
        direction = m_hat / (jnp.sqrt(v_hat) + self.eps)
        b = b + g / self.window
        after = b1 * m + (1 - b1) * b, b2 * v + (1 - b2) * b**2, jnp.zeros_like(b)
        return direction, *(jnp.where(ends, x, y).astype(old.dtype) for x, y, old in zip(after, (m, v, b), before))


def accumulated_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    window: int = 4,
    mu_dtype: DType | None = None,
) -> optax.GradientTransformation:
    """AccumAdam: `scale_by_accumulated_adam` times −α, the learning rate; `window=1` is `optax.adam`.

    For L2 regularization that enters the gradient, put `optax.add_decayed_weights` before it.
    """
    return optax.chain(scale_by_accumulated_adam(b1, b2, eps, window, mu_dtype), optax.scale_by_learning_rate(learning_rate))


def accumulated_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    window: int = 4,
    mask: PyTree | Callable[[PyTree], PyTree] = None,
    mu_dtype: DType | None = None,
) -> optax.GradientTransformation:
    """AccumAdamW: AccumAdam with decoupled weight decay, x ← (1−αλ) x before the step; `window=1` is `optax.adamw`.

    Args:
        learning_rate: α, a number or a function of the step.
        b1: β1 in [0, 1), decay of the first moment, per window; see `scale_by_accumulated_adam`.
        b2: β2 in [0, 1), decay of the second moment, per window.
        eps: ε, added outside of the root.
        weight_decay: λ.
        window: s, steps whose gradients are accumulated before the moments change; about 4 for 8 workers, 8 for 16 to 32.
        mask: which leaves decay, as in `optax.add_decayed_weights`.
        mu_dtype: dtype of the first moment; None: that of the parameters.

    Reference: arXiv 2410.11998.
    """
    return optax.chain(
        scale_by_accumulated_adam(b1, b2, eps, window, mu_dtype),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
