"""Systems that wait on the hosts of a box and run steps when asked, one system at a time. Standard library only.

A *group* is one system's processes, started once. Each connects to a Unix socket, which network namespaces share, and waits
for requests without using the processor; so several systems take turns within one run, and whatever else the machine does
falls on all of them alike.

    parent                                              worker
    group.ask("steps", method, count, pause_s)   -->    answers with what its handler returns
"""

from collections.abc import Callable, Sequence
import multiprocessing.connection
import pathlib
import subprocess
import tempfile
from typing import Any

START_TIMEOUT_S = 300


class Failed(Exception):
    """A group that cannot run; the message is what its process said last."""


def serve(address: str, index: int, handlers: dict[str, Callable[..., Any]]) -> None:
    """Answers requests until the parent closes the connection."""
    with multiprocessing.connection.Client(address) as connection:
        connection.send(index)
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                return
            connection.send(handlers[name](*arguments))


class Group:
    """The processes of one system.

    Args:
        start: `start(index, address, log) -> Popen` starts one of them; the worker calls `serve(address, index, …)`.
        num_processes: how many.

    Raises:
        Failed: if one of them ends before it connects.
    """

    def __init__(self, start: Callable[[int, str, Any], subprocess.Popen], num_processes: int):
        self._directory = tempfile.TemporaryDirectory(prefix="decjax-box-")
        address = str(pathlib.Path(self._directory.name) / "socket")
        self._logs = [tempfile.TemporaryFile() for _ in range(num_processes)]
        self._processes: list[subprocess.Popen] = []
        self._connections: list[multiprocessing.connection.Connection | None] = [None] * num_processes
        with multiprocessing.connection.Listener(address, backlog=num_processes) as listener:
            listener._listener._socket.settimeout(1)
            self._processes = [start(index, address, log) for index, log in enumerate(self._logs)]
