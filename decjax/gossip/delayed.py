"""Asynchronous gossip, simulated: workers mix with what their neighbours had some steps ago."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from decjax import noise, registry
from decjax.channel import Channel
from decjax.gossip.exact import exact
from decjax.gossip.mixer import Mixer
from decjax.gossip.rounds import mix_round, own_weight
from decjax.topology import Topology

Draw = Literal["constant", "uniform", "geometric"]


class DelayedState(NamedTuple):
    """State of `delayed`.

    Attributes:
        count: int32 scalar, exchanges so far; delays are a function of (seed, worker, count).
        history: for each bucket x_DxP, this worker's parameters at its last D exchanges; the one of exchange t is at t mod D.
    """

    count: jax.Array
    history: tuple[jax.Array, ...]


@registry.register(
    "mixer",
    "delayed",
    needs="doubly stochastic graph without exact means inside nodes",
    messages="parameters of earlier steps",
    memory="`delay` copies",
    source="arXiv 1710.06952",
)
def delayed(
    topology: Topology, channel: Channel = Channel(), *, delay: int = 4, draw: Draw = "uniform", fixed: bool = False
) -> Mixer:
    """Asynchronous gossip as AD-PSGD models it: neighbours' parameters arrive τ steps late, one's own are the newest.

        x_i^{t+1} = w_ii x_i^t + Σ_{j≠i} w_ij x_j^{t−τ_j(t)},    0 ≤ τ_j(t) ≤ min(D, t)

    Everything still runs in step: the delays are drawn, nothing is faster or slower for them, and a step sends what plain gossip
    sends. So this tells what stale parameters cost in quality, and nothing of time. The mean over workers is not preserved.

    Args:
        topology: doubly stochastic; it may vary in time.
        channel: how parameters travel; its seed determines the delays.
        delay: D ≥ 0 exchanges; 0: plain gossip.
        draw: how a worker's delay is drawn: "constant", always D; "uniform", 0 … D with equal probabilities; "geometric", half of what
            is left at each number, from 0 on, and the rest at D.
        fixed: draw one delay for each worker, as of slow and fast machines, and not a new one for every exchange.

    Reference: Lian et al. 2018, "Asynchronous decentralized parallel stochastic gradient descent", arXiv 1710.06952, assumption 1 and
    algorithm 1.
    """
    if delay < 0:
        raise ValueError(f"mixer 'delayed' with delay={delay}: must be at least 0; 0 is plain gossip")
    if sizes := {round_.group_size for round_ in topology.rounds} - {1}:
        raise ValueError(
            f"topology {topology.name!r} averages exactly inside nodes of {max(sizes)} workers, which a delay would be without meaning "
            "for; use a graph of single workers, as 'ring' or 'one_peer_exponential'"
        )
    form = _Delayed(topology, channel, delay, draw, fixed)
    plain = exact(topology, channel)
    own = dict(init=form.init, exchange=form.exchange, combine=form.combine, restart=form.restart)
    return plain._replace(**own, linear=None, keeps_mean=False)


@dataclasses.dataclass(frozen=True)
class _Delayed:
    """The functions of the mixer."""

    topology: Topology
    channel: Channel
    delay: int
    draw: Draw
    fixed: bool

    def _vectors(self, params: Any) -> list[jax.Array]:
        return self.channel.layout(params).pack(params)

    def init(self, params: Any) -> DelayedState:
        kept = self._vectors(params) if self.delay else []
        return DelayedState(jnp.zeros((), jnp.int32), tuple(jnp.tile(x_P, (self.delay, 1)) for x_P in kept))

    def exchange(self, params: Any, state: DelayedState, phase: int) -> list[jax.Array]:
        round_, axis = self.topology.rounds[phase], self.channel.axis
        return [mix_round(x_P, round_, axis) for x_P in self._late(self._vectors(params), state)]

    def combine(self, params: Any, received: Any, state: DelayedState, phase: int, step: Any) -> tuple[Any, DelayedState]:
        vectors, weights, mixed = self._vectors(params), self.topology.rounds[phase].self_weights, []
        for x_P, late_P, arrived_P in zip(vectors, self._late(vectors, state), received, strict=True):
            dtype = jnp.promote_types(x_P.dtype, jnp.float32)
            newer_P = x_P.astype(dtype) - late_P.astype(dtype)
            own = own_weight(weights, 1, self.channel.axis, dtype) * newer_P
            mixed.append((arrived_P.astype(dtype) + own).astype(x_P.dtype))
        history = state.history
        if self.delay:
            history = tuple(h_DxP.at[state.count % self.delay].set(x_P) for h_DxP, x_P in zip(history, vectors))
        return self.channel.layout(params).unpack(mixed, like=params), DelayedState(state.count + 1, history)

    def restart(self, average: Any, state: DelayedState) -> DelayedState:
        history = tuple(jnp.broadcast_to(x_P, h_DxP.shape) for x_P, h_DxP in zip(self._vectors(average), state.history))
        return state._replace(history=history)

    def _late(self, vectors: list[jax.Array], state: DelayedState) -> list[jax.Array]:
        """What this worker sends in place of its parameters."""
        if not self.delay:
            return vectors
        tau = jnp.minimum(self._tau(state.count), state.count)
        at = (state.count - tau) % self.delay
        return [jnp.where(tau == 0, x_P, h_DxP[at]) for x_P, h_DxP in zip(vectors, state.history, strict=True)]

    def _tau(self, count: jax.Array) -> jax.Array:
        """This worker's delay, 0 … D."""
        if self.draw == "constant":
            return jnp.int32(self.delay)
        when = jnp.uint32(0) if self.fixed else count.astype(jnp.uint32) + 1
        worker = noise.mix(self.channel.axis.index.astype(jnp.uint32), jnp.uint32(self.channel.seed % 2**32))
        u = noise.uniform((), (when, worker))
        drawn = u * (self.delay + 1) if self.draw == "uniform" else -jnp.log2(1 - u)
        return jnp.minimum(jnp.floor(drawn), self.delay).astype(jnp.int32)
