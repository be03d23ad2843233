"""A member's side of the membership: it reports its state, stops when asked, and receives the views; see `coordinator`."""

from collections.abc import Callable
import contextlib
import json
import math
import os
import socket
import threading
import time
from typing import Any
import uuid

import zmq

from decjax.elastic.keys import Keys
from decjax.elastic.transport import Transport, bounded, end, watched
from decjax.elastic.view import BEATS, Member, View, ViewChanged

_BUSY = 0.05  # share of a core's time above which a process counts as computing


class Excluded(ConnectionError):
    """The run is over, or the coordinator has removed this process or given its place to another."""

    exit_code = 3  # of a process that lost contact; another takes its place unless the run is over


class Membership:
    """Takes part in a group, with a slot; the constructor waits until the coordinator answers.

    Args:
        address: of the coordinator.
        slot: this process's own.
        heartbeat_s: as the coordinator's.
        keys: of the group.
        encrypt: as `Transport`'s.

    Raises:
        OSError: if there is no route to the coordinator.
        Excluded: if the coordinator refuses this process.
    """

    def __init__(self, address: tuple[str, int], slot: int, heartbeat_s: float, keys: Keys, encrypt: bool = False):
        self.slot = slot
        self._step: int | None = 0
        self.taken = 0  # batches that all workers had taken before `step`, set by its owner before `ready`
        self._heartbeat_s = heartbeat_s
        host, self._wake = _own_address(address), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.transport = Transport(host, keys, heartbeat_s, encrypt, self._notify)
        self._member = Member(slot, uuid.uuid4().hex, host, self.transport.address[1], os.getpid())
        self._next: View | None = None
        self._is_ready = self._is_stopped = self._is_left_out = self._is_over = self._gone = False
        self._says_over = self._leaves = False
        self._views: int | None = None  # how many there were when the coordinator first answered
        self._number = 0  # of the last view that this member was told
        self._stopped: tuple[int, int | None] = 0, None  # for which view it has stopped, and at which step
        self._progress: Any = None
        self._used_s, self._looked_s, self._longest_s = 0.0, time.monotonic(), heartbeat_s
        self._progress_at = self._idle_since = self._looked_s
        self._changed = threading.Condition()
        self._context = zmq.Context()
        self._coordinator = self._context.socket(zmq.DEALER)
        self._coordinator.routing_id = self._member.life.encode()
        keys.enter(self._coordinator, keys.coordinator)
        bounded(self._coordinator, heartbeat_s)
        watched(self._coordinator, heartbeat_s)
        self._coordinator.connect(f"tcp://{address[0]}:{address[1]}")
        self._thread = threading.Thread(target=self._serve, name="elastic-control", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._views is not None or self._gone)
        if self._gone:
            self.close()
            raise Excluded("the coordinator has refused this process")
        self.is_late = bool(self._views)  # whether the group took steps before this process came

    @property
    def step(self) -> int | None:
        """The next step that this process takes, kept up to date by its owner; None: it has no replica yet.

        Raises:
            ViewChanged: when it is set after this process has reported another one as its last; the step since then does not count.
        """
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        with self._changed:
            if self._is_ready and self._is_stopped:
                raise ViewChanged("the others continue from the step that this process has reported")
            self._step = step

    def ready(self, has_replica: bool) -> None:
        """Asks to take part from the next view on."""
        self.step = self.step if has_replica else None
        self._is_ready = True
        self._notify()

    def next_view(self, left_out: Callable[[], None] = lambda: None) -> View:
        """The next view that this process is in, once all its members have stopped; `Excluded` if there will be none. `left_out` is
        called if a view without it begins first."""
        has_come = lambda: self._next is not None or self._gone or self._is_over
        with self._changed:
            self._changed.wait_for(lambda: self._is_left_out or has_come())
            is_left_out = self._is_left_out and not has_come()
        if is_left_out:
            left_out()
        with self._changed:
            self._changed.wait_for(has_come)
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
        self._says_over = True
        self._notify()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._gone, self._heartbeat_s)

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
        if not self._leaves:
            self._leaves = True
            self.transport.close()
            self._notify()
            self._thread.join()
            wake, self._wake = self._wake, -1
            os.close(wake)  # Not before the last write: its number may belong to another file then.

    # -- The thread that reports to the coordinator -------------------------------------------------------------------

    def _notify(self) -> None:
        """Wakes the thread that reports to the coordinator."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        poller, beat_s = zmq.Poller(), self._heartbeat_s / BEATS
        poller.register(self._coordinator, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        said_at = -beat_s
        while not self._leaves:
            due_s = said_at + beat_s - time.monotonic()
            ready = dict(poller.poll(max(0, math.ceil(1000 * due_s))))
            if changed := self._wake in ready:
                os.eventfd_read(self._wake)
            if self._coordinator in ready:
                changed |= self._hear(json.loads(self._coordinator.recv()))
            if changed or time.monotonic() >= said_at + beat_s:
                said_at = time.monotonic()
                self._say()
        self._say()
        linger_s = self._heartbeat_s / BEATS
        self._coordinator.close(linger=round(1000 * linger_s))
        end(self._context, linger_s)

    def _say(self) -> None:
        stopped, at = self._stopped
        state: dict[str, Any] = dict(member=self._member, ready=self._is_ready, step=self.step, taken=self.taken)
        state |= dict(stopped=stopped, at=at, reaches=self.transport.reached, broken=self.transport.broken)
        state |= dict(awaits=[*self.transport.awaited], idle=self._idle(), over=self._says_over, leaves=self._leaves)
        with contextlib.suppress(zmq.Again):  # Nothing can be queued now; the next report has the same content.
            self._coordinator.send(json.dumps(state).encode(), zmq.NOBLOCK)

    def _idle(self) -> float:
        """How long this process has taken no step, moved no message and not used a core (as compiling does), in its longest steps."""
        now_s, used_s, progress = time.monotonic(), time.process_time(), (self.step, self.transport.moved)
        if progress != self._progress:
            self._longest_s = max(self._longest_s, now_s - self._progress_at)
            self._progress_at = self._idle_since = now_s
        elif used_s - self._used_s > _BUSY * (now_s - self._looked_s):
            self._idle_since = now_s
        self._progress, self._used_s, self._looked_s = progress, used_s, now_s
        return (now_s - self._idle_since) / self._longest_s

    def _hear(self, said: dict[str, Any]) -> bool:
        """Takes in a message of the coordinator; returns whether it has to be answered."""
        stops = said.get("asked", 0) > self._stopped[0]
        with self._changed:
            if "out" in said:
                self._gone = True
            else:
                self._views = said["views"] if self._views is None else self._views
                self._is_over |= said["over"]
                self._is_left_out = said["view"] is None and said["views"] > 0
                self.transport.connect(Member(*fields) for fields in said["roster"] if fields[1] != self._member.life)
            if stops:
                self._next, self._is_stopped = None, True  # A view that has not begun yet never will.
            elif (view := said.get("view")) and view["number"] > self._number:
                self._next, self._number = View.of(view), view["number"]
            if stops or self._gone or self._is_over:
                self.transport.interrupt()  # The member that ended the run sends no further messages.
            if stops:
                self._stopped = said["asked"], self.step
            self._changed.notify_all()
        return stops


def _own_address(other: tuple[str, int]) -> str:
    """The address by which this machine reaches another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(other)
        return probe.getsockname()[0]


__all__ = ["Excluded", "Membership", "ViewChanged"]
