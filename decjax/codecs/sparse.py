"""Sparse messages: a few values and their positions.

Values that are sent arrive unchanged, so ‖x − x̂‖² is the energy of those that are not. Groups are strided, value p belonging to
group p mod M: a selection within groups takes a few passes over the array, where one among all values takes a sort or a bisection.
In the worst case it keeps as large a fraction δ of the energy ‖x‖² as `Topk`; of normal values, the largest of each 100 keep 7.7 % of
the energy, and `Topk` of the same size keeps 8.4 %.

Indices are sent as the smallest unsigned integers that fit; `Randomk` sends a seed and no indices.
"""

import abc
import functools
import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from decjax import noise
from decjax.codecs import bits
from decjax.codecs.codec import OfValues, working_dtype
from decjax.options import Count, NonNegative, Range, Share

GROUP = 8  # values of a group in the first of two selections
SORTED = 2**14  # fewer values than this are sorted
FRACTION = 0.01  # default fraction of the values that is sent


def largest(magnitude_xP: jax.Array, k: int) -> jax.Array:
    """Return the positions of the k largest magnitudes along the last axis: those of `jax.lax.top_k`, in any order.

    The k largest values lie in the k groups with the largest maxima; so the maximum of each group and two smaller selections suffice.
    """
    size = magnitude_xP.shape[-1]
    if size < 4 * GROUP * k:
        return _selected(magnitude_xP, k)
    lead = magnitude_xP.shape[:-1]
    padded = jnp.pad(magnitude_xP, [(0, 0)] * len(lead) + [(0, -size % GROUP)], constant_values=-1)
    groups_xGxM = padded.reshape(*lead, GROUP, -1)
    chosen_xk = _selected(groups_xGxM.max(axis=-2), k)
    candidates_xGxk = jnp.take_along_axis(groups_xGxM, chosen_xk[..., None, :], axis=-1)
    among_xk = _selected(candidates_xGxk.reshape(*lead, GROUP * k), k)
    return among_xk // k * groups_xGxM.shape[-1] + jnp.take_along_axis(chosen_xk, among_xk % k, axis=-1)


def _selected(x_xP: jax.Array, k: int) -> jax.Array:
    """Return the positions of the k largest numbers, of which at least k are not negative.

    Many numbers are not sorted: the k-th largest, t, is found by bisection, as the largest number that k numbers reach. Numbers above
    t, followed by numbers equal to t, are marked by bits, and the positions of the first k set bits are returned.
    """
    if x_xP.shape[-1] < SORTED or not k:
        return jax.lax.top_k(x_xP, k)[1]
    # Bit patterns of non-negative floats, as integers, are ordered as the floats are; those of negative floats are negative.
    pattern_xP = jax.lax.bitcast_convert_type(x_xP, f"int{8 * x_xP.dtype.itemsize}")
    return jnp.vectorize(functools.partial(_bisected, k=k), signature="(p)->(k)")(pattern_xP)


def _bisected(x_P: jax.Array, k: int) -> jax.Array:
    def halved(bounds):
        low, high = bounds
        middle = high - (high - low >> 1)
        enough = (x_P >= middle).sum(dtype=jnp.int32) >= k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    t, _ = jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halved, (jnp.maximum(x_P.min(), 0), x_P.max()))
    padded_Wx32 = jnp.pad(x_P, (0, -x_P.size % 32), constant_values=-1).reshape(-1, 32)
    words = [
        (chosen.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)).sum(axis=1, dtype=jnp.uint32)
        for chosen in (padded_Wx32 > t, padded_Wx32 == t)
    ]
    return bits.first_set(jnp.concatenate(words), k) % padded_Wx32.size


def comparable_magnitude(x: jax.Array) -> jax.Array:
    """Return |x|, with ∞ for NaN, so that NaN is always selected: maxima and sorts order it differently, and a message must not hide it."""
    return jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))


