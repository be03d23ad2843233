"""The processes that train together: a fixed set (`Static`), or a group that changes (`decjax.elastic.members`)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from decjax import config
from decjax.train.state import State
from decjax.train.trainer import Trainer

LEFT = "batches_left"  # counter: batches of past steps that no worker has taken because workers were missing; they come next


class NotFinite(NamedTuple):
    """A loss that is not finite."""

    worker: int
    step: int
    loss: float


class Members(Protocol):
    """The processes that train together. Collectives may raise `errors.ViewChanged`, after which the run calls `enter` again."""

    spec: config.RunSpec  # of the run with all its workers
    launch: str  # see `workdir.claim`
    restores: bool  # whether this process restores the newest checkpoint; otherwise `enter` returns another process's state
    joined: bool  # whether the group took steps before its last change

    @property
    def trainer(self) -> Trainer:
        """The trainer of the current workers."""
        ...

    @property
    def facts(self) -> dict[str, float]:
        """Fields about the group for each row of metrics."""
        ...

    @property
    def like(self) -> Any:
        """Shapes, dtypes and shardings of a state in a checkpoint."""
        ...

    @property
    def saves(self) -> bool:
        """Whether this process writes checkpoints, alone or with others."""
        ...

    @property
    def first(self) -> bool:
        """Whether this process writes metrics and the summary."""
        ...

    @property
    def alone(self) -> bool:
        """Whether this process need not agree with others on the step at which it stops."""
        ...

    def local(self, state: Any) -> Any:
        """Return this process's part of a state that `Checkpoints.restore` returned for `like`."""
        ...

    def init(self, params: Any) -> State:
        """Return the initial state for the parameters of one model, as NumPy arrays [N, …]; zeros where `enter` sets it later."""
        ...

    def place(self, state: State) -> Any:
        """Return this process's part of a state of NumPy arrays [N, …], on its devices."""
        ...

    def enter(self, state: Any, step: int, counters: dict[str, Any], left_out: Callable[[], None]) -> tuple[State, int]:
        """Begin with the current group. A collective.

        Args:
            state: this process's state; None at the start of a run.
            step: the next step of that state.
            counters: of this process, which are updated to those of the group.
            left_out: called if other processes continue without this one before it can begin.

        Returns:
            The state and the step to continue with.
        """
        ...

    def batch(self, step: int, counters: dict[str, Any]) -> Any:
        """Return the examples of a step."""
        ...

    def note_step(self, steps: int) -> None:
        """Record that `steps` steps have been taken. On `ViewChanged` the last one does not count."""
        ...

    def losses(self, pending: Sequence[tuple[int, jax.Array]]) -> tuple[np.ndarray, NotFinite | None]:
        """Return each worker's mean loss over the pending (step, loss_N), without workers that took no step. A collective."""
        ...

    def rows(self, state: State, step: int, counters: dict[str, Any]) -> Callable[[], Any]:
        """Return a function that returns the state for a checkpoint after `step` steps; update `counters` for it. A collective."""
        ...

    def any(self, condition: bool) -> bool:
        """Return whether a condition holds in any process. A collective."""
        ...

    def has_written(self, error: Exception | None) -> bool:
        """Return whether the last write succeeded; otherwise another process repeats it. A collective.

        Args:
            error: of this process's write, raised if no other process can write.
        """
        ...

    def leave(self) -> None:
        """Leave a run that has finished or was stopped. On `ViewChanged` other processes still need this one."""
        ...

    def end(self) -> None:
        """Report that the run has ended with an error."""
        ...

    def close(self) -> None:
        """Close the connections to others."""
        ...


class Static:
    """The fixed workers of a trainer."""

    launch, restores, joined = "", True, False

    def __init__(self, trainer: Trainer):
        self.trainer, self.spec = trainer, trainer.spec
        self.facts: dict[str, float] = {}
        self.saves, self.first, self.alone = True, jax.process_index() == 0, jax.process_count() == 1

    @property
    def like(self) -> State:
        return self.trainer.abstract

    def local(self, state: State) -> State:
        return state

    def init(self, params: Any) -> State:
        return self.trainer.workers.fetch(self.trainer.start(params))

    def place(self, state: State) -> State:
        return self.trainer.workers.place(state)

    def enter(self, state: State | None, step: int, counters: dict[str, Any], left_out: Callable[[], None]) -> tuple[State, int]:
        if state is None:
            state = self.trainer.init()
        self.trainer.check_exchanges()
        return state, step

    def batch(self, step: int, counters: dict[str, Any]) -> Any:
        return self.trainer.batch(step, counters.get(LEFT, 0))

    def note_step(self, steps: int) -> None:
        pass

    def losses(self, pending: Sequence[tuple[int, jax.Array]]) -> tuple[np.ndarray, NotFinite | None]:
        fetched = [(step, self.trainer.workers.fetch_first(loss)) for step, loss in pending]
        for step, loss_N in fetched:
            for worker in np.flatnonzero(~np.isfinite(loss_N)):
                return loss_N, NotFinite(int(worker), step, float(loss_N[worker]))
        return np.mean([loss_N for _, loss_N in fetched], axis=0), None

    def rows(self, state: State, step: int, counters: dict[str, Any]) -> Callable[[], State]:
        return lambda: state

    def any(self, condition: bool) -> bool:
        workers = self.trainer.workers
        return bool(workers.fetch(workers.whole.build(lambda worker: np.int32(condition))).any())

    def has_written(self, error: Exception | None) -> bool:
        if error is not None:
            raise error
        return True

    def leave(self) -> None:
        pass

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass
