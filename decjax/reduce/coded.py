"""Averages of messages of a codec."""

from collections.abc import Callable
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, codecs, registry
from decjax.codecs.feedback import Feedback
from decjax.options import Decay, Share
from decjax.reduce import messages
from decjax.reduce.reducer import Mean, Reducer
from decjax.typing import PyTree

FLAG_BYTES = 1  # of a message's header, which says whether the worker's values are finite
# The options that each memory of `codecs.feedback` has.
MEMORIES = {"residual": ("decay", "storage"), "momentum": ("momentum", "storage"), "ef21": ("momentum",), "none": ()}


class CodedState(NamedTuple):
    """State of `CodedMean`.

    Attributes:
        worker: the `messages.Side` of this worker's own messages.
        owner: in form "shards" the `messages.Side` of the means that this worker sends on; else ().
        step: int32 scalar, steps so far, by which random codecs draw.
    """

    worker: messages.Side
    owner: PyTree
    step: jax.Array


class CodedMean(Reducer, name="codec"):
    """The average of compressed gradients, with error feedback.

        x_i = β e_i + g_i;     averaged = (1/N) Σ_j C(x_j);     e_i = x_i − C(x_i)

        β = 1, any codec                            error feedback: Σ sent + e = Σ g         (Stich et al. 2018, arXiv 1809.07599)
        β = 0.999, top-k of a chunked DCT, then     DeMo: e is a momentum, from which what   (Peng et al. 2024, arXiv 2411.19870)
          the sign of the average                   is sent is subtracted
        β = 0.95, 2-bit top-k of a chunk, on the    SparseLoCo                               (Sarfi et al. 2025, arXiv 2508.15706)
          change of H local steps

    Messages are either gathered by all workers, as in DeMo and SparseLoCo, or averaged and encoded once more shard by shard; see
    `decjax.reduce.messages`. Matrices that a codec sees as such are encoded alone. `num_bytes` raises ValueError if messages are not
    smaller than those of plain all-reduce. `init` must be called inside a function that is mapped over workers, unless the form is
    "gather".

    Attributes:
        codec: C, with messages of a fixed size. If there is a memory, an unbiased codec is made contractive.
        form: "gather", "shards", or "auto" for the one that sends less.
        error: the memory of what messages lose: "residual", "momentum", "ef21" or "none", see `codecs.feedback`; or a factory of one.
        decay: β, for "residual".
        momentum: for "momentum" and "ef21".
        storage: codec that the memory is stored with; None: in full precision.

    Examples:
        >>> tx = decjax.synchronize(optax.adamw(1e-3), decjax.reduce.coded(codec="int8"))
    """

    needs = "contractive or unbiased codec"
    messages = "compressed gradients"
    memory = "1 copy; in shards 1/N more"
    sharded = True

    codec: codecs.Codec | str = "int8"
    form: Literal["auto", "gather", "shards"] = "auto"
    error: Literal["residual", "momentum", "ef21", "none"] | Callable[[codecs.Codec], Feedback] = "residual"
    decay: Share = 1.0
    momentum: Decay = 0.9
    storage: codecs.Codec | str | None = None

    def __post_init__(self):
        used = MEMORIES[self.error] if isinstance(self.error, str) else ("storage",)
        for name in ("decay", "momentum", "storage"):
            if getattr(self, name) != getattr(type(self), name) and name not in used:
                others = " or ".join(repr(memory) for memory, options in MEMORIES.items() if name in options)
                raise ValueError(
                    f"{self}: {name}={getattr(self, name)!r} has no effect with error={self.error!r}; leave it out, or use error={others}"
                )
        messages.check(self._codec)
        _ = self._ends  # Raises an error if the memory does not suit the codec.

    @functools.cached_property
    def _codec(self) -> codecs.Codec:
        return registry.make("codec", self.codec)

    @functools.cached_property
    def _ends(self) -> Feedback:
        """The codec with its memory."""
        make = getattr(codecs.feedback, self.error) if isinstance(self.error, str) else self.error
        options = {"storage": registry.make("codec", self.storage)} if self.storage else {}
        if self.error == "residual":
            options["decay"] = self.decay
        elif isinstance(self.error, str) and self.error != "none":
            options["beta"] = self.momentum
        codec = self._codec if make is codecs.feedback.none else codecs.feedback.contractive(self._codec)
        return make(codecs.of_any_shape(codec), **options)

    def _layout(self, form: str, params: PyTree, num_workers: int) -> buckets.Layout:
        return messages.layout(self.channel, (self._codec,), params, num_workers if form == "shards" else 0)

    def _sent_bytes(self, params: PyTree, num_workers: int) -> dict[str, float]:
        """Return the bytes of a step in each form; "gather" comes first, so that it is taken where both are equal."""
        return {
            form: messages.num_bytes(self._ends.codec, self._layout(form, params, num_workers), num_workers, FLAG_BYTES)
            for form in ("gather", "shards")
        }

    def _due_layout(self, params: PyTree) -> buckets.Layout:
        num_workers = 0 if self.form == "gather" else self.channel.axis.size
        form = _least(self._sent_bytes(params, num_workers)) if self.form == "auto" else self.form
        return self._layout(form, params, num_workers)

    def init(self, params):
        layout = self._due_layout(params)
        owner = messages.owner_side(self._ends, layout) if layout.num_shards else ()
        return CodedState(messages.worker_side(self._ends, layout), owner, jnp.zeros((), jnp.int32))

    def reduce(self, grads, state: CodedState, phase=0):
        layout, axis = self._due_layout(grads), self.channel.axis
        arrays = layout.pack(grads, wide=True)
        key = self.channel.key(state.step)

        def is_finite(own):
            return codecs.finite((arrays, own)).astype(jnp.uint8)

        if layout.num_shards:
            averages, worker, owner, finite_N = messages.sharded(
                self._ends, arrays, state.worker, state.owner, key, is_finite, axis
            )
        else:
            averages, worker, finite_N = messages.gathered(self._ends, arrays, state.worker, key, is_finite, axis)
            owner = ()
        finite = (finite_N == 1).all() & codecs.finite(averages)
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), CodedState(worker, owner, state.step), state)
        return layout.unpack([jnp.where(finite, x, jnp.nan) for x in averages], grads), new._replace(step=state.step + 1)

    def num_bytes(self, params, num_workers, phase=0):
        sent = self._sent_bytes(params, num_workers)
        best = _least(sent)
        form = best if self.form == "auto" else self.form
        plain = Mean().num_bytes(params, num_workers)[0]
        if num_workers > 1 and sent[form] >= plain:
            fix = f"form {best!r}, which sends {sent[best]:.0f}" if sent[best] < plain else "a codec of fewer bytes"
            raise ValueError(
                f"codec {self._codec.name!r} in form {form!r} sends {sent[form]:.0f} bytes a step, and plain all-reduce "
                f"among {num_workers} workers {plain:.0f}; use {fix}, or reducer 'mean'"
            )
        return np.full(num_workers, sent[form])


def _least(sent: dict[str, float]) -> str:
    return min(sent, key=lambda form: sent[form])
