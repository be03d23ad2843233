"""Mixers that own the parameters: how the optimizer's step enters them, and what their mean is, is the mixer's to say.

In push-sum a worker's parameters are z_i = w_i / y_i, where w_i is mixed and y_i is a weight of its own: a step u enters as
u / y_i, and what workers agree on is Σ_i y_i z_i / Σ_i y_i. In DCD they are what neighbours hold of them already: a step enters as
its message says.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decjax import codecs
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.gossip import schemes
from decjax.gossip.fits import FINE, check_contractive, check_doubly_stochastic, check_messages, strength, typical_contraction
from decjax.gossip.messages import Messages
from decjax.gossip.mixer import Mixer, is_floating
from decjax.gossip.rounds import due, is_mean, messages, pull
from decjax.topology import Topology


class PushSumState(NamedTuple):
    """State of `push_sum`."""

    weight: jax.Array  # y_i, a scalar of the parameters' dtype
    values: schemes.CompressedState  # of what is mixed, y_i x_i


class ReplicaState(NamedTuple):
    """State of `dcd`: parameters are known + the message that is due."""

    count: jax.Array  # int32 scalar, messages so far
    codec: tuple  # the codec's state for each bucket
    message: tuple  # what the next exchange sends, for each bucket
    known: tuple  # x⁻_i, what neighbours hold of this worker, for each bucket
    drift: tuple  # d_i = Σ_j w_ij x⁻_j − x⁻_i, for each bucket


def push_sum(
    topology: Topology,
    channel: Channel = Channel(),
    *,
    codec: codecs.Codec | None = None,
    gamma: float | None = None,
    rounds: int = 1,
) -> Mixer:
    """Quantized push-sum: on directed graphs, where only columns of A sum to one, workers agree on Σ_i w_i / Σ_i y_i.

        w = y_i z_i     c_i = C(w_i − x̂_i)     x̂_i <- x̂_i + c_i
        w_i <- w_i + γ (Σ_j a_ij x̂_j − x̂_i)     y_i <- y_i + γ (Σ_j a_ij y_j − y_i)     z_i <- w_i / y_i

    z are the parameters: gradients are taken there. A local step u is added to w, so to z as u / y. γ < 1 damps the graph
    itself, A <- γ A + (1−γ) I, for values and weights alike. y travels exactly, one number a message.

    Args:
        topology: column-stochastic; if it varies in time, each of its rounds keeps estimates of its own.
        codec: C, contractive; None: w travels as it is, and nothing is remembered.
        gamma: γ in (0, 1]; None: 1 for a codec that keeps 0.9 of the energy of noise, else half of what it keeps.
        channel, rounds: see `differences`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if γ, topology or codec do not fit.

    Reference:
        Taheri et al. 2020, "Quantized decentralized stochastic learning over directed graphs", arXiv 2002.09964;
        Assran et al. 2019, "Stochastic gradient push", arXiv 1811.10792.
    """
    if not topology_lib.is_column_stochastic(topology):
        raise ValueError(
            "mixer 'push_sum' keeps the sum over workers, so columns of W have to sum to one, and those of "
            f"topology {topology.name!r} do not; use 'directed_exponential' or 'random_digraph'"
        )
    if codec:
        check_messages("push_sum", topology, codec)
        check_contractive("push_sum", codec)
    gamma = strength("push_sum", 1.0 if codec is None and gamma is None else gamma, codec)
    wire = Messages(topology, codec or codecs.identity(), channel)
    values = schemes.scheme_mixer(schemes.choco(gamma) if codec else schemes.differences(gamma), wire, rounds)

    def scale(params, factor):
        return jax.tree.map(lambda x: (x * factor).astype(x.dtype) if is_floating(x) else x, params)

    def init(params):
        return PushSumState(jnp.ones((), _weight_dtype(params)), values.init(params))

    def exchange(params, state, phase):
        mixed, values_state = values.exchange(scale(params, state.weight), state.values, phase)
        weight = state.weight
        for index in due(topology, rounds, phase):
            if not is_mean(topology.rounds[index]):
                weight = weight + gamma * pull(weight, weight, lambda y: y, topology.rounds[index], channel.axis)
        return scale(mixed, 1 / weight), PushSumState(weight, values_state)

    def settle(mixed, stepped, state):
        def step(z, x):
            return (z + (x - z) / state.weight).astype(x.dtype) if is_floating(x) else x

        return jax.tree.map(step, mixed, stepped), state

    def num_bytes(params, phase):
        sent = sum(messages(topology.rounds[index]) for index in due(topology, rounds, phase))
        return values.num_bytes(params, phase) + jnp.dtype(_weight_dtype(params)).itemsize * sent

    # No restart: what neighbours know is of y_i z_i, which equal z do not make equal; and with y_i = 1 anew, all that y moves by
    # would have to be sent as changes of w.
    return values._replace(
        init=init, exchange=exchange, settle=settle, num_bytes=num_bytes, restart=None, weight=lambda state: state.weight
    )


def _weight_dtype(params: Any) -> Any:
    return jnp.result_type(jnp.float32, *(x.dtype for x in jax.tree.leaves(params) if is_floating(x)))


def dcd(topology: Topology, channel: Channel = Channel(), *, codec: codecs.Codec) -> Mixer:
    """DCD-PSGD: a worker moves by what its message says, so that its neighbours hold its very parameters.

        x½_i = Σ_j w_ij x_j + u_i     c_i = C(x½_i − x_i)     x_i <- x_i + c_i

    u_i is the local step, taken at x_i in order "awc", where c_i travels while the next gradient is taken; in order "atc"
    the parameters between steps are Σ_j w_ij x_j. What the codec loses of a step is gone for good: it has to be a fine one.

    Args:
        topology: static and doubly stochastic, with one worker to a node.
        codec: C; keeps 0.9 of the energy of noise at least.
        channel: see `differences`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if topology or codec do not fit.

    Reference:
        Tang et al. 2018, "Communication compression for decentralized training", arXiv 1803.06443, algorithm 1 (DCD-PSGD).
    """
    check_messages("dcd", topology, codec)
    check_doubly_stochastic("dcd", topology)
    wire = Messages(topology, codec, channel)
    round_, *others = topology.rounds
    if others or wire.group_size > 1:
        kind = "varies in time" if others else f"has nodes of {wire.group_size} workers"
        raise ValueError(
            "mixer 'dcd' needs a static graph of single workers, whose neighbours hear of every step, but "
            f"topology {topology.name!r} {kind}; use 'ring' or 'exponential', or mixer 'choco'"
        )
    if (kept := typical_contraction(codec)) < FINE:
        raise ValueError(
            f"mixer 'dcd' loses for good what its codec does, and {codec.name!r} keeps {kept:.2g} of the energy "
            f"of noise, less than {FINE}; use 'int8', or mixer 'choco'"
        )

    def encode(layout, vectors, codec_states, count):
        return tuple(wire.encode(x_P, wire.shape(layout, b, x_P.size), codec_states[b], count, b) for b, x_P in enumerate(vectors))

    def decoders(layout, vectors):
        return [wire.decode(wire.shape(layout, b, x_P.size), x_P.dtype) for b, x_P in enumerate(vectors)]

    def pack(layout, params):
        return [x_P.astype(codecs.working_dtype(x_P.dtype)) for x_P in layout.pack(params)]

    def unpack(layout, vectors, like):
        dtypes = [bucket.dtype for bucket in layout.buckets]
        return layout.unpack([x_P.astype(dtype) for x_P, dtype in zip(vectors, dtypes)], like=like)

    def init(params, count=0):
        layout, count = wire.layout(params), jnp.asarray(count, jnp.int32)
        known = tuple(pack(layout, params))
        nothing = tuple(map(jnp.zeros_like, known))
        codec_states = wire.init(layout, known)
        return ReplicaState(count + 1, codec_states, encode(layout, nothing, codec_states, count), known, nothing)

    def exchange(params, state, phase):
        del phase
        layout = wire.layout(params)
        vectors = pack(layout, params)
        steps = [decode(message) for decode, message in zip(decoders(layout, vectors), state.message)]
        drift = tuple(
            d + pull(message, c, decode, round_, channel.axis)
            for d, message, c, decode in zip(state.drift, state.message, steps, decoders(layout, vectors))
        )
        known = tuple(x + c for x, c in zip(state.known, steps))
        codec_states = tuple(map(codec.advance, state.codec, state.message))
        mixed = unpack(layout, [x + d for x, d in zip(vectors, drift)], params)
        return mixed, state._replace(codec=codec_states, known=known, drift=drift)

    def settle(mixed, stepped, state):
        del mixed
        layout = wire.layout(stepped)
        vectors = pack(layout, stepped)
        message = encode(layout, [x - known for x, known in zip(vectors, state.known)], state.codec, state.count)
        moved = [known + decode(m) for known, decode, m in zip(state.known, decoders(layout, vectors), message)]
        return unpack(layout, moved, stepped), state._replace(count=state.count + 1, message=message)

    return Mixer(
        init=init,
        exchange=exchange,
        phase=lambda step: 0 * step,
        phases=range(1),
        settle=settle,
        num_bytes=lambda params, phase: wire.num_bytes(params, [0]),
        num_workers=topology.num_workers,
        restart=lambda average, state: init(average, state.count),
    )
