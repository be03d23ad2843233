"""Messages between pipeline stages: activations and their gradients, uncompressed or compressed.

    sender      (message, state) = send(x, state, place)
    receiver    (x, state) = receive(message, state, place)

A message has a label: its kind, "F" for activations and "B" for their gradients, and whether it is compressed, which `compresses` derives
from its position in the schedule, identically at both ends. All stages run the same program: `send` is computed by stages that send,
`receive` by those that receive, and neither communicates. Their state is part of the training state. If a stage has several devices,
each of them compresses its own part of a message, sends it to the device at the same position in the other stage, and has its own state.

Compressed backpropagation (Optimus-CC) compresses the gradients that a stage waits for at the end of an iteration, in its
cool-down: S(S − 1)/2 messages per iteration of 1F1B.

With X the value to be sent, c = C(…) the message, ĉ its value as the receiver decodes it (rounding to the activations' dtype
included), X̂ the value that the receiver uses, and e, h, m in float32, a link between two stages has one of these memories:

    residual    c = C(X + e);     e <- X + e − ĉ        X̂ = ĉ         lazy error propagation: e is added to the next message
    ef21        c = C(X − h);     h <- h + ĉ            X̂ = h         both ends hold h
    samples     c = C(X − m_ξ);   m_ξ <- m_ξ + ĉ        X̂ = m_ξ       both ends hold an m for each sample ξ
    none        c = C(X)                                X̂ = ĉ

A message that is not finite leaves e, h and m unchanged. The state of a codec, such as the warm start of low rank, is also kept from
message to message. Each chunk of a stage has its own links, so arrays begin with [C, …].

Deviations from Optimus-CC: when parameters change at the end of an iteration, the error may be kept (as in the paper), be added to the
first uncompressed message of the next iteration, or be dropped. Deviations from AQ-SGD: m is zero at first instead of sending a sample
uncompressed the first time; and memory is fixed: the hash of a sample's tokens selects one of `slots` places, and a sample that takes
the place of another evicts it.

References: Song et al. 2023, arXiv 2301.09830 (Optimus-CC: compressed backpropagation, lazy error propagation); Richtárik et al. 2021
(EF21); Wang et al. 2022, arXiv 2206.01299 (AQ-SGD).
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from decjax import codecs, noise, registry, schedules
from decjax.options import checked_class
from decjax.pipeline.ticks import Label
from decjax.registry import Requirement
from decjax.typing import DType, PyTree, Shape

BACKWARD, FORWARD = schedules.BACKWARD, schedules.FORWARD
WIDE = jnp.float32  # dtype of the memories
CHOOSING = ("topk", "threshold")  # codecs whose messages contain the positions of the values that are sent


class Place(NamedTuple):
    """The identity of a message, from the point of view of one of its two ends."""

    like: jax.ShapeDtypeStruct  # [B, T, D], of the value; in a tensor-parallel group, of this device's part of it
    stage: jax.Array  # index of this end's stage
    microbatch: jax.Array  # its index
    chunk: jax.Array  # index of this end's chunk
    tokens_BxT1: jax.Array  # of the microbatch; if samples are remembered, of this device's part
    key: jax.Array | None  # PRNG key of the iteration, if there is one
    where_k: jax.Array | None = None  # positions in the flattened array to which the message is limited, if it is


class Ends(NamedTuple):
    """A stage's state for one direction: as sender of its own messages, and as receiver of another stage's."""

    sender: PyTree
    receiver: PyTree


class Transfer(NamedTuple):
    """How the messages of one label are made and read.

    Attributes:
        send: `send(x, state, place) -> (message, state)`.
        receive: `receive(message, state, place) -> (x, state)`.
    """

    send: Callable[[jax.Array, PyTree, Place], tuple[PyTree, PyTree]]
    receive: Callable[[PyTree, PyTree, Place], tuple[jax.Array, PyTree]]


class Boundary:
    """How activations and gradients are sent from stage to stage; this base class sends them uncompressed."""

    @functools.cached_property
    def transfers(self) -> Mapping[Label, Transfer]:
        """Transfers by label; messages of other labels are sent unchanged."""
        return {}

    @property
    def of_samples(self) -> bool:
        """Whether a device that sends a part of a message must send whole sequences."""
        return False

    @property
    def received(self) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
        """`received(x, key)`: the activations that arrive when x is sent; None if that is x, or depends on state."""
        return None

    def init(self, like: jax.ShapeDtypeStruct, schedule: schedules.Schedule) -> PyTree:
        """Return the initial state of one stage; `like` has the shape and dtype of the values that are sent."""
        return ()

    def compresses(self, send: schedules.Send) -> bool:
        """Return whether a message of the schedule is compressed."""
        return False

    def finish(self, state: PyTree) -> PyTree:
        """Return the state at the end of an iteration."""
        return state


UNCOMPRESSED = Boundary()

# -- Links: the messages of one direction, and their memories ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Remembering:
    """A link with one memory (e or h above) for all its messages.

    Attributes:
        codec: of the messages; if `Place.where_k` limits them to some positions, of the values there.
        form: the kind of memory, a function of a codec, such as `codecs.feedback.residual`.
    """

    codec: codecs.Codec
    form: Callable[[codecs.Codec], codecs.feedback.Feedback]

    def _feedback(self, place: Place) -> codecs.feedback.Feedback:
        codec = self.codec if place.where_k is None else OnSupport(self.codec, place.where_k)
        return self.form(Settled(codec, place.like.dtype))

    def init(self, like: jax.ShapeDtypeStruct, num_chunks: int) -> Ends:
        feedback = self.form(self.codec)
        memory = feedback.init(like.shape, WIDE)
        estimate = jnp.zeros(like.shape, WIDE) if feedback.builds else ()
        return Ends(_chunked(memory, num_chunks), _chunked(estimate, num_chunks))

    def send(self, x: jax.Array, sender: PyTree, place: Place) -> tuple[PyTree, PyTree]:
        message, memory = self._feedback(place).encode(x.astype(WIDE), _chunk(sender, place), _key(self.codec, place))
        return message, _with_chunk(sender, place, memory)

    def receive(self, message: PyTree, receiver: PyTree, place: Place) -> tuple[jax.Array, PyTree]:
        feedback = self._feedback(place)
        arrived = feedback.codec.decode(message, place.like.shape, WIDE)
        x = feedback.receive(_chunk(receiver, place), arrived)
        return x.astype(place.like.dtype), _with_chunk(receiver, place, x) if feedback.builds else receiver


class Samples(NamedTuple):
    """One end's latest reconstructions m_ξ of samples."""

    codec: PyTree  # at the sender, state of the codec, [C, …]
    tag_K: jax.Array  # hash of the sample that a slot belongs to, 0: none; K = C · slots
    value_KxP: jax.Array  # the reconstructions, of P = T·D values


