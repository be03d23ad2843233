"""Plain gossip, with or without a codec."""

import jax.numpy as jnp
import numpy as np

from decjax import buckets
from decjax.gossip.coded import CodedGossip
from decjax.gossip.mixer import Gossip, Linear
from decjax.gossip.requirements import DOUBLY_STOCHASTIC
from decjax.gossip.rounds import difference, mix_round
from decjax.typing import PyTree


class Exact(CodedGossip, name="exact"):
    """Plain gossip: each worker takes a weighted mean of its own and its neighbors' parameters, x_i <- Σ_j w_ij x_j.

    With a codec C it is x_i <- x_i + Σ_j w_ij (C(x_j) − C(x_i)). Nothing is remembered, so the parameters keep an error of the size
    of C(x) − x; narrow parameters, such as bfloat16, are rounded in every step, and their mean walks. Step t applies rounds tR …
    tR + R − 1 of the topology, which may vary in time.

    Attributes:
        codec: C, which encodes messages between nodes; None: they are sent uncompressed.
        rounds: R ≥ 1, rounds per step.
    """

    messages = "parameters, compressed or not"
    memory = "none"
    requires = (DOUBLY_STOCHASTIC,)

    def layout(self, params: PyTree) -> buckets.Layout:
        return super().layout(params) if self.codec else Gossip.layout(self, params)

    def init(self, params: PyTree) -> PyTree:
        return super().init(params) if self.codec else Gossip.init(self, params)

    def exchange(self, params: PyTree, state: PyTree, phase: int) -> tuple[PyTree, PyTree]:
        if self.codec:
            return super().exchange(params, state, phase)
        layout = self.layout(params)
        vectors = layout.pack(params)
        for round_ in self.rounds_due(phase):
            vectors = [mix_round(x_P, round_, self.channel.axis) for x_P in vectors]
        return layout.unpack(vectors, like=params), state

    def num_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        return super().num_bytes(params, phase) if self.codec else Gossip.num_bytes(self, params, phase)

    def restart(self, average: PyTree, state: PyTree) -> PyTree:
        return super().restart(average, state) if self.codec else state

    @property
    def linear(self) -> Linear | None:
        matrix = lambda phase: self.topology.product(phase * self.rounds, self.rounds)
        return None if self.codec else Linear(matrix, self._pull, self.pull_bytes)

    def _pull(self, params: PyTree, phase: int) -> PyTree:
        layout = self.layout(params)
        vectors = layout.pack(params)
        drawn = [jnp.zeros(x_P.shape, buckets.wide_dtype(x_P)) for x_P in vectors]
        for round_ in self.rounds_due(phase):
            now = [(x_P + d_P).astype(x_P.dtype) for x_P, d_P in zip(vectors, drawn)]
            drawn = [d_P + difference(z_P, round_, self.channel.axis) for z_P, d_P in zip(now, drawn)]
        return layout.unpack(drawn, like=params, wide=True)
