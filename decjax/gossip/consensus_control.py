"""Consensus control: as many rounds of gossip as it takes to keep workers close."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import registry
from decjax.channel import Channel
from decjax.gossip.exact import exact
from decjax.gossip.mixer import Mixer
from decjax.gossip.rounds import common_multiple, mix_round, sent_bytes
from decjax.mesh import mean_bytes
from decjax.topology import Topology


class ControlState(NamedTuple):
    """State of `consensus_control`, the same on all workers.

    Attributes:
        largest: Ξ_max, float32 scalar, the largest distance so far that the first round of a step had to deal with.
        distances: [R_max], Ξ before each round of the last step; 0 for rounds that were not taken.
        usage: [R_max], int32, how many steps so far took 1, 2, … rounds.
    """

    largest: jax.Array
    distances: jax.Array
    usage: jax.Array


@registry.register(
    "mixer",
    "consensus_control",
    order="atc",
    topology="ring",
    needs="static doubly stochastic graph, order atc",
    messages="parameters, as often as it takes",
    memory="none",
    source="arXiv 2102.04828",
)
def consensus_control(
    topology: Topology, channel: Channel = Channel(), *, target: float = 0.25, rounds: int = 8, steps: int = 0
) -> Mixer:
    """Consensus control: gossip is repeated until workers are as close as is wanted, at most R_max times a step.

        x ← Wx  and  Ξ² = (1/N) Σ_i ‖x_i − (Wx)_i‖²  before it;     again while Ξ > ρ Ξ_max, Ξ_max the largest Ξ of first rounds so far

    Ξ is the distance to the neighbours' mean, which a round tells for the price of one number per worker; that to the mean of all, on
    which the paper's theory is, would take an all-reduce of the parameters. For symmetric W it is between (1 − β) and (1 + β) times as
    large, where β is the second largest modulus of W's eigenvalues.

    The number of rounds is decided in the compiled program, by the same number on all workers, so such a step runs in order "atc" and
    its bytes are counted as they come: metrics and summary have the mean so far. A program with a given `phase` takes phase + 1 rounds.

    Args:
        topology: static and doubly stochastic.
        channel: how parameters travel.
        target: ρ in (0, 1); 1 or more would be plain gossip.
        rounds: R_max ≥ 1.
        steps: control only the first steps, when it matters most, and then take one round a step; 0: control all.

    Reference: Kong et al. 2021, "Consensus control for decentralized deep learning", arXiv 2102.04828, sections 3 and 4.
    """
    if topology.period != 1:
        raise ValueError(
            f"mixer 'consensus_control' repeats one round, but topology {topology.name!r} varies over a period of {topology.period}; "
            "use 'ring', 'torus' or 'exponential'"
        )
    if not 0 < target < 1:
        raise ValueError(f"mixer 'consensus_control' with target={target}: must lie between 0 and 1; mixer 'exact' takes one round")
    if rounds < 1 or steps < 0:
        option = (
            f"rounds={rounds}: must be at least 1" if rounds < 1 else f"steps={steps}: must be at least 0; 0 controls all steps"
        )
        raise ValueError(f"mixer 'consensus_control' with {option}")
    form = _Control(topology, channel, target, rounds, steps)
    own: dict[str, Any] = dict(init=form.init, exchange=form.exchange, num_bytes=form.num_bytes, usage=lambda state: state.usage)
    return exact(topology, channel)._replace(
        **own, phase=lambda step: None, phases=range(rounds), orders=("atc",), restart=form.restart, linear=None
    )


@dataclasses.dataclass(frozen=True)
class _Control:
    """The functions of the mixer."""

    topology: Topology
    channel: Channel
    target: float
    rounds: int
    steps: int

    def init(self, params: Any) -> ControlState:
        return ControlState(jnp.zeros((), jnp.float32), jnp.zeros(self.rounds, jnp.float32), jnp.zeros(self.rounds, jnp.int32))

    def exchange(self, params: Any, state: ControlState, phase: int | None) -> tuple[Any, ControlState]:
        layout = self.channel.layout(params, multiple_of=common_multiple(self.topology))
        vectors, first = self._round(layout.pack(params))
        largest = jnp.maximum(state.largest, first)
        begun = (vectors, jnp.zeros(self.rounds, jnp.float32).at[0].set(first), jnp.int32(1))
        if phase is None:
            is_controlled = jnp.logical_or(self.steps == 0, state.usage.sum() < self.steps)
            is_far = lambda distances, taken: distances[taken - 1] > self.target * largest
            goes_on = lambda carry: is_controlled & (carry[2] < self.rounds) & is_far(*carry[1:])
            vectors, distances, taken = jax.lax.while_loop(goes_on, self._again, begun)
        else:
            vectors, distances, taken = functools.reduce(lambda carry, _: self._again(carry), range(phase), begun)
        return layout.unpack(vectors, like=params), ControlState(largest, distances, state.usage.at[taken - 1].add(1))

    def _again(self, carry: tuple[list[jax.Array], jax.Array, jax.Array]) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        vectors, distances, taken = carry
        vectors, distance = self._round(vectors)
        return vectors, distances.at[taken].set(distance), taken + 1

    def _round(self, vectors: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        """(Wx, Ξ) of this worker's x."""
        mixed = [mix_round(x_P, self.topology.rounds[0], self.channel.axis) for x_P in vectors]
        squares = [jnp.square((x_P - y_P).astype(jnp.float32)).sum() for x_P, y_P in zip(vectors, mixed, strict=True)]
        # The number waits for the messages and the next messages for the number: collectives meet in one order on all devices.
        mixed, square = jax.lax.optimization_barrier((mixed, sum(squares, jnp.zeros(1, jnp.float32))))
        mixed, mean = jax.lax.optimization_barrier((mixed, self.channel.axis.mean(square)))
        return mixed, jnp.sqrt(mean[0])

    def restart(self, average: Any, state: ControlState) -> ControlState:
        return state

    def num_bytes(self, params: Any, phase: int | None) -> np.ndarray:
        layout = self.channel.layout(params, multiple_of=common_multiple(self.topology))
        taken, N = 0 if phase is None else phase + 1, self.topology.num_workers  # None: `usage` tells.
        return taken * (sent_bytes(self.topology.rounds[0], layout) + mean_bytes(1, jnp.float32, N))
