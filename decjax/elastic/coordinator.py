"""The coordinator decides which processes take part. It holds no model and takes no steps, so any worker may die.

Each member sends a `Report` over ZeroMQ whenever its state changes, and at least every fifth of `heartbeat_s`. The coordinator sends an
`Answer` to each.

A change of the membership takes two messages: the coordinator asks all members to stop and report their step; when the last one has
answered, the next view begins at the largest of these. Each member holds connections to all others in the roster. A view consists of
members that reach each other: the largest such group continues, and the others wait until they are reached again. Connections of a host
that is cut off are lost one after the other; so where some are lost, the next view waits until `heartbeat_s` after the members were
asked to stop.

A member without a replica is new, or the member that was to send it one is gone. Such members, and those that stopped before the last
step that others took, receive the replica of a member that took it. If no member has a replica left, all are removed: the processes end,
and new ones begin from the last checkpoint.

A member is removed if it leaves, if its process has ended or another process has taken its slot, and in two further cases:

- It is stuck: others wait for it, but it has neither computed nor waited for 12 times `heartbeat_s`, or 12 of its longest steps.
- It is silent: for `heartbeat_s` it has sent no report and its connection has not answered. ZeroMQ's threads answer for the connection,
  so a busy process stays and a stopped one is removed. Seconds in which the coordinator itself was stopped do not count.

The run is over when the writer reports it, after its last write. The other members wait for that, so that they can continue if the
writer dies first. A member whose error ends the run also reports it. From then on no member stops or joins.
"""

import collections
from collections.abc import Callable
import contextlib
import dataclasses
import itertools
import time

import zmq
from zmq.utils import monitor

from decjax.elastic.keys import Gate, Keys
from decjax.elastic.transport import detect_silence, set_limits, terminate
from decjax.elastic.view import Answer, Member, Report, View, written

MOST_BYTES = 2**16  # of a message to the coordinator
LINGER_S = 0.5  # for sending the last messages
SETTLE = 1.0  # time in which all losses of connections that a host causes are reported, in `heartbeat_s`
PATIENCE = 12  # time until a stuck member is removed, in `heartbeat_s` or its longest steps


@dataclasses.dataclass(eq=False)
class _Session:
    """A member and its last report."""

    member: Member
    report: Report
    connection: int  # the file descriptor
    reported_s: float
    ended_s: float | None = None  # when the end of its process was noticed

    def step(self, view: View) -> int | None:
        """Return the next step that the member can take; None if it has no replica."""
        return self.report.at if self.member in view.members else self.report.step

    def reaches(self, other: "_Session") -> bool:
        """Return whether messages pass both ways."""
        return other.member.life in self.report.reaches and self.member.life in other.report.reaches


