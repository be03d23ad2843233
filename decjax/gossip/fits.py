"""Checks which codec fits a mixer and a topology, and derives the mixing strength γ from the codec."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs
from decjax import topology as topology_lib
from decjax.gossip.rounds import is_mean
from decjax.topology import Topology

FINE = 0.9  # a codec that keeps this fraction of the energy of noise is fine: mixing with γ = 1 is stable with it
NOISE_VALUES = 4096  # values of noise that this is measured on


def check_messages(topology: Topology, codec: codecs.Codec) -> None:
    """Raises ValueError if gossip on a topology cannot send a codec's messages, as those of varying size."""
    if codec.state_key == "sample":
        raise ValueError(f"codec {codec.name!r} remembers samples of a batch, so it cannot encode parameters; use codec 'int8'")
    if not codec.static_bytes:
        raise ValueError(
            f"codec {codec.name!r} has messages of varying size, and gossip, whose messages all have one size, would send the largest, "
            "more than the values themselves; use 'bounded(raw=False)' with mixer 'exact', or 'int8'"
        )
    sending = [round_ for round_ in topology.rounds if not is_mean(round_)]
    if not any(round_.shifts for round_ in sending):
        alone = topology.num_workers == 1
        why, fix = (
            ("averages over all workers", "a graph such as 'one_peer_exponential', or mixer")
            if not alone
            else ("has one worker", "mixer")
        )
        raise ValueError(
            f"topology {topology.name!r} has no messages that a codec could encode, since it {why}; use {fix} 'exact' without a codec"
        )
    sizes = sorted({round_.group_size for round_ in sending})
    if len(sizes) > 1:
        raise ValueError(
            f"topology {topology.name!r} exchanges between nodes of {sizes} workers, and a codec's memory is of one "
            "size; use a graph with nodes of one size, or mixer 'exact' without a codec"
        )
    if codec.matrix and sizes[0] > 1:
        raise ValueError(
            f"codec {codec.name!r} sees whole matrices, but in topology {topology.name!r} each of a node's "
            f"{sizes[0]} workers sends a share; use a codec such as 'int8', or local_size=1"
        )


def check_contractive(name: str, codec: codecs.Codec) -> None:
    """Raises ValueError for a codec whose errors, fed back, may grow without bound."""
    omega = codec.omega(NOISE_VALUES)  # With ω < 1, the error is on average smaller than what is encoded.
    if not codec.contractive and (omega is None or omega >= 1):
        raise ValueError(
            f"mixer {name!r} needs a contractive codec, but the errors of {codec.name!r}, which are fed back, may exceed what "
            "it encodes; use 'int8' or another contractive codec, or mixer 'exact'"
        )


def check_doubly_stochastic(name: str, topology: Topology) -> None:
    """Raises ValueError for a graph on which the mean over workers would change."""
    if not topology_lib.is_doubly_stochastic(topology):
        raise ValueError(
            f"mixer {name!r} needs a doubly stochastic graph, but rows or columns of {topology.name!r} do not "
            "sum to one; use mixer 'push_sum' with method 'decentralized', or a graph such as 'ring'"
        )


def typical_contraction(codec: codecs.Codec) -> float:
    """The fraction of the energy of Gaussian noise that a codec keeps: 1 − ‖C(x) − x‖²/‖x‖², measured on 4096 values.

    The δ of `Codec.delta` holds for the worst input, which hardly ever occurs; step sizes are derived from this value instead.
    """
    side = math.isqrt(NOISE_VALUES)
    shape = (side, side) if codec.matrix else (NOISE_VALUES,)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def loss(x):
        key = jax.random.key(0) if codec.random else None
        message = codec.encode(x, codec.init(shape, x.dtype), key)
        return jnp.sum((codec.decode(message, shape, x.dtype) - x) ** 2) / jnp.sum(x**2)

    with jax.ensure_compile_time_eval():
        return 1 - float(jax.jit(loss)(x))


def strength(name: str, gamma: float | None, codec: codecs.Codec | None = None) -> float:
    """The mixing strength γ that is given; for None 1 for a fine codec, or without one, else half of its typical contraction."""
    if gamma is None:
        kept = typical_contraction(codec) if codec else 1.0
        gamma = 1.0 if kept >= FINE else max(kept / 2, 1e-3)
    if not 0 < gamma <= 1:
        raise ValueError(
            f"mixer {name!r} with gamma={gamma}: must be more than 0 and at most 1; leave it out to derive it from the codec"
        )
    return gamma
