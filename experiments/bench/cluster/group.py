"""The parent of an emulated cluster: systems that are started once, wait on its hosts, and take turns.

    parent                                                   every worker of the system
    group.ask("steps", method="ring", count=4)   -- JSON ->  answers with what its handler returns

A system that waits uses no processor and no link, so several of them are measured on one machine within one interleaved run, and
other load on the machine affects all of them.
"""

import contextlib
import json
import signal
import subprocess
import tempfile
from typing import IO, Any

from launch import cluster, processes


class Failed(Exception):
    """A system cannot run; the message is the last error of one of its processes."""


def done(what: str, code: int) -> None:
    """Check the exit code of a command in the emulated cluster: raise `Failed` for an error; end this command if a signal stopped it."""
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP):
        raise SystemExit(code)
    if code:
        raise Failed(f"{what} ended with exit code {code}; the same command continues")


def _complaint(lines: list[str]) -> str:
    """Return the last line of a log that names an error, or else its last line."""
    return next((line for line in reversed(lines) if "rror: " in line), lines[-1] if lines else "a worker ended without a word")


def _pipes(child: processes.Child) -> tuple[IO[str], IO[str]]:
    """Return (standard input, standard output) of a child process."""
    assert child.process.stdin is not None and child.process.stdout is not None
    return child.process.stdin, child.process.stdout


class Group:
    """The processes of one system on the hosts of a network; processes with neighboring indices share a host.

    Args:
        network: the hosts.
        module: of every process, with the flags --coordinator, --num_processes and --process_index; it calls `serve`.
        per_host: processes on each host.
        environment: variables added to this process's environment.
        python: an interpreter that can import the module; None: this one.
    """

    def __init__(
        self, network: cluster.Network, module: str, per_host: int, environment: dict[str, str], python: str | None = None
    ):
        self._children: list[processes.Child] = []
        lines = processes.command_lines(module, (), len(network.hosts) * per_host, network.addresses[0])
        for index, line in enumerate(lines):
            log = tempfile.TemporaryFile()  # noqa: SIM115  It is open as long as the process lives.
            inside = network.inside(index // per_host, [python or line[0], *line[1:]])
            pipe = subprocess.PIPE
            process = processes.start(inside, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True)
            self._children.append(processes.Child(process, log))

    def ask(self, do: str, **arguments: object) -> list[Any]:
        """Return the answers of all processes to a request, in the order of their indices.

        Raises:
            Failed: if one of them ends instead; the others are then ended, too.
        """
        try:
            for child in self._children:
                print(json.dumps({"do": do, **arguments}), file=_pipes(child)[0], flush=True)
            answers = [_pipes(child)[1].readline() for child in self._children]
        except BrokenPipeError:
            answers = [""]
        if not all(answers):
            ended = [child for child in self._children if child.process.poll()]  # Before `close` ends the others.
            self.close()
            if any(child.process.returncode == -signal.SIGKILL for child in ended):
                raise Failed("a worker was killed, probably for want of memory")
            raise Failed(_complaint((ended or self._children)[0].lines(processes.LAST_LINES)))
        return [json.loads(answer) for answer in answers]

    def close(self) -> None:
        """Close the processes' standard inputs, so that they end, and kill those that do not."""
        for child in self._children:
            with contextlib.suppress(OSError):
                _pipes(child)[0].close()
        for child in self._children:
            try:
                child.process.wait(5)
            except subprocess.TimeoutExpired:
                processes.send(self._children, signal.SIGKILL)
                child.process.wait()
