"""Accelerated gossip: several rounds a step, with momentum from round to round."""

from collections.abc import Callable
import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from decjax.gossip.mixer import Gossip, Linear, Rounds
from decjax.gossip.requirements import DOUBLY_STOCHASTIC, STATIC, SYMMETRIC
from decjax.gossip.rounds import difference, mix_round
from decjax.registry import Requirement
from decjax.topology.schedule import EXACT_TOLERANCE
from decjax.typing import PyTree

A = TypeVar("A", np.ndarray, jax.Array)


class Accelerated(Gossip, name="accelerated"):
    """Accelerated gossip: R rounds per step with momentum between them, on a static graph with symmetric W.

        z_{r+1} = (1+η) W z_r − η z_{r−1},   z_0 = z_{−1} = x,   η = (1 − √(1−β²)) / (1 + √(1−β²))

    β is the second largest modulus of W's eigenvalues. The mean is preserved, and over many rounds disagreement shrinks by a factor
    of about √η per round instead of β. Over few rounds it may grow, so R rounds have to contract more than R plain ones.

    Attributes:
        rounds: R ≥ 1, rounds per step.

    Reference: Liu and Morse 2011, "Accelerated linear iterations for distributed averaging".
    """

    graph = "ring"
    messages = "parameters"
    memory = "none"
    requires = (
        STATIC,  # On other graphs the recursion stalls or diverges.
        SYMMETRIC,
        DOUBLY_STOCHASTIC,
        Requirement(
            "topology",
            "a graph on which a plain round does not average exactly",
            lambda topology: np.abs(_disagreement(topology.matrix(0))).max() >= EXACT_TOLERANCE,
            "use mixer 'exact'",
        ),
    )

    rounds: Rounds = 4

    def check_requirements(self, *more: Requirement) -> None:
        super().check_requirements(*more)
        eigenvalues = _disagreement(self.topology.matrix(0))
        contracted = self._recursion(np.ones_like(eigenvalues), lambda now: (1 + self.eta) * eigenvalues * now)
        accelerated, plain = np.abs(contracted).max(), self.beta**self.rounds
        if accelerated >= plain:
            raise ValueError(
                f"{self}: rounds={self.rounds} contract by {accelerated:.3g} on topology {self.topology.name!r}, plain rounds by "
                f"{plain:.3g}; use more rounds, or mixer 'exact'"
            )

    @functools.cached_property
    def beta(self) -> float:
        """β of the graph."""
        return min(np.abs(_disagreement(self.topology.matrix(0))).max(), 1.0)

    @functools.cached_property
    def eta(self) -> float:
        """η of the graph."""
        root = math.sqrt(1 - self.beta**2)
        return (1 - root) / (1 + root)

    def due(self, phase: int) -> list[int]:
        return [0] * self.rounds

    def exchange(self, params: PyTree, state: PyTree, phase: int) -> tuple[PyTree, PyTree]:
        layout = self.layout(params)
        return layout.unpack([self._mixed(x_P) for x_P in layout.pack(params)], like=params), state

    @property
    def linear(self) -> Linear:
        return Linear(self._matrix, self._pull, self.pull_bytes)

    def _mixed(self, x_P: jax.Array) -> jax.Array:
        """Return z_R. z is sent in the type of x; what rounding loses of it stays on its worker."""
        dtype, (round_,) = jnp.promote_types(x_P.dtype, jnp.float32), self.topology.rounds

        def step(now):
            sent = now.astype(x_P.dtype)
            mixed = mix_round(sent, round_, self.channel.axis, wide=True).astype(dtype) + (now - sent.astype(dtype))
            return (1 + self.eta) * mixed

        return self._recursion(x_P.astype(dtype), step).astype(x_P.dtype)

    def _pull(self, params: PyTree, phase: int) -> PyTree:
        layout = self.layout(params)
        return layout.unpack([self._drawn(x_P) for x_P in layout.pack(params)], like=params, wide=True)

    def _drawn(self, x_P: jax.Array) -> jax.Array:
        """Return z_R − x, from differences between neighbors."""
        dtype, (round_,) = jnp.promote_types(x_P.dtype, jnp.float32), self.topology.rounds

        def step(now):
            z_P = (x_P.astype(dtype) + now).astype(x_P.dtype)
            return (1 + self.eta) * (now + difference(z_P, round_, self.channel.axis))

        return self._recursion(jnp.zeros(x_P.shape, dtype), step)

    def _matrix(self, phase: int) -> np.ndarray:
        """Return the matrix that R rounds together apply."""
        W_NxN = self.topology.matrix(0)
        return self._recursion(np.eye(len(W_NxN)), lambda now: (1 + self.eta) * W_NxN @ now)

    def _recursion(self, start: A, step: Callable[[A], A]) -> A:
        """Return z_R for z_0 = z_{−1} = start, with `step(z)` = (1+η) W z."""
        before = now = start
        for _ in range(self.rounds):
            before, now = now, step(now) - self.eta * before
        return now


def _disagreement(W_NxN: np.ndarray) -> np.ndarray:
    """Return the eigenvalues of a symmetric W without that of the mean."""
    return np.linalg.eigvalsh(W_NxN - np.full_like(W_NxN, 1 / len(W_NxN)))
