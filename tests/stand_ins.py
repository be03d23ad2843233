"""Codecs as a user may write them, simpler than the library's, and some of them in NumPy."""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs


def identity():
    return codecs.Codec(
        name="identity",
        encode=lambda x, state, key: x,
        decode=lambda message, shape, dtype: message,
        num_bytes=lambda shape, dtype: math.prod(shape) * jnp.dtype(dtype).itemsize,
        traits=codecs.Traits(contractive=lambda shape: 1.0),
    )


def top(most: float) -> codecs.Codec:
    """The largest values of an array, and where they are: so many, or below 1 that share of them."""

    def count(shape):
        size = math.prod(shape)
        return min(most, size) if most >= 1 else max(1, math.ceil(most * size))

    def encode(x, state, key):
        _, where = jax.lax.top_k(jnp.abs(x.ravel()), count(x.shape))
        return {"values": x.ravel()[where], "where": where.astype(jnp.uint16)}

    def decode(message, shape, dtype):
        return jnp.zeros(math.prod(shape), dtype).at[message["where"]].set(message["values"].astype(dtype)).reshape(shape)

    return codecs.Codec(
        name=f"top {most}",
        encode=encode,
        decode=decode,
        num_bytes=lambda shape, dtype: count(shape) * (jnp.dtype(dtype).itemsize + 2),
        traits=codecs.Traits(contractive=lambda shape: count(shape) / math.prod(shape)),
    )


def dense_top(most: float) -> Callable[[np.ndarray], np.ndarray]:
    """The same of one array, in NumPy."""

    def code(x):
        kept = np.zeros_like(x)
        largest = np.argsort(-np.abs(x.ravel()), kind="stable")[: most if most >= 1 else math.ceil(most * x.size)]
        kept.ravel()[largest] = x.ravel()[largest]
        return kept

    return code


def one_bit():
    """Signs, eight to a byte, times the mean magnitude."""

    def encode(x, state, key):
        bits = jnp.pad(x.ravel() >= 0, (0, -x.size % 8)).reshape(-1, 8)
        return (bits * 2 ** jnp.arange(8)).sum(axis=1).astype(jnp.uint8), jnp.abs(x).mean()

    def decode(message, shape, dtype):
        packed, scale = message
        bits = (packed[:, None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        return (scale * (2 * bits.astype(dtype) - 1)).ravel()[: np.prod(shape, dtype=int)].reshape(shape)

    return codecs.Codec(
        name="one bit",
        encode=encode,
        decode=decode,
        num_bytes=lambda shape, dtype: -(-int(np.prod(shape)) // 8) + jnp.dtype(dtype).itemsize,
        traits=codecs.Traits(contractive=lambda shape: 1 / np.prod(shape)),
    )


def dithered():
    """Whole numbers, rounded up or down at random: unbiased, and too coarse to be contractive."""
    return codecs.Codec(
        name="dithered",
        encode=lambda x, state, key: jnp.floor(x + jax.random.uniform(key, x.shape)).astype(jnp.int8),
        decode=lambda message, shape, dtype: message.astype(dtype),
        num_bytes=lambda shape, dtype: int(np.prod(shape)),
        traits=codecs.Traits(unbiased=lambda size: float(size), random=True),
    )


def four_bits(stochastic=False, **traits):
    """Whole numbers −7 … 7 times the largest magnitude / 7, two to a byte."""

    def encode(x, state, key):
        scale = jnp.abs(x).max() / 7
        steps = x.ravel() / jnp.where(scale > 0, scale, 1)
        steps = jnp.floor(steps + jax.random.uniform(key, steps.shape, steps.dtype)) if stochastic else jnp.round(steps)
        codes = jnp.pad((steps + 8).astype(jnp.uint8), (0, x.size % 2))
        return {"codes": codes[::2] | codes[1::2] << 4, "scale": scale}

    def decode(message, shape, dtype):
        codes = jnp.stack([message["codes"] & 15, message["codes"] >> 4], axis=1).ravel()[: math.prod(shape)]
        return ((codes.astype(dtype) - 8) * message["scale"]).reshape(shape)

    return codecs.Codec(
        name="four_bits",
        encode=encode,
        decode=decode,
        num_bytes=lambda shape, dtype: -(-math.prod(shape) // 2) + jnp.dtype(dtype).itemsize,
        traits=codecs.Traits(random=stochastic, **{"contractive": lambda shape: 0.5} | traits),
    )


def dense_four_bits(x_NxP):
    scale = np.abs(x_NxP).max(axis=1, keepdims=True) / 7
    return np.round(x_NxP / np.where(scale > 0, scale, 1)) * scale


class DenseAdam:
    """Adam's direction d(g) in NumPy, bias-corrected; decay and learning rate are the caller's."""

    def __init__(self, b1=0.9, b2=0.99, eps=1e-8):
        self.b1, self.b2, self.eps = b1, b2, eps
        self.m = self.v = 0.0
        self.t = 0

    def __call__(self, g):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        return self.m / (1 - self.b1**self.t) / (np.sqrt(self.v / (1 - self.b2**self.t)) + self.eps)
