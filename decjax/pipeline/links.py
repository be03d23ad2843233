"""Compressed messages in one direction between two stages, and the state that both ends keep for them.

With X what is to be sent, c = C(…) the message, ĉ its value as the receiver decodes it (rounding to the activations' dtype
included), X̂ what the receiver works with, and e, h, m in float32:

    residual    c = C(X + e);     e <- X + e − ĉ        X̂ = ĉ         lazy error propagation: e is added to the next message
    ef21        c = C(X − h);     h <- h + ĉ            X̂ = h         both ends hold h
    samples     c = C(X − m_ξ);   m_ξ <- m_ξ + ĉ        X̂ = m_ξ       both ends hold an m for each sample ξ
    none        c = C(X)                                X̂ = ĉ

A message that is not finite leaves e, h and m unchanged. A codec's own state, such as the warm start of low rank, is also kept from
message to message. Each chunk of a stage has links of its own, so arrays begin with [C, …].

Deviations from AQ-SGD: it sends a sample uncompressed the first time, here m is zero at first; and here memory is fixed: a hash of
the sample's tokens gives one of `slots` places, and a sample that takes another's place makes that one unknown again.

References: Song et al. 2023, arXiv 2301.09830 (lazy error propagation); Richtárik et al. 2021 (EF21); Wang et al. 2022, arXiv
2206.01299 (AQ-SGD).
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decjax import codecs, noise
from decjax.typing import DType

WIDE = jnp.float32  # dtype of what is remembered


class Place(NamedTuple):
    """Which message it is, as one of its two ends sees it."""

    like: jax.ShapeDtypeStruct  # [B, T, D], of what is sent; in a tensor-parallel group, of this device's part of it
    stage: jax.Array  # index of this end's stage
    microbatch: jax.Array  # its index
    chunk: jax.Array  # index of this end's chunk
    tokens_BxT1: jax.Array  # of the microbatch, which all stages have; where samples are remembered, of this device's part
    key: jax.Array | None  # PRNG key of the iteration, if there is one
    where_k: jax.Array | None = None  # positions in the flattened array to which the message is limited, if it is


class Ends(NamedTuple):
    """A stage's state for one direction: as sender of its own messages, and as receiver of another stage's."""

    sender: Any
    receiver: Any


class Link(NamedTuple):
    """How the compressed messages of one direction are made and read."""

    init: Callable[[jax.ShapeDtypeStruct, int], Ends]  # (like, num_chunks) -> state of both ends
    send: Callable[[jax.Array, Any, Place], tuple[Any, Any]]  # (x, sender, place) -> (message, sender)
    receive: Callable[[Any, Any, Place], tuple[jax.Array, Any]]  # (message, receiver, place) -> (x, receiver)


def remembering(form: Callable[[codecs.Codec], codecs.feedback.Feedback], codec: codecs.Codec) -> Link:
    """A link with one memory (e or h above) for all its messages.

    Args:
        form: the kind of memory, a function of a codec, such as `codecs.feedback.residual`.
        codec: of the messages; where `Place.where_k` limits them to some positions, of the values there.
    """

    def settled_at(place):
        return form(Settled(OnSupport(codec, place.where_k) if place.where_k is not None else codec, place.like.dtype))

    def init(like, num_chunks):
        feedback = form(codec)
        memory = feedback.init(like.shape, WIDE)
        estimate = jnp.zeros(like.shape, WIDE) if feedback.builds else ()
        return Ends(*_chunked((memory, estimate), num_chunks))

    def send(x, sender, place):
        message, memory = settled_at(place).encode(x.astype(WIDE), _chunk(sender, place), _key(codec, place))
        return message, _with_chunk(sender, place, memory)

    def receive(message, receiver, place):
        feedback = settled_at(place)
        arrived = feedback.codec.decode(message, place.like.shape, WIDE)
        x = feedback.receive(_chunk(receiver, place), arrived)
        return x.astype(place.like.dtype), _with_chunk(receiver, place, x) if feedback.builds else receiver

    return Link(init, send, receive)


class Settled(codecs.WrappedCodec):
    """A codec with decoded values rounded to `rounded_to` first, so that sender and receiver compute the same ones."""

    rounded_to: DType

    def decode(self, message, shape, dtype):
        # Without the barrier a compiler may fuse a product with the following sum at one end only, and round differently.
        return jax.lax.optimization_barrier(self.codec.decode(message, shape, self.rounded_to)).astype(dtype)


def flushed(x: jax.Array, sender: codecs.feedback.Memory, place: Place) -> tuple[jax.Array, codecs.feedback.Memory]:
    """(x + e in x's dtype, sender's state with e = its rounding error): an uncompressed message with the remembered error."""
    error = sender.error[place.chunk]
    target = x.astype(WIDE) + error
    sent = jax.lax.optimization_barrier(target.astype(x.dtype))
    left = jnp.where(codecs.finite(target), target - sent.astype(WIDE), error)
    return sent, sender._replace(error=sender.error.at[place.chunk].set(left))


def forgotten(ends: Ends) -> Ends:
    """The state with the sender's errors set to zero."""
    return ends._replace(sender=ends.sender._replace(error=jnp.zeros_like(ends.sender.error)))


