"""The results log of an experiment: the results of its runs, which outlast their run directories."""

from collections.abc import Callable
import copy
import errno
import fcntl
import json
import os
import pathlib
import threading
from typing import Any

from decjax import files
from experiments import trials
from experiments.trials import Trial
from launch import command

_START = '{"config": '  # of every line
_INVALID = (ValueError, KeyError, TypeError)


class ResultsLog:
    """The results of runs, in a file of JSON lines. A run that is in it is not repeated, even if its run directory is gone.

    The path of data is replaced by a checksum of the data. After a change of the code that alters results, remove the lines that it
    makes wrong.

    Args:
        path: of the file, which the first run creates.
        pool: makes the missing runs; none: two at a time.

    Raises:
        trials.Broken: if it cannot be read or written, or a line is damaged; an incomplete last line is ignored.
    """

    def __init__(self, path: pathlib.Path, pool: trials.Pool | None = None):
        self.pool = pool or trials.Pool()
        self._path, self._lock, self._trains = path, threading.Lock(), True
        self._results: dict[str, dict[str, Any] | None] = {}
        try:
            command.folder("results", str(path.parent))  # Fail before the first run if it cannot be written.
            if path.exists():
                files.check_regular(path)
                path.open("ab").close()
            text = path.read_text() if path.exists() else ""
        except command.UserError as error:
            raise trials.Broken(str(error)) from error
        except (OSError, UnicodeDecodeError) as error:
            raise trials.Broken(f"the results log {path} cannot be read and written ({error}); give another --results") from error
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            try:
                row = _row(line)
            except _INVALID as error:
                if number == len(lines) and not text.endswith("\n") and line.startswith(_START[: len(line)]):
                    continue  # It is incomplete; the next row replaces it.
                problem = f"{path}, line {number} is not a line of a results log ({error!r})"
                raise trials.Broken(f"{problem}; remove it, or give another --results") from error
            self._results[trials.key(row["config"], row["fields"])] = row["numbers"]

    @classmethod
    def of(cls, out: pathlib.Path, path: str | None, pool: trials.Pool | None = None) -> "ResultsLog":
        """Return the results log at `path`, by default one in `out`, the folder of the run directories."""
        return cls(pathlib.Path(path) if path else out / "results.jsonl", pool)

    def recorded(self) -> "ResultsLog":
        """Return the same results log without training: `result` raises trials.NoData for missing runs."""
        other = copy.copy(self)
        other._trains = False
        return other

    def result(self, trial: Trial, read: Callable[[Trial], dict[str, Any]] = Trial.summary) -> dict[str, Any] | None:
        """Return the results that `read` extracts from a run, which is trained if it is missing; None if it diverged.

        Raises:
            trials.NoData: if the run is missing and the path of its data does not exist.
        """
        fields = trials.kept(trial.config, dict(trial.fields))
        key = trials.key(trial.config, fields)
        if key not in self._results:
            data = dict(trial.fields).get("data.path")
            if not self._trains or (data and not os.path.exists(os.path.expanduser(data))):
                raise trials.NoData(f"{self._path} lacks the run {trial.workdir.name}; give the path of its data, to make it")
            numbers = read(trial) if self.pool.train(trial) else None
            with self._lock:
                self._append({"config": trial.config, "fields": fields, "numbers": numbers})
            self._results[key] = numbers
        return self._results[key]

    def _append(self, row: dict[str, Any]) -> None:
        """Append a line after the last complete one, or nothing if the disk is full."""
        line = json.dumps(row).encode() + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # Other commands may write to the same results log.
                text = file.read()
                end = text.rfind(b"\n") + 1
                if text[end:] and _is_row(text[end:]):  # Only its line break is missing.
                    end, line = len(text), b"\n" + line
                file.seek(end)
                try:
                    if file.write(line) < len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    file.truncate(end)
                    raise
                file.truncate()
        except OSError as error:
            problem = f"the results log {self._path} cannot be written ({error.strerror})"
            raise trials.Broken(f"{problem}; fix the cause, and run the same command again") from error


def _row(line: str | bytes) -> dict[str, Any]:
    row = files.parse_json(line)
    if not (isinstance(row["config"], str) and isinstance(row["fields"], dict) and isinstance(row["numbers"], dict | None)):
        raise ValueError("config must be a text, fields and numbers objects")
    return row


def _is_row(line: bytes) -> bool:
    try:
        return bool(_row(line))
    except _INVALID:
        return False
