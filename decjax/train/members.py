"""The processes that train together in a run: the same from start to end, or a group that changes (`decjax.elastic.members`)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from decjax import config
from decjax.train.state import State
from decjax.train.trainer import Trainer

LEFT = "batches_left"  # a counter: batches of the steps so far that no worker has taken, since workers were missing; they come next


class NotFinite(NamedTuple):
    """The first loss that is not finite."""

    worker: int
    step: int
    loss: float


class Members(Protocol):
    """The processes that train together. A collective may raise `errors.ViewChanged`; then the run calls `enter` again."""

    spec: config.RunSpec  # of the run with all its workers
    launch: str  # see `workdir.claim`
    restores: bool  # whether this process restores the newest checkpoint; otherwise `enter` returns the state of another process
    joined: bool  # whether the group took steps before its last change

    @property
    def trainer(self) -> Trainer:
        """The trainer of the workers that take part now."""
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
        """Whether this process takes part in writing checkpoints."""
        ...

    @property
    def first(self) -> bool:
        """Whether this process writes metrics and the summary."""
        ...

    @property
    def alone(self) -> bool:
        """Whether this process stops on a signal without agreeing with others."""
        ...

    def own(self, state: Any) -> Any:
        """This process's part of a state that `Checkpoints.restore` has read as `like`."""
        ...

    def fresh(self, params: Any) -> State:
        """The initial state with the parameters of one model, as NumPy arrays [N, …]; zeros where `enter` initializes it later."""
        ...

    def resized(self, state: State) -> Any:
        """This process's part of a state of NumPy arrays [N, …]."""
        ...

    def enter(self, state: Any, step: int, counters: dict[str, Any], left_out: Callable[[], None]) -> tuple[State, int]:
        """Begin with the present group. A collective.

        Args:
            state: this process's state; None at the start of a run.
            step: the next step of that state.
            counters: this process's, which are replaced by those of the group.
            left_out: called if other processes continue without this one before it can begin.

        Returns:
            The state and the step to continue with.
        """
        ...

    def batch(self, step: int, counters: dict[str, Any]) -> Any:
        """The examples of a step."""
        ...

    def took(self, steps: int) -> None:
        """Note the number of steps taken. On `ViewChanged` the last step does not count."""
        ...

    def losses(self, pending: Sequence[tuple[int, jax.Array]]) -> tuple[np.ndarray, NotFinite | None]:
        """The mean loss of each worker over the pending steps, (step, loss_N), without workers that have taken none. A collective."""
        ...

    def rows(self, state: State, step: int, counters: dict[str, Any]) -> Callable[[], Any]:
        """A function that returns the state as a checkpoint holds it after `step` steps; updates `counters` for it. A collective."""
        ...

    def any(self, condition: bool) -> bool:
        """Whether a condition holds in any process. A collective."""
        ...

    def has_written(self, error: Exception | None) -> bool:
        """Whether the last write succeeded; if not, another process must repeat it. A collective.

        Args:
            error: the error of this process's write, which is raised if no other process can write.
        """
        ...

    def leave(self) -> None:
        """Leave a run that is over or stops. On `ViewChanged` others still need this process."""
        ...

    def end(self) -> None:
        """Report to the others that the run has ended with an error."""
        ...

    def close(self) -> None:
        """Close the connections to others."""
        ...


class Static:
    """The workers of a trainer, the same from start to end."""

    launch, restores, joined = "", True, False

    def __init__(self, trainer: Trainer):
        self.trainer, self.spec = trainer, trainer.spec
        self.facts: dict[str, float] = {}
        self.saves, self.first, self.alone = True, jax.process_index() == 0, jax.process_count() == 1

    @property
    def like(self) -> State:
        return self.trainer.abstract

    def own(self, state: State) -> State:
        return state

    def fresh(self, params: Any) -> State:
        return self.trainer.workers.fetch(self.trainer.start(params))

    def resized(self, state: State) -> State:
        return self.trainer.workers.place(state)

    def enter(self, state: State | None, step: int, counters: dict[str, Any], left_out: Callable[[], None]) -> tuple[State, int]:
        if state is None:
            state = self.trainer.init()
        self.trainer.check_exchanges()
        return state, step

    def batch(self, step: int, counters: dict[str, Any]) -> Any:
        return self.trainer.batch(step, counters.get(LEFT, 0))

    def took(self, steps: int) -> None:
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
