"""Trackers of a run's metrics: `metrics.jsonl` and TensorBoard in every run, and Weights & Biases on request.

The library prints nothing: the terminal display is a tracker of `launch`.
"""

import abc
from collections.abc import Callable
import contextlib
import importlib
import json
import os
import pathlib
import time
import types
from typing import Any
import uuid

import jax
from tensorboardX import event_file_writer, summary

from decjax import files
from decjax.errors import TrainingError, translating_write_errors

events = importlib.import_module("tensorboardX.proto.event_pb2")  # Type checkers see none of its generated classes.


def read(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Return the rows of a run so far, without lines that a crash cut short."""
    path, rows = workdir / "metrics.jsonl", []
    for line in files.read_text(path).splitlines(keepends=True) if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = files.parse_json(line)
            if line.endswith("\n") and isinstance(row["step"], int) and isinstance(row.get("kind", ""), str):
                rows.append(row)
    return rows


class Tracker(abc.ABC):
    """Receives the metrics of a run."""

    @abc.abstractmethod
    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Record a row of metrics. An `OSError`, as on a full disk, ends the run with a `CheckpointError`.

        Args:
            step: the number of steps taken.
            kind: "train", for the steps since the last such row, or "eval", for the validation examples.
            values: metrics by name, such as "loss" and "time_s".
        """

    def step(self, step: int) -> None:  # noqa: B027  (optional)
        """Called after each step, with the number of steps taken."""

    def close(self) -> None:  # noqa: B027  (optional)
        """Called when the run ends, with or without an error."""


class JsonLines(Tracker):
    """Appends each row to `metrics.jsonl` as a JSON object.

    A continued run drops the rows after the step it continues from, and the evaluation of the last step, which follows its
    checkpoint, so that no step occurs twice.
    """

    def __init__(self, workdir: pathlib.Path, start: int, steps: int):
        path = workdir / "metrics.jsonl"
        kept = [row for row in read(workdir) if row["step"] <= start and (row.get("kind"), row["step"]) != ("eval", steps)]
        self.last = kept[-1]["step"] if kept else 0  # step of the last row that was kept; 0: none
        self.recorded = {row["kind"]: row["step"] for row in kept if "kind" in row}  # the same for each kind
        files.write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a")

    def log(self, step, kind, values):
        self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._file.flush()

    def close(self):
        with contextlib.suppress(OSError):  # Every row has been flushed already.
            self._file.close()


class Profile(Tracker):
    """Writes a trace of some steps with JAX's profiler, which TensorBoard, XProf and Perfetto show.

    Args:
        folder: in which it writes.
        steps: to be traced.
        start: steps taken so far.
        wait: waits until these steps are complete.
    """

    def __init__(self, folder: pathlib.Path, steps: range, start: int, wait: Callable[[], object]):
        self._folder, self._steps, self._wait, self._is_tracing = folder, steps, wait, False
        self.step(start)

    def log(self, step, kind, values):
        pass

    def step(self, step):
        if (step in self._steps) != self._is_tracing:
            self._wait()
            self._toggle()

    def close(self):
        if self._is_tracing:
            self._toggle()

    def _toggle(self) -> None:
        with translating_write_errors("the profile", self._folder):
            jax.profiler.stop_trace() if self._is_tracing else jax.profiler.start_trace(self._folder)
        self._is_tracing = not self._is_tracing


class TensorBoard(Tracker):
    """Writes events to `tensorboard/`, such as train/loss.

    It writes without a queue: the thread of tensorboardX's `SummaryWriter` dies on a full disk, after which its queue blocks forever.
    """

    def __init__(self, workdir: pathlib.Path, start: int):
        (workdir / "tensorboard").mkdir(exist_ok=True)
        self._events = event_file_writer.EventsWriter(str(workdir / "tensorboard" / "events"))
        begun = events.SessionLog(status=events.SessionLog.SessionStatus.Value("START"))
        self._event(start + 1, session_log=begun)  # TensorBoard drops its events of this step and later ones.

    def _event(self, step: int, **content: object) -> None:
        self._events.write_event(events.Event(wall_time=time.time(), step=step, **content))

    def log(self, step, kind, values):
        for name, value in values.items():
            self._event(step, summary=summary.scalar(f"{kind}/{name}", value))
        self._events.flush()

    def close(self):
        with contextlib.suppress(OSError):
            self._events.close()


def wandb() -> types.ModuleType:
    """Return the module of Weights & Biases; raise a `TrainingError` if it is not installed."""
    try:
        module = importlib.import_module("wandb")
        module.init  # noqa: B018  A folder ./wandb, which it leaves behind, can be imported, too.
    except (ImportError, AttributeError) as error:
        raise TrainingError("wandb, which tracker 'wandb' needs, is not installed; pip install wandb") from error
    return module


class WandB(Tracker):
    """Logs to Weights & Biases, in the project of WANDB_PROJECT or "decjax"; with WANDB_MODE=offline to `wandb/`.

    Its id is kept in the file `wandb_id`, so that a continued run continues there. Weights & Biases ignores rows of steps that it has
    already, which a continued run logs again after a crash. `start` is the first step; 0 begins a new run there.

    Raises:
        TrainingError: if wandb is not installed or cannot start, for example without a login.
    """

    def __init__(self, workdir: pathlib.Path, start: int, config: dict[str, Any]):
        client, path = wandb(), workdir / "wandb_id"
        if not start or not path.exists():
            files.write_whole(path, uuid.uuid4().hex[:8])
        try:
            self._run = client.init(
                project=os.environ.get("WANDB_PROJECT", "decjax"),
                name=workdir.absolute().name,
                id=path.read_text(),
                resume="allow",
                dir=str(workdir),
                config=config,
                settings=client.Settings(console="off", silent=True),
            )
        except client.Error as error:
            reason = " ".join(str(error).split())
            raise TrainingError(
                f"Weights & Biases cannot start ({reason}); run `wandb login`, set WANDB_MODE=offline, or leave out tracker 'wandb'"
            ) from error

    @property
    def place(self) -> str:
        """The address of the run, or the folder that `wandb sync` uploads later."""
        url = None if self._run.offline else self._run.url
        return url or str(pathlib.Path(self._run.dir).parent)

    def log(self, step, kind, values):
        self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self):
        self._run.finish()
