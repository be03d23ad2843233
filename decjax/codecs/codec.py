"""What a codec is, and functions that codecs share.

A codec encodes an array as a message, a pytree of arrays of the size that travels, and decodes it. A codec may keep a state from one
message to the next; it depends on messages only, so that sender and receiver can both hold it and stay equal:

    message = encode(x, state, key)        x̂ = decode(message, shape, dtype)        state <- advance(state, message)

Codecs do not remember what a message loses, x − x̂: `decjax.codecs.feedback` adds such a memory to any codec.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
_LANES = 16  # float32 in a vector register


@dataclasses.dataclass(frozen=True)
class Traits:
    """Properties of a codec C, by which methods that need them accept or refuse it. Below, C(x) is x̂.

    Attributes:
        linear: whether C(ax + by) = aC(x) + bC(y) for equal state and key.
        unbiased: function of the number of values that returns ω with E C(x) = x and E‖C(x) − x‖² ≤ ω‖x‖², over random keys; None if
            the codec is biased.
        contractive: function of the shape that returns δ in (0, 1] with E‖C(x) − x‖² ≤ (1 − δ)‖x‖²; None if there is no such δ.
        static_bytes: whether all messages of a shape have the same size.
        state_key: what a state belongs to: a "tensor", an "edge" between two workers, a "sample", or "none" if there is no state.
        random: whether `encode` needs a key.
        matrix: whether the codec sees an array as a matrix; else it sees its values in a row, and arrays may be joined.
    """

    linear: bool = False
    unbiased: Callable[[int], float] | None = None
    contractive: Callable[[tuple[int, ...]], float] | None = None
    static_bytes: bool = True
    state_key: Literal["none", "tensor", "edge", "sample"] = "none"
    random: bool = False
    matrix: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """A message format. A codec of your own needs these functions and nothing else.

    Attributes:
        name: shown in tables and errors.
        encode: `encode(x, state, key) -> message`, a pytree of arrays, for a floating-point `x` of any shape. `key` is a
            `jax.random` key, None if `traits.random` is false.
        decode: `decode(message, shape, dtype) -> x̂`.
        num_bytes: `num_bytes(shape, dtype) -> int`, the bytes of a message.
        init: `init(shape, dtype) -> state`; () if the codec keeps none.
        advance: `advance(state, message) -> state`; a message that is not finite leaves the state as it was.
        traits: properties of the codec.
    """

    name: str
    encode: Callable[[jax.Array, Any, jax.Array | None], Any]
    decode: Callable[[Any, tuple[int, ...], Any], jax.Array]
    num_bytes: Callable[[tuple[int, ...], Any], int]
    init: Callable[[tuple[int, ...], Any], Any] = lambda shape, dtype: ()
    advance: Callable[[Any, Any], Any] = lambda state, message: state
    traits: Traits = Traits()


def working_dtype(dtype: Any) -> Any:
    """The type in which codecs compute, and of their scales: float64 for float64 values, else float32."""
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """The matrix product x y in full precision; by default accelerators would round x and y, and each kind of them differently."""
    return jnp.matmul(x, y, precision=HIGHEST)


def rows(x: jax.Array, length: int) -> jax.Array:
    """The values of an array in rows of `length`, in the working type; the last row is filled with zeros."""
    flat = x.ravel().astype(working_dtype(x.dtype))
    return jnp.pad(flat, (0, -x.size % length)).reshape(-1, length)


def by_rows(function: Callable[[jax.Array, int], Any], x: jax.Array, length: int) -> Any:
    """The result of `function(rows, index of the first value)` on the `rows` of an array; results have one entry for each row.

    A last row that must be filled is computed by itself: padding fused into the loop would test every index, and keep XLA on CPUs
    from vectorizing it, which is ten times slower.
    """
    full, flat = x.size - x.size % length, x.ravel()
    cuts = [(start, end) for start, end in ((0, full), (full, x.size)) if start < end] or [(0, 0)]
    results = [function(rows(flat[start:end], length), start) for start, end in cuts]
    return results[0] if len(results) == 1 else jax.tree.map(lambda *each: jnp.concatenate(each), *results)


def from_rows(x_MxB: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The array of that shape and dtype whose values `rows` has put into rows."""
    return x_MxB.ravel()[: math.prod(shape)].reshape(shape).astype(dtype)


def scale_bytes(shape: tuple[int, ...], dtype: Any, block: int) -> int:
    """Bytes of the scales of an array, one for each block of values."""
    return jnp.dtype(working_dtype(dtype)).itemsize * math.ceil(math.prod(shape) / block)


def magnitude(x_MxB: jax.Array) -> jax.Array:
    """The largest magnitude of every row, [M, 1]; NaN where a value is not finite.

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


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(I, J) of the most nearly square matrix that a tensor can be reshaped to, its dimensions kept in order; None for a vector.

    Dimensions of size one do not count: a 1×P tensor is a vector.
    """
    if sum(size > 1 for size in shape) < 2:
        return None
    return min(((math.prod(shape[:s]), math.prod(shape[s:])) for s in range(1, len(shape))), key=sum)


def seen_shape(codec: Codec, shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """The shape in which a codec sees an array: the array's own if the codec sees matrices and makes this one smaller, else a row."""
    size = math.prod(shape)
    if codec.traits.matrix and matrix_shape(shape):
        with contextlib.suppress(ValueError):  # Too small a matrix for its rank.
            if codec.num_bytes(shape, dtype) < size * jnp.dtype(dtype).itemsize:
                return tuple(shape)
    return (size,)


def reshaped(codec: Codec, seen: Callable[[tuple[int, ...], Any], tuple[int, ...]]) -> Codec:
    """A codec that reshapes arrays of shape `shape` to `seen(shape, dtype)` before it encodes them."""
    contractive = codec.traits.contractive
    return dataclasses.replace(
        codec,
        traits=dataclasses.replace(codec.traits, contractive=contractive and (lambda shape: contractive(seen(shape, jnp.float32)))),
        init=lambda shape, dtype: codec.init(seen(shape, dtype), dtype),
        encode=lambda x, state, key: codec.encode(x.reshape(seen(x.shape, x.dtype)), state, key),
        decode=lambda message, shape, dtype: codec.decode(message, seen(shape, dtype), dtype).reshape(shape),
        num_bytes=lambda shape, dtype: codec.num_bytes(seen(shape, dtype), dtype),
    )


def of_any_shape(codec: Codec) -> Codec:
    """The same codec for arrays of any shape; one that sees matrices gets arrays in the shape of `seen_shape`."""
    if not codec.traits.matrix:
        return codec
    return reshaped(codec, lambda shape, dtype: seen_shape(codec, tuple(shape), working_dtype(dtype)))


def finite(tree: Any) -> jax.Array:
    """Whether all floating-point values of a pytree are finite, as a boolean scalar."""
    each = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, each, jnp.array(True))


def message_bytes(message: Any) -> int:
    """The bytes of a message: of all its arrays in memory."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(message))
