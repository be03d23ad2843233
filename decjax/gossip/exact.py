"""Plain gossip, with or without a codec."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from decjax import buckets, codecs, registry
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.gossip.coded import CodedGossip, Scheme, checked_channel
from decjax.gossip.mixer import Linear, Mixer
from decjax.gossip.rounds import common_multiple, difference, difference_bytes, due, mix_round, num_phases, step_bytes
from decjax.topology import Round, Topology


def differences(gamma: float = 1.0) -> Scheme:
    """The scheme of plain gossip: c = C(x); x <- x + γ pull(c)."""
    return Scheme(lambda x, row_sum: (), lambda x, memory: x, lambda x, c, pulled, memory: (x + gamma * pulled, memory))


@registry.register("mixer", "exact", needs="doubly stochastic graph", messages="parameters, compressed or not", memory="none")
def exact(topology: Topology, channel: Channel = Channel(), *, rounds: int = 1, codec: codecs.Codec | str | None = None) -> Mixer:
    """Plain gossip: each worker takes a weighted mean of its own and its neighbours' parameters, x_i <- Σ_j w_ij x_j.

    With a codec C it is x_i <- x_i + Σ_j w_ij (C(x_j) − C(x_i)). Nothing is remembered, so the parameters keep an error of the size
    of C(x) − x; where they are narrow, as bfloat16, every step rounds them anew, and their mean walks. Step t applies rounds tR …
    tR + R − 1 of the topology.

    Args:
        topology: doubly stochastic; it may vary in time.
        channel: how parameters travel.
        rounds: R ≥ 1, rounds per step.
        codec: C, which encodes messages between nodes; None: they are sent as they are.
    """
    if not topology_lib.is_doubly_stochastic(topology):
        raise ValueError(
            f"topology {topology.name!r} is not doubly stochastic, so plain gossip would drift from the mean; use 'directed_exponential' "
            "or another graph whose columns and rows sum to one, or mixer 'push_sum' with method 'decentralized'"
        )
    cycle = num_phases(topology, rounds)
    if codec:
        return CodedGossip(topology, checked_channel(topology, channel, codec), differences(), rounds).mixer()

    form = _Exact(topology, channel, rounds)
    return Mixer(
        init=lambda params: (),
        exchange=form.exchange,
        phase=lambda step: step % cycle,
        phases=range(cycle),
        num_bytes=form.num_bytes,
        num_workers=topology.num_workers,
        linear=Linear(lambda phase: topology.product(phase * rounds, rounds), form.pull, form.pull_bytes),
    )


@dataclasses.dataclass(frozen=True)
class _Exact:
    """The functions of the mixer without a codec."""

    topology: Topology
    channel: Channel
    rounds: int

    def _layout(self, params: Any) -> buckets.Layout:
        return self.channel.layout(params, multiple_of=common_multiple(self.topology))

    def _due(self, phase: int) -> list[Round]:
        return [self.topology.rounds[index] for index in due(self.topology, self.rounds, phase)]

    def exchange(self, params: Any, state: Any, phase: int) -> tuple[Any, Any]:
        layout = self._layout(params)
        vectors = layout.pack(params)
        for round_ in self._due(phase):
            vectors = [mix_round(x_P, round_, self.channel.axis) for x_P in vectors]
        return layout.unpack(vectors, like=params), state

    def pull(self, params: Any, phase: int) -> Any:
        layout = self._layout(params)
        vectors = layout.pack(params)
        drawn = [jnp.zeros(x_P.shape, buckets.wide_dtype(x_P)) for x_P in vectors]
        for round_ in self._due(phase):
            now = [(x_P + d_P).astype(x_P.dtype) for x_P, d_P in zip(vectors, drawn)]
            drawn = [d_P + difference(z_P, round_, self.channel.axis) for z_P, d_P in zip(now, drawn)]
        return layout.unpack(drawn, like=params, wide=True)

    def num_bytes(self, params: Any, phase: int) -> np.ndarray:
        return step_bytes(self.topology, due(self.topology, self.rounds, phase), self._layout(params))

    def pull_bytes(self, params: Any, phase: int) -> np.ndarray:
        return difference_bytes(self.topology, due(self.topology, self.rounds, phase), self._layout(params))
