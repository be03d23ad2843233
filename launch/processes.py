"""Groups of processes: start, supervision and shutdown.

`run_together` is the basis of launch.local and launch.cluster. The first process prints to the terminal; the output of the others is
shown only if one fails. If a process fails, the others are terminated. Ctrl-C and SIGTERM reach each process once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import ctypes
import functools
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
import types
from typing import IO, BinaryIO, NamedTuple, TypedDict, Unpack

from absl import flags

from decjax.signals import handling
from launch import chaos, command, config_file, ranks

TRAIN = "launch.train"
GRACE_S = 15  # between SIGTERM and SIGKILL, after a process has failed
POLL_S = 0.1
LAST_LINES = 20
MOST_PROCESSES = 1024  # of one machine, each of which takes hundreds of MB
_CHECKED = (TRAIN, "launch.sweep")  # modules that need a config and a workdir
_EXAMPLE = "as in -- --config=configs/lm.py --workdir=runs/lm"
STANDBY = "--standby"  # the flag of a spare process
LOST_CONTACT = (3, -signal.SIGABRT)  # exit codes after the loss of another process, of launch.join and of JAX
_BY_JAX = re.compile("coordination service|distributed service|heartbeat", re.IGNORECASE)  # in its output before it aborts
_SHOW_CURSOR = "\x1b[?25h"
_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h

flags.disclaim_key_flags()  # --help shows the flag with those of the module that calls `define_count`.


class Child(NamedTuple):
    """A process of a group, and the file with its output."""

    process: subprocess.Popen
    log: BinaryIO

    def living(self) -> int | None:
        """Return the id of the process; None if it has ended."""
        return self.process.pid if self.process.poll() is None else None

    def lines(self, most: int = 0) -> list[str]:
        """Return its output, or at `most` its last lines."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace").splitlines()[-most:]


