"""Error feedback: what a message loses is remembered and added to later messages.

g is the gradient, c the message, ĉ what is decoded from it, and ĝ what receivers use as g: ĉ itself, or with EF21 h. With γ = 1,
Σ ĉ + e_T = Σ g up to rounding. All memories work with any contractive codec C; `Contracted` makes an unbiased codec contractive.

A gradient or message that is not finite leaves all memory unchanged, at the sender and, for h, at every receiver too.

The memory e may be stored encoded by another codec, `storage`: int8 takes a quarter of the bytes. This adds a second rounding error,
which stays bounded if 1 − δ_storage is small compared with the δ of C.

References: Seide et al. 2014; Karimireddy et al. 2019; Peng et al. 2024 (DeMo, γ); Lin et al. 2018 (deep gradient compression,
its momentum correction, without masking); Richtárik et al. 2021 (EF21); Fatkhullin et al. 2023 (its momentum).
"""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from decjax import options
from decjax.codecs.codec import Codec, WrappedCodec, finite, working_dtype
from decjax.options import Decay, Share
from decjax.typing import DType, PyTree, Shape


class Memory(NamedTuple):
    """The sender's state.

    Attributes:
        codec: state of the codec, as of `Codec.init`.
        error: e or h, of the array's shape in the working type, or as a message of `storage`.
        momentum: v; () without momentum.
    """

    codec: PyTree
    error: PyTree
    momentum: PyTree


@dataclasses.dataclass(frozen=True)
class Feedback:
    """A codec with a memory of errors, for one array; this base class has none, and keeps the codec's own state alone.

    Attributes:
        codec: C, the codec of the messages; receivers use its `decode`.
        builds: whether `receive` needs the estimate before, as for EF21; else it ignores it.
    """

    builds: ClassVar[bool] = False

    codec: Codec

    def init(self, shape: Shape, dtype: DType) -> Memory:
        """Return the memory before the first message."""
        return Memory(self.codec.init(shape, dtype), (), ())

    def encode(self, x: jax.Array, memory: Memory, key: jax.Array | None) -> tuple[PyTree, Memory]:
        """Return (message, memory)."""
        message = self.codec.encode(x, memory.codec, key)
        return message, Memory(self.codec.advance(memory.codec, message), (), ())

    def receive(self, estimate: PyTree, arrived: jax.Array) -> jax.Array:
        """Return a receiver's new estimate ĝ, from its last one, at first zeros, and ĉ.

        Given the mean of all workers' ĉ, it returns the mean of their estimates.
        """
        return arrived

    def relay(self) -> "Feedback":
        """Return the memory of a worker that sends on the mean of what arrived: the same, without a second momentum."""
        return self


@dataclasses.dataclass(frozen=True)
class _Remembering(Feedback):
    """Base of the memories of errors.

    Attributes:
        codec: C, contractive.
        storage: codec that e is stored with; None: in full precision.
    """

    storage: Codec | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        storage = self.storage
        if storage and (storage.matrix or storage.state_key or not (storage.contractive or storage.unbiased)):
            raise ValueError(
                f"error memory cannot be stored by codec {storage.name!r}; use one without state and matrices that is contractive "
                "or unbiased, such as 'int8'"
            )

    def _wanted(self, x: jax.Array, error: jax.Array, v: PyTree) -> tuple[jax.Array, PyTree]:
        """Return what to encode, and the momentum."""
        return error + x, v

    @property
    def _has_momentum(self) -> bool:
        return False

    def relay(self) -> Feedback:
        return Residual(self.codec, storage=self.storage)

    def _store(self, error: jax.Array, key: jax.Array | None) -> PyTree:
        return self.storage.encode(error, (), key) if self.storage else error

    def init(self, shape, dtype):
        zeros = jnp.zeros(shape, working_dtype(dtype))
        return Memory(self.codec.init(shape, dtype), self._store(zeros, jax.random.key(0)), zeros if self._has_momentum else ())

    def encode(self, x, memory, key):
        dtype, storage = working_dtype(x.dtype), self.storage
        error = storage.decode(memory.error, x.shape, dtype) if storage else memory.error
        target, v = self._wanted(x.astype(dtype), error, memory.momentum)
        # The message's random numbers must not be used twice.
        storage_key = jax.random.fold_in(key, 1) if storage and storage.random and key is not None else None
        message = self.codec.encode(target, memory.codec, key)
        arrived = self.codec.decode(message, x.shape, dtype)
        kept = error + arrived if self.builds else target - arrived
        # Whether h changes must follow from the message alone, as at a receiver; any sum with a value that is not finite is not finite.
        ok, ok_v = finite((arrived, kept)), finite(v)
        return message, Memory(
            self.codec.advance(memory.codec, message),
            jax.tree.map(lambda new, old: jnp.where(ok, new, old), self._store(kept, storage_key), memory.error),
            jax.tree.map(lambda new, old: jnp.where(ok_v, new, old), v, memory.momentum),
        )


