"""Base classes of training methods: an optimizer, what is exchanged around it, and when."""

import abc
from collections.abc import Callable
import dataclasses
import functools
import typing
from typing import Any, ClassVar, Literal

import jax
import numpy as np
import optax

from decjax import gossip, mesh, reduce, registry
from decjax.optim.memories import transformation
from decjax.registry import Requirement
from decjax.typing import PyTree

Order = Literal["awc", "atc"]
ORDERS: tuple[Order, ...] = typing.get_args(Order)
Exchange = Callable[[PyTree, PyTree, int], PyTree]  # (params, state, phase) -> received
Hook = Callable[[PyTree, jax.Array, int], PyTree]  # (state, [N, …], loss_N, step) -> state


class Method(registry.Part, abc.ABC, kind="method"):
    """A training method: what is done with gradients and parameters, and what is sent for it.

    A subclass defines `init`, `update`, `phase` and `num_bytes`, and overrides other members as needed. `Wrapping` is the base class of
    methods that wrap an optimizer, `Mixing` of those that mix parameters, `Reducing` of those that average over all workers.

    These fields are filled in by their names, all others are options: `inner`, the optimizer; `mixer`; `reducer`; `num_workers`, N;
    `learning_rate`, by step; `share`, the learning rate ÷ its peak, by step; `clip`, which clips each worker's own gradient; `norm`, the
    norm of a tree of which each pipeline stage holds a part; `channel`, the axis of the workers and the seed; `units`, the parameters of
    a model's hidden units (see `tasks.Task`).

    Further traits: `default_mixer`, `default_reducer` and `default_topology`, used where a config names none; `like`, the optimizer
    whose tuned learning rate fits; `warm`, the reducer needs a `start`; `anchored`, each worker has slow parameters of its own; `alone`,
    nothing is sent.

    Attributes:
        averages_gradients: whether all that is sent are averages of gradients, so that replicas stay equal.
        chooses: the kinds of parts that a config chooses for it, derived from the fields.
    """

    averages_gradients: ClassVar[bool] = False
    chooses: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **others: Any) -> None:
        kinds = {"mixer": "mixer", "reducer": "reducer", "inner": "optimizer"}
        cls.chooses = tuple(
            kind for field, kind in kinds.items() if any(field in base.__annotations__ for base in cls.__mro__[:-1])
        )
        super().__init_subclass__(**others)

    @abc.abstractmethod
    def init(self, params: PyTree) -> PyTree:
        """Return a worker's state before the first step."""

    @abc.abstractmethod
    def update(
        self, grads: PyTree, state: PyTree, params: PyTree, *, phase: int | None = None, received: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """Return a worker's (updates, state) from its gradient, as an optax transformation does.

        Args:
            grads: the gradient at `view`.
            state: of the step before.
            params: the parameters.
            phase: `phase(step)`.
            received: the result of `exchange`, if it was run by another program.
            **extra: passed to the optimizer.
        """

    @abc.abstractmethod
    def phase(self, step: int) -> int | None:
        """Return the phase of a step, a static int; None if it is traced or the state decides on it."""

    @abc.abstractmethod
    def num_bytes(self, params: PyTree, phase: int | None) -> np.ndarray:
        """Return the bytes that each worker sends, (N,), by formula."""

    @property
    def exchange(self) -> Exchange | None:
        """`exchange(params, state, phase) -> received`, all communication of a step, if it does not need the step's gradient."""
        return None

    @property
    def view(self) -> Callable[[PyTree, PyTree], PyTree] | None:
        """`view(params, state) -> params`, local: where a worker takes its gradient; None: at its own parameters."""
        return None

    @functools.cached_property
    def communicator(self) -> gossip.Mixer | reduce.Reducer | None:
        """The mixer or reducer with the phases of the method's steps, whose state is `state.mixer` or `state.reducer`."""
        return None

    # -- Derived ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation, whose update takes `phase` and `received`."""
        return transformation(self.init, self.update, moves=not self.averages_gradients)

    @property
    def replica_mixer(self) -> gossip.Mixer | None:
        """The mixer with the weights of replicas, which is restarted when replicas are averaged."""
        return self.communicator if isinstance(self.communicator, gossip.Mixer) else None

    @property
    def phases(self) -> range:
        """The phases that `usage` counts."""
        return self.communicator.phases if self.communicator else range(0)

    @property
    def usage(self) -> Callable[[PyTree], jax.Array] | None:
        """`usage(state) -> [phases]`, steps so far in each of `phases`, if the state decides on the phase; else None."""
        usage = self.communicator and self.communicator.usage
        field = "mixer" if self.replica_mixer else "reducer"
        return usage and (lambda state: usage(getattr(state, field)))

    @property
    def between_steps(self) -> Callable[[mesh.Workers], Hook] | None:
        """`between_steps(workers)` returns a function that a training loop calls after each step, if the reducer needs it."""
        hook_of = self.communicator.between_steps if isinstance(self.communicator, reduce.Reducer) else None

        def between_steps(workers: mesh.Workers) -> Hook:
            assert hook_of is not None
            hook = hook_of(workers, lambda step: step)
            return lambda state, loss_N, step: state._replace(reducer=hook(state.reducer, loss_N, step))

        return hook_of and between_steps


class Wrapping(Method):
    """Base of methods that wrap an optimizer.

    Attributes:
        inner: any optax optimizer, clipping included.
    """

    inner: optax.GradientTransformation

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The wrapped optimizer, which takes extra arguments."""
        return optax.with_extra_args_support(self.inner)


class Mixing(Method):
    """Base of methods that mix parameters with neighbors.

    Attributes:
        mixer: what is exchanged, and how.
    """

    mixer: gossip.Mixer

    @functools.cached_property
    def communicator(self) -> gossip.Mixer:
        return self.mixer

    def phase(self, step):
        return self.communicator.phase(step)

    def num_bytes(self, params, phase):
        return self.communicator.num_bytes(params, typing.cast(int, phase))


class Ordered(Mixing):
    """Base of methods that mix before or after the step; see `Decentralized`.

    Attributes:
        order: "awc" mixes before the step, so that the exchange overlaps with the gradient; "atc" mixes after the step.
    """

    _: dataclasses.KW_ONLY
    order: Order = "awc"

    def check_requirements(self, *more: Requirement) -> None:
        super().check_requirements(*more)
        check_order(self.mixer, self.order)

    @property
    def exchange(self) -> Exchange | None:
        mix = lambda params, state, phase: self.communicator.exchange(params, state.mixer, phase)
        return mix if self.order == "awc" else None


class OfTwo(gossip.Restartless):
    """A mixer of parameters and of another tree of that shape, by the size of the parameters.

    Its state remains when parameters are averaged, since the other trees do not become equal.
    """

    def num_bytes(self, params, phase):
        return self.inner.num_bytes((params, params), phase)


class Reducing(Method):
    """Base of methods that average over all workers.

    Attributes:
        reducer: how values are averaged.
        num_workers: N.
    """

    reducer: reduce.Reducer
    num_workers: int

    @functools.cached_property
    def communicator(self) -> reduce.Reducer:
        return self.reducer

    def phase(self, step):
        return self.communicator.phase(step)

    def num_bytes(self, params, phase):
        return self.communicator.num_bytes(params, self.num_workers, phase)


# -- Checks -----------------------------------------------------------------------------------------------------------


def check_update(params: PyTree, order: str = "", phase: int | None = None, received: PyTree = None) -> None:
    """Raise a ValueError if `params` is missing, or `received` comes with an order or a phase that does not allow it."""
    if params is None:
        raise ValueError("params=None, but the update needs them; call update(grads, state, params)")
    if received is not None and (order != "awc" or phase is None):
        raise ValueError(f"received needs order 'awc' and a static phase, got order {order!r} and phase {phase}")


def known_phase(phase: int | None) -> int:
    """Return the phase of a step; a ValueError if it is missing, for methods whose phase is always static."""
    if phase is None:
        raise ValueError("phase=None: this method needs the phase of a step; call update(…, phase=method.phase(step))")
    return phase


def check_order(mixer: gossip.Mixer, order: str) -> None:
    """Raise a ValueError for an order that the mixer is not made for."""
    if order not in mixer.orders:
        raise ValueError(f"order {order!r}: {mixer} is made for order {mixer.orders[0]!r}; use that")


def _of_mixer(needs: str, holds: Callable[[gossip.Mixer], bool], fix: str = "use mixer 'exact' or 'choco'") -> Requirement:
    return Requirement("mixer", needs, holds, fix)


MIXES_AFTER = _of_mixer("a mixer that can mix after the step", lambda mixer: "atc" in mixer.orders)
KEEPS_MEAN = _of_mixer("a mixer of this step's parameters", lambda mixer: mixer.keeps_mean)
LEAVES_STEP = _of_mixer("a mixer that need not see every step", lambda mixer: mixer.settle is None)
KNOWN_MESSAGES = _of_mixer("a mixer whose messages are known beforehand", lambda mixer: not mixer.usage, "use mixer 'exact'")
KNOWN_AVERAGES = Requirement(
    "reducer", "a reducer whose messages are known beforehand", lambda reducer: not reducer.usage, "use reducer 'codec' or 'mean'"
)
