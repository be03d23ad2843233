"""DeepSqueeze: parameters are encoded together with what earlier messages have lost."""

import jax.numpy as jnp

from decjax import registry
from decjax.channel import Channel
from decjax.codecs import Codec
from decjax.gossip.coded import Scheme, compensated
from decjax.gossip.mixer import Mixer
from decjax.topology import Topology


def remainders(gamma: float) -> Scheme:
    """The scheme of DeepSqueeze: c = C(x + e); e <- x + e − c; x <- x + γ pull(c)."""

    def merge(x, c, pulled, error):
        return x + gamma * pulled, x + error - c

    return Scheme(lambda x, row_sum: jnp.zeros_like(x), jnp.add, merge)


@registry.register(
    "mixer", "deepsqueeze", needs="doubly stochastic graph, contractive codec", messages="compressed parameters", memory="1 copy"
)
def deepsqueeze(
    topology: Topology, channel: Channel = Channel(), *, codec: Codec | str = "int8", gamma: float | None = None, rounds: int = 1
) -> Mixer:
    """DeepSqueeze: compressed parameters travel, with what earlier messages have lost added to them.

        c_i = C(x_i + e_i)     e_i <- x_i + e_i − c_i     x_i <- x_i + γ Σ_j w_ij (c_j − c_i)

    Nothing is remembered about neighbours, so the graph may vary in time. The error stays as large as what the codec loses of x.

    Args:
        topology: doubly stochastic.
        channel: how parameters travel.
        codec: C, contractive.
        gamma: γ in (0, 1]; None: 1 for a codec that keeps 0.9 of the energy of noise, else half of the fraction it keeps.
        rounds: R ≥ 1, rounds per step.

    Reference: Tang et al. 2019, "DeepSqueeze: decentralization meets error-compensated compression", arXiv 1907.07346, algorithm 1.
    """
    return compensated("deepsqueeze", topology, channel, codec, gamma, rounds, remainders)
