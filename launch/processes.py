"""Processes that belong together: started, watched and ended as one.

`run_together` is what launch.local and launch.cluster stand on: the first process keeps the terminal, the others speak
only if one fails; if one dies, the others are ended; Ctrl-C and SIGTERM reach every process once. launch.sweep, whose
processes take turns, uses the parts.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import ctypes
import importlib.util
import math
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, BinaryIO, NamedTuple

from decjax.signals import handling
from launch import accelerators, chaos, command, config_file

TRAIN = "launch.train"
GRACE_S = 15  # between SIGTERM and SIGKILL, once a process has died: well below a minute
POLL_S = 0.1
LAST_LINES = 20
STANDBY = "--standby"  # the flag of a spare process
LOST_CONTACT = (3, -signal.SIGABRT)  # how a process ends that noticed the end of another: launch.join, or JAX itself
_BY_JAX = re.compile("coordination service|distributed service|heartbeat", re.IGNORECASE)  # in what it says before it aborts
_SHOW_CURSOR = "\x1b[?25h"
_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


class Child(NamedTuple):
    """A process of the group and the file that keeps what it says."""

    process: subprocess.Popen
    log: BinaryIO

    def living(self) -> int | None:
        """The process's id; None if it has ended."""
        return self.process.pid if self.process.poll() is None else None

    def lines(self) -> list[str]:
        """All that it said."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace").splitlines()

    def last_lines(self) -> list[str]:
        return self.lines()[-LAST_LINES:]


# -- One process ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def caught_signals() -> Iterator[list[signal.Signals]]:
    """Collects Ctrl-C, SIGTERM and SIGHUP in a list instead of dying from them.

    A second signal in the list asks for a hard end. SIGHUP is never the second: a closed terminal sends it twice, through the shell and
    by itself.
    """
    caught: list[signal.Signals] = []

    def note(number: int, _: Any) -> None:
        if number != signal.SIGHUP or not caught:
            caught.append(signal.Signals(number))

    with handling(note, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield caught


def unwinding_signals() -> contextlib.AbstractContextManager[None]:
    """Lets SIGTERM and SIGHUP run `finally` clauses, as Ctrl-C does, and end the command with one line."""

    def unwind(number: int, _: Any) -> None:
        raise command.Interrupted(128 + number)

    return handling(unwind, signal.SIGTERM, signal.SIGHUP)


def python(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command line of a module, with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def start(
    command_line: list[str], core: int | None = None, when_we_die: signal.Signals = signal.SIGKILL, **options: Any
) -> subprocess.Popen:
    """Starts a process that ends when we do, in a session of its own: the terminal's Ctrl-C reaches it through us only.

    Args:
        command_line: as `python` makes it.
        core: the only CPU core that it may use; None: any.
        when_we_die: what Linux then sends it; with SIGTERM a run that depends on no other saves before it ends.
        **options: of `subprocess.Popen`; `env` is added to our environment, `stdin` is empty unless given. With
            `start_new_session=False` Ctrl-C reaches it directly.
    """
    us = os.getpid()

    def before_it_runs():
        # Linux kills it when we die, so that nothing stays behind and holds the work directory even if the launcher was killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, when_we_die)
        if os.getppid() != us:  # We died before this was said.
            os._exit(1)
        if core is not None:
            os.sched_setaffinity(0, {core})

    # JAX's preemption service would swallow a SIGTERM that comes before the train loop listens.
    ours = {"JAX_ENABLE_PREEMPTION_SERVICE": "false", command.LAUNCHER: "1"}
    options = (
        {"stdin": subprocess.DEVNULL, "start_new_session": True} | options | {"env": os.environ | ours | options.get("env", {})}
    )
    before = before_it_runs if sys.platform == "linux" else None
    return subprocess.Popen(command_line, preexec_fn=before, **options)


@contextlib.contextmanager
def survived_by(command_line: list[str], **options: Any) -> Iterator[None]:
    """A context in which another process waits to clean up after this one: its standard input ends only if this process is killed.

    Args:
        command_line: of a program that first reads its standard input to the end.
        **options: of `subprocess.Popen`.
    """
    # The kernel closes the pipe when this process ends, for any reason.
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(command_line, **options) as survivor:
        try:
            yield
        finally:
            survivor.kill()


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """A context with a temporary folder, which is removed afterwards even if this process is killed."""
    with tempfile.TemporaryDirectory(prefix="decjax-", ignore_cleanup_errors=True) as folder:
        # Again a second later: processes that end along with this one may still have been writing to it.
        removes = 'cat; rm -rf -- "$0"; sleep 1; rm -rf -- "$0"'
        with survived_by(["sh", "-c", removes, folder], stderr=subprocess.DEVNULL):
            yield folder


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def same_command(module: str) -> str:
    """The command line of this program, to be typed again."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def how_to_continue(launcher: str, module: str) -> str:
    """What a launcher says after an interruption or a failure: training continues, other modules start again."""
    return f"the same command continues from the last checkpoint:\n  {same_command(launcher)}" if module == TRAIN else ""