class Sparse(OfValues):
    """Base of sparse codecs; a subclass defines how many values it sends and which."""

    @abc.abstractmethod
    def count(self, size: int) -> int:
        """Return the number of values sent of `size` values."""

    @abc.abstractmethod
    def select(self, x_P: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Return the values that are sent, and `where`, from which `positions(where, size)` computes their positions."""

    @abc.abstractmethod
    def kept(self, size: int) -> float | None:
        """Return the fraction of the energy that the values have at least; None if it is not bounded."""

    def positions(self, where: jax.Array, size: int) -> jax.Array:
        return where.astype(jnp.int32)

    def index_bytes(self, size: int) -> int:
        """Return the bytes of `where`."""
        return self.count(size) * bits.index_dtype(size).itemsize

    def encode(self, x, state, key):
        chosen_k, where = self.select(x.ravel(), key)
        return {"values": self.inner.encode(chosen_k, (), None), "where": where}

    def decode(self, message, shape, dtype):
        if not (size := math.prod(shape)):
            return jnp.zeros(shape, dtype)
        chosen_k = self.inner.decode(message["values"], (self.count(size),), dtype)
        flat = jnp.zeros(size, dtype).at[self.positions(message["where"], size)].set(chosen_k, mode="drop", unique_indices=True)
        return flat.reshape(shape)

    def num_bytes(self, shape, dtype):
        size = math.prod(shape)
        return self.inner.num_bytes((self.count(size),), dtype) + self.index_bytes(size)

    def delta(self, shape):
        size = math.prod(shape)
        kept, of_values = self.kept(size), self.inner.delta((self.count(size),))
        return None if kept is None or of_values is None else kept * of_values


class _Largest(Sparse):
    """Base of codecs that send the largest values of the array.

    Attributes:
        fraction: φ, the largest fraction of values that is sent.
    """

    fraction: Share = FRACTION

    def count(self, size):
        return math.ceil(self.fraction * size)

    def select(self, x_P, key):
        chosen_k = largest(comparable_magnitude(x_P), self.count(x_P.size))
        if self.inner.name != "identity":  # Then values of similar magnitude share a scale.
            chosen_k = chosen_k[jax.lax.top_k(comparable_magnitude(x_P[chosen_k]), chosen_k.size)[1]]
        return self._cut(x_P[chosen_k], x_P), chosen_k.astype(bits.index_dtype(x_P.size))

    def _cut(self, sent_k: jax.Array, x_P: jax.Array) -> jax.Array:
        return sent_k


class Topk(_Largest, name="topk"):
    """The k = ⌈φP⌉ values of largest magnitude of all P, or a fixed number k of them, and their positions.

    The selection is exact: ‖x − x̂‖² ≤ (1 − k/P)‖x‖².

    Attributes:
        k: number of values that are sent; all, if there are fewer. None: ⌈φP⌉.

    Reference: Stich et al. 2018, "Sparsified SGD with memory", Lemma A.1.
    """

    messages = "the largest values and their places"

    k: Count | None = None

    def __post_init__(self):
        if self.k is not None and self.fraction != FRACTION:
            raise ValueError(f"{self}: k={self.k} and fraction={self.fraction} both set the number of values; leave one out")

    def count(self, size):
        return super().count(size) if self.k is None else min(size, self.k)

    def kept(self, size):
        return self.count(max(1, size)) / max(1, size)


class Threshold(_Largest, name="threshold"):
    """Values of magnitude at least τ = multiple · rms(x), at most the ⌈φP⌉ largest of all P, and their positions.

    The message has room for ⌈φP⌉ values; unused places hold zeros. If all values above τ fit, no error is larger than τ. With a
    multiple of at most 1 some value is always sent, and δ = 1/P; with a larger one the codec is not contractive. 0 is `topk`.

    Attributes:
        multiple: τ/rms(x).

    Reference: Strom 2015, with a threshold that follows the scale; Sahu et al. 2021 for its error feedback.
    """

    messages = "the largest values above a threshold and their places"

    multiple: NonNegative = 1.0

    def _cut(self, sent_k, x_P):
        if not self.multiple:
            return sent_k
        wide_P = x_P.astype(working_dtype(x_P.dtype))
        top = jnp.maximum(jnp.abs(wide_P).max(initial=0), jnp.finfo(wide_P.dtype).tiny)
        tau = self.multiple * top * jnp.sqrt(jnp.square(wide_P / top).mean())
        return jnp.where(jnp.abs(sent_k) < tau, 0, sent_k)  # NaN is sent.

    def kept(self, size):
        size = max(1, size)
        return None if self.multiple > 1 else 1 / size if self.multiple else self.count(size) / size


class BlockTopk(Sparse, name="block_topk"):
    """The k values of largest magnitude of every group of g = ⌈k/φ⌉ values, and their positions.

    ‖x − x̂‖² ≤ (1 − k/g)‖x‖². The selection takes k passes over the array; at the same fraction, a larger k keeps more energy.
    Magnitudes are compared as float32 without their last ⌈log₂ g⌉ bits, which hold the position, so a selected value may be smaller
    than the largest by the fraction 2^(⌈log₂ g⌉ − 23).

    Attributes:
        fraction: φ, the fraction of values that is sent; g may be at most 4096.
        k: number of values of a group that are sent.
    """

    messages = "the largest values of each group and their places"

    fraction: Share = 0.01
    k: Count = 1

    def __post_init__(self):
        if self._group > 2**12:
            raise ValueError(
                f"{self}: a group of ⌈k/fraction⌉={self._group} values exceeds 4096; use a larger fraction or a smaller k"
            )

    @property
    def _group(self) -> int:
        return math.ceil(self.k / self.fraction)

    @property
    def _low(self) -> np.uint32:
        """The bits of a magnitude that hold its position in the group."""
        return np.uint32(2 ** (self._group - 1).bit_length() - 1)

    def count(self, size):
        return self.k * math.ceil(size / self._group)

    def index_bytes(self, size):
        return self.count(size) * bits.index_dtype(self._group).itemsize

    def kept(self, size):
        return self.k / self._group * (1 - 2 * float(self._low) / 2**23)

    def select(self, x_P, key):
        if not x_P.size:
            return x_P, jnp.zeros(0, bits.index_dtype(self._group))
        M = math.ceil(x_P.size / self._group)
        full = x_P.size - x_P.size % M  # The rest is a part of one more row, computed separately: see `by_rows`.
        parts = [self._keys(x_P[:full].reshape(-1, M), 0)]
        if full < x_P.size:
            parts.append(self._keys(jnp.pad(x_P[full:], (0, full + M - x_P.size))[None], full // M))
        where = []
        for _ in range(self.k):  # All keys of a group are different.
            left = [jnp.where(keys_GxM < where[-1], keys_GxM, 0) if where else keys_GxM for keys_GxM in parts]
            where.append(functools.reduce(jnp.maximum, [keys_GxM.max(axis=0, initial=0) for keys_GxM in left]))
        where_kxM = (jnp.stack(where) & self._low).astype(bits.index_dtype(self._group))
        chosen = x_P.at[self.positions(where_kxM.ravel(), x_P.size)].get(mode="fill", fill_value=0)
        return chosen, where_kxM.ravel()

    def _keys(self, row_GxM: jax.Array, first: int) -> jax.Array:
        """Return integers in the order of the magnitudes, whose last bits are the positions in the group, counted from `first`."""
        pattern_GxM = jax.lax.bitcast_convert_type(jnp.abs(row_GxM.astype(jnp.float32)), jnp.uint32)
        return pattern_GxM & ~self._low | jax.lax.broadcasted_iota(jnp.uint32, row_GxM.shape, 0) + first

    def positions(self, where, size):
        M = math.ceil(size / self._group)
        return (where.reshape(self.k, -1).astype(jnp.int32) * M + jnp.arange(M)[None]).ravel()


class Randomk(Sparse, name="randomk"):
    """One random value of every group of g = ⌈1/φ⌉ values, and the seed that it was drawn by; linear for a given key.

    Every value is sent with probability 1/g, so E‖x − x̂‖² = (1 − 1/g)‖x‖². If `unbiased`, values are multiplied by g, so that
    E x̂ = x and E‖x − x̂‖² = (g − 1)‖x‖².

    Attributes:
        fraction: φ, the fraction of values that is sent.
        unbiased: whether values are multiplied by g.

    Reference: Stich et al. 2018; Konečný et al. 2016 for the shared seed.
    """

    messages = "values drawn by a seed"
    random = True

    fraction: Annotated[float, Range(2**-16, 1)] = 0.01
    unbiased: bool = False

    def __post_init__(self):
        self._derive(linear=self.inner.linear)

    @property
    def _group(self) -> int:
        return math.ceil(1 / self.fraction)

    def count(self, size):
        return math.ceil(size / self._group)

    def index_bytes(self, size):
        return 8

    def positions(self, where, size):
        M = math.ceil(size / self._group)
        return noise.below(self._group, (M,), (where[0], where[1])) * M + jnp.arange(M)

    def select(self, x_P, key):
        where = jnp.stack(noise.words(key))
        chosen = x_P.at[self.positions(where, x_P.size)].get(mode="fill", fill_value=0)
        return chosen * self._group if self.unbiased else chosen, where

    def kept(self, size):
        return None if self.unbiased else 1 / self._group

    def omega(self, size):
        return self._group - 1.0 if self.unbiased and self.linear else None
