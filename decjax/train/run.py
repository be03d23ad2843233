"""The training loop of all methods and tasks: a run in a work directory, with logging, checkpoints, signals and a summary."""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import time
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from decjax import config, files, mesh
from decjax.errors import CheckpointError
from decjax.train import checkpoint, metrics
from decjax.train import origin as origin_lib
from decjax.train import state as state_lib
from decjax.train import summary as summary_lib
from decjax.train import workdir as workdir_lib
from decjax.train.evaluate import Evaluation
from decjax.train.origin import Origin
from decjax.train.state import State
from decjax.train.trainer import Trainer


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        step: the last step taken.
        signal: the signal that interrupted it; None if it is finished.
        summary: contents of `summary.json`; None if it is not finished.
        shown: what the averaged model can do, such as a text that it wrote; None if there is nothing to show.
        is_old: whether it was finished before, so that nothing was computed.
    """

    step: int
    signal: signal.Signals | None
    summary: dict | None
    shown: str | None
    is_old: bool = False


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Inside, SIGTERM and Ctrl-C are collected in the list that it gives; a second Ctrl-C interrupts at once."""
    caught: list[signal.Signals] = []

    def note(number, frame):
        if signal.SIGINT in caught and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        caught.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Run:
    """A run: a `Trainer` in a work directory, new or continued from its newest checkpoint; `train()` takes it to its end.

    Args:
        trainer: what takes the steps.
        workdir: its directory, which is created if it does not exist.
        resume_from: the directory of another run from whose replicas a new run starts, with any number of workers.

    Raises:
        CheckpointError: if the directory belongs to another run, is in use or cannot be written, or a checkpoint cannot be
            restored.
        ConfigError: if the machine's memory cannot hold the state.
    """

    def __init__(self, trainer: Trainer, workdir: str | os.PathLike, resume_from: str | os.PathLike | None = None):
        self.trainer, self.spec = trainer, trainer.spec
        self.workdir = pathlib.Path(workdir)
        config.check_memory(trainer.setup)
        checkpoint.arrays_of(trainer.abstract)  # What cannot be saved is refused before the first step.
        self.note = "no checkpoint yet: starting again" if metrics.read(self.workdir) else ""
        self.first = jax.process_index() == 0
        self._trackers: list[metrics.Tracker] = []  # made by `train`, in the first process
        # `first_step` is the step from which this run's time and bytes are counted.
        self.counters = {"time_s": 0.0, "bytes_sent_per_worker": 0.0, "first_step": 0, "corpus": trainer.data.fingerprint}
        if self.workers.stages > 1 and not self.workers.simulated:
            self.counters["bytes_between_stages_per_worker"] = 0.0
        advise = functools.partial(origin_lib.advice, trainer=trainer)
        # The other run raises its errors before anything is written.
        with self._origin(resume_from) as origin, contextlib.ExitStack() as held:
            held.enter_context(workdir_lib.claim(self.workdir, self.spec.document, advise))
            self.checkpoints = held.enter_context(checkpoint.Checkpoints(self.workdir, keep=self.spec.checkpoint.keep))
            self.start, self.state = self._restore(origin)
            trainer.check_exchanges()
            self._counted = trainer.bytes_by_usage(self.state)  # how many of these bytes the counters include already
            self._held = held.pop_all()  # until `train` ends

    @property
    def workers(self) -> mesh.Workers:
        """Those of the trainer."""
        return self.trainer.workers

    # -- Beginning ----------------------------------------------------------------------------------------------------

    def _restore(self, origin: Origin | None) -> tuple[int, State]:
        if self.checkpoints.latest() is not None:
            step, (state, counters), damage = self.checkpoints.newest(
                lambda step: self.checkpoints.restore(step, like=self.trainer.abstract)
            )
            if counters["corpus"] != self.counters["corpus"]:
                raise CheckpointError(
                    f"the data have changed since step {step} ({counters['corpus']} then, "
                    f"{self.counters['corpus']} now); restore them, or start in another --workdir"
                )
            self.counters |= counters
            self.note = f"{damage}continuing from step {step}"
            return step, state
        return (0, self.trainer.init()) if origin is None else self._restore_resized(origin)

    @contextlib.contextmanager
    def _origin(self, folder: str | os.PathLike | None) -> Iterator[Origin | None]:
        """The run to start from, while inside; None without one, or if this run has checkpoints of its own."""
        if folder is None or workdir_lib.steps_saved(self.workdir):
            yield None
            return
        with checkpoint.Checkpoints(pathlib.Path(folder), read_only=True) as checkpoints:
            found = origin_lib.find(pathlib.Path(folder), checkpoints, self.trainer)
            if found.step >= self.spec.steps:
                raise CheckpointError(
                    f"{folder} has done {found.step} of steps={self.spec.steps}; set more steps to go on from there"
                )
            yield found

    def _restore_resized(self, origin: Origin) -> tuple[int, State]:
        n = origin.num_workers
        step, (state, weight_N), damage = origin.checkpoints.newest(lambda step: self._read(origin, step))
        # Mixers start from one model on all workers, here the average of the replicas.
        gather = self.trainer.setup.source.gather
        params = gather(state["params"]) if gather else state["params"]
        average = jax.tree.map(lambda mean, x: np.asarray(mean, x.dtype), state_lib.mean_over_workers(params, weight_N), params)
        fresh = self.workers.fetch(self.trainer.start(average))
        state = state_lib.resize(state, fresh, self.workers.num_workers, weight_N)
        self.counters["first_step"] = step
        self.note = (
            f"{damage}starting from step {step} of {origin.folder}; {n} replicas became {self.workers.num_workers}, "
            "mixer and reducer state start afresh"
        )
        return step, self.workers.place(state)

    def _read(self, origin: Origin, step: int) -> tuple[Any, np.ndarray | None]:
        """(what a run keeps of the replicas of another one's step, their weights [N] if they have some)."""
        n = origin.num_workers

        def read(like):
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype, sharding=self.workers.replicated), like)
            return self.workers.fetch(origin.checkpoints.restore(step, like, partial=True)[0])

        state = read(state_lib.kept(self.trainer.abstract, self.trainer.setup.source.lasts))
        if not origin.has_weights:
            return state, None
        # y_i of the replicas, equal on all stages of a worker.
        weight = jax.ShapeDtypeStruct((n, self.workers.stages)[: self.workers.num_axes], np.float32)
        weight = read({"opt_state": {"mixer": {"weight": weight}}})["opt_state"]["mixer"]["weight"]
        return state, weight.reshape(n, -1)[:, 0]

    # -- Measuring ----------------------------------------------------------------------------------------------------

    def _flush(self, losses: collections.deque) -> np.ndarray:
        """Mean loss of each worker over the pending (step, loss_N); raises `Diverged` for the first that is not finite."""
        fetched = [(step, self.workers.fetch_first(loss)) for step, loss in losses]
        for step, loss_N in fetched:
            for worker in np.flatnonzero(~np.isfinite(loss_N)):
                self._diverged(f"loss is {loss_N[worker]} on worker {worker} in step {step + 1}")
        return np.mean([loss_N for _, loss_N in fetched], axis=0)

    def _diverged(self, what: str) -> NoReturn:
        raise self.checkpoints.diverged(what, self.state)

    def _row(self, step: int, time_s: float, found: dict[str, float], steps: int, taken_s: float) -> dict[str, float]:
        """A row of metrics: `found` and the entries of every row; the rate is `steps` in `taken_s` seconds."""
        distance, task = self.trainer.consensus_distance(self.state), self.trainer.setup.task
        if not np.isfinite(distance):
            self._diverged(f"parameters are no longer finite after step {step}")
        return {
            "time_s": time_s,
            **found,
            "consensus_distance": distance,
            f"{task.item}_per_s": steps * self.trainer.spec.batch_size * task.items / taken_s,
            **{name: self.counters[name] for name in summary_lib.BYTES if name in self.counters},
        }

    def _training_row(
        self, losses: collections.deque, step: int, begun: float, logged: float, logged_step: int
    ) -> dict[str, float]:
        """The row of the steps since `logged`, the time at which `logged_step` was logged; waits for the last step."""
        local_N = self._flush(losses)
        before, self._counted = self._counted, self.trainer.bytes_by_usage(self.state)
        self.counters["bytes_sent_per_worker"] += self._counted - before
        now = time.monotonic()
        found = summary_lib.spread("loss", float(local_N.mean()), local_N)
        row = self._row(step, now - begun, found, step - logged_step, now - logged)
        return row | {"learning_rate": float(self.trainer.setup.learning_rate(step - 1))}  # pyright: ignore[reportArgumentType]

    def _evaluation_row(self, result: Evaluation, step: int, time_s: float) -> dict[str, float]:
        if not np.isfinite(result.averaged["loss"]):
            self._diverged(f"validation loss of the averaged model is {result.averaged['loss']} after step {step}")
        found = {}
        for name, value in result.averaged.items():
            found |= summary_lib.spread(name, value, result.local[name]) if result.local else {name: value}
        row = self._row(step, time_s, found, step - self.counters["first_step"], time_s)
        return row | self._further(result, self.spec.eval.num_windows if step < self.spec.steps else 0)

    def _further(self, result: Evaluation, limit: int = 0) -> dict[str, float]:
        """Metrics of the averaged model that single workers do not have, on so many validation examples; 0: all."""
        coded = {f"{name}_coded": value for name, value in (result.coded or {}).items()}
        return self.trainer.setup.task.derived(result.averaged, self.trainer.data, limit) | coded

    # -- The loop -----------------------------------------------------------------------------------------------------

    def train(self, trackers: Sequence[Callable[["Run"], metrics.Tracker]] = ()) -> Outcome:
        """Trains to the last step, or until SIGTERM or Ctrl-C, and saves a checkpoint in both cases.

        Args:
            trackers: what follows the run beside `metrics.jsonl` and TensorBoard: functions that make a tracker of it. They are
                called in the first process, if there are steps to take.

        Raises:
            Diverged: if a loss or a parameter is not finite; the last good checkpoint is kept.
            CheckpointError: if the disk is full, or the directory can no longer be written.
        """
        with self._held as stack:
            if self.start == self.spec.steps and (summary := self._summary()):
                return Outcome(self.start, None, summary, None, is_old=True)
            if self.first:
                self._track(trackers, stack)
            with _signals() as caught:
                stopped_at = self._steps(caught)
                if stopped_at is not None:
                    self.checkpoints.finish()
                    return Outcome(stopped_at, caught[0] if caught else signal.SIGTERM, None, None)
                return self._finish()  # Takes seconds, so a signal does not stop it.

    def _track(self, trackers: Sequence[Callable[["Run"], metrics.Tracker]], stack: contextlib.ExitStack) -> None:
        """Begins all trackers, which the stack closes."""
        lines = metrics.JsonLines(self.workdir, self.start, self.spec.steps)
        if self.checkpoints.latest() == self.start != lines.last:
            self.note += f"; metrics.jsonl ends at step {lines.last}, what came between is lost"
        own = lines, metrics.TensorBoard(self.workdir, self.start)
        for tracker in itertools.chain(own, (make(self) for make in trackers)):
            self._trackers.append(tracker)
            stack.callback(tracker.close)

    def _summary(self) -> dict | None:
        """The contents of summary.json; None if it is missing or damaged, and has to be computed again."""
        try:
            summary = files.read_json(self.workdir / "summary.json")
        except ValueError:
            return None
        return summary if summary.keys() >= set(summary_lib.REPORTED) else None

    def _record(self, kind: str, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, kind, values)

    def _steps(self, caught: list[signal.Signals]) -> int | None:
        """Takes all steps that are left; returns the step at which a signal stopped it, or None."""
        self._begin()
        while self.done < self.spec.steps:
            if self._advance(caught) and self.done < self.spec.steps:
                return self.done
        return None

    def _begin(self) -> None:
        """Starts the clocks."""
        self.done = self.start
        self._losses: collections.deque = collections.deque()
        self._begun = time.monotonic() - self.counters["time_s"]
        self._logged = time.monotonic(), self.start

    def _advance(self, caught: list[signal.Signals]) -> bool:
        """Takes a step and does what is due after it; returns whether a signal asks to stop."""
        compiling_s = self._take(self.done, self._losses)
        self._logged = self._logged[0] + compiling_s, self._logged[1]  # The rate excludes compilation.
        self.done += 1
        if self.spec.reaches_consensus(self.done):
            # The next step's exchange may be dispatched by another thread, so all collectives of this one must be complete.
            state, sent = self.trainer.consensus(self.state)
            self.state = jax.block_until_ready(state)
            self.counters["bytes_sent_per_worker"] += sent
        for tracker in self._trackers:
            tracker.step(self.done)
        return self._settle(self.done, caught)

    def _settle(self, done: int, caught: list[signal.Signals]) -> bool:
        """Logs, evaluates and saves what is due after so many steps; returns whether a signal asks to stop."""
        spec = self.spec
        last, stop = done == spec.steps, self._stop_requested(caught, done)
        # The last step is evaluated on all examples, by `_finish`.
        evaluates = done % spec.eval.every == 0 and not last
        saves = done % spec.checkpoint.every == 0 or last or stop
        if done % spec.log_every == 0 or evaluates or saves:
            self.checkpoints.check()
            self._record("train", done, self._training_row(self._losses, done, self._begun, *self._logged))
            self._losses.clear()
            if evaluates:
                result = self.trainer.evaluate(self.state, spec.eval.num_windows, spec.eval.local)
                self._record("eval", done, self._evaluation_row(result, done, time.monotonic() - self._begun))
            self.counters["time_s"] = time.monotonic() - self._begun
            if saves:
                self._save(done)
            self._logged = time.monotonic(), done
        return stop

    def _save(self, done: int) -> None:
        self.checkpoints.save(done, self.state, self.counters)

    def _take(self, step: int, losses: collections.deque) -> float:
        """Takes one step, counts its bytes and appends its loss; returns the seconds that compilation took."""
        batch, asked = self.trainer.batch(step), time.monotonic()
        program = self.trainer.program(self.state, batch, step)
        compiling_s = time.monotonic() - asked
        self.state, loss = self.trainer.take(program, self.state, batch, step)
        for name, (axis, _) in summary_lib.BYTES.items():
            if name in self.counters:
                self.counters[name] += float(program.sent[axis].mean())
        losses.append((step, loss))
        if len(losses) > 1:
            losses[-2][1].block_until_ready()  # One step in flight while the host prepares the next.
        return compiling_s

    def title(self) -> str:
        """Such as "8 workers on 8 cpu devices, one_peer_exponential, 0.13 M parameters"."""
        return summary_lib.title(self.trainer.setup)

    def _stop_requested(self, caught, step: int) -> bool:
        if jax.process_count() == 1:
            return bool(caught)
        # Processes must agree on the step at which they stop, so they ask at logging steps, which synchronise them anyway.
        if step % self.spec.log_every:
            return False
        return bool(self.workers.fetch(self.workers.whole.build(lambda worker: np.int32(bool(caught)))).any())

    # -- The end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> Outcome:
        result = self.trainer.evaluate(self.state)
        self._record("eval", self.spec.steps, self._evaluation_row(result, self.spec.steps, self.counters["time_s"]))
        params, variables = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), self.trainer.average(self.state))
        task, shown = self.trainer.setup.task, None
        summary = summary_lib.summarize(self.spec, result, self._further(result), params, self.counters)
        summary |= self.trainer.data.facts()
        self.checkpoints.finish()  # The last one was written while this was computed.
        if self.first:
            if task.score:
                summary |= {f"eval_{name}": value for name, value in task.score(params, variables, self.trainer.data).items()}
            with metrics.writing(self.workdir, "summary.json"):
                files.write_whole(self.workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
            if task.show:
                shown = task.show(params, variables, self.trainer.data, jax.random.key(self.spec.seed))
        return Outcome(self.spec.steps, None, summary, shown)
