"""Launcher of elastic runs: a process that dies, freezes or is cut off is replaced, and the others continue meanwhile.

Each host has a spare process that has compiled its programs and can take part at once. The coordinator (`decjax.elastic.coordinator`)
runs in a thread of the launcher.
"""

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import functools
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
from typing import NamedTuple, Protocol, TypeVar

from absl import flags

from decjax import config
from decjax.elastic.coordinator import Coordinator
from decjax.elastic.keys import Keys
from decjax.elastic.view import View
from launch import chaos, command, processes, ranks, train_flags

T = TypeVar("T")

KEYS = "DECJAX_ELASTIC_KEYS"  # an environment variable
PAUSE_S = 1.0  # before a restart of a process that never took part, or of a spare process; doubled each time
MAX_PAUSE_S = 30.0
PROBE_S = 5.0  # interval and time limit of checks that the coordinator is reachable
SPARE_NICENESS = 19  # of spare processes relative to others, until they take part
MAX_ERRORS, WITHIN_S = 3, 3600.0  # errors of a slot's processes within this time that end the run

flags.disclaim_key_flags()  # --help shows the flags with those of the module that calls `define_flags`.


def define_flags() -> None:
    """Define the flags of launchers of elastic runs."""
    flags.DEFINE_boolean("elastic", False, "Continue without processes that die, and replace them.")
    flags.DEFINE_string(
        "chaos", "", "Faults, such as 'kill=1@60s,freeze=2@90s+15s' or 'storm(per_hour=125,seed=0)'; see launch.chaos."
    )


def options(module: str, arguments: Sequence[str]) -> config.Elastic | None:
    """Return the config section `elastic` of a command line of launch.train; None if the run is not elastic."""
    if not flags.FLAGS.elastic:
        return None
    train = processes.TRAIN
    command.check((module == train, f"--elastic: only {train} can be elastic, got module={module}", "leave it out"))
    return train_flags.spec_of(train_flags.read(arguments)).elastic


class Listening(Protocol):
    """Calls a function in a network namespace."""

    def __call__(self, make: Callable[[], T], /) -> T: ...


class Hosts(NamedTuple):
    """Where the processes run: by default on this machine.

    Attributes:
        address: at which process 0 listens.
        inside: maps the index of a process and its command line to one that runs it on its host.
        coordinator: address at which the coordinator of an elastic run listens.
        listening: calls a function in the network namespace of that address.
        variables_of: further environment variables of the process with an index.
        links: links that faults may cut or slow down.
        per_host: processes per host; 0: all.
    """

    address: str = "127.0.0.1"
    inside: Callable[[int, list[str]], list[str]] = lambda index, line: line
    coordinator: str = "127.0.0.1"
    listening: Listening = lambda make: make()
    variables_of: Callable[[int], dict[str, str]] = lambda index: {}
    links: chaos.Links | None = None
    per_host: int = 0


def run(
    module: str,
    arguments: Sequence[str],
    num_processes: int,
    settings: config.Elastic | None = None,
    *,
    hosts: Hosts = Hosts(),
    pin: bool = False,
    again: str = "",
    faults: Iterator[chaos.Event] = iter(()),
) -> int:
    """Run processes of a module; return the exit code of `processes.run_together`, or with `settings` that of an elastic run.

    Args:
        module, arguments, num_processes: as for `processes.command_lines`.
        settings: of an elastic run.
        hosts: where the processes run.
        pin: see `processes.run_together`, as for `again` and `faults`.
    """
    place = lambda lines: [hosts.inside(index, line) for index, line in enumerate(lines)]
    if settings:
        lines_of = lambda options: place(processes.elastic_command_lines(module, arguments, num_processes, options))
        return run_together(lines_of, settings, again, faults, hosts)
    lines = place(processes.command_lines(module, arguments, num_processes, hosts.address))
    variables = [hosts.variables_of(index) for index in range(num_processes)]
    return processes.run_together(lines, again, pin, variables, faults, hosts.links)


def _pause_s(failures: int) -> float:
    """Return the pause before a restart after `failures` processes that did not take part."""
    return min(PAUSE_S * 2 ** (failures - 1), MAX_PAUSE_S) if failures else 0.0


def _set_niceness(process_group: int, relative: int) -> None:
    """Set the niceness of processes relative to this one, unless it could not be lowered again."""
    if sys.platform != "linux":
        return
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - niceness:  # getrlimit(2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PGRP, process_group, min(niceness + relative, 19))


