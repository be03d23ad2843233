"""Quasi-global momentum: a worker's momentum follows how the mixed parameters move, not the worker's own gradients.

    x½ = x − η (β m̂ + g)     x⁺ = W x½     m̂ <- μ m̂ + (1−μ) (x − x⁺) / η

x − x⁺ holds what the neighbours did as well, so momenta of workers with different data stay close together. In a step with η = 0,
(x − x⁺)/η is taken to be zero. The form with Adam is in `decjax.optim.quasi_global_adam`.

Reference: Lin et al. 2021, arXiv 2102.04761.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import gossip, registry
from decjax.buckets import in_float32, of_floating
from decjax.optim.decentralize import mix_with_step
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import OldMethod, Order, check_order, check_update, mixing


@communicating
@transient("mixer")
class QuasiGlobalState(NamedTuple):
    """State of quasi-global methods; moments have the shapes of the parameters.

    Attributes:
        step: steps so far, an int32 scalar.
        inner: state of the transformation of the gradient, as clipping.
        mixer: state of the mixer.
        momentum: m̂, the momentum of the mixed parameters.
        variance: v̂; () without one.
    """

    step: jax.Array
    inner: Any
    mixer: Any
    momentum: Any
    variance: Any = ()


@dataclasses.dataclass(frozen=True)
class QuasiGlobal:
    """The functions of a quasi-global transformation; `beta` and `mu` are those of the equations."""

    gradient: optax.GradientTransformation
    mixer: gossip.Mixer
    learning_rate: optax.Schedule
    order: Order
    beta: float
    mu: float
    nesterov: bool

    def init(self, params):
        nothing, memory = jax.tree.map(jnp.zeros_like, params), init_memory(self.mixer.init, params)
        return QuasiGlobalState(jnp.zeros((), jnp.int32), self.gradient.init(params), memory, nothing)

    def update(self, grads, state, params=None, *, phase=None, received=None, **extra):
        del extra
        check_update(params, self.order, phase, received)
        grads, inner = self.gradient.update(grads, state.inner, params)
        rate: Any = self.learning_rate(state.step)
        step = self.step(grads, state, params, rate)
        moved, memory = mix_with_step(self.mixer, self.order, step, params, state, phase, received)
        after = state._replace(step=increment(state.step), inner=inner, mixer=memory)
        return moved, self.remember(after, moved, rate)

    def step(self, grads, state, params, rate):
        del params

        def one(g, m):
            d = self.beta * m + g
            return -jnp.asarray(rate, g.dtype) * (g + self.beta * d if self.nesterov else d)

        return in_float32(one, grads, state.momentum)

    def remember(self, state, moved, rate):
        inverse = jnp.where(rate > 0, -1 / jnp.where(rate > 0, rate, 1), 0)
        new = of_floating(lambda m, u: self.mu * m + (1 - self.mu) * u * inverse.astype(u.dtype), state.momentum, moved)
        return state._replace(momentum=new)


def method_of(form: QuasiGlobal) -> OldMethod:
    """The method of a quasi-global transformation."""
    check_order(form.mixer, form.order)
    mixer = gossip.unrounded(form.mixer)
    form = dataclasses.replace(form, mixer=mixer)

    def exchange(params, opt_state, phase):
        return mixer.exchange(params, opt_state.mixer, phase)

    return mixing(form, mixer, exchange if form.order == "awc" else None)


@registry.register(
    "method",
    "qg_dsgdm",
    chooses=("mixer",),
    like="sgdm",
    step="x½ = x − η(βm + g), x⁺ = W x½, m ← μm + (1−μ)(x − x⁺)/η",
    messages="parameters",
    memory="1 momentum",
    needs="the mixer's graph",
    data="moderately different",
    source="arXiv 2102.04761",
)
def qg_dsgdm(
    mixer: gossip.Mixer,
    learning_rate: optax.Schedule,
    clip: optax.GradientTransformation = optax.identity(),
    *,
    order: Literal["awc", "atc"] = "atc",
    momentum: float = 0.9,
    quasi_momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> OldMethod:
    """QG-DSGDm: decentralized SGD whose momentum follows the mixed parameters; see `decjax.optim.quasi_global`.

    Args:
        order: "atc" mixes after the step, as published; "awc" before it, so that the exchange overlaps with the gradient.
        momentum: β in [0, 1); 0: decentralized SGD.
        quasi_momentum: μ in [0, 1); None: β.
        nesterov: step along g + β (β m̂ + g), which is QG-DSGDm-N.
        weight_decay: λ, added to the gradient.

    Reference: Lin et al. 2021, arXiv 2102.04761, algorithm 1.
    """
    gradient = optax.chain(clip, optax.add_decayed_weights(weight_decay))
    mu = momentum if quasi_momentum is None else quasi_momentum
    return method_of(QuasiGlobal(gradient, mixer, learning_rate, order, momentum, mu, nesterov))
