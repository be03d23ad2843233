"""The processes that train together: a fixed set, or a group that changes (`decjax.elastic.members`)."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from decjax import config
from decjax.train.state import State
from decjax.train.trainer import Trainer
from decjax.typing import PyTree

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)
Counters = dict[str, Any]  # of a run, by name, as in a checkpoint
LEFT = "batches_left"  # counter: batches of past steps that no worker has taken because workers were missing; they come next


class NotFinite(NamedTuple):
    """A loss that is not finite."""

    worker: int
    step: int
    loss: float


class Members(Generic[AnyTrainer]):
    """The processes that train together: here the fixed workers of a trainer, in a subclass a group that changes.

    Collectives of a group that changes may raise `errors.ViewChanged`, after which the run calls `enter` again.
    """

    spec: config.RunSpec  # of the run with all its workers
    trainer: AnyTrainer  # of the current workers
    launch: str = ""  # see `workdir.claim`
    restores: bool = True  # whether this process restores the newest checkpoint; otherwise `enter` returns another process's state
    joined: bool = False  # whether the group took steps before its last change
    saves: bool = True  # whether this process writes checkpoints, alone or with others
    first: bool  # whether this process writes metrics and the summary
    alone: bool  # whether this process need not agree with others on the step at which it stops

    def __init__(self, trainer: AnyTrainer):
        self.trainer, self.spec = trainer, trainer.spec
        self.first, self.alone = jax.process_index() == 0, jax.process_count() == 1

    def facts(self) -> dict[str, float]:
        """Return fields about the group for each row of metrics."""
        return {}

    def like(self) -> PyTree:
        """Return shapes, dtypes and shardings of a state in a checkpoint."""
        return self.trainer.abstract

    def local(self, state: State) -> State:
        """Return this process's part of a state that `Checkpoints.restore` returned for `like`."""
        return state

    def init(self, params: PyTree) -> State:
        """Return the initial state of all workers for the parameters of one model; zeros where `enter` sets it later."""
        return self.trainer.start(params)

    def enter(self, state: State | None, step: int, counters: Counters, left_out: Callable[[], None]) -> tuple[State, int]:
        """Begin with the current group. A collective.

        Args:
            state: this process's state; None at the start of a run.
            step: the next step of that state.
            counters: of this process, which are updated to those of the group.
            left_out: called if other processes continue without this one before it can begin.

        Returns:
            The state and the step to continue with.
        """
        if state is None:
            state = self.trainer.init()
        self.trainer.check_exchanges()
        return state, step

    def batch(self, step: int, counters: Counters) -> PyTree:
        """Return the examples of a step."""
        return self.trainer.batch(step, counters.get(LEFT, 0))

    def note_step(self, steps: int) -> None:
        """Record that `steps` steps have been taken. On `ViewChanged` the last one does not count."""

    def losses(self, pending: Sequence[tuple[int, jax.Array]]) -> tuple[np.ndarray, NotFinite | None]:
        """Return each worker's mean loss over the pending (step, loss_N), without workers that took no step. A collective."""
        fetched = [(step, self.trainer.workers.fetch_first(loss)) for step, loss in pending]
        for step, loss_N in fetched:
            for worker in np.flatnonzero(~np.isfinite(loss_N)):
                return loss_N, NotFinite(int(worker), step, float(loss_N[worker]))
        return np.mean([loss_N for _, loss_N in fetched], axis=0), None

    def rows(self, state: State, step: int, counters: Counters) -> Callable[[], State]:
        """Return a function that returns the state for a checkpoint after `step` steps; update `counters` for it. A collective."""
        return lambda: state

    def any(self, condition: bool) -> bool:
        """Return whether a condition holds in any process. A collective."""
        workers = self.trainer.workers
        return bool(workers.fetch(workers.whole.build(lambda worker: np.int32(condition))).any())

    def has_written(self, error: Exception | None) -> bool:
        """Return whether the last write succeeded; otherwise another process repeats it. A collective.

        Args:
            error: of this process's write, raised if no other process can write.
        """
        if error is not None:
            raise error
        return True

    def leave(self) -> None:
        """Leave a run that has finished or was stopped. On `ViewChanged` other processes still need this one."""

    def end(self) -> None:
        """Report that the run has ended with an error."""

    def close(self) -> None:
        """Close the connections to others."""
