"""Where the numbers of a run go: trackers, of which `metrics.jsonl` and TensorBoard are always there; Weights & Biases on request.

The library prints nothing: what a terminal shows is a tracker of `launch`.
"""

import abc
from collections.abc import Iterator
import contextlib
import importlib
import json
import os
import pathlib
import time
from typing import Any
import uuid

from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from decjax import files
from decjax.errors import TrainingError, not_written


def read(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a run so far, without lines that a crash cut short."""
    path, rows = workdir / "metrics.jsonl", []
    for line in files.read_text(path).splitlines(keepends=True) if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = files.parse_json(line)
            if line.endswith("\n") and isinstance(row["step"], int) and isinstance(row.get("kind", ""), str):
                rows.append(row)
    return rows


class Tracker(abc.ABC):
    """What follows a run: it is given every row of numbers, and told of every step."""

    @abc.abstractmethod
    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Takes a row.

        Args:
            step: how many steps were taken.
            kind: "train", of the steps since the last such row, or "eval", of the validation examples.
            values: numbers by name, as "loss" and "time_s".
        """

    def step(self, step: int) -> None:  # noqa: B027  (may be left out)
        """So many steps were taken; called after each."""

    def close(self) -> None:  # noqa: B027  (may be left out)
        """The run has ended, in whatever way."""


@contextlib.contextmanager
def writing(workdir: pathlib.Path, what: str) -> Iterator[None]:
    """Context manager that raises a `CheckpointError` if `what` cannot be written, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise not_written(what, workdir, error) from error


class JsonLines(Tracker):
    """Appends each row to `metrics.jsonl` as a JSON object; a `CheckpointError` if that cannot be written any more.

    A continued run drops the rows after the step it continues from, and the evaluation of the last step, which comes after its
    checkpoint, so that no step stands twice.
    """

    def __init__(self, workdir: pathlib.Path, start: int, steps: int):
        self._workdir = workdir
        path = workdir / "metrics.jsonl"
        kept = [row for row in read(workdir) if row["step"] <= start and (row.get("kind"), row["step"]) != ("eval", steps)]
        self.last = kept[-1]["step"] if kept else 0  # step of the last row that was kept; 0: none
        self.recorded = {row["kind"]: row["step"] for row in kept if "kind" in row}  # the same of each kind
        files.write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a")

    def log(self, step, kind, values):
        with writing(self._workdir, f"metrics of step {step}"):
            self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self._file.flush()

    def close(self):
        with contextlib.suppress(OSError):  # Every row was flushed; what could not be, cannot be now.
            self._file.close()


class TensorBoard(Tracker):
    """Events in `tensorboard/`, as train/loss; a `CheckpointError` if they cannot be written any more.

    They are written at once: the thread of tensorboardX's own `SummaryWriter` dies on a full disk, and its queue waits for ever.
    """

    def __init__(self, workdir: pathlib.Path, start: int):
        self._workdir = workdir
        (workdir / "tensorboard").mkdir(exist_ok=True)
        self._events = event_file_writer.EventsWriter(str(workdir / "tensorboard" / "events"))
        begun = event_pb2.SessionLog(status=event_pb2.SessionLog.SessionStatus.Value("START"))  # pyright: ignore[reportAttributeAccessIssue]
        self._event(start + 1, session_log=begun)  # TensorBoard drops what it has of this step and later ones.

    def _event(self, step: int, **what: Any) -> None:
        self._events.write_event(event_pb2.Event(wall_time=time.time(), step=step, **what))  # pyright: ignore[reportAttributeAccessIssue]

    def log(self, step, kind, values):
        with writing(self._workdir, f"metrics of step {step}"):
            for name, value in values.items():
                self._event(step, summary=summary.scalar(f"{kind}/{name}", value))
            self._events.flush()

    def close(self):
        with contextlib.suppress(OSError):
            self._events.close()


def wandb() -> Any:
    """The module of Weights & Biases; a `TrainingError` without it."""
    try:
        module = importlib.import_module("wandb")
        module.init  # noqa: B018  A folder ./wandb, as it leaves behind, can be imported as well.
    except (ImportError, AttributeError) as error:
        raise TrainingError("wandb, which tracker 'wandb' needs, is not installed; pip install wandb") from error
    return module


class WandB(Tracker):
    """A run of Weights & Biases, in the project of WANDB_PROJECT or "decjax"; with WANDB_MODE=offline it stays in `wandb/`.

    Its id is kept in the file `wandb_id`, so that a continued run goes on there. Nothing can be taken back there: rows of steps that
    it has already, which a continued run logs again after a crash, it leaves out; they say the same.

    Args:
        workdir: of the run.
        start: the step it begins at; 0 begins a new run there.
        config: shown with it.

    Raises:
        TrainingError: if wandb is not installed, or cannot begin, as without a login.
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
                f"Weights & Biases cannot begin ({reason}); run `wandb login`, set WANDB_MODE=offline, or leave out tracker 'wandb'"
            ) from error

    @property
    def place(self) -> str:
        """Where it can be seen: its address, or the folder that `wandb sync` uploads later."""
        url = None if self._run.offline else self._run.url
        return url or str(pathlib.Path(self._run.dir).parent)

    def log(self, step, kind, values):
        self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self):
        self._run.finish()
