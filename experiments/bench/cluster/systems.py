"""The systems compared on an emulated cluster, and how they are measured: decjax, PyTorch DDP, and decent-dp, one method a row.

Every worker trains the same transformer of 5.9M parameters (`MODEL`) on the same number of sequences with AdamW. A *visit*
takes a few steps of one row and drops the first, so that what was sent before has to arrive; rows take turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import os
import statistics
from typing import Any, NamedTuple

from experiments.bench.cluster.group import Failed, Group
from launch import cluster, command, config_file

LEAST_STEPS = 5  # without communication, so that all workers compute at the same time for most of a visit
MODEL = dict(vocabulary=1536, context=128, width=320, hidden=1280, heads=5, depth=4)
BATCH_SIZE = 8  # sequences per worker and step
ERRORS = (command.UserError, Failed, OSError)  # errors that end an experiment on an emulated cluster
BUCKET, WHOLE = 2**18, 2**30  # bytes of a bucket: the default of configs/lm.py, and one that holds everything


def use_one_thread() -> None:
    """Compute matrix products on one thread in processes that this one starts, as PyTorch's workers do, since hosts share cores."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"


def sizes(file: str) -> dict[str, int]:
    """Return the sizes of the model of a config file."""
    return {name: size for name, size in config_file.get_config(file).model.items() if type(size) is int}


class Row(NamedTuple):
    """A row of the table: one method of a system."""

    name: str  # unique
    how: dict[str, Any]  # arguments of the worker's `prepare`
    peer: bool = False  # whether PyTorch runs it; else decjax
    local_size: int = 1  # processes per host
    apart: bool = False  # whether it has processes of its own, which end with it if it cannot run
    visits: Mapping[str, Any] = {}  # arguments of the worker's `steps`

    @property
    def alone(self) -> bool:
        """Whether it sends nothing."""
        return self.how.get("kind") == "alone" or self.how.get("argument") == "method=local"

    @property
    def group(self) -> str:
        """The name of the group of processes that the row runs on; rows with the same name share them."""
        return f"{'PyTorch' if self.peer else 'decjax'}, {self.local_size} a host" + (f", {self.name}" if self.apart else "")


def decjax(
    name: str,
    argument: str,
    bucket_bytes: int = BUCKET,
    local_size: int = 1,
    model: Mapping[str, int] = MODEL,
    batch_size: int = BATCH_SIZE,
    pauses: bool = False,
    pause_s: float = 0.0,
    file: str = "configs/lm.py",
    **fields: object,
) -> Row:
    """Return a row of decjax.

    `argument` is a shorthand of the config file, `fields` are dotted fields. With `pauses` its steps can pause; with `pause_s` each does.
    """
    fields |= {f"model.{key}": size for key, size in model.items()}
    if "method=local" not in argument.split(","):  # It sends nothing and refuses both fields.
        fields |= {"bucket_bytes": bucket_bytes, "local_size": local_size}
    how = {"argument": argument, "fields": fields, "batch_size": batch_size, "pauses": pauses or pause_s > 0, "file": file}
    return Row(name, how, False, local_size, visits={"pause_s": (pause_s, 0.0)} if pause_s else {})


def torch(
    name: str,
    kind: str,
    local_size: int = 1,
    batch_size: int = BATCH_SIZE,
    apart: bool = False,
    model: Mapping[str, int] = MODEL,
    **options: object,
) -> Row:
    """Return a row of PyTorch: `kind` is one of torch_worker's METHODS, which takes the `options`."""
    return Row(name, {"kind": kind, "model": model, "batch_size": batch_size, **options}, True, local_size, apart)


class Visit(NamedTuple):
    """The result of a visit."""

    step_s: float  # mean over steps and workers
    sent_bytes: float  # over the busiest link, per step, headers included; without the first step


