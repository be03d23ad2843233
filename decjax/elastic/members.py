"""The `train.Members` of a run that continues from view to view, while members leave and rejoin."""

from collections.abc import Callable, Sequence
import time

import jax
import numpy as np

from decjax.elastic.trainer import ElasticTrainer, Trainers
from decjax.elastic.workers import Group
from decjax.train.members import LEFT, Counters, Members, NotFinite
from decjax.train.state import State
from decjax.typing import PyTree

SHARED = ("time_s", "began_s", "steps_s", "bytes_sent_per_worker", "first_step")  # counters that a member receives with a replica


class ElasticMembers(Members[ElasticTrainer]):
    """The members of a group.

    One member writes metrics and checkpoints. Checkpoints have the format of any run, with a row for each slot; a slot without a member
    has a copy of another member's row. If the writer cannot write, another member takes over.

    Args:
        trainers: of the run.
        group: of this process.
        launch: a name that is unique to the processes of a launch.
        say: called with messages for the user.
    """

    def __init__(self, trainers: Trainers, group: Group, launch: str, say: Callable[[str], None] = lambda text: None):
        self.spec, self.launch = trainers.spec, launch
        self._trainers, self._group, self._membership, self._say = trainers, group, group.membership, say
        self.trainer = trainers.of(self.spec.workers)
        self.restores, self.first, self.saves, self.alone = not self._membership.is_late, False, False, False
        self._cannot_write, self._writer, self._is_ready = False, -1, False
        self._last_loss, self._entered_s = np.nan, 0.0

    def facts(self) -> dict[str, float]:
        view, step = self._group.view, self._membership.step
        assert step is not None
        return {"workers": len(view.members), "batches": view.taken(step)}

    # -- Beginning ----------------------------------------------------------------------------------------------------

    def like(self) -> State:
        slots = self.spec.workers
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype), self._trainers.of(slots).abstract)

    def local(self, state: State) -> State:
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x[self._membership.slot])[None]), state)

    def init(self, params: PyTree) -> State:
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.like())  # Replaced when the first view begins.

    def enter(self, state: State | None, step: int, counters: Counters, left_out: Callable[[], None]) -> tuple[State, int]:
        if not self._is_ready:
            self._is_ready = True
            self._membership.step, self._membership.taken = step, step * self.spec.workers - counters.get(LEFT, 0)
            self._membership.ready(has_replica=self.restores)
        view = self._group.enter(left_out)
        self.joined = view.number > 1
        self.trainer = self._trainers.of(len(view.members))
        is_fresh = self._membership.slot in view.fresh
        state = self.trainer.adopt(None if is_fresh else self.trainer.init() if state is None else state)
        shared_NxC = self._gather(self._cannot_write, *(counters[name] for name in SHARED))
        source = view.members.index(view.source) if view.source else 0
        counters |= {name: type(counters[name])(value) for name, value in zip(SHARED, shared_NxC[source][1:], strict=True)}
        self._choose_writer(shared_NxC[:, 0])
        self._membership.step = view.step
        self._entered_s = time.monotonic()
        if self.first and self.joined and (text := self.trainer.stand_in):
            self._say(f"step {view.step}: {text}")
        return state, view.step

    def _choose_writer(self, unable_N: np.ndarray) -> None:
        """Choose the view's writer; if it cannot write, the first member that can, preferably not a fresh one."""
        view = self._group.view
        unable = {member.slot for member, unable in zip(view.members, unable_N, strict=True) if unable}
        order = sorted((member.slot for member in view.members), key=lambda slot: (slot != view.writer, slot in view.fresh, slot))
        self._writer = next((slot for slot in order if slot not in unable), -1)
        self.first = self.saves = self._writer == self._membership.slot

    def _gather(self, *values: float) -> np.ndarray:
        """Return the values of all members, [N, values]."""
        return self.trainer.workers.fetch(np.array([values], np.float64))

    # -- Steps --------------------------------------------------------------------------------------------------------

    def batch(self, step: int, counters: Counters) -> PyTree:
        return self.trainer.batch(step)  # The view has the position in the data.

    def note_step(self, steps: int) -> None:
        self._membership.step = steps
        # Not immediately: a spare process may join within seconds, so that there will not be fewer workers.
        if time.monotonic() - self._entered_s > self.spec.elastic.heartbeat_s:
            self._trainers.prepare(len(self._group.view.members) - 1, steps)

    def losses(self, pending: Sequence[tuple[int, jax.Array]]) -> tuple[np.ndarray, NotFinite | None]:
        local = [(step, float(np.asarray(loss)[0])) for step, loss in pending]
        bad_step, bad_loss = next(((step, loss) for step, loss in local if not np.isfinite(loss)), (-1, 0.0))
        self._last_loss = float(np.mean([loss for _, loss in local])) if local else self._last_loss
        has_loss = bool(local) or not np.isnan(self._last_loss)
        rows = self._gather(self._last_loss, has_loss, bad_step, bad_loss)
        bad = next((NotFinite(worker, int(row[2]), float(row[3])) for worker, row in enumerate(rows) if row[2] >= 0), None)
        return rows[rows[:, 1] > 0, 0], bad

    def rows(self, state: State, step: int, counters: Counters) -> Callable[[], State]:
        view, slots = self._group.view, self.spec.workers
        counters[LEFT] = step * slots - view.taken(step)
        rows = self.trainer.workers.fetch(self._trainers.of(slots).fitted(state))
        workers = [view.worker_of(slot) for slot in range(slots)]
        source = np.array([slot % len(view.members) if worker is None else worker for slot, worker in enumerate(workers)])
        return lambda: jax.tree.map(lambda x: jax.device_put(x[source]), rows)

    def any(self, condition: bool) -> bool:
        return bool(self._gather(condition).any())

    def has_written(self, error: Exception | None) -> bool:
        writer = self._writer
        self._cannot_write = self._cannot_write or error is not None
        self._choose_writer(self._gather(self._cannot_write)[:, 0])
        if error is None:
            return self._writer in (writer, -1)
        if self._writer == -1:
            raise error
        self._say(f"process {writer} cannot write, process {self._writer} does: {error}")
        return False

    # -- The end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        channel, writer = self._group.channel, self._group.view.worker_of(self._writer)
        for worker in range(channel.size):  # The writer ends the run once no member waits for a message.
            if worker != writer:
                channel.hand_over(np.zeros(1, np.uint8), worker, writer)
        if self.first:
            self._membership.end()
        else:
            self._membership.await_end()

    def end(self) -> None:
        self._membership.end()

    def close(self) -> None:
        self._membership.close()
