"""Accelerated gossip: several rounds a step, with momentum from round to round."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh, registry
from decjax.channel import Channel
from decjax.gossip.exact import exact
from decjax.gossip.mixer import Mixer
from decjax.gossip.rounds import check_rounds, difference, mix_round
from decjax.topology import Round, Topology
from decjax.topology.schedule import EXACT_TOLERANCE


@registry.register("mixer", "accelerated", topology="ring", needs="static symmetric graph", messages="parameters", memory="none")
def accelerated(topology: Topology, channel: Channel = Channel(), *, rounds: int = 4) -> Mixer:
    """Accelerated gossip: R rounds per step with momentum between them, on a static graph with symmetric W.

        z_{r+1} = (1+η) W z_r − η z_{r−1},   z_0 = z_{−1} = x,   η = (1 − √(1−β²)) / (1 + √(1−β²))

    β is the second largest modulus of W's eigenvalues. The mean is preserved, and over many rounds disagreement shrinks by a factor
    of about √η per round instead of β. Over few rounds it may grow; whether R rounds are enough is checked with W's eigenvalues.

    Args:
        topology: static, with symmetric W.
        channel: how parameters travel.
        rounds: R ≥ 1, rounds per step.

    Raises:
        ValueError: if the graph varies in time or W is not symmetric, where the recursion stalls or diverges, or if R plain
            rounds contract at least as well on this graph.

    Reference: Liu and Morse 2011, "Accelerated linear iterations for distributed averaging".
    """
    check_rounds(rounds)
    _check(topology)
    eta = _momentum(topology, rounds)
    plain = exact(topology, channel, rounds=rounds)
    (round_,) = topology.rounds
    how: dict[str, Any] = dict(round_=round_, rounds=rounds, eta=eta, axis=channel.axis)

    def exchange(params, state, phase):
        layout = channel.layout(params, multiple_of=round_.group_size)
        return layout.unpack([_accelerated(x_P, **how) for x_P in layout.pack(params)], like=params), state

    def pull(params, phase):
        layout = channel.layout(params, multiple_of=round_.group_size)
        return layout.unpack([_drawn(x_P, **how) for x_P in layout.pack(params)], like=params, wide=True)

    assert plain.linear is not None
    linear = plain.linear._replace(matrix=lambda phase: _matrix(topology.matrix(0), rounds, eta), pull=pull)
    return plain._replace(exchange=exchange, linear=linear)


def _check(topology: Topology) -> None:
    """Raises a ValueError for a graph that varies or is directed."""
    if topology.period != 1 or not topology.is_symmetric:
        kind = f"varies over a period of {topology.period}" if topology.period != 1 else "is not symmetric"
        raise ValueError(
            f"accelerated gossip needs a static symmetric graph, but topology {topology.name!r} {kind}; "
            "use 'ring', 'torus' or 'hypercube', or plain rounds"
        )


def _accelerated(x_P: jax.Array, round_: Round, rounds: int, eta: float, axis: mesh.Axis) -> jax.Array:
    """z_R of the recursion that starts from x. z is sent in the type of x; what rounding loses of it stays on its worker."""
    dtype = jnp.promote_types(x_P.dtype, jnp.float32)
    before = now = x_P.astype(dtype)
    for _ in range(rounds):
        sent = now.astype(x_P.dtype)
        mixed = mix_round(sent, round_, axis, wide=True).astype(dtype) + (now - sent.astype(dtype))
        before, now = now, (1 + eta) * mixed - eta * before
    return now.astype(x_P.dtype)


def _drawn(x_P: jax.Array, round_: Round, rounds: int, eta: float, axis: mesh.Axis) -> jax.Array:
    """z_R − x, from differences between neighbors."""
    dtype = jnp.promote_types(x_P.dtype, jnp.float32)
    before = now = jnp.zeros(x_P.shape, dtype)
    for _ in range(rounds):
        z_P = (x_P.astype(dtype) + now).astype(x_P.dtype)
        before, now = now, (1 + eta) * (now + difference(z_P, round_, axis)) - eta * before
    return now


def _matrix(W_NxN: np.ndarray, rounds: int, eta: float) -> np.ndarray:
    """The matrix that R rounds together apply."""
    before = now = np.eye(len(W_NxN))
    for _ in range(rounds):
        before, now = now, (1 + eta) * W_NxN @ now - eta * before
    return now


def _momentum(topology: Topology, rounds: int) -> float:
    """η for this graph; ValueError if it gains nothing over `rounds` plain rounds."""
    W_NxN = topology.matrix(0)
    # Eigenvalues of disagreement: of W without that of the mean.
    eigenvalues = np.linalg.eigvalsh(W_NxN - np.full_like(W_NxN, 1 / topology.num_workers))
    beta = min(np.abs(eigenvalues).max(), 1.0)
    if beta < EXACT_TOLERANCE:
        raise ValueError(
            f"accelerated gossip gains nothing on topology {topology.name!r} of {topology.num_workers} workers, where a plain round "
            "averages exactly; use mixer 'exact'"
        )
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
    return eta
