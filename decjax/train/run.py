"""The training loop of all methods and tasks: a run in a work directory, with metrics, checkpoints, signal handling and a summary."""

import collections
from collections.abc import Callable, Sequence
import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import time
from typing import NoReturn

import jax
import numpy as np

from decjax import files, signals
from decjax.errors import CheckpointError, TrainingError, ViewChanged, not_written, translating_write_errors
from decjax.train import checkpoint, metrics, utilization
from decjax.train import summary as summary_lib
from decjax.train import workdir as workdir_lib
from decjax.train.checkpoint import steps_saved
from decjax.train.evaluate import Evaluation
from decjax.train.members import Members
from decjax.train.state import State
from decjax.train.summary import Outcome
from decjax.train.trainer import Trainer
from decjax.typing import PyTree


class Run:
    """A run in a work directory: new, or continued from its newest checkpoint. `train()` completes it.

    Args:
        trainer: of the run.
        workdir: directory of the run, which is created if it does not exist.
        resume_from: directory of another run whose replicas a new run starts from, with any number of workers.
        members: the processes that train together; None: the trainer's workers.
        peak_flops: of a device, for the metric `mfu`; None: that of known devices in bf16.

    Raises:
        CheckpointError: if the directory belongs to another run, is in use or cannot be written, or a checkpoint cannot be
            restored.
        ConfigError: if the state does not fit into memory.
    """

    def __init__(
        self,
        trainer: Trainer,
        workdir: str | os.PathLike,
        resume_from: str | os.PathLike | None = None,
        members: Members | None = None,
        peak_flops: float | None = None,
    ):
        self.members = members or Members(trainer)
        self.spec, self.workdir = self.members.spec, pathlib.Path(workdir)
        trainer.setup.check_memory()
        checkpoint.arrays_of(trainer.abstract)  # Raises before the first step if the state cannot be saved.
        self.note = "no checkpoint yet, starting from step 0" if metrics.read(self.workdir) else ""
        self._trackers: list[metrics.Tracker] = []  # in the process that writes metrics, during `train`
        self._tracker_factories: Sequence[Callable[[Run], metrics.Tracker]] = ()
        self._role, self._files, self._checkpoints = None, contextlib.ExitStack(), None
        self._damaged: list[int] = []  # steps of damaged checkpoints, newer than the restored one
        self.state: PyTree = None
        self.done, self._losses = 0, collections.deque()
        self._started_s = 0.0  # when training began, had it run without pauses; 0: it has not begun
        # `first_step` is the step from which this run's time and bytes are counted.
        self.counters = {"time_s": 0.0, "bytes_sent_per_worker": 0.0, "first_step": 0, "corpus": trainer.data.fingerprint}
        self.counters |= {"began_s": time.time(), "steps_s": 0.0, "goodput": 0.0}  # `steps_s` is the time of steps alone.
        self._peak_flops = peak_flops or utilization.peak_flops(jax.local_devices()[0])
        if trainer.workers.stages > 1 and not trainer.workers.simulated:
            self.counters["bytes_between_stages_per_worker"] = 0.0
        advise = functools.partial(workdir_lib.advice, trainer=trainer)
        # Errors of the other run must be raised before anything is written.
        is_new = self.members.restores and not steps_saved(self.workdir)
        with (
            contextlib.ExitStack() as held,
            workdir_lib.opened(resume_from if is_new else None, trainer, self.spec.steps) as origin,
        ):
            held.callback(self.members.close)
            held.enter_context(workdir_lib.claim(self.workdir, self.spec.document, advise, self.members.launch))
            held.enter_context(self._files)
            self._take_role()
            if self.members.restores:
                self.done, self.state = self._restore(origin)
            self._enter()
            self._take_role()
            self._held = held.pop_all()  # until `train` ends

    @property
    def trainer(self) -> Trainer:
        """The trainer of the current workers."""
        return self.members.trainer

    @property
    def first(self) -> bool:
        """Whether this process writes metrics and the summary."""
        return self.members.first

    @property
    def checkpoints(self) -> checkpoint.Checkpoints:
        """The run's checkpoints; read-only in processes that do not write them."""
        if self._checkpoints is None:
            keep, read_only = self.spec.checkpoint.keep, not self.members.saves
            checkpoints = checkpoint.Checkpoints(self.workdir, keep=keep, read_only=read_only, own=True)
            self._checkpoints = self._files.enter_context(checkpoints)
        return self._checkpoints

    # -- Start --------------------------------------------------------------------------------------------------------

    def _restore(self, origin: workdir_lib.Origin | None) -> tuple[int, State | None]:
        """Return the first step and this process's part of the state; None stands for the initial state."""
        if not steps_saved(self.workdir):
            if origin is None:
                return 0, None
            self.counters["first_step"], state, self.note = workdir_lib.replicas(origin, self.members)
            return self.counters["first_step"], state
        step, (state, counters), damage = self.checkpoints.newest(
            lambda step: self.checkpoints.restore(step, like=self.members.like())
        )
        if counters["corpus"] != self.counters["corpus"]:
            raise CheckpointError(
                f"the data have changed since step {step} ({counters['corpus']} then, "
                f"{self.counters['corpus']} now); restore them, or start in another --workdir"
            )
        self._damaged = [newer for newer in steps_saved(self.workdir) if newer > step]
        self.counters |= counters
        self.note = f"{damage}continuing from step {step}"
        return step, self.members.local(state)

    def _enter(self) -> None:
        """Continue with the current group, or with a later one if that ends meanwhile."""
        self._repeats_settle = False
        while True:
            if self._started_s:
                self.counters["time_s"] = self._elapsed_s()
            with contextlib.suppress(ViewChanged):
                self.state, self.done = self.members.enter(self.state, self.done, self.counters, self._stop_writing)
                self._counted = self.trainer.bytes_by_usage(self.state)  # bytes by usage that the counters already include
                break
        if not self.members.saves:
            self._stop_writing()
        self._repeats_settle = self.members.joined  # The writer may have died before all of this step was written.
        self.start = self.done
        if self._started_s:
            self._start_clocks()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _start_clocks(self) -> None:
        self._started_s, self._logged = time.monotonic() - self.counters["time_s"], (time.monotonic(), self.done)

    # -- Writing ------------------------------------------------------------------------------------------------------

    def _stop_writing(self) -> None:
        """Close all files, because another process may write them from here on."""
        self._trackers, self._checkpoints, self._role = [], None, None
        with contextlib.suppress(CheckpointError, OSError):  # Another process repeats incomplete writes.
            self._files.close()

    def _take_role(self) -> None:
        """Start or stop writing checkpoints and metrics, as the group has decided."""
        if self._role == self.members.saves:
            return
        self._stop_writing()
        if self.members.saves:
            if self.first:
                self._files.enter_context(workdir_lib.writing(self.workdir))
            if damaged := [step for step in steps_saved(self.workdir) if step in self._damaged]:
                self.checkpoints.set_aside(damaged)
            self.checkpoints.check()
        self._role = self.members.saves

    def _write(self, write: Callable[[], None]) -> None:
        """Call `write` in the process that writes; if it fails there, in another one. A collective."""
        while True:
            error = None
            if self.members.saves:
                try:
                    self._take_role()
                    if self.first and not self._trackers:
                        self._track()
                    write()
                except (CheckpointError, OSError) as failed:
                    error = failed if isinstance(failed, CheckpointError) else not_written("the run", self.workdir, failed)
            if self.members.has_written(error):
                return
            if error is not None:
                self._stop_writing()

    def _track(self) -> None:
        """Create all trackers."""
        self.start = self.done
        lines = metrics.JsonLines(self.workdir, self.start, self.spec.steps)
        self._recorded = lines.recorded
        if self.members.joined:
            self.note = f"{self.note}; this process writes from step {self.start} on".removeprefix("; ")
        elif self.checkpoints.latest() == self.start != lines.last:
            self.note += f"; metrics.jsonl ends at step {lines.last}, rows after it are lost"
        files_in_workdir = lines, metrics.TensorBoard(self.workdir, self.start)
        for tracker in itertools.chain(files_in_workdir, (make(self) for make in self._tracker_factories)):
            self._trackers.append(tracker)
            self._files.callback(tracker.close)

    def _record(self, kind: str, values: dict[str, float]) -> None:
        self.checkpoints.check()
        # A group may begin at a step that was already recorded.
        if self.first and self.done > self._recorded.get(kind, 0):
            with translating_write_errors(f"metrics of step {self.done}", self.workdir):
                for tracker in self._trackers:
                    tracker.log(self.done, kind, values)
            self._recorded[kind] = self.done

    def _save(self, rows: Callable[[], State]) -> None:
        newest = self.checkpoints.latest() or 0
        if newest > self.done:
            raise CheckpointError(
                f"{self.workdir} has a checkpoint of step {newest}, which is newer than step {self.done}: another run writes there; "
                "choose another --workdir"
            )
        if newest < self.done:  # A group may begin at a step that was already saved.
            self.checkpoints.save(self.done, rows(), self.counters)

    # -- Measuring ----------------------------------------------------------------------------------------------------

    def _diverged(self, what: str) -> NoReturn:
        with contextlib.suppress(CheckpointError):
            self._write(self.checkpoints.finish)  # All processes look for the last good checkpoint.
        raise self.checkpoints.diverged(what, self.state, self.members.like())

    def _row(self, time_s: float, values: dict[str, float], steps: int, duration_s: float) -> dict[str, float]:
        """Return a row of metrics: `values` and the entries of every row; the rate is that of `steps` in `duration_s`."""
        distance, task = self.trainer.consensus_distance(self.state), self.trainer.setup.task
        if not np.isfinite(distance):
            self._diverged(f"parameters are no longer finite after step {self.done}")
        return {
            "time_s": time_s,
            **values,
            "consensus_distance": distance,
            f"{task.item}_per_s": steps * self.trainer.spec.batch_size * task.items / duration_s,
            **self._utilization(steps, duration_s),
            **{name: self.counters[name] for name in summary_lib.BYTES if name in self.counters},
            **self.members.facts(),
        }

    def _utilization(self, steps: int, duration_s: float) -> dict[str, float]:
        """Return {"mfu": …} of steps in a duration; {} if it is unknown."""
        if not (self._peak_flops and duration_s) or self.spec.source:
            return {}
        return {"mfu": steps * self.trainer.model_flops / (duration_s * self._peak_flops)}

    def _training_row(self) -> dict[str, float] | None:
        """Return the row of the steps since the last row, or None if no worker has taken a step. Waits for the last step."""
        local_N, not_finite = self.members.losses(self._losses)
        if not_finite:
            self._diverged(f"loss is {not_finite.loss} on worker {not_finite.worker} in step {not_finite.step + 1}")
        before, self._counted = self._counted, self.trainer.bytes_by_usage(self.state)
        self.counters["bytes_sent_per_worker"] += self._counted - before
        if not len(local_N):
            return None
        now, (logged, logged_step) = time.monotonic(), self._logged
        self.counters["steps_s"] += now - logged
        values = summary_lib.spread("loss", float(local_N.mean()), local_N)
        row = self._row(self._elapsed_s(), values, self.done - logged_step, now - logged)
        return row | {"learning_rate": float(np.asarray(self.trainer.setup.learning_rate(self.done - 1)))}

    def _evaluation_row(self, result: Evaluation, time_s: float) -> dict[str, float]:
        if not np.isfinite(result.averaged["loss"]):
            self._diverged(f"validation loss of the averaged model is {result.averaged['loss']} after step {self.done}")
        values = {}
        for name, value in result.averaged.items():
            values |= summary_lib.spread(name, value, result.local[name]) if result.local else {name: value}
        row = self._row(time_s, values, self.done - self.counters["first_step"], time_s)
        return row | self._derived_metrics(result, self.spec.eval.num_windows if self.done < self.spec.steps else 0)

    def _derived_metrics(self, result: Evaluation, limit: int = 0) -> dict[str, float]:
        """Return metrics that only the averaged model has, on `limit` validation examples; 0: all."""
        coded = {f"{name}_coded": value for name, value in (result.coded or {}).items()}
        return self.trainer.setup.task.derived(result.averaged, self.trainer.data, limit) | coded

    # -- The loop -----------------------------------------------------------------------------------------------------

    def train(self, trackers: Sequence[Callable[["Run"], metrics.Tracker]] = ()) -> Outcome:
        """Train until the last step, SIGTERM, SIGHUP or Ctrl-C, and save a checkpoint in each case.

        Args:
            trackers: functions that make trackers in addition to `metrics.jsonl` and TensorBoard. They are called in the process that
                writes metrics, unless the run has already finished.

        Raises:
            Diverged: if a loss or a parameter is not finite; the last good checkpoint is kept.
            CheckpointError: if the directory cannot be written, for example because the disk is full.
        """
        self._tracker_factories = trackers
        with self._held, signals.collected() as caught:
            self._start_clocks()
            try:
                while True:
                    with contextlib.suppress(ViewChanged):
                        outcome = self._outcome(caught)
                        self.members.leave()
                        return outcome
                    self._enter()
            except TrainingError:
                self.members.end()
                raise

    def _outcome(self, caught: list[signal.Signals]) -> Outcome:
        """Train until the run is finished or a signal stops it."""
        if self.start == self.spec.steps and not self.members.joined and (summary := summary_lib.read(self.workdir)):
            return Outcome(self.start, None, summary, None, already_finished=True)
        self._write(lambda: None)
        if self._steps(caught):
            self._write(self.checkpoints.finish)
            return Outcome(self.done, caught[0] if caught else signal.SIGTERM, None, None)
        return self._finish()  # This takes only seconds, so signals do not stop it.

    def _steps(self, caught: list[signal.Signals]) -> bool:
        """Take the remaining steps; return whether a signal stopped the run before the last one."""
        stop = self._repeats_settle and self.done > 0 and self._settle(caught)
        self._repeats_settle = False
        while self.done < self.spec.steps and not stop:
            self._step()
            for tracker in self._trackers:
                tracker.step(self.done)
            stop = self._settle(caught)
        return stop and self.done < self.spec.steps

    def _settle(self, caught: list[signal.Signals]) -> bool:
        """Log, evaluate and save after a step where due; return whether a signal has requested a stop. May be repeated for a step."""
        spec, done = self.spec, self.done
        if spec.reaches_consensus(done):
            # Another thread may dispatch the next step's exchange, so all collectives must be complete.
            self.state, sent = jax.block_until_ready(self.trainer.consensus(self.state))
            self.counters["bytes_sent_per_worker"] += sent
        last, stop = done == spec.steps, self._stop_requested(caught)
        evaluates = done % spec.eval.every == 0 and not last  # `_finish` evaluates the last step, on all examples.
        saves = done % spec.checkpoint.every == 0 or last or stop
        if done % spec.log_every == 0 or evaluates or saves:
            if row := self._training_row():
                self._write(functools.partial(self._record, "train", row))
            self._losses.clear()
            if evaluates:
                result = self.trainer.evaluate(self.state, spec.eval.num_windows, spec.eval.local)
                row = self._evaluation_row(result, self._elapsed_s())
                self._write(functools.partial(self._record, "eval", row))
            self.counters["time_s"], steps_s = self._elapsed_s(), self.counters["steps_s"]
            self.counters["goodput"] = steps_s / max(steps_s, time.time() - self.counters["began_s"])
            if saves:
                self._write(functools.partial(self._save, self.members.rows(self.state, done, self.counters)))
            self._logged = time.monotonic(), done
        return stop

    def _step(self) -> None:
        """Take one step, count its bytes and append its loss."""
        step = self.done
        batch, started_s = self.members.batch(step, self.counters), time.monotonic()
        program = self.trainer.program(self.state, batch, step)
        compiling_s = time.monotonic() - started_s
        self._logged = self._logged[0] + compiling_s, self._logged[1]  # The rate excludes compilation.
        state, loss = self.trainer.take(program, self.state, batch, step)
        self.members.note_step(step + 1)
        self.state, self.done = state, step + 1
        for name, (axis, _) in summary_lib.BYTES.items():
            if name in self.counters:
                self.counters[name] += float(program.sent[axis].mean())
        self._losses.append((step, loss))
        if len(self._losses) > 1:
            self._losses[-2][1].block_until_ready()  # One step in flight while the host prepares the next.

    def title(self) -> str:
        """Such as "8 workers on 8 cpu devices, one_peer_exponential, 0.13 M parameters"."""
        return summary_lib.title(self.trainer.setup)

    def _stop_requested(self, caught: list[signal.Signals]) -> bool:
        if self.members.alone:
            return bool(caught)
        # Processes must agree on the step at which they stop; logging steps synchronize them anyway.
        return self.done % self.spec.log_every == 0 and self.members.any(bool(caught))

    # -- The end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> Outcome:
        result = self.trainer.evaluate(self.state)
        row = self._evaluation_row(result, self.counters["time_s"])
        self._write(functools.partial(self._record, "eval", row))
        model = jax.tree.map(self.trainer.workers.as_numpy, self.trainer.average(self.state))
        summary = summary_lib.summarize(self.spec, result, self._derived_metrics(result), model[0], self.counters)
        summary |= self._utilization(self.done - self.counters["first_step"], self.counters["steps_s"])
        summary |= self.trainer.data.facts()
        samples: list[str] = []
        self._write(functools.partial(self._conclude, model, summary, samples))
        return Outcome(self.spec.steps, None, summary, samples[0] if samples else None)

    def _conclude(self, model: tuple[PyTree, PyTree], summary: dict[str, PyTree], samples: list[str]) -> None:
        """Add scores to the summary and write it; append a sample of the model, such as a text, to `samples`."""
        self.checkpoints.finish()  # The last one is written in a thread.
        if not self.first:
            return
        task = self.trainer.setup.task
        summary |= {f"eval_{name}": value for name, value in task.score(*model, self.trainer.data).items()}
        with translating_write_errors("summary.json", self.workdir):
            files.write_whole(self.workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
        if sample := task.show(*model, self.trainer.data, jax.random.key(self.spec.seed)):
            samples.append(sample)
