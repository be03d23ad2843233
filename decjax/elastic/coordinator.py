"""The coordinator: decides which processes take part. It holds no model and takes no steps, so that any worker may die.

Each member reports its state over ZeroMQ: whenever it changes, and at least every fifth of `heartbeat_s`. The coordinator answers each
report with everything that the member needs. Both are complete states, so the next message makes up for one that is lost.

    member        → {"member": Member, "ready", "step": the next one or null, "taken": batches, "stopped": number of the view for which
                    it has stopped, "at": its step then, "reaches": lives, "broken": number of a view, "idle", "awaits": slots,
                    "over", "leaves"}
    coordinator   → {"views": number of views so far, "asked": number of a view or 0, "view": View or null, "roster": members, "over"},
                    or {"out": true}

A change of the membership takes two messages: the coordinator asks all members to stop and report their step; when the last one has
answered, the next view begins at the largest of these. Each member holds connections to all others in the roster. A view consists of
members that reach each other: the largest such group continues, and the others wait until they are reached again. Connections of a host
that is cut off are lost one after the other; so where some are lost, the next view waits until `heartbeat_s` after the members were
asked to stop.

A step of null means that the member has no replica: it is new, or the member that was to send it one is gone. Such members, and those
that stopped before the last step that others took, receive the replica of a member that took it. If no member has a replica left, all
are removed: the processes end, and new ones begin from the last checkpoint.

A member is removed if it leaves, if its process has ended or another process has taken its slot, and in two cases more:

- others wait for it, and for 12 times `heartbeat_s`, or 12 of its longest steps, it has neither computed nor waited itself;
- it is silent for `heartbeat_s`, and its connection does not answer either. ZeroMQ's threads answer for the connection, so a busy
  process stays and a stopped one is removed. Seconds in which the coordinator itself was stopped do not count.

The run is over when the member that writes reports so, after its last write. The others wait for that, so that they can continue if it
dies first. A member whose error ends the run reports so, too. From then on no member stops or joins.
"""

import collections
from collections.abc import Callable
import contextlib
import itertools
import json
import time
from typing import Any

import zmq
from zmq.utils import monitor

from decjax.elastic.keys import Gate, Keys
from decjax.elastic.transport import bound, bounded, end, watched
from decjax.elastic.view import Member, View

MOST_BYTES = 2**16  # of a message to the coordinator
LINGER_S = 0.5  # in which the last messages are sent
SETTLE = 1.0  # within which connections that are lost together are all known to be, in `heartbeat_s`
PATIENCE = 12  # until a member that does nothing is removed, in `heartbeat_s` or its own longest steps


class _Session:
    """A member, with its last report."""

    def __init__(self, member: Member):
        self.member, self.heard = member, 0.0
        self.connection: int | None = None  # the file descriptor
        self.said: dict[str, Any] = {}

    @property
    def ready(self) -> bool:
        return self.said["ready"]

    def step(self, view: View) -> int | None:
        """The next step that the member can take; None: it has no replica."""
        return self.said["at" if self.member in view.members else "step"]

    def reaches(self, other: "_Session") -> bool:
        """Whether messages pass both ways."""
        return other.member.life in self.said["reaches"] and self.member.life in other.said["reaches"]


