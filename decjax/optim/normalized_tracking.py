"""GT-NSGDm: gradient tracking of momenta, and steps of equal length, for gradients whose noise has heavy tails.

    v <- β v + (1−β) g     y <- W (y + v − v₋)     x <- W (x − η y / ‖y‖),     y = v at first

‖y‖ is the norm over all of a worker's parameters. Reference: Yu et al. 2025, arXiv 2505.03736.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from decjax import gossip, registry
from decjax.optim.method import OldMethod
from decjax.optim.tracking_in_turn import track_in_turn


@registry.register(
    "method",
    "gt_nsgdm",
    chooses=("mixer",),
    like="sgdm",  # Weight decay is added to the gradient: as much as AdamW's would be larger than it.
    step="v ← βv + (1−β)g, y ← W(y + v − v₋), x ← W(x − η y/‖y‖)",
    messages="parameters and trackers",
    memory="3 copies",
    needs="the mixer's graph",
    data="any; noise with heavy tails",
    source="arXiv 2505.03736",
)
def gt_nsgdm(
    mixer: gossip.Mixer,
    learning_rate: optax.Schedule,
    clip: optax.GradientTransformation = optax.identity(),
    norm: Callable[[Any], jax.Array] = optax.global_norm,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
) -> OldMethod:
    """GT-NSGDm: steps of length η along the tracked mean of the workers' momenta; see `decjax.optim.normalized_tracking`.

    Args:
        momentum: β in [0, 1).
        weight_decay: λ, added to the gradient.

    Reference: Yu et al. 2025, arXiv 2505.03736, algorithm 1.
    """
    signal = optax.chain(clip, optax.add_decayed_weights(weight_decay), optax.ema(momentum, debias=False))

    def direction(y, params):
        del params
        scale = 1 / jnp.maximum(norm(y), jnp.finfo(jnp.float32).tiny)
        return jax.tree.map(lambda y: y * scale.astype(y.dtype), y)

    return track_in_turn(signal, optax.chain(optax.stateless(direction), optax.scale_by_learning_rate(learning_rate)), mixer)
