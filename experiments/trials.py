"""Runs of an experiment: made once each, so many at a time, and read from their directories.

What is finished is not made again, so an interrupted experiment goes on where it was.
"""

from collections.abc import Callable, Iterable, Mapping
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
from typing import Any, NamedTuple
import zlib

from decjax import files
from experiments import contents
from launch import command, processes

STEPS_ONLY = {"eval.every": 10**9, "eval.local": False, "data.sample_bytes": 0}  # fields of runs that should do nothing but steps
TIMED = STEPS_ONLY | {"eval.num_windows": 1, "checkpoint.every": 10**9}  # the same, and fields of runs whose steps are timed
TOGETHER = 2  # runs at a time, unless a pool says otherwise
_GPU_MEMORY, _GPU_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.9  # JAX's variable; the fraction for all runs


class Trial(NamedTuple):
    """A run of `launch.train`."""

    workdir: pathlib.Path
    config: str  # config file with its shorthand
    fields: tuple[tuple[str, Any], ...] = ()  # of the config, dotted, and their values

    @property
    def arguments(self) -> list[str]:
        """Of `launch.train`."""
        return [*self.config_arguments, f"--workdir={self.workdir}"]

    @property
    def config_arguments(self) -> list[str]:
        """Those that say what is trained."""
        return [f"--config={self.config}", *(f"--config.{key}={value}" for key, value in self.fields)]

    @property
    def finished(self) -> bool:
        """Whether the run of this folder has ended."""
        return finished(self.workdir)

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run."""
        return summary(self.workdir)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The rows of the run's metrics that are of a kind, "train" or "eval"."""
        return rows(self.workdir, kind)


def finished(workdir: pathlib.Path) -> bool:
    """Whether the run of a directory has ended; one with a damaged summary has not: `launch.train` repairs it."""
    try:
        return bool(summary(workdir))
    except ValueError:
        return False


def summary(workdir: pathlib.Path) -> dict[str, Any]:
    """Return the summary of the run in a directory."""
    return files.read_json(workdir / "summary.json")


def rows(workdir: pathlib.Path, *kinds: str) -> list[dict[str, Any]]:
    """The rows of the run's metrics that are of these kinds, "train" or "eval"; none: all.

    Raises:
        Broken: if they cannot be read.
    """
    path = workdir / "metrics.jsonl"
    try:
        found = [files.parse_json(line) for line in files.read_text(path).splitlines()]
        return [row for row in found if not kinds or row["kind"] in kinds]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Broken(f"{path} cannot be read ({error!r}); remove {workdir}, and the same command trains again") from error


def trial(parent: pathlib.Path, name: str, config: str, fields: Mapping[str, Any]) -> Trial:
    """A run whose folder is named after it, and after a checksum of what it trains: with other options or data it is another run."""
    return Trial(parent / f"{name_of(name)}_{checksum(key(config, kept(config, fields)))}", config, tuple(fields.items()))


def checksum(text: str) -> str:
    """Of a text, for names of folders."""
    return f"{zlib.crc32(text.encode()):08x}"


class Broken(Exception):
    """A run that failed."""


class NoData(Broken):
    """A run whose data do not exist."""


class Pool:
    """Runs that are made `count` at a time, each on separate cores: two that share all cores wait for each other's threads.

    Args:
        count: number of runs at a time.
    """

    def __init__(self, count: int = TOGETHER):
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._count, self._shares = count, queue.SimpleQueue[frozenset[int]]()
        self._running, self._stopped = set[subprocess.Popen](), False
        for k in range(count):
            self._shares.put(frozenset(cores[k::count]) if len(cores) >= count else frozenset())

    def train(self, trial: Trial) -> bool:
        """Make a run unless it is finished; return whether it ended: False if it diverged. It ends with this process.

        A line on stderr says that it was made. A file named "diverged" in the folder says that it did diverge, so that it is not made
        again.

        Raises:
            Broken: if it ended in any other way.
        """
        diverged = trial.workdir / "diverged"
        if trial.finished or diverged.exists():
            return trial.finished
        cores = self._shares.get()
        try:
            process = start(trial, cores, self._count)
            self._running.add(process)
            if self._stopped:  # Meanwhile.
                process.terminate()
            code = process.wait()
            self._running.discard(process)
        finally:
            self._shares.put(cores)
        if code == command.USER_ERROR:
            raise Broken(f"the run in {trial.workdir} was refused, for the reason above; change the flag that it names")
        if code not in (0, command.DIVERGED):
            raise Broken(f"the run in {trial.workdir} {processes.how_it_ended(code)}; the same command continues")
        print(f"{'diverged' if code else 'trained'}: {trial.workdir}", file=sys.stderr, flush=True)  # Else it seems to hang.
        if code == command.DIVERGED:
            diverged.parent.mkdir(parents=True, exist_ok=True)
            diverged.touch()
        return code == 0

    def map(self, do: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """`do(item)` of every item, as many at once as there are runs at a time."""
        with concurrent.futures.ThreadPoolExecutor(self._count) as pool:
            futures = [pool.submit(do, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException as error:
                pool.shutdown(wait=False, cancel_futures=True)  # Those that have not begun.
                if not isinstance(error, Exception):  # A signal: the others save what they have, and end.
                    self._stopped = True
                    for process in tuple(self._running):
                        process.terminate()
                raise

    def make(self, trials: Iterable[Trial]) -> list[bool]:
        """Make all of these runs; return whether each ended, as `train` does."""
        return self.map(self.train, trials)

    def make_all(self, trials: Iterable[Trial]) -> None:
        """Make all of these runs.

        Raises:
            Broken: if one of them diverged.
        """
        trials = list(trials)
        for trial, ended in zip(trials, self.make(trials), strict=True):
            if not ended:
                raise Broken(f"the run in {trial.workdir} diverged; use fewer steps")


def start(trial: Trial, cores: frozenset[int] = frozenset(), count: int = 1) -> subprocess.Popen:
    """Return the process of a run, which ends with this process; on these cores only, if any are named, and one of `count` at a time."""
    # JAX would give most of a GPU to each; what the user has set stays.
    memory = {_GPU_MEMORY: os.environ.get(_GPU_MEMORY, f"{_GPU_SHARE / count:.3f}")}
    process = processes.start(
        processes.python(processes.TRAIN, trial.arguments), start_new_session=False, stdout=subprocess.DEVNULL, env=memory
    )
    if cores:
        with contextlib.suppress(ProcessLookupError):  # It has ended already.
            os.sched_setaffinity(process.pid, cores)
    return process


def name_of(text: str) -> str:
    """Return a text as a name of a folder."""
    return "_".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def kept(config: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with a checksum of the data instead of their path."""
    return {
        name: contents.checksum(value, config.partition(":")[0]) if name == "data.path" else value for name, value in fields.items()
    }


def key(config: str, fields: Mapping[str, Any]) -> str:
    """Return a text that identifies a run; `fields` as `kept` gives them."""
    return json.dumps([config, fields], sort_keys=True)
