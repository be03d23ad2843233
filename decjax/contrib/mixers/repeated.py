"""Mixers of several rounds a step: with momentum between them, or until workers are close enough."""

from collections.abc import Callable
import functools
import math
from typing import Annotated, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from decjax.buckets import wide_dtype
from decjax.gossip.mixer import Gossip, Linear, Rounds, Step
from decjax.gossip.requirements import DOUBLY_STOCHASTIC, STATIC, SYMMETRIC
from decjax.gossip.rounds import difference, mix_round, sent_bytes
from decjax.mesh import mean_bytes
from decjax.options import Natural, Range
from decjax.registry import Requirement
from decjax.topology.schedule import EXACT_TOLERANCE
from decjax.typing import PyTree

A = TypeVar("A", np.ndarray, jax.Array)
Carry = tuple[list[jax.Array], jax.Array, jax.Array]


class Accelerated(Gossip, name="accelerated"):
    """Accelerated gossip: R rounds per step with momentum between them, on a static graph with symmetric W.

        z_{r+1} = (1+η) W z_r − η z_{r−1},   z_0 = z_{−1} = x,   η = (1 − √(1−β²)) / (1 + √(1−β²))

    β is the second largest modulus of W's eigenvalues. The mean is preserved, and over many rounds disagreement shrinks by a factor
    of about √η per round instead of β. Over few rounds it may grow, so R rounds have to contract more than R plain ones.

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
        return self.mapped(self._mixed, params), state

    @property
    def linear(self) -> Linear:
        return Linear(self._matrix, self._pull, self.pull_bytes)

    def _mixed(self, x_P: jax.Array) -> jax.Array:
        """Return z_R. z is sent in the type of x; what rounding loses of it stays on its worker."""
        dtype, (round_,) = wide_dtype(x_P), self.topology.rounds

        def step(now):
            sent = now.astype(x_P.dtype)
            mixed = mix_round(sent, round_, self.channel.axis, wide=True).astype(dtype) + (now - sent.astype(dtype))
            return (1 + self.eta) * mixed

        return self._recursion(x_P.astype(dtype), step).astype(x_P.dtype)

    def _pull(self, params: PyTree, phase: int) -> PyTree:
        return self.mapped(self._drawn, params, wide=True)

    def _drawn(self, x_P: jax.Array) -> jax.Array:
        """Return z_R − x, from differences between neighbors."""
        dtype, (round_,) = wide_dtype(x_P), self.topology.rounds

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


class ControlState(NamedTuple):
    """State of `consensus_control`, the same on all workers.

    Attributes:
        largest: Ξ_max, float32 scalar, the largest Ξ before the first round of a step so far.
        distances: [R_max], Ξ before each round of the last step; 0 for rounds that were not taken.
        usage: [R_max], int32, how many steps so far took 1, 2, … rounds.
    """

    largest: jax.Array
    distances: jax.Array
    usage: jax.Array


class ConsensusControl(Gossip, name="consensus_control"):
    """Consensus control: gossip is repeated until workers are close enough, at most R_max times a step.

        x ← Wx  and  Ξ² = (1/N) Σ_i ‖x_i − (Wx)_i‖²  before it;     again while Ξ > ρ Ξ_max, Ξ_max the largest Ξ of first rounds so far

    Ξ is the distance to the neighbors' mean, which costs a round one number per worker; that to the mean of all, on which the paper's
    theory is, would take an all-reduce of the parameters. For symmetric W it is between (1 − β) and (1 + β) times as large, where β is
    the second largest modulus of W's eigenvalues.

    The compiled program determines the number of rounds, from the same number on all workers, so such a step runs in order "atc" and
    its bytes are counted afterwards: metrics and summary have the mean so far. A program with a given `phase` takes phase + 1 rounds.

    Attributes:
        target: ρ in (0, 1); 1 or more would be plain gossip.
        rounds: R_max ≥ 1.
        steps: control only the first steps, when it matters most, and then take one round a step; 0: control all.

    Reference: Kong et al. 2021, "Consensus control for decentralized deep learning", arXiv 2102.04828, sections 3 and 4.
    """

    order = "atc"
    graph = "ring"
    messages = "parameters, as often as it takes"
    memory = "none"
    source = "arXiv 2102.04828"
    requires = (STATIC, DOUBLY_STOCHASTIC)

    target: Annotated[float, Range(0, 1, above=True, below=True)] = 0.25
    rounds: Rounds = 8
    steps: Natural = 0

    @property
    def phases(self) -> range:
        return range(self.rounds)

    def phase(self, step: Step) -> None:
        return None

    @property
    def usage(self):
        return lambda state: state.usage

    def init(self, params: PyTree) -> ControlState:
        super().init(params)
        return ControlState(jnp.zeros((), jnp.float32), jnp.zeros(self.rounds, jnp.float32), jnp.zeros(self.rounds, jnp.int32))

    def exchange(self, params: PyTree, state: ControlState, phase: int | None) -> tuple[PyTree, ControlState]:
        layout = self.layout(params)
        vectors, first = self._round(layout.pack(params))
        largest = jnp.maximum(state.largest, first)
        start = (vectors, jnp.zeros(self.rounds, jnp.float32).at[0].set(first), jnp.int32(1))
        if phase is None:
            is_controlled = jnp.logical_or(self.steps == 0, state.usage.sum() < self.steps)
            is_far = lambda distances, taken: distances[taken - 1] > self.target * largest
            goes_on = lambda carry: is_controlled & (carry[2] < self.rounds) & is_far(*carry[1:])
            vectors, distances, taken = jax.lax.while_loop(goes_on, self._again, start)
        else:
            vectors, distances, taken = functools.reduce(lambda carry, _: self._again(carry), range(phase), start)
        return layout.unpack(vectors, like=params), ControlState(largest, distances, state.usage.at[taken - 1].add(1))

    def _again(self, carry: Carry) -> Carry:
        vectors, distances, taken = carry
        vectors, distance = self._round(vectors)
        return vectors, distances.at[taken].set(distance), taken + 1

    def _round(self, vectors: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        """Return (Wx, Ξ) of this worker's x."""
        mixed = [mix_round(x_P, self.topology.rounds[0], self.channel.axis) for x_P in vectors]
        squares = [jnp.square((x_P - y_P).astype(jnp.float32)).sum() for x_P, y_P in zip(vectors, mixed, strict=True)]
        # The number waits for the messages and the next messages for the number: collectives have one order on all devices.
        mixed, square = jax.lax.optimization_barrier((mixed, sum(squares, jnp.zeros(1, jnp.float32))))
        mixed, mean = jax.lax.optimization_barrier((mixed, self.channel.axis.mean(square)))
        return mixed, jnp.sqrt(mean[0])

    def num_bytes(self, params: PyTree, phase: int | None) -> np.ndarray:
        taken = 0 if phase is None else phase + 1
        a_round = sent_bytes(self.topology.rounds[0], self.layout(params)) + mean_bytes(1, jnp.float32, self.num_workers)
        return taken * a_round
