"""Asynchronous gossip, simulated: workers mix with what their neighbors had some steps ago."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from decjax import noise
from decjax.buckets import wide_dtype
from decjax.gossip.mixer import Gossip, Step
from decjax.gossip.requirements import DOUBLY_STOCHASTIC, SINGLE_WORKERS
from decjax.gossip.rounds import mix_round, own_weight
from decjax.options import Natural
from decjax.typing import PyTree

Draw = Literal["constant", "uniform", "geometric"]


class DelayedState(NamedTuple):
    """State of `delayed`.

    Attributes:
        step: int32 scalar, exchanges so far; delays are a function of (seed, worker, step).
        history: for each bucket x_DxP, this worker's parameters at its last D exchanges; the one of exchange t is at t mod D.
    """

    step: jax.Array
    history: tuple[jax.Array, ...]


class Delayed(Gossip, name="delayed"):
    """Asynchronous gossip as AD-PSGD models it: neighbors' parameters arrive τ steps late, the worker's own are the newest.

        x_i^{t+1} = w_ii x_i^t + Σ_{j≠i} w_ij x_j^{t−τ_j(t)},    0 ≤ τ_j(t) ≤ min(D, t)

    Everything still runs in step: delays are drawn at random, and a step takes as long and sends as much as one of plain gossip. So
    this shows the cost of stale parameters in quality, not the time that they save. The mean over workers is not preserved.

    Attributes:
        delay: D ≥ 0 exchanges; 0: plain gossip.
        draw: how a worker's delay is drawn, with the channel's seed: "constant", always D; "uniform", 0 … D with equal probabilities;
            "geometric", half of what is left at each number, from 0 on, and the rest at D.
        fixed: draw one delay for each worker, as for slow and fast machines, instead of a new one for every exchange.

    Reference: Lian et al. 2018, "Asynchronous decentralized parallel stochastic gradient descent", arXiv 1710.06952, assumption 1 and
    algorithm 1.
    """

    messages = "parameters of earlier steps"
    memory = "`delay` copies"
    source = "arXiv 1710.06952"
    requires = (DOUBLY_STOCHASTIC, SINGLE_WORKERS)

    delay: Natural = 4
    draw: Draw = "uniform"
    fixed: bool = False

    @property
    def keeps_mean(self) -> bool:
        return False

    def _vectors(self, params: PyTree) -> list[jax.Array]:
        return self.layout(params).pack(params)

    def init(self, params: PyTree) -> DelayedState:
        kept = self._vectors(params) if self.delay else []
        return DelayedState(jnp.zeros((), jnp.int32), tuple(jnp.tile(x_P, (self.delay, 1)) for x_P in kept))

    def exchange(self, params: PyTree, state: DelayedState, phase: int) -> list[jax.Array]:
        round_, axis = self.topology.rounds[phase], self.channel.axis
        return [mix_round(x_P, round_, axis) for x_P in self._late(self._vectors(params), state)]

    def combine(self, params: PyTree, received: PyTree, state: DelayedState, phase: int, step: Step) -> tuple[PyTree, DelayedState]:
        vectors, weights, mixed = self._vectors(params), self.topology.rounds[phase].self_weights, []
        for x_P, late_P, arrived_P in zip(vectors, self._late(vectors, state), received, strict=True):
            dtype = wide_dtype(x_P)
            newer_P = x_P.astype(dtype) - late_P.astype(dtype)
            own = own_weight(weights, 1, self.channel.axis, dtype) * newer_P
            mixed.append((arrived_P.astype(dtype) + own).astype(x_P.dtype))
        history = state.history
        if self.delay:
            history = tuple(h_DxP.at[state.step % self.delay].set(x_P) for h_DxP, x_P in zip(history, vectors))
        return self.layout(params).unpack(mixed, like=params), DelayedState(state.step + 1, history)

    def restart(self, average: PyTree, state: DelayedState) -> DelayedState:
        history = tuple(jnp.broadcast_to(x_P, h_DxP.shape) for x_P, h_DxP in zip(self._vectors(average), state.history))
        return state._replace(history=history)

    def _late(self, vectors: list[jax.Array], state: DelayedState) -> list[jax.Array]:
        """Return what this worker sends instead of its parameters."""
        if not self.delay:
            return vectors
        tau = jnp.minimum(self._tau(state.step), state.step)
        at = (state.step - tau) % self.delay
        return [jnp.where(tau == 0, x_P, h_DxP[at]) for x_P, h_DxP in zip(vectors, state.history, strict=True)]

    def _tau(self, step: jax.Array) -> jax.Array:
        """Return this worker's delay, 0 … D."""
        if self.draw == "constant":
            return jnp.int32(self.delay)
        when = jnp.uint32(0) if self.fixed else step.astype(jnp.uint32) + 1
        worker = noise.mix(self.channel.axis.index.astype(jnp.uint32), jnp.uint32(self.channel.seed % 2**32))
        u = noise.uniform((), (when, worker))
        drawn = u * (self.delay + 1) if self.draw == "uniform" else -jnp.log2(1 - u)
        return jnp.minimum(jnp.floor(drawn), self.delay).astype(jnp.int32)