class Coordinator:
    """Listens for members and tells them views; `run` returns when `ended()` holds.

    Args:
        host: the address to listen at.
        slots: N, the number of slots; the first view has them all.
        least: the fewest members that continue; with fewer they wait for others.
        heartbeat_s: seconds of silence after which a member is removed.
        keys: of the group, with the coordinator's secret key.
        note: called with every view.
    """

    def __init__(
        self, host: str, slots: int, least: int, heartbeat_s: float, keys: Keys, note: Callable[[View], None] = lambda view: None
    ):
        self._slots, self.least, self._heartbeat_s, self._note = slots, least, heartbeat_s, note
        self._context = zmq.Context()
        self._gate = Gate(self._context, keys)
        self._members = self._context.socket(zmq.ROUTER)
        keys.guard(self._members)
        bounded(self._members, heartbeat_s)
        self._members.maxmsgsize, self._members.router_handover = MOST_BYTES, True
        watched(self._members, heartbeat_s)
        self._events = self._members.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.address = bound(self._members, host)
        self._poller = zmq.Poller()
        for socket in (self._gate.socket, self._members, self._events):
            self._poller.register(socket, zmq.POLLIN)
        self._open: set[int] = set()  # connections
        self._sessions: dict[bytes, _Session] = {}
        self._gone: set[bytes] = set()  # lives of members that were removed
        self.view = View(0, 0, ())
        self.silent: set[int] = set()  # slots of processes that were removed and may still run
        self.ended: collections.deque[int] = collections.deque()  # ids of processes that have ended, from the launcher
        self.is_over = False
        self._told: Any = None
        self._now_s, self._looked_s = 0.0, time.monotonic()  # The former's clock stops while this process is stopped.
        self._asked, self._asked_s = 0, 0.0  # the number of the view that members were asked to stop for, and when

    def run(self, ended: Callable[[], bool]) -> None:
        """Serves until `ended()`, which is called several times a second."""
        try:
            while not ended():
                self.serve(min(0.1, self._heartbeat_s / 10))
        finally:
            for life in [*self._sessions]:
                self._drop(life)
            self._members.disable_monitor()
            self._events.close(linger=0)
            self._gate.socket.close(linger=0)
            self._members.close(linger=round(1000 * LINGER_S))
            end(self._context, LINGER_S)

    def serve(self, wait_s: float) -> None:
        """Reads what has arrived, waiting so long at most, and decides."""
        self._poller.poll(round(1000 * wait_s))
        while self._read():
            pass
        now_s = time.monotonic()
        self._now_s += min(now_s - self._looked_s, 4 * wait_s)
        self._looked_s = now_s
        while self.ended:
            process = self.ended.popleft()
            for session in [session for session in self._sessions.values() if session.member.process == process]:
                self._drop(session.member.life.encode())
        for session in [session for session in self._sessions.values() if self._is_silent(session) or self._is_stuck(session)]:
            self.silent.add(session.member.slot)
            self._drop(session.member.life.encode())
        self._decide()
        state = self.view, self._asked, self.is_over, [*self._sessions]
        if state != self._told:
            self._told = state
            for life in self._sessions:
                self._tell(life)

    # -- Sessions -----------------------------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Reads a message and the events before it; returns whether there may be more."""
        try:
            life, *frames = self._members.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            life, frames = None, []
        while self._gate.socket.poll(0):
            if (known := self._sessions.get(self._gate.answer() or b"")) is not None:
                known.heard = self._now_s  # It is back, on a connection whose number comes with its first message.
        while self._events.poll(0):  # Before the message: its connection may have had the number of one that was closed.
            event = monitor.recv_monitor_message(self._events)
            (self._open.add if event["event"] == zmq.EVENT_ACCEPTED else self._open.discard)(int(event["value"]))
        if life is None:
            return False
        try:
            self._hear(life.bytes, frames[0].get(zmq.SRCFD), json.loads(frames[0].bytes))
        except Exception:  # A member that sends nonsense must not end the service of the others.
            self._drop(life.bytes)
        return True

    def _hear(self, life: bytes, connection: int, said: dict[str, Any]) -> None:
        session = self._sessions.get(life)
        if session is None:
            member = Member(*said["member"])
            if self.is_over or life in self._gone or member.life.encode() != life or not 0 <= member.slot < self._slots:
                raise ValueError("this process may not take part")
            for other in [other for other in self._sessions if self._sessions[other].member.slot == member.slot]:
                self._drop(other)  # Another process has taken its place.
            session = self._sessions[life] = _Session(member)
        session.connection, session.heard, session.said = connection, self._now_s, said
        if said["over"]:
            self.is_over = True
        if said["leaves"]:
            self._drop(life)
        else:
            self._tell(life)

    def _is_silent(self, session: _Session) -> bool:
        return session.connection not in self._open and self._now_s - session.heard > self._heartbeat_s

    def _is_stuck(self, session: _Session) -> bool:
        """Whether others wait for a member that neither computes nor waits itself."""
        said, slot = session.said, session.member.slot
        awaited = any(slot in other.said["awaits"] for other in self._sessions.values())
        return awaited and not said["awaits"] and said["idle"] > PATIENCE

    def _drop(self, life: bytes) -> None:
        self._gone.add(life)
        self._sessions.pop(life, None)
        self._say(life, out=True)

    def _say(self, life: bytes, **what: Any) -> None:
        with contextlib.suppress(zmq.ZMQError):  # The connection is full or gone; the member's next report is answered.
            self._members.send_multipart([life, json.dumps(what).encode()], zmq.NOBLOCK)

    def _tell(self, life: bytes) -> None:
        number, roster = self.view.number, [session.member for session in self._sessions.values()]
        takes_part = self._sessions[life].member in self.view.members
        asked = self._asked or (0 if takes_part else number)  # A member that has missed a change is still in an earlier view.
        self._say(
            life, views=number, asked=asked, view=self.view._asdict() if takes_part else None, roster=roster, over=self.is_over
        )

    # -- Views --------------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Asks members to stop where the membership has changed, and begins the next view when all have."""
        if self.is_over:
            return
        chosen = self._chosen()
        members = tuple(sorted(session.member for session in chosen))
        broken = self.view.number and any(session.said["broken"] == self.view.number for session in chosen)
        if members == self.view.members and not self._asked and not broken:
            return
        enough = len(members) >= (self._slots if self.view.number == 0 else self.least)
        gone = any(member not in members for member in self.view.members)
        if not self._asked and (enough or gone):
            self._asked, self._asked_s = self.view.number + 1, self._now_s
        elif self._asked and enough and all(self._has_stopped(session) for session in chosen) and self._links_are_settled():
            self._begin(chosen, members)

    def _links_are_settled(self) -> bool:
        """Whether no lost connection is known, or others that were lost with it must be known by now."""
        ready = [session for session in self._sessions.values() if session.ready]
        all_reached = all(a.reaches(b) for a, b in itertools.combinations(ready, 2))
        return all_reached or self._now_s - self._asked_s > SETTLE * self._heartbeat_s

    def _has_stopped(self, session: _Session) -> bool:
        return session.member not in self.view.members or session.said["stopped"] == self._asked

    def _begin(self, chosen: list[_Session], members: tuple[Member, ...]) -> None:
        """Begins the next view."""
        step_of = {session.member.slot: session.step(self.view) for session in chosen}
        known = [step for step in step_of.values() if step is not None]
        if not known:
            self._begin_anew()
            return
        step = max(self.view.step, *known)  # A member that was further may have died before the view began.
        fresh = tuple(sorted(slot for slot, reached in step_of.items() if reached != max(known)))
        if self.view.number:
            block = self.view.block + (step - self.view.step) * len(self.view.members)
        else:
            block = max(session.said["taken"] for session in chosen if session.member.slot not in fresh)
        writer = self.view.writer if self.view.writer in step_of else min(step_of.keys() - set(fresh))
        self.view, self._asked = View(self._asked, step, members, fresh, writer, block), 0
        self._note(self.view)

    def _chosen(self) -> list[_Session]:
        """Members that are ready and reach each other; those that have a replica come first."""
        ready = [session for session in self._sessions.values() if session.ready]
        old = self._mutual([session for session in ready if session.said["step"] is not None])
        fresh = [session for session in ready if session.said["step"] is None and all(map(session.reaches, old))]
        return old + self._mutual(fresh)

    def _mutual(self, group: list[_Session]) -> list[_Session]:
        """A large subgroup whose members all reach each other, chosen greedily; of two equal ones the one of lower `_rank`."""
        group = list(group)
        while group:
            apart = {id(a): sum(a is not b and not a.reaches(b) for b in group) for a in group}
            worst = max(group, key=lambda a: (apart[id(a)], a.connection not in self._open, *self._rank(a.member)))
            if not apart[id(worst)]:
                break
            group.remove(worst)
        return group

    def _rank(self, member: Member) -> tuple[bool, bool, Member]:
        """Orders members by which of two that do not reach each other stays: the smaller."""
        return member not in self.view.members, member.slot != self.view.writer, member

    def _begin_anew(self) -> None:
        """Ends a group without any replica, so that the next processes begin as the first ones did."""
        self.view, self._asked = View(0, 0, ()), 0
        for life in [*self._sessions]:
            self._drop(life)