@dataclasses.dataclass(frozen=True)
class PerSample:
    """A link that sends how each sample has changed since it was last sent (AQ-SGD), one message per microbatch.

    Both ends store `slots` samples per chunk, T·D float32 each. Of n samples, a fraction of about exp(−n/slots) has a slot of its own.
    """

    codec: codecs.Codec
    slots: int

    def init(self, like: jax.ShapeDtypeStruct, num_chunks: int) -> Ends:
        count, size = num_chunks * self.slots, math.prod(like.shape[1:])
        state = _chunked(self.codec.init(like.shape, WIDE), num_chunks)
        return Ends(*(Samples(state, jnp.zeros(count, jnp.uint32), jnp.zeros((count, size), WIDE)) for state in (state, ())))

    def send(self, x: jax.Array, sender: Samples, place: Place) -> tuple[PyTree, Samples]:
        found, state = self._find(sender, place), _chunk(sender.codec, place)
        message = self.codec.encode(x.astype(WIDE) - found[-1], state, _key(self.codec, place))
        _, sender = self._stored(sender, found, message, place)
        return message, sender._replace(codec=_with_chunk(sender.codec, place, self.codec.advance(state, message)))

    def receive(self, message: PyTree, receiver: Samples, place: Place) -> tuple[jax.Array, Samples]:
        x, receiver = self._stored(receiver, self._find(receiver, place), message, place)
        return x.astype(place.like.dtype), receiver

    def _find(self, samples: Samples, place: Place) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(slots, tags, memories m_ξ) of the samples of a microbatch."""
        tag_B = jnp.maximum(_hash(place.tokens_BxT1, 1), 1)
        slot_B = (_hash(place.tokens_BxT1, 2) % self.slots).astype(jnp.int32) + place.chunk * self.slots
        is_stored_B = samples.tag_K[slot_B] == tag_B
        memory_BxP = jnp.where(is_stored_B[:, None], samples.value_KxP[slot_B], 0)
        return slot_B, tag_B, memory_BxP.reshape(place.like.shape)

    def _stored(self, samples: Samples, found: tuple[jax.Array, ...], message: PyTree, place: Place) -> tuple[jax.Array, Samples]:
        """(reconstruction X̂, state with it stored)."""
        slot_B, tag_B, memory = found
        x = memory + Settled(self.codec, WIDE).decode(message, place.like.shape, WIDE)
        # If two samples of a microbatch have the same slot, the later one is stored, at both ends.
        is_taken_B = jnp.triu(slot_B[:, None] == slot_B, 1).any(axis=1)
        slot_B = jnp.where(is_taken_B | ~codecs.finite(x), len(samples.tag_K), slot_B)
        return x, samples._replace(
            tag_K=samples.tag_K.at[slot_B].set(tag_B, mode="drop"),
            value_KxP=samples.value_KxP.at[slot_B].set(x.reshape(len(slot_B), -1), mode="drop"),
        )


class Settled(codecs.WrappedCodec):
    """A codec whose decoded values are rounded to `rounded_to`, so that sender and receiver compute the same ones."""

    rounded_to: DType

    def decode(self, message: PyTree, shape: Shape, dtype: DType) -> jax.Array:
        # Without the barrier a compiler may fuse a product with the following sum at one end only, and round differently.
        return jax.lax.optimization_barrier(self.codec.decode(message, shape, self.rounded_to)).astype(dtype)


class OnSupport(codecs.WrappedCodec):
    """A codec of the values at positions `where_k` of the flattened array.

    Both ends have the positions, so they are not sent; decoded arrays are zero elsewhere.
    """

    where_k: jax.Array

    def encode(self, x: jax.Array, state: PyTree, key: jax.Array | None) -> PyTree:
        return self.codec.encode(x.ravel()[self.where_k], state, key)

    def decode(self, message: PyTree, shape: Shape, dtype: DType) -> jax.Array:
        chosen_k = self.codec.decode(message, self.where_k.shape, dtype)
        return jnp.zeros(math.prod(shape), dtype).at[self.where_k].set(chosen_k, mode="drop", unique_indices=True).reshape(shape)

    def num_bytes(self, shape: Shape, dtype: DType) -> int:
        return self.codec.num_bytes(self.where_k.shape, dtype)


def _hash(tokens_BxT: jax.Array, word: int) -> jax.Array:
    """A uint32 hash of each sequence: the sum of a random number for every pair (position, token)."""
    seeds_T = noise.mix(jnp.arange(tokens_BxT.shape[-1], dtype=jnp.uint32), jnp.uint32(word))
    return noise.mix(tokens_BxT.astype(jnp.uint32) + seeds_T, jnp.uint32(word)).sum(axis=-1, dtype=jnp.uint32)


def _chunked(tree: PyTree, num_chunks: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_chunks, *jnp.shape(x))), tree)


def _chunk(tree: PyTree, place: Place) -> PyTree:
    return jax.tree.map(lambda x: x[place.chunk], tree)


def _with_chunk(tree: PyTree, place: Place, new: PyTree) -> PyTree:
    return jax.tree.map(lambda x, chunk: x.at[place.chunk].set(chunk), tree, new)


def _key(codec: codecs.Codec, place: Place) -> jax.Array | None:
    """The key of a message's noise, different for every message of an iteration; None if the codec needs none."""
    if not codec.random or place.key is None:
        return None
    return functools.reduce(jax.random.fold_in, (place.stage, place.chunk, place.microbatch), place.key)


