"""What a mixer is, and wrappers of mixers."""

import abc
from collections.abc import Callable
import typing
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, mesh, options, phases, registry
from decjax.channel import Channel
from decjax.gossip.rounds import common_multiple, step_bytes
from decjax.options import Count, Fraction, Range
from decjax.registry import delegates, of_field
from decjax.topology import Round, Topology
from decjax.typing import PyTree

Pairs = tuple[tuple[int, int], ...]
Rounds = Annotated[int, Range(1, 2**8), "R ≥ 1, rounds per step"]
Step = int | jax.Array

SILENT = -1
"""The phase of a step that sends nothing and does not mix."""


class Linear(NamedTuple):
    """Mixing that is x <- Wx and nothing else, up to rounding.

    Attributes:
        matrix: `matrix(phase) -> W`, [N, N].
        pull: `pull(params, phase)`, Wx − x in float32 or wider, from the differences x_j − x_i. Its sum over workers is zero up to
            roundings of these differences, unlike that of the rounded Wx − x: a sum of pulls over many steps keeps the mean.
        num_bytes: `num_bytes(params, phase) -> (N,)`, bytes that each worker sends for a pull.
    """

    matrix: Callable[[int], np.ndarray]
    pull: Callable[[PyTree, int], PyTree]
    num_bytes: Callable[[PyTree, int], np.ndarray]


class Mixer(registry.Part, abc.ABC, kind="mixer"):
    """How parameters are mixed: its methods are called on each worker.

    A subclass defines `phases`, `exchange` and `num_bytes`, and overrides other members as needed. `Gossip` is the base class of mixers
    over a topology, `WrappedMixer` that of mixers that change another one.

    Attributes:
        order: the only order that the mixer is made for, see `orders`; empty if it is made for both.
        weights: whether workers have a `weight`.
        sharded: whether it may mix the shards of arrays that are divided among the devices of a worker, each by itself.
    """

    order: ClassVar[str] = ""
    weights: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    _wraps: ClassVar[bool] = False

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if not cls._wraps:  # Otherwise the methods of the wrapped mixer are mapped.
            mesh.map_by_shard(cls, init="state", exchange="state", combine="both", restart="state")

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """N, the number of workers."""

    @property
    @abc.abstractmethod
    def phases(self) -> range:
        """All values that `phase` takes."""

    def phase(self, step: Step) -> Any:
        """Return the phase of a step, an int or traced as the step is; None if the state determines it."""
        return step % len(self.phases)

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state, for parameters that are the same on all workers."""
        return ()

    @abc.abstractmethod
    def exchange(self, params: PyTree, state: PyTree, phase: int) -> PyTree:
        """Communicate, as no other method does; return (mixed, state), or what `combine` takes as `received`."""

    @mesh.by_shard("both")
    def combine(self, params: PyTree, received: PyTree, state: PyTree, phase: int, step: Step) -> tuple[PyTree, PyTree]:
        """Return (mixed, state), locally and at little cost; `step` counts all steps, also those that do not mix."""
        return received

    @abc.abstractmethod
    def num_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        """Return the bytes that each worker sends, [N], by formula; 0 where `usage` counts them."""

    def restart(self, average: PyTree, state: PyTree) -> PyTree:
        """Return the state, locally, after the parameters of all workers have been replaced by their average."""
        return state

    @property
    def settle(self) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]] | None:
        """`settle(mixed, stepped, state) -> (params, state)`, local: parameters after the optimizer has stepped; None: `stepped`."""
        return None

    @property
    def weight(self) -> Callable[[PyTree], jax.Array] | None:
        """`weight(state) -> y_i`, a scalar: workers agree on, and mixing keeps, Σ_i y_i x_i / Σ_i y_i; None: y_i = 1."""
        return None

    @property
    def linear(self) -> Linear | None:
        """W and the pull of neighbors, if mixing is x <- Wx and nothing else."""
        return None

    @property
    def usage(self) -> Callable[[PyTree], jax.Array] | None:
        """`usage(state) -> [phases]`, steps so far in each phase, if the state determines the phase."""
        return None

    @property
    def orders(self) -> tuple[str, ...]:
        """When it can exchange: "awc", while the gradient is computed; "atc", after the step. See `decjax.optim.decentralize`."""
        return (self.order,) if self.order else ("awc", "atc")

    @property
    def keeps_mean(self) -> bool:
        """Whether mixing keeps the mean over workers, weighted by `weight`."""
        return True

    @property
    def permutations(self) -> tuple[Pairs, ...] | None:
        """Pairs (source, target) of workers of each message; None: those of the topology."""
        return None


class Gossip(Mixer):
    """Base of mixers over a topology.

    Attributes:
        topology: the graph of each round.
        channel: how parameters travel.
    """

    topology: Topology
    channel: Channel = Channel()

    @property
    def num_workers(self) -> int:
        return self.topology.num_workers

    @property
    def phases(self) -> range:
        return range(self.topology.period)

    def due(self, phase: int) -> list[int]:
        """Return the indices of the topology's rounds in a step, in order."""
        return [phase]

    def rounds_due(self, phase: int) -> list[Round]:
        """Return the topology's rounds in a step, in order."""
        return [self.topology.rounds[index] for index in self.due(phase)]

    def layout(self, params: PyTree) -> buckets.Layout:
        """Return the buckets in which parameters travel, after a check of the parameters and the number of workers."""
        self.channel.check(params, self.num_workers)
        return self.channel.layout(params, multiple_of=common_multiple(self.topology))

    def init(self, params: PyTree) -> PyTree:
        self.channel.check(params, self.num_workers)
        return ()

    def num_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        return step_bytes(self.topology, self.due(phase), self.layout(params))

    def mapped(self, fn: Callable[[jax.Array], jax.Array], params: PyTree, wide: bool = False) -> PyTree:
        """Return parameters with a function applied to each bucket; if `wide`, in the types of its results."""
        layout = self.layout(params)
        return layout.unpack([fn(x_P) for x_P in layout.pack(params)], like=params, wide=wide)

    def pull_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        """Return the bytes that each worker sends for a pull by `rounds.difference`, [N]; see `Linear`."""
        layout = self.layout(params)
        inside = sum(2 * (L - 1) / L * layout.num_bytes for L in (round_.group_size for round_ in self.rounds_due(phase)))
        return step_bytes(self.topology, self.due(phase), layout) + inside