def check(module: str, arguments: Sequence[str], num_processes: int = 1) -> None:
    """Refuses what every process would refuse, before anything is started."""
    found = None
    with contextlib.suppress(ImportError, ValueError):  # Its package is missing; its name is none.
        found = importlib.util.find_spec(module)
    if found is None:
        raise command.UserError(f"module={module!r}: there is no such module here; write it as in {TRAIN}")
    if module != TRAIN:
        return
    example = "as in -- --config=configs/lm.py --workdir=runs/lm"
    if not (arguments and arguments[0].startswith("-")):
        unexpected = f"unexpected argument {arguments[0]!r}; " if arguments else ""
        raise command.UserError(f"{unexpected}options of launch.train go behind --, {example}")
    for option in ("config", "workdir"):
        if config_file.value_of(option, arguments) is None:
            raise command.UserError(f"--{option} is missing behind --, {example}")
    from launch import train_flags  # It imports JAX, which most users of this module do not need.

    train_flags.check(arguments, num_processes)


# -- The group --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def members(module: str, arguments: Sequence[str], num_processes: int, address: str) -> list[list[str]]:
    """Command lines of processes that find each other: `arguments`, the same for all, behind the coordinator flags of launch.train,
    which the module must have; process 0 listens on some free port of `address`."""
    together = [f"--coordinator={address}:{free_port()}", f"--num_processes={num_processes}"]
    return [python(module, [*together, f"--process_index={index}", *arguments]) for index in range(num_processes)]


def elastic_members(module: str, arguments: Sequence[str], num_processes: int, options: Sequence[str]) -> list[list[str]]:
    """Command lines of the members of an elastic run; `options` are the coordinator's. With `STANDBY` among them they name no place:
    a spare process is told later which one is its own."""
    together = [*options, f"--num_processes={num_processes}"]
    places = [[] if STANDBY in options else [f"--process_index={index}"] for index in range(num_processes)]
    return [python(module, [*together, *place, *arguments]) for place in places]


def run_together(
    command_lines: list[list[str]],
    again: str = "",
    pin: bool = False,
    environments: Sequence[dict[str, str]] = (),
    faults: Iterator[chaos.Event] = iter(()),
    links: chaos.Links | None = None,
) -> int:
    """Runs processes until all have ended; tells on standard error if one of them failed or we were stopped.

    Each has an accelerator of its own where there are some, as `accelerators.environments` has it.

    Args:
        command_lines: one per process; standard output of the first stays the terminal's.
        again: how to continue after an interruption or a failure, told with it.
        pin: whether process i stays on core i modulo their number.
        environments: variables of each process besides.
        faults: what is done to the processes.
        links: of the box that they are in.

    Returns:
        The exit code: 0, 128 + the signal that stopped us, or that of the process that failed first.
    """
    given = accelerators.environments(len(command_lines))
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(caught_signals())
        children: list[Child] = []
        stack.callback(lambda: send(children, signal.SIGKILL))  # Whatever happens here, nothing stays behind.
        cores = sorted(os.sched_getaffinity(0)) if pin else [None]
        for index, line in enumerate(command_lines):
            log = stack.enter_context(tempfile.TemporaryFile())
            # XLA's pool has a thread for every core it sees; an exchange beside the gradient needs a second one.
            environment = given[index] | ({"NPROC": "2"} if pin else {}) | (environments[index] if environments else {})
            core = cores[index % len(cores)]
            process = start(line, core, env=environment, stdout=None if index == 0 else log, stderr=log)
            children.append(Child(process, log))

        trouble = stack.enter_context(contextlib.closing(chaos.Chaos(faults, lambda index: children[index].living(), links)))
        return report(children, wait(children, caught, trouble.look), caught, f"; {again}" if again else "")


