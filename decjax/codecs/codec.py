"""Base classes of codecs, and functions that codecs share."""

import abc
from collections.abc import Callable
import contextlib
import functools
import math
from typing import Any, ClassVar, Literal, TypeVar, cast

import jax
import jax.numpy as jnp

from decjax import registry
from decjax.registry import Requirement, delegates, of_field
from decjax.typing import DType, PyTree, Shape

HIGHEST = jax.lax.Precision.HIGHEST
_LANES = 16  # float32 in a vector register
T = TypeVar("T")


class Codec(registry.Part, abc.ABC, kind="codec"):
    """A message format C: an array x is encoded as a smaller message, from which x̂ = C(x) is decoded.

    A message is a pytree of arrays. A codec may keep a state from one message to the next; it depends on messages only, so sender and
    receiver both compute it:

        message = encode(x, state, key)        x̂ = decode(message, shape, dtype)        state <- advance(state, message)

    A codec does not remember what a message loses, x − x̂: `decjax.codecs.feedback` adds such a memory to any codec. A subclass
    defines `encode`, `decode` and `num_bytes`, and overrides the properties below if they hold for it.

    Attributes:
        linear: whether C(ax + by) = aC(x) + bC(y) for equal state and key.
        random: whether `encode` needs a key.
        matrix: whether the codec uses an array's shape as a matrix; otherwise it treats arrays as vectors, and they may be joined.
        state_key: what a state belongs to: a "tensor", an "edge" between two workers or a "sample"; empty without state.
    """

    linear: ClassVar[bool] = False
    random: ClassVar[bool] = False
    matrix: ClassVar[bool] = False
    state_key: ClassVar[Literal["", "tensor", "edge", "sample"]] = ""

    @abc.abstractmethod
    def encode(self, x: jax.Array, state: PyTree, key: jax.Array | None) -> PyTree:
        """Return the message of a floating-point array of any shape; `key` is None unless the codec is `random`."""

    @abc.abstractmethod
    def decode(self, message: PyTree, shape: Shape, dtype: DType) -> jax.Array:
        """Return the array x̂ of this shape and dtype."""

    @abc.abstractmethod
    def num_bytes(self, shape: Shape, dtype: DType) -> int:
        """Return the number of bytes of the message of an array of this shape and dtype."""

    def init(self, shape: Shape, dtype: DType) -> PyTree:
        """Return the state before the first message; () without state."""
        return ()

    def advance(self, state: PyTree, message: PyTree) -> PyTree:
        """Return the state after a message; a message that is not finite leaves it unchanged."""
        return state

    def delta(self, shape: Shape) -> float | None:
        """Return δ in (0, 1] with E‖C(x) − x‖² ≤ (1 − δ)‖x‖² for arrays of this shape; None if the codec is not contractive."""
        return None

    def omega(self, size: int) -> float | None:
        """Return ω with E C(x) = x and E‖C(x) − x‖² ≤ ω‖x‖² over keys, for `size` values; None if the codec is biased."""
        return None

    @property
    def contractive(self) -> bool:
        """Whether there is a δ."""
        return self.delta((1,)) is not None

    unbiased = cast(Any, property(lambda self: self.omega(1) is not None))  # A codec may have an option of this name.
    """Whether there is an ω."""

    @property
    def static_bytes(self) -> bool:
        """Whether all messages of a shape have the same size."""
        return True

    def _derive(self, **attributes: object) -> None:
        """Set attributes that follow from the options, in `__post_init__`."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)


@delegates("codec", "name", "linear", "random", "matrix", "state_key", "static_bytes", "init", "advance", "delta", "omega")
class WrappedCodec(Codec):
    """Base of codecs that change some methods of another one.

    Attributes:
        codec: the other one.
    """

    codec: Codec

    encode = of_field("codec.encode")
    decode = of_field("codec.decode")
    num_bytes = of_field("codec.num_bytes")


class OfValues(Codec):
    """Base of codecs that choose or compute some values, or factors, which a second codec encodes.

    Attributes:
        values: codec of the values that are sent, one without state, key or matrices, such as `int8`.
    """

    requires = (
        Requirement(
            "values",
            "a codec of values without state, key or matrices",
            lambda values: not ((made := registry.make("codec", values)).random or made.matrix or made.state_key),
            "use one such as 'int8'",
        ),
    )

    values: Codec | str = "identity"

    @functools.cached_property
    def inner(self) -> Codec:
        """The codec `values`."""
        return registry.make("codec", self.values)


class Reshaped(WrappedCodec):
    """A codec that reshapes arrays of shape `shape` to `seen(shape, dtype)` before it encodes them."""

    seen: Callable[[Shape, DType], Shape]

    def encode(self, x, state, key):
        return self.codec.encode(x.reshape(self.seen(x.shape, x.dtype)), state, key)

    def decode(self, message, shape, dtype):
        return self.codec.decode(message, self.seen(shape, dtype), dtype).reshape(shape)

    def num_bytes(self, shape, dtype):
        return self.codec.num_bytes(self.seen(shape, dtype), dtype)

    def init(self, shape, dtype):
        return self.codec.init(self.seen(shape, dtype), dtype)

    def delta(self, shape):
        return self.codec.delta(self.seen(shape, jnp.float32))


def of_any_shape(codec: Codec) -> Codec:
    """Return the codec for arrays of any shape; one of matrices gets arrays in the shape of `seen_shape`."""
    if not codec.matrix:
        return codec
    return Reshaped(codec, lambda shape, dtype: seen_shape(codec, tuple(shape), working_dtype(dtype)))


def seen_shape(codec: Codec, shape: Shape, dtype: DType) -> Shape:
    """Return the shape in which a codec encodes an array: its own if the codec is of matrices and makes this one smaller, else flat."""
    size = math.prod(shape)
    if codec.matrix and matrix_shape(shape):
        with contextlib.suppress(ValueError):  # The matrix is too small for the codec's rank.
            if codec.num_bytes(shape, dtype) < size * jnp.dtype(dtype).itemsize:
                return tuple(shape)
    return (size,)


def matrix_shape(shape: Shape) -> tuple[int, int] | None:
    """Return (I, J) of the most nearly square matrix that a tensor can be reshaped to with its dimensions in order; None for a vector.

    Dimensions of size one do not count: a 1×P tensor is a vector.
    """
    if sum(size > 1 for size in shape) < 2:
        return None
    return min(((math.prod(shape[:s]), math.prod(shape[s:])) for s in range(1, len(shape))), key=sum)


def working_dtype(dtype: DType) -> Any:
    """Return the type in which codecs compute, and of their scales: float64 for float64 values, else float32."""
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the matrix product x y in full precision, which accelerators would otherwise round, each kind differently."""
    return jnp.matmul(x, y, precision=HIGHEST)