def mix(mixer: Mixer, params: PyTree, state: PyTree, phase: int | None, step: Step) -> tuple[PyTree, PyTree]:
    """Exchange and combine: return the mixed parameters and the new state. A phase of None is for mixers with `usage` only."""
    phase = typing.cast(int, phase)
    return mixer.combine(params, mixer.exchange(params, state, phase), state, phase, step)


def mix_due(mixer: Mixer, params: PyTree, state: PyTree, phase: int | None, step: jax.Array) -> tuple[PyTree, PyTree]:
    """Return `mix` in the given static phase.

    If the phase is None, it is that of the traced step, by a conditional over all phases, unless the mixer's state determines it.
    """
    phases.check(mixer, phase)
    if phase is not None or mixer.usage:
        return mix(mixer, params, state, phase, step)
    branches = [lambda params, state, phase=phase: mix(mixer, params, state, phase, step) for phase in mixer.phases]
    if len(branches) == 1:
        return branches[0](params, state)
    return jax.lax.switch(mixer.phase(step) - mixer.phases.start, branches, params, state)


# -- Wrappers ---------------------------------------------------------------------------------------------------------


@delegates(
    "inner", "phase", "init", "combine", "restart", "settle", "weight", "linear", "usage", "orders", "keeps_mean", "permutations"
)
class WrappedMixer(Mixer):
    """Base of mixers that change some members of another one.

    Attributes:
        inner: the other one.
    """

    _wraps = True

    inner: Mixer

    exchange = of_field("inner.exchange")
    num_bytes = of_field("inner.num_bytes")

    @property
    def num_workers(self):
        return self.inner.num_workers

    @property
    def phases(self):
        return self.inner.phases

    def __str__(self) -> str:
        return str(self.inner)


