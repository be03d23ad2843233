"""Packing: whole numbers of b bits each, without gaps, in bytes.

    b in {1, 2, 4}      8/b neighbours share a byte, the first in its lowest bits
    b in {8, 16}        bytes as they are
    any other b ≤ 24    8/gcd(b, 8) neighbours share b/gcd(b, 8) bytes
"""

import math

import jax
import jax.numpy as jnp


def packed_bytes(size: int, width: int) -> int:
    """Bytes of `size` numbers of `width` bits."""
    return -(-size * width // 8)


def pack(codes_P: jax.Array, width: int) -> jax.Array:
    """Numbers 0 … 2^width − 1 as uint8[⌈P·width/8⌉]."""
    size = codes_P.size
    if width == 8:
        return codes_P.astype(jnp.uint8)
    per = 8 // math.gcd(width, 8)
    dtype = jnp.uint8 if width < 8 and 8 % width == 0 else jnp.uint32
    groups_MxG = jnp.pad(codes_P.astype(dtype), (0, -size % per)).reshape(-1, per)
    if dtype == jnp.uint8:  # A sum of disjoint bits, which compilers vectorize better than "or" of columns.
        shifts_G = width * jnp.arange(per, dtype=jnp.uint8)
        return (groups_MxG << shifts_G).sum(axis=1, dtype=jnp.uint8)[:packed_bytes(size, width)]
    columns = []
    for byte in range(per * width // 8):
        parts = [_shift(groups_MxG[:, i], i * width - 8 * byte) for i in range(per)
                 if -width < i * width - 8 * byte < 8]
        columns.append(sum(parts) & 0xFF)
    return jnp.stack(columns, axis=1).astype(jnp.uint8).ravel()[:packed_bytes(size, width)]


def unpack(packed_Q: jax.Array, width: int, size: int) -> jax.Array:
    """The inverse of `pack`: uint8[size] for widths up to 8, else uint32[size]."""
    if width == 8:
        return packed_Q[:size]
    per = 8 // math.gcd(width, 8)
    if width < 8 and 8 % width == 0:
        shifts_G = width * jnp.arange(per, dtype=jnp.uint8)
        return ((packed_Q[:, None] >> shifts_G) & (2**width - 1)).ravel()[:size]
    num_bytes = per * width // 8
    bytes_MxQ = jnp.pad(packed_Q, (0, -packed_Q.size % num_bytes)).reshape(-1, num_bytes).astype(jnp.uint32)
    columns = []
    for i in range(per):
        parts = [_shift(bytes_MxQ[:, byte], 8 * byte - i * width) for byte in range(num_bytes)
                 if -8 < 8 * byte - i * width < width]
        columns.append(sum(parts) & (2**width - 1))
    return jnp.stack(columns, axis=1).astype(jnp.uint8 if width < 8 else jnp.uint32).ravel()[:size]


def _shift(x: jax.Array, left: int) -> jax.Array:
    return x << left if left >= 0 else x >> -left


def index_dtype(size: int) -> jnp.dtype:
    """The smallest unsigned type that holds 0 … size − 1."""
    return jnp.dtype(jnp.uint8 if size <= 2**8 else jnp.uint16 if size <= 2**16 else jnp.uint32)
