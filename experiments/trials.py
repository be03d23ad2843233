"""Runs of an experiment: each is made once, several at a time, and read from its directory.

Finished runs are not repeated, so an interrupted experiment continues.
"""

from collections.abc import Callable, Iterable, Mapping
import concurrent.futures
import contextlib
import functools
import gzip
import json
import os
import pathlib
import queue
import subprocess
import sys
from typing import Any, NamedTuple, TypeVar
import zlib

from decjax import files
from launch import command, processes

Item = TypeVar("Item")
Answer = TypeVar("Answer")

STEPS_ONLY = {"eval.every": 10**9, "eval.local": False, "data.sample_bytes": 0}  # fields of runs that only take steps
TIMED = STEPS_ONLY | {"eval.num_windows": 1, "checkpoint.every": 10**9}  # fields of runs whose steps are timed
TOGETHER = 2  # runs at a time, unless a pool says otherwise
_GPU_MEMORY, _GPU_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.9  # JAX's variable; the fraction for all runs
MULTI30K_FILES = tuple(f"{split}.{language}" for split in ("train", "val", "test_2016_flickr") for language in ("de", "en"))
# Files of a folder of data that the task of a config file reads; a text is all files that are neither hidden nor gzipped.
READ = {"configs/translation.py": MULTI30K_FILES, "configs/cifar.py": ("data_batch_*.bin", "test_batch.bin")}


class Broken(Exception):
    """A run that failed."""


class NoData(Broken):
    """A run whose data do not exist."""


class Trial(NamedTuple):
    """A run of `launch.train`."""

    workdir: pathlib.Path
    config: str = ""  # config file with its shorthand; empty: of a run that is only read
    fields: tuple[tuple[str, Any], ...] = ()  # of the config, dotted, and their values

    @property
    def arguments(self) -> list[str]:
        """Arguments of `launch.train`."""
        return [*self.config_arguments, f"--workdir={self.workdir}"]

    @property
    def config_arguments(self) -> list[str]:
        """Arguments of `launch.train` that determine the config."""
        return [f"--config={self.config}", *(f"--config.{key}={value}" for key, value in self.fields)]

    @property
    def finished(self) -> bool:
        """Whether the run has finished; one with a damaged summary has not: `launch.train` repairs it."""
        try:
            return bool(self.summary())
        except ValueError:
            return False

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run."""
        return files.read_json(self.workdir / "summary.json")

    def rows(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the rows of the run's metrics that are of these kinds, "train" or "eval"; none: all rows."""
        path = self.workdir / "metrics.jsonl"
        try:
            rows = [files.parse_json(line) for line in files.read_text(path).splitlines()]
            return [row for row in rows if not kinds or row["kind"] in kinds]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Broken(f"{path} cannot be read ({error!r}); remove {self.workdir}, and the same command trains again") from error

    def step_s(self, items: int, skipped: int) -> list[float]:
        """Return the seconds per step of each interval between rows of metrics.

        Args:
            items: tokens of a step.
            skipped: intervals at the start that do not count.
        """
        return [items / row["tokens_per_s"] for row in self.rows("train")[skipped:]]


def trial(parent: pathlib.Path, name: str, config: str, fields: Mapping[str, Any]) -> Trial:
    """Return a run whose folder has its name and a checksum of its config and data: with others it is another run."""
    return Trial(parent / f"{name_of(name)}_{checksum(key(config, kept(config, fields)))}", config, tuple(fields.items()))


def checksum(text: str) -> str:
    """Return the checksum of a text, for names of folders."""
    return f"{zlib.crc32(text.encode()):08x}"


