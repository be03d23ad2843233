"""Random sequences of faults in elastic runs, and the conditions that must hold after each.

    python -m experiments.endurance --out=runs/endurance --sequences=150
    python -m experiments.endurance --out=runs/endurance_load --sequences=20 --load=8

Each sequence trains noisy quadratics (`experiments/paced.py`) with two to four processes and one of six methods. Two to five events
disturb it at random times: a process is killed or frozen, a host is cut off, two hosts cannot reach each other, the launcher gets
SIGTERM or SIGKILL and is started again, the launcher is stopped for a while, or a second launcher is started in the same directory.
Then the run must finish with exit code 0, and these conditions must hold: each row of metrics exists once, in order; between rows the
data position advances by 1 to N batches per step; the last checkpoint is of the last step; replicas of synchronous methods are equal;
only disturbed processes were removed from the group; no process is left. Sequences are seeded; those in OUT/sequences.jsonl are skipped.

Events on links need root and iproute2 (`launch.cluster`); without them the other events are used.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time
from typing import NamedTuple

from absl import flags

from decjax import files
from experiments import fault_runs, script, trials
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
FIELDS = (
    ("data.wait_s", 0.02),  # so that runs outlast the events
    ("log_every", LOG),
    ("eval.every", 10**9),
    ("checkpoint.every", SAVE),
    ("elastic.spares", False),
    ("elastic.heartbeat_s", 5.0),
)
ON_PROCESS, ON_LAUNCHER = ("kill", "freeze"), ("terminate", "kill launcher", "stop launcher", "second launcher")
ON_LINKS = ("cut", "partition")
LASTS_S = (1.0, 12.0)  # durations of events, shorter and longer than the heartbeat
LATEST_S = 5.0  # longest time between two events
HANG_S = 600.0  # without a new row of metrics; generous, because other processes may use the machine
NETWORK = f"endure{os.getpid()}"  # Several of these commands may run at the same time.
MAX_DISTANCE = 1e-4  # consensus distance of replicas that are equal except for rounding


class Violated(Exception):
    """A condition that does not hold after a sequence."""


def require(condition: bool, problem: str) -> None:
    """Check a condition."""
    if not condition:
        raise Violated(problem)


class Event(NamedTuple):
    """An event that disturbs a run."""

    kind: str
    after_s: float  # since the previous event, or the first row of metrics
    targets: tuple[int, ...] = ()  # indices of processes, which are also those of hosts
    lasts_s: float = 0.0


class Case(NamedTuple):
    """A run and its events."""

    seed: int
    method: str
    processes: int
    events: tuple[Event, ...]

    @property
    def in_cluster(self) -> bool:
        """Whether it runs in an emulated cluster."""
        return any(event.kind in ON_LINKS for event in self.events)


def draw(seed: int, links: bool) -> Case:
    """Draw the sequence of a seed; `links`: whether events on links are possible."""
    rng = random.Random(seed)
    count = rng.randint(2, 4)

    def event() -> Event:
        kind = rng.choice((*ON_PROCESS, *ON_LAUNCHER, *(ON_LINKS if links else ())))
        num_targets = {"partition": 2}.get(kind, 0 if kind in ON_LAUNCHER else 1)
        return Event(kind, rng.uniform(0, LATEST_S), tuple(rng.sample(range(count), num_targets)), rng.uniform(*LASTS_S))

    return Case(seed, rng.choice(list(METHODS)), count, tuple(event() for _ in range(rng.randint(2, 5))))


class Run:
    """The run of a case, whose launcher may be started several times."""

    def __init__(self, case: Case, folder: pathlib.Path):
        self.case, self.folder, self.workdir = case, folder, folder / "run"
        self.disturbed: set[int] = set()
        self.done: list[Event] = []  # events before the end of the run
        self.launcher = self._start()

    def _start(self) -> subprocess.Popen:
        (shorthand, _), count = METHODS[self.case.method], self.case.processes
        config = f"experiments/paced.py:{shorthand},workers={count},simulate=false,steps={STEPS}"
        arguments = ["--elastic", "--", *trials.Trial(self.workdir, config, FIELDS).arguments]
        if self.case.in_cluster:
            line = processes.python("launch.cluster", ["run", f"--hosts={count}", f"--name={NETWORK}", *arguments])
        else:
            line = processes.python("launch.local", [f"--num_processes={count}", *arguments])
        with (self.folder / "launcher.log").open("a") as log:
            return processes.start(line, death_signal=signal.SIGTERM, stdout=log, stderr=log)

    def do(self, event: Event) -> None:
        """Disturb the run; return when the event is over."""
        if self.launcher.poll() is not None:  # The run has finished.
            return
        self.disturbed |= set(event.targets)
        self.done.append(event)
        match event.kind:
            case "kill":
                self._signal(event, signal.SIGKILL)
            case "freeze":
                self._signal(event, signal.SIGSTOP)
                time.sleep(event.lasts_s)
                self._signal(event, signal.SIGCONT)
            case "cut":
                self._on_links(event, cluster.Network.set_link)
            case "partition":
                self._on_links(event, cluster.Network.set_route)
            case "terminate":
                self._restart(signal.SIGTERM)
            case "kill launcher":
                self._restart(signal.SIGKILL)
            case "stop launcher":
                self.launcher.send_signal(signal.SIGSTOP)
                time.sleep(event.lasts_s)
                self.launcher.send_signal(signal.SIGCONT)
            case "second launcher" if not self.case.in_cluster:  # Two launchers cannot have one network.
                self._second()

    def _signal(self, event: Event, number: signal.Signals) -> None:
        for process, line in members(self.workdir):
            if f"--process_index={event.targets[0]}" in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    def _on_links(self, event: Event, change: Callable[..., None]) -> None:
        """Take links down and up again with `change`, a method of a network."""
        with contextlib.suppress(command.UserError):  # The run may finish meanwhile, and its network with it.
            if links := cluster.find(NETWORK):
                change(links, *event.targets, up=False)
                time.sleep(event.lasts_s)
                change(links, *event.targets, up=True)

    def _restart(self, number: signal.Signals) -> None:
        self.launcher.send_signal(number)
        code = self.launcher.wait(HANG_S)
        if code == 0:
            return  # The run has finished.
        stopped = 128 + signal.SIGTERM, -signal.SIGTERM  # The latter while modules are being imported.
        require(number != signal.SIGTERM or code in stopped, f"SIGTERM ended the launcher with exit code {code}")
        self._check_nothing_left()
        self.launcher = self._start()

    def _second(self) -> None:
        first, second = self.launcher, self._start()
        self._await(lambda: second.poll() is not None or first.poll() is not None, "the second launcher does not end")
        failed = second.wait(HANG_S) != 0 or first.poll() is not None
        require(failed, "a second launcher in the same directory ended with exit code 0")

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition while the run makes progress."""
        last, since = self.last_row(), time.monotonic()
        while not condition():
            if (now := self.last_row()) != last:
                last, since = now, time.monotonic()
            require(time.monotonic() - since <= HANG_S, f"{what}: no row of metrics in {HANG_S:g} s, the last is {last}")
            time.sleep(0.2)

    def last_row(self) -> int:
        """Return the step of the last row of metrics; 0 if there is none."""
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            return json.loads((self.workdir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    def finish(self) -> None:
        """Cause all events, wait for the end of the run and check the conditions.

        Raises:
            Violated: if one does not hold.
        """
        for event in self.case.events:
            self._await(lambda: self.last_row() > 0 or self.launcher.poll() is not None, "the run does not begin")
            time.sleep(event.after_s)
            self.do(event)
        self._await(lambda: self.launcher.poll() is not None, "the run hangs")
        code, log = self.launcher.returncode, self.folder / "launcher.log"
        require(code == 0, f"the launcher ended with exit code {code}; see {log}")
        self._check_nothing_left()
        check_rows(self.case, self.workdir)
        check_views(self.case, log.read_text(), self.disturbed)

    def _check_nothing_left(self) -> None:
        deadline = time.monotonic() + 60
        while left := members(self.workdir):
            require(time.monotonic() <= deadline, f"processes are left: {[process for process, _ in left]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill all remaining processes of the run."""
        for process in [self.launcher.pid] * (self.launcher.poll() is None) + [process for process, _ in members(self.workdir)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
                os.kill(process, signal.SIGKILL)
        self.launcher.wait()


def check_rows(case: Case, workdir: pathlib.Path) -> None:
    """Check the rows of metrics, the last checkpoint, the data position and the replicas of a finished run."""
    rows = trials.Trial(workdir).rows("train")
    steps = [row["step"] for row in rows]
    missing = set(range(LOG, STEPS + 1, LOG)) - set(steps)
    require(not missing, f"rows of metrics are missing, the first of step {min(missing, default=0)}")
    require(steps == sorted(set(steps)), "rows of metrics are not in order, or exist twice")
    positions = [(0, 0), *((row["step"], row["batches"]) for row in rows)]
    for (step, batches), (later, more) in itertools.pairwise(positions):
        in_range = later - step <= more - batches <= (later - step) * case.processes
        require(in_range, f"from step {step} to {later} the data position went from {batches} to {more}")
    newest = max(files.numbers_in(workdir / "checkpoints"), default=0)
    require(newest == STEPS, f"the newest checkpoint is of step {newest}, not {STEPS}")
    distance, is_synchronous = rows[-1]["consensus_distance"], METHODS[case.method][1]
    equal = not is_synchronous or distance <= MAX_DISTANCE
    require(equal, f"replicas of {case.method} differ at the end: consensus distance {distance:.1e}")


def check_views(case: Case, log: str, disturbed: set[int]) -> None:
    """Check that only disturbed processes were removed from the group."""
    for step, slots in fault_runs.VIEW.findall(log):
        healthy = set(range(case.processes)) - {int(slot) for slot in slots.split(",")} - disturbed
        require(not healthy, f"step {step}: process {min(healthy, default=0)} was removed, although no event had disturbed it")


def members(workdir: pathlib.Path) -> list[tuple[int, list[str]]]:
    """Return the training processes of a work directory as (id, command line)."""
    return [member for member in fault_runs.members(workdir) if processes.TRAIN in member[1]]


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """Context manager in which `count` processes use the CPU all the time."""
    busy = [processes.start(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()


def run_case(case: Case, folder: pathlib.Path) -> tuple[Sequence[Event], str]:
    """Run a case; return (the events before its end, the violated condition, empty if all hold)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = Run(case, folder)
    try:
        run.finish()
    except (Violated, subprocess.TimeoutExpired, trials.Broken) as error:
        return run.done, str(error)
    finally:
        run.kill()
    shutil.rmtree(folder)
    return run.done, ""


def main() -> int:
    out = script.folder()
    out.mkdir(parents=True, exist_ok=True)
    path, links = out / "sequences.jsonl", os.geteuid() == 0 and shutil.which("tc") is not None
    results = {row["seed"]: row for row in map(json.loads, path.read_text().splitlines() if path.exists() else [])}
    seeds = range(FLAGS.first, FLAGS.first + FLAGS.sequences)
    with load(FLAGS.load):
        for seed in [seed for seed in seeds if seed not in results]:
            case, start_s = draw(seed, links), time.monotonic()
            done, broken = run_case(case, out / str(seed))
            events = ", ".join(" ".join([event.kind, *map(str, event.targets)]) for event in done)
            row = {"seed": seed, "method": case.method, "processes": case.processes, "events": events, "broken": broken}
            results[seed] = row
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            result = f"{case.method}, {case.processes} processes, {events}: {broken or 'all conditions hold'}"
            print(f"{seed}: {result} ({time.monotonic() - start_s:.0f} s)", flush=True)
    table = script.table("method", "sequences", "events", "broken")
    for method in METHODS:
        rows = [results[seed] for seed in seeds if results[seed]["method"] == method]
        num_events = sum(bool(event) for row in rows for event in row["events"].split(", "))
        table.add_row(method, *map(str, (len(rows), num_events, sum(bool(row["broken"]) for row in rows))))
    script.show(table)
    return int(any(results[seed]["broken"] for seed in seeds))


if __name__ == "__main__":
    script.define("out")
    flags.DEFINE_integer("sequences", 150, "Number of sequences.", lower_bound=1)
    flags.DEFINE_integer("first", 0, "Seed of the first sequence.", lower_bound=0)
    flags.DEFINE_integer("load", 0, "Number of further processes that use the CPU all the time.", lower_bound=0)
    script.run(main, (command.UserError, OSError))
