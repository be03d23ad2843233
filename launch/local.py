"""Several processes on this machine, one CPU worker each, train together over gloo.

    python -m launch.local --num_processes=4 -- --config=configs/lm.py --workdir=runs/lm

What stands behind `--` goes to every `python -m launch.train`. Process 0 shows its progress; the others are quiet
unless one fails. If one dies, the others are ended. Ctrl-C and SIGTERM reach every process once: they save and stop at
the next logging step. The same command continues in both cases.
"""

from collections.abc import Iterator
import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, BinaryIO, NamedTuple

from absl import flags

from launch import command

GRACE_S = 15  # between SIGTERM and SIGKILL, once a process has died: well below a minute
POLL_S = 0.1
LAST_LINES = 20
LOST_CONTACT = (3, -signal.SIGABRT)  # how a process ends that noticed the end of another: launch.train, or JAX itself
_SHOW_CURSOR = "\x1b[?25h"


class Child(NamedTuple):
    """A process of the group and the file that keeps what it says."""

    process: subprocess.Popen
    log: BinaryIO

    def last_lines(self) -> list[str]:
        self.log.seek(0)
        return self.log.read().decode(errors="replace").splitlines()[-LAST_LINES:]


# -- One child: launch.sweep shares this part -------------------------------------------------------------------------


@contextlib.contextmanager
def caught_signals() -> Iterator[list[signal.Signals]]:
    """Collects Ctrl-C, SIGTERM and SIGHUP in a list instead of dying from them."""
    caught: list[signal.Signals] = []
    before = {number: signal.signal(number, lambda number, frame: caught.append(signal.Signals(number)))
              for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(arguments: list[str], **options: Any) -> subprocess.Popen:
    """Starts `python -m launch.train` in a session of its own: the terminal's Ctrl-C reaches it through us only.

    Args:
        arguments: of launch.train.
        **options: of `subprocess.Popen`; `env` is added to our environment.
    """
    # JAX's preemption service would swallow a SIGTERM that comes before the train loop listens.
    ours = {"JAX_ENABLE_PREEMPTION_SERVICE": "false", command.LAUNCHER: "1"}
    environment = os.environ | ours | options.pop("env", {})
    return subprocess.Popen(
        [sys.executable, "-m", "launch.train", *arguments], stdin=subprocess.DEVNULL, start_new_session=True,
        env=environment, preexec_fn=_end_with_parent if sys.platform == "linux" else None, **options)


def _end_with_parent() -> None:
    """Asks Linux for a SIGTERM when our parent dies: nothing stays behind even if the launcher is killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def same_command(module: str) -> str:
    """The command line of this program, to be typed again."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


# -- The group --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_all(num_processes: int, arguments: list[str], logs: list[BinaryIO]) -> list[Child]:
    """Starts all processes; standard output of the first stays the terminal, all else goes to the logs."""
    together = [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={num_processes}"]
    return [Child(start([*together, f"--process_index={index}", *arguments], env={"JAX_PLATFORMS": "cpu"},
                        stdout=None if index == 0 else log, stderr=log), log)
            for index, log in enumerate(logs)]


def send(children: list[Child], number: signal.Signals) -> None:
    """Sends a signal to every process that still runs."""
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(number)


def wait(children: list[Child], caught: list[signal.Signals]) -> list[int]:
    """Waits until all have ended; ends the rest after the first failure, and forwards a caught signal once.

    Args:
        children: all running.
        caught: signals, filled while we wait; a second one ends all processes at once.

    Returns:
        Indices of the processes that ended otherwise than with exit code 0, before we ended any; the first one first.
    """
    failed: list[int] = []
    forwarded, deadline = False, None
    while any(child.process.poll() is None for child in children):
        if caught and not forwarded:
            forwarded = True
            send(children, signal.SIGTERM)
        if not failed:
            failed = [index for index, child in enumerate(children) if child.process.poll()]
            if failed:
                deadline = time.monotonic() + GRACE_S
                if not forwarded:  # A second SIGTERM would not be kinder.
                    send(children, signal.SIGTERM)
        if len(caught) > 1 or (deadline is not None and time.monotonic() > deadline):
            send(children, signal.SIGKILL)
        time.sleep(POLL_S)
    return failed or [index for index, child in enumerate(children) if child.process.returncode]


def culprit(children: list[Child], failed: list[int]) -> int:
    """Of those that failed at about the same time, the one that did not merely lose contact with another."""
    return min(failed, key=lambda index: children[index].process.returncode in LOST_CONTACT)


def report(children: list[Child], failed: list[int], caught: list[signal.Signals]) -> int:
    """Says on standard error how it ended; returns the exit code."""
    again = f"the same command continues from the last checkpoint:\n  {same_command('launch.local')}"
    if not failed:
        print("".join(f"{line}\n" for line in children[0].last_lines()), end="", file=sys.stderr, flush=True)
        return 0
    if caught:
        print(f"interrupted by {caught[0].name}; {again}", file=sys.stderr, flush=True)
        return 128 + caught[0]
    if sys.stdout.isatty():
        print(_SHOW_CURSOR, end="", flush=True)  # The live display of a process that was killed had hidden it.
    index = culprit(children, failed)
    code, said = children[index].process.returncode, children[index].last_lines()
    if code == command.USER_ERROR:  # It has told its error in one line, and nothing but a correction continues it.
        print(*said, sep="\n", file=sys.stderr, flush=True)
        return code
    for line in said:
        print(f"[process {index}] {line}", file=sys.stderr)
    print(f"error: process {index} {how_it_ended(code)}, the other processes were ended; {again}",
          file=sys.stderr, flush=True)
    return max(code, 1)


def main(argv: list[str]) -> int:
    num_processes = flags.FLAGS.num_processes
    if num_processes < 1:
        command.fail(f"num_processes={num_processes}: must be at least 1")
    if not argv or not argv[0].startswith("-"):
        command.fail((f"unexpected argument {argv[0]!r}; " if argv else "")
                     + "options of launch.train go behind --, as in -- --config=configs/lm.py --workdir=runs/lm")
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(caught_signals())
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(num_processes)]
        children = start_all(num_processes, argv, logs)
        stack.callback(send, children, signal.SIGKILL)  # Whatever happens here, nothing stays behind.
        return report(children, wait(children, caught), caught)


if __name__ == "__main__":
    # Defined here, because launch.sweep uses this module and has no such flag.
    flags.DEFINE_integer("num_processes", None, "Processes on this machine, one CPU worker each.", required=True)
    command.run(main)
