"""The coordinator: decides who takes part. It holds no model and takes no steps, so that any worker may die.

Members speak to it over TCP in lines of JSON, and say something at least every fifth of `heartbeat_s`. Whoever closes its connection,
or is silent for `heartbeat_s`, is out. A change of the membership takes two messages: all members are asked to stop and tell their
step; when the last one has answered, the next view begins at the largest of these.

    member        → {"secret", "slot", "life", "host", "port", "process"}, then {} as a heartbeat,
                    {"ready": step or null, "taken": batches}, {"stopped": step or null, "for": view number},
                    {"unreachable": life}, {"over": true}
    coordinator   → {"views": how many there were}, then {"stop": view number}, {"view": View}, {"over": true}

A step of null says that the member has no replica: it is new, or the member that was to give it one is gone. Such members, and those
that stopped before the last step that others took, get the replica of one that is furthest. If no member has a replica left, all
connections are closed: the processes end, and others begin anew from the last checkpoint.

The run is over when the member that writes says so, having written all; the others wait for that, so that they can go on if it dies
first. A member whose error ends the run says so, too. From then on nobody stops and nobody joins.
"""

from collections.abc import Callable
import hmac
import json
import selectors
import socket
import time
from typing import Any

from decjax.elastic.view import Member, View


class _Session:
    """The connection of a member."""

    def __init__(self, connection: socket.socket):
        self.connection, self.received, self.heard = connection, b"", time.monotonic()
        self.member: Member | None = None
        self.ready, self.fresh = False, False
        self.stopped: int | None = None  # its answer to the last stop
        self.taken = 0  # batches that all workers had taken before its replica

    def tell(self, **what: Any) -> None:
        self.connection.sendall(json.dumps(what).encode() + b"\n")


class Coordinator:
    """Listens for members and tells them views; `run` returns when `ended()` holds.

    Args:
        host: the address to listen at.
        slots: N, the number of slots; the first view has them all.
        least: the fewest members that go on; with fewer the others wait.
        heartbeat_s: seconds of silence after which a member is out.
        secret: what members must know.
        note: called with every view.
    """

    def __init__(
        self, host: str, slots: int, least: int, heartbeat_s: float, secret: str, note: Callable[[View], None] = lambda view: None
    ):
        self._slots, self.least, self._heartbeat_s, self._secret, self._note = slots, least, heartbeat_s, secret, note
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._listener.setblocking(False)  # Else it would wait for a caller that has hung up meanwhile.
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._sessions: list[_Session] = []
        self.view = View(0, 0, ())
        self.silent: set[int] = set()  # slots of processes that were silent or unreachable, and may still run
        self.is_over = False
        self._asked: int | None = None  # the number of the view that members were asked to stop for

    def run(self, ended: Callable[[], bool]) -> None:
        """Serves until `ended()`, which is asked several times a second."""
        while not ended():
            self.serve(min(0.1, self._heartbeat_s / 10))
        for session in self._sessions:
            session.connection.close()
        self._listener.close()

    def serve(self, wait_s: float) -> None:
        """Reads what has arrived, waiting so long at most, and decides."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        for session in [session for session in self._sessions if now - session.heard > self._heartbeat_s]:
            self._exclude(session)
        self._decide()

    # -- Sessions -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # Whoever called is gone already.
            return
        connection.settimeout(self._heartbeat_s)
        session = _Session(connection)
        self._sessions.append(session)
        self._selector.register(connection, selectors.EVENT_READ, session)

    def _read(self, session: _Session) -> None:
        try:
            data = session.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(session)
            return
        *lines, session.received = (session.received + data).split(b"\n")
        for line in lines:
            try:
                self._hear(session, json.loads(line))
            except (ValueError, KeyError, TypeError):  # A stranger, or one that speaks otherwise.
                self._drop(session)
                return
        if session.member is None and len(session.received) > 65536:
            self._drop(session)

    def _hear(self, session: _Session, said: dict[str, Any]) -> None:
        session.heard = time.monotonic()
        if session.member is None:
            known = hmac.compare_digest(str(said["secret"]), self._secret) and 0 <= said["slot"] < self._slots
            if not known or self.is_over:
                raise ValueError
            for other in [other for other in self._sessions if other.member and other.member.slot == said["slot"]]:
                self._drop(other)  # Another process has taken its place.
            session.member = Member(*(said[name] for name in Member._fields))
            self._tell(session, views=self.view.number)
        if "unreachable" in said and not self.is_over:
            for other in [other for other in self._sessions if other.member and other.member.life == said["unreachable"]]:
                self._exclude(other)
        if "over" in said and not self.is_over:
            self.is_over = True
            for other in [other for other in self._sessions if other.member]:
                self._tell(other, over=True)
        if "ready" in said:
            session.ready, session.taken = True, said.get("taken", 0)
            self._at(session, said["ready"])
        if "stopped" in said and said.get("for") == self._asked:
            self._at(session, said["stopped"])

    @staticmethod
    def _at(session: _Session, step: int | None) -> None:
        session.fresh, session.stopped = step is None, step or 0

    def _exclude(self, session: _Session) -> None:
        """Goes on without a process that may still run."""
        if session.member:
            self.silent.add(session.member.slot)
        self._drop(session)

    def _drop(self, session: _Session) -> None:
        if session not in self._sessions:
            return
        self._sessions.remove(session)
        self._selector.unregister(session.connection)
        session.connection.close()

    # -- Views --------------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Asks members to stop where the membership has changed, and begins the next view when all have."""
        if self.is_over:
            return
        ready = [session for session in self._sessions if session.ready]
        members = tuple(sorted(session.member for session in ready if session.member))
        if members == self.view.members and self._asked is None:
            return
        enough = len(members) >= (self._slots if self.view.number == 0 else self.least)
        gone = any(member not in members for member in self.view.members)
        if self._asked is None and (enough or gone):
            self._asked = self.view.number + 1
            for session in ready:
                if session.member in self.view.members:
                    session.stopped = None
                    self._tell(session, stop=self._asked)
            return
        stopped = [session.stopped for session in ready if session.stopped is not None]
        if self._asked is None or not enough or len(stopped) < len(ready):
            return
        if all(session.fresh for session in ready):
            self._begin_anew()
            return
        furthest = max((session for session in ready if not session.fresh), key=lambda session: session.stopped or 0)
        step = max(self.view.step, furthest.stopped or 0)  # Whoever was further may be gone before the view began.
        behind = [session for session in ready if session.fresh or session.stopped != furthest.stopped]
        fresh = tuple(session.member.slot for session in behind if session.member)
        block = self.view.block + (step - self.view.step) * len(self.view.members) if self.view.number else furthest.taken
        slots = [member.slot for member in members]
        writer = self.view.writer if self.view.writer in slots else min(set(slots) - set(fresh) or slots)
        self.view, self._asked = View(self._asked, step, members, fresh, writer, block), None
        for session in ready:
            self._tell(session, view=self.view._asdict())
        self._note(self.view)

    def _begin_anew(self) -> None:
        """Ends the group, of which nobody has a replica, so that the next processes begin as the first ones did."""
        self.view, self._asked = View(0, 0, ()), None
        for session in list(self._sessions):
            self._drop(session)

    def _tell(self, session: _Session, **what: Any) -> None:
        try:
            session.tell(**what)
        except OSError:
            self._drop(session)
