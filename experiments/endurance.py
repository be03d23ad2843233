"""Random sequences of faults in elastic runs, and the conditions that must hold after each.

    python -m experiments.endurance --out=runs/endurance --sequences=150
    python -m experiments.endurance --out=runs/endurance_load --sequences=20 --load=8

Each sequence trains noisy quadratics (`experiments/paced.py`) with two to four processes and one of six methods. Two to five events
disturb it at random moments: a process is killed or frozen, a host is cut off, two hosts cannot reach each other, the launcher gets
SIGTERM or SIGKILL and the same command runs again, the launcher is stopped for a while, or a second launcher starts in the same
directory. Then the run has to finish, and these must hold: the exit code is 0; every row of metrics is there once, in order; the data
position never goes back and skips less than one step per change of the group; the last checkpoint is of the last step; replicas of
synchronous methods are equal; only disturbed processes were left out; no process is left. Sequences are seeded; finished ones are read
from OUT/sequences.jsonl.

Events on links need root and iproute2 (`launch.cluster`); without them the other events are used.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time
from typing import Any, NamedTuple

from absl import flags

from decjax import files
from experiments import script, trials
from launch import cluster, command, processes

FLAGS = flags.FLAGS

METHODS = {  # name: (shorthand, whether its replicas are equal at the end)
    "all-reduce": ("method=allreduce", True),
    "top-k all-reduce": ("method=allreduce,reducer=codec(codec=topk)", True),
    "gossip": ("topology=one_peer_exponential", False),
    "CHOCO": ("topology=ring,mixer=choco,codec=int8", False),
    "push-sum": ("topology=exponential,mixer=push_sum", False),
    "DiLoCo": ("method=diloco,every=10", True),
}
STEPS, LOG, SAVE = 1500, 10, 50
ON_PROCESS, ON_LAUNCHER = ("kill", "freeze"), ("terminate", "kill launcher", "stop launcher", "second launcher")
ON_LINKS = ("cut", "partition")
LASTS_S = (1.0, 12.0)  # of what has an end: shorter and longer than the heartbeat
LATEST_S = 5.0  # of an event, after the one before
HANG_S = 600.0  # without a new row of metrics; generous, since other processes may use the machine
NETWORK = f"endure{os.getpid()}"  # Several of these commands may run on a machine.
EQUAL = 1e-4  # consensus distance of equal replicas, rounding included
_VIEW = re.compile(r"step (\d+): going on with \d+ workers: ([\d, ]+)")


class Broken(Exception):
    """A sequence after which a condition does not hold."""


class Event(NamedTuple):
    """An event that disturbs a run."""

    kind: str
    after_s: float  # the event before, or the first row of metrics
    targets: tuple[int, ...] = ()  # processes, which are hosts as well
    lasts_s: float = 0.0


class Case(NamedTuple):
    """A run and its events."""

    seed: int
    method: str
    processes: int
    events: tuple[Event, ...]

    @property
    def in_cluster(self) -> bool:
        """Whether it needs links of its own."""
        return any(event.kind in ON_LINKS for event in self.events)


def draw(seed: int, links: bool) -> Case:
    """The sequence of a seed; `links` says whether there can be events on links."""
    chance = random.Random(seed)
    count = chance.randint(2, 4)

    def event() -> Event:
        kind = chance.choice((*ON_PROCESS, *ON_LAUNCHER, *(ON_LINKS if links else ())))
        one_or_two = {"partition": 2}.get(kind, 0 if kind in ON_LAUNCHER else 1)
        return Event(kind, chance.uniform(0, LATEST_S), tuple(chance.sample(range(count), one_or_two)), chance.uniform(*LASTS_S))

    return Case(seed, chance.choice(list(METHODS)), count, tuple(event() for _ in range(chance.randint(2, 5))))


class Run:
    """The launchers of a sequence, one after the other, in one work directory."""

    def __init__(self, case: Case, folder: pathlib.Path):
        self.case, self.folder, self.workdir = case, folder, folder / "run"
        self.disturbed: set[int] = set()
        self.done: list[Event] = []  # the events for which the run was not finished yet
        self.launcher = self._start()

    def _start(self) -> subprocess.Popen:
        shorthand, _ = METHODS[self.case.method]
        count = self.case.processes
        fields = {
            "log_every": LOG,
            "eval.every": 10**9,
            "checkpoint.every": SAVE,
            "elastic.spares": False,
            "elastic.heartbeat_s": 5.0,
        }
        trial = trials.Trial(
            self.workdir, f"experiments/paced.py:{shorthand},workers={count},simulate=false,steps={STEPS}", tuple(fields.items())
        )
        launcher = (
            ["launch.cluster", "run", f"--hosts={count}", f"--name={NETWORK}"]
            if self.case.in_cluster
            else ["launch.local", f"--num_processes={count}"]
        )
        line = processes.python(launcher[0], [*launcher[1:], "--elastic", "--", *trial.arguments])
        with (self.folder / "launcher.log").open("a") as log:
            return processes.start(line, death_signal=signal.SIGTERM, stdout=log, stderr=log)

    # -- Events -------------------------------------------------------------------------------------------------------

    def do(self, event: Event) -> None:
        """Disturbs the run; an event that lasts ends before this returns."""
        if self.launcher.poll() is not None:  # It has finished already.
            return
        self.disturbed |= set(event.targets)
        self.done.append(event)
        {
            "kill": self._kill,
            "freeze": self._freeze,
            "cut": lambda event: self._on_links(event, cluster.Network.set_link),
            "partition": lambda event: self._on_links(event, cluster.Network.set_route),
            "terminate": lambda event: self._again(signal.SIGTERM),
            "kill launcher": lambda event: self._again(signal.SIGKILL),
            "stop launcher": self._stop_launcher,
            "second launcher": self._second,
        }[event.kind](event)

    def _process_of(self, slot: int) -> int | None:
        for process, line in members(self.workdir):
            if f"--process_index={slot}" in line:
                return process
        return None

    def _signal(self, slot: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if process := self._process_of(slot):
                os.kill(process, number)

    def _kill(self, event: Event) -> None:
        self._signal(event.targets[0], signal.SIGKILL)

    def _freeze(self, event: Event) -> None:
        self._signal(event.targets[0], signal.SIGSTOP)
        time.sleep(event.lasts_s)
        self._signal(event.targets[0], signal.SIGCONT)

    def _on_links(self, event: Event, change: Callable[..., None]) -> None:
        """Takes links down, as `change` of a network does, and up again."""
        with contextlib.suppress(cluster.ClusterError):  # The network goes with a run that finishes meanwhile.
            if links := cluster.find(NETWORK):
                change(links, *event.targets, up=False)
                time.sleep(event.lasts_s)
                change(links, *event.targets, up=True)

    def _again(self, number: signal.Signals) -> None:
        self.launcher.send_signal(number)
        code = self.launcher.wait(HANG_S)
        if code == 0:
            return  # It had finished.
        stopped = 128 + signal.SIGTERM, -signal.SIGTERM  # The latter while modules are being imported.
        if number == signal.SIGTERM and code not in stopped:
            raise Broken(f"SIGTERM ended the launcher with exit code {code}")
        self._check_nothing_left()
        self.launcher = self._start()

    def _stop_launcher(self, event: Event) -> None:
        self.launcher.send_signal(signal.SIGSTOP)
        time.sleep(event.lasts_s)
        self.launcher.send_signal(signal.SIGCONT)

    def _second(self, event: Event) -> None:
        if self.case.in_cluster:  # Two launchers cannot have one network.
            return
        first, second = self.launcher, self._start()
        self._await(lambda: second.poll() is not None or first.poll() is not None, "the second launcher does not end")
        if second.wait(HANG_S) == 0 and first.poll() is None:
            raise Broken("a second launcher in the same directory ended with exit code 0")

    # -- What must hold -----------------------------------------------------------------------------------------------

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition as long as the run goes on."""
        last, since = self.last_row(), time.monotonic()
        while not condition():
            if (now := self.last_row()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > HANG_S:
                raise Broken(f"{what}: no row of metrics in {HANG_S:g} s, the last is {last}")
            time.sleep(0.2)

    def last_row(self) -> int:
        """The step of the last row of metrics; 0: there is none yet."""
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            return json.loads((self.workdir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    def to_the_end(self) -> None:
        """Goes through all events, waits for the end of the run and checks what it left.

        Raises:
            Broken: if something does not hold.
        """
        for event in self.case.events:
            self._await(lambda: self.last_row() > 0 or self.launcher.poll() is not None, "the run does not begin")
            time.sleep(event.after_s)
            self.do(event)
        self._await(lambda: self.launcher.poll() is not None, "the run hangs")
        if self.launcher.returncode:
            raise Broken(f"the launcher ended with exit code {self.launcher.returncode}; see {self.folder / 'launcher.log'}")
        self._check_nothing_left()
        check_rows(self.case, self.workdir)
        check_views(self.case, (self.folder / "launcher.log").read_text(), self.disturbed)

    def _check_nothing_left(self) -> None:
        deadline = time.monotonic() + 60
        while left := members(self.workdir):
            if time.monotonic() > deadline:
                raise Broken(f"processes are left: {[process for process, _ in left]}")
            time.sleep(0.2)

    def end(self) -> None:
        """Ends all processes of the run that are left."""
        for process in [self.launcher.pid] * (self.launcher.poll() is None) + [process for process, _ in members(self.workdir)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
                os.kill(process, signal.SIGKILL)
        self.launcher.wait()


def check_rows(case: Case, workdir: pathlib.Path) -> None:
    """Raises `Broken` if a finished run lacks a row or its last checkpoint, took a batch twice, or has replicas that wrongly differ."""
    rows = trials.rows(workdir, "train")
    steps = [row["step"] for row in rows]
    if missing := set(range(LOG, STEPS + 1, LOG)) - set(steps):
        raise Broken(f"rows of metrics are missing, the first of step {min(missing)}")
    if steps != sorted(set(steps)):
        raise Broken("rows of metrics are not in order, or there twice")
    positions = [(0, 0), *((row["step"], row["batches"]) for row in rows)]
    for (step, batches), (later, more) in itertools.pairwise(positions):
        if not later - step <= more - batches <= (later - step) * case.processes:
            raise Broken(f"from step {step} to {later} the data position went from {batches} to {more}")
    if (saved := files.numbers_in(workdir / "checkpoints"))[-1:] != [STEPS]:
        raise Broken(f"the newest checkpoint is of step {max(saved, default=0)}, not {STEPS}")
    distance = rows[-1]["consensus_distance"]
    if METHODS[case.method][1] and distance > EQUAL:
        raise Broken(f"replicas of {case.method} differ at the end: consensus distance {distance:.1e}")


def check_views(case: Case, log: str, disturbed: set[int]) -> None:
    """Raises `Broken` if the group went on without a process to which nothing had happened."""
    for step, slots in _VIEW.findall(log):
        if healthy := set(range(case.processes)) - {int(slot) for slot in slots.split(",")} - disturbed:
            raise Broken(f"step {step}: process {min(healthy)} was left out, and nothing had happened to it")


def members(workdir: pathlib.Path) -> list[tuple[int, list[str]]]:
    """The training processes of a work directory, as (id, command line)."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            line = (path / "cmdline").read_text().split("\0")
            if f"--workdir={workdir}" in line and processes.TRAIN in line:
                found.append((int(path.name), line))
    return found


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """A context in which `count` processes compute all the time."""
    busy = [processes.start(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()


def go_through(case: Case, folder: pathlib.Path) -> tuple[Sequence[Event], str]:
    """(the events before the run was finished, the condition that does not hold after it; empty: all hold)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = Run(case, folder)
    try:
        run.to_the_end()
    except (Broken, subprocess.TimeoutExpired, trials.Broken) as error:
        return run.done, str(error)
    finally:
        run.end()
    shutil.rmtree(folder)
    return run.done, ""


def words(events: Sequence[Event]) -> str:
    """Such as "kill 1, terminate"."""
    return ", ".join(" ".join([event.kind, *map(str, event.targets)]) for event in events)


def done(path: pathlib.Path) -> dict[int, dict[str, Any]]:
    """The finished sequences of a file, by seed."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["seed"]: row for row in map(json.loads, lines)}


def main() -> int:
    out = script.folder()
    out.mkdir(parents=True, exist_ok=True)
    results, links = out / "sequences.jsonl", os.geteuid() == 0 and shutil.which("tc") is not None
    with load(FLAGS.load):
        for seed in range(FLAGS.first, FLAGS.first + FLAGS.sequences):
            if seed in done(results):
                continue
            case = draw(seed, links)
            begun = time.monotonic()
            events, broken = go_through(case, out / str(seed))
            row = {"seed": seed, "method": case.method, "processes": case.processes, "events": words(events), "broken": broken}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = f"{case.method}, {case.processes} processes, {row['events']}: {broken or 'holds'}"
            print(f"{seed}: {shown} ({time.monotonic() - begun:.0f} s)", flush=True)
    rows = [row for seed, row in done(results).items() if FLAGS.first <= seed < FLAGS.first + FLAGS.sequences]
    table = script.table("method", "sequences", "events", "broken")
    for method in METHODS:
        of_method = [row for row in rows if row["method"] == method]
        table.add_row(
            method,
            str(len(of_method)),
            str(sum(bool(event) for row in of_method for event in row["events"].split(", "))),
            str(sum(bool(row["broken"]) for row in of_method)),
        )
    script.show(table)
    return int(any(row["broken"] for row in rows))


if __name__ == "__main__":
    flags.DEFINE(command.FOLDER, "out", None, "Results and the files of broken sequences go here.", required=True)
    flags.DEFINE_integer("sequences", 150, "How many.", lower_bound=1)
    flags.DEFINE_integer("first", 0, "Seed of the first sequence.", lower_bound=0)
    flags.DEFINE_integer("load", 0, "Further processes that compute all the time.", lower_bound=0)
    script.run(main, (cluster.ClusterError, OSError))
