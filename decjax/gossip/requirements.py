"""What mixers require of topologies and codecs, and the mixing strength γ that follows from a codec."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from decjax import registry
from decjax import topology as topology_lib
from decjax.codecs import Codec
from decjax.gossip.rounds import is_mean
from decjax.registry import Requirement
from decjax.topology import Topology

FINE = 0.9  # mixing with γ = 1 is stable with codecs that keep this fraction of the energy of noise
NOISE_VALUES = 4096  # values of noise that this is measured on


def typical_contraction(codec: Codec) -> float:
    """Return the fraction of the energy of Gaussian noise that a codec keeps: 1 − ‖C(x) − x‖²/‖x‖², measured on 4096 values.

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


def strength(codec: Codec) -> float:
    """Return the γ for a codec: 1 if it is fine, else half of its typical contraction."""
    kept = typical_contraction(codec)
    return 1.0 if kept >= FINE else max(kept / 2, 1e-3)


# -- Of topologies ----------------------------------------------------------------------------------------------------

DOUBLY_STOCHASTIC = Requirement(
    "topology",
    "a doubly stochastic graph",
    topology_lib.is_doubly_stochastic,
    "use 'directed_exponential' or another one whose W has rows and columns that sum to one, or mixer 'push_sum' with method "
    "'decentralized'",
)
STATIC = Requirement("topology", "a static graph", lambda topology: topology.is_static, "use 'ring' or 'hypercube'")
SYMMETRIC = Requirement(
    "topology",
    "a symmetric graph",
    lambda topology: topology.is_symmetric,
    "use 'ring', 'hypercube' or 'one_peer_exponential(pairwise=True)'",
)
SINGLE_WORKERS = Requirement(
    "topology",
    "single workers as nodes",
    lambda topology: all(round_.group_size == 1 for round_ in topology.rounds),
    "use 'ring', 'exponential' or another graph without local_size",
)


def _sending_sizes(topology: Topology) -> set[int]:
    return {round_.group_size for round_ in topology.rounds if not is_mean(round_)}


MESSAGES = Requirement(
    "topology",
    "messages between nodes for its codec, and not only means inside nodes or a single worker",
    lambda topology: any(round_.shifts for round_ in topology.rounds),
    "use 'one_peer_exponential', or mixer 'exact' without a codec",
)
EQUAL_NODES = Requirement(
    "topology",
    "nodes of one size for its codec",
    lambda topology: len(_sending_sizes(topology)) == 1,
    "use another graph, or mixer 'exact' without a codec",
)
WHOLE_MATRICES = Requirement(
    "topology",
    "single workers as nodes for a codec of matrices",
    lambda topology: _sending_sizes(topology) == {1},
    "use a codec such as 'int8', or local_size=1",
)

# -- Of codecs --------------------------------------------------------------------------------------------------------


def made(codec: Codec | str | None) -> Codec:
    """Return the codec of an option; None stands for the identity."""
    return registry.make("codec", codec or "identity")


def _is_contractive(codec: Codec | str | None) -> bool:
    omega = made(codec).omega(NOISE_VALUES)  # With ω < 1, the error is on average smaller than what is encoded.
    return made(codec).contractive or (omega is not None and omega < 1)


CONTRACTIVE = Requirement("codec", "a contractive codec", _is_contractive, "use 'int8', or mixer 'exact'")
FINE_CODEC = Requirement(
    "codec",
    f"a codec that keeps at least {FINE} of the energy of noise",
    lambda codec: typical_contraction(made(codec)) >= FINE,
    "use 'int8', or mixer 'choco'",
)
CODED = (
    Requirement(
        "codec", "a codec without a memory of a batch's samples", lambda codec: made(codec).state_key != "sample", "use 'int8'"
    ),
    Requirement(
        "codec",
        "a codec whose messages all have one size",
        lambda codec: made(codec).static_bytes,
        "use 'bounded(raw=False)' with mixer 'exact', or 'int8'",
    ),
    MESSAGES,
    EQUAL_NODES,
)
"""Requirements of mixers that encode their messages."""
