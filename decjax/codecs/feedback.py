"""Error feedback: what a message loses is remembered and added to later messages.

    residual    c = C(γe + g);   e <- γe + g − ĉ                        ĝ = ĉ     γ = 1; with γ < 1 DeMo's momentum
    momentum    v <- βv + g;     c = C(e + v);   e <- e + v − ĉ         ĝ = ĉ
    ef21        v <- βv + (1−β)g;   c = C(v − h);   h <- h + ĉ          ĝ = h     both ends hold h; β = 0: v = g
    none        c = C(g)                                                ĝ = ĉ     for unbiased C

g is the gradient, c the message, ĉ what is decoded from it, and ĝ what receivers take for g. With γ = 1, Σ ĉ + e_T = Σ g up to
rounding. The first three work with any contractive codec C; `contracted` makes an unbiased codec contractive.

A gradient or message that is not finite leaves all memory as it was, at the sender and, for h, at every receiver too.

The memory e may be stored encoded by another codec, `storage`: int8 takes a quarter of the bytes. This adds a second rounding error,
which stays bounded if 1 − δ_storage is small against the δ of C.

References: Seide et al. 2014; Karimireddy et al. 2019; Peng et al. 2024 (DeMo, γ); Lin et al. 2018 (deep gradient compression,
its momentum correction, without masking); Richtárik et al. 2021 (EF21); Fatkhullin et al. 2023 (its momentum).
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decjax.codecs.codec import Codec, finite, working_dtype


class Memory(NamedTuple):
    """The sender's state.

    Attributes:
        codec: state of the codec, as of `Codec.init`.
        error: e or h, of the array's shape in the working type, or as a message of `storage`.
        momentum: v; () without momentum.
    """

    codec: Any
    error: Any
    momentum: Any


class Feedback(NamedTuple):
    """A codec with memory, for one array.

    Attributes:
        codec: the codec of the messages; receivers use its `decode`.
        init: `init(shape, dtype) -> Memory`.
        encode: `encode(x, memory, key) -> (message, memory)`.
        receive: `receive(estimate, ĉ) -> estimate`, at every receiver: ĉ itself, or for EF21 the estimate before plus ĉ; the first
            one is zeros. Given the mean of all workers' ĉ, it returns the mean of their estimates.
        relay: `relay() -> Feedback`, for a worker that sends on the mean of what arrived: the same, without a second momentum.
        builds: whether `receive` needs the estimate before, as for EF21; else it ignores it.
    """

    codec: Codec
    init: Callable[[tuple[int, ...], Any], Memory]
    encode: Callable[[jax.Array, Memory, jax.Array | None], tuple[Any, Memory]]
    receive: Callable[[jax.Array, jax.Array], jax.Array]
    relay: Callable[[], "Feedback"]
    builds: bool = False


def _feedback(codec: Codec, wanted, relay, storage: Codec | None, momentum: bool = False, builds: bool = False) -> Feedback:
    """A `Feedback` from `wanted(x, error, v) -> (what to encode, v)`; the error is what was lost or, if it `builds`, what was sent."""
    if storage:
        refused = f"error memory cannot be stored by codec {storage.name!r}, which"
        if storage.traits.matrix or storage.traits.state_key != "none":
            raise ValueError(f"{refused} keeps a state or needs matrices; use 'int8'")
        if storage.traits.contractive is None and storage.traits.unbiased is None:
            raise ValueError(f"{refused} is neither contractive nor unbiased, so that errors of storing would add up; use 'int8'")

    def store(error, key):
        return storage.encode(error, (), key) if storage else error

    def init(shape, dtype):
        zeros = jnp.zeros(shape, working_dtype(dtype))
        return Memory(codec.init(shape, dtype), store(zeros, jax.random.key(0)), zeros if momentum else ())

    def encode(x, memory, key):
        dtype = working_dtype(x.dtype)
        error = storage.decode(memory.error, x.shape, dtype) if storage else memory.error
        target, v = wanted(x.astype(dtype), error, memory.momentum)
        # The storage draws random numbers of its own: those of the message must not be used twice.
        storage_key = jax.random.fold_in(key, 1) if storage and storage.traits.random else None
        message = codec.encode(target, memory.codec, key)
        arrived = codec.decode(message, x.shape, dtype)
        kept = error + arrived if builds else target - arrived
        # Whether h changes must follow from the message alone, as at a receiver; any sum with a value that is not finite is not finite.
        ok, ok_v = finite((arrived, kept)), finite(v)
        return message, Memory(
            codec.advance(memory.codec, message),
            jax.tree.map(lambda new, old: jnp.where(ok, new, old), store(kept, storage_key), memory.error),
            jax.tree.map(lambda new, old: jnp.where(ok_v, new, old), v, memory.momentum),
        )

    return Feedback(codec, init, encode, _add if builds else _replace, relay, builds)


def _replace(estimate, arrived):
    return arrived


def _add(estimate, arrived):
    return estimate + jnp.where(finite(arrived), arrived, 0)


def residual(codec: Codec, decay: float = 1.0, storage: Codec | None = None) -> Feedback:
    """Error feedback: what a message loses is added to the next one, c = C(γe + g), e <- γe + g − ĉ.

    Args:
        codec: C, contractive.
        decay: γ in (0, 1]. Below 1, e is a momentum from which what was sent is subtracted, as in DeMo.
        storage: codec that e is stored with; None: in full precision.
    """
    _check_share("residual", "decay", decay, at_most_one=True)
    return _feedback(codec, lambda x, e, v: (decay * e + x, v), lambda: residual(codec, storage=storage), storage)


def momentum(codec: Codec, beta: float = 0.9, storage: Codec | None = None) -> Feedback:
    """Error feedback of a momentum that compression does not change: v <- βv + g, c = C(e + v), e <- e + v − ĉ.

    Args:
        codec: C, contractive.
        beta: β in [0, 1).
        storage: codec that e is stored with; None: in full precision.
    """
    _check_share("momentum", "beta", beta)

    def wanted(x, e, v):
        v = beta * v + x
        return e + v, v

    return _feedback(codec, wanted, lambda: residual(codec, storage=storage), storage, momentum=True)


def ef21(codec: Codec, beta: float = 0.0, storage: Codec | None = None) -> Feedback:
    """EF21: differences are sent, and both ends hold their sum h: c = C(v − h), h <- h + ĉ, v <- βv + (1−β)g.

    Args:
        codec: C, contractive.
        beta: β in [0, 1); 0: EF21 without momentum.
        storage: None only, since receivers hold h as well.
    """
    _check_share("ef21", "beta", beta)
    if storage:
        raise ValueError(
            f"ef21 with storage={storage.name!r}: its memory is held by receivers as well and must be exact; use residual, or no storage"
        )

    def wanted(x, h, v):
        v = beta * v + (1 - beta) * x if beta else x
        return v - h, v if beta else ()

    return _feedback(codec, wanted, lambda: ef21(codec), None, momentum=beta > 0, builds=True)


def none(codec: Codec) -> Feedback:
    """No memory: c = C(g). The codec must be unbiased, so that what messages lose is zero on average."""
    if codec.traits.unbiased is None:
        raise ValueError(f"codec {codec.name!r} is biased, and without a memory its errors would add up; use 'residual'")
    return memoryless(codec)


def memoryless(codec: Codec) -> Feedback:
    """`none` of any codec, for messages whose errors may be lost; the codec's own state, if it has one, is kept."""

    def encode(x, memory, key):
        message = codec.encode(x, memory.codec, key)
        return message, Memory(codec.advance(memory.codec, message), (), ())

    return Feedback(
        codec, lambda shape, dtype: Memory(codec.init(shape, dtype), (), ()), encode, _replace, lambda: memoryless(codec)
    )