# -- One process ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def caught_signals() -> Iterator[list[signal.Signals]]:
    """Context manager that collects SIGINT, SIGTERM and SIGHUP in a list.

    A second signal in the list requests immediate termination. SIGHUP is never the second: a closed terminal sends it twice, directly
    and through the shell.
    """
    caught: list[signal.Signals] = []

    def note(number: int, _: types.FrameType | None) -> None:
        if number != signal.SIGHUP or not caught:
            caught.append(signal.Signals(number))

    with handling(note, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield caught


def unwinding_signals() -> contextlib.AbstractContextManager[None]:
    """Context manager in which SIGTERM and SIGHUP raise `Interrupted`, so that `finally` clauses run as for Ctrl-C."""

    def unwind(number: int, _: types.FrameType | None) -> None:
        raise command.Interrupted(128 + number)

    return handling(unwind, signal.SIGTERM, signal.SIGHUP)


def python(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command line of a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


class PopenOptions(TypedDict, total=False):
    """Arguments of `subprocess.Popen`."""

    env: Mapping[str, str]
    stdin: int | IO | None
    stdout: int | IO | None
    stderr: int | IO | None
    text: bool
    cwd: str | os.PathLike
    pass_fds: tuple[int, ...]
    start_new_session: bool


def start(
    command_line: list[str], core: int | None = None, death_signal: signal.Signals = signal.SIGKILL, **options: Unpack[PopenOptions]
) -> subprocess.Popen:
    """Start a process that ends with this one, in a new session, so that the terminal's Ctrl-C does not reach it directly.

    Args:
        command_line: of the process, such as from `python`.
        core: the only CPU core that it may use; None: any.
        death_signal: sent by Linux when this process dies; with SIGTERM a run of one process saves a checkpoint.
        **options: of `subprocess.Popen`; `env` is added to this process's environment, `stdin` is empty by default.
    """
    parent = os.getpid()

    def set_up():
        # Otherwise processes of a killed launcher would keep the work directory locked.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # It died before the call.
            os._exit(1)
        if core is not None:
            os.sched_setaffinity(0, {core})

    # JAX's preemption service would swallow a SIGTERM that arrives before the training loop handles signals.
    variables = {"JAX_ENABLE_PREEMPTION_SERVICE": "false", command.LAUNCHER: "1", **options.get("env", {})}
    options = PopenOptions(stdin=subprocess.DEVNULL, start_new_session=True) | options | PopenOptions(env=os.environ | variables)
    return subprocess.Popen(command_line, preexec_fn=set_up if sys.platform == "linux" else None, **options)


@contextlib.contextmanager
def survived_by(command_line: list[str], cwd: pathlib.Path | None = None, stderr: int | None = None) -> Iterator[None]:
    """Context manager with a second process that cleans up after this one: its standard input ends if this process is killed.

    Args:
        command_line: of a program that reads its standard input to the end before anything else.
        cwd, stderr: of `subprocess.Popen`.
    """
    # The kernel closes the pipe when this process ends, for any reason.
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command_line, stdin=pipe, stdout=null, stderr=stderr, cwd=cwd, start_new_session=True) as survivor:
        try:
            yield
        finally:
            survivor.kill()


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Context manager with a temporary folder that is removed afterwards, even if this process is killed."""
    with tempfile.TemporaryDirectory(prefix="decjax-", ignore_cleanup_errors=True) as folder:
        # Twice, because processes that end together with this one may still write to it.
        clean_up = 'cat; rm -rf -- "$0"; sleep 1; rm -rf -- "$0"'
        with survived_by(["sh", "-c", clean_up, folder], stderr=subprocess.DEVNULL):
            yield folder


def how_it_ended(code: int) -> str:
    """Return an exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def same_command(module: str) -> str:
    """Return the command line of this program, as typed."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def how_to_continue(launcher: str, module: str) -> str:
    """Return the advice of a launcher after an interruption or failure; empty for modules that cannot continue."""
    return f"the same command continues from the last checkpoint:\n  {same_command(launcher)}" if module == TRAIN else ""


def define_count(name: str, default: int | None, help_text: str, values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the flag of a number of processes on this machine, which must not exhaust its memory."""
    flags.DEFINE_integer(name, default, help_text, lower_bound=1, upper_bound=MOST_PROCESSES, flag_values=values)


def check(module: str, arguments: Sequence[str], num_processes: int = 1) -> None:
    """Refuse a module or arguments that each process would refuse, before any is started."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):  # Its package does not exist; its name is invalid.
        spec = importlib.util.find_spec(module)
    if spec is None:
        command.refuse(f"module={module!r}: there is no such module here; write it as in {TRAIN}")
    if module not in _CHECKED:
        return
    check_options(arguments, module)
    for option in ("config", "workdir"):
        required(option, arguments)
    if module == TRAIN:
        from launch import train_flags  # Imported here because it imports JAX.

        train_flags.check(arguments, num_processes)


def check_options(arguments: Sequence[str], module: str = TRAIN) -> None:
    """Refuse an argument behind `--` that is no option."""
    if arguments and not arguments[0].startswith("-"):
        command.refuse(f"unexpected argument {arguments[0]!r}; options of {module} go behind --, {_EXAMPLE}")


def required(option: str, arguments: Sequence[str]) -> str:
    """Return the value of an option behind `--`, which must be there."""
    return config_file.value_of(option, arguments) or command.refuse(f"--{option} is missing behind --, {_EXAMPLE}")


# -- The group --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command_lines(module: str, arguments: Sequence[str], num_processes: int, address: str) -> list[list[str]]:
    """Return the command lines of processes that train together.

    Args:
        module: a module with the coordinator flags of launch.train.
        arguments: of all processes.
        num_processes: their number.
        address: at which process 0 listens, on a free port.
    """
    common = [f"--coordinator={address}:{free_port()}", f"--num_processes={num_processes}"]
    return [python(module, [*common, f"--process_index={index}", *arguments]) for index in range(num_processes)]


def elastic_command_lines(module: str, arguments: Sequence[str], num_processes: int, options: Sequence[str]) -> list[list[str]]:
    """Return the command lines of the members of an elastic run; `options` come from its coordinator. With `STANDBY` among them they
    have no index, since spare processes receive theirs later."""
    common = [*options, f"--num_processes={num_processes}"]
    indices = [[] if STANDBY in options else [f"--process_index={index}"] for index in range(num_processes)]
    return [python(module, [*common, *index, *arguments]) for index in indices]


def run_together(
    command_lines: list[list[str]],
    again: str = "",
    pin: bool = False,
    environments: Sequence[dict[str, str]] = (),
    faults: Iterator[chaos.Event] = iter(()),
    links: chaos.Links | None = None,
) -> int:
    """Run processes until all have ended; report a failure or an interruption on standard error.

    Accelerators are divided among the processes by `ranks.gpu_environments`.

    Args:
        command_lines: one per process; the first one prints to the terminal.
        again: how to continue after an interruption or a failure.
        pin: whether process i is pinned to core i, modulo the number of cores.
        environments: further variables of each process.
        faults: to be injected.
        links: of the emulated cluster with the processes.

    Returns:
        The exit code: 0, 128 + the signal that stopped this process, or the code of the process that failed first.
    """
    count, cores = len(command_lines), sorted(os.sched_getaffinity(0)) if pin else [None]
    # XLA has a thread per core; an exchange that overlaps with the gradient needs a second one.
    shared = {"NPROC": "2"} if pin else {}
    variables = [shared | gpus | own for gpus, own in zip(ranks.gpu_environments(count), environments or [{}] * count)]
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(caught_signals())
        children: list[Child] = []
        stack.callback(lambda: send(children, signal.SIGKILL))  # No process is left behind.
        for index, line in enumerate(command_lines):
            log = stack.enter_context(tempfile.TemporaryFile())
            output = None if index == 0 else log
            process = start(line, cores[index % len(cores)], env=variables[index], stdout=output, stderr=log)
            children.append(Child(process, log))
        injector = stack.enter_context(contextlib.closing(chaos.Chaos(faults, lambda index: children[index].living(), links)))
        return report(children, wait(children, caught, injector.look), caught, f"; {again}" if again else "")


def send(children: list[Child], number: signal.Signals) -> None:
    """Send a signal to all running processes."""
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(number)


class Ended(NamedTuple):
    """Indices of the processes that did not end normally.

    Attributes:
        failed: those that failed before any was terminated here, the first one first, and those killed by others.
        silent: those that still ran after others had lost contact: they are frozen or hang.
    """

    failed: list[int]
    silent: list[int]


def rounds(caught: list[signal.Signals], send: Callable[[signal.Signals], None]) -> Iterator[bool]:
    """Yield several times a second whether a signal was caught; `send` the first one as SIGTERM and the second as SIGKILL."""
    stopping = False
    while True:
        if caught and not stopping:
            stopping = True
            send(signal.SIGTERM)
        if len(caught) > 1:
            send(signal.SIGKILL)
        yield stopping
        time.sleep(POLL_S)


def wait(children: list[Child], caught: list[signal.Signals], look: Callable[[], None] = lambda: None) -> Ended:
    """Wait until all processes have ended; terminate the rest after the first failure.

    Args:
        children: the processes.
        caught: signals for `rounds`, which may be appended meanwhile.
        look: called several times a second.
    """
    failed: list[int] = []
    silent: list[int] = []
    killed, deadline = False, math.inf
    for stopping in rounds(caught, functools.partial(send, children)):
        killed = killed or len(caught) > 1
        codes = [child.process.poll() for child in children]
        running = [index for index, code in enumerate(codes) if code is None]
        if not failed and (failed := [index for index, code in enumerate(codes) if code]):
            deadline = time.monotonic() + GRACE_S
            if not stopping:  # They have received a SIGTERM already.
                send(children, signal.SIGTERM)
        if not killed:
            # Connections of a killed process close before it ends, so others may fail first because of it.
            failed += [index for index, code in enumerate(codes) if index not in failed and code == -signal.SIGKILL]
        if not running:
            break
        late = time.monotonic() > deadline
        if failed and not silent and all(codes[index] in LOST_CONTACT for index in failed):
            silent = [index for index in running if late or _is_stopped(children[index].process.pid)]
        if late or silent == running:
            killed = True
            send(children, signal.SIGKILL)
        look()
    return Ended(failed, silent)


def _is_stopped(process_id: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False without /proc."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def _consequence(code: int) -> int:
    """Rank of an exit code among failures at about the same time: higher for codes that rather follow from another failure."""
    return 2 if code in LOST_CONTACT else int(code != -signal.SIGKILL)


def report(children: list[Child], ended: Ended, caught: list[signal.Signals], again: str) -> int:
    """Report on standard error how the group ended; return the exit code."""
    if not ended.failed:
        print("".join(f"{line}\n" for line in children[0].lines(LAST_LINES)), end="", file=sys.stderr, flush=True)
        return 0
    if caught:
        print(f"interrupted by {caught[0].name}{again}", file=sys.stderr, flush=True)
        return 128 + caught[0]
    if sys.stdout.isatty():
        print(_SHOW_CURSOR, end="", flush=True)  # The live display of a killed process may have hidden it.
    index = min(ended.failed, key=lambda index: _consequence(children[index].process.returncode))
    code, output = children[index].process.returncode, children[index].lines(LAST_LINES)
    if code in (command.USER_ERROR, command.DIVERGED):  # Its output is a one-line error, and a restart would not help.
        print(*output, sep="\n", file=sys.stderr, flush=True)
        return code
    what = f"process {index} {how_it_ended(code)}, the other processes were ended"
    aborted_by_jax = code in LOST_CONTACT and any(map(_BY_JAX.search, children[index].lines()))
    if code == LOST_CONTACT[0] or aborted_by_jax:  # JAX's message is unhelpful here.
        names = " and ".join(map(str, ended.silent))
        what = f"process {names} stopped answering" if names else f"process {index} lost contact with another"
        code, output, what = LOST_CONTACT[0], [], f"{what}, all processes were ended"
    for line in output:
        print(f"[process {index}] {line}", file=sys.stderr)
    print(f"error: {what}{again}", file=sys.stderr, flush=True)
    return max(code, 1)
