"""Messages between pipeline stages: activations and their gradients, uncompressed or compressed.

    sender      (message, state) = send(x, state, place)
    receiver    (x, state) = receive(message, state, place)

A message has a label: its kind, "F" for activations and "B" for their gradients, and whether it is compressed, which `compresses`
decides from its place in the schedule, the same at both ends. A label has a pair of such functions, or none, if x is sent as it is.
All stages run the same program: `send` is computed by stages that send, `receive` by those that receive, and neither communicates.
Their state is carried from step to step with the rest of the training state.

Where a stage has several devices, all of this is about one device: it compresses and sends its own part to the device at the same
place in the other stage, and remembers the error of that part.

Compressed backpropagation (Optimus-CC) compresses the gradients that a stage waits for at the end of an iteration, in its
cool-down: S(S − 1)/2 messages per iteration of 1F1B. The error of such a message is added to the next compressed one of its link
(lazy error propagation). Other forms of memory are in `links`.

Deviation from the paper: over the end of an iteration, where the parameters change, the error may be kept (as in the paper), be
added to the first uncompressed message of the next iteration, or be dropped.

Reference: Song et al. 2023, arXiv 2301.09830 (Optimus-CC).
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decjax import codecs, schedules
from decjax.pipeline import links
from decjax.pipeline.links import Place
from decjax.pipeline.ticks import Label

WHEN = ("epilogue", "always")
ERRORS = ("carry", "flush", "reset", "ef21", "none")
FORWARD_ERRORS = ("none", "carry", "reset", "ef21", "samples")
CHOOSING = ("topk", "threshold")  # codecs whose messages contain the positions of the values that are sent


class Transfer(NamedTuple):
    """How the messages of one label are made and read.

    Attributes:
        send: `send(x, state, place) -> (message, state)`.
        receive: `receive(message, state, place) -> (x, state)`.
    """

    send: Callable[[jax.Array, Any, Place], tuple[Any, Any]]
    receive: Callable[[Any, Any, Place], tuple[jax.Array, Any]]


class Boundary(NamedTuple):
    """How activations and gradients are sent from stage to stage; with the defaults, uncompressed.

    Attributes:
        init: `init(like, schedule) -> state` of one stage; `like` has the shape and dtype of what is sent.
        compresses: `compresses(send) -> bool`, whether a message of the schedule is compressed.
        transfers: by label; messages of other labels are sent as they are.
        finish: `finish(state) -> state`, applied at the end of an iteration.
        received: `received(x, key) -> x`, the activations that arrive when x is sent; None where that is x itself, or depends on
            state.
        of_samples: whether a device that sends a part of a message must send whole sequences.
    """

    init: Callable[[jax.ShapeDtypeStruct, schedules.Schedule], Any] = lambda like, schedule: ()
    compresses: Callable[[schedules.Send], bool] = lambda send: False
    transfers: Mapping[Label, Transfer] = {}
    finish: Callable[[Any], Any] = lambda state: state
    received: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    of_samples: bool = False


def coded(
    backward: codecs.Codec | None = None,
    forward: codecs.Codec | None = None,
    *,
    when: str = "epilogue",
    error: str = "carry",
    forward_error: str = "none",
    slots: int = 0,
    reuse_indices: bool = False,
) -> Boundary:
    """A boundary with compressed messages; codecs are given B×T×D as the matrix I×J = (B·T)×D.

    Args:
        backward: codec of the gradients; None: sent uncompressed.
        forward: codec of the activations, all of them; None: sent uncompressed.
        when: which gradients are compressed: "epilogue": those that a stage waits for in its cool-down (gpipe: all); "always": all.
        error: what is done with the compression error of gradients. "carry", "flush" and "reset" add it to the next compressed
            message of the link; over the end of an iteration "carry" keeps it, "flush" adds it to the next iteration's first
            uncompressed message, "reset" drops it. "ef21": both ends hold an estimate, and its changes are sent. "none": nothing.
        forward_error: the same for activations, without "flush", or "samples": an estimate of every sample is kept (AQ-SGD).
        slots: how many samples "samples" stores: a few times as many as a worker has; see `links.per_sample`.
        reuse_indices: send gradients only at the positions that top-k chose for the activations of the same microbatch, compressed
            by `backward` and without indices.

    Raises:
        ValueError: if an option is unknown, or a codec does not suit; from `init`, if a codec does not suit the shape, or "flush"
            has a link without uncompressed messages.

    Example:
        >>> boundary = coded(codecs.low_rank(rank=16))

    Reference: Song et al. 2023, arXiv 2301.09830; Wang et al. 2022, arXiv 2206.01299 for "samples".
    """
    _check_options(when, error, forward_error, slots)
    given = {schedules.BACKWARD: (backward, error), schedules.FORWARD: (forward, forward_error)}
    made = {kind: _link(codec, memory, slots) for kind, (codec, memory) in given.items() if codec}
    form = _Coded(made, when, bool(backward) and error == "flush", tuple(kind for kind in made if given[kind][1] == "reset"))
    transfers = {(kind, True): _transfer(kind, link) for kind, link in made.items()}
    if form.flushes:
        transfers[schedules.BACKWARD, False] = Transfer(_flush, lambda x, state, place: (x, state))
    received = None
    if forward and not forward.state_key and forward_error not in ("ef21", "samples"):
        seen = _as_matrix(forward)
        received = lambda x, key: seen.decode(seen.encode(x, (), key), x.shape, x.dtype)
    boundary = Boundary(form.init, form.compresses, transfers, form.finish, received, forward_error == "samples")
    return _reusing(boundary, backward, forward) if reuse_indices else boundary


@dataclasses.dataclass(frozen=True)
class _Coded:
    """The functions of `coded`."""

    made: Mapping[str, links.Link]  # kind -> link, of the kinds that are compressed
    when: str
    flushes: bool  # whether the first uncompressed gradient of an iteration brings the error
    resets: tuple[str, ...]  # kinds whose errors are dropped at the end of an iteration

    def compresses(self, send):
        return send.kind in self.made and (send.kind == schedules.FORWARD or self.when == "always" or send.in_epilogue)

    def init(self, like, schedule):
        if self.flushes:
            _check_flushes(schedule, self.compresses)
        return {kind: link.init(like, schedule.num_chunks) for kind, link in self.made.items()}

    def finish(self, state):
        return state | {kind: links.forgotten(state[kind]) for kind in self.resets}


def _check_options(when: str, error: str, forward_error: str, slots: int) -> None:
    for what, value, known in (("when", when, WHEN), ("error", error, ERRORS), ("forward_error", forward_error, FORWARD_ERRORS)):
        if value not in known:
            raise ValueError(f"boundary {what}={value!r} is unknown; use one of {', '.join(known)}")
    if slots and forward_error != "samples":
        raise ValueError(
            f"boundary slots={slots} with forward_error={forward_error!r}, which remembers no samples; use 'samples', or slots=0"
        )


def _with(state: Any, kind: str, **ends: Any) -> Any:
    """The state, with one or both ends of the entry `kind` replaced."""
    return state | {kind: state[kind]._replace(**ends)}


def _transfer(kind: str, link: links.Link) -> Transfer:
    def send(x, state, place):
        own = place if place.key is None else place._replace(key=jax.random.fold_in(place.key, ord(kind)))
        message, sender = link.send(x, state[kind].sender, own)
        return message, _with(state, kind, sender=sender)

    def receive(message, state, place):
        x, receiver = link.receive(message, state[kind].receiver, place)
        return x, _with(state, kind, receiver=receiver)

    return Transfer(send, receive)


def _flush(x: jax.Array, state: Any, place: Place) -> tuple[Any, Any]:
    message, sender = links.flushed(x, state[schedules.BACKWARD].sender, place)
    return message, _with(state, schedules.BACKWARD, sender=sender)


def _link(codec: codecs.Codec, error: str, slots: int) -> links.Link:
    if not codec.static_bytes:
        raise ValueError(
            f"codec {codec.name!r} has messages of varying size, and stages wait for messages of a fixed one; use 'int8', "
            "or, where errors are not remembered, 'bounded(raw=False)'"
        )
    if error == "none":
        return links.remembering(codecs.feedback.memoryless, _as_matrix(codec))
    codec = _as_matrix(codecs.feedback.contractive(codec))
    if error == "samples":
        return links.per_sample(codec, slots)
    return links.remembering(codecs.feedback.ef21 if error == "ef21" else codecs.feedback.residual, codec)


def _as_matrix(codec: codecs.Codec) -> codecs.Codec:
    """The codec applied to B×T×D as the matrix I×J = (B·T)×D, and to vectors as they are."""
    return codecs.Reshaped(codec, lambda shape, dtype: (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape)


def _reusing(boundary: Boundary, backward: codecs.Codec | None, forward: codecs.Codec | None) -> Boundary:
    """The boundary, with gradients sent only at the positions at which the activations of the same microbatch were sent.

    Both ends know these positions: the sender of the gradients has received the activations, their receiver has sent them.
    """
    if not forward or forward.name not in CHOOSING:
        raise ValueError(
            f"boundary reuse_indices with forward={forward and forward.name!r}: only {' and '.join(CHOOSING)} have indices; "
            "use forward=topk"
        )
    if not backward or backward.matrix or backward.state_key:
        raise ValueError(
            f"boundary reuse_indices with backward={backward and backward.name!r}: the values at these indices need a codec "
            "of vectors without state; use backward=identity"
        )
    gradients, activations = (boundary.transfers[kind, True] for kind in (schedules.BACKWARD, schedules.FORWARD))
    form = _Reusing(boundary.init, _as_matrix(forward), gradients, activations)
    transfers = dict(boundary.transfers) | {
        (schedules.FORWARD, True): Transfer(form.send_activations, form.receive_activations),
        (schedules.BACKWARD, True): Transfer(form.send_gradients, form.receive_gradients),
    }
    return boundary._replace(init=form.init, transfers=transfers)


@dataclasses.dataclass(frozen=True)
class _Reusing:
    """The functions of `_reusing`; the state holds the positions of every microbatch, by chunk, at both ends."""

    init_others: Callable[[jax.ShapeDtypeStruct, schedules.Schedule], Any]
    forward: codecs.Codec
    gradients: Transfer
    activations: Transfer

    def init(self, like, schedule):
        x = jax.ShapeDtypeStruct(like.shape, links.WIDE)
        where_k = jax.eval_shape(lambda x: self.forward.encode(x, (), None), x)["where"]
        places = jnp.zeros((schedule.num_chunks, schedule.num_microbatches, *where_k.shape), where_k.dtype)
        return self.init_others(like, schedule) | {"where": links.Ends(places, places)}

    def send_activations(self, x, state, place):
        message, state = self.activations.send(x, state, place)
        places = state["where"].sender.at[place.chunk, place.microbatch].set(message["where"])
        return message, _with(state, "where", sender=places)

    def receive_activations(self, message, state, place):
        x, state = self.activations.receive(message, state, place)
        places = state["where"].receiver.at[place.chunk, place.microbatch].set(message["where"])
        return x, _with(state, "where", receiver=places)

    def send_gradients(self, x, state, place):
        there = place._replace(where_k=state["where"].receiver[place.chunk, place.microbatch])
        return self.gradients.send(x, state, there)

    def receive_gradients(self, message, state, place):
        there = place._replace(where_k=state["where"].sender[place.chunk, place.microbatch])
        return self.gradients.receive(message, state, there)


def _check_flushes(schedule: schedules.Schedule, compresses) -> None:
    """Raises a ValueError if "flush" finds a link without uncompressed messages, whose errors would never be sent."""
    of_link: dict[tuple[int, int], set[bool]] = {}
    for send in (send for sends in schedule.sends for send in sends if send.kind == schedules.BACKWARD):
        of_link.setdefault((send.source, send.source_chunk), set()).add(compresses(send))
    if {True} in of_link.values():
        raise ValueError(
            f"boundary error='flush' with schedule {schedule.name!r}, microbatches={schedule.num_microbatches}: some links "
            "have compressed messages only, so their error would never be sent; use when='epilogue' with "
            f"schedule '1f1b' and microbatches of at least stages={schedule.num_stages}, or error='carry'"
        )
