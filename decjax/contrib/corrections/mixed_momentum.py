"""Methods for different data on each worker, with a momentum of what mixed steps do: QG-DSGDm, QG-DAdam and DecentLaM.

The difference x − x⁺ between the parameters before and after a step also contains what the neighbors did, so momenta of workers with
different data stay close together, unlike those of the workers' own gradients.
"""

import abc
from collections.abc import Callable
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import gossip
from decjax.buckets import in_float32, is_floating, of_floating, wide_dtype
from decjax.optim.decentralize import Decentralized, DecentralizeState
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import KEEPS_MEAN, LEAVES_STEP, MIXES_AFTER, Mixing, Order, Ordered, check_update
from decjax.options import Decay, NonNegative
from decjax.typing import PyTree


@communicating
@transient("mixer")
class MixedMomentumState(NamedTuple):
    """State of methods with a momentum of mixed parameters; moments have the shapes of the parameters.

    Attributes:
        step: steps so far, an int32 scalar.
        inner: state of the transformation of the gradient, as clipping.
        mixer: state of the mixer.
        momentum: m.
        variance: v; () without one.
    """

    step: jax.Array
    inner: PyTree
    mixer: PyTree
    momentum: PyTree
    variance: PyTree = ()


def mix_with_step(
    mixer: gossip.Mixer, order: Order, step: PyTree, params: PyTree, state: PyTree, phase: int | None, received: PyTree = None
) -> tuple[PyTree, PyTree]:
    """Take a step of `decentralize` along u: (x⁺ − x, state of the mixer), x⁺ = W(x + u) in order "atc", Wx + u in "awc".

    `state` has the fields `step` and `mixer`. For narrow parameters, such as bfloat16, x + u is rounded in messages only: x⁺ − x
    includes the rounding error, which a momentum of x⁺ − x would accumulate.
    """
    form = Decentralized(optax.identity(), mixer, order=order)
    before = DecentralizeState(state.step, optax.EmptyState(), state.mixer)
    updates, after = form.update(step, before, params, phase=phase, received=received)
    if order == "atc" and mixer.linear:
        updates = jax.tree.map(_with_rest, updates, params, step)
    return updates, after.mixer


def _with_rest(update: jax.Array, x: jax.Array, u: jax.Array) -> jax.Array:
    """Return an update plus the error of rounding x + u to the type of x."""
    if not is_floating(x) or x.dtype == (dtype := wide_dtype(x)):
        return update
    stepped = x.astype(dtype) + u.astype(dtype)
    return update + (stepped - stepped.astype(x.dtype).astype(dtype))


class MixedMomentum(Mixing):
    """Base of methods with a momentum of mixed parameters.

    Attributes:
        learning_rate: η, by step.
        clip: clips each worker's own gradient.
        weight_decay: λ, added to the gradient.
    """

    messages = "parameters"
    memory = "1 momentum"
    needs = "the mixer's graph"

    learning_rate: optax.Schedule
    clip: optax.GradientTransformation = optax.identity()
    _: dataclasses.KW_ONLY
    weight_decay: NonNegative = 0.0

    @functools.cached_property
    def communicator(self):
        return gossip.unrounded(self.mixer)

    @property
    def gradient(self) -> optax.GradientTransformation:
        """The transformation of the gradient."""
        return optax.chain(self.clip, optax.add_decayed_weights(self.weight_decay))

    def init(self, params):
        zeros, memory = jax.tree.map(jnp.zeros_like, params), init_memory(self.communicator.init, params)
        return MixedMomentumState(jnp.zeros((), jnp.int32), self.gradient.init(params), memory, zeros)


def inverse(rate: jax.Array) -> jax.Array:
    """Return 1/η, and 0 for η = 0, as in a step that changes nothing."""
    return jnp.where(rate > 0, 1 / jnp.where(rate > 0, rate, 1), 0)


class QuasiGlobal(MixedMomentum, Ordered):
    """Base of methods whose own step along a direction is mixed, and whose moments follow the mixed step."""

    data = "moderately different"

    _: dataclasses.KW_ONLY
    order: Order = "atc"

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params, self.order, phase, received)
        grads, inner = self.gradient.update(grads, state.inner, params)
        rate = jnp.asarray(self.learning_rate(state.step))
        step = self.step(grads, state, params, rate)
        moved, memory = mix_with_step(self.communicator, self.order, step, params, state, phase, received)
        after = state._replace(step=increment(state.step), inner=inner, mixer=memory)
        return moved, self.remember(after, moved, rate)

    @abc.abstractmethod
    def step(self, grads: PyTree, state: MixedMomentumState, params: PyTree, rate: jax.Array) -> PyTree:
        """Return the worker's own step."""

    @abc.abstractmethod
    def remember(self, state: MixedMomentumState, moved: PyTree, rate: jax.Array) -> MixedMomentumState:
        """Return the state with the moments after the mixed step."""


