"""Codecs as a user may write them, simpler than the library's, some of them in NumPy."""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs


class Identity(codecs.Codec):
    name = "identity"

    def encode(self, x, state, key):
        return x

    def decode(self, message, shape, dtype):
        return message

    def num_bytes(self, shape, dtype):
        return math.prod(shape) * jnp.dtype(dtype).itemsize

    def delta(self, shape):
        return 1.0


class Top(codecs.Codec):
    """Return the largest values of an array and their positions: this many, or this share if below 1."""

    name = "top"

    most: float

    def count(self, shape):
        size = math.prod(shape)
        return int(min(self.most, size)) if self.most >= 1 else max(1, math.ceil(self.most * size))

    def encode(self, x, state, key):
        _, where = jax.lax.top_k(jnp.abs(x.ravel()), self.count(x.shape))
        return {"values": x.ravel()[where], "where": where.astype(jnp.uint16)}

    def decode(self, message, shape, dtype):
        return jnp.zeros(math.prod(shape), dtype).at[message["where"]].set(message["values"].astype(dtype)).reshape(shape)

    def num_bytes(self, shape, dtype):
        return self.count(shape) * (jnp.dtype(dtype).itemsize + 2)

    def delta(self, shape):
        return self.count(shape) / math.prod(shape)


def dense_top(most: float) -> Callable[[np.ndarray], np.ndarray]:
    """The same for one array, in NumPy."""

    def code(x):
        kept = np.zeros_like(x)
        largest = np.argsort(-np.abs(x.ravel()), kind="stable")[: most if most >= 1 else math.ceil(most * x.size)]
        kept.ravel()[largest] = x.ravel()[largest]
        return kept

    return code


class OneBit(codecs.Codec):
    """Signs, eight to a byte, times the mean magnitude."""

    name = "one bit"

    def encode(self, x, state, key):
        bits = jnp.pad(x.ravel() >= 0, (0, -x.size % 8)).reshape(-1, 8)
        return (bits * 2 ** jnp.arange(8)).sum(axis=1).astype(jnp.uint8), jnp.abs(x).mean()

    def decode(self, message, shape, dtype):
        packed, scale = message
        bits = (packed[:, None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        return (scale * (2 * bits.astype(dtype) - 1)).ravel()[: math.prod(shape)].reshape(shape)

    def num_bytes(self, shape, dtype):
        return -(-math.prod(shape) // 8) + jnp.dtype(dtype).itemsize

    def delta(self, shape):
        return 1 / math.prod(shape)


class Dithered(codecs.Codec):
    """Integers, rounded up or down at random: unbiased, and too coarse to be contractive."""

    name = "dithered"
    random = True

    def encode(self, x, state, key):
        return jnp.floor(x + jax.random.uniform(key, x.shape)).astype(jnp.int8)

    def decode(self, message, shape, dtype):
        return message.astype(dtype)

    def num_bytes(self, shape, dtype):
        return math.prod(shape)

    def omega(self, size):
        return float(size)


class FourBits(codecs.Codec):
    """Integers −7 … 7 times the largest magnitude / 7, two to a byte."""

    name = "four_bits"

    def encode(self, x, state, key):
        scale = jnp.abs(x).max() / 7
        steps = x.ravel() / jnp.where(scale > 0, scale, 1)
        steps = jnp.floor(steps + jax.random.uniform(key, steps.shape, steps.dtype)) if self.random else jnp.round(steps)
        codes = jnp.pad((steps + 8).astype(jnp.uint8), (0, x.size % 2))
        return {"codes": codes[::2] | codes[1::2] << 4, "scale": scale}

    def decode(self, message, shape, dtype):
        codes = jnp.stack([message["codes"] & 15, message["codes"] >> 4], axis=1).ravel()[: math.prod(shape)]
        return ((codes.astype(dtype) - 8) * message["scale"]).reshape(shape)

    def num_bytes(self, shape, dtype):
        return -(-math.prod(shape) // 2) + jnp.dtype(dtype).itemsize

    def delta(self, shape):
        return 0.5


def four_bits(stochastic=False, **members) -> codecs.Codec:
    """FourBits, or that codec with random rounding, with some members replaced."""
    return type(FourBits)("FourBits", (FourBits,), {"name": "four_bits", "random": stochastic, **members})()


identity, top, one_bit, dithered = Identity, Top, OneBit, Dithered


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
