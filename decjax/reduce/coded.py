"""Averages of messages of a codec C: every worker sends C(x_i) and remembers what the message loses.

    x_i = β e_i + g_i;     averaged = (1/N) Σ_j C(x_j);     e_i = x_i − C(x_i)

    β = 1, any codec                            error feedback: Σ sent + e = Σ g         (Stich et al. 2018, arXiv 1809.07599)
    β = 0.999, top-k of a chunked DCT, then     DeMo: e is a momentum, from which what   (Peng et al. 2024, arXiv 2411.19870)
      the sign of the average                   is sent is subtracted
    β = 0.95, 2-bit top-k of a chunk, on the    SparseLoCo                               (Sarfi et al. 2025, arXiv 2508.15706)
      change of H local steps

Other memories are those of `codecs.feedback`: a momentum, EF21, none. Messages are either gathered by all workers, as in DeMo and
SparseLoCo, or averaged and encoded once more shard by shard; see `decjax.reduce.messages`.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, codecs, registry
from decjax.channel import Channel
from decjax.reduce import messages
from decjax.reduce import reducer as reducer_lib

FORMS = ("auto", "gather", "shards")
FLAG_BYTES = 1  # of a message's header, which says whether the worker's values are finite


class CodedState(NamedTuple):
    """State of `coded`.

    Attributes:
        worker: the `messages.Side` of this worker's own messages.
        owner: in form "shards" the `messages.Side` of the means that this worker sends on; else ().
        count: int32 scalar, steps so far, by which random codecs draw.
    """

    worker: messages.Side
    owner: Any
    count: jax.Array


ERRORS = {"residual": "decay", "momentum": "momentum", "ef21": "momentum", "none": ""}  # each memory with its own option


@registry.register(
    "reducer", "codec", needs="contractive or unbiased codec", messages="compressed gradients", memory="1 copy; in shards 1/N more"
)
def coded(
    channel: Channel = Channel(),
    *,
    codec: codecs.Codec | str = "int8",
    form: str = "auto",
    error: str | Callable[[codecs.Codec], codecs.feedback.Feedback] = "residual",
    decay: float = 1.0,
    momentum: float = 0.9,
    storage: codecs.Codec | str | None = None,
) -> reducer_lib.Reducer:
    """The average of compressed gradients, with error feedback.

        x_i = β e_i + g_i;     averaged = (1/N) Σ_j C(x_j);     e_i = x_i − C(x_i)

    Matrices that a codec sees as such are encoded alone. `num_bytes` raises ValueError if messages are not smaller than those of plain
    all-reduce. `init` must be called inside a function that is mapped over workers, unless the form is "gather".

    Args:
        channel: how gradients travel.
        codec: C, with messages of a fixed size. If there is a memory, an unbiased codec is made contractive.
        form: "gather", "shards", or "auto" for the one that sends less; see `decjax.reduce.messages`.
        error: the memory of what messages lose: "residual", "momentum", "ef21" or "none", see `codecs.feedback`; or a factory of one.
        decay: β in (0, 1], for "residual".
        momentum: in [0, 1), for "momentum" and "ef21".
        storage: codec that the memory is stored with; None: in full precision.

    Raises:
        ValueError: if the options do not fit together, or the codec's messages cannot be averaged.

    Examples:
        >>> tx = decjax.synchronize(optax.adamw(1e-3), decjax.reduce.coded(codec="int8"))
    """
    return _coded(channel, codec, form, _memory(error, storage, decay=(decay, 1.0), momentum=(momentum, 0.9)))


@registry.register(
    "reducer",
    "demo",
    optimizer="sign",
    needs="contractive or unbiased codec, optimizer sign",
    messages="cosine coefficients",
    memory="1 copy",
)
def demo(
    channel: Channel = Channel(),
    *,
    codec: codecs.Codec | str = "dct",
    form: str = "gather",
    error: str | Callable[[codecs.Codec], codecs.feedback.Feedback] = "residual",
    decay: float = 0.999,
    momentum: float = 0.9,
    storage: codecs.Codec | str | None = None,
) -> reducer_lib.Reducer:
    """DeMo: the average of the largest cosine coefficients of a momentum; use an optimizer that takes the sign of it.

    `coded` with the defaults of Peng et al. 2024, arXiv 2411.19870.

    Args:
        channel: how gradients travel.
        codec: C, with messages of a fixed size. If there is a memory, an unbiased codec is made contractive.
        form: "gather", "shards", or "auto" for the one that sends less; see `decjax.reduce.messages`.
        error: the memory of what messages lose: "residual", "momentum", "ef21" or "none", see `codecs.feedback`; or a factory of one.
        decay: β in (0, 1], for "residual".
        momentum: in [0, 1), for "momentum" and "ef21".
        storage: codec that the memory is stored with; None: in full precision.
    """
    return _coded(channel, codec, form, _memory(error, storage, decay=(decay, 0.999), momentum=(momentum, 0.9)))


def _memory(error: Any, storage: Any, **given: tuple[float, float]) -> Callable[[codecs.Codec], codecs.feedback.Feedback]:
    """The factory of a memory; each option is given as (value, default), and one that the memory does not have raises ValueError."""
    if isinstance(error, str) and error not in ERRORS:
        raise ValueError(f"error={error!r} is unknown; use one of {', '.join(ERRORS)}")
    own = ERRORS[error] if isinstance(error, str) else ""
    for name, (value, default) in given.items():
        if value != default and name != own:
            others = " or ".join(repr(other) for other, option in ERRORS.items() if option == name)
            raise ValueError(f"{name}={value} changes nothing with error={error!r}; leave it out, or use error={others}")
    if storage and error == "none":
        raise ValueError(f"storage={getattr(storage, 'name', storage)!r} with error='none', which stores nothing; leave it empty")
    make = getattr(codecs.feedback, error) if isinstance(error, str) else error
    options: dict[str, Any] = {"decay" if own == "decay" else "beta": given[own][0]} if own else {}
    if storage:
        options["storage"] = registry.make("codec", storage)
    return functools.partial(make, **options) if options else make


def _coded(channel: Channel, codec: codecs.Codec | str, form: str, memory: Callable) -> reducer_lib.Reducer:
    made: codecs.Codec = registry.make("codec", codec)
    messages.check(made)
    if form not in FORMS:
        raise ValueError(f"form={form!r} of coded messages is unknown; use one of {', '.join(FORMS)}")
    remembers = memory is not codecs.feedback.none
    ends = memory(codecs.of_any_shape(codecs.feedback.contractive(made) if remembers else made))
    average = _Average(channel, made, ends, form)
    return reducer_lib.Reducer(average.init, average.reduce, average.num_bytes)


@dataclasses.dataclass(frozen=True)
class _Average:
    """The functions of the reducer."""

    channel: Channel
    codec: codecs.Codec
    ends: codecs.feedback.Feedback
    form: str

    def _layout(self, form: str, params: Any, num_workers: int) -> buckets.Layout:
        return messages.layout(self.channel, (self.codec,), params, num_workers if form == "shards" else 0)

    def _sent_bytes(self, params: Any, num_workers: int) -> dict[str, float]:
        """Bytes of a step in each form; "gather" comes first, so that it is taken where both are equal."""
        return {
            form: messages.num_bytes(self.ends.codec, self._layout(form, params, num_workers), num_workers, FLAG_BYTES)
            for form in ("gather", "shards")
        }

    def _due_layout(self, params: Any) -> buckets.Layout:
        if self.form == "gather":
            return self._layout(self.form, params, 0)
        num_workers = self.channel.axis.size
        sent = self._sent_bytes(params, num_workers)
        return self._layout(min(sent, key=lambda form: sent[form]) if self.form == "auto" else self.form, params, num_workers)

    def init(self, params: Any) -> CodedState:
        layout = self._due_layout(params)
        owner = messages.owner_side(self.ends, layout) if layout.num_shards else ()
        return CodedState(messages.worker_side(self.ends, layout), owner, jnp.zeros((), jnp.int32))

    def reduce(self, grads: Any, state: CodedState, phase: int = 0) -> tuple[Any, CodedState]:
        layout, axis = self._due_layout(grads), self.channel.axis
        arrays = layout.pack(grads, wide=True)
        key = self.channel.key(state.count)

        def is_finite(own):
            return codecs.finite((arrays, own)).astype(jnp.uint8)

        if layout.num_shards:
            averages, worker, owner, finite_N = messages.sharded(self.ends, arrays, state.worker, state.owner, key, is_finite, axis)
        else:
            averages, worker, finite_N = messages.gathered(self.ends, arrays, state.worker, key, is_finite, axis)
            owner = ()
        finite = (finite_N == 1).all() & codecs.finite(averages)
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), CodedState(worker, owner, state.count), state)
        return layout.unpack([jnp.where(finite, x, jnp.nan) for x in averages], grads), new._replace(count=state.count + 1)

    def num_bytes(self, params: Any, num_workers: int, phase: int = 0) -> np.ndarray:
        sent = self._sent_bytes(params, num_workers)
        best = min(sent, key=lambda form: sent[form])
        due = best if self.form == "auto" else self.form
        plain = reducer_lib.mean().num_bytes(params, num_workers)[0]
        if num_workers > 1 and sent[due] >= plain:
            fix = f"form {best!r}, which sends {sent[best]:.0f}" if sent[best] < plain else "a codec of fewer bytes"
            raise ValueError(
                f"codec {self.codec.name!r} in form {due!r} sends {sent[due]:.0f} bytes a step, and plain all-reduce "
                f"among {num_workers} workers {plain:.0f}; use {fix}, or reducer 'mean'"
            )
        return np.full(num_workers, sent[due])
