"""Processes of an elastic run: another takes the place of one that dies, freezes or is cut off, and the others go on meanwhile.

On each host a spare process has loaded and compiled everything and waits for its call, so that it takes part at once. The coordinator
runs in a thread of the launcher; `decjax.elastic` says what it does.
"""

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import hashlib
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NamedTuple

from absl import flags

from decjax import config
from decjax.elastic.coordinator import Coordinator
from decjax.elastic.keys import Keys
from decjax.elastic.view import View
from launch import accelerators, chaos, command, processes, train_flags

KEYS = "DECJAX_ELASTIC_KEYS"  # the environment's variable
PAUSE_S = 1.0  # before a process is started again that never took part, or a spare one; twice as long each time
MOST_PAUSE_S = 30.0
PROBE_S = 5.0  # between two attempts to reach the coordinator, and the time limit of each
LEISURE = 19  # by how much a spare process is nicer than others until it is called: it takes what they leave
MOST_ERRORS, WITHIN_S = 3, 3600.0  # So many errors of one slot's processes within an hour end the run.


def define_flags() -> None:
    """The flags of launchers."""
    flags.DEFINE_boolean("elastic", False, "Go on without processes that die, and start them again.")
    flags.DEFINE_string("chaos", "", "Faults, as 'kill=1@60s,freeze=2@90s+15s' or 'storm(per_hour=125,seed=0)'; see launch.chaos.")


def options(module: str, arguments: Sequence[str]) -> config.Elastic | None:
    """The section `elastic` of the config that a command line of `launch.train` has; None: the run is not elastic."""
    if not flags.FLAGS.elastic:
        return None
    if module != processes.TRAIN:
        raise command.UserError(f"--elastic: only {processes.TRAIN} can be elastic, got module={module}; leave it out")
    try:
        return config.read(train_flags.read(arguments).config).elastic
    except config.ConfigError as error:
        raise command.UserError(str(error)) from error


class Box(NamedTuple):
    """Where the processes run: on this machine, if nothing else is said.

    Attributes:
        listening: calls a function where the coordinator's address is one.
        environments: variables of each process besides.
        links: that faults may cut or slow down.
        per_host: processes of a host; 0: all.
    """

    listening: Callable[[Callable[[], Any]], Any] = lambda make: make()
    environments: Sequence[dict[str, str]] = ()
    links: chaos.Links | None = None
    per_host: int = 0


def _pause_s(failures: int) -> float:
    """Before a process is started again, after so many others that did nothing useful."""
    return min(PAUSE_S * 2 ** (failures - 1), MOST_PAUSE_S) if failures else 0.0


def _prefer(process_group: int, nicer: int) -> None:
    """Makes processes, with all their threads, so much nicer than this one, unless that could not be undone."""
    if sys.platform != "linux":
        return
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - own:  # getrlimit(2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PGRP, process_group, min(own + nicer, 19))


class _Starter:
    """Starts the processes of all places, and holds a spare one on each host.

    Args:
        stack: closes their logs.
        lines: command lines of the places.
        spare_lines: the same of processes that wait for their call; empty: there are none.
        environments: variables of the places.
        per_host: places of a host.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        lines: Sequence[list[str]],
        spare_lines: Sequence[list[str]],
        environments: Sequence[dict[str, str]],
        per_host: int,
    ):
        self._stack, self._lines, self._spare_lines, self._environments = stack, lines, spare_lines, environments
        self._per_host = per_host
        self._spares: dict[int, processes.Child] = {}
        self._ends: dict[int, tuple[int, float]] = {}  # of a host's spares that ended by themselves: how many, when to try again
        stack.callback(lambda: processes.send([*self._spares.values()], signal.SIGKILL))

    def __call__(self, index: int) -> processes.Child:
        """A process for a place: the host's spare one, or a new one."""
        host = index // self._per_host
        spare = self._spares.pop(host, None)
        if spare and spare.living():
            self._ends.pop(host, None)
            _prefer(spare.process.pid, 0)
            with contextlib.suppress(BrokenPipeError), spare.process.stdin as call:  # pyright: ignore[reportOptionalContextManager]
                call.write(json.dumps({"process_index": index, "environment": self._environments[index]}) + "\n")
            return spare
        return self._start(self._lines[index], self._environments[index])

    def hold_spares(self) -> None:
        """Starts those that are missing, and others for those that have ended by themselves, though not again and again."""
        for host in range(math.ceil(len(self._spare_lines) / self._per_host)):
            ends, again_at = self._ends.get(host, (0, 0.0))
            if host in self._spares and not self._spares[host].living():
                self._spares.pop(host).log.close()
                self._ends[host] = ends + 1, time.monotonic() + _pause_s(ends)
            elif host not in self._spares and time.monotonic() >= again_at:
                first = host * self._per_host
                options: dict[str, Any] = dict(stdin=subprocess.PIPE, text=True)
                try:
                    self._spares[host] = self._start(self._spare_lines[first], self._environments[first], **options)
                except OSError:  # Places come first where memory or descriptors are exhausted.
                    self._ends[host] = ends + 1, time.monotonic() + _pause_s(ends + 1)
                else:
                    _prefer(self._spares[host].process.pid, LEISURE)

    def _start(self, line: list[str], environment: dict[str, str], **options: Any) -> processes.Child:
        log = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  It is open as long as the process lives.
        try:
            return processes.Child(processes.start(line, env=environment, stdout=None, stderr=log, **options), log)
        except OSError:
            log.close()
            raise


