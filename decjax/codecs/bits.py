"""Packs whole numbers of b bits each into bytes, without gaps.

b in {1, 2, 4}      8/b consecutive numbers share a byte, the first in its lowest bits
b in {8, 16}        one or two bytes a number
any other b ≤ 24    8/gcd(b, 8) consecutive numbers share b/gcd(b, 8) bytes
"""

import math

import jax
import jax.numpy as jnp


def packed_bytes(size: int, width: int) -> int:
    """Return the number of bytes of `size` numbers of `width` bits."""
    return -(-size * width // 8)


def pack(codes_P: jax.Array, width: int) -> jax.Array:
    """Pack P numbers 0 … 2^width − 1 into uint8[⌈P·width/8⌉]."""
    if width == 8:
        return codes_P.astype(jnp.uint8)
    size, per = codes_P.size, 8 // math.gcd(width, 8)
    dtype = jnp.uint8 if width < 8 and 8 % width == 0 else jnp.uint32
    groups_MxG = jnp.pad(codes_P.astype(dtype), (0, -size % per)).reshape(-1, per)
    if dtype == jnp.uint8:  # A sum of disjoint bits, which compilers vectorize better than "or" of columns.
        shifts_G = width * jnp.arange(per, dtype=jnp.uint8)
        return (groups_MxG << shifts_G[None]).sum(axis=1, dtype=jnp.uint8)[: packed_bytes(size, width)]
    return _regrouped(groups_MxG, width, 8).astype(jnp.uint8).ravel()[: packed_bytes(size, width)]


def unpack(packed_Q: jax.Array, width: int, size: int) -> jax.Array:
    """Return the numbers that `pack` packed: uint8[size] for widths up to 8, else uint32[size]."""
    if width == 8:
        return packed_Q[:size]
    per = 8 // math.gcd(width, 8)
    if width < 8 and 8 % width == 0:
        shifts_G = width * jnp.arange(per, dtype=jnp.uint8)
        return ((packed_Q[:, None] >> shifts_G[None]) & (2**width - 1)).ravel()[:size]
    num_bytes = per * width // 8
    bytes_MxQ = jnp.pad(packed_Q, (0, -packed_Q.size % num_bytes)).reshape(-1, num_bytes).astype(jnp.uint32)
    return _regrouped(bytes_MxQ, 8, width).astype(jnp.uint8 if width < 8 else jnp.uint32).ravel()[:size]


def _regrouped(numbers_MxG: jax.Array, old: int, new: int) -> jax.Array:
    """Return the bits of each row, cut into numbers of `new` bits instead of `old`."""
    starts = range(0, numbers_MxG.shape[1] * old, old)

    def cut(begin):
        shifts = [(i, start - begin) for i, start in enumerate(starts) if -old < start - begin < new]
        return sum(_shifted(numbers_MxG[:, i], left) for i, left in shifts) & (2**new - 1)

    return jnp.stack([cut(begin) for begin in range(0, len(starts) * old, new)], axis=1)


def _shifted(x: jax.Array, left: int) -> jax.Array:
    """Return numbers with their bits shifted to the left, or to the right if `left` is negative."""
    return x << left if left >= 0 else x >> -left


def first_set(words_W: jax.Array, k: int) -> jax.Array:
    """Return the positions, int32[k], of the first k set bits of uint32[W], which has at least k; bit i of word w is at 32w + i."""
    counts_W = jax.lax.population_count(words_W).astype(jnp.int32)
    ends_W = jnp.cumsum(counts_W, dtype=jnp.int32)
    number_k = jnp.arange(k, dtype=jnp.int32)
    where_k = jnp.searchsorted(ends_W, number_k, side="right").astype(jnp.int32)
    rest_k, word_k = number_k - (ends_W - counts_W)[where_k], words_W[where_k]  # Set bits to skip in a word.
    position_k = 32 * where_k
    for half in (16, 8, 4, 2, 1):
        low_k = jax.lax.population_count(word_k & jnp.uint32(2**half - 1)).astype(jnp.int32)
        above_k = rest_k >= low_k
        rest_k = jnp.where(above_k, rest_k - low_k, rest_k)
        word_k = jnp.where(above_k, word_k >> half, word_k)
        position_k += jnp.where(above_k, half, 0)
    return position_k


def index_dtype(size: int) -> jnp.dtype:
    """Return the smallest unsigned type that holds 0 … size − 1."""
    return jnp.dtype(jnp.uint8 if size <= 2**8 else jnp.uint16 if size <= 2**16 else jnp.uint32)
