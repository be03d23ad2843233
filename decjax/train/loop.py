"""The one train loop. All-reduce, gossip and no communication differ in the config only."""

import collections
import contextlib
import functools
import json
import os
import pathlib
import signal
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from decjax import data, gossip, models, reduce
from decjax.train import assemble, checkpoint, engine, metrics, wire
from decjax.train import evaluate as evaluate_lib
from decjax.train import state as state_lib
from decjax.train.errors import CheckpointError, TrainingError

BYTES = {"bytes_sent_per_worker": "worker", "bytes_between_stages_per_worker": "stage"}  # counters, and the mesh axis of each
REPORTED = (
    "steps",
    "time_s",
    "eval_loss",
    "local_eval_loss_min",
    "local_eval_loss_max",
    "bytes_per_step_per_worker",
    "corpus_order1_entropy",
)  # what a whole summary has at least
SUMMARIZED = {
    "bytes_sent_per_worker": "bytes_per_step_per_worker",
    "bytes_between_stages_per_worker": "bytes_between_stages_per_step_per_worker",
}
# Of config.pipeline, what decides where parameters live; of a whole model.
LAYOUT = {"stages": 1, "chunks": 1, "layers": "", "autoencoder": 0}


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        step: the last step taken.
        signal: the signal that interrupted it, or None if it is finished.
        summary: contents of `summary.json`, or None if it is not finished.
        sample: text by the averaged model, or None.
    """

    step: int
    signal: signal.Signals | None
    summary: dict | None
    sample: str | None


@contextlib.contextmanager
def _signals():
    """Collects SIGTERM and Ctrl-C in a list; a second Ctrl-C interrupts at once."""
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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


class Run:
    """One run: a `Setup` in a work directory. `train()` takes it from where it stands to its end."""

    def __init__(self, setup: assemble.Setup, workdir: str | os.PathLike, resume_from: str | os.PathLike | None = None):
        self.setup = setup
        self.config = setup.config
        self.workers = setup.workers
        self.workdir = pathlib.Path(workdir)
        source = None
        if resume_from is not None and not checkpoint.has_checkpoints(self.workdir):
            source = self._open(pathlib.Path(resume_from))  # Complains before anything is written.
        self._lock = checkpoint.claim(self.workdir, self.config.to_dict())
        self.checkpoints = checkpoint.Checkpoints(self.workdir, keep=self.config.checkpoint.keep)
        self.first = jax.process_index() == 0
        # `first_step` is where this run's time and bytes begin to count.
        self.counters = {"time_s": 0.0, "bytes_sent_per_worker": 0.0, "first_step": 0, "corpus": setup.corpus.fingerprint}
        if self.workers.stages > 1 and not self.workers.simulated:
            self.counters["bytes_between_stages_per_worker"] = 0.0
        self.note = ""
        self.start, self.state = self._restore(source)
        self._check_exchanges()
        self._program = engine.make_step(setup.source.gradient, setup.method, self.workers, self.config.seed, self.config.engine)
        join, whole, mixer = jax.vmap(setup.source.join), self.workers.whole, setup.method.mixer
        joined = jax.eval_shape(join, self.state.params)
        self._join = jax.jit(join, out_shardings=whole.shardings(joined)) if self.workers.stages > 1 else lambda params: params
        self._distance = jax.jit(lambda params: state_lib.consensus_distance(join(params)), out_shardings=self.workers.replicated)
        self._average = jax.jit(
            lambda state: state_lib.averaged(state._replace(params=join(state.params)), mixer, self.workers.num_axes),
            out_shardings=self.workers.replicated,
        )
        self._usage = self.workers.jit(setup.method.usage, (0,)) if setup.method.usage else None
        self._counted = self._bytes_by_usage()  # as far as the counters know of them
        self._saved = self.start if self.checkpoints.latest() == self.start else None

    # -- Beginning ----------------------------------------------------------------------------------------------------

    def _restore(self, source) -> tuple[int, state_lib.State]:
        if (step := self.checkpoints.latest()) is not None:
            state, counters = self.checkpoints.restore(step, like=state_lib.abstract(*self.setup.beginning))
            if counters["corpus"] != self.counters["corpus"]:
                raise CheckpointError(
                    f"the text has changed since step {step} ({counters['corpus']} then, "
                    f"{self.counters['corpus']} now); restore it, or start in another --workdir"
                )
            self.counters |= counters
            self.note = f"continuing from step {step}"
            return step, state
        if source is None:
            self.note = "no checkpoint yet: starting again" if metrics.read(self.workdir) else ""
            return 0, state_lib.init(*self.setup.beginning)
        return self._restore_resized(*source)

    def _open(self, folder: pathlib.Path) -> tuple[pathlib.Path, checkpoint.Checkpoints, int, int, bool]:
        """The run to start from: its folder, checkpoints, newest step, number of workers, and whether they have weights; its stages
        must be ours."""
        checkpoints = checkpoint.Checkpoints(folder, read_only=True)
        step = checkpoints.latest()
        try:
            config = json.loads((folder / "config.json").read_text())
            n, theirs = config["workers"], LAYOUT | config.get("pipeline", {})
            has_weights = config["method"] == "decentralized" and config["mixing"]["mixer"] == "push_sum"
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / 'config.json'} cannot be read: not a run of decjax") from error
        if differing := [
            f"pipeline.{name}={theirs[name]!r} there, {self.config.pipeline[name]!r} here"
            for name in LAYOUT
            if theirs[name] != self.config.pipeline[name]
        ]:
            raise CheckpointError(f"{folder} is of a model divided otherwise ({'; '.join(differing)}); start with the same")
        if step is None or step >= self.config.steps:
            raise CheckpointError(
                f"{folder} has "
                + (
                    "no complete checkpoint; choose another --resume_from"
                    if step is None
                    else f"done {step} of steps={self.config.steps}; set more steps to go on from there"
                )
            )
        return folder, checkpoints, step, n, has_weights

    def _weights(self, checkpoints, step: int, n: int) -> np.ndarray:
        """y_i of each replica of another run, those of its mixer."""
        shape = (n, self.workers.stages)[: self.workers.num_axes]
        like = {"opt_state": {"mixer": {"weight": jax.ShapeDtypeStruct(shape, np.float32, sharding=self.workers.replicated)}}}
        state, _ = checkpoints.restore(step, like, partial=True)
        return self.workers.fetch(state)["opt_state"]["mixer"]["weight"].reshape(n, -1)[:, 0]  # Those of stages are equal.

    def _restore_resized(self, folder, checkpoints, step: int, n: int, has_weights: bool) -> tuple[int, state_lib.State]:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype, sharding=self.workers.replicated),
            state_lib.lasting(state_lib.abstract(*self.setup.beginning)),
        )
        state, _ = checkpoints.restore(step, like, partial=True)
        state = self.workers.fetch(state)
        # What mixers remember of neighbours starts from one and the same model: here the average of the replicas.
        params, weight_N = state["params"], self._weights(checkpoints, step, n) if has_weights else None
        average = jax.tree.map(lambda mean, x: np.asarray(mean, x.dtype), state_lib.mean_over_workers(params, weight_N), params)
        fresh = self.workers.fetch(state_lib.start(average, self.setup.method.tx, self.workers, self.setup.source.init))
        state = state_lib.resize(state, fresh, self.workers.num_workers, weight_N)
        self.counters["first_step"] = step
        self.note = (
            f"starting from step {step} of {folder}; {n} replicas became {self.workers.num_workers}, "
            "mixer and reducer state begin afresh"
        )
        return step, self.workers.place(state)

    def _check_exchanges(self) -> None:
        """Do messages between workers, and between stages, arrive?"""
        setup = self.setup
        try:
            if setup.topology:
                gossip.check_exchange(self.workers.whole, setup.topology, setup.method.mixer.permutations)
            if setup.source.permutations:
                gossip.check_stage_exchange(self.workers, setup.source.permutations)
        except RuntimeError as error:
            raise TrainingError(str(error)) from error

    # -- Measuring ----------------------------------------------------------------------------------------------------

    def _flush(self, losses: collections.deque) -> np.ndarray:
        """Mean loss of each worker over the pending (step, loss_N); raises `Diverged` on the first that is not finite."""
        fetched = [(step, self.workers.fetch_first(loss)) for step, loss in losses]
        for step, loss_N in fetched:
            if not np.isfinite(loss_N).all():
                self._diverged(
                    f"loss is {loss_N[~np.isfinite(loss_N)][0]} on worker "
                    f"{np.flatnonzero(~np.isfinite(loss_N))[0]} in step {step + 1}"
                )
        return np.mean([loss_N for _, loss_N in fetched], axis=0)

    def _diverged(self, what: str) -> None:
        raise self.checkpoints.diverged(what, self.state)

    def _finite_distance(self, step: int) -> float:
        distance = float(self._distance(self.state.params))
        if not np.isfinite(distance):
            self._diverged(f"parameters are no longer finite after step {step}")
        return distance

    def _training_row(self, losses: collections.deque, step: int, begun: float, logged: float, logged_step: int) -> dict[str, Any]:
        """What has happened since `logged`, a time, and the step before it; waits for the last step."""
        local_N = self._flush(losses)
        before, self._counted = self._counted, self._bytes_by_usage()
        self.counters["bytes_sent_per_worker"] += self._counted - before
        now = time.monotonic()
        return {
            "step": step,
            "time_s": now - begun,
            "kind": "train",
            "loss": float(local_N.mean()),
            "loss_min": float(local_N.min()),
            "loss_max": float(local_N.max()),
            "consensus_distance": self._finite_distance(step),
            "tokens_per_s": self._tokens(step - logged_step) / (now - logged),
            **self._bytes(),
            "learning_rate": float(self.setup.schedule(step - 1)),
        }

    def _evaluation_row(self, result: evaluate_lib.Evaluation, step: int, time_s: float) -> dict[str, Any]:
        if not np.isfinite(result.averaged):
            self._diverged(f"validation loss of the averaged model is {result.averaged} after step {step}")
        return {
            "step": step,
            "time_s": time_s,
            "kind": "eval",
            "loss": result.averaged,
            "loss_min": float(result.local_N.min()),
            "loss_max": float(result.local_N.max()),
            "consensus_distance": self._finite_distance(step),
            "tokens_per_s": self._tokens(step - self.counters["first_step"]) / time_s,
            **self._bytes(),
        } | ({} if result.coded is None else {"loss_coded": result.coded})

    def _bytes(self) -> dict[str, float]:
        return {name: self.counters[name] for name in BYTES if name in self.counters}

    def _tokens(self, steps: int) -> int:
        return steps * self.config.batch_size * self.setup.model.context

    def _windows(self, limit: int) -> np.ndarray:
        return data.validation_windows(self.setup.corpus.valid, context=self.setup.model.context, limit=limit)

    def _make_evaluate(self, limit: int):
        evaluate = evaluate_lib.make_evaluate(
            self.setup.model.nll, self.workers.whole, self._windows(limit), self.config.eval.batch_size, self.setup.source.coded_nll
        )
        return lambda params, average: evaluate(self._join(params), average)

    # -- The loop -----------------------------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Trains to the last step, or until a signal; saves in both cases.

        Returns:
            The `Outcome`.

        Raises:
            Diverged: if a loss or the parameters are not finite; the last good checkpoint stays.
        """
        if self.start == self.config.steps and (summary := self._summary()):
            self._close()
            return Outcome(self.start, None, summary, None)
        recorder = metrics.Recorder(self.workdir, self.start, self.config.steps) if self.first else None
        display = metrics.Silent()
        if self.first:
            display = metrics.Display(self.start, self.counters["first_step"], self.config.steps, metrics.UNIT)
        if recorder and self._saved == self.start != recorder.last:
            self.note += f"; metrics.jsonl ends at step {recorder.last}, what came between is lost"
        try:
            with _signals() as caught:
                with display:
                    stopped_at = self._steps(recorder, display, caught)
                if stopped_at is not None:
                    return Outcome(stopped_at, caught[0] if caught else signal.SIGTERM, None, None)
                return self._finish(recorder, display)  # A matter of seconds: a signal does not stop it.
        finally:
            if recorder:
                recorder.close()
            self._close()

    def _summary(self) -> dict | None:
        """What the run ended with; None if that is missing or damaged, and is to be found anew."""
        try:
            summary = json.loads((self.workdir / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) and summary.keys() >= set(REPORTED) else None

    def _close(self) -> None:
        self.checkpoints.close()
        if self._lock:
            self._lock.close()

    def _steps(self, recorder, display, caught) -> int | None:
        """Takes all steps that are left; returns the step at which a signal stopped it, or None."""
        config, workers = self.config, self.workers
        evaluate = self._make_evaluate(config.eval.num_windows)
        consensus = self._make_consensus() if config.consensus_every else None
        losses: collections.deque = collections.deque()
        begun, logged = time.monotonic() - self.counters["time_s"], (time.monotonic(), self.start)
        display.say(self._title())
        if self.note:
            display.say(self.note)

        for step in range(self.start, config.steps):
            batch = workers.build(lambda worker: self.setup.batch(worker, step))
            asked = time.monotonic()
            program = self._program(self.setup.method.phase(step), self.state, batch, np.int32(step))
            logged = logged[0] + time.monotonic() - asked, logged[1]  # Compilation is no part of the rate.
            self.state, loss = program.run(self.state, batch, np.int32(step))
            for name, axis in BYTES.items():
                if name in self.counters:
                    self.counters[name] += float(program.sent[axis].mean())
            losses.append((step, loss))
            if len(losses) > 1:
                losses[-2][1].block_until_ready()  # One step in flight while the host prepares the next.
            done = step + 1
            if consensus and done % config.consensus_every == 0:
                state, sent = consensus(self.state)
                # The next step's exchange may be dispatched by another thread: none of ours may still be on its way.
                self.state = jax.block_until_ready(state)
                self.counters["bytes_sent_per_worker"] += sent
            display.step(done)

            last, stop = done == config.steps, self._stop_requested(caught, done)
            # The last step is evaluated on all windows, by `_finish`.
            evaluates = done % config.eval.every == 0 and not last
            saves = done % config.checkpoint.every == 0 or last or stop
            if done % config.log_every == 0 or evaluates or saves or last:
                self._record(recorder, display, self._training_row(losses, done, begun, *logged))
                losses.clear()
                if evaluates:
                    result = evaluate(self.state.params, self._average(self.state))
                    self._record(recorder, display, self._evaluation_row(result, done, time.monotonic() - begun))
                self.counters["time_s"] = time.monotonic() - begun
                if saves:
                    self.checkpoints.save(done, self.state, self.counters)
                    self._saved = done
                logged = time.monotonic(), done
            if stop and not last:
                return done
        return None

    def _title(self) -> str:
        """As "8 workers on 8 cpu devices, one_peer_exponential, 0.13 M parameters"."""
        setup, workers = self.setup, self.workers
        devices = jax.local_devices()[:1] if workers.simulated else [*workers.mesh.devices.flat]
        params = jax.eval_shape(lambda: setup.model.init(jax.random.key(0)))
        return (
            f"{_count(workers.num_workers, 'worker')} {'simulated ' if workers.simulated else ''}on "
            f"{_count(len(devices), f'{devices[0].device_kind} device')}, "
            f"{setup.topology.name if setup.topology else self.config.method}, "
            f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.3g} M parameters"
        )

    def _bytes_by_usage(self) -> float:
        """Bytes that a worker has sent in steps whose phase the state has decided on."""
        method = self.setup.method
        if not method.usage:
            return 0.0
        used = self.workers.fetch(self._usage(self.state.opt_state))  # [N, (stages,) phases]
        one = state_lib.one_device(self.state.params, self.workers)
        per_step = [method.num_bytes(one, phase).mean() for phase in method.phases]
        return float(used.reshape(-1, len(per_step)).mean(axis=0) @ per_step) * self.workers.stages

    def _stop_requested(self, caught, step: int) -> bool:
        if jax.process_count() == 1:
            return bool(caught)
        # Processes must agree on the step at which they stop; ask at logging steps, which synchronise them anyway.
        if step % self.config.log_every:
            return False
        return bool(self.workers.fetch(self.workers.whole.build(lambda worker: np.int32(bool(caught)))).any())

    def _record(self, recorder, display, row) -> None:
        if recorder:
            recorder.write(row)
        display.show(row)

    def _make_consensus(self):
        """The destructive protocol of the paper's runs: every replica becomes the average."""
        state, workers = self.state, self.workers
        consensus = functools.partial(state_lib.consensus, mixer=self.setup.method.mixer, workers=workers)
        compiled = jax.jit(consensus, out_shardings=workers.shardings(state), donate_argnums=0).lower(state).compile()
        if workers.simulated:
            one = state_lib.one_device(state.params, workers)
            sent_N = workers.stages * reduce.mean().num_bytes(one, workers.num_workers)
        else:
            sent_N = wire.bytes_by_axis(compiled.as_text(), workers)["worker"]
        sent = float(sent_N.mean())
        return lambda state: (compiled(state), sent)

    def _finish(self, recorder, display) -> Outcome:
        config = self.config
        average = self._average(self.state)
        result = self._make_evaluate(0)(self.state.params, average)
        self._record(recorder, display, self._evaluation_row(result, config.steps, self.counters["time_s"]))
        params = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), average)
        summary = {
            "eval_loss": result.averaged,
            "local_eval_loss_mean": float(result.local_N.mean()),
            "local_eval_loss_min": float(result.local_N.min()),
            "local_eval_loss_max": float(result.local_N.max()),
            "num_params": sum(x.size for x in jax.tree.leaves(params)),
            "steps": config.steps,
            "time_s": self.counters["time_s"],
            **{SUMMARIZED[name]: sent / (config.steps - self.counters["first_step"]) for name, sent in self._bytes().items()},
            "corpus_order1_entropy": data.order1_entropy(self.setup.corpus.train),
            "protocol": f"replicas replaced by their average every {config.consensus_every} steps"
            if config.consensus_every
            else "averaged model, training undisturbed",
        }
        if result.coded is not None:
            summary["eval_loss_coded"] = result.coded
        sample = None
        if self.first:
            prompt = bytes(self._windows(1)[0, :32].astype(np.uint8))
            continuation = models.sample(self.setup.model, params, prompt, config.sample_bytes, jax.random.key(config.seed))
            sample = (prompt + continuation).decode("utf-8", errors="replace")
            temporary = self.workdir / "summary.tmp"
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
            temporary.replace(self.workdir / "summary.json")
        return Outcome(config.steps, None, summary, sample)
