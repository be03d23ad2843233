"""The mixer of any scheme of messages: what is encoded, what is remembered of it, and how neighbours' pull enters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decjax import codecs
from decjax.gossip.messages import Messages
from decjax.gossip.mixer import Mixer
from decjax.gossip.rounds import check_rounds, due, is_mean, num_phases, own_weight, pull


class CompressedState(NamedTuple):
    """State of a mixer whose messages are encoded as it sends them."""

    count: jax.Array  # int32 scalar, exchanges so far: noise is a function of (seed, node, count)
    codec: tuple  # the codec's state for each bucket
    memory: tuple  # the scheme's memory for each round of the period (or one for all), and for each bucket


class Scheme(NamedTuple):
    """What is encoded of a flat array, what is remembered of it, and how the pull enters."""

    init: Callable[[jax.Array, Any], Any]  # (x, what the row of W adds up to) -> memory
    encoded: Callable[[jax.Array, Any], jax.Array]  # (x, memory) -> what is encoded
    merge: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]  # (x, c, pull(c), memory) -> mixed, memory
    per_round: bool = False  # whether each round of the period has a memory of its own


def differences(gamma: float = 1.0) -> Scheme:
    """x <- x + γ pull(c) for c = C(x)."""
    return Scheme(lambda x, row_sum: (), lambda x, memory: x, lambda x, c, pulled, memory: (x + gamma * pulled, memory))


def deepsqueeze(gamma: float) -> Scheme:
    """x <- x + γ pull(c) for c = C(x + e); e <- x + e − c."""

    def merge(x, c, pulled, error):
        return x + gamma * pulled, x + error - c

    return Scheme(lambda x, row_sum: jnp.zeros_like(x), jnp.add, merge)


def choco(gamma: float) -> Scheme:
    """x <- x + γd for c = C(x − x̂); x̂ <- x̂ + c; d <- d + pull(c)."""

    def merge(x, c, pulled, memory):
        known, drift = memory
        drift = drift + pulled
        return x + gamma * drift, (known + c, drift)

    return Scheme(lambda x, row_sum: (x, (row_sum - 1) * x), lambda x, memory: x - memory[0], merge, per_round=True)


def scheme_mixer(scheme: Scheme, wire: Messages, rounds: int) -> Mixer:
    """The mixer of a scheme: R rounds a step, a message per shift and bucket."""
    check_rounds(rounds)
    topology, codec, axis = wire.topology, wire.codec, wire.channel.axis
    cycle = num_phases(topology, rounds)

    def init(params):
        layout = wire.layout(params)
        shares = [axis.own_share(x_P, wire.group_size).astype(codecs.working_dtype(x_P.dtype)) for x_P in layout.pack(params)]

        def memory(round_):
            if is_mean(round_):
                return ()
            row_sums = tuple(round_.row_sums().round(12).tolist())
            return tuple(scheme.init(x, own_weight(row_sums, round_.group_size, axis, x.dtype)) for x in shares)

        sending = [round_ for round_ in topology.rounds if not is_mean(round_)]
        memories = tuple(memory(round_) for round_ in (topology.rounds if scheme.per_round else sending[:1]))
        return CompressedState(jnp.zeros((), jnp.int32), wire.init(layout, shares), memories)

    def exchange(params, state, phase):
        layout = wire.layout(params)
        vectors, codec_states, memories = layout.pack(params), list(state.codec), list(map(list, state.memory))
        for r, index in enumerate(due(topology, rounds, phase)):
            round_ = topology.rounds[index]
            L = round_.group_size
            if is_mean(round_):
                vectors = [axis.group_mean(x_P, L) for x_P in vectors]
                continue
            memory = memories[index if scheme.per_round else 0]
            for b, x_P in enumerate(vectors):
                share = axis.scatter_mean(x_P, L).astype(codecs.working_dtype(x_P.dtype))
                shape = wire.shape(layout, b, share.size)
                decode = wire.decode(shape, share.dtype)
                message = wire.encode(scheme.encoded(share, memory[b]), shape, codec_states[b], state.count, r * len(vectors) + b)
                c = decode(message)
                mixed, memory[b] = scheme.merge(share, c, pull(message, c, decode, round_, axis), memory[b])
                codec_states[b] = codec.advance(codec_states[b], message)
                vectors[b] = axis.gather(mixed.astype(x_P.dtype), L)
        state = CompressedState(state.count + 1, tuple(codec_states), tuple(map(tuple, memories)))
        return layout.unpack(vectors, like=params), state

    return Mixer(
        init=init,
        exchange=exchange,
        phase=lambda step: step % cycle,
        phases=range(cycle),
        num_bytes=lambda params, phase: wire.num_bytes(params, due(topology, rounds, phase)),
        num_workers=topology.num_workers,
        restart=lambda average, state: init(average)._replace(count=state.count),
    )
