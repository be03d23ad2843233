"""DecentLaM: decentralized SGD with momentum whose bias on different data is that of decentralized SGD without momentum.

    g̃ = (x − W(x − η g)) / η     m <- β m + g̃     x <- x − η m

Momentum of a worker's own gradients (`optimizer=sgdm` in order "atc", DmSGD) makes the bias that of a learning rate of η/(1−β).
Here momentum is of g̃, which is zero on average over a fixed point of decentralized SGD, so the fixed point stays. Since
x − η m = W(x − η g) − η β m_before, a step is one of decentralized SGD and a local one along the momentum. In a step with η = 0, g̃ is
taken to be zero.

Reference: Yuan et al. 2021, arXiv 2104.11981, algorithm 2.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import gossip, registry
from decjax.buckets import in_float32, of_floating
from decjax.optim.decentralize import mix_with_step
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import OldMethod, check_mixes_after, check_update, mixing


@communicating
@transient("mixer")
class DecentLaMState(NamedTuple):
    """State of DecentLaM.

    Attributes:
        step: steps so far, an int32 scalar.
        inner: state of the transformation of the gradient, as clipping.
        mixer: state of the mixer.
        momentum: m, of the shapes of the parameters.
    """

    step: jax.Array
    inner: Any
    mixer: Any
    momentum: Any


@dataclasses.dataclass(frozen=True)
class _DecentLaM:
    """The functions of the transformation."""

    gradient: optax.GradientTransformation
    mixer: gossip.Mixer
    learning_rate: optax.Schedule
    beta: float

    def init(self, params):
        nothing, memory = jax.tree.map(jnp.zeros_like, params), init_memory(self.mixer.init, params)
        return DecentLaMState(jnp.zeros((), jnp.int32), self.gradient.init(params), memory, nothing)

    def update(self, grads, state, params=None, *, phase=None, **extra):
        del extra
        check_update(params)
        grads, inner = self.gradient.update(grads, state.inner, params)
        rate: Any = self.learning_rate(state.step)
        scaled = lambda scale, tree: in_float32(lambda u: jnp.asarray(scale, u.dtype) * u, tree)
        moved, memory = mix_with_step(self.mixer, "atc", scaled(-rate, grads), params, state, phase)
        pulled = scaled(jnp.where(rate > 0, -1 / jnp.where(rate > 0, rate, 1), 0), moved)  # g̃
        updates = in_float32(jnp.add, moved, scaled(-rate * self.beta, state.momentum))
        momentum = of_floating(lambda m, g: self.beta * m + g, state.momentum, pulled)
        step = increment(state.step)
        return updates, DecentLaMState(step, inner, memory, momentum)


@registry.register(
    "method",
    "decentlam",
    chooses=("mixer",),
    like="sgdm",
    step="v = (x − W(x − ηg))/η, m ← βm + v, x ← x − ηm",
    messages="parameters",
    memory="1 momentum",
    needs="the mixer's graph",
    data="different; the bias of SGD stays",
    source="arXiv 2104.11981",
)
def decentlam(
    mixer: gossip.Mixer,
    learning_rate: optax.Schedule,
    clip: optax.GradientTransformation = optax.identity(),
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
) -> OldMethod:
    """DecentLaM: decentralized momentum SGD that keeps the bias of decentralized SGD; see `decjax.optim.decentlam`.

    Args:
        momentum: β in [0, 1); 0: decentralized SGD.
        weight_decay: λ, added to the gradient.

    Raises:
        ValueError: if the mixer changes the step itself, as `dcd` and `push_sum` do: parameters move after mixing, too.

    Reference: Yuan et al. 2021, arXiv 2104.11981.
    """
    check_mixes_after("method 'decentlam'", mixer)
    if not mixer.keeps_mean:
        raise ValueError(
            f"method 'decentlam' steps along what mixing changes, and {mixer} mixes parameters of earlier steps; use mixer 'exact' "
            "or 'choco'"
        )
    if mixer.settle is not None:
        raise ValueError(
            f"method 'decentlam' moves parameters after they are mixed, which {mixer} cannot follow; use mixer 'exact' or 'choco'"
        )
    gradient = optax.chain(clip, optax.add_decayed_weights(weight_decay))
    mixer = gossip.unrounded(mixer)
    return mixing(_DecentLaM(gradient, mixer, learning_rate, momentum), mixer)
