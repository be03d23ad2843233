"""A process's membership in a group: it reports its state, stops when asked, and receives views; see `coordinator`."""

from collections.abc import Callable
import contextlib
import math
import os
import socket
import threading
import time
import uuid

import zmq

from decjax.elastic.keys import Keys
from decjax.elastic.transport import Transport, detect_silence, set_limits, terminate
from decjax.elastic.view import BEATS, Answer, Member, Report, View, written
from decjax.errors import ViewChanged

_BUSY = 0.05  # share of a core's time above which a process counts as computing


class Excluded(ConnectionError):
    """The run is over, or the coordinator has removed this process or replaced it."""

    exit_code = 3  # of processes that lost contact; the launcher replaces them unless the run is over


class Membership:
    """A slot in a group; arguments are as those of `Coordinator` and `Transport`. The constructor waits until the coordinator answers.

    Attributes:
        transport: the connections to other members.
        taken: batches that all workers had taken before `step`, which the owner sets before `ready`.
        is_late: whether the group took steps before this process joined.

    Raises:
        OSError: if there is no route to the coordinator.
        Excluded: if the coordinator refuses this process.
    """

    def __init__(self, address: tuple[str, int], slot: int, heartbeat_s: float, keys: Keys, encrypt: bool = False):
        self.slot, self.taken = slot, 0
        self._step: int | None = 0
        self._heartbeat_s = heartbeat_s
        host, self._wake = _local_address(address), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.transport = Transport(host, keys, heartbeat_s, encrypt, self._notify)
        self._member = Member(slot, uuid.uuid4().hex, host, self.transport.address[1], os.getpid())
        self._next: View | None = None
        self._is_ready = self._is_stopped = self._is_left_out = self._is_over = self._gone = False
        self._reports_over = self._leaves = False
        self.is_late: bool | None = None  # None: the coordinator has not answered yet
        self._number = 0  # of the last view received
        self._stopped: tuple[int, int | None] = 0, None  # the view for which it has stopped, and its step then
        self._progress: tuple[int | None, int] = -1, 0  # its step, and the messages it has sent and received
        self._used_s, self._sampled_s, self._longest_s = 0.0, time.monotonic(), heartbeat_s
        self._progress_at = self._idle_since = self._sampled_s
        self._changed = threading.Condition()
        self._context = zmq.Context()
        self._coordinator = self._context.socket(zmq.DEALER)
        self._coordinator.routing_id = self._member.life.encode()
        keys.enter(self._coordinator, keys.coordinator)
        set_limits(self._coordinator, heartbeat_s)
        detect_silence(self._coordinator, heartbeat_s)
        self._coordinator.connect(f"tcp://{address[0]}:{address[1]}")
        self._thread = threading.Thread(target=self._serve, name="elastic-control", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self.is_late is not None or self._gone)
        if self._gone:
            self.close()
            raise Excluded("the coordinator has refused this process")

    @property
    def step(self) -> int | None:
        """The next step that this process takes, which its owner sets; None if it has no replica.

        Raises:
            ViewChanged: when it is set after this process has stopped and reported its step; a step taken since then does not count.
        """
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        with self._changed:
            if self._is_ready and self._is_stopped:
                raise ViewChanged("the others continue from the step that this process has reported")
            self._step = step

    def ready(self, has_replica: bool) -> None:
        """Ask to take part from the next view on."""
        self.step = self.step if has_replica else None
        self._is_ready = True
        self._notify()

    def next_view(self, left_out: Callable[[], None] = lambda: None) -> View:
        """Wait for the next view that this process is in.

        Args:
            left_out: called if a view without this process begins first.

        Raises:
            Excluded: if there will be none.
        """
        has_come = lambda: self._next is not None or self._gone or self._is_over
        with self._changed:
            self._changed.wait_for(lambda: self._is_left_out or has_come())
            is_left_out = not has_come()
        if is_left_out:
            left_out()
        with self._changed:
            self._changed.wait_for(has_come)
            if self._next is None or self._gone or self._is_over:
                raise Excluded("the run is over, the coordinator does not answer, or another process has replaced this one")
            view, self._next = self._next, None
            self._is_stopped = False
            if self.slot not in view.fresh:
                self.step = view.step
            self.transport.enter(view)
        return view

    def end(self) -> None:
        """Report that the run is over: it is finished, or cannot continue."""
        self._reports_over = True
        self._notify()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._gone, self._heartbeat_s)

    def await_end(self) -> None:
        """Wait until another member reports that the run is over.

        Raises:
            ViewChanged: if the view ends first; then its members finish the run in the next one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._is_stopped or self._gone)
            if not self._is_over:
                raise ViewChanged("a member left before the run was over")

    def close(self) -> None:
        if not self._leaves:
            self._leaves = True
            self.transport.close()
            self._notify()
            self._thread.join()
            wake, self._wake = self._wake, -1
            os.close(wake)  # After the last write, because the number may be reused.

    # -- The thread that reports to the coordinator -------------------------------------------------------------------

    def _notify(self) -> None:
        """Wake the thread that reports to the coordinator."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        poller, beat_s = zmq.Poller(), self._heartbeat_s / BEATS
        poller.register(self._coordinator, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        sent_at = -beat_s
        while not self._leaves:
            due_s = sent_at + beat_s - time.monotonic()
            ready = dict(poller.poll(max(0, math.ceil(1000 * due_s))))
            if changed := self._wake in ready:
                os.eventfd_read(self._wake)
            if self._coordinator in ready:
                changed |= self._receive(Answer.read(self._coordinator.recv()))
            if changed or time.monotonic() >= sent_at + beat_s:
                sent_at = time.monotonic()
                self._send()
        self._send()
        linger_s = self._heartbeat_s / BEATS
        self._coordinator.close(linger=round(1000 * linger_s))
        terminate(self._context, linger_s)

    def _send(self) -> None:
        stopped, at = self._stopped
        report = Report(
            member=self._member,
            ready=self._is_ready,
            step=self.step,
            taken=self.taken,
            stopped=stopped,
            at=at,
            reaches=self.transport.reached,
            broken=self.transport.broken,
            awaits=[*self.transport.awaited],
            idle=self._idle(),
            over=self._reports_over,
            leaves=self._leaves,
        )
        with contextlib.suppress(zmq.Again):  # The queue is full; the next report holds the complete state, too.
            self._coordinator.send(written(report), zmq.NOBLOCK)

    def _idle(self) -> float:
        """Return the time without a step, a message or use of a core (as in compilation), in units of the longest step."""
        now_s, used_s, progress = time.monotonic(), time.process_time(), (self.step, self.transport.moved)
        if progress != self._progress:
            self._longest_s = max(self._longest_s, now_s - self._progress_at)
            self._progress_at = self._idle_since = now_s
        elif used_s - self._used_s > _BUSY * (now_s - self._sampled_s):
            self._idle_since = now_s
        self._progress, self._used_s, self._sampled_s = progress, used_s, now_s
        return (now_s - self._idle_since) / self._longest_s

    def _receive(self, answer: Answer) -> bool:
        """Process an answer of the coordinator; return whether it must be reported to."""
        stops = answer.stop_for > self._stopped[0]
        with self._changed:
            if answer.out:
                self._gone = True
            else:
                self.is_late = answer.views > 0 if self.is_late is None else self.is_late
                self._is_over |= answer.over
                self._is_left_out = answer.view is None and answer.views > 0
                self.transport.connect(member for member in answer.roster if member.life != self._member.life)
            if stops:
                self._next, self._is_stopped = None, True  # A view that has not begun yet never will.
            elif answer.view and answer.view.number > self._number:
                self._next, self._number = answer.view, answer.view.number
            if stops or self._gone or self._is_over:
                self.transport.interrupt()  # The member that ended the run sends no further messages.
            if stops:
                self._stopped = answer.stop_for, self.step
            self._changed.notify_all()
        return stops


def _local_address(other: tuple[str, int]) -> str:
    """Return the address of this machine on the network on which it reaches another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(other)
        return probe.getsockname()[0]