class _Starter:
    """Starts the processes of all slots, and keeps a spare process on each host unless there are no `spare_lines`."""

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
        self._ends: dict[int, tuple[int, float]] = {}  # by host: number of spares that ended by themselves, time of the next start
        stack.callback(lambda: processes.send([*self._spares.values()], signal.SIGKILL))

    def __call__(self, index: int) -> processes.Child:
        """Return a process for a slot: the spare process of its host, or a new one."""
        host = index // self._per_host
        spare = self._spares.pop(host, None)
        if spare and spare.living():
            self._ends.pop(host, None)
            _set_niceness(spare.process.pid, 0)
            assert spare.process.stdin
            with contextlib.suppress(BrokenPipeError), spare.process.stdin as file:
                file.write(json.dumps({"process_index": index, "environment": self._environments[index]}) + "\n")
            return spare
        return self._start(self._lines[index], self._environments[index])

    def hold_spares(self) -> None:
        """Start missing spare processes, after a pause where others have ended by themselves."""
        for host in range(math.ceil(len(self._spare_lines) / self._per_host)):
            ends, again_at = self._ends.get(host, (0, 0.0))
            if host in self._spares and not self._spares[host].living():
                self._spares.pop(host).log.close()
                self._ends[host] = ends + 1, time.monotonic() + _pause_s(ends)
            elif host not in self._spares and time.monotonic() >= again_at:
                first = host * self._per_host
                try:
                    self._spares[host] = self._start(self._spare_lines[first], self._environments[first], subprocess.PIPE)
                except OSError:  # Memory or descriptors are exhausted; slots have priority.
                    self._ends[host] = ends + 1, time.monotonic() + _pause_s(ends + 1)
                else:
                    _set_niceness(self._spares[host].process.pid, SPARE_NICENESS)

    def _start(self, line: list[str], environment: dict[str, str], stdin: int = subprocess.DEVNULL) -> processes.Child:
        log = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  It is open as long as the process lives.
        try:
            return processes.Child(processes.start(line, env=environment, stdin=stdin, stdout=None, stderr=log, text=True), log)
        except OSError:
            log.close()
            raise


class _AddressCheck:
    """Prints once if the coordinator's address is unreachable, for example because the loopback interface is down."""

    def __init__(self, hosts: Hosts, address: tuple[str, int]):
        self._hosts, self._address = hosts, address
        self._look_at, self._reason = time.monotonic() + PROBE_S, ""

    def look(self) -> None:
        """Check the address if it is time; to be called while processes are missing."""
        if time.monotonic() < self._look_at:
            return
        before, self._reason = self._reason, self._hosts.listening(self._probe)
        self._look_at = time.monotonic() + PROBE_S
        if self._reason and not before:
            where = ":".join(map(str, self._address))
            _say(
                f"processes cannot join: {where} is unreachable ({self._reason}); bring the interface up, as with ip link set lo up"
            )

    def _probe(self) -> str:
        try:
            socket.create_connection(self._address, PROBE_S).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""


class _Slot:
    """A slot of the run and its process."""

    def __init__(self, index: int, start: Callable[[int], processes.Child]):
        self.index, self._start = index, start
        self.child = start(index)
        self.finished, self.failures = False, 0  # processes that ended since the slot last took part
        self.errors: list[float] = []  # times of errors within `WITHIN_S`
        self.again_at: float | None = None

    @property
    def code(self) -> int | None:
        return self.child.process.poll()

    def takes_part(self, view: View) -> bool:
        """Whether its current process is in a view."""
        return any(member.slot == self.index and member.process == self.child.process.pid for member in view.members)

    def ended(self) -> None:
        """Schedule the next start, after a pause if several processes have not taken part."""
        self.again_at, self.failures = time.monotonic() + _pause_s(self.failures), self.failures + 1

    def restart_when_due(self) -> None:
        if self.again_at is not None and time.monotonic() >= self.again_at:
            try:
                before, self.child, self.again_at = self.child, self._start(self.index), None
            except OSError as error:  # Memory or descriptors are exhausted, possibly for a short time.
                _say(f"process {self.index} cannot be started ({error.strerror}); trying again")
                self.ended()
            else:
                before.log.close()

    def fails_again(self) -> bool:
        """Record an error; return whether there were too many within `WITHIN_S`."""
        now_s = time.monotonic()
        self.errors = [at_s for at_s in self.errors if now_s - at_s < WITHIN_S] + [now_s]
        return len(self.errors) >= MAX_ERRORS