class Runner(contextlib.ExitStack):
    """Starts and measures rows on a network; rows of PyTorch need `peers`, an interpreter with requirements-peers.txt."""

    def __init__(self, network: cluster.Network, peers: str | None = None):
        super().__init__()
        self.network, self.peers = network, peers
        self.periods: dict[str, int] = {}  # row -> steps after which its schedule repeats
        self.num_parameters = 0
        self.refused: dict[str, str] = {}  # row -> why it cannot run
        self._groups: dict[str, Group] = {}
        self._of: dict[str, str] = {}  # row -> its group

    def prepare(self, row: Row, needed: bool = False) -> None:
        """Start the row's processes unless they run already, compile it and take two periods of steps.

        A row that cannot run is entered in `refused`, and so are the rows that shared its processes.

        Raises:
            Failed: if the row is `needed` and cannot run.
        """
        try:
            answer, *_ = self._group(row).ask("prepare", method=row.name, **row.how)
            self._group(row).ask("steps", method=row.name, count=2 * answer["period"])
        except Failed as failure:
            self.refuse(row, failure)
            if needed:
                raise Failed(f"{row.name}: {failure}") from failure
        else:
            self.periods[row.name], self.num_parameters = answer["period"], answer["parameters"]
            self._of[row.name] = row.group

    def prepare_all(self, rows: Sequence[Row], needed: bool = False) -> None:
        """Prepare rows, and print which of them can run."""
        for row in rows:
            self.prepare(row, needed)
            print(f"{row.name}: {self.refused.get(row.name) or 'ready'}", flush=True)

    def refuse(self, row: Row, failure: Failed) -> None:
        """Enter a row whose processes have ended in `refused`, and all rows that shared them."""
        self._groups.pop(row.group, None)
        lost = [name for name, group in self._of.items() if group == row.group]
        self.refused |= dict.fromkeys(lost, f"its processes ended with {row.name!r}") | {row.name: str(failure)}
        self.periods = {name: period for name, period in self.periods.items() if name not in lost}

    @property
    def refusals(self) -> list[str]:
        """Return a line for each row that cannot run."""
        return [f"{name} cannot run: {why}" for name, why in self.refused.items()]

    def _group(self, row: Row) -> Group:
        if row.peer and self.peers is None:
            raise Failed("no --peers were given")
        if row.group not in self._groups:
            module = f"experiments.bench.cluster.{'torch' if row.peer else 'decjax'}_worker"
            # Matrix products on one thread, as in PyTorch's workers, since hosts share cores.
            environment = {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
                "OPENBLAS_NUM_THREADS": "1",
                "LOCAL_WORLD_SIZE": str(row.local_size),
            }
            python = self.peers if row.peer else None
            group = self._groups[row.group] = Group(self.network, module, row.local_size, environment, python)
            self.callback(group.close)
        return self._groups[row.group]

    def visit(self, row: Row, steps: int = 1, **how: object) -> Visit:
        """Measure a row for at least `steps` steps, in whole periods of its schedule; without communication, `LEAST_STEPS` or more."""
        period = self.periods[row.name]
        count = 1 + max(-(-steps // period) * period, LEAST_STEPS if row.alone else 1)
        before = self.network.bytes()
        per_worker = self._group(row).ask("steps", method=row.name, count=count, **dict(row.visits) | how)
        sent = max(late.sent - early.sent for early, late in zip(before, self.network.bytes(), strict=True))
        return Visit(statistics.mean(statistics.mean(times_s[1:]) for times_s in per_worker), sent / count)

    def throughput_Bps(self, row: Row, seconds: float = 2.0) -> float:
        """Return the bytes per second of a TCP connection between the first two hosts; `row` has one process per host."""
        num_bytes = int(seconds * (self.network.rate_Bps(0) or 1e8))
        measured, *_ = self._group(row).ask("throughput", address=self.network.addresses[0], num_bytes=num_bytes)
        return measured


def interleaved(
    runner: Runner, rows: Sequence[Row], rounds: int, steps: Callable[[Row], int] = lambda row: 1
) -> Iterator[tuple[Row, Visit]]:
    """Yield (row, visit) of all rows in turn, `rounds` times, with another first row each time, for at least `steps(row)` steps each.

    A row that cannot run is skipped from then on.
    """
    rows = [row for row in rows if row.name in runner.periods]
    for k in range(rounds):
        first = k * len(rows) // rounds
        for row in rows[first:] + rows[:first]:
            if row.name not in runner.periods:
                continue
            try:
                visit = runner.visit(row, steps(row))
            except Failed as failure:
                runner.refuse(row, failure)
            else:
                yield row, visit
