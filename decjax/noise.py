"""Cheap random numbers: a hash of (key, index).

    b_i = h(i + s₀, s₁),   (s₀, s₁) = the key's two words

Stochastic rounding and dropout need one number per value, and a block cipher such as JAX's threefry would take much longer than the
rest of a codec or layer. h is a 32-bit integer finalizer (two multiplications, three shifts); its second word enters between the
multiplications, so that the sequences of two keys are not shifted copies of each other. It is good enough for rounding and
sampling, not for cryptography.

Reference: Ellis, "hash-prospector" (lowbias32); Salmon et al. 2011 for counter-based generators.
"""

import math

import jax
import jax.numpy as jnp


def words(key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the two uint32 words of a random key; ValueError if there is none."""
    if key is None:
        raise ValueError("this codec draws random numbers, but key=None; pass a jax.random key, or a codec that needs none")
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return data[0], data[-1]


def bits(shape: tuple[int, ...], seed: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return random uint32 of a shape: h(i + s₀, s₁) at index i, for the two words of a seed."""
    return mix(jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + seed[0], seed[1])


def mix(x: jax.Array, word: jax.Array) -> jax.Array:
    """Return the hash h(x, word) of uint32 values."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D) ^ word
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def uniform(shape: tuple[int, ...], seed: tuple[jax.Array, jax.Array], start: int = 0) -> jax.Array:
    """Return random float32 in [0, 1), multiples of 2⁻²⁴, for the indices from `start` on."""
    # Converted by way of int32: most CPUs have vector instructions for that, but none for uint32.
    return (bits(shape, (seed[0] + jnp.uint32(start), seed[1])) >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24


def below(limit: int, shape: tuple[int, ...], seed: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return random int32 in [0, limit), for limits up to 2¹⁶: ⌊b·limit/2³²⌋; their probabilities differ by at most 2⁻³²."""
    word, most = bits(shape, seed), jnp.uint32(limit)
    # In two halves, since there are no products of 64 bits: that of the upper half, plus the carry of that of the lower half.
    return ((word >> 16) * most + ((word & 0xFFFF) * most >> 16) >> 16).astype(jnp.int32)