class OnSupport(codecs.WrappedCodec):
    """A codec of the values at positions `where_k` of the flattened array.

    Both ends have the positions, so they are not sent; decoded arrays are zero elsewhere.
    """

    where_k: jax.Array

    def encode(self, x, state, key):
        return self.codec.encode(x.ravel()[self.where_k], state, key)

    def decode(self, message, shape, dtype):
        chosen_k = self.codec.decode(message, self.where_k.shape, dtype)
        return jnp.zeros(math.prod(shape), dtype).at[self.where_k].set(chosen_k, mode="drop", unique_indices=True).reshape(shape)

    def num_bytes(self, shape, dtype):
        return self.codec.num_bytes(self.where_k.shape, dtype)


class Samples(NamedTuple):
    """One end's latest reconstructions m_ξ of samples."""

    codec: Any  # at the sender, state of the codec, [C, …]
    tag_K: jax.Array  # hash of the sample that a slot belongs to, 0: none; K = C · slots
    value_KxP: jax.Array  # the reconstructions, of P = T·D values


def per_sample(codec: codecs.Codec, slots: int) -> Link:
    """A link that sends how each sample has changed since it was last sent (AQ-SGD), one message per microbatch.

    Both ends store `slots` samples per chunk, T·D float32 each. Of n samples in turn a share of about exp(−n/slots) shares its slot
    with no other.

    Raises:
        ValueError: if `slots` is less than 1.
    """
    if slots < 1:
        raise ValueError(f"slots={slots}: must be at least 1 to store samples; use a few times as many as a worker has samples")
    form = _PerSample(codec, Settled(codec, WIDE).decode, slots)
    return Link(form.init, form.send, form.receive)


@dataclasses.dataclass(frozen=True)
class _PerSample:
    """The functions of `per_sample`."""

    codec: codecs.Codec
    decode: Callable[[Any, tuple[int, ...], Any], jax.Array]
    slots: int

    def init(self, like, num_chunks):
        count, size = num_chunks * self.slots, math.prod(like.shape[1:])
        sender, nothing = _chunked((self.codec.init(like.shape, WIDE), ()), num_chunks)
        return Ends(*(Samples(state, jnp.zeros(count, jnp.uint32), jnp.zeros((count, size), WIDE)) for state in (sender, nothing)))

    def send(self, x, sender, place):
        found, state = self.find(sender, place), _chunk(sender.codec, place)
        message = self.codec.encode(x.astype(WIDE) - found[-1], state, _key(self.codec, place))
        _, sender = self.learn(sender, found, self.decode(message, x.shape, WIDE))
        return message, sender._replace(codec=_with_chunk(sender.codec, place, self.codec.advance(state, message)))

    def receive(self, message, receiver, place):
        x, receiver = self.learn(receiver, self.find(receiver, place), self.decode(message, place.like.shape, WIDE))
        return x.astype(place.like.dtype), receiver

    def find(self, samples, place):
        """(slots, tags, memories m_ξ) of the samples of a microbatch."""
        tag_B = jnp.maximum(_hash(place.tokens_BxT1, 1), 1)
        slot_B = (_hash(place.tokens_BxT1, 2) % self.slots).astype(jnp.int32) + place.chunk * self.slots
        known_B = samples.tag_K[slot_B] == tag_B
        memory_BxP = jnp.where(known_B[:, None], samples.value_KxP[slot_B], 0)
        return slot_B, tag_B, memory_BxP.reshape(place.like.shape)

    def learn(self, samples, found, arrived):
        """(reconstruction X̂, state with it stored)."""
        slot_B, tag_B, memory = found
        x = memory + arrived
        # If two samples of a microbatch have the same slot, the later one is stored, at both ends.
        is_taken_B = jnp.triu(slot_B[:, None] == slot_B, 1).any(axis=1)
        slot_B = jnp.where(is_taken_B | ~codecs.finite(x), len(samples.tag_K), slot_B)
        return x, samples._replace(
            tag_K=samples.tag_K.at[slot_B].set(tag_B, mode="drop"),
            value_KxP=samples.value_KxP.at[slot_B].set(x.reshape(len(slot_B), -1), mode="drop"),
        )


def _hash(tokens_BxT: jax.Array, word: int) -> jax.Array:
    """A uint32 hash of each sequence: the sum of a random number for every pair (position, token)."""
    seeds_T = noise.mix(jnp.arange(tokens_BxT.shape[-1], dtype=jnp.uint32), jnp.uint32(word))
    return noise.mix(tokens_BxT.astype(jnp.uint32) + seeds_T, jnp.uint32(word)).sum(axis=-1, dtype=jnp.uint32)


def _chunked(tree, num_chunks: int):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_chunks, *jnp.shape(x))), tree)


def _chunk(tree, place: Place):
    return jax.tree.map(lambda x: x[place.chunk], tree)


def _with_chunk(tree, place: Place, new):
    return jax.tree.map(lambda x, own: x.at[place.chunk].set(own), tree, new)


def _key(codec: codecs.Codec, place: Place) -> jax.Array | None:
    """The key of a message's noise, different for every message of an iteration; None if the codec needs none."""
    if not codec.random or place.key is None:
        return None
    return functools.reduce(jax.random.fold_in, (place.stage, place.chunk, place.microbatch), place.key)
