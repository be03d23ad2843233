"""Averages of coded messages: every worker sends C(x_i), and remembers what the message lost.

    x_i = β e_i + g_i;     averaged = (1/N) Σ_j C(x_j);     e_i = x_i − C(x_i)

    β = 1, any codec                            error feedback: Σ sent + e = Σ g         (Stich et al. 2018, arXiv 1809.07599)
    β = 0.999, top-k of a chunked DCT, then     DeMo: e is the momentum, from which the  (Peng et al. 2024, arXiv 2411.19870)
      the sign of the average                   fast components are taken as they are sent
    β = 0.95, 2-bit top-k of a chunk, on the    SparseLoCo                               (Sarfi et al. 2025, arXiv 2508.15706)
      change of H local steps

Other memories are those of `codecs.feedback`: a momentum, EF21, none. How messages become an average, and what is sent, is for
`decjax.reduce.messages` to say: gathered by all, as DeMo and SparseLoCo have it, or averaged and coded once more shard by shard.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs
from decjax.channel import Channel
from decjax.reduce import messages
from decjax.reduce import reducer as reducer_lib

FORMS = ("auto", "gather", "shards")
FLAG_BYTES = 1  # of the header that says whether a worker's values are finite


class CodedState(NamedTuple):
    """State of `coded`."""

    worker: messages.Side  # of this worker's own messages
    owner: messages.Side | tuple[()]  # of those of the means that it owns, in form "shards"
    count: jax.Array  # int32 scalar, steps so far: random codecs draw by it


def coded(
    channel: Channel = Channel(),
    *,
    codec: codecs.Codec,
    error: Callable[[codecs.Codec], codecs.feedback.Feedback] = codecs.feedback.residual,
    form: str = "auto",
) -> reducer_lib.Reducer:
    """The average of coded gradients, with memory of what messages lose; see the module's equations.

    Args:
        channel: how gradients travel; matrices that a codec sees as such are coded alone.
        codec: C, of messages of static size; an unbiased one is contracted where there is a memory.
        error: the memory, such as `codecs.feedback.residual`, or a `functools.partial` of it with options.
        form: "gather", "shards" or "auto", that of the two which sends less; see `decjax.reduce.messages`.

    Returns:
        The `Reducer`. Its `init` is called inside a function that is mapped over workers, unless the form is "gather".

    Raises:
        ValueError: if the codec and its use do not fit; from `num_bytes`, if messages are not smaller than plain all-reduce's.

    Example:
        >>> tx = decjax.synchronize(optax.adamw(1e-3), decjax.reduce.coded(codec=decjax.codecs.make("int8")))

    Reference:
        arXiv 1809.07599; arXiv 2102.02888 for the shards; see the module for others.
    """
    messages.check(codec)
    if form not in FORMS:
        raise ValueError(f"form={form!r} of coded messages is unknown; use one of {', '.join(FORMS)}")
    remembers = error is not codecs.feedback.none
    ends = error(codecs.of_any_shape(codecs.feedback.contractive(codec) if remembers else codec))

    def cut_of(name, num_workers):
        return messages.Cut((codec,), channel.bucket_bytes, num_workers if name == "shards" else 0)

    def sent_bytes(params, num_workers):
        """Bytes of both forms; the one that codes once comes first, and so is taken where they are equal."""
        return {
            name: messages.num_bytes(ends.codec, cut_of(name, num_workers), params, num_workers, FLAG_BYTES)
            for name in ("gather", "shards")
        }

    def due_cut(params):
        if form == "gather":
            return cut_of(form, 0)
        num_workers = channel.axis.size
        sent = sent_bytes(params, num_workers)
        return cut_of(min(sent, key=sent.get) if form == "auto" else form, num_workers)

    def init(params):
        cut = due_cut(params)
        owner = messages.owner_side(ends, cut, params) if cut.num_shards else ()
        return CodedState(messages.worker_side(ends, cut, params), owner, jnp.zeros((), jnp.int32))

    def reduce(grads, state, phase=0):
        del phase
        cut = due_cut(grads)
        arrays = cut.arrays(grads)
        key = messages.noise_key(channel, state.count)

        def is_finite(own):
            return codecs.finite((arrays, own)).astype(jnp.uint8)

        if cut.num_shards:
            averages, worker, owner, finite_N = messages.sharded(
                ends, arrays, state.worker, state.owner, key, is_finite, channel.axis
            )
        else:
            averages, worker, finite_N = messages.gathered(ends, arrays, state.worker, key, is_finite, channel.axis)
            owner = ()
        finite = (finite_N == 1).all() & codecs.finite(averages)
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), CodedState(worker, owner, state.count), state)
        return cut.tree([jnp.where(finite, x, jnp.nan) for x in averages], grads), new._replace(count=state.count + 1)

    def num_bytes(params, num_workers, phase=0):
        del phase
        sent = sent_bytes(params, num_workers)
        best = min(sent, key=sent.get)
        due = best if form == "auto" else form
        plain = reducer_lib.mean().num_bytes(params, num_workers)[0]
        if num_workers > 1 and sent[due] >= plain:
            fix = f"form {best!r}, which sends {sent[best]:.0f}" if sent[best] < plain else "a codec of fewer bytes"
            raise ValueError(
                f"codec {codec.name!r} in form {due!r} sends {sent[due]:.0f} bytes a step, and plain all-reduce "
                f"among {num_workers} workers {plain:.0f}; use {fix}, or reducer 'mean'"
            )
        return np.full(num_workers, sent[due])

    return reducer_lib.Reducer(init, reduce, num_bytes)
