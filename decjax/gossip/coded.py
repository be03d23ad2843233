"""What mixers with a codec share.

They are all built on one operation, the pull of neighbours, Σ_j w_ij c_j − c_i, where c_j is the decoded message of worker j. Both ends
decode the same message, so pulls add up to zero over workers, and the mean of the parameters is preserved whatever a codec loses.
Mixers differ in their `Scheme`: what is encoded, what is remembered, and how the pull changes the parameters.

Memories are initialized from the parameters that `init` is given, which have to be the same on all workers. Members of a node
(topologies with L > 1) average exactly, and each exchanges its share of the mean.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs, registry
from decjax.channel import Channel, Coded
from decjax.gossip import fits
from decjax.gossip.mixer import Mixer
from decjax.gossip.rounds import common_multiple, due, is_mean, num_phases, own_weight, pull, step_bytes
from decjax.topology import Round, Topology


class CompressedState(NamedTuple):
    """State of mixers with a codec, other than `dcd`.

    Attributes:
        count: int32 scalar, exchanges so far; random numbers are a function of (seed, node, count).
        codec: the codec's state for each bucket.
        memory: what the mixer remembers for each round of the period (or once for all rounds), and in it for each bucket.
    """

    count: jax.Array
    codec: tuple
    memory: tuple


class Scheme(NamedTuple):
    """What a mixer encodes of a bucket x, what it remembers, and how it mixes."""

    init: Callable[[jax.Array, Any], Any]  # (x, row sum of W) -> memory
    encoded: Callable[[jax.Array, Any], jax.Array]  # (x, memory) -> the array that is encoded
    merge: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]  # (x, c, pull(c), memory) -> mixed, memory
    per_round: bool = False  # whether each round of the period has a memory of its own


def checked_channel(topology: Topology, channel: Channel, codec: codecs.Codec | str) -> Coded:
    """The channel with a mixer's codec; ValueError if the codec's messages do not fit the topology."""
    made: codecs.Codec = registry.make("codec", codec)
    fits.check_messages(topology, made)
    return coded_channel(topology, channel, made)


def coded_channel(topology: Topology, channel: Channel, codec: codecs.Codec) -> Coded:
    """As `checked_channel`, for a codec that is built already, and without the check."""
    group_size = max((round_.group_size for round_ in topology.rounds if not is_mean(round_)), default=1)
    return channel.coded(codec, group_size, common_multiple(topology))


def num_bytes(wire: Coded, topology: Topology, indices: list[int], params: Any) -> np.ndarray:
    """Bytes that each worker sends in the rounds of the given indices together, [N]."""
    layout = wire.layout(params)
    return step_bytes(topology, indices, layout, wire.num_bytes(layout))


@dataclasses.dataclass(frozen=True)
class CodedGossip:
    """Gossip of R rounds a step, in each of which every bucket is encoded and sent to the neighbours."""

    topology: Topology
    wire: Coded
    scheme: Scheme
    rounds: int

    def init(self, params: Any) -> CompressedState:
        layout, axis, L = self.wire.layout(params), self.wire.channel.axis, self.wire.group_size
        shares = [axis.own_share(x_P, L).astype(codecs.working_dtype(x_P.dtype)) for x_P in layout.pack(params)]

        def memory(round_):
            if is_mean(round_):
                return ()
            row_sums = tuple(round_.row_sums().round(12).tolist())
            return tuple(self.scheme.init(x, own_weight(row_sums, round_.group_size, axis, x.dtype)) for x in shares)

        rounds = self.topology.rounds
        kept = rounds if self.scheme.per_round else [round_ for round_ in rounds if not is_mean(round_)][:1]
        return CompressedState(jnp.zeros((), jnp.int32), self.wire.init(layout, shares), tuple(map(memory, kept)))

    def exchange(self, params: Any, state: CompressedState, phase: int) -> tuple[Any, CompressedState]:
        layout, axis = self.wire.layout(params), self.wire.channel.axis
        forms, vectors = self.wire.codecs(layout), layout.pack(params)
        states, memories = list(state.codec), list(map(list, state.memory))
        for r, index in enumerate(due(self.topology, self.rounds, phase)):
            round_ = self.topology.rounds[index]
            if is_mean(round_):
                vectors = [axis.group_mean(x_P, round_.group_size) for x_P in vectors]
                continue
            memory = memories[index if self.scheme.per_round else 0]
            for b, form in enumerate(forms):
                key = self.wire.key(state.count, r * len(vectors) + b)
                vectors[b], states[b], memory[b] = self._mixed(round_, form, vectors[b], states[b], memory[b], key)
        state = CompressedState(state.count + 1, tuple(states), tuple(map(tuple, memories)))
        return layout.unpack(vectors, like=params), state

    def _mixed(self, round_: Round, codec: codecs.Codec, x_P: jax.Array, state: Any, memory: Any, key: jax.Array | None):
        """One bucket after one round, and the new states of the codec and of the scheme."""
        axis, L = self.wire.channel.axis, round_.group_size
        share = axis.scatter_mean(x_P, L).astype(codecs.working_dtype(x_P.dtype))
        message = codec.encode(self.scheme.encoded(share, memory), state, key)
        c = codec.decode(message, share.shape, share.dtype)
        mixed, memory = self.scheme.merge(share, c, pull(codec, message, c, round_, axis), memory)
        return axis.gather(mixed.astype(x_P.dtype), L), codec.advance(state, message), memory

    def mixer(self) -> Mixer:
        cycle = num_phases(self.topology, self.rounds)
        return Mixer(
            init=self.init,
            exchange=self.exchange,
            phase=lambda step: step % cycle,
            phases=range(cycle),
            num_bytes=lambda params, phase: num_bytes(self.wire, self.topology, due(self.topology, self.rounds, phase), params),
            num_workers=self.topology.num_workers,
            restart=lambda average, state: self.init(average)._replace(count=state.count),
        )


def compensated(
    name: str,
    topology: Topology,
    channel: Channel,
    codec: codecs.Codec | str,
    gamma: float | None,
    rounds: int,
    scheme: Callable[[float], Scheme],
) -> Mixer:
    """The mixer of a scheme, given as a function of γ, that needs a doubly stochastic graph and a contractive codec; see `choco`."""
    wire = checked_channel(topology, channel, codec)
    fits.check_doubly_stochastic(name, topology)
    fits.check_contractive(name, wire.codec)
    return CodedGossip(topology, wire, scheme(fits.strength(name, gamma, wire.codec)), rounds).mixer()
