"""The results log of an experiment: the results of its runs, kept when their run directories are gone."""

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

_BEGINS = '{"config": '  # every line


class ResultsLog:
    """The results of runs, in a file of JSON lines: a run that is in it is not trained again, even if its run directory is gone.

    A path of data is kept as a checksum of the data. After a change of the code that alters numbers, remove the lines that it makes wrong.

    Args:
        path: of the file, which the first run creates.
        pool: makes what the results log lacks; none: two runs at a time.

    Raises:
        trials.Broken: if it cannot be read or written, or a line is damaged; an incomplete last line is ignored.
    """

    def __init__(self, path: pathlib.Path, pool: trials.Pool | None = None):
        self.pool = pool or trials.Pool()
        self._path, self._lock, self._known, self._makes = path, threading.Lock(), {}, True
        try:
            command.folder("results", str(path.parent))  # Whether it can be written is to be known before the first run.
            if path.exists():
                files.check_regular(path)
                path.open("ab").close()
            text = path.read_text() if path.exists() else ""
        except command.UserError as error:
            raise trials.Broken(str(error)) from error
        except (OSError, UnicodeDecodeError) as error:
            raise trials.Broken(f"the results log {path} cannot be read and written ({error}); give another --results") from error
        lines, cut = text.splitlines(), not text.endswith("\n")
        for number, line in enumerate(lines, 1):
            is_cut = cut and number == len(lines) and line.startswith(_BEGINS[: len(line)])
            try:
                row = _row(line)
            except (ValueError, KeyError, TypeError) as error:
                if not is_cut:  # Else the next row takes its place.
                    raise trials.Broken(
                        f"{path}, line {number} is not a line of a results log ({error!r}); remove it, or give another --results"
                    ) from error
            else:
                self._known[trials.key(row["config"], row["fields"])] = row["numbers"]

    @classmethod
    def of(cls, out: pathlib.Path, path: str | None, pool: trials.Pool | None = None) -> "ResultsLog":
        """The results log of an experiment: that of `--results`, or else one among its run directories, which are to be in `out`."""
        return cls(pathlib.Path(path) if path else out / "results.jsonl", pool)

    def as_it_is(self) -> "ResultsLog":
        """The same results log, which makes no run: `result` raises trials.NoData for what it lacks."""
        other = copy.copy(self)
        other._makes = False
        return other

    def result(self, trial: Trial, read: Callable[[Trial], dict[str, Any]] = Trial.summary) -> dict[str, Any] | None:
        """The numbers that `read` finds in a run, which is made unless it is known; None if it diverged.

        Raises:
            trials.NoData: if it has to be made, and there is nothing at the path of its data, which may be a checksum.
        """
        fields = trials.kept(trial.config, dict(trial.fields))
        key = trials.key(trial.config, fields)
        if key not in self._known:
            data = dict(trial.fields).get("data.path")
            if not self._makes or (data and not os.path.exists(os.path.expanduser(data))):
                raise trials.NoData(f"{self._path} lacks the run {trial.workdir.name}; give the path of its data, to make it")
            numbers = read(trial) if self.pool.train(trial) else None
            with self._lock:
                self._append({"config": trial.config, "fields": fields, "numbers": numbers})
            self._known[key] = numbers
        return self._known[key]

    def _append(self, row: dict[str, Any]) -> None:
        """Append a line after the last complete one, or nothing if the disk is full."""
        line = json.dumps(row).encode() + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # Other commands may write to the same results log.
                text = file.read()
                whole = text.rfind(b"\n") + 1
                if text[whole:] and _reads(text[whole:]):  # Only its line break is missing.
                    whole, line = len(text), b"\n" + line
                file.seek(whole)
                try:
                    if file.write(line) < len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    file.truncate(whole)
                    raise
                file.truncate()
        except OSError as error:
            raise trials.Broken(
                f"the results log {self._path} cannot be written ({error.strerror}); fix the cause, and run the same command again"
            ) from error


def _row(line: str | bytes) -> dict[str, Any]:
    row = files.parse_json(line)
    if not (isinstance(row["config"], str) and isinstance(row["fields"], dict) and isinstance(row["numbers"], dict | None)):
        raise ValueError("config must be a text, fields and numbers objects")
    return row


def _reads(line: bytes) -> bool:
    try:
        return bool(_row(line))
    except (ValueError, KeyError, TypeError):
        return False
