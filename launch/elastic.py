"""Processes of an elastic run: one that dies, freezes or is cut off is started again, and the others go on meanwhile.

The coordinator runs in a thread of the launcher; `decjax.elastic` says what it does.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from typing import NamedTuple

from absl import flags

from decjax.elastic.coordinator import Coordinator
from decjax.elastic.view import View
from launch import accelerators, chaos, command, processes

SECRET = "DECJAX_ELASTIC_SECRET"  # the environment's variable
PAUSE_S = 1.0  # before a process is started again; twice as long after each failure without a step in between
MOST_PAUSE_S = 30.0


class Options(NamedTuple):
    """Of the command line.

    Attributes:
        heartbeat_s: how long a process may be silent until the others go on without it.
        min_workers: the fewest that go on.
    """

    heartbeat_s: float
    min_workers: int


def define_flags() -> None:
    """The flags of launchers."""
    flags.DEFINE_boolean("elastic", False, "Go on without processes that die, and start them again.")
    flags.DEFINE_float(
        "heartbeat_s", 5.0, "Seconds of silence after which an elastic run goes on without a process.", lower_bound=0.2
    )
    flags.DEFINE_string("chaos", "", "Faults, as 'kill=1@60s,freeze=2@90s+15s' or 'storm(per_hour=125,seed=0)'; see launch.chaos.")
    flags.DEFINE_integer("min_workers", 1, "The fewest processes with which an elastic run goes on.", lower_bound=1)


def options() -> Options | None:
    """What the command line says; None: the run is not elastic."""
    chosen = flags.FLAGS
    return Options(chosen.heartbeat_s, chosen.min_workers) if chosen.elastic else None


class Box(NamedTuple):
    """Where the processes run: on this machine, if nothing else is said.

    Attributes:
        listening: makes the coordinator where its address is one.
        environments: variables of each process besides.
        links: that faults may cut or slow down.
    """

    listening: Callable[[Callable[[], Coordinator]], Coordinator] = lambda make: make()
    environments: Sequence[dict[str, str]] = ()
    links: chaos.Links | None = None


class _Slot:
    """A place in the run, and the process that has it."""

    def __init__(self, index: int, start: Callable[[], processes.Child]):
        self.index, self._start = index, start
        self.child = start()
        self.finished = False
        self.pause_s, self.again_at = PAUSE_S, 0.0

    @property
    def code(self) -> int | None:
        return self.child.process.poll()

    def restart_when_due(self) -> None:
        if time.monotonic() >= self.again_at:
            self.child = self._start()
            self.again_at = 0.0


def run_together(
    command_lines: Callable[[list[str]], list[list[str]]],
    host: str,
    given: Options,
    again: str = "",
    faults: Iterator[chaos.Event] = iter(()),
    box: Box = Box(),
) -> int:
    """Runs an elastic group until its run has ended; the exit code is 0, that of a mistake or a divergence, or 128 + the signal.

    Args:
        command_lines: makes those of all processes, with these options besides.
        host: the address at which the coordinator listens.
        given: of the command line.
        again: how to continue after an interruption or a failure.
        faults: what is done to them.
        box: where they run.
    """
    shared = secrets.token_hex(16)
    count = len(command_lines([]))
    coordinator = box.listening(lambda: Coordinator(host, count, given.min_workers, given.heartbeat_s, shared, _say_view))
    lines = command_lines([f"--elastic={':'.join(map(str, coordinator.address))}", f"--heartbeat_s={given.heartbeat_s}"])
    environments = [
        own | {SECRET: shared} | further
        for own, further in zip(accelerators.environments(count), box.environments or [{}] * count, strict=True)
    ]
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(processes.caught_signals())
        stack.enter_context(_serving(coordinator))
        slots: list[_Slot] = []
        stack.callback(lambda: processes.send([slot.child for slot in slots], signal.SIGKILL))

        def start(line, environment):
            log = stack.enter_context(tempfile.TemporaryFile())
            return processes.Child(processes.start(line, env=environment, stdout=None, stderr=log), log)

        starts = [functools.partial(start, *each) for each in zip(lines, environments, strict=True)]
        slots += [_Slot(index, own) for index, own in enumerate(starts)]
        trouble = stack.enter_context(contextlib.closing(chaos.Chaos(faults, lambda index: slots[index].child.living(), box.links)))
        return _watch(slots, coordinator, caught, trouble.look, f"; {again}" if again else "")


@contextlib.contextmanager
def _serving(coordinator: Coordinator) -> Iterator[None]:
    """Inside, the coordinator serves in a thread of its own."""
    over = threading.Event()
    thread = threading.Thread(target=coordinator.run, args=(over.is_set,), name="coordinator", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(slots: list[_Slot], coordinator: Coordinator, caught: list[signal.Signals], look: Callable[[], None], again: str) -> int:
    told = False
    while not all(slot.finished for slot in slots):
        look()
        if caught and not told:
            told = True
            processes.send([slot.child for slot in slots], signal.SIGTERM)
        for slot in slots:
            if slot.finished:
                continue
            if slot.again_at:
                slot.restart_when_due()
            elif slot.code is not None:
                coordinator.silent.discard(slot.index)
                if (code := _ended(slot, slots, bool(caught))) is not None:
                    processes.send([other.child for other in slots], signal.SIGTERM)
                    return code
            elif slot.index in coordinator.silent:
                coordinator.silent.discard(slot.index)
                slot.child.process.kill()  # Whatever it still does, its place will be taken.
        time.sleep(processes.POLL_S)
    if caught:
        print(f"interrupted by {caught[0].name}{again}", file=sys.stderr, flush=True)
        return 128 + caught[0]
    return 0


def _ended(slot: _Slot, slots: list[_Slot], stopping: bool) -> int | None:
    """Notes that a process has ended, and when it is started again; returns an exit code if the whole run ends with it."""
    code = slot.code
    if code == 0 or stopping or any(other.finished for other in slots):
        slot.finished = True
        return None
    if code in (command.USER_ERROR, command.DIVERGED):
        print(*slot.child.last_lines(), sep="\n", file=sys.stderr, flush=True)
        return code
    assert code is not None
    print(f"process {slot.index} {processes.how_it_ended(code)}; it is started again", file=sys.stderr, flush=True)
    if code == 1:
        print(*(f"[process {slot.index}] {line}" for line in slot.child.last_lines()), sep="\n", file=sys.stderr, flush=True)
    slot.again_at, slot.pause_s = time.monotonic() + slot.pause_s, min(2 * slot.pause_s, MOST_PAUSE_S)
    return None


def _say_view(view: View) -> None:
    if view.number > 1:
        names = ", ".join(str(member.slot) for member in view.members)
        print(f"step {view.step}: going on with {len(view.members)} workers: {names}", file=sys.stderr, flush=True)


def secret() -> str:
    """What members of this process's group know."""
    return os.environ[SECRET]
