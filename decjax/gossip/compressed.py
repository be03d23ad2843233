"""Gossip of compressed messages.

Every mixer here rests on one operation, the pull of neighbours on what messages stand for, Σ_j w_ij c_j − c_i. Both ends
decode the same message, so pulls add up to zero over workers, and the mean of the parameters stays what it is whatever
a codec loses. The mixers differ in what is encoded and in what the pull is added to, for C the codec:

                     encoded           memory                                        mixed
    differences      x_i               –                                             x_i + pull(c)
    deepsqueeze      x_i + e_i         e_i <- x_i + e_i − c_i                        x_i + γ pull(c)
    choco, beer      x_i − x̂_i         x̂_i <- x̂_i + c_i;  d_i <- d_i + pull(c)       x_i + γ d_i
    push_sum         y_i x_i − x̂_i     as choco;  y_i <- y_i + γ pull(y)             (y_i x_i + γ d_i) / y_i
    dcd              x½_i − x_i        x_i <- x_i + c_i;  d_i <- d_i + pull(c)       x_i + d_i;  a local step on it is x½_i

d_i = Σ_j w_ij x̂_j − x̂_i, kept as one array however many neighbours there are, is right as long as every change of x̂_j
reaches worker i. On a time-varying graph choco and push_sum therefore keep one (x̂, d) for each round of the period; that
is ours, the papers have static graphs. Memories start from the parameters that `init` is given, which have to be the same
on all workers; afterwards parameters may be anything.

Members of a node (topologies with L > 1) average exactly, and each exchanges its share of the mean.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets
from decjax import codecs
from decjax import mesh
from decjax import topology as topology_lib
from decjax.gossip.mixer import Mixer
from decjax.gossip.rounds import check_rounds, due, is_mean, layout_of, num_phases, messages, own_weight, pull, sent_bytes
from decjax.topology import Round, Topology

# A codec that keeps this share of the energy of noise counts as fine: mixing at full strength is stable with it.
FINE = 0.9
NOISE_VALUES = 4096


class CompressedState(NamedTuple):
    """State of a mixer whose messages are encoded as it sends them."""

    count: jax.Array  # int32 scalar, exchanges so far: noise is a function of (seed, node, count)
    codec: tuple  # the codec's state for each bucket
    memory: tuple  # the scheme's memory for each round of the period (or one for all), and for each bucket


class PushSumState(NamedTuple):
    """State of `push_sum`."""

    weight: jax.Array  # y_i, a scalar of the parameters' dtype
    values: CompressedState  # of what is mixed, y_i x_i


class ReplicaState(NamedTuple):
    """State of `dcd`: parameters are known + the message that is due."""

    count: jax.Array  # int32 scalar, messages so far
    codec: tuple  # the codec's state for each bucket
    message: tuple  # what the next exchange sends, for each bucket
    known: tuple  # x⁻_i, what neighbours hold of this worker, for each bucket
    drift: tuple  # d_i = Σ_j w_ij x⁻_j − x⁻_i, for each bucket


class _Scheme(NamedTuple):
    """What is encoded of a flat array, what is remembered of it, and how the pull enters."""

    init: Callable[[jax.Array, Any], Any]  # (x, what the row of W adds up to) -> memory
    encoded: Callable[[jax.Array, Any], jax.Array]  # (x, memory) -> what is encoded
    merge: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]  # (x, c, pull(c), memory) -> mixed, memory
    per_round: bool = False  # whether each round of the period has a memory of its own


def _differences(gamma: float = 1.0) -> _Scheme:
    return _Scheme(lambda x, row_sum: (), lambda x, memory: x, lambda x, c, pulled, memory: (x + gamma * pulled, memory))


def _deepsqueeze(gamma: float) -> _Scheme:
    def merge(x, c, pulled, error):
        return x + gamma * pulled, x + error - c
    return _Scheme(lambda x, row_sum: jnp.zeros_like(x), jnp.add, merge)


def _choco(gamma: float) -> _Scheme:
    def merge(x, c, pulled, memory):
        known, drift = memory
        drift = drift + pulled
        return x + gamma * drift, (known + c, drift)
    return _Scheme(lambda x, row_sum: (x, (row_sum - 1) * x), lambda x, memory: x - memory[0], merge, per_round=True)


# -- Messages ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Messages:
    """How a pytree travels: the codec, the buckets it encodes, and its noise."""

    topology: Topology
    codec: codecs.Codec
    axis_name: mesh.AxisName
    bucket_bytes: int
    seed: int

    @property
    def group_size(self) -> int:
        """L of the rounds that send messages."""
        return max((round_.group_size for round_ in self.topology.rounds if not is_mean(round_)), default=1)

    def layout(self, params: Any) -> buckets.Layout:
        return layout_of(params, self.topology, 0 if self.codec.traits.matrix else self.bucket_bytes)

    def shape(self, layout: buckets.Layout, bucket: int, size: int) -> tuple[int, ...]:
        """What the codec is shown of a bucket: values in a row, or an array as it is if the codec makes that smaller."""
        shape, dtype = layout.shapes[layout.buckets[bucket].leaves[0]], _wide(layout.buckets[bucket].dtype)
        try:
            suits = self.codec.traits.matrix and self.codec.num_bytes(shape, dtype) < size * dtype.itemsize
        except ValueError:  # Too small a matrix for its rank.
            suits = False
        return shape if suits else (size,)

    def init(self, layout: buckets.Layout, shares: list[jax.Array]) -> tuple:
        return tuple(self.codec.init(self.shape(layout, b, x.size), x.dtype) for b, x in enumerate(shares))

    def encode(self, x_P: jax.Array, shape: tuple[int, ...], state: Any, count: jax.Array, position: int) -> Any:
        key = None
        if self.codec.traits.random:
            # Members of a node draw alike: simulated ones all hold the whole mean, and have to stay equal.
            node = mesh.worker_index(self.axis_name) // self.group_size
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), node), count)
            key = jax.random.fold_in(key, position)
        return self.codec.encode(x_P.reshape(shape), state, key)

    def decode(self, shape: tuple[int, ...], dtype) -> Callable[[Any], jax.Array]:
        return lambda message: self.codec.decode(message, shape, dtype).ravel()

    def num_bytes(self, params: Any, indices: list[int]) -> np.ndarray:
        """Bytes that each worker sends in the given rounds, [N]."""
        layout = self.layout(params)
        sizes = [bucket.size // self.group_size for bucket in layout.buckets]
        message_bytes = sum(
            self.codec.num_bytes(self.shape(layout, b, size), _wide(layout.buckets[b].dtype))
            for b, size in enumerate(sizes))
        return sum(sent_bytes(self.topology.rounds[index], layout, message_bytes) for index in indices)


def _wide(dtype) -> np.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _mixer(scheme: _Scheme, wire: _Messages, rounds: int) -> Mixer:
    """The mixer of a scheme: R rounds a step, a message per shift and bucket."""
    check_rounds(rounds)
    topology, codec, axis_name = wire.topology, wire.codec, wire.axis_name
    cycle = num_phases(topology, rounds)

    def init(params):
        layout = wire.layout(params)
        shares = [mesh.own_share(x_P, wire.group_size, axis_name).astype(_wide(x_P.dtype)) for x_P in layout.pack(params)]

        def memory(round_):
            if is_mean(round_):
                return ()
            return tuple(scheme.init(x, own_weight(tuple(round_.row_sums().round(12).tolist()), round_.group_size, axis_name, x.dtype))
                         for x in shares)

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
                vectors = [mesh.group_mean(x_P, L, axis_name) for x_P in vectors]
                continue
            memory = memories[index if scheme.per_round else 0]
            for b, x_P in enumerate(vectors):
                share = mesh.scatter_mean(x_P, L, axis_name).astype(_wide(x_P.dtype))
                shape = wire.shape(layout, b, share.size)
                decode = wire.decode(shape, share.dtype)
                message = wire.encode(scheme.encoded(share, memory[b]), shape, codec_states[b], state.count,
                                      r * len(vectors) + b)
                c = decode(message)
                mixed, memory[b] = scheme.merge(share, c, pull(message, c, decode, round_, axis_name), memory[b])
                codec_states[b] = codec.advance(codec_states[b], message)
                vectors[b] = mesh.gather(mixed.astype(x_P.dtype), L, axis_name)
        state = CompressedState(state.count + 1, tuple(codec_states), tuple(map(tuple, memories)))
        return layout.unpack(vectors, like=params), state

    return Mixer(init, exchange, lambda params, received, state, phase, step: received, lambda step: step % cycle,
                 range(cycle), lambda params, phase: wire.num_bytes(params, due(topology, rounds, phase)),
                 topology.num_workers)


# -- What fits together -----------------------------------------------------------------------------------------------


def _check_messages(name: str, topology: Topology, codec: codecs.Codec | None) -> None:
    if codec is None:
        raise ValueError(f"mixer {name!r} needs a codec, which says what its messages are; use codec 'int8', or mixer 'exact'")
    if codec.traits.state_key == "sample":
        raise ValueError(f"codec {codec.name!r} remembers samples of a batch, which parameters are not; use codec 'int8'")
    sending = [round_ for round_ in topology.rounds if not is_mean(round_)]
    if not any(round_.shifts for round_ in sending):
        raise ValueError(f"topology {topology.name!r} has no messages that a codec could encode, it averages over all workers; "
                         "use a graph such as 'one_peer_exponential', or no codec")
    sizes = sorted({round_.group_size for round_ in sending})
    if len(sizes) > 1:
        raise ValueError(f"topology {topology.name!r} exchanges between nodes of {sizes} workers, and a codec's memory is of one "
                         "size; use a graph with nodes of one size, or mixer 'exact' without a codec")
    if codec.traits.matrix and sizes[0] > 1:
        raise ValueError(f"codec {codec.name!r} sees whole matrices, but in topology {topology.name!r} each of a node's "
                         f"{sizes[0]} workers sends a share; use a codec such as 'int8', or local_size=1")


def _check_contractive(name: str, codec: codecs.Codec) -> None:
    unbiased = codec.traits.unbiased  # With ω < 1, what is lost is on average shorter than what is encoded.
    if codec.traits.contractive is None and not (unbiased and unbiased(NOISE_VALUES) < 1):
        raise ValueError(f"mixer {name!r} needs a contractive codec, but what {codec.name!r} loses may be longer than what it "
                         "encodes, and is fed back; use 'int8' or another contractive codec, or mixer 'exact'")


def _check_doubly_stochastic(name: str, topology: Topology) -> None:
    if not topology_lib.is_doubly_stochastic(topology):
        raise ValueError(f"mixer {name!r} needs a doubly stochastic graph, but rows or columns of {topology.name!r} do not "
                         "sum to one; use mixer 'push_sum', or a graph such as 'ring'")


def typical_contraction(codec: codecs.Codec) -> float:
    """The share of its energy that a codec keeps of Gaussian noise, 1 − ‖C(x) − x‖²/‖x‖², on 4096 values.

    Declared contractions hold for the worst input, which a codec hardly ever meets. This is what a step size may rely on.
    """
    side = math.isqrt(NOISE_VALUES)
    shape = (side, side) if codec.traits.matrix else (NOISE_VALUES,)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def loss(x):
        key = jax.random.key(0) if codec.traits.random else None
        message = codec.encode(x, codec.init(shape, x.dtype), key)
        return jnp.sum((codec.decode(message, shape, x.dtype) - x) ** 2) / jnp.sum(x**2)

    with jax.ensure_compile_time_eval():
        return 1 - float(jax.jit(loss)(x))


def _strength(name: str, gamma: float | None, codec: codecs.Codec) -> float:
    """γ, or where none is given: 1 for a fine codec, else half of its typical contraction."""
    if gamma is None:
        kept = typical_contraction(codec)
        gamma = 1.0 if kept >= FINE else max(kept / 2, 1e-3)
    if not 0 < gamma <= 1:
        raise ValueError(f"mixer {name!r} with gamma={gamma}: must be more than 0 and at most 1; leave it out to derive it "
                         "from the codec")
    return gamma


# -- Mixers -----------------------------------------------------------------------------------------------------------


def differences(topology: Topology, *, codec: codecs.Codec, rounds: int = 1, axis_name: mesh.AxisName = mesh.WORKER,
                bucket_bytes: int = buckets.BUCKET_BYTES, seed: int = 0) -> Mixer:
    """Whole parameters are encoded and mixed as differences: x_i <- x_i + Σ_j w_ij (C(x_j) − C(x_i)).

    Nothing is remembered, so any graph will do, and what the codec loses comes back as noise of the size of C(x) − x.

    Args:
        topology: who talks to whom.
        codec: C.
        rounds: R, rounds per step.
        axis_name: the worker axis.
        bucket_bytes: size of the flat messages, before they are encoded, in bytes.
        seed: of the codec's noise.

    Returns:
        The `Mixer`; `exact(codec=…)` is the same.

    Raises:
        ValueError: if R < 1, or topology and codec do not fit.
    """
    _check_messages("exact", topology, codec)
    return _mixer(_differences(), _Messages(topology, codec, axis_name, bucket_bytes, seed), rounds)


def deepsqueeze(topology: Topology, *, codec: codecs.Codec, gamma: float | None = None, rounds: int = 1,
                 axis_name: mesh.AxisName = mesh.WORKER, bucket_bytes: int = buckets.BUCKET_BYTES, seed: int = 0) -> Mixer:
    """DeepSqueeze: whole parameters, with what earlier messages have lost.

        c_i = C(x_i + e_i)     e_i <- x_i + e_i − c_i     x_i <- x_i + γ Σ_j w_ij (c_j − c_i)

    No memory of neighbours, so time-varying graphs will do. Noise stays of the size of what the codec loses of x.

    Args:
        topology: doubly stochastic.
        codec: C, contractive.
        gamma: γ in (0, 1]; None: 1 for a codec that keeps 0.9 of the energy of noise, else half of what it keeps.
        rounds, axis_name, bucket_bytes, seed: see `differences`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if γ, topology or codec do not fit.

    Reference:
        Tang et al. 2019, "DeepSqueeze: decentralization meets error-compensated compression", arXiv 1907.07346, algorithm 1.
    """
    _check_messages("deepsqueeze", topology, codec)
    _check_doubly_stochastic("deepsqueeze", topology)
    _check_contractive("deepsqueeze", codec)
    scheme = _deepsqueeze(_strength("deepsqueeze", gamma, codec))
    return _mixer(scheme, _Messages(topology, codec, axis_name, bucket_bytes, seed), rounds)


def choco(topology: Topology, *, codec: codecs.Codec, gamma: float | None = None, rounds: int = 1,
          axis_name: mesh.AxisName = mesh.WORKER, bucket_bytes: int = buckets.BUCKET_BYTES, seed: int = 0) -> Mixer:
    """CHOCO gossip: neighbours know an estimate x̂_i of each other, and what has changed since travels.

        c_i = C(x_i − x̂_i)     x̂_i <- x̂_i + c_i     x_i <- x_i + γ Σ_j w_ij (x̂_j − x̂_i)

    With an exact codec and γ = 1 this is Wx. In order "atc" it is CHOCO-SGD as first published; in order "awc" it is the
    form that sends after mixing, its message delayed to where it overlaps the next gradient, with the same trajectory.
    Memory: x̂ and Σ_j w_ij (x̂_j − x̂_i), once for each round of the topology's period.

    Args:
        topology: doubly stochastic; if it varies in time, each of its rounds keeps estimates of its own.
        codec: C, contractive.
        gamma: γ in (0, 1]; None: 1 for a codec that keeps 0.9 of the energy of noise, else half of what it keeps.
        rounds, axis_name, bucket_bytes, seed: see `differences`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if γ, topology or codec do not fit.

    Reference:
        Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, algorithms 1 and 2; Koloskova et al. 2020, arXiv 1907.09356.
    """
    _check_messages("choco", topology, codec)
    _check_doubly_stochastic("choco", topology)
    _check_contractive("choco", codec)
    return _mixer(_choco(_strength("choco", gamma, codec)), _Messages(topology, codec, axis_name, bucket_bytes, seed), rounds)


def beer(topology: Topology, *, codec: codecs.Codec, gamma: float | None = None, rounds: int = 1,
         axis_name: mesh.AxisName = mesh.WORKER, bucket_bytes: int = buckets.BUCKET_BYTES, seed: int = 0) -> Mixer:
    """The mixer of BEER: `choco` on a static symmetric graph. BEER itself is `optim.track(inner, beer(…))`.

    Args:
        topology: static and symmetric, as the proof needs it.
        codec, gamma, rounds, axis_name, bucket_bytes, seed: see `choco`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if γ, topology or codec do not fit.

    Reference:
        Zhao et al. 2022, "BEER: fast O(1/T) rate for decentralized nonconvex optimization with communication compression",
        arXiv 2201.13320.
    """
    if not (topology.is_static and topology.is_symmetric):
        kind = "varies in time" if not topology.is_static else "is directed"
        raise ValueError(f"mixer 'beer' needs a static symmetric graph, but topology {topology.name!r} {kind}; use 'ring', "
                         "'torus' or 'hypercube', or mixer 'choco'")
    _check_messages("beer", topology, codec)
    _check_contractive("beer", codec)
    return _mixer(_choco(_strength("beer", gamma, codec)), _Messages(topology, codec, axis_name, bucket_bytes, seed), rounds)


def _as_they_are() -> codecs.Codec:
    return codecs.Codec(
        name="none", encode=lambda x, state, key: x, decode=lambda message, shape, dtype: message,
        num_bytes=lambda shape, dtype: math.prod(shape) * jnp.dtype(dtype).itemsize,
        traits=codecs.Traits(linear=True, unbiased=lambda size: 0.0, contractive=lambda shape: 1.0))


def push_sum(topology: Topology, *, codec: codecs.Codec | None = None, gamma: float | None = None, rounds: int = 1,
             axis_name: mesh.AxisName = mesh.WORKER, bucket_bytes: int = buckets.BUCKET_BYTES, seed: int = 0) -> Mixer:
    """Quantized push-sum: on directed graphs, where only columns of A sum to one, workers agree on Σ_i w_i / Σ_i y_i.

        w = y_i z_i     c_i = C(w_i − x̂_i)     x̂_i <- x̂_i + c_i
        w_i <- w_i + γ (Σ_j a_ij x̂_j − x̂_i)     y_i <- y_i + γ (Σ_j a_ij y_j − y_i)     z_i <- w_i / y_i

    z are the parameters: gradients are taken there. A local step u is added to w, so to z as u / y. γ < 1 damps the graph
    itself, A <- γ A + (1−γ) I, for values and weights alike. y travels exactly, one number a message.

    Args:
        topology: column-stochastic; if it varies in time, each of its rounds keeps estimates of its own.
        codec: C, contractive; None: w travels as it is, and nothing is remembered.
        gamma: γ in (0, 1]; None: 1 for a codec that keeps 0.9 of the energy of noise, else half of what it keeps.
        rounds, axis_name, bucket_bytes, seed: see `differences`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if γ, topology or codec do not fit.

    Reference:
        Taheri et al. 2020, "Quantized decentralized stochastic learning over directed graphs", arXiv 2002.09964;
        Assran et al. 2019, "Stochastic gradient push", arXiv 1811.10792.
    """
    if not topology_lib.is_column_stochastic(topology):
        raise ValueError("mixer 'push_sum' keeps the sum over workers, so columns of W have to sum to one, and those of "
                         f"topology {topology.name!r} do not; use 'directed_exponential' or 'random_digraph'")
    if codec:
        _check_messages("push_sum", topology, codec)
        _check_contractive("push_sum", codec)
    gamma = _strength("push_sum", 1.0 if codec is None and gamma is None else gamma, codec)
    wire = _Messages(topology, codec or _as_they_are(), axis_name, bucket_bytes, seed)
    values = _mixer(_choco(gamma) if codec else _differences(gamma), wire, rounds)

    def scale(params, factor):
        return jax.tree.map(lambda x: (x * factor).astype(x.dtype) if _is_floating(x) else x, params)

    def init(params):
        return PushSumState(jnp.ones((), _weight_dtype(params)), values.init(params))

    def exchange(params, state, phase):
        mixed, values_state = values.exchange(scale(params, state.weight), state.values, phase)
        weight = state.weight
        for index in due(topology, rounds, phase):
            if not is_mean(topology.rounds[index]):
                weight = weight + gamma * pull(weight, weight, lambda y: y, topology.rounds[index], axis_name)
        return scale(mixed, 1 / weight), PushSumState(weight, values_state)

    def settle(mixed, stepped, state):
        def step(z, x):
            return (z + (x - z) / state.weight).astype(x.dtype) if _is_floating(x) else x
        return jax.tree.map(step, mixed, stepped), state

    def num_bytes(params, phase):
        sent = sum(messages(topology.rounds[index]) for index in due(topology, rounds, phase))
        return values.num_bytes(params, phase) + jnp.dtype(_weight_dtype(params)).itemsize * sent

    return values._replace(init=init, exchange=exchange, settle=settle, num_bytes=num_bytes, dampable=False)


def _is_floating(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _weight_dtype(params: Any) -> Any:
    return jnp.result_type(jnp.float32, *(x.dtype for x in jax.tree.leaves(params) if _is_floating(x)))


def dcd(topology: Topology, *, codec: codecs.Codec, axis_name: mesh.AxisName = mesh.WORKER,
        bucket_bytes: int = buckets.BUCKET_BYTES, seed: int = 0) -> Mixer:
    """DCD-PSGD: a worker moves by what its message says, so that its neighbours hold its very parameters.

        x½_i = Σ_j w_ij x_j + u_i     c_i = C(x½_i − x_i)     x_i <- x_i + c_i

    u_i is the local step, taken at x_i in order "awc", where c_i travels while the next gradient is taken; in order "atc"
    the parameters between steps are Σ_j w_ij x_j. What the codec loses of a step is gone for good: it has to be a fine one.

    Args:
        topology: static and doubly stochastic, with one worker to a node.
        codec: C; keeps 0.9 of the energy of noise at least.
        axis_name, bucket_bytes, seed: see `differences`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if topology or codec do not fit.

    Reference:
        Tang et al. 2018, "Communication compression for decentralized training", arXiv 1803.06443, algorithm 1 (DCD-PSGD).
    """
    _check_messages("dcd", topology, codec)
    _check_doubly_stochastic("dcd", topology)
    wire = _Messages(topology, codec, axis_name, bucket_bytes, seed)
    round_, *others = topology.rounds
    if others or wire.group_size > 1:
        kind = "varies in time" if others else f"has nodes of {wire.group_size} workers"
        raise ValueError("mixer 'dcd' needs a static graph of single workers, whose neighbours hear of every step, but "
                         f"topology {topology.name!r} {kind}; use 'ring' or 'exponential', or mixer 'choco'")
    if (kept := typical_contraction(codec)) < FINE:
        raise ValueError(f"mixer 'dcd' loses for good what its codec does, and {codec.name!r} keeps {kept:.2g} of the energy "
                         f"of noise, less than {FINE}; use 'int8', or mixer 'choco'")

    def encode(layout, vectors, codec_states, count):
        return tuple(wire.encode(x_P, wire.shape(layout, b, x_P.size), codec_states[b], count, b)
                     for b, x_P in enumerate(vectors))

    def decoders(layout, vectors):
        return [wire.decode(wire.shape(layout, b, x_P.size), x_P.dtype) for b, x_P in enumerate(vectors)]

    def pack(layout, params):
        return [x_P.astype(_wide(x_P.dtype)) for x_P in layout.pack(params)]

    def unpack(layout, vectors, like):
        dtypes = [bucket.dtype for bucket in layout.buckets]
        return layout.unpack([x_P.astype(dtype) for x_P, dtype in zip(vectors, dtypes)], like=like)

    def init(params):
        layout = wire.layout(params)
        known = tuple(pack(layout, params))
        nothing = tuple(map(jnp.zeros_like, known))
        codec_states, count = wire.init(layout, known), jnp.zeros((), jnp.int32)
        return ReplicaState(count + 1, codec_states, encode(layout, nothing, codec_states, count), known, nothing)

    def exchange(params, state, phase):
        del phase
        layout = wire.layout(params)
        vectors = pack(layout, params)
        steps = [decode(message) for decode, message in zip(decoders(layout, vectors), state.message)]
        drift = tuple(d + pull(message, c, decode, round_, axis_name) for d, message, c, decode in
                      zip(state.drift, state.message, steps, decoders(layout, vectors)))
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

    return Mixer(init, exchange, lambda params, received, state, phase, step: received, lambda step: 0 * step, range(1),
                 lambda params, phase: wire.num_bytes(params, [0]), topology.num_workers, settle)