class Coordinator:
    """Accepts members and sends them views.

    Args:
        host: the address to listen at.
        slots: N, the number of slots; the first view has them all.
        least: the fewest members that continue; with fewer they wait for others.
        heartbeat_s: seconds of silence after which a member is removed.
        keys: of the group, with the coordinator's secret key.
        note: called with each view.
    """

    def __init__(
        self, host: str, slots: int, least: int, heartbeat_s: float, keys: Keys, note: Callable[[View], None] = lambda view: None
    ):
        self._slots, self.least, self._heartbeat_s, self._note = slots, least, heartbeat_s, note
        self._context = zmq.Context()
        self._gate = Gate(self._context, keys)
        self._members = self._context.socket(zmq.ROUTER)
        keys.guard(self._members)
        set_limits(self._members, heartbeat_s)
        self._members.maxmsgsize, self._members.router_handover = MOST_BYTES, True
        detect_silence(self._members, heartbeat_s)
        self._events = self._members.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.address = host, self._members.bind_to_random_port(f"tcp://{host}")
        self._poller = zmq.Poller()
        for socket in (self._gate.socket, self._members, self._events):
            self._poller.register(socket, zmq.POLLIN)
        self._open: set[int] = set()  # connections
        self._sessions: dict[bytes, _Session] = {}
        self._gone: set[bytes] = set()  # lives of members that were removed
        self.view = View(0, 0, ())
        self.silent: set[int] = set()  # slots of processes that were removed and may still run
        self.ended: collections.deque[int] = collections.deque()  # ids of ended processes, which the launcher appends
        self.is_over = False
        self._sent: tuple[object, ...] = ()  # the state of the last answers
        self._now_s, self._polled_s = 0.0, time.monotonic()  # The first clock stands still while this process is stopped.
        self._next_number, self._stopping_s = 0, 0.0  # the view for which members were asked to stop, 0 for none, and when

    def run(self, ended: Callable[[], bool]) -> None:
        """Serve until `ended()` holds, which is called several times a second."""
        try:
            while not ended():
                self.serve(min(0.1, self._heartbeat_s / 10))
        finally:
            self._drop_all()
            self._members.disable_monitor()
            self._events.close(linger=0)
            self._gate.socket.close(linger=0)
            self._members.close(linger=round(1000 * LINGER_S))
            terminate(self._context, LINGER_S)

    def serve(self, wait_s: float) -> None:
        """Process the messages that arrive within `wait_s`, and change the view if necessary."""
        self._poller.poll(round(1000 * wait_s))
        while self._read():
            pass
        now_s = time.monotonic()
        self._now_s += min(now_s - self._polled_s, 4 * wait_s)
        self._polled_s = now_s
        while self.ended:
            process = self.ended.popleft()
            for session in self._sessions.values():
                session.ended_s = self._now_s if session.member.process == process else session.ended_s
        for session in [session for session in self._sessions.values() if self._has_ended(session)]:
            self._drop(session.member.life.encode())
        for session in [session for session in self._sessions.values() if self._is_silent(session) or self._is_stuck(session)]:
            self.silent.add(session.member.slot)
            self._drop(session.member.life.encode())
        self._decide()
        state = self.view, self._next_number, self.is_over, [*self._sessions]
        if state != self._sent:
            self._sent = state
            for life in self._sessions:
                self._send_state(life)

    # -- Sessions -----------------------------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Read a message and the events before it; return whether there may be more."""
        has_events = False
        life, frames = None, []
        with contextlib.suppress(zmq.Again):
            life, *frames = self._members.recv_multipart(zmq.NOBLOCK, copy=False)
        while self._gate.socket.poll(0):
            if (session := self._sessions.get(self._gate.answer() or b"")) is not None:
                session.reported_s = self._now_s  # It has reconnected; the number of the connection comes with its next report.
        while self._events.poll(0):  # Before the message: its connection may have had the number of one that was closed.
            event, has_events = monitor.recv_monitor_message(self._events), True
            (self._open.add if event["event"] == zmq.EVENT_ACCEPTED else self._open.discard)(int(event["value"]))
        if life is None:
            return has_events  # The last messages of a connection come before the event of its end.
        try:
            self._receive(life.bytes, frames[0].get(zmq.SRCFD), Report.read(frames[0].bytes))
        except Exception:  # An invalid message must not affect the other members.
            self._drop(life.bytes)
        return True

    def _receive(self, life: bytes, connection: int, report: Report) -> None:
        session = self._sessions.get(life)
        if session is None:
            member = report.member
            if self.is_over or life in self._gone or member.life.encode() != life or not 0 <= member.slot < self._slots:
                raise ValueError("this process may not take part")
            for other in [other for other in self._sessions if self._sessions[other].member.slot == member.slot]:
                self._drop(other)  # This process replaces it.
            session = self._sessions[life] = _Session(member, report, connection, self._now_s)
        session.report, session.connection, session.reported_s = report, connection, self._now_s
        self.is_over |= report.over
        if report.leaves:
            self._drop(life)
        else:
            self._send_state(life)

    def _has_ended(self, session: _Session) -> bool:
        """Return whether the process has ended and its last report has been read: that can arrive after the process's end was noticed."""
        if session.ended_s is None:
            return False
        return session.connection not in self._open or self._now_s - session.ended_s > self._heartbeat_s

    def _is_silent(self, session: _Session) -> bool:
        return session.connection not in self._open and self._now_s - session.reported_s > self._heartbeat_s

    def _is_stuck(self, session: _Session) -> bool:
        """Return whether others wait for a member that neither computes nor waits."""
        is_awaited = any(session.member.slot in other.report.awaits for other in self._sessions.values())
        return is_awaited and not session.report.awaits and session.report.idle > PATIENCE

    def _drop(self, life: bytes) -> None:
        self._gone.add(life)
        self._sessions.pop(life, None)
        self._send(life, Answer(out=True))

    def _drop_all(self) -> None:
        for life in [*self._sessions]:
            self._drop(life)

    def _send(self, life: bytes, answer: Answer) -> None:
        with contextlib.suppress(zmq.ZMQError):  # The connection is full or lost; the member's next report is answered.
            self._members.send_multipart([life, written(answer)], zmq.NOBLOCK)

    def _send_state(self, life: bytes) -> None:
        number, roster = self.view.number, tuple(session.member for session in self._sessions.values())
        view = self.view if self._sessions[life].member in self.view.members else None
        stop_for = self._next_number or (0 if view else number)  # A member that missed a change is still in an earlier view.
        self._send(life, Answer(views=number, stop_for=stop_for, view=view, roster=roster, over=self.is_over))

    # -- Views --------------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Ask members to stop if the membership has changed; begin the next view when all have stopped."""
        if self.is_over:
            return
        chosen = self._chosen()
        members = tuple(sorted(session.member for session in chosen))
        broken = self.view.number and any(session.report.broken == self.view.number for session in chosen)
        if members == self.view.members and not self._next_number and not broken:
            return
        enough = len(members) >= (self._slots if self.view.number == 0 else self.least)
        gone = any(member not in members for member in self.view.members)
        if not self._next_number and (enough or gone):
            self._next_number, self._stopping_s = self.view.number + 1, self._now_s
        elif self._next_number and enough and all(map(self._has_stopped, chosen)) and self._lost_links_are_known():
            self._begin(chosen, members)

    def _lost_links_are_known(self) -> bool:
        """Return whether all connections exist, or enough time has passed for all lost ones to be reported."""
        ready = [session for session in self._sessions.values() if session.report.ready]
        all_reached = all(a.reaches(b) for a, b in itertools.combinations(ready, 2))
        return all_reached or self._now_s - self._stopping_s > SETTLE * self._heartbeat_s

    def _has_stopped(self, session: _Session) -> bool:
        return session.member not in self.view.members or session.report.stopped == self._next_number

    def _begin(self, chosen: list[_Session], members: tuple[Member, ...]) -> None:
        """Begin the next view."""
        step_of = {session.member.slot: session.step(self.view) for session in chosen}
        steps = [step for step in step_of.values() if step is not None]
        if not steps:  # New processes start from the last checkpoint.
            self.view, self._next_number = View(0, 0, ()), 0
            self._drop_all()
            return
        step = max(self.view.step, *steps)  # A member that was ahead may have died before its view began.
        fresh = tuple(sorted(slot for slot, next_step in step_of.items() if next_step != max(steps)))
        if self.view.number:
            block = self.view.block + (step - self.view.step) * len(self.view.members)
        else:
            block = max(session.report.taken for session in chosen if session.member.slot not in fresh)
        writer = self.view.writer if self.view.writer in step_of else min(step_of.keys() - set(fresh))
        self.view, self._next_number = View(self._next_number, step, members, fresh, writer, block), 0
        self._note(self.view)

    def _chosen(self) -> list[_Session]:
        """Return the members of the next view: ready ones that reach each other, first those that have a replica."""
        ready = [session for session in self._sessions.values() if session.report.ready]
        with_replica = self._mutual([session for session in ready if session.report.step is not None])
        fresh = [session for session in ready if session.report.step is None and all(map(session.reaches, with_replica))]
        return with_replica + self._mutual(fresh)

    def _mutual(self, group: list[_Session]) -> list[_Session]:
        """Return a large subgroup whose members all reach each other, found greedily."""

        def rank(session: _Session) -> tuple[int, bool, bool, bool, Member]:
            """Of two members that do not reach each other, the one with the lower rank stays."""
            apart, member = sum(other is not session and not session.reaches(other) for other in group), session.member
            is_lost = session.connection not in self._open
            return apart, is_lost, member not in self.view.members, member.slot != self.view.writer, member

        group = list(group)
        while group and rank(worst := max(group, key=rank))[0]:
            group.remove(worst)
        return group
