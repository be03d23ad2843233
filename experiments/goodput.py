"""How much training survives processes that are killed.

Compared are gossip, DiLoCo and all-reduce that go on without a worker, and all-reduce that ends and continues from its last checkpoint.

    python -m experiments.goodput --out=runs/goodput
    python -m experiments.goodput --out=runs/goodput --minutes=5 --calm_minutes=2 --row=gossip

Four emulated hosts (launch.cluster: root and iproute2), links of 100 Mbit/s, one process a host, the byte model of configs/lm.py. One
row has a model of ten times as many parameters: a process that returns receives them, and Adam's moments, over its link. Every row
trains twice: without faults for `--calm_minutes`, and for `--minutes` while a random process is killed `--per_hour` times an
hour. Another process takes its place at once. What happened is in OUT/ROW/events.jsonl, what was said in OUT/ROW/launcher.log; rows
that are there are not trained again.

A worker *lives* as long as its process does, and *takes part* while it is in the group that takes steps. The speed of a machine drifts,
so the run with faults is also compared with its own *quiet* stretches, in which nothing has died for a while.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import itertools
import json
import math
import pathlib
import re
import signal
import statistics
import subprocess
import threading
import time
from typing import IO, Any, NamedTuple

from absl import flags

from experiments import script, trials
from experiments.bench.cluster.group import Failed
from experiments.methods import HOSTS, ONE_PEER, SHORTHANDS, SYNC
from launch import cluster, command, processes

FLAGS = flags.FLAGS

LARGER = dict(vocabulary=512, context=128, width=160, hidden=640, heads=5, depth=4)
LOG = 20  # steps between rows of metrics
SAVE = 100  # steps between checkpoints
POLL_S = 0.05
QUIET_S = 12.0  # after a death, until nothing is left of it to be done
LEAVE_S = 1.0  # after the end of a launcher, when nothing of its run may be left
_FAULT = re.compile(r"chaos: (\w+) (\d+)")
_AGAIN = re.compile(r"process (\d+) .*it will be replaced")
VIEW = re.compile(r"step (\d+): continuing with \d+ workers: ([\d, ]+)")


class Row(NamedTuple):
    """A method, and what it does about a worker that dies."""

    name: str
    shorthand: str
    elastic: bool = True
    is_larger: bool = False  # of ten times as many parameters


ROWS = (
    Row("gossip", SHORTHANDS[ONE_PEER]),
    Row("gossip, 1.4M parameters", SHORTHANDS[ONE_PEER], is_larger=True),
    Row("DiLoCo", "method=diloco,every=20"),
    Row(SYNC, SHORTHANDS[SYNC]),
    Row(f"{SYNC}, from its checkpoint", SHORTHANDS[SYNC], elastic=False),
)


class Event(NamedTuple):
    """What happened, and when."""

    at_s: float  # since the row began
    kind: str  # "start" of processes, "kill", "freeze" or "cut" of one, "stop" of all; "view"; "row" of metrics
    value: Any  # the processes; who takes part; (step, loss, workers)


# -- Runs -------------------------------------------------------------------------------------------------------------


class Recorder:
    """Writes events down as they happen.

    Args:
        path: of the file.
        workdir: of the run whose rows of metrics are events too.
    """

    def __init__(self, path: pathlib.Path, workdir: pathlib.Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self.workdir, self._begun = path.open("w"), workdir, time.monotonic()
        self._writing, self._last = threading.Lock(), 0
        self.kinds = set[str]()  # of events so far

    def __call__(self, kind: str, value: Any) -> None:
        with self._writing:
            self.kinds.add(kind)
            self._file.write(json.dumps(Event(round(time.monotonic() - self._begun, 3), kind, value)) + "\n")
            self._file.flush()

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._begun

    def look(self) -> None:
        """Notes rows that are new; the steps that a run takes again after it was restored count once."""
        path = self.workdir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for row in (json.loads(line) for line in lines if line.endswith("\n")):
            if row["kind"] == "train" and row["step"] > self._last:
                self._last = row["step"]
                self("row", (row["step"], row["loss"], row.get("workers", HOSTS)))


def listen(lines: IO[str], note: Recorder, log: pathlib.Path) -> None:
    """Notes what a launcher says on standard error, all of which is kept in `log`."""
    with log.open("a", buffering=1) as kept:
        for line in lines:
            kept.write(line)
            if found := _FAULT.search(line):
                note(found[1], [int(found[2])])
            elif found := _AGAIN.search(line):
                note("start", [int(found[1])])
            elif found := VIEW.search(line):
                note("view", [int(slot) for slot in found[2].split(",")])


class Launch(NamedTuple):
    """Hosts with one process each, and what happens to them."""

    hosts: int
    rate: str
    elastic: bool
    chaos: str


def follow(
    launch: Launch, arguments: Sequence[str], note: Recorder, log: pathlib.Path, over: Callable[[], bool] = lambda: False
) -> int | None:
    """Train on an emulated cluster and record events until the run ends or `over()` holds; return the exit code, or None for the latter."""
    options = ["--elastic"] * launch.elastic + [f"--chaos={launch.chaos}"] * bool(launch.chaos)
    launcher = processes.start(
        processes.python("launch.cluster", ["run", f"--hosts={launch.hosts}", f"--rate={launch.rate}", *options, "--", *arguments]),
        death_signal=signal.SIGTERM,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    note("start", list(range(launch.hosts)))
    listener = threading.Thread(target=listen, args=(launcher.stderr, note, log), daemon=True)
    listener.start()
    while launcher.poll() is None and not over():
        time.sleep(POLL_S)
        note.look()
    if ended_by_us := launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
    code = launcher.wait()
    listener.join()
    note.look()
    note("stop", list(range(launch.hosts)))
    if left := leftovers(note.workdir):
        raise Failed(f"{note.workdir}: its launcher has ended and left {'; '.join(left)}")
    return None if ended_by_us else code


def leftovers(workdir: pathlib.Path) -> list[str]:
    """The processes of a run that still live, and the emulated cluster if it still exists."""
    time.sleep(LEAVE_S)
    found = [f"network {cluster.NAME!r}"] if cluster.find() else []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            if f"--workdir={workdir}" in (process / "cmdline").read_text().split("\0"):
                found.append(f"process {process.name}")
    return found


def train(row: Row, folder: pathlib.Path, minutes: float, per_hour: float) -> None:
    """Trains a row for so long, with faults, after which it is ended; notes what happens in `folder`/events.jsonl."""
    workdir, path = folder / "run", folder / "events.jsonl"
    note = Recorder(path.with_suffix(".part"), workdir)
    for seed in itertools.count():
        chaos = f"storm(per_hour={per_hour:g},seed={seed})" if per_hour else ""
        launch = Launch(HOSTS, FLAGS.rate, row.elastic, chaos)
        code = follow(launch, arguments(row, workdir), note, folder / "launcher.log", lambda: note.passed_s > 60 * minutes)
        if code is None:
            break
        if row.elastic or "kill" not in note.kinds:
            raise Failed(f"{row.name} ended with exit code {code}; see {folder / 'launcher.log'}")
    path.with_suffix(".part").rename(path)


def arguments(row: Row, workdir: pathlib.Path) -> list[str]:
    """Of launch.train."""
    larger = {f"model.{name}": value for name, value in LARGER.items()} if row.is_larger else {}
    fields = larger | trials.STEPS_ONLY
    fields |= {"log_every": LOG, "checkpoint.every": SAVE, "schedule.final_fraction": 1.0, "bucket_bytes": 2**21}
    return trials.Trial(workdir, f"configs/lm.py:{row.shorthand},workers={HOSTS},steps=1000000", tuple(fields.items())).arguments


# -- What the events tell ---------------------------------------------------------------------------------------------


def read(path: pathlib.Path) -> list[Event]:
    """The events of a file."""
    return [Event(*json.loads(line)) for line in path.read_text().splitlines()]


class Phase(NamedTuple):
    """Between two events."""

    begun_s: float
    ended_s: float
    living: frozenset[int]  # processes
    members: frozenset[int]  # those of them that take steps


def phases(events: Sequence[Event]) -> Iterator[Phase]:
    """Who lives and who takes part, from the first row of metrics to the last.

    A run that ended and was started again takes part from the first row on that it had not written before.
    """
    rows = [event.at_s for event in events if event.kind == "row"]
    living, members = frozenset[int](), frozenset[int]()
    for event, following in itertools.pairwise(events):
        if event.kind == "start":
            living |= frozenset(event.value)
        elif event.kind in ("kill", "stop"):
            living -= frozenset(event.value)
        elif event.kind == "view":
            members = frozenset(event.value)
        elif event.kind == "row" and not members & living:
            members = living
        members &= living
        begun_s, ended_s = max(event.at_s, rows[0]), min(following.at_s, rows[-1])
        if ended_s > begun_s:
            yield Phase(begun_s, ended_s, living, members)


class Figures(NamedTuple):
    """Results of a run, from the first row of metrics to the last."""

    steps_per_s: float
    each_per_s: float  # steps of a worker per second that it lives
    quiet_per_s: float  # steps per second between rows that are long after any death; nan: there are none
    participation: float  # of the time of living workers
    resumed_s: list[float]  # from each death to the next step, or view, of the others
    whole_s: list[float]  # from each death until all workers take part again


def figures(events: Sequence[Event]) -> Figures:
    """Of one run."""
    rows = [event for event in events if event.kind == "row"]
    found = list(phases(events))
    living_s, part_s = (
        sum((phase.ended_s - phase.begun_s) * len(getattr(phase, who)) for phase in found) for who in ("living", "members")
    )
    worker_steps = sum((late.value[0] - early.value[0]) * late.value[2] for early, late in itertools.pairwise(rows))
    deaths = [event.at_s for event in events if event.kind == "kill" and rows[0].at_s < event.at_s < rows[-1].at_s]
    resumed = [
        _first(event.at_s for event in events if event.kind in ("view", "row") and event.at_s > at_s) - at_s for at_s in deaths
    ]
    whole = [
        _first(phase.begun_s for phase in found if phase.begun_s > at_s and len(phase.members) == HOSTS) - at_s for at_s in deaths
    ]
    steps, seconds = rows[-1].value[0] - rows[0].value[0], rows[-1].at_s - rows[0].at_s
    whole = [took_s for took_s in whole if took_s < 1e9]
    return Figures(steps / seconds, worker_steps / living_s, _quiet_per_s(rows, deaths), part_s / living_s, resumed, whole)


def _quiet_per_s(rows: Sequence[Event], deaths: Sequence[float]) -> float:
    """Steps per second between neighbouring rows of which the first is `QUIET_S` after the last death, and none is between them."""
    quiet = [
        (early, late)
        for early, late in itertools.pairwise(rows)
        if not any(early.at_s - QUIET_S < at_s <= late.at_s for at_s in deaths)
    ]
    seconds = sum(late.at_s - early.at_s for early, late in quiet)
    return sum(late.value[0] - early.value[0] for early, late in quiet) / seconds if seconds else math.nan


def _first(times: Iterator[float]) -> float:
    return next(iter(times), 1e9)


# -- What is shown ----------------------------------------------------------------------------------------------------


def tabulate(found: dict[str, tuple[Figures, Figures]]) -> Any:
    """One row a method: its figures without and with injected faults."""
    table = script.table(
        "",
        "steps/s without faults",
        "steps/s with faults",
        "share",
        "per living worker",
        "beside quiet stretches",
        "takes part",
        "deaths",
        "resumes after, s",
        "whole after, s",
    )
    for name, (calm, storm) in found.items():
        table.add_row(
            name,
            f"{calm.steps_per_s:.2f}",
            f"{storm.steps_per_s:.2f}",
            f"{100 * storm.steps_per_s / calm.steps_per_s:.1f} %",
            f"{100 * storm.each_per_s / calm.each_per_s:.1f} %",
            f"{100 * storm.each_per_s / storm.quiet_per_s:.1f} %",
            f"{100 * storm.participation:.1f} %",
            str(len(storm.resumed_s)),
            _median(storm.resumed_s),
            _median(storm.whole_s),
        )
    return table


def _median(times_s: list[float]) -> str:
    return f"{statistics.median(times_s):.1f} (most {max(times_s):.1f})" if times_s else ""


def draw(path: str, storms: dict[str, list[Event]]) -> None:
    """Loss against time, and the workers that take part."""
    with script.panels(path, 2, (11.0, 4.2)) as (figure, (by_time, workers)):
        for color, (name, events) in zip(script.COLORS, storms.items()):
            rows = [event for event in events if event.kind == "row"]
            by_time.plot([row.at_s / 60 for row in rows], [row.value[1] for row in rows], color=color, label=name, linewidth=1.4)
            found = list(phases(events))
            at_min = [phase.begun_s / 60 for phase in found]
            workers.plot(at_min, [len(phase.members) for phase in found], color=color, drawstyle="steps-post", linewidth=1.0)
        by_time.set(xlabel="minutes", ylabel="training loss, nats/byte")
        workers.set(xlabel="minutes", ylabel="workers that take part", ylim=(0, HOSTS + 0.2))
        by_time.legend(frameon=False, fontsize=8)
        script.dress(figure, f"{HOSTS} hosts, links of {FLAGS.rate}; a random process is killed {FLAGS.per_hour:g} times an hour")


def main() -> None:
    out = script.folder()
    rows = script.choose(ROWS, FLAGS.row)
    runs = (0.0, FLAGS.calm_minutes), (FLAGS.per_hour, FLAGS.minutes)
    script.check_tables("goodput")
    folders = {row: [out / f"{trials.name_of(row.name)}_{per_hour:g}" for per_hour, _ in runs] for row in rows}
    if not all((folder / "events.jsonl").exists() for pair in folders.values() for folder in pair):
        with cluster.network(hosts=HOSTS, rate=FLAGS.rate):
            pass  # Refuses at once what would end the command later.
    script.claim(out, rate=FLAGS.rate, minutes=FLAGS.minutes, calm_minutes=FLAGS.calm_minutes, per_hour=FLAGS.per_hour)
    storms, found = {}, {}
    for row, pair in folders.items():
        for folder, (per_hour, minutes) in zip(pair, runs, strict=True):
            if not (folder / "events.jsonl").exists():
                train(row, folder, minutes, per_hour)
        calm, storm = (read(folder / "events.jsonl") for folder in pair)
        storms[row.name], found[row.name] = storm, (figures(calm), figures(storm))
        script.show(f"{row.name}: {found[row.name][1].steps_per_s:.2f} steps/s with faults")
    table = tabulate(found)
    script.show(table)
    numbers = {name: [each._asdict() for each in pair] for name, pair in found.items()}
    script.publish("goodput", table, lambda path: draw(path, storms), **numbers)


if __name__ == "__main__":
    flags.DEFINE(command.FOLDER, "out", None, "Run directories, events, table and figure go here.", required=True)
    flags.DEFINE_string("rate", "100mbit", "Of every link.")
    flags.DEFINE_float("minutes", 30.0, "Of each run with faults.", lower_bound=0.5)
    flags.DEFINE_float("calm_minutes", 4.0, "Of each run without faults.", lower_bound=0.5)
    flags.DEFINE_float("per_hour", 125.0, "Processes that are killed.", lower_bound=1.0)
    flags.DEFINE_multi_string("row", [], f"Of {'; '.join(row.name for row in ROWS)}; may be repeated; none: all.")
    script.selects("row")
    flags.DEFINE(command.FOLDER, "pages", None, script.PAGES)
    script.run(main, (command.UserError, Failed, OSError))