class _Reach:
    """Prints once that the coordinator's address is unreachable, as when the loopback interface is down. Call `look` while processes are
    missing."""

    def __init__(self, box: Box, address: tuple[str, int]):
        self._box, self._address = box, address
        self._look_at, self._reason = time.monotonic() + PROBE_S, ""

    def look(self) -> None:
        if time.monotonic() < self._look_at:
            return
        before, self._reason = self._reason, self._box.listening(self._probe)
        self._look_at = time.monotonic() + PROBE_S
        if self._reason and not before:
            where = ":".join(map(str, self._address))
            _say(
                f"processes cannot join: {where} is not reached ({self._reason}); bring the interface up, as with ip link set lo up"
            )

    def _probe(self) -> str:
        try:
            socket.create_connection(self._address, PROBE_S).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""


class _Slot:
    """A place in the run, and the process that has it."""

    def __init__(self, index: int, start: Callable[[int], processes.Child]):
        self.index, self._start = index, start
        self.child = start(index)
        self.finished, self.failures = False, 0  # `failures`: since a process of this place took part the last time
        self.errors: list[float] = []  # times at which processes ended with an error of their own, within `WITHIN_S`
        self.again_at: float | None = None

    @property
    def code(self) -> int | None:
        return self.child.process.poll()

    def takes_part(self, view: View) -> bool:
        """Whether its present process is in a view."""
        return any(member.slot == self.index and member.process == self.child.process.pid for member in view.members)

    def ended(self) -> None:
        """Plans the next start: at once, unless processes end again and again before they take part."""
        self.again_at, self.failures = time.monotonic() + _pause_s(self.failures), self.failures + 1

    def restart_when_due(self) -> None:
        if self.again_at is not None and time.monotonic() >= self.again_at:
            try:
                before, self.child, self.again_at = self.child, self._start(self.index), None
            except OSError as error:  # Memory or descriptors are exhausted, perhaps not for long.
                _say(f"process {self.index} cannot be started ({error.strerror}); trying again")
                self.ended()
            else:
                before.log.close()

    def fails_again(self) -> bool:
        """Records an error of this slot's process; returns whether there were too many within `WITHIN_S`."""
        now_s = time.monotonic()
        self.errors = [at_s for at_s in self.errors if now_s - at_s < WITHIN_S] + [now_s]
        return len(self.errors) >= MOST_ERRORS


def run_together(
    command_lines: Callable[[list[str]], list[list[str]]],
    host: str,
    given: config.Elastic,
    again: str = "",
    faults: Iterator[chaos.Event] = iter(()),
    box: Box = Box(),
) -> int:
    """Runs an elastic group until its run has ended; the exit code is 0, that of a mistake or a divergence, or 128 + the signal.

    Args:
        command_lines: makes those of all processes, with these options besides.
        host: the address at which the coordinator listens.
        given: when to go on without a process.
        again: how to continue after an interruption or a failure.
        faults: what is done to them.
        box: where they run.
    """
    group_keys = Keys.made()
    count = len(command_lines([]))
    coordinator = box.listening(lambda: Coordinator(host, count, given.min_workers, given.heartbeat_s, group_keys, _say_view))
    options = [f"--elastic={':'.join(map(str, coordinator.address))}"]
    lines, spare_lines = command_lines(options), command_lines([*options, processes.STANDBY]) if given.spares else []
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(processes.caught_signals())
        serving = stack.enter_context(_serving(coordinator))
        folder = stack.enter_context(processes.temporary_folder())
        environments = _environments(count, {KEYS: group_keys.text} | _compiled_once(folder), box)
        starter = _Starter(stack, lines, spare_lines, environments, box.per_host or count)
        slots: list[_Slot] = []
        stack.callback(lambda: processes.send([slot.child for slot in slots], signal.SIGKILL))
        slots += [_Slot(index, starter) for index in range(count)]
        trouble = stack.enter_context(contextlib.closing(chaos.Chaos(faults, lambda index: slots[index].child.living(), box.links)))
        reach = _Reach(box, coordinator.address)

        def look():
            trouble.look()
            (starter.hold_spares if all(slot.takes_part(coordinator.view) for slot in slots) else reach.look)()

        return _watch(slots, coordinator, serving, caught, look, f"; {again}" if again else "")


