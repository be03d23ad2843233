"""Runs on an emulated cluster with injected faults, and the record of what happened in them."""

from collections.abc import Callable
import contextlib
import itertools
import json
import math
import pathlib
import re
import signal
import subprocess
import threading
import time
from typing import IO, Any, NamedTuple

from experiments import trials
from experiments.bench.cluster.group import Failed
from experiments.methods import HOSTS
from launch import cluster, processes

POLL_S = 0.05
LEAVE_S = 1.0  # after the end of a launcher, when no process of its run may be left
_FAULT = re.compile(r"chaos: (\w+) (\d+)")
_AGAIN = re.compile(r"process (\d+) .*it will be replaced")
VIEW = re.compile(r"step (\d+): continuing with \d+ workers: ([\d, ]+)")


class Event(NamedTuple):
    """An event of a run."""

    at_s: float  # since the start
    kind: str  # "start" of processes, "kill", "freeze" or "cut" of one, "stop" of all; "view"; "row" of metrics
    value: Any  # the processes; the members of the group; (step, loss, workers)


class Recorder:
    """Writes events of a run to a file as they happen.

    Args:
        path: of the file.
        workdir: of the run, whose rows of metrics are events too.
    """

    def __init__(self, path: pathlib.Path, workdir: pathlib.Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._workdir, self._start_s = path.open("w"), workdir, time.monotonic()
        self._lock, self._last = threading.Lock(), 0
        self.kinds = set[str]()  # of events so far

    def __call__(self, kind: str, value: object) -> None:
        with self._lock:
            self.kinds.add(kind)
            self._file.write(json.dumps(Event(round(self.passed_s, 3), kind, value)) + "\n")
            self._file.flush()

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._start_s

    def read_rows(self) -> None:
        """Record new rows of metrics; steps that are repeated after a restart count once."""
        path = self._workdir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for row in (json.loads(line) for line in lines if line.endswith("\n")):
            if row["kind"] == "train" and row["step"] > self._last:
                self._last = row["step"]
                self("row", (row["step"], row["loss"], row.get("workers", HOSTS)))


def listen(lines: IO[str], record: Callable[[str, object], None], log: pathlib.Path) -> None:
    """Record the events in a launcher's standard error, and append all of it to `log`."""
    with log.open("a", buffering=1) as kept:
        for line in lines:
            kept.write(line)
            if match := _FAULT.search(line):
                record(match[1], [int(match[2])])
            elif match := _AGAIN.search(line):
                record("start", [int(match[1])])
            elif match := VIEW.search(line):
                record("view", [int(slot) for slot in match[2].split(",")])


def members(workdir: pathlib.Path) -> list[tuple[int, list[str]]]:
    """Return the processes of a run as (id, command line)."""
    matches = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process may have ended meanwhile.
            line = (path / "cmdline").read_text().split("\0")
            if f"--workdir={workdir}" in line:
                matches.append((int(path.name), line))
    return matches


class Launch(NamedTuple):
    """Hosts with one process each, and their faults.

    Attributes:
        chaos: returns the faults of each start, as --chaos has them; empty: none.
        limit_s: seconds after which the run is ended.
        elastic: whether the run survives faults. Otherwise it ends with one, and is started again.
    """

    hosts: int
    rate: str
    chaos: Callable[[int], str] = lambda start: ""
    limit_s: float = math.inf
    elastic: bool = True

    def events(self, path: pathlib.Path, log: pathlib.Path, trial: trials.Trial) -> list[Event]:
        """Return the events of a run, from `path` if it is there; otherwise train."""
        if not path.exists():
            part = path.with_suffix(".part")
            record = Recorder(part, trial.workdir)
            for start in itertools.count():
                code = self._run(start, record, log, trial)
                if not code:
                    break
                if self.elastic or "kill" not in record.kinds:
                    raise Failed(f"the run in {trial.workdir} ended with exit code {code}; see {log}")
            part.rename(path)
        return read(path)

    def _run(self, start: int, record: Recorder, log: pathlib.Path, trial: trials.Trial) -> int:
        """Train until the run ends or `limit_s` have passed; return the exit code, 0 for the latter."""
        chaos = self.chaos(start)
        options = ["--elastic"] * self.elastic + [f"--chaos={chaos}"] * bool(chaos)
        line = ["run", f"--hosts={self.hosts}", f"--rate={self.rate}", *options, "--", *trial.arguments]
        launcher = processes.start(
            processes.python("launch.cluster", line),
            death_signal=signal.SIGTERM,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        record("start", list(range(self.hosts)))
        listener = threading.Thread(target=listen, args=(launcher.stderr, record, log), daemon=True)
        listener.start()
        while launcher.poll() is None and record.passed_s <= self.limit_s:
            time.sleep(POLL_S)
            record.read_rows()
        if over := launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
        code = launcher.wait()
        listener.join()
        record.read_rows()
        record("stop", list(range(self.hosts)))
        time.sleep(LEAVE_S)
        left = [f"process {process}" for process, _ in members(trial.workdir)]
        if left or cluster.find():
            raise Failed(f"{trial.workdir}: its launcher has ended and left {'; '.join(left) or f'network {cluster.NAME!r}'}")
        return 0 if over else code


def read(path: pathlib.Path) -> list[Event]:
    """Return the events of a file."""
    return [Event(*json.loads(line)) for line in path.read_text().splitlines()]
