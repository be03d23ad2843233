"""Messages between members: arrays of bytes over TCP, each read as soon as it arrives, so that no two senders wait for each other.

A message belongs to a view and has a channel and a number in it. All members run the same programs in the same order, so both ends
count alike, and no message has to say what it holds. What belongs to an earlier view is dropped.
"""

import collections
from collections.abc import Callable
import contextlib
import hmac
import socket
import struct
import threading
from typing import NamedTuple

from decjax.elastic.view import Member, View, ViewChanged

_HEADER = struct.Struct("!IIIQQ")  # view, sender's slot, channel, number, bytes
_HELLO = 32  # bytes of the secret that a connection begins with
CONNECT_S = 5.0


class Key(NamedTuple):
    """Which message."""

    view: int
    slot: int  # of the sender
    channel: int
    number: int


class Transport:
    """One member's end of all connections; `send` and `receive` may be called from any thread.

    Args:
        host: the address to listen at.
        secret: what a connection must begin with, 32 bytes that all members know.
        unreachable: told of a member to which nothing can be sent.
        heartbeat_s: seconds within which a connection must say the secret. A member that takes longer is out of the group anyway; were
            it refused sooner, it would not know, and its message would be waited for.
    """

    def __init__(self, host: str, secret: bytes, unreachable: Callable[[Member], None], heartbeat_s: float):
        assert len(secret) == _HELLO
        self._secret, self._unreachable, self._heartbeat_s = secret, unreachable, heartbeat_s
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._view = View(0, 0, ())
        self._changing = True
        self._changed = threading.Condition()
        self._inbox: dict[Key, bytearray] = {}
        self._outgoing: dict[Member, socket.socket] = {}
        self._locks: dict[Member, threading.Lock] = collections.defaultdict(threading.Lock)
        self.sent_bytes = 0
        threading.Thread(target=self._accept, name="elastic-listener", daemon=True).start()

    # -- Views --------------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Ends the view: whoever sends or receives gets `ViewChanged`, until `enter`."""
        with self._changed:
            self._changing = True
            for connection in self._outgoing.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # Wakes a sender whose receiver reads nothing.
                connection.close()
            self._outgoing.clear()
            self._changed.notify_all()

    def enter(self, view: View) -> None:
        """Begins a view."""
        with self._changed:
            self._view, self._changing = view, False
            self._inbox = {key: data for key, data in self._inbox.items() if key.view >= view.number}
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all connections."""
        self.interrupt()
        self._listener.close()

    # -- Messages -----------------------------------------------------------------------------------------------------

    def send(self, key: Key, to: Member, data: memoryview) -> None:
        """Sends a message; returns when the system has taken it.

        Raises:
            ViewChanged: if the message's view has ended, ends meanwhile, or will end since the receiver cannot be reached.
        """
        try:
            with self._locks[to]:
                connection = self._connection(to, key.view)
                connection.sendall(_HEADER.pack(*key, data.nbytes))
                connection.sendall(data)
        except OSError as error:  # The receiver died or cannot be reached; or our own end was closed by `interrupt`.
            if self._is_in(key.view):
                self._unreachable(to)
            with self._changed:
                self._changed.wait_for(lambda: not self._is_in(key.view))
            raise ViewChanged(f"nothing can be sent to slot {to.slot}") from error
        self.sent_bytes += data.nbytes

    def receive(self, key: Key) -> bytearray:
        """The message of a member; ViewChanged if its view ends before it is here."""
        with self._changed:
            while key not in self._inbox:
                if not self._is_in(key.view):
                    raise ViewChanged(f"slot {key.slot} sends nothing any more")
                self._changed.wait()
            return self._inbox.pop(key)

    def _is_in(self, view: int) -> bool:
        return not self._changing and self._view.number == view

    def _connection(self, to: Member, view: int) -> socket.socket:
        with self._changed:
            if not self._is_in(view):
                raise ViewChanged
            if found := self._outgoing.get(to):
                return found
        made = socket.create_connection((to.host, to.port), CONNECT_S)
        made.settimeout(None)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.sendall(self._secret)
        with self._changed:
            if not self._is_in(view):
                made.close()
                raise ViewChanged
            self._outgoing[to] = made
        return made

    # -- Reading ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # Closed.
                return
            threading.Thread(target=self._read, args=(connection,), name="elastic-reader", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            connection.settimeout(self._heartbeat_s)
            if not hmac.compare_digest(bytes(_exactly(connection, _HELLO)), self._secret):
                return  # A stranger.
            connection.settimeout(None)
            while True:
                view, slot, channel, number, size = _HEADER.unpack(_exactly(connection, _HEADER.size))
                data = _exactly(connection, size)
                with self._changed:
                    if view >= self._view.number:
                        self._inbox[Key(view, slot, channel, number)] = data
                        self._changed.notify_all()


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """So many bytes; EOFError if the connection ends before."""
    data, got = bytearray(size), 0
    rest = memoryview(data)
    while got < size:
        count = connection.recv_into(rest[got:])
        if count == 0:
            raise EOFError
        got += count
    return data