def run_together(
    command_lines: Callable[[list[str]], list[list[str]]],
    settings: config.Elastic,
    again: str,
    faults: Iterator[chaos.Event],
    hosts: Hosts,
) -> int:
    """Run the processes of an elastic run; return the exit code: 0, that of a user error or a divergence, or 128 + signal.

    Args:
        command_lines: returns the command lines of all processes for further options.
        settings, again, faults, hosts: as for `run`.
    """
    group_keys, count = Keys.made(), len(command_lines([]))
    making = functools.partial(
        Coordinator, hosts.coordinator, count, settings.min_workers, settings.heartbeat_s, group_keys, _say_view
    )
    coordinator = hosts.listening(making)
    options = [f"--elastic={':'.join(map(str, coordinator.address))}"]
    lines, spare_lines = command_lines(options), command_lines([*options, processes.STANDBY]) if settings.spares else []
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(processes.caught_signals())
        serving = stack.enter_context(_serving(coordinator))
        shared = {KEYS: group_keys.text} | _compilation_cache(stack.enter_context(processes.temporary_folder()))
        variables = [shared | gpus | hosts.variables_of(index) for index, gpus in enumerate(ranks.gpu_environments(count))]
        starter = _Starter(stack, lines, spare_lines, variables, hosts.per_host or count)
        slots: list[_Slot] = []
        stack.callback(lambda: processes.send([slot.child for slot in slots], signal.SIGKILL))
        slots += [_Slot(index, starter) for index in range(count)]
        injector = chaos.Chaos(faults, lambda index: slots[index].child.living(), hosts.links)
        stack.enter_context(contextlib.closing(injector))
        address_check = _AddressCheck(hosts, coordinator.address)

        def look():
            injector.look()
            (starter.hold_spares if all(slot.takes_part(coordinator.view) for slot in slots) else address_check.look)()

        return _watch(slots, coordinator, serving, caught, look, f"; {again}" if again else "")


def _compilation_cache(folder: str) -> dict[str, str]:
    """Return variables for a shared compilation cache in a folder, unless the user has configured another one."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@contextlib.contextmanager
def _serving(coordinator: Coordinator) -> Iterator[concurrent.futures.Future[None]]:
    """Context manager in which the coordinator serves in a thread, whose future it yields."""
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
    send = lambda number: processes.send([slot.child for slot in slots], number)
    for stopping in processes.rounds(caught, send):
        if all(slot.finished for slot in slots):
            break
        if stopping:
            coordinator.least = 1  # No more processes are started, so none should be waited for.
        if serving.done():  # Without a coordinator no process can leave or join.
            _say(f"error: the coordinator of this run has failed ({serving.exception()!r}){again}")
            return 1
        look()
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
                    send(signal.SIGTERM)
                    return code
            elif slot.index in coordinator.silent:
                coordinator.silent.discard(slot.index)
                slot.child.process.kill()  # It was removed from the group.
    stopped = 128 + caught[0] if caught else max(slot.code or 0 for slot in slots)
    if stopped > 128:  # The launcher or one of the processes received a signal, and all have stopped.
        _say(f"interrupted by {signal.Signals(stopped - 128).name}{again}")
        return stopped
    return 0 if any(slot.code == 0 for slot in slots) else 1


def _ended(slot: _Slot, stopping: bool) -> int | None:
    """Record that a process has ended and schedule its restart; return an exit code if the run ends with it."""
    code = slot.code
    if code in (command.USER_ERROR, command.DIVERGED):
        _say(*slot.child.lines(processes.LAST_LINES))
        return code
    if code == 0 or stopping:
        slot.finished = True
        return None
    assert code is not None
    _say(f"process {slot.index} {processes.how_it_ended(code)}; it will be replaced")
    if code == 1:
        _say(*(f"[process {slot.index}] {line}" for line in slot.child.lines(processes.LAST_LINES)))
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
    """Return a name that is unique to the processes of this launch. It is not secret."""
    return hashlib.sha256(keys().coordinator).hexdigest()[:16]


def keys() -> Keys:
    """Return the keys of this process's group."""
    return Keys.of(os.environ[KEYS])
