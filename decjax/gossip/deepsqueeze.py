"""DeepSqueeze: parameters are encoded together with what earlier messages have lost."""

import jax
import jax.numpy as jnp

from decjax.codecs import Codec
from decjax.gossip.coded import Compensated
from decjax.gossip.requirements import CONTRACTIVE, DOUBLY_STOCHASTIC
from decjax.typing import PyTree


class DeepSqueeze(Compensated, name="deepsqueeze"):
    """DeepSqueeze: compressed parameters travel, with what earlier messages have lost added to them.

        c_i = C(x_i + e_i)     e_i <- x_i + e_i − c_i     x_i <- x_i + γ Σ_j w_ij (c_j − c_i)

    Nothing is remembered about neighbors, so the graph may vary in time. The error stays as large as what the codec loses of x.

    Attributes:
        codec: C, contractive.
        gamma: γ in (0, 1]; None: 1 for a codec that keeps 0.9 of the energy of noise, else half of the fraction it keeps.
        rounds: R ≥ 1, rounds per step.

    Reference: Tang et al. 2019, "DeepSqueeze: decentralization meets error-compensated compression", arXiv 1907.07346, algorithm 1.
    """

    messages = "compressed parameters"
    memory = "1 copy"
    requires = (DOUBLY_STOCHASTIC, CONTRACTIVE)

    codec: Codec | str = "int8"

    def remember(self, x: jax.Array, row_sum: float | jax.Array) -> PyTree:
        return jnp.zeros_like(x)

    def encoded(self, x: jax.Array, memory: PyTree) -> jax.Array:
        return jnp.add(x, memory)

    def merge(self, x: jax.Array, c: jax.Array, pulled: jax.Array, memory: PyTree) -> tuple[jax.Array, PyTree]:
        return x + self.strength * pulled, x + memory - c
