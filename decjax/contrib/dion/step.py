"""The optimizer for reducer "dion"."""

import jax
import optax

from decjax import registry
from decjax.optim import matrices


@registry.register("optimizer", "dion", source="arXiv 2504.05295")
def dion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    rest: str = matrices.REST,
) -> optax.GradientTransformation:
    """The optimizer for reducer "dion": matrices step along the reducer's result u, x ← (1 − αλ)x − αu; the rest by AdamW.

    Args:
        learning_rate: α, a number or a function of the step, for both.
        weight_decay: λ, decoupled, of matrices only.
        b1: β1 in [0, 1), decay of AdamW's momentum.
        b2: β2 in [0, 1), decay of AdamW's variance.
        eps: ε, added outside of the root.
        rest: names, between bars, as of the reducer; arrays with one of them in their path take AdamW's step, and so do vectors.

    Reference: Ahn et al. 2025, arXiv 2504.05295.
    """

    def label(path, x):
        return "matrix" if matrices.matrix_axes(path, x, rest) else "rest"

    along = optax.chain(optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate))
    adamw = optax.adamw(learning_rate, b1, b2, eps, weight_decay=0.0)
    return optax.partition({"matrix": along, "rest": adamw}, lambda params: jax.tree.map_with_path(label, params))
