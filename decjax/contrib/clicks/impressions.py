"""Generated examples of what is shown to people and clicked or not, and the hidden model that says so:

    x ~ N(0, I),   P(c_t = k) ∝ (k + 1)^−skew,   P(click) = σ(b + s·z(x, c)),
    z = wᵀx + Σ_t a_t[c_t] + Σ_{s<t} ⟨u_s[c_s], u_t[c_t]⟩,  shifted and scaled to mean 0 and variance 1

A few categories of each feature are frequent and most are rare, as in logs of clicks.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

RANK = 4  # of the interactions


class Impressions(NamedTuple):
    """Examples: F numbers of each, the category of each of T features, and whether it was clicked, 0 or 1."""

    numbers_BxF: Any
    indices_BxT: Any
    clicks_B: Any


@dataclasses.dataclass(frozen=True)
class Hidden:
    """The model that says which examples are clicked; for its equation see the top of this file."""

    features: int
    sizes: tuple[int, ...]
    skew: float
    signal: float
    bias: float

    @functools.cached_property
    def _parts(self) -> tuple[Any, ...]:
        """(w, a_t and u_t of each table, cumulative frequencies of each table's categories)."""
        rng = np.random.default_rng((0, *self.sizes))
        weight_F = rng.normal(size=self.features) / self.features**0.5
        own = [(rng.normal(size=size), rng.normal(size=(size, RANK)) / RANK**0.5) for size in self.sizes]
        cumulative = [np.cumsum(np.arange(1.0, size + 1) ** -self.skew) for size in self.sizes]
        return weight_F, own, [each / each[-1] for each in cumulative]

    @functools.cached_property
    def _moments(self) -> tuple[float, float]:
        raw_W = self._raw(*self._inputs(np.random.default_rng((0, 1)), 2**14))
        return float(raw_W.mean()), float(raw_W.std())

    def _inputs(self, rng, count):
        numbers_BxF = rng.normal(size=(count, self.features))
        drawn = [np.searchsorted(cumulative, rng.random(count), side="right") for cumulative in self._parts[2]]
        return numbers_BxF, np.stack(drawn, axis=1)

    def _raw(self, numbers_BxF, indices_BxT):
        weight_F, own, _ = self._parts
        z_B, sum_BxR, squares_B = numbers_BxF @ weight_F, np.zeros((len(numbers_BxF), RANK)), np.zeros(len(numbers_BxF))
        for (alone, vectors), index_B in zip(own, indices_BxT.T):
            z_B = z_B + alone[index_B]
            sum_BxR += vectors[index_B]
            squares_B += (vectors[index_B] ** 2).sum(axis=1)
        return z_B + ((sum_BxR**2).sum(axis=1) - squares_B) / 2  # Products of all pairs.

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Impressions, np.ndarray]:
        """(so many examples, the hidden model's logits)."""
        numbers_BxF, indices_BxT = self._inputs(rng, count)
        mean, deviation = self._moments
        logits_B = self.bias + self.signal * (self._raw(numbers_BxF, indices_BxT) - mean) / deviation
        clicks_B = rng.random(count) < 1 / (1 + np.exp(-logits_B))
        return Impressions(np.float32(numbers_BxF), np.int32(indices_BxT), np.float32(clicks_B)), logits_B
