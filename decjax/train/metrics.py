"""Output of a run's numbers: `metrics.jsonl`, TensorBoard events, and the screen."""

import contextlib
import json
import pathlib
import sys
import time
from typing import Any

import rich.console
import rich.progress
from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from decjax.errors import CheckpointError


def read(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in a work directory, without lines that a crash left incomplete."""
    path, rows = workdir / "metrics.jsonl", []
    for line in path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            if line.endswith("\n") and isinstance(row["step"], int):
                rows.append(row)
    return rows


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically: readers see the old or the new text, never a part of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


class Recorder:
    """Appends rows to metrics.jsonl, one JSON object per line, and writes their numbers as TensorBoard events.

    A continued run drops the rows after the step from which it continues, and the last step's evaluation, which is logged after
    that step's checkpoint, so that no step is logged twice. Events are written directly, because the thread of tensorboardX's
    `SummaryWriter` dies on a full disk and leaves its caller waiting.
    """

    def __init__(self, workdir: pathlib.Path, start: int, steps: int):
        self._workdir = workdir
        path = workdir / "metrics.jsonl"
        kept = [row for row in read(workdir) if row["step"] <= start and (row.get("kind"), row["step"]) != ("eval", steps)]
        self.last = kept[-1]["step"] if kept else 0  # step of the last row that was kept; 0: none
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a")
        (workdir / "tensorboard").mkdir(exist_ok=True)
        self._events = event_file_writer.EventsWriter(str(workdir / "tensorboard" / "events"))
        begun = event_pb2.SessionLog(status=event_pb2.SessionLog.SessionStatus.Value("START"))  # pyright: ignore[reportAttributeAccessIssue]
        self._event(start + 1, session_log=begun)  # On this event TensorBoard drops what it has of this step and later ones.

    def _event(self, step: int, **what: Any) -> None:
        self._events.write_event(event_pb2.Event(wall_time=time.time(), step=step, **what))  # pyright: ignore[reportAttributeAccessIssue]

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row; raises a `CheckpointError` if the directory can no longer be written."""
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            for name, value in row.items():
                if name not in ("step", "kind"):
                    self._event(row["step"], summary=summary.scalar(f"{row['kind']}/{name}", value))
            self._events.flush()
        except OSError as error:
            raise CheckpointError(
                f"metrics of step {row['step']} cannot be written in {self._workdir} ({error.strerror}); make room there, and the "
                "same command continues from the last checkpoint"
            ) from error

    def close(self) -> None:
        """Closes the files."""
        for file in (self._file, self._events):
            with contextlib.suppress(OSError):  # Rows were flushed as they were written; an error then was raised there.
                file.close()


class Display:
    """Progress on the screen: step, loss, items/s, consensus distance, time left; a live line on a terminal, plain lines elsewhere.

    Args:
        start: the step at which this process starts.
        first: the step from which the run's time is counted.
        steps: the run's last step.
        items: what throughput counts, such as "tokens".
        unit: of the loss; may be empty.
    """

    def __init__(self, start: int, first: int, steps: int, items: str, unit: str):
        self._first, self._steps, self._items = first, steps, items
        self._unit = f" {unit}" if unit else ""
        self._console = rich.console.Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed}/{task.total}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[numbers]}"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("left"),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=True,
            speed_estimate_period=60,
        )
        self._task = self._progress.add_task("train", total=steps, completed=start, numbers="compiling …")

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *exception):
        self._progress.stop()

    def say(self, text: str) -> None:
        """Prints a line above the live one."""
        self._progress.console.print(text, markup=False)

    def step(self, step: int) -> None:
        """Shows that a step is done."""
        self._progress.update(self._task, completed=step)

    def show(self, row: dict[str, Any]) -> None:
        """Shows a row: training rows in the live line, or as a line without a terminal; evaluations as a line."""
        if row["kind"] == "train":
            rate = f"{row[f'{self._items}_per_s']:,.0f} {self._items}/s"
            numbers = f"loss {row['loss']:.3f}  {rate}  consensus {row['consensus_distance']:.2e}"
            self._progress.update(self._task, numbers=numbers)
            if not self._console.is_terminal:
                left = row["time_s"] / (row["step"] - self._first) * (self._steps - row["step"])
                self.say(f"step {row['step']}/{self._steps}  {numbers}  {left:.0f} s left")
        else:
            self.say(
                f"step {row['step']}/{self._steps}  evaluation: averaged model {row['loss']:.4f}{self._unit}, "
                f"workers {row['loss_min']:.4f} to {row['loss_max']:.4f}, consensus {row['consensus_distance']:.2e}"
            )
