"""A run whose members may leave and come back: the loop of `train.Run`, which goes on in the next view where a view ends."""

from collections.abc import Callable, Sequence
import contextlib
import functools
import json
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np

from decjax import config
from decjax.elastic import trainer as trainer_lib
from decjax.elastic.view import ViewChanged
from decjax.elastic.workers import Group
from decjax.train import checkpoint, metrics
from decjax.train.run import Outcome, Run
from decjax.train.state import State


class ElasticRun(Run):
    """A run, seen from one of its members; `train()` takes it to its end.

    One member of a view writes: rows of metrics, and checkpoints in the form of other runs, with a row for every slot. Whoever
    has no member has a copy of another's row there.

    Args:
        spec: of the run with all slots filled.
        group: this member's part.
        workdir: of the run, which all members reach.

    Raises:
        CheckpointError: as `train.Run`.
        ConfigError: if the method cannot be cut at its messages, or the data cannot be read.
    """

    trainer: trainer_lib.ElasticTrainer  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, spec: config.RunSpec, group: Group, workdir: str | os.PathLike):
        self.spec, self.group, self.workdir = spec, group, pathlib.Path(workdir)
        self._wanted: Sequence[Callable[[Run], metrics.Tracker]] = ()
        self._trackers: list[metrics.Tracker] = []
        self._last_loss = np.nan
        self._held = contextlib.ExitStack()
        self._writing = False
        steps = checkpoint.complete_steps(self.workdir)
        self.start = max(steps, default=0)
        group.membership.step = self.start
        group.membership.ready(has_replica=not group.membership.is_late)
        self.counters = {"time_s": 0.0, "bytes_sent_per_worker": 0.0, "first_step": 0}
        self._enter(None)
        self.start = self.done
        self.note = f"continuing from step {self.start}" if self.start else ""
        if self.group.view.number > 1:
            self.note = f"taking part from step {self.start}"
        self.counters["corpus"] = self.trainer.data.fingerprint
        self._counted = self.trainer.bytes_by_usage(self.state)

    @property
    def first(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether this member writes."""
        return self.group.view.writer == self.group.membership.slot

    @functools.cached_property
    def checkpoints(self) -> checkpoint.Checkpoints:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._held.enter_context(
            contextlib.closing(checkpoint.Checkpoints(self.workdir, keep=self.spec.checkpoint.keep, read_only=not self.first))
        )

    # -- Views --------------------------------------------------------------------------------------------------------

    def _enter(self, before: State | None) -> None:
        """Goes on in the next view with the state that this member had before, if any."""
        view = self.group.enter()
        data = None if before is None else self.trainer.data
        self.trainer = trainer_lib.of_view(self.spec, self.group, data)
        is_fresh = self.group.membership.slot in view.fresh
        if before is None and not is_fresh:
            before = self._restored() if view.step else self.trainer.init()
        self.state = self.trainer.adopt(None if is_fresh else before)
        self.done = view.step
        if self.first and not self._writing:
            self._take_over()

    def _restored(self) -> State:
        """This slot's row of the newest checkpoint."""
        slots = self.spec.workers
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype), self.trainer.abstract)
        with contextlib.closing(checkpoint.Checkpoints(self.workdir, read_only=True)) as saved:
            state, counters = saved.restore(self.group.view.step, like)
        self.counters |= counters
        return jax.tree.map(lambda x: x[self.group.membership.slot][None], state)

    def _take_over(self) -> None:
        """Begins to write, as the first member of the view."""
        self._writing = True
        claim = checkpoint.claim if self.group.view.number == 1 else checkpoint.take_over
        self._held.enter_context(claim(self.workdir, self.spec.document))
        self.__dict__.pop("checkpoints", None)
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
                self._enter(self.state)
                self._logged = time.monotonic(), self.done
                return self._settle(self.done, caught)
            except ViewChanged:
                continue

    # -- The loop -----------------------------------------------------------------------------------------------------

    def train(self, trackers: Sequence[Callable[[Run], metrics.Tracker]] = ()) -> Outcome:
        self._wanted = trackers
        try:
            return super().train(trackers)
        finally:
            self.group.membership.finish()

    def _advance(self, caught) -> bool:
        try:
            return super()._advance(caught)
        except ViewChanged:
            return self._regroup(caught)

    def _take(self, step, losses) -> float:
        compiling_s = super()._take(step, losses)
        self.group.membership.step = step + 1
        return compiling_s

    def _finish(self) -> Outcome:
        while True:
            try:
                return super()._finish()
            except ViewChanged:
                self._enter(self.state)

    def _save(self, done: int) -> None:
        rows, view = self.workers.fetch(self.state), self.group.view
        if self.first:
            index_of = [view.index(slot) for slot in range(self.spec.workers)]
            source = np.array([slot % len(view.members) if index is None else index for slot, index in enumerate(index_of)])
            self.checkpoints.save(done, jax.tree.map(lambda x: jax.device_put(x[source]), rows), self.counters)

    def _record(self, kind: str, step: int, values: dict[str, float]) -> None:
        if self.first and step > self._recorded.get(kind, 0):
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
        return mean_N[~np.isnan(mean_N)]

    def _stop_requested(self, caught, step: int) -> bool:
        if step % self.spec.log_every:
            return False
        return bool(self.workers.fetch(np.array([bool(caught)])).any())

    def _summary(self) -> dict | None:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.workdir / "summary.json").read_text())
        return None