def send(children: list[Child], number: signal.Signals) -> None:
    """Sends a signal to every process that still runs."""
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(number)


class Ended(NamedTuple):
    """Which processes of a group did not end well, by index.

    Attributes:
        failed: those that ended otherwise than with exit code 0 before we ended any, the first one first; and those that somebody
            else killed.
        silent: those that neither ended nor noticed when the others had lost contact: they are frozen, or hang.
    """

    failed: list[int]
    silent: list[int]


def wait(children: list[Child], caught: list[signal.Signals], look: Callable[[], None] = lambda: None) -> Ended:
    """Waits until all have ended, and calls `look` now and then; ends the rest after the first failure. Of the signals that are
    `caught` meanwhile the first is forwarded, and a second one ends all processes at once."""
    failed: list[int] = []
    silent: list[int] = []
    forwarded, killed, deadline = False, False, math.inf
    while True:
        codes = [child.process.poll() for child in children]
        running = [index for index, code in enumerate(codes) if code is None]
        if caught and not forwarded:
            forwarded = True
            send(children, signal.SIGTERM)
        if not failed and (failed := [index for index, code in enumerate(codes) if code]):
            deadline = time.monotonic() + GRACE_S
            if not forwarded:  # A second SIGTERM would not be kinder.
                send(children, signal.SIGTERM)
        if not killed:
            # Connections of a process that somebody kills are gone before it is: others may fail of it and be seen first.
            failed += [index for index, code in enumerate(codes) if index not in failed and code == -signal.SIGKILL]
        if not running:
            return Ended(failed, silent)
        late = time.monotonic() > deadline
        if failed and not silent and all(codes[index] in LOST_CONTACT for index in failed):
            silent = [index for index in running if late or _is_stopped(children[index].process.pid)]
        killed = killed or len(caught) > 1 or late or silent == running
        if killed:
            send(children, signal.SIGKILL)
        look()
        time.sleep(POLL_S)


def _is_stopped(process_id: int) -> bool:
    """Whether a signal such as SIGSTOP holds a process, where /proc tells."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def _consequence(code: int) -> int:
    """How likely this end of a process only follows from that of another, to compare those that failed at about the same time."""
    return 2 if code in LOST_CONTACT else int(code != -signal.SIGKILL)


def report(children: list[Child], ended: Ended, caught: list[signal.Signals], again: str) -> int:
    """Says on standard error how it ended; returns the exit code."""
    if not ended.failed:
        print("".join(f"{line}\n" for line in children[0].last_lines()), end="", file=sys.stderr, flush=True)
        return 0
    if caught:
        print(f"interrupted by {caught[0].name}{again}", file=sys.stderr, flush=True)
        return 128 + caught[0]
    if sys.stdout.isatty():
        print(_SHOW_CURSOR, end="", flush=True)  # The live display of a process that was killed had hidden it.
    index = min(ended.failed, key=lambda index: _consequence(children[index].process.returncode))
    code, said = children[index].process.returncode, children[index].last_lines()
    if code in (command.USER_ERROR, command.DIVERGED):  # It told its error in one line, and nothing but a correction continues it.
        print(*said, sep="\n", file=sys.stderr, flush=True)
        return code
    what = f"process {index} {how_it_ended(code)}, the other processes were ended"
    if code == LOST_CONTACT[0] or (
        code in LOST_CONTACT and any(map(_BY_JAX.search, children[index].lines()))
    ):  # What JAX says of it helps nobody.
        names = " and ".join(map(str, ended.silent))
        what = f"process {names} stopped answering" if names else f"process {index} lost contact with another"
        code, said, what = LOST_CONTACT[0], [], f"{what}, all processes were ended"
    for line in said:
        print(f"[process {index}] {line}", file=sys.stderr)
    print(f"error: {what}{again}", file=sys.stderr, flush=True)
    return max(code, 1)
