"""NoLoCo: DiLoCo without any collective; workers average in pairs, which change from one outer step to the next.

With θ_i the parameters of worker i after H local steps, φ_i those after its last outer step, and means over its pair,

    Δ_i = θ_i − φ_i;   δ_i ← αδ_i + β mean(Δ) − γ(φ_i − mean(φ));   φ_i ← φ_i + δ_i;   θ_i ← φ_i

The last term draws the slow parameters of a pair together. With all workers in the place of a pair all φ are equal, so it vanishes,
and the step is DiLoCo's with momentum α, not Nesterov's, and rate β. Pairs are those of any mixer; "random_matching" has random ones.

Reference: Kolehmainen et al. 2025, arXiv 2506.10911.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from decjax import gossip, registry
from decjax.buckets import in_float32
from decjax.optim.decentralize import mix_in_step
from decjax.optim.gossip_diloco import OuterSteps
from decjax.optim.method import OldMethod


@registry.register(
    "method",
    "noloco",
    chooses=("mixer", "optimizer"),
    anchored=True,
    default_topology="random_matching",
    messages="changes and parameters, every H steps",
    memory="2 copies",
    source="arXiv 2506.10911",
)
def noloco(
    inner: optax.GradientTransformation,
    mixer: gossip.Mixer,
    *,
    every: int = 30,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.5,
    pull: float = 1.0,
) -> OldMethod:
    """NoLoCo: H local steps, then an outer step along the mean change of a random pair, which also draws the pair together.

        Δ_i = θ_i − φ_i;   δ_i ← αδ_i + β mean(Δ) − γ(φ_i − mean(φ));   φ_i ← φ_i + δ_i;   θ_i ← φ_i

    A worker sends two arrays of the parameters' size to its partner, once in H steps. With the complete graph it is DiLoCo with plain
    momentum. Any data; the mixer's graphs and codecs, but not those of push_sum, overlap_push_sum and dcd.

    Args:
        every: H, steps from one outer step to the next.
        outer_learning_rate: β > 0.
        outer_momentum: α in [0, 1).
        pull: γ; workers of a pair come together if 0 < γ < 2(1 + α).

    Reference: Kolehmainen et al. 2025, arXiv 2506.10911.
    """
    if not 0 < pull < 2 * (1 + outer_momentum):
        raise ValueError(
            f"method 'noloco' with pull={pull}: workers drift apart unless it lies between 0 and {2 * (1 + outer_momentum):g}; use 1.0"
        )
    # A memory of the mixer is also of changes, which averaging the parameters does not make equal.
    return _Pairs("noloco", inner, gossip.Restartless(mixer), every, outer_momentum, outer_learning_rate, pull).method()


@dataclasses.dataclass(frozen=True)
class _Pairs(OuterSteps):
    """The outer step along mixed changes, from mixed slow parameters."""

    alpha: float
    beta: float
    gamma: float

    def values(self, params, change):
        return change, params

    def start(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    def outer_step(self, stepped, state, phase):
        change = jax.tree.map(jnp.subtract, stepped, state.anchor)
        (change, mean), memory = mix_in_step(self.periodic, (change, state.anchor), state, phase)
        delta = in_float32(self.moved, state.outer, change, state.anchor, mean)
        return state._replace(outer=delta, anchor=optax.apply_updates(state.anchor, delta), mixer=memory)

    def moved(self, delta, change, x, mean):
        return self.alpha * delta + self.beta * change - self.gamma * (x - mean)
