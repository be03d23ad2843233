"""Trainings of an experiment: made once each, two at a time, and read from their directories; rates that are tuned; means over seeds.

What is finished is not made again, so an interrupted experiment goes on where it was.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import concurrent.futures
import contextlib
import copy
import functools
import gzip
import json
import math
import os
import pathlib
import queue
import statistics
import subprocess
import threading
from typing import Any, NamedTuple
import zlib

from launch import command, processes

FACTOR, MOST_RATES = 2.0, 8  # between neighbouring rates; of a grid
TOGETHER = 2  # trainings at a time, unless `at_a_time` says otherwise
_GPU_MEMORY, _GPU_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.9  # JAX's variable; the fraction for all trainings


class Trial(NamedTuple):
    """A run of `launch.train`."""

    workdir: pathlib.Path
    config: str  # config file with its shorthand
    fields: tuple[tuple[str, Any], ...] = ()  # of the config, dotted, and their values

    @property
    def arguments(self) -> list[str]:
        """Of `launch.train`."""
        return [f"--config={self.config}", f"--workdir={self.workdir}", *(f"--config.{key}={value}" for key, value in self.fields)]

    @property
    def finished(self) -> bool:
        """Whether a run of this folder came to its end."""
        return finished(self.workdir)

    def summary(self) -> dict[str, Any]:
        """What the run came to."""
        return summary(self.workdir)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The rows of the run's metrics that are of a kind, "train" or "eval"."""
        return rows(self.workdir, kind)


def finished(workdir: pathlib.Path) -> bool:
    """Whether the run of a directory came to its end."""
    return (workdir / "summary.json").exists()


def summary(workdir: pathlib.Path) -> dict[str, Any]:
    """What the run of a directory came to."""
    return json.loads((workdir / "summary.json").read_text())


def rows(workdir: pathlib.Path, *kinds: str) -> list[dict[str, Any]]:
    """The rows of the run's metrics that are of these kinds, "train" or "eval"; none: all."""
    found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if not kinds or row["kind"] in kinds]


def trial(parent: pathlib.Path, name: str, config: str, fields: Mapping[str, Any]) -> Trial:
    """A run whose folder is named after it, and after a checksum of what it trains: with other options or data it is another run."""
    return Trial(parent / f"{name_of(name)}_{checksum(_key(config, _kept(config, fields)))}", config, tuple(fields.items()))


def checksum(text: str) -> str:
    """Of a text, for names of folders."""
    return f"{zlib.crc32(text.encode()):08x}"


class Broken(Exception):
    """A training that did not end as one does."""


class NoData(Broken):
    """A training that cannot be made, since its data are not there."""


def train(trial: Trial) -> bool:
    """Makes a run unless it is finished; returns whether it came to its end: False if it diverged. It ends when this process ends.

    A file named "diverged" in the folder says that it did, so that it is not made again.

    Raises:
        Broken: if it ended in any other way.
    """
    diverged = trial.workdir / "diverged"
    if trial.finished or diverged.exists():
        return trial.finished
    shares = _shares
    cores = shares.get()
    try:
        code = start(trial, cores).wait()
    finally:
        shares.put(cores)
    if code == command.USER_ERROR:
        raise Broken(f"the run in {trial.workdir} was refused, for the reason above; change the flag that it names")
    if code not in (0, command.DIVERGED):
        raise Broken(f"the run in {trial.workdir} {processes.how_it_ended(code)}; the same command continues")
    if code == command.DIVERGED:
        diverged.parent.mkdir(parents=True, exist_ok=True)
        diverged.touch()
    return code == 0


def start(trial: Trial, cores: frozenset[int] = frozenset()) -> subprocess.Popen:
    """The process of a run, which ends when this process ends; on these cores only, if any are named."""
    # JAX would give most of a GPU to each; what the user has set stays.
    memory = {_GPU_MEMORY: os.environ.get(_GPU_MEMORY, f"{_GPU_SHARE / _together:.3f}")}
    process = processes.start(
        processes.python(processes.TRAIN, trial.arguments), start_new_session=False, stdout=subprocess.DEVNULL, env=memory
    )
    if cores:
        with contextlib.suppress(ProcessLookupError):  # It has ended already.
            os.sched_setaffinity(process.pid, cores)
    return process


def at_a_time(trainings: int) -> None:
    """Says how many trainings are made at a time; it holds for those that begin later."""
    global _together, _shares
    # Each has cores of its own: two that share all cores wait for each other's threads and are a seventh slower.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    _together, _shares = trainings, queue.SimpleQueue[frozenset[int]]()
    for k in range(trainings):
        _shares.put(frozenset(cores[k::trainings]) if len(cores) >= trainings else frozenset())


at_a_time(TOGETHER)