# -- Compressed messages of both directions ---------------------------------------------------------------------------


_OF_FIXED_SIZE = tuple(
    Requirement(
        field,
        "codecs with messages of a fixed size",
        lambda codec: codec is None or codec.static_bytes,
        "use 'int8', or, where errors are not remembered, 'bounded(raw=False)'",
    )
    for field in ("backward", "forward")
)
_REUSING_INDICES = (
    Requirement(
        "forward",
        f"a codec with indices with reuse_indices, {' or '.join(CHOOSING)}",
        lambda codec: codec and codec.name in CHOOSING,
        "use forward=topk",
    ),
    Requirement(
        "backward",
        "a codec of vectors without state with reuse_indices",
        lambda codec: codec and not codec.matrix and not codec.state_key,
        "use backward=identity",
    ),
)


@checked_class
class CodedBoundary(registry.Part, Boundary, kind="boundary"):
    """A boundary with compressed messages; codecs see B×T×D as the matrix I×J = (B·T)×D.

    Attributes:
        backward: codec of the gradients; None: sent uncompressed.
        forward: codec of the activations, all of them; None: sent uncompressed.
        when: which gradients are compressed: "epilogue": those that a stage waits for in its cool-down (gpipe: all); "always": all.
        error: the memory of gradients. "carry", "flush" and "reset" add the compression error to the next compressed message of the
            link; over the end of an iteration "carry" keeps it, "flush" adds it to the next iteration's first uncompressed message,
            "reset" drops it. "ef21": both ends hold an estimate, and its changes are sent. "none": no memory.
        forward_error: the same for activations, without "flush", or "samples": an estimate of every sample is kept (AQ-SGD).
        slots: number of samples that "samples" stores: a few times as many as a worker has.
        reuse_indices: send gradients only at the positions that top-k chose for the activations of the same microbatch, compressed
            by `backward` and without indices: the sender of the gradients has received the activations, their receiver has sent them.

    Raises:
        ValueError: if an option is unknown, or a codec does not suit; from `init`, if a codec does not suit the shape, or "flush"
            has a link without uncompressed messages.

    Example:
        >>> boundary = CodedBoundary(codecs.low_rank(rank=16))
    """

    backward: codecs.Codec | None = None
    forward: codecs.Codec | None = None
    _: dataclasses.KW_ONLY
    when: Literal["epilogue", "always"] = "epilogue"
    error: Literal["carry", "flush", "reset", "ef21", "none"] = "carry"
    forward_error: Literal["none", "carry", "reset", "ef21", "samples"] = "none"
    slots: int = 0
    reuse_indices: bool = False

    def __post_init__(self):
        if (self.slots > 0) != (self.forward_error == "samples"):
            raise ValueError(
                f"boundary slots={self.slots} with forward_error={self.forward_error!r}: slots store samples; use "
                "forward_error='samples' with a few times as many slots as a worker has samples, or slots=0 without it"
            )
        self.check_requirements(*_OF_FIXED_SIZE, *(_REUSING_INDICES if self.reuse_indices else ()))
        _ = self.links  # Refuse unsuitable codecs now.

    @functools.cached_property
    def links(self) -> dict[str, Remembering | PerSample]:
        """The links by kind, of the kinds that are compressed."""
        chosen = {BACKWARD: (self.backward, self.error), FORWARD: (self.forward, self.forward_error)}
        return {kind: self._link(codec, memory) for kind, (codec, memory) in chosen.items() if codec}

    def _link(self, codec: codecs.Codec, memory: str) -> Remembering | PerSample:
        feedback = codecs.feedback
        if memory == "none":
            return Remembering(_as_matrix(codec), feedback.memoryless)
        codec = _as_matrix(feedback.contractive(codec))
        if memory == "samples":
            return PerSample(codec, self.slots)
        return Remembering(codec, feedback.ef21 if memory == "ef21" else feedback.residual)

    @property
    def of_samples(self) -> bool:
        return self.forward_error == "samples"

    @property
    def _flushes(self) -> bool:
        return bool(self.backward) and self.error == "flush"

    @functools.cached_property
    def transfers(self) -> Mapping[Label, Transfer]:
        of_kind = lambda kind: Transfer(functools.partial(self._send, kind), functools.partial(self._receive, kind))
        transfers = {(kind, True): of_kind(kind) for kind in self.links}
        return transfers | ({(BACKWARD, False): Transfer(_flush, lambda x, state, place: (x, state))} if self._flushes else {})

    @property
    def received(self) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
        if not self.forward or self.forward.state_key or self.forward_error in ("ef21", "samples"):
            return None
        codec = _as_matrix(self.forward)
        return lambda x, key: codec.decode(codec.encode(x, (), key), x.shape, x.dtype)

    def compresses(self, send: schedules.Send) -> bool:
        return send.kind in self.links and (send.kind == FORWARD or self.when == "always" or send.in_epilogue)

    def init(self, like: jax.ShapeDtypeStruct, schedule: schedules.Schedule) -> PyTree:
        if self._flushes:
            _check_flushes(schedule, self.compresses)
        state: dict[str, Ends] = {kind: link.init(like, schedule.num_chunks) for kind, link in self.links.items()}
        if self.reuse_indices:  # The positions of every microbatch, by chunk, at both ends.
            encode = lambda x: self.links[FORWARD].codec.encode(x, (), None)
            where_k = jax.eval_shape(encode, jax.ShapeDtypeStruct(like.shape, WIDE))["where"]
            where = jnp.zeros((schedule.num_chunks, schedule.num_microbatches, *where_k.shape), where_k.dtype)
            state["where"] = Ends(where, where)
        return state

    def finish(self, state: PyTree) -> PyTree:
        for kind, memory in ((BACKWARD, self.error), (FORWARD, self.forward_error)):
            if kind in self.links and memory == "reset":
                sender = state[kind].sender
                state = _with(state, kind, sender=sender._replace(error=jnp.zeros_like(sender.error)))
        return state

    def _send(self, kind: str, x: jax.Array, state: PyTree, place: Place) -> tuple[PyTree, PyTree]:
        place = self._limited(kind, "receiver", state, place)
        if place.key is not None:
            place = place._replace(key=jax.random.fold_in(place.key, ord(kind)))
        message, sender = self.links[kind].send(x, state[kind].sender, place)
        return message, self._noted(kind, "sender", message, _with(state, kind, sender=sender), place)

    def _receive(self, kind: str, message: PyTree, state: PyTree, place: Place) -> tuple[jax.Array, PyTree]:
        place = self._limited(kind, "sender", state, place)
        x, receiver = self.links[kind].receive(message, state[kind].receiver, place)
        return x, self._noted(kind, "receiver", message, _with(state, kind, receiver=receiver), place)

    def _limited(self, kind: str, end: str, state: PyTree, place: Place) -> Place:
        """The place of a gradient, limited to the positions of the activations that were sent or received there."""
        if not self.reuse_indices or kind == FORWARD:
            return place
        return place._replace(where_k=getattr(state["where"], end)[place.chunk, place.microbatch])

    def _noted(self, kind: str, end: str, message: PyTree, state: PyTree, place: Place) -> PyTree:
        """The state with the positions of activations stored."""
        if not self.reuse_indices or kind == BACKWARD:
            return state
        where = getattr(state["where"], end).at[place.chunk, place.microbatch].set(message["where"])
        return _with(state, "where", **{end: where})