class QGDSGDm(QuasiGlobal, name="qg_dsgdm"):
    """QG-DSGDm: decentralized SGD whose quasi-global momentum follows the mixed parameters.

        x½ = x − η (β m + g)     x⁺ = W x½     m <- μ m + (1−μ) (x − x⁺) / η

    In a step with η = 0, (x − x⁺)/η is taken to be zero.

    Attributes:
        order: "atc" mixes after the step, as published; "awc" before it, so that the exchange overlaps with the gradient.
        momentum: β; 0: decentralized SGD.
        quasi_momentum: μ; None: β.
        nesterov: step along g + β (β m + g), which is QG-DSGDm-N.

    Reference: Lin et al. 2021, arXiv 2102.04761, algorithm 1.
    """

    like = "sgdm"

    momentum: Decay = 0.9
    quasi_momentum: Decay | None = None
    nesterov: bool = False

    def step(self, grads, state, params, rate):
        def one(g, m):
            d = self.momentum * m + g
            return -jnp.asarray(rate, g.dtype) * (g + self.momentum * d if self.nesterov else d)

        return in_float32(one, grads, state.momentum)

    def remember(self, state, moved, rate):
        mu = self.momentum if self.quasi_momentum is None else self.quasi_momentum
        per_rate = -inverse(rate)
        new = of_floating(lambda m, u: mu * m + (1 - mu) * u * per_rate.astype(u.dtype), state.momentum, moved)
        return state._replace(momentum=new)


class QGDAdam(QuasiGlobal, name="qg_dadam"):
    """QG-DAdam: decentralized Adam whose two moments follow the mixed parameters.

        m' = β₁ m + (1−β₁) g     v' = β₂ v + (1−β₂) g²     x½ = x − η m' / (√v' + ε)     x⁺ = W x½
        d = (x − x⁺) / ‖x − x⁺‖     m <- β₁ m + (1−β₁) d     v <- β₂ v + (1−β₂) d²

    m' and v' have Adam's bias corrections in x½. d has the norm 1, as in the authors' code: of the size of Adam's steps, d would outweigh
    the gradient in m'.

    Attributes:
        order: "atc" mixes after the step, as published; "awc" before it, so that the exchange overlaps with the gradient.
        norm: the norm of a tree.
        b1: β₁.
        b2: β₂.
        eps: ε, added outside of the root.
        weight_decay: λ, decoupled.

    Reference: Lin et al. 2021, arXiv 2102.04761.
    """

    memory = "2 moments"

    norm: Callable[[PyTree], jax.Array] = optax.global_norm
    b1: Decay = 0.9
    b2: Decay = 0.99
    eps: NonNegative = 1e-8

    @property
    def gradient(self):
        return self.clip

    def init(self, params):
        state = super().init(params)
        return state._replace(variance=state.momentum)

    def step(self, grads, state, params, rate):
        t = state.step + 1

        def one(g, m, v, x):
            m, v = self.b1 * m + (1 - self.b1) * g, self.b2 * v + (1 - self.b2) * g**2
            unbiased = m / (1 - self.b1**t).astype(m.dtype), v / (1 - self.b2**t).astype(v.dtype)
            d = unbiased[0] / (jnp.sqrt(unbiased[1]) + self.eps) + self.weight_decay * x
            return -jnp.asarray(rate, g.dtype) * d

        return in_float32(one, grads, state.momentum, state.variance, params)

    def remember(self, state, moved, rate):
        scale = 1 / jnp.maximum(self.norm(moved), jnp.finfo(jnp.float32).tiny)
        d = in_float32(lambda u: -u * scale.astype(u.dtype), moved)
        m = of_floating(lambda m, d: self.b1 * m + (1 - self.b1) * d, state.momentum, d)
        v = of_floating(lambda v, d: self.b2 * v + (1 - self.b2) * d**2, state.variance, d)
        return state._replace(momentum=m, variance=v)


class DecentLaM(MixedMomentum, name="decentlam"):
    """DecentLaM: decentralized SGD with momentum whose bias on different data is that of decentralized SGD without momentum.

        g̃ = (x − W(x − η g)) / η     m <- β m + g̃     x <- x − η m

    Momentum of a worker's own gradients (`optimizer=sgdm` in order "atc", DmSGD) makes the bias that of a learning rate of η/(1−β).
    Here momentum is of g̃, which is zero on average over a fixed point of decentralized SGD, so the fixed point stays. Since
    x − η m = W(x − η g) − η β m_before, a step is one of decentralized SGD and a local one along the momentum. In a step with η = 0, g̃
    is taken to be zero.

    Attributes:
        momentum: β; 0: decentralized SGD.

    Reference: Yuan et al. 2021, arXiv 2104.11981, algorithm 2.
    """

    like = "sgdm"
    data = "different; the bias of SGD stays"
    requires = (MIXES_AFTER, KEEPS_MEAN, LEAVES_STEP)

    momentum: Decay = 0.9

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params)
        grads, inner = self.gradient.update(grads, state.inner, params)
        rate = jnp.asarray(self.learning_rate(state.step))
        scaled = lambda scale, tree: in_float32(lambda u: jnp.asarray(scale, u.dtype) * u, tree)
        moved, memory = mix_with_step(self.communicator, "atc", scaled(-rate, grads), params, state, phase)
        pulled = scaled(-inverse(rate), moved)  # g̃
        updates = in_float32(jnp.add, moved, scaled(-rate * self.momentum, state.momentum))
        momentum = of_floating(lambda m, g: self.momentum * m + g, state.momentum, pulled)
        return updates, MixedMomentumState(increment(state.step), inner, memory, momentum)