@options.checked_class
@dataclasses.dataclass(frozen=True)
class Residual(_Remembering):
    """Error feedback: what a message loses is added to the next one, c = C(γe + g), e <- γe + g − ĉ.

    Attributes:
        decay: γ. Below 1, e is a momentum from which what was sent is subtracted, as in DeMo.
    """

    decay: Share = 1.0

    def _wanted(self, x, error, v):
        return self.decay * error + x, v


@options.checked_class
@dataclasses.dataclass(frozen=True)
class Momentum(_Remembering):
    """Error feedback of a momentum that compression does not change: v <- βv + g, c = C(e + v), e <- e + v − ĉ.

    Attributes:
        beta: β.
    """

    beta: Decay = 0.9

    @property
    def _has_momentum(self):
        return True

    def _wanted(self, x, error, v):
        v = self.beta * v + x
        return error + v, v


@options.checked_class
@dataclasses.dataclass(frozen=True)
class EF21(_Remembering):
    """EF21: differences are sent, and both ends hold their sum h: c = C(v − h), h <- h + ĉ, v <- βv + (1−β)g.

    Attributes:
        beta: β; 0: EF21 without momentum.
        storage: None only, since receivers hold h as well and it must be exact.
    """

    builds = True

    beta: Decay = 0.0

    def __post_init__(self):
        if self.storage:
            raise ValueError(
                f"ef21: storage={self.storage.name!r} must be None, since receivers hold the same memory; use residual"
            )

    @property
    def _has_momentum(self):
        return self.beta > 0

    def _wanted(self, x, error, v):
        v = self.beta * v + (1 - self.beta) * x if self.beta else x
        return v - error, v if self.beta else ()

    def receive(self, estimate, arrived):
        return estimate + jnp.where(finite(arrived), arrived, 0)

    def relay(self):
        return EF21(self.codec)


def none(codec: Codec) -> Feedback:
    """Return no memory: c = C(g). The codec must be unbiased, so that what messages lose is zero on average."""
    if not codec.unbiased:
        raise ValueError(f"codec {codec.name!r} is biased, and without a memory its errors would add up; use 'residual'")
    return Feedback(codec)


class Contracted(WrappedCodec):
    """A contractive codec made from an unbiased one: E‖x − x̂/(1 + ω)‖² ≤ (1 − 1/(1+ω))‖x‖².

    Reference: Richtárik et al. 2021, Lemma 8.
    """

    def decode(self, message, shape, dtype):
        decoded = self.codec.decode(message, shape, working_dtype(dtype))
        return (decoded / (1 + (self.codec.omega(math.prod(shape)) or 0))).astype(dtype)

    def delta(self, shape):
        return 1 / (1 + (self.codec.omega(math.prod(shape)) or 0))

    def omega(self, size):
        return None


def contractive(codec: Codec) -> Codec:
    """Return a contractive codec, as error feedback needs it: the codec itself or, if it is unbiased, `Contracted`."""
    if not (codec.contractive or codec.unbiased):
        raise ValueError(
            f"codec {codec.name!r} is neither contractive nor unbiased, so the memory of its errors may grow without "
            "bound; use one that is, such as 'int8' or 'topk'"
        )
    return codec if codec.contractive else Contracted(codec)


memoryless, residual, momentum, ef21 = Feedback, Residual, Momentum, EF21