class Every(WrappedMixer):
    """A mixer that mixes in steps p−1, 2p−1, … only, for a period p; see `every`."""

    period: int

    @property
    def phases(self):
        return range(SILENT, self.inner.phases.stop)

    def phase(self, step):
        due = self.inner.phase(step // self.period)
        mixes = (step + 1) % self.period == 0
        return jnp.where(mixes, due, SILENT) if isinstance(step, jax.Array) else (due if mixes else SILENT)

    def exchange(self, params, state, phase):
        return () if phase == SILENT else self.inner.exchange(params, state, phase)

    def combine(self, params, received, state, phase, step):
        return (params, state) if phase == SILENT else self.inner.combine(params, received, state, phase, step)

    def num_bytes(self, params, phase):
        return np.zeros(self.num_workers) if phase == SILENT else self.inner.num_bytes(params, phase)

    @property
    def linear(self):
        return None


class Damped(WrappedMixer):
    """A mixer with strength γ, a constant or a schedule; see `damp`."""

    strength: float | Callable[[Step], float | jax.Array]

    def combine(self, params, received, state, phase, step):
        mixed, state = self.inner.combine(params, received, state, phase, step)
        gamma = self.strength(step) if callable(self.strength) else self.strength
        return buckets.of_floating(lambda x, y: x + gamma * (y - x), params, mixed), state

    @property
    def linear(self):
        linear, gamma = self.inner.linear, self.strength
        if linear is None or callable(gamma):
            return None
        return linear._replace(
            matrix=lambda phase: gamma * (W_NxN := linear.matrix(phase)) + (1 - gamma) * np.eye(len(W_NxN)),
            pull=lambda params, phase: buckets.of_floating(lambda pull: gamma * pull, linear.pull(params, phase)),
        )


class Unrounded(WrappedMixer):
    """A mixer whose results of narrow parameters, such as bfloat16, stay in float32 where mixing is linear.

    For methods that step along Wx − x: a momentum would accumulate what rounding Wx to the type of x adds to the mean of Wx − x.
    Parameters of float32 and wider are mixed as before.
    """

    def exchange(self, params, state, phase):
        if not (linear := self._linear_for(params)):
            return self.inner.exchange(params, state, phase)
        return buckets.in_float32(jnp.add, params, linear.pull(params, phase)), state

    def combine(self, params, received, state, phase, step):
        return received if self._linear_for(params) else self.inner.combine(params, received, state, phase, step)

    def num_bytes(self, params, phase):
        return (self._linear_for(params) or self.inner).num_bytes(params, phase)

    def _linear_for(self, params: PyTree) -> Linear | None:
        is_narrow = lambda x: buckets.is_floating(x) and x.dtype != buckets.wide_dtype(x)
        return self.inner.linear if any(map(is_narrow, jax.tree.leaves(params))) else None


class Restartless(WrappedMixer):
    """A mixer whose state remains when the parameters of all workers are replaced by their average.

    For methods that also mix other values than parameters, which do not become equal then.
    """

    restart = Mixer.restart


@options.checked
def every(mixer: Mixer, period: Count) -> Mixer:
    """Return the mixer that mixes in steps p−1, 2p−1, … only, for a period p ≥ 1; other steps send nothing.

    Reference: Zhang et al. 2020, adaptive serverless learning (Adam with gossip in every p-th step, order "atc").
    """
    if period == 1:
        return mixer
    if mixer.usage or "atc" not in mixer.orders:
        raise ValueError(
            f"mixing every={period} steps needs messages that are known beforehand and arrive in their own step, unlike those of {mixer}; "
            "use every=1, or mixer 'exact' or 'push_sum'"
        )
    return Every(mixer, period)


@options.checked
def damp(mixer: Mixer, strength: Fraction | Callable[[Step], float | jax.Array]) -> Mixer:
    """Return the mixer with strength γ: x_i <- γ (Wx)_i + (1−γ) x_i.

    Args:
        mixer: gives Wx; not one with weights, such as `push_sum`.
        strength: γ in [0, 1], or a schedule `step -> γ`, such as γ = (lr / lr_max)^p for a learning-rate schedule.

    Raises:
        ValueError: for a constant γ outside [0, 1], or a mixer with weights.
    """
    if not callable(strength) and strength == 1:
        return mixer
    if mixer.weight:
        raise ValueError(
            f"mixing strength other than 1 would not damp the weights of {mixer}; use strength 1, or mixer 'push_sum' with its own gamma"
        )
    return Damped(mixer, strength)


def unrounded(mixer: Mixer) -> Mixer:
    """Return the mixer with results in float32 where mixing is linear; see `Unrounded`."""
    return Unrounded(mixer) if mixer.linear else mixer