def contracted(codec: Codec) -> Codec:
    """A contractive codec made from an unbiased one: E‖x − x̂/(1 + ω)‖² ≤ (1 − 1/(1+ω))‖x‖².

    Reference: Richtárik et al. 2021, Lemma 8.
    """
    omega = codec.traits.unbiased
    if omega is None:
        raise ValueError(f"codec {codec.name!r} is biased, and need not be contracted; use it as it is")

    def decode(message, shape, dtype):
        wide = working_dtype(dtype)
        return (codec.decode(message, shape, wide) / (1 + omega(math.prod(shape)))).astype(dtype)

    traits = dataclasses.replace(codec.traits, unbiased=None, contractive=lambda shape: 1 / (1 + omega(math.prod(shape))))
    return dataclasses.replace(codec, name=f"contracted {codec.name}", decode=decode, traits=traits)


def contractive(codec: Codec) -> Codec:
    """A contractive codec, as error feedback needs it: the codec itself, or, if it is unbiased, `contracted`; else a ValueError."""
    if codec.traits.contractive is not None:
        return codec
    if codec.traits.unbiased is None:
        raise ValueError(
            f"codec {codec.name!r} is neither contractive nor unbiased, so the memory of its errors may grow without "
            "bound; use one that is, such as 'int8' or 'topk'"
        )
    return contracted(codec)


def _check_share(what: str, option: str, value: float, at_most_one: bool = False) -> None:
    if not (0 < value <= 1 if at_most_one else 0 <= value < 1):
        raise ValueError(f"{what} {option}={value} must lie in {'(0, 1]' if at_most_one else '[0, 1)'}")