def _environments(count: int, shared: dict[str, str], box: Box) -> list[dict[str, str]]:
    """Variables of each process."""
    given = box.environments or [{}] * count
    return [shared | own | further for own, further in zip(accelerators.environments(count), given, strict=True)]


def _compiled_once(folder: str) -> dict[str, str]:
    """Variables with which processes find what others have compiled, in a folder that they share unless the user has chosen one."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@contextlib.contextmanager
def _serving(coordinator: Coordinator) -> Iterator[concurrent.futures.Future[None]]:
    """A context in which the coordinator serves in a thread of its own; yields the future of that thread."""
    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1, "coordinator") as pool:
        try:
            yield pool.submit(coordinator.run, over.is_set)
        finally:
            over.set()


def _watch(
    slots: list[_Slot],
    coordinator: Coordinator,
    serving: concurrent.futures.Future[None],
    caught: list[signal.Signals],
    look: Callable[[], None],
    again: str,
) -> int:
    told = False
    while not all(slot.finished for slot in slots):
        if serving.done():  # Without it no process could leave or join.
            _say(f"error: the coordinator of this run has failed ({serving.exception()!r}){again}")
            return 1
        look()
        if caught and not told:
            told = True
            coordinator.least = 1  # Nobody is started any more whom the others could wait for.
            processes.send([slot.child for slot in slots], signal.SIGTERM)
        if len(caught) > 1:
            processes.send([slot.child for slot in slots], signal.SIGKILL)
        for slot in slots:
            if slot.finished:
                continue
            if slot.failures and slot.takes_part(coordinator.view):
                slot.failures = 0
            if slot.again_at is not None and (caught or coordinator.is_over):
                slot.finished = True
            elif slot.again_at is not None:
                slot.restart_when_due()
            elif slot.code is not None:
                coordinator.ended.append(slot.child.process.pid)
                coordinator.silent.discard(slot.index)
                if (code := _ended(slot, bool(caught) or coordinator.is_over)) is not None:
                    processes.send([other.child for other in slots], signal.SIGTERM)
                    return code
            elif slot.index in coordinator.silent:
                coordinator.silent.discard(slot.index)
                slot.child.process.kill()  # Whatever it still does, its place will be taken.
        time.sleep(processes.POLL_S)
    stopped = 128 + caught[0] if caught else max(slot.code or 0 for slot in slots)
    if stopped > 128:  # Without a signal of our own, one of them got it, and all have stopped.
        _say(f"interrupted by {signal.Signals(stopped - 128).name}{again}")
        return stopped
    return 0 if any(slot.code == 0 for slot in slots) else 1


def _ended(slot: _Slot, stopping: bool) -> int | None:
    """Notes that a process has ended, and when it is started again; returns an exit code if the whole run ends with it."""
    code = slot.code
    if code in (command.USER_ERROR, command.DIVERGED):
        _say(*slot.child.last_lines())
        return code
    if code == 0 or stopping:
        slot.finished = True
        return None
    assert code is not None
    _say(f"process {slot.index} {processes.how_it_ended(code)}; another takes its place")
    if code == 1:
        _say(*(f"[process {slot.index}] {line}" for line in slot.child.last_lines()))
        if slot.fails_again():
            return code
    slot.ended()
    return None


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _say_view(view: View) -> None:
    if view.number > 1:
        _say(
            f"step {view.step}: continuing with {len(view.members)} workers: {', '.join(str(member.slot) for member in view.members)}"
        )


def launch_name() -> str:
    """A name that the processes of this launch share, and no others. It is not secret."""
    return hashlib.sha256(keys().coordinator).hexdigest()[:16]


def keys() -> Keys:
    """The keys of this process's group."""
    return Keys.of(os.environ[KEYS])
