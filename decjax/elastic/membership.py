"""A member's side of the membership: it says that it lives, stops when asked, and learns the views; see `coordinator`."""

import contextlib
import json
import os
import socket
import threading
import uuid

from decjax.elastic.transport import Transport
from decjax.elastic.view import Member, View, ViewChanged

BEATS = 5  # heartbeats in `heartbeat_s`


class Excluded(ConnectionError):
    """The run is over, the coordinator is gone, or has given this process's place to another."""

    exit_code = 3  # of a process that lost contact; another takes its place unless the run is over


class Membership:
    """Takes part in a group, as whoever has a slot.

    Args:
        address: of the coordinator.
        slot: this process's own.
        heartbeat_s: as the coordinator's.
        secret: as the coordinator's.
    """

    def __init__(self, address: tuple[str, int], slot: int, heartbeat_s: float, secret: str):
        self.slot = slot
        self.step: int | None = 0  # the next one that this process takes, kept up to date by its owner; None: it has no replica yet
        self.taken = 0  # batches that all workers had taken before `step`, set by its owner before `ready`
        self._heartbeat_s = heartbeat_s
        self._coordinator = socket.create_connection(address, heartbeat_s)
        self._coordinator.settimeout(None)
        host = self._coordinator.getsockname()[0]
        self.transport = Transport(host, secret.encode().ljust(32, b"\0")[:32], self._accuse, heartbeat_s)
        self._next: View | None = None
        self._is_stopped = self._is_over = False
        self.is_late = False  # whether the group took steps before this process came
        self._gone = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._say(secret=secret, **Member(slot, uuid.uuid4().hex, host, self.transport.address[1], os.getpid())._asdict())
        self._lines = self._coordinator.makefile()  # The next line may come with the first.
        answer = self._lines.readline()
        if not answer:
            raise Excluded("the coordinator has refused this process")
        self.is_late = json.loads(answer)["views"] > 0
        for name, run in (("elastic-control", self._listen), ("elastic-heartbeat", self._beat)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def ready(self, has_replica: bool) -> None:
        """Asks to take part from the next view on."""
        self.step = self.step if has_replica else None
        self._say(ready=self.step, taken=self.taken)

    def next_view(self) -> View:
        """The next view, once all its members have stopped; `Excluded` if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._gone or self._is_over)
            if self._next is None or self._gone or self._is_over:
                raise Excluded("the run is over, the coordinator no longer answers, or another process has taken this one's place")
            view, self._next = self._next, None
            self._is_stopped = False
            if self.slot not in view.fresh:
                self.step = view.step
            self.transport.enter(view)
        return view

    def end(self) -> None:
        """Says that the run is over: all is written, or nothing more can be."""
        with contextlib.suppress(OSError):
            self._say(over=True)

    def await_end(self) -> None:
        """Waits until another member says that the run is over.

        Raises:
            ViewChanged: if the view ends before; the next one has to take the run to its end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._is_stopped or self._gone)
            if not self._is_over:
                raise ViewChanged("a member is gone before the run was over")

    def close(self) -> None:
        self.transport.close()
        with contextlib.suppress(OSError):
            self._coordinator.shutdown(socket.SHUT_RDWR)
        self._coordinator.close()

    # -- Threads ------------------------------------------------------------------------------------------------------

    def _say(self, **what: object) -> None:
        with self._sending:
            self._coordinator.sendall(json.dumps(what).encode() + b"\n")

    def _accuse(self, member: Member) -> None:
        with contextlib.suppress(OSError):
            self._say(unreachable=member.life)

    def _beat(self) -> None:
        pause = threading.Event()
        with contextlib.suppress(OSError):
            while not pause.wait(self._heartbeat_s / BEATS):
                self._say()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._lines:
            for line in self._lines:
                said = json.loads(line)
                with self._changed:
                    if "stop" in said:
                        self._next, self._is_stopped = None, True  # A view that has not begun yet never will.
                        self.transport.interrupt()
                    elif "over" in said:
                        self._is_over = True
                        self.transport.interrupt()  # Whoever said it sends nothing any more.
                    else:
                        self._next = View.of(said["view"])
                    self._changed.notify_all()
                if "stop" in said:
                    self._say(**{"stopped": self.step, "for": said["stop"]})
        with self._changed:
            self._gone = True
            self.transport.interrupt()
            self._changed.notify_all()


__all__ = ["BEATS", "Excluded", "Membership", "ViewChanged"]
