"""Who trains together in a run: the same workers from its start to its end, or a group that changes, as `decjax.elastic.members` has it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from decjax import config
from decjax.train.state import State
from decjax.train.trainer import Trainer

LEFT = "batches_left"  # a counter: batches of the steps so far that no worker has taken, since there were fewer; they come next


class NotFinite(NamedTuple):
    """The first loss that is not finite."""

    worker: int
    step: int
    loss: float


class Members(Protocol):
    """Who trains together. Methods that are collectives may raise `errors.ViewChanged`; then the run calls `enter` again."""

    spec: config.RunSpec  # of the run with all its workers
    launch: str  # see `workdir.claim`
    restores: bool  # whether this process begins with a checkpoint; else `enter` gives it another one's state
    joined: bool  # whether the group has taken steps before it was what it is now

    @property
    def trainer(self) -> Trainer:
        """The trainer of the workers that take part now."""
        ...

    @property
    def facts(self) -> dict[str, float]:
        """What each row of metrics says of the group."""
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
        """Whether this process writes everything else."""
        ...

    @property
    def alone(self) -> bool:
        """Whether this process decides alone when it stops."""
        ...

    def own(self, state: Any) -> Any:
        """This process's part of a state that `Checkpoints.restore` has read as `like`."""
        ...

    def fresh(self, params: Any) -> State:
        """The state before the first step from the parameters of one model, as NumPy arrays [N, …]; `enter` makes what it keeps of it."""
        ...

    def resized(self, state: State) -> Any:
        """This process's part of a state of NumPy arrays [N, …]."""
        ...

    def enter(self, state: Any, step: int, counters: dict[str, Any]) -> tuple[State, int]:
        """The state and the step with which this process goes on with the present group, from its own, None at the start of a run.
        A collective. `counters` become those of the group."""
        ...

    def batch(self, step: int, counters: dict[str, Any]) -> Any:
        """The examples of a step."""
        ...

    def took(self, steps: int) -> None:
        """Says that so many steps are taken; `ViewChanged`: the last of them does not count."""
        ...

    def losses(self, pending: Sequence[tuple[int, jax.Array]]) -> tuple[np.ndarray, NotFinite | None]:
        """The mean loss of each worker in the pending steps, (step, loss_N); workers that have taken none are left out. A collective."""
        ...

    def rows(self, state: State, step: int, counters: dict[str, Any]) -> Callable[[], Any]:
        """Makes the state as a checkpoint after so many steps holds it; `counters` get what belongs to it. A collective."""
        ...

    def any(self, condition: bool) -> bool:
        """Whether a condition holds in any process. A collective."""
        ...

    def has_written(self, error: Exception | None) -> bool:
        """Whether what was to be written is; false: another process has to. A collective; it raises the error if no other can."""
        ...

    def leave(self) -> None:
        """Ends this process's part in a run that is over or stops; `ViewChanged`: others need it once more."""
        ...

    def end(self) -> None:
        """Tells the others that the run has ended with an error."""
        ...

    def close(self) -> None:
        """Ends the connections to others."""
        ...


class Static:
    """The workers of a trainer, from the start to the end."""

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

    def enter(self, state: State | None, step: int, counters: dict[str, Any]) -> tuple[State, int]:
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
