"""Base classes of mixers with a codec, and plain gossip.

Mixers with a codec share one operation, the pull of neighbors, Σ_j w_ij c_j − c_i, where c_j is the decoded message of worker j. Both
ends decode the same message, so pulls sum to zero over workers, and the mean of the parameters is preserved whatever a codec loses.

Memories are initialized from the parameters that `init` is given, which have to be the same on all workers. Members of a node
(topologies with L > 1) average exactly, and each exchanges its share of the mean.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, codecs, mesh
from decjax.channel import Coded
from decjax.codecs import Codec
from decjax.gossip import requirements
from decjax.gossip.mixer import Gossip, Linear, Rounds
from decjax.gossip.rounds import common_multiple, difference, is_mean, mix_round, own_weight, pull, step_bytes
from decjax.options import Share
from decjax.registry import Requirement
from decjax.topology import Round
from decjax.typing import PyTree


class CompressedState(NamedTuple):
    """State of mixers with a codec, other than `dcd`.

    Attributes:
        step: int32 scalar, exchanges so far; random numbers are a function of (seed, node, step).
        codec: the codec's state for each bucket.
        memory: what the mixer remembers for each round of the period (or once for all rounds), and in it for each bucket.
    """

    step: jax.Array
    codec: tuple
    memory: tuple


class WithCodec(Gossip):
    """Base of mixers that encode messages between nodes.

    Attributes:
        codec: C; None: values are sent uncompressed.
    """

    _: dataclasses.KW_ONLY
    codec: Codec | str | None = None

    def check_requirements(self, *more: Requirement) -> None:
        coded = requirements.CODED if self.codec else ()
        super().check_requirements(*more, *coded)
        super().check_requirements(*((requirements.WHOLE_MATRICES,) if self.wire.codec.matrix else ()))

    @functools.cached_property
    def wire(self) -> Coded:
        """The channel with the codec."""
        group_size = max((round_.group_size for round_ in self.topology.rounds if not is_mean(round_)), default=1)
        return self.channel.coded(requirements.made(self.codec), group_size, common_multiple(self.topology))

    def layout(self, params: PyTree) -> buckets.Layout:
        self.channel.check(params, self.num_workers)
        return self.wire.layout(params)

    def num_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        layout = self.layout(params)
        return step_bytes(self.topology, self.due(phase), layout, self.wire.num_bytes(layout))


class CodedGossip(WithCodec):
    """Gossip of R rounds a step, in each of which every bucket is encoded and sent to the neighbors.

    Subclasses differ in what they encode of a bucket x, what they remember, and how the pull changes x. Here, nothing is remembered:
    c = C(x); x <- x + γ pull(c).
    """

    _: dataclasses.KW_ONLY
    rounds: Rounds = 1

    @functools.cached_property
    def strength(self) -> float:
        """γ."""
        return 1.0

    @property
    def per_round(self) -> bool:
        """Whether each round of the period has a memory of its own."""
        return False

    def remember(self, x: jax.Array, row_sum: float | jax.Array) -> PyTree:
        """Return the initial memory of a bucket; `row_sum` is the sum of this node's row of W."""
        return ()

    def encoded(self, x: jax.Array, memory: PyTree) -> jax.Array:
        """Return the array that is encoded."""
        return x

    def merge(self, x: jax.Array, c: jax.Array, pulled: jax.Array, memory: PyTree) -> tuple[jax.Array, PyTree]:
        """Return the mixed bucket and its memory, given c, the decoded message, and its pull."""
        return x + self.strength * pulled, memory

    @property
    def phases(self) -> range:
        return range(self.topology.period // math.gcd(self.topology.period, self.rounds))

    def due(self, phase: int) -> list[int]:
        return [(phase * self.rounds + r) % self.topology.period for r in range(self.rounds)]

    def init(self, params: PyTree) -> PyTree:
        layout, axis, L = self.layout(params), self.channel.axis, self.wire.group_size
        shares = [axis.own_share(x_P, L).astype(codecs.working_dtype(x_P.dtype)) for x_P in layout.pack(params)]

        def memory(round_):
            if is_mean(round_):
                return ()
            row_sums = tuple(round_.row_sums().round(12).tolist())
            return tuple(self.remember(x, own_weight(row_sums, round_.group_size, axis, x.dtype)) for x in shares)

        rounds = self.topology.rounds
        kept = rounds if self.per_round else [round_ for round_ in rounds if not is_mean(round_)][:1]
        return CompressedState(jnp.zeros((), jnp.int32), self.wire.init(layout, shares), tuple(map(memory, kept)))

    def exchange(self, params: PyTree, state: CompressedState, phase: int) -> tuple[PyTree, PyTree]:
        layout, axis = self.layout(params), self.channel.axis
        forms, vectors = self.wire.codecs(layout), layout.pack(params)
        states, memories = list(state.codec), list(map(list, state.memory))
        for r, index in enumerate(self.due(phase)):
            round_ = self.topology.rounds[index]
            if is_mean(round_):
                vectors = [axis.group_mean(x_P, round_.group_size) for x_P in vectors]
                continue
            memory = memories[index if self.per_round else 0]
            for b, form in enumerate(forms):
                key = self.wire.key(state.step, r * len(vectors) + b)
                vectors[b], states[b], memory[b] = self._mixed(round_, form, vectors[b], states[b], memory[b], key)
        state = CompressedState(state.step + 1, tuple(states), tuple(map(tuple, memories)))
        return layout.unpack(vectors, like=params), state

    def _mixed(self, round_: Round, codec: Codec, x_P: jax.Array, state: PyTree, memory: PyTree, key: jax.Array | None):
        """Return a bucket after one round, and the new states of the codec and of the memory."""
        axis, L = self.channel.axis, round_.group_size
        share = axis.scatter_mean(x_P, L).astype(codecs.working_dtype(x_P.dtype))
        message = codec.encode(self.encoded(share, memory), state, key)
        c = codec.decode(message, share.shape, share.dtype)
        mixed, memory = self.merge(share, c, pull(codec, message, c, round_, axis), memory)
        return axis.gather(mixed.astype(x_P.dtype), L), codec.advance(state, message), memory

    def restart(self, average: PyTree, state: CompressedState) -> PyTree:
        return self.init(average)._replace(step=state.step)


class Compensated(CodedGossip):
    """Base of mixers that feed the codec's errors back, and mix with strength γ.

    Attributes:
        codec: C, contractive.
        gamma: γ in (0, 1]; None: 1 without a codec or for one that keeps 0.9 of the energy of noise, else half of what it keeps.
    """

    _: dataclasses.KW_ONLY
    gamma: Share | None = None

    def check_requirements(self, *more: Requirement) -> None:
        super().check_requirements(*more)
        assert 0 < self.strength <= 1  # Measured here, before anything is traced.

    @functools.cached_property
    def strength(self) -> float:
        if self.gamma is not None:
            return self.gamma
        return requirements.strength(self.wire.codec) if self.codec else 1.0


class Exact(CodedGossip, name="exact"):
    """Plain gossip: each worker takes a weighted mean of its own and its neighbors' parameters, x_i <- Σ_j w_ij x_j.

    With a codec C it is x_i <- x_i + Σ_j w_ij (C(x_j) − C(x_i)). Nothing is remembered, so the parameters keep an error of the size
    of C(x) − x; narrow parameters, such as bfloat16, are rounded in every step, and their mean walks. Step t applies rounds tR …
    tR + R − 1 of the topology, which may vary in time.
    """

    messages = "parameters, compressed or not"
    memory = "none"
    sharded = True
    requires = (requirements.DOUBLY_STOCHASTIC,)

    def layout(self, params: PyTree) -> buckets.Layout:
        if self.codec:
            return super().layout(params)
        return Gossip.layout(self, jax.eval_shape(self.channel.cast, params) if self.channel.dtype else params)

    def init(self, params: PyTree) -> PyTree:
        return super().init(params) if self.codec else Gossip.init(self, params)

    def exchange(self, params: PyTree, state: PyTree, phase: int) -> tuple[PyTree, PyTree]:
        if self.codec:
            return super().exchange(params, state, phase)
        if self.channel.dtype:
            return buckets.of_floating(jnp.add, params, self._pull(params, phase)), state
        layout = self.layout(params)
        vectors = layout.pack(params)
        for round_ in self.rounds_due(phase):
            vectors = [mix_round(x_P, round_, self.channel.axis) for x_P in vectors]
        return layout.unpack(vectors, like=params), state

    def num_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        if self.codec:
            return super().num_bytes(params, phase)
        return self.pull_bytes(params, phase) if self.channel.dtype else Gossip.num_bytes(self, params, phase)

    def restart(self, average: PyTree, state: PyTree) -> PyTree:
        return super().restart(average, state) if self.codec else state

    @property
    def linear(self) -> Linear | None:
        matrix = lambda phase: self.topology.product(phase * self.rounds, self.rounds)
        return None if self.codec else Linear(matrix, self._pull, self.pull_bytes)

    @mesh.by_shard("tree")
    def _pull(self, params: PyTree, phase: int) -> PyTree:
        layout = self.layout(params)
        vectors = layout.pack(self.channel.cast(params))
        drawn = [jnp.zeros(x_P.shape, buckets.wide_dtype(x_P)) for x_P in vectors]
        for round_ in self.rounds_due(phase):
            now = [(x_P + d_P).astype(x_P.dtype) for x_P, d_P in zip(vectors, drawn)]
            drawn = [d_P + difference(z_P, round_, self.channel.axis) for z_P, d_P in zip(now, drawn)]
        return layout.unpack(drawn, like=params, wide=True)