def rows(x: jax.Array, length: int) -> jax.Array:
    """Return the values of an array in rows of `length`, in the working type; the last row is filled with zeros."""
    flat = x.ravel().astype(working_dtype(x.dtype))
    return jnp.pad(flat, (0, -x.size % length)).reshape(-1, length)


def by_rows(function: Callable[[jax.Array, int], T], x: jax.Array, length: int) -> T:
    """Return `function(rows, index of the first value)` for the `rows` of an array; results have one entry for each row.

    A last row that must be filled is computed separately: padding fused into the loop would test every index, and keep XLA on CPUs
    from vectorizing it, which is ten times slower.
    """
    full, flat = x.size - x.size % length, x.ravel()
    cuts = [(start, end) for start, end in ((0, full), (full, x.size)) if start < end] or [(0, 0)]
    results = [function(rows(flat[start:end], length), start) for start, end in cuts]
    return results[0] if len(results) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)


def from_rows(x_MxB: jax.Array, shape: Shape, dtype: DType) -> jax.Array:
    """Return the array of that shape and dtype whose values `rows` has put into rows."""
    return x_MxB.ravel()[: math.prod(shape)].reshape(shape).astype(dtype)


def magnitude(x_MxB: jax.Array) -> jax.Array:
    """Return the largest magnitude of every row, [M, 1]; NaN where a value is not finite.

    The maximum is taken over bit patterns as integers. They are ordered as the magnitudes are, with infinity and NaN above all
    numbers, where a maximum of floats may lose a NaN; and integers may be compared in any order.
    """
    M, B = x_MxB.shape
    pattern_MxB = jax.lax.bitcast_convert_type(jnp.abs(x_MxB), f"int{8 * x_MxB.dtype.itemsize}")

    def in_lanes(pattern_MxB):
        # XLA on CPUs takes the maximum of a row value by value, five times slower than over 16 lanes first. Without the barrier it
        # would join the two steps.
        return jax.lax.optimization_barrier(pattern_MxB.reshape(M, B // _LANES, _LANES).max(axis=1)).max(axis=1)

    at_once = functools.partial(jnp.max, axis=1)
    cpu = in_lanes if B % _LANES == 0 and B > _LANES else at_once
    largest_M = jax.lax.platform_dependent(pattern_MxB, cpu=cpu, default=at_once)
    largest_Mx1 = jax.lax.bitcast_convert_type(largest_M, x_MxB.dtype)[:, None]
    return jnp.where(largest_Mx1 < jnp.inf, largest_Mx1, jnp.nan)


def finite(tree: PyTree) -> jax.Array:
    """Return whether all floating-point values of a pytree are finite, as a boolean scalar."""
    flags = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, flags, jnp.array(True))


def message_bytes(message: PyTree) -> int:
    """Return the bytes of all arrays of a message."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(message))
