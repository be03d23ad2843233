"""Gossip of whole parameters: plain, in several rounds, accelerated."""

import math

import jax.numpy as jnp
import numpy as np

from decjax import codecs
from decjax.channel import Channel
from decjax.gossip import compressed
from decjax.gossip.mixer import Mixer
from decjax.gossip.rounds import check_rounds, due, layout_of, mix_round, num_phases, sent_bytes
from decjax.topology import Topology


def exact(topology: Topology, channel: Channel = Channel(), *, rounds: int = 1, codec: codecs.Codec | None = None) -> Mixer:
    """Plain gossip: step t applies rounds tR … tR + R − 1 of the topology, x_i <- Σ_j W_ij x_j each.

    Args:
        topology: who talks to whom.
        channel: how parameters travel.
        rounds: R, rounds per step.
        codec: the form of messages between nodes; None: as they are. See `compressed.differences`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if R < 1, or the codec has no messages to encode.
    """
    if codec:
        return compressed.differences(topology, channel, codec=codec, rounds=rounds)
    check_rounds(rounds)
    cycle = num_phases(topology, rounds)

    def exchange(params, state, phase):
        layout = layout_of(params, topology, channel.bucket_bytes)
        vectors = layout.pack(params)
        for index in due(topology, rounds, phase):
            vectors = [mix_round(x_P, topology.rounds[index], channel.axis) for x_P in vectors]
        return layout.unpack(vectors, like=params), state

    def num_bytes(params, phase):
        layout = layout_of(params, topology, channel.bucket_bytes)
        return sum(sent_bytes(topology.rounds[index], layout) for index in due(topology, rounds, phase))

    return Mixer(
        init=lambda params: (),
        exchange=exchange,
        phase=lambda step: step % cycle,
        phases=range(cycle),
        num_bytes=num_bytes,
        num_workers=topology.num_workers,
    )


def accelerated(topology: Topology, channel: Channel = Channel(), *, rounds: int) -> Mixer:
    """Accelerated gossip on a static symmetric graph: z_{r+1} = (1+η) W z_r − η z_{r−1}, with z_0 = z_{−1} = x.

    η = (1 − √(1−β²)) / (1 + √(1−β²)), β the second largest modulus of W's eigenvalues. The mean is preserved, and over
    many rounds disagreement shrinks by about √η a round instead of β. Over few rounds it may grow: whether R are enough is
    checked on W's own eigenvalues.

    Args:
        topology: a graph of period 1 with symmetric W.
        channel: how parameters travel.
        rounds: R ≥ 1, rounds per step.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if the graph varies in time or W is not symmetric, where the recursion stalls or diverges, or if R plain
            rounds contract at least as well on this graph.

    Reference:
        Liu and Morse 2011, "Accelerated linear iterations for distributed averaging".
    """
    check_rounds(rounds)
    if topology.period != 1 or not topology.is_symmetric:
        kind = f"varies over a period of {topology.period}" if topology.period != 1 else "is not symmetric"
        raise ValueError(
            f"accelerated gossip needs a static symmetric graph, but topology {topology.name!r} {kind}; "
            "use 'ring', 'torus' or 'hypercube', or plain rounds"
        )
    W_NxN = topology.matrix(0)
    # Eigenvalues of disagreement: of W without that of the mean.
    eigenvalues = np.linalg.eigvalsh(W_NxN - np.full_like(W_NxN, 1 / topology.num_workers))
    beta = min(np.abs(eigenvalues).max(), 1.0)
    root = math.sqrt(1 - beta**2)
    eta = (1 - root) / (1 + root)
    before = now = np.ones_like(eigenvalues)
    for _ in range(rounds):
        before, now = now, (1 + eta) * eigenvalues * now - eta * before
    if np.abs(now).max() >= beta**rounds:
        raise ValueError(
            f"accelerated gossip contracts by {np.abs(now).max():.3g} over rounds={rounds} on topology "
            f"{topology.name!r}, plain rounds by {beta**rounds:.3g}; use more rounds, or plain ones"
        )
    plain = exact(topology, channel, rounds=rounds)

    def exchange(params, state, phase):
        del phase
        layout = layout_of(params, topology, channel.bucket_bytes)

        def accelerate(x_P):
            before = now = x_P.astype(jnp.promote_types(x_P.dtype, jnp.float32))
            for _ in range(rounds):
                before, now = now, (1 + eta) * mix_round(now.astype(x_P.dtype), topology.rounds[0], channel.axis) - eta * before
            return now.astype(x_P.dtype)

        return layout.unpack([accelerate(x_P) for x_P in layout.pack(params)], like=params), state

    return plain._replace(exchange=exchange)