def name_of(text: str) -> str:
    """Return a text as a name of a folder."""
    return "_".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def kept(config: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with a checksum of the data instead of their path."""
    return {
        name: data_checksum(value, config.partition(":")[0]) if name == "data.path" else value for name, value in fields.items()
    }


def key(config: str, fields: Mapping[str, Any]) -> str:
    """Return a text that identifies a run; `fields` as `kept` returns them."""
    return json.dumps([config, fields], sort_keys=True)


@functools.cache
def data_checksum(path: str, config: str = "") -> str:
    """Return the checksum of a file, or of the files of a folder that a config file's task reads, with their names.

    Gzipping does not change it. Anything else, such as a checksum, is returned unchanged.

    Raises:
        OSError: if a file cannot be read or unpacked.
    """
    root = pathlib.Path(os.path.expanduser(path))
    if root.is_file():
        return f"{zlib.crc32(_unpacked(root)):08x}"
    if config in READ:  # A plain file takes precedence over a gzipped one of the same name.
        paths = [file for name in READ[config] for file in list(root.glob(name)) or root.glob(f"{name}.gz")]
    else:
        paths = [file for file in root.rglob("*") if file.is_file() and file.suffix != ".gz"]
        paths = [file for file in paths if not any(part.startswith(".") for part in file.relative_to(root).parts)]
    crc = 0
    for file in sorted(paths):
        crc = zlib.crc32(_unpacked(file), zlib.crc32(file.name.removesuffix(".gz").encode(), crc))
    return f"{crc:08x}" if crc else path


def _unpacked(path: pathlib.Path) -> bytes:
    try:
        with files.open_regular(path) as file:
            return gzip.decompress(file.read()) if path.suffix == ".gz" else file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise OSError(f"{path} cannot be read ({error}); get the file again, or give other data") from error


class Pool:
    """Makes `size` runs at a time, each on separate cores: two that share all cores wait for each other's threads."""

    def __init__(self, size: int = TOGETHER):
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._size, self._shares = size, queue.SimpleQueue[frozenset[int]]()
        self._running, self._stopped = set[subprocess.Popen](), False
        for k in range(size):
            self._shares.put(frozenset(cores[k::size]) if len(cores) >= size else frozenset())

    def train(self, trial: Trial) -> bool:
        """Make a run unless it is finished; return False if it diverged. It ends with this process.

        A file named "diverged" marks a run that diverged, so that it is not repeated.

        Raises:
            Broken: if it ended in any other way.
        """
        diverged = trial.workdir / "diverged"
        if trial.finished or diverged.exists():
            return trial.finished
        cores = self._shares.get()
        try:
            process = start(trial, cores, self._size)
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

    def map(self, do: Callable[[Item], Answer], items: Iterable[Item]) -> list[Answer]:
        """Return `do(item)` of every item, computed in as many threads as there are runs at a time."""
        with concurrent.futures.ThreadPoolExecutor(self._size) as pool:
            try:  # A signal may come while runs are still being submitted.
                return [future.result() for future in [pool.submit(do, item) for item in items]]
            except BaseException as error:
                pool.shutdown(wait=False, cancel_futures=True)
                if not isinstance(error, Exception):  # A signal: the running ones save their state and end.
                    self._stopped = True
                    for process in tuple(self._running):
                        process.terminate()
                raise

    def make(self, trials: Iterable[Trial]) -> list[bool]:
        """Make runs; return the results of `train`."""
        return self.map(self.train, trials)


def start(trial: Trial, cores: frozenset[int] = frozenset(), together: int = 1) -> subprocess.Popen:
    """Start a run, one of `together` at a time, on these cores, if there are any; it ends with this process."""
    # JAX would give most of a GPU to each; the user's setting takes precedence.
    memory = {_GPU_MEMORY: os.environ.get(_GPU_MEMORY, f"{_GPU_SHARE / together:.3f}")}
    process = processes.start(
        processes.python(processes.TRAIN, trial.arguments), start_new_session=False, stdout=subprocess.DEVNULL, env=memory
    )
    if cores:
        with contextlib.suppress(ProcessLookupError):  # It has ended already.
            os.sched_setaffinity(process.pid, cores)
    return process