def together(do: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """`do(item)` of every item, as many at once as there are trainings at a time."""
    with concurrent.futures.ThreadPoolExecutor(_together) as pool:
        return list(pool.map(do, items))


def name_of(text: str) -> str:
    """A text as a folder's name."""
    return "_".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


class Book:
    """What trainings came to, in a file of JSON lines: what stands there is not trained again, even if its run directory is gone.

    A path of data is kept as a checksum of the data. Whoever changes the code so that numbers change removes the lines.

    Raises:
        Broken: if it cannot be read or written, or a line cannot be read; a last one that is cut short is left out.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._lock, self._known, self._makes = path, threading.Lock(), {}, True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()  # Whether it can be written is to be known before the first training.
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise Broken(f"the book {path} cannot be read and written ({error}); give another --book") from error
        lines, cut = text.splitlines(), bool(text) and not text.endswith("\n")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                self._known[_key(row["config"], row["fields"])] = row["numbers"]
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines) or not cut:
                    raise Broken(f"{path}, line {number} cannot be read ({error!r}); remove the line") from error
                lines.pop()
        if cut:
            path.write_text("".join(f"{line}\n" for line in lines))

    def as_it_is(self) -> "Book":
        """The same book, which makes no training: `result` raises NoData for what it lacks."""
        other = copy.copy(self)
        other._makes = False
        return other

    def result(self, trial: Trial, read: Callable[[Trial], dict[str, Any]] = Trial.summary) -> dict[str, Any] | None:
        """The numbers that `read` finds in a run, which is made unless it is known; None if it diverged.

        Raises:
            NoData: if it has to be made, and there is nothing at the path of its data, which may be a checksum.
        """
        fields = _kept(trial.config, dict(trial.fields))
        key = _key(trial.config, fields)
        if key not in self._known:
            data = dict(trial.fields).get("data.path")
            if not self._makes or (data and not pathlib.Path(data).expanduser().exists()):
                raise NoData(f"{self._path} lacks the training {trial.workdir.name}; give the path of its data, to make it")
            numbers = read(trial) if train(trial) else None
            row = {"config": trial.config, "fields": fields, "numbers": numbers}
            with self._lock, self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._known[key] = numbers
        return self._known[key]


def book(out: pathlib.Path, path: str | None) -> Book:
    """The book of an experiment: that of `--book`, or else one among its run directories, which are to be in `out`."""
    out.mkdir(parents=True, exist_ok=True)  # All trainings may be in the book.
    return Book(pathlib.Path(path) if path else out / "book.jsonl")


MULTI30K = tuple(f"{split}.{language}" for split in ("train", "val", "test_2016_flickr") for language in ("de", "en"))
# Files of a folder of data that the task of a config file reads; a text is all files that are neither hidden nor gzipped.
READ = {"configs/translation.py": MULTI30K, "configs/cifar.py": ("data_batch_*.bin", "test_batch.bin")}


@functools.cache
def contents(path: str, config: str = "") -> str:
    """A checksum of a file, or of the files of a folder that a config file's task reads, with their names; plain or gzipped is the same.

    What is neither, such as a checksum, is returned as it is.

    Raises:
        Broken: if a file cannot be read or unpacked.
    """
    root = pathlib.Path(path).expanduser()
    if root.is_file():
        return f"{zlib.crc32(_unpacked(root)):08x}"
    crc = 0
    for file in sorted(_read(root, config)):
        crc = zlib.crc32(_unpacked(file), zlib.crc32(file.name.removesuffix(".gz").encode(), crc))
    return f"{crc:08x}" if crc else path


def _read(root: pathlib.Path, config: str) -> Iterable[pathlib.Path]:
    """The files of a folder that a config file's task reads; a plain one goes before a gzipped one of the same name."""
    if config in READ:
        return [file for name in READ[config] for file in list(root.glob(name)) or root.glob(f"{name}.gz")]
    files = (file for file in root.rglob("*") if file.is_file() and file.suffix != ".gz")
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(root).parts)]


def _unpacked(path: pathlib.Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise Broken(f"{path} cannot be read ({error}); get the file again, or give other data") from error


def _kept(config: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with a checksum of the data in the place of their path."""
    return {name: contents(value, config.partition(":")[0]) if name == "data.path" else value for name, value in fields.items()}


def _key(config: str, fields: Mapping[str, Any]) -> str:
    return json.dumps([config, fields], sort_keys=True)


# -- Rates ------------------------------------------------------------------------------------------------------------


def best_rate(measure: Callable[[float], float], grid: Sequence[float]) -> tuple[float, dict[float, float]]:
    """The learning rate with the least loss, and all that were tried; a grid of several whose best is at its edge is extended.

    Runs that diverge have an infinite loss; where all do, smaller rates are tried.
    """
    losses = {rate: measure(rate) for rate in grid}
    while True:
        best = min(losses, key=lambda rate: (losses[rate], rate))
        further = best * FACTOR if best == max(losses) else best / FACTOR if best == min(losses) else None
        if further is None or len(grid) == 1 or len(losses) >= MOST_RATES:
            return best, losses
        losses[further] = measure(further)


# -- Seeds ------------------------------------------------------------------------------------------------------------


_ROUNDING = 1e-9  # Intervals that touch, such as those of counts, overlap whatever their last bits are.


class Spread(NamedTuple):
    """The mean over seeds, and σ, the standard deviation of one seed's value."""

    mean: float
    sigma: float
    count: int

    @property
    def error(self) -> float:
        """2σ of the mean: the half of its interval; nan for a single seed."""
        return 2 * self.sigma / math.sqrt(self.count)

    def text(self, digits: int) -> str:
        """As "27.71 ± 0.09", the mean and 2σ of one seed's value; the mean alone of a single seed."""
        return f"{self.mean:.{digits}f}" + (f" ± {2 * self.sigma:.{digits}f}" if self.count > 1 else "")


def spread(values: Sequence[float]) -> Spread:
    """Of one value for each seed; all nan if one is."""
    if any(map(math.isnan, values)):
        return Spread(math.nan, math.nan, len(values))
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values))


def apart(one: Spread, other: Spread) -> bool:
    """Whether the intervals of ± 2σ of both means do not overlap; False for a single seed, which has none."""
    return abs(one.mean - other.mean) - (one.error + other.error) > _ROUNDING * abs(one.mean)


def equal(one: Spread, other: Spread) -> bool:
    """Whether these intervals overlap, and the means differ by at most one σ, the root of the mean variance."""
    difference, sigma = abs(one.mean - other.mean), math.sqrt((one.sigma**2 + other.sigma**2) / 2)
    return not apart(one, other) and difference <= sigma