def _flush(x: jax.Array, state: PyTree, place: Place) -> tuple[jax.Array, PyTree]:
    """(x + e in x's dtype, state with e = its rounding error): an uncompressed message with the remembered error."""
    sender = state[BACKWARD].sender
    error = sender.error[place.chunk]
    target = x.astype(WIDE) + error
    sent = jax.lax.optimization_barrier(target.astype(x.dtype))
    left = jnp.where(codecs.finite(target), target - sent.astype(WIDE), error)
    return sent, _with(state, BACKWARD, sender=sender._replace(error=sender.error.at[place.chunk].set(left)))


def _with(state: PyTree, kind: str, **ends: PyTree) -> PyTree:
    """The state, with one or both ends of the entry `kind` replaced."""
    return state | {kind: state[kind]._replace(**ends)}


def _as_matrix(codec: codecs.Codec) -> codecs.Codec:
    """The codec applied to B×T×D as the matrix I×J = (B·T)×D; vectors keep their shape."""
    return codecs.Reshaped(codec, lambda shape, dtype: (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape)


def _check_flushes(schedule: schedules.Schedule, compresses: Callable[[schedules.Send], bool]) -> None:
    """Raise a ValueError if "flush" has a link without uncompressed messages, whose errors would never be sent."""
    of_link: dict[tuple[int, int], set[bool]] = {}
    for send in (send for sends in schedule.sends for send in sends if send.kind == BACKWARD):
        of_link.setdefault((send.source, send.source_chunk), set()).add(compresses(send))
    if {True} in of_link.values():
        raise ValueError(
            f"boundary error='flush' with schedule {schedule.name!r}, microbatches={schedule.num_microbatches}: some links "
            "have compressed messages only, so their error would never be sent; use when='epilogue' with "
            f"schedule '1f1b' and microbatches of at least stages={schedule.num_stages}, or error='carry'"
        )
