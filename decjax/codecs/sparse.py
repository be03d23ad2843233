"""Sparse messages: a few values and their positions.

    topk         the k = ⌈φP⌉ largest magnitudes of all P values        δ = k/P
    threshold    those of them that are above a multiple of the root mean square
    block_topk   the k largest of every group of g = ⌈k/φ⌉ values       δ = k/g
    randomk      one of every group of g = ⌈1/φ⌉ values, at random      δ = 1/g, or unbiased with ω = g − 1

Values that are sent arrive as they are, so ‖x − x̂‖² is the energy of those that are not. Groups are strided, value p belonging to
group p mod M: a selection within groups takes a few passes over the array, where one among all values takes a sort or a bisection.
In the worst case it keeps as large a fraction δ of the energy ‖x‖² as `topk`; of normal values, the largest of each 100 keep 7.7 % of
the energy, and topk of the same size keeps 8.4 %.

Indices are sent as the smallest unsigned integers that fit; random-k sends a seed and no indices.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decjax import noise, registry
from decjax.codecs import bits
from decjax.codecs.codec import Codec, Traits, working_dtype

GROUP = 8  # values of a group in the first of two selections
SORTED = 2**14  # fewer values than this are sorted
FRACTION = 0.01  # default share of the values that is sent


def made_values(name: str, values: Codec | str, fraction: float = 1.0) -> Codec:
    """The codec of the values that codec `name` sends; ValueError if the codec, or the fraction of values, does not fit."""
    if not 0 < fraction <= 1:
        raise ValueError(f"{name} fraction={fraction} must lie in (0, 1]; 0.01 sends one value of a hundred")
    made: Codec = registry.make("codec", values)
    if made.traits.matrix or made.traits.random or made.traits.state_key != "none":
        raise ValueError(f"{name} values={made.name!r}: values take a codec without state, key or matrices; try 'int8'")
    return made


def largest(magnitude_xP: jax.Array, k: int) -> jax.Array:
    """Positions of the k largest magnitudes along the last axis: those of `jax.lax.top_k`, in any order.

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
    """Positions of the k largest numbers, of which at least k are not negative.

    Many numbers are not sorted: the k-th largest, t, is found by bisection, as the largest number that k numbers reach. Numbers above
    t, followed by numbers equal to t, are marked by bits, and the positions of the first k set bits are those that are wanted.
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
    """|x|, with ∞ for NaN, so that NaN is always selected: maxima and sorts order NaN differently, and a message must not hide it."""
    return jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))


def _num_groups(size: int, group: int) -> int:
    """M = ⌈size/group⌉, how many groups of at most `group` values hold `size` values."""
    return math.ceil(size / group)


def combined(kept, count, values: Codec):
    """δ, as a function of the shape, if a fraction `kept(shape)` of the energy is sent as `count(shape)` values encoded by `values`."""
    inner = values.traits.contractive
    return kept and inner and (lambda shape: kept(shape) * inner((count(shape),)))


def _sparse(name: str, count, select, positions, num_index_bytes, values: Codec, kept=None, **traits: Any) -> Codec:
    """A codec from `select(flat, key) -> (values, where)` and `positions(where, size) -> positions` of the values."""
    traits["contractive"] = combined(kept, lambda shape: count(math.prod(shape)), values)

    def encode(x, state, key):
        chosen_k, where = select(x.ravel(), key)
        return {"values": values.encode(chosen_k, (), None), "where": where}

    def decode(message, shape, dtype):
        if not (size := math.prod(shape)):
            return jnp.zeros(shape, dtype)
        chosen_k = values.decode(message["values"], (count(size),), dtype)
        flat = jnp.zeros(size, dtype).at[positions(message["where"], size)].set(chosen_k, mode="drop", unique_indices=True)
        return flat.reshape(shape)

    def num_bytes(shape, dtype):
        size = math.prod(shape)
        return values.num_bytes((count(size),), dtype) + num_index_bytes(size)

    return Codec(name=name, encode=encode, decode=decode, num_bytes=num_bytes, traits=Traits(**traits))


@registry.register("codec", "topk", messages="the largest values and their places")
def topk(fraction: float = FRACTION, k: int | None = None, values: Codec | str = "identity") -> Codec:
    """The k = ⌈φP⌉ values of largest magnitude of all P, or a fixed number k of them, and their positions.

    The selection is exact: ‖x − x̂‖² ≤ (1 − k/P)‖x‖².

    Args:
        fraction: φ in (0, 1], the fraction of values that is sent.
        k: number of values that are sent, at least 1; all, if there are fewer. None: ⌈φP⌉.
        values: codec of the values that are sent, one without state, key or matrices, such as `int8`.

    Reference: Stich et al. 2018, "Sparsified SGD with memory", Lemma A.1.
    """
    return _topk("topk", fraction, k, 0.0, values)


@registry.register("codec", "threshold", messages="the largest values above a threshold and their places")
def threshold(multiple: float = 1.0, fraction: float = FRACTION, values: Codec | str = "identity") -> Codec:
    """Values of magnitude at least τ = multiple · rms(x), at most the ⌈φP⌉ largest of all P, and their positions.

    The message has room for ⌈φP⌉ values; unused places hold zeros. If all values above τ fit, no error is larger than τ. With a
    multiple of at most 1 some value is always sent, and δ = 1/P; with a larger one the codec is not contractive. 0 is `topk`.

    Args:
        multiple: τ/rms(x), at least 0.
        fraction: φ in (0, 1], the largest fraction of values that is sent.
        values: codec of the values that are sent, one without state, key or matrices, such as `int8`.

    Reference: Strom 2015, with a threshold that follows the scale; Sahu et al. 2021 for its error feedback.
    """
    if not 0 <= multiple < math.inf:
        raise ValueError(f"threshold multiple={multiple} must be at least 0; 1 is the root mean square")
    return _topk("threshold", fraction, None, multiple, values)


def _topk(name: str, fraction: float, k: int | None, multiple: float, values: Codec | str) -> Codec:
    values = made_values(name, values, fraction)
    if k is not None and fraction != FRACTION:
        raise ValueError(f"{name} k={k} with fraction={fraction}: both set how many values are sent; leave one out")
    if k is not None and (type(k) is not int or k < 1):
        raise ValueError(
            f"{name} k={k} must be a whole number of at least 1; k=1 sends one value of a tensor, fraction=0.01 one of a hundred"
        )

    def count(size):
        return min(size, k if k is not None else math.ceil(fraction * size))

    def select(x_P, key):
        chosen_k = largest(comparable_magnitude(x_P), count(x_P.size))
        if values.name != "identity":  # Then values of like magnitude share a scale.
            chosen_k = chosen_k[jax.lax.top_k(comparable_magnitude(x_P[chosen_k]), chosen_k.size)[1]]
        sent_k = x_P[chosen_k]
        if multiple:
            wide_P = x_P.astype(working_dtype(x_P.dtype))
            top = jnp.maximum(jnp.abs(wide_P).max(initial=0), jnp.finfo(wide_P.dtype).tiny)
            tau = multiple * top * jnp.sqrt(jnp.square(wide_P / top).mean())
            sent_k = jnp.where(jnp.abs(sent_k) < tau, 0, sent_k)  # What is not comparable is sent.
        return sent_k, chosen_k.astype(bits.index_dtype(x_P.size))

    def delta(shape):
        size = max(1, math.prod(shape))
        return count(size) / size if not multiple else 1 / size

    return _sparse(
        name,
        count,
        select,
        lambda where, size: where.astype(jnp.int32),
        lambda size: count(size) * bits.index_dtype(size).itemsize,
        values,
        kept=delta if multiple <= 1 else None,
    )


@registry.register("codec", "block_topk", messages="the largest values of each group and their places")
def block_topk(fraction: float = 0.01, k: int = 1, values: Codec | str = "identity") -> Codec:
    """The k values of largest magnitude of every group of g = ⌈k/φ⌉ values, and their positions.

    ‖x − x̂‖² ≤ (1 − k/g)‖x‖². The selection takes k passes over the array; at the same fraction, a larger k keeps more energy.
    Magnitudes are compared as float32 without their last ⌈log₂ g⌉ bits, which hold the position, so a selected value may be smaller
    than the largest by the fraction 2^(⌈log₂ g⌉ − 23).

    Args:
        fraction: φ in (0, 1], the fraction of values that is sent; g may be at most 4096.
        k: number of values of a group that are sent, at least 1.
        values: codec of the values that are sent, one without state, key or matrices, such as `int8`.
    """
    values = made_values("block_topk", values, fraction)
    if k < 1:
        raise ValueError(f"block_topk k={k} must be at least 1 value of each group")
    group = math.ceil(k / fraction)
    if group > 2**12:
        raise ValueError(
            f"block_topk of k={k} in groups of {group}: groups may have 4096 values; use a larger fraction or a smaller k"
        )
    form = _BlockTopk(k, group, np.uint32(2 ** (group - 1).bit_length() - 1))
    return _sparse("block_topk", form.count, form.select, form.positions, form.num_index_bytes, values, kept=form.kept)


@dataclasses.dataclass(frozen=True)
class _BlockTopk:
    """The codec's functions; `low` masks the bits of a magnitude that hold its position in the group."""

    k: int
    group: int
    low: np.uint32

    def count(self, size):
        return self.k * _num_groups(size, self.group)

    def num_index_bytes(self, size):
        return self.count(size) * bits.index_dtype(self.group).itemsize

    def kept(self, shape):
        return self.k / self.group * (1 - 2 * float(self.low) / 2**23)

    def select(self, x_P, key):
        if not x_P.size:
            return x_P, jnp.zeros(0, bits.index_dtype(self.group))
        M = _num_groups(x_P.size, self.group)
        full = x_P.size - x_P.size % M  # The rest fills a part of one more row, which is computed by itself: see `by_rows`.
        parts = [self.keys(x_P[:full].reshape(-1, M), 0)]
        if full < x_P.size:
            parts.append(self.keys(jnp.pad(x_P[full:], (0, full + M - x_P.size))[None], full // M))
        where = []
        for _ in range(self.k):  # All keys of a group are different.
            left = [jnp.where(keys_GxM < where[-1], keys_GxM, 0) if where else keys_GxM for keys_GxM in parts]
            where.append(functools.reduce(jnp.maximum, [keys_GxM.max(axis=0, initial=0) for keys_GxM in left]))
        where_kxM = (jnp.stack(where) & self.low).astype(bits.index_dtype(self.group))
        chosen = x_P.at[self.positions(where_kxM.ravel(), x_P.size)].get(mode="fill", fill_value=0)
        return chosen, where_kxM.ravel()

    def keys(self, row_GxM, first):
        """Integers in the order of the magnitudes, whose last bits are the positions in the group, counted from `first`."""
        pattern_GxM = jax.lax.bitcast_convert_type(jnp.abs(row_GxM.astype(jnp.float32)), jnp.uint32)
        return pattern_GxM & ~self.low | jax.lax.broadcasted_iota(jnp.uint32, row_GxM.shape, 0) + first

    def positions(self, where, size):
        M = _num_groups(size, self.group)
        return (where.reshape(self.k, -1).astype(jnp.int32) * M + jnp.arange(M)[None]).ravel()


@registry.register("codec", "randomk", messages="values drawn by a seed")
def randomk(fraction: float = 0.01, unbiased: bool = False, values: Codec | str = "identity") -> Codec:
    """One random value of every group of g = ⌈1/φ⌉ values, and the seed that it was drawn by; linear for a given key.

    Every value is sent with probability 1/g, so E‖x − x̂‖² = (1 − 1/g)‖x‖². If `unbiased`, values are multiplied by g, so that
    E x̂ = x and E‖x − x̂‖² = (g − 1)‖x‖².

    Args:
        fraction: φ in [2⁻¹⁶, 1], the fraction of values that is sent.
        unbiased: whether values are multiplied by g.
        values: codec of the values that are sent, one without state, key or matrices, such as `int8`.

    Reference: Stich et al. 2018; Konečný et al. 2016 for the shared seed.
    """
    values = made_values("randomk", values, fraction)
    group = math.ceil(1 / fraction)
    if group > 2**16:
        raise ValueError(f"randomk fraction={fraction} leaves one value of {group}; at least one of 65536 is sent")

    def positions(where, size):
        M = _num_groups(size, group)
        return noise.below(group, (M,), (where[0], where[1])) * M + jnp.arange(M)

    def select(x_P, key):
        where = jnp.stack(noise.words(key))
        chosen = x_P.at[positions(where, x_P.size)].get(mode="fill", fill_value=0)
        return chosen * group if unbiased else chosen, where

    return _sparse(
        "randomk",
        lambda size: _num_groups(size, group),
        select,
        positions,
        lambda size: 8,
        values,
        random=True,
        linear=values.traits.linear,
        kept=None if unbiased else lambda shape: 1 / group,
        unbiased=(lambda size: group - 1.0) if unbiased and values.traits.linear else None,
    )
