"""QG-DAdam: decentralized Adam whose two moments follow how the mixed parameters move.

    m = β₁ m̂ + (1−β₁) g     v = β₂ v̂ + (1−β₂) g²     x½ = x − η m' / (√v' + ε)     x⁺ = W x½
    d = (x − x⁺) / ‖x − x⁺‖     m̂ <- β₁ m̂ + (1−β₁) d     v̂ <- β₂ v̂ + (1−β₂) d²

m' and v' are m and v with Adam's bias corrections. d has the norm 1, as in the authors' code: of the size of Adam's steps, d would
outweigh the gradient in m.

Reference: Lin et al. 2021, arXiv 2102.04761.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from decjax import gossip, registry
from decjax.buckets import in_float32, of_floating
from decjax.optim.method import OldMethod
from decjax.optim.quasi_global import QuasiGlobal, method_of


@dataclasses.dataclass(frozen=True)
class _QuasiGlobalAdam(QuasiGlobal):
    """The functions of QG-DAdam; `beta` is β₁ and `mu` is β₂."""

    eps: float
    weight_decay: float
    norm: Callable[[Any], jax.Array]

    def init(self, params):
        state = super().init(params)
        return state._replace(variance=state.momentum)

    def step(self, grads, state, params, rate):
        t = state.step + 1

        def one(g, m, v, x):
            m, v = self.beta * m + (1 - self.beta) * g, self.mu * v + (1 - self.mu) * g**2
            unbiased = m / (1 - self.beta**t).astype(m.dtype), v / (1 - self.mu**t).astype(v.dtype)
            d = unbiased[0] / (jnp.sqrt(unbiased[1]) + self.eps) + self.weight_decay * x
            return -jnp.asarray(rate, g.dtype) * d

        return in_float32(one, grads, state.momentum, state.variance, params)

    def remember(self, state, moved, rate):
        del rate
        scale = 1 / jnp.maximum(self.norm(moved), jnp.finfo(jnp.float32).tiny)
        d = in_float32(lambda u: -u * scale.astype(u.dtype), moved)
        m = of_floating(lambda m, d: self.beta * m + (1 - self.beta) * d, state.momentum, d)
        v = of_floating(lambda v, d: self.mu * v + (1 - self.mu) * d**2, state.variance, d)
        return state._replace(momentum=m, variance=v)


@registry.register(
    "method",
    "qg_dadam",
    chooses=("mixer",),
    step="x⁺ = W(x − η Adam(g)), moments of (x − x⁺)/‖x − x⁺‖",
    messages="parameters",
    memory="2 moments",
    needs="the mixer's graph",
    data="moderately different",
    source="arXiv 2102.04761",
)
def qg_dadam(
    mixer: gossip.Mixer,
    learning_rate: optax.Schedule,
    clip: optax.GradientTransformation = optax.identity(),
    norm: Callable[[Any], jax.Array] = optax.global_norm,
    *,
    order: Literal["awc", "atc"] = "atc",
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> OldMethod:
    """QG-DAdam: decentralized Adam whose two moments follow the mixed parameters; see `decjax.optim.quasi_global_adam`.

    Args:
        order: "atc" mixes after the step, as published; "awc" before it, so that the exchange overlaps with the gradient.
        b1: β₁ in [0, 1).
        b2: β₂ in [0, 1).
        eps: ε, added outside of the root.
        weight_decay: λ, decoupled.

    Reference: Lin et al. 2021, arXiv 2102.04761.
    """
    return method_of(_QuasiGlobalAdam(clip, mixer, learning_rate, order, b1, b2, False, eps, weight_decay, norm))
