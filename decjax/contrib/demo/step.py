"""The optimizer of DeMo."""

import optax

from decjax import registry
from decjax.options import NonNegative


@registry.register("optimizer", "sign")
def sign_descent(learning_rate: optax.Schedule, *, weight_decay: NonNegative = 0.0) -> optax.GradientTransformation:
    """Sign descent, x ← (1 − αλ) x − α sign(g), the step that DeMo takes.

    Args:
        learning_rate: α, by step.
        weight_decay: λ.
    """
    return optax.chain(optax.scale_by_sign(), optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate))
