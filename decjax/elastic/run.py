"""A run whose members may leave and come back: the loop of `train.Run`, which goes on in the next view where a view ends."""

from collections.abc import Callable, Sequence
import contextlib
import functools
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np

from decjax import files
from decjax.elastic.trainer import ElasticTrainer, Trainers
from decjax.elastic.view import ViewChanged
from decjax.elastic.workers import Group
from decjax.errors import TrainingError
from decjax.train import checkpoint, metrics
from decjax.train import workdir as workdir_lib
from decjax.train.run import Outcome, Run
from decjax.train.state import State


class ElasticRun(Run):
    """A run, seen from one of its members; `train()` takes it to its end.

    One member of a view writes: rows of metrics, and checkpoints in the form of other runs, with a row for every slot. Whoever
    has no member has a copy of another's row there.

    Args:
        trainers: of the run.
        group: this member's part.
        workdir: of the run, which all members reach.

    Raises:
        CheckpointError: as `train.Run`.
        ConfigError: if the method cannot be cut at its messages, or the data cannot be read.
    """

    trainer: ElasticTrainer  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, trainers: Trainers, group: Group, workdir: str | os.PathLike):
        self.spec, self.group, self.workdir = trainers.spec, group, pathlib.Path(workdir)
        self._trainers = trainers
        self._wanted: Sequence[Callable[[Run], metrics.Tracker]] = ()
        self._trackers: list[metrics.Tracker] = []
        self._last_loss = np.nan
        self.state: Any = None  # until there is a replica
        self._held = contextlib.ExitStack()
        self._writing = False
        self.counters = {"time_s": 0.0, "bytes_sent_per_worker": 0.0, "first_step": 0}
        is_late, damage = group.membership.is_late, ""
        if not is_late and workdir_lib.steps_saved(self.workdir):
            group.membership.step, self.state, damage = self._restored()
        group.membership.ready(has_replica=not is_late)
        self._enter()
        self.start = self.done
        self.note = f"{damage}continuing from step {self.start}" if self.start else ""
        self._is_new = self.group.view.number > 1  # in a group that has taken steps before
        if self._is_new:
            self.note = f"taking part from step {self.start}"
        self.counters["corpus"] = self.trainer.data.fingerprint
        self._counted = self.trainer.bytes_by_usage(self.state)

    @property
    def first(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether this member writes."""
        return self.group.view.writer == self.group.membership.slot

    @functools.cached_property
    def checkpoints(self) -> checkpoint.Checkpoints:  # pyright: ignore[reportIncompatibleVariableOverride]
        if not self.first:  # It reads them if the training diverges.
            (self.workdir / "checkpoints").mkdir(parents=True, exist_ok=True)
        made = checkpoint.Checkpoints(self.workdir, keep=self.spec.checkpoint.keep, read_only=not self.first)
        return self._held.enter_context(made)

    # -- Views --------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Goes on in the next view that lasts until its fresh members have their replicas, with the state that this member had."""
        while True:
            view = self.group.enter()
            self.trainer = self._trainers.of(len(view.members))
            before = None if self.group.membership.slot in view.fresh else self.state or self.trainer.init()
            with contextlib.suppress(ViewChanged):
                self.state = self.trainer.adopt(before)
                break
        self.done, self._entered = view.step, time.monotonic()
        self.group.membership.step = view.step
        if self.first and not self._writing:
            self._take_over()

    def _restored(self) -> tuple[int, State, str]:
        """(step, this slot's row, what is said of damage) of the newest checkpoint that is not damaged."""
        slots = self.spec.workers
        abstract = self._trainers.of(slots).abstract
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype), abstract)
        with checkpoint.Checkpoints(self.workdir, read_only=True) as saved:
            step, (state, counters), damage = saved.newest(lambda step: saved.restore(step, like))
        self.counters |= counters
        return step, jax.tree.map(lambda x: x[self.group.membership.slot][None], state), damage

    def _take_over(self) -> None:
        """Begins to write, as the first member of the view."""
        self._writing = True
        is_new = self.group.view.number == 1
        self._held.enter_context((workdir_lib.claim if is_new else workdir_lib.take_over)(self.workdir, self.spec.document))
        self.__dict__.pop("checkpoints", None)
        if damaged := [step for step in workdir_lib.steps_saved(self.workdir) if is_new and step > self.done]:
            self.checkpoints.set_aside(damaged)
        self.start = self.done
        if rows := metrics.read(self.workdir):  # Another member wrote before.
            self.counters |= {name: rows[-1][name] for name in ("time_s", "bytes_sent_per_worker") if name in rows[-1]}
        if self._wanted:
            self._begun = time.monotonic() - self.counters["time_s"]
            self.note = f"process {self.group.membership.slot} writes from here on"
            self._track(self._wanted, self._held)

    def _regroup(self, caught: list[Any]) -> bool:
        while True:
            try:
                self._enter()
                self._logged = time.monotonic(), self.done
                return self._settle(self.done, caught)
            except ViewChanged:
                continue

    # -- The loop -----------------------------------------------------------------------------------------------------

    def train(self, trackers: Sequence[Callable[[Run], metrics.Tracker]] = ()) -> Outcome:
        self._wanted = trackers
        try:
            outcome = super().train(trackers)
            if outcome.is_old and not self._leave():
                self.group.membership.end()  # Nothing is left to write.
            return outcome
        except TrainingError:  # It ends all processes.
            self.group.membership.end()
            raise
        finally:
            self.group.membership.close()

    def _advance(self, caught) -> bool:
        stop = self._advanced(caught)
        while stop and self.done < self.spec.steps:
            self.checkpoints.finish()
            if self._leave():
                break
            stop = self._regroup(caught)
        return stop

    def _advanced(self, caught) -> bool:
        try:
            if self._is_new:  # The others settle the step at which the view begins, too.
                self._is_new = False
                return self._settle(self.done, caught)
            return super()._advance(caught)
        except ViewChanged:
            return self._regroup(caught)

    def _leave(self) -> bool:
        """Ends the run if this member writes, and waits for its end if not; false: the view has changed before."""
        if self.first:
            self.group.membership.end()
            return True
        try:
            self.group.membership.await_end()
        except ViewChanged:
            return False
        return True

    def _take(self, step, losses) -> float:
        compiling_s = super()._take(step, losses)
        self.group.membership.step = step + 1
        if time.monotonic() - self._entered > self.spec.elastic.heartbeat_s:  # Others come at once where there are spare processes.
            self._trainers.prepare(len(self.group.view.members) - 1, step)
        return compiling_s

    def _finish(self) -> Outcome:
        came, self._is_new = self._is_new, False
        while True:
            with contextlib.suppress(ViewChanged):
                if came:  # The last writer may have died before the checkpoint was whole.
                    self._logged = time.monotonic(), self.done
                    self._settle(self.done, [])
                outcome = super()._finish()
                if self._leave():
                    return outcome
            self._enter()
            came = True

    def _save(self, done: int) -> None:
        rows, view = self.workers.fetch(self.state), self.group.view
        if self.first and self.checkpoints.latest() != done:  # Otherwise a view has begun at a step that was saved before it.
            index_of = [view.index(slot) for slot in range(self.spec.workers)]
            source = np.array([slot % len(view.members) if index is None else index for slot, index in enumerate(index_of)])
            self.checkpoints.save(done, jax.tree.map(lambda x: jax.device_put(x[source]), rows), self.counters)

    def _record(self, kind: str, step: int, values: dict[str, float]) -> None:
        is_known = not np.isnan(values["loss"])  # No member has taken a step since it came.
        if self.first and is_known and step > self._recorded.get(kind, 0):
            self._recorded[kind] = step
            super()._record(kind, step, values)

    @functools.cached_property
    def _recorded(self) -> dict[str, int]:
        """The last step of which each kind of row is in the file."""
        return {row["kind"]: row["step"] for row in metrics.read(self.workdir)}

    def _row(self, *args) -> dict[str, float]:
        return super()._row(*args) | {"workers": len(self.group.view.members)}

    def _flush(self, losses) -> np.ndarray:
        own = [float(np.asarray(loss)[0]) for _, loss in losses]
        self._last_loss = float(np.mean(own)) if own else self._last_loss
        mean_N = self.workers.fetch(np.array([self._last_loss]))
        for worker in np.flatnonzero(np.isinf(mean_N)):
            self._diverged(f"loss is {mean_N[worker]} on worker {worker} by step {self.done}")
        return mean_N if np.isnan(mean_N).all() else mean_N[~np.isnan(mean_N)]

    def _stop_requested(self, caught, step: int) -> bool:
        if step % self.spec.log_every:
            return False
        return bool(self.workers.fetch(np.array([bool(caught)])).any())

    def _summary(self) -> dict | None:
        if self._is_new:  # The others compute it once more.
            return None
        with contextlib.suppress(ValueError):
            return files.read_json(self.workdir / "summary.json")
        return None
