"""Messages between members: arrays of bytes over ZeroMQ, read as they arrive, so that no two senders wait for each other.

A message is identified by its view, a channel, and its number on that channel. All members run the same programs in the same order, so
both ends count alike, and a message needs no description of its content. Messages of an earlier view are dropped. A message is sent in
pieces, so a connection that has not authenticated itself can make this process reserve at most one piece.
"""

from collections.abc import Callable, Iterable
import contextlib
import os
import struct
import threading
from typing import NamedTuple

import zmq
from zmq.utils import monitor

from decjax.elastic.keys import Gate, Keys
from decjax.elastic.view import BEATS, Member, View
from decjax.errors import ViewChanged

_HEADER = struct.Struct("!IIIQQQ")  # view, sender's slot, channel, number, bytes of the message, offset of the piece
PIECE = 2**20  # bytes
WAITING = 16  # pieces in the queue of a connection
POLL_MS = 50  # between checks whether the view has ended, while the receiver accepts nothing
RETRY_MS = 100  # between attempts to connect


class Key(NamedTuple):
    """Identifies a message."""

    view: int
    slot: int  # of the sender
    channel: int
    number: int


class _Peer:
    """A connection to another member."""

    def __init__(self, context: zmq.Context, keys: Keys, encrypt: bool, member: Member, heartbeat_s: float):
        self.sending, self.reached = threading.Lock(), False
        self.socket = context.socket(zmq.PUSH)
        keys.enter(self.socket, keys.public, encrypt)
        self.socket.sndhwm, self.socket.sndtimeo, self.socket.linger = WAITING, POLL_MS, 0
        set_limits(self.socket, heartbeat_s)
        self.events = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(f"tcp://{member.host}:{member.port}")

    def close(self) -> None:
        with self.sending:
            self.socket.disable_monitor()
            self.socket.close()
            self.events.close()


class Transport:
    """All connections of a member; `send` and `receive` may be called from any thread.

    Args:
        host: the address to listen at.
        keys: of the group.
        heartbeat_s: seconds after which a connection is closed if the other end does not answer.
        encrypt: whether to encrypt messages, which limits throughput to about 0.1 GB/s.
        changed: called when a connection was made or lost.
    """

    def __init__(
        self, host: str, keys: Keys, heartbeat_s: float, encrypt: bool = False, changed: Callable[[], None] = lambda: None
    ):
        self._keys, self._heartbeat_s, self._encrypt, self._notify = keys, heartbeat_s, encrypt, changed
        self._context = zmq.Context()
        self._gate = Gate(self._context, keys)
        self._arriving = self._context.socket(zmq.PULL)
        keys.guard(self._arriving, encrypt)
        self._arriving.rcvhwm, self._arriving.linger = WAITING, 0
        set_limits(self._arriving, heartbeat_s)
        self.address = host, self._arriving.bind_to_random_port(f"tcp://{host}")
        self._view, self._changing = View(0, 0, ()), True
        self._changed = threading.Condition()
        self._inbox: dict[Key, bytearray] = {}
        self._pieces: dict[Key, tuple[bytearray, int]] = {}  # incomplete messages, and how many bytes of them have arrived
        self._peers: dict[Member, _Peer] = {}
        self._roster: tuple[Member, ...] = ()
        self._closing = False
        self.awaited: list[int] = []  # slots from which a message is awaited
        self.broken = 0  # the last view in which a connection between its members was lost, perhaps with messages
        self.moved = self.sent_bytes = 0  # messages sent and received; bytes sent
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reader = threading.Thread(target=self._read, name="elastic-reader", daemon=True)
        self._reader.start()

    # -- Views --------------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End the view: `send` and `receive` raise `ViewChanged` until `enter`."""
        with self._changed:
            self._changing = True
            self._changed.notify_all()

    def enter(self, view: View) -> None:
        """Begin a view."""
        with self._changed:
            self._view, self._changing = view, False
            for messages in (self._inbox, self._pieces):
                for key in [key for key in messages if key.view < view.number]:
                    del messages[key]
            self._changed.notify_all()

    def close(self) -> None:
        """Close all connections."""
        self.interrupt()
        with self._changed:
            closes, self._closing = not self._closing, True
        if closes:
            os.eventfd_write(self._wake, 1)
            self._reader.join()
            os.close(self._wake)  # After the last write, because the number may be reused.

    def connect(self, members: Iterable[Member]) -> None:
        """Keep connections to these members and no others."""
        roster = tuple(members)
        with self._changed:
            if roster != self._roster and not self._closing:
                self._roster = roster
                os.eventfd_write(self._wake, 1)

    @property
    def reached(self) -> list[str]:
        """Lives of the members to which a connection is open."""
        return [member.life for member, peer in [*self._peers.items()] if peer.reached]

    # -- Messages -----------------------------------------------------------------------------------------------------

    def send(self, key: Key, to: Member, data: memoryview) -> None:
        """Queue a message for sending; its bytes must not change afterwards.

        Raises:
            ViewChanged: if the message's view has ended, ends meanwhile, or will end because the receiver is gone.
        """
        try:
            peer = self._peers[to]
            with peer.sending:
                for begin in range(0, max(data.nbytes, 1), PIECE):
                    self._send(peer, key, _HEADER.pack(*key, data.nbytes, begin), data[begin : begin + PIECE])
        except (KeyError, zmq.ZMQError) as error:  # The receiver has left meanwhile.
            with self._changed:
                self._changed.wait_for(lambda: not self._is_in(key.view))
            raise ViewChanged(f"slot {to.slot} has left") from error
        self.moved += 1
        self.sent_bytes += data.nbytes

    def _send(self, peer: _Peer, key: Key, header: bytes, piece: memoryview) -> None:
        while self._is_in(key.view):
            with contextlib.suppress(zmq.Again):
                peer.socket.send_multipart([header, piece], copy=False)
                return
        raise ViewChanged

    def receive(self, key: Key) -> bytearray:
        """Wait for a message; raise ViewChanged if its view ends first."""
        with self._changed:
            self.awaited.append(key.slot)
            try:
                while key not in self._inbox:
                    if not self._is_in(key.view):
                        raise ViewChanged(f"the view ended before the message of slot {key.slot}")
                    self._changed.wait()
                self.moved += 1
                return self._inbox.pop(key)
            finally:
                self.awaited.remove(key.slot)

    def _is_in(self, view: int) -> bool:
        return not self._changing and self._view.number == view

    # -- The thread that reads ----------------------------------------------------------------------------------------

    def _read(self) -> None:
        poller = zmq.Poller()
        for source in (self._arriving, self._gate.socket, self._wake):
            poller.register(source, zmq.POLLIN)
        while not self._closing:
            ready = {source for source, _ in poller.poll()}
            if self._arriving in ready:
                self._read_pieces()
            if self._gate.socket in ready:
                self._gate.answer()
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._connect_roster(poller)
            for member, peer in self._peers.items():
                if peer.events in ready:
                    self._read_event(member, peer)
        for peer in self._peers.values():
            peer.close()
        self._arriving.close()
        self._gate.socket.close(linger=0)
        terminate(self._context)

    def _read_pieces(self) -> None:
        """Read the pieces that have arrived."""
        with contextlib.suppress(zmq.Again):
            for _ in range(WAITING):  # Other sockets must be served, too.
                header, piece = self._arriving.recv_multipart(zmq.NOBLOCK, copy=False)
                *fields, size, begin = _HEADER.unpack(header.buffer)
                key = Key(*fields)
                with self._changed:
                    if key.view < self._view.number:
                        continue
                    data, arrived = self._pieces.pop(key, None) or (bytearray(size), 0)
                    data[begin : begin + len(piece.buffer)] = piece.buffer
                    arrived += len(piece.buffer)
                    if arrived < size:
                        self._pieces[key] = data, arrived
                    else:
                        self._inbox[key] = data
                        self._changed.notify_all()

    def _connect_roster(self, poller: zmq.Poller) -> None:
        roster = set(self._roster)
        for member in self._peers.keys() - roster:
            peer = self._peers.pop(member)
            poller.unregister(peer.events)
            peer.close()
        for member in roster - self._peers.keys():
            self._peers[member] = peer = _Peer(self._context, self._keys, self._encrypt, member, self._heartbeat_s)
            poller.register(peer.events, zmq.POLLIN)

    def _read_event(self, member: Member, peer: _Peer) -> None:
        """Read an event: a connection was made or lost."""
        event = monitor.recv_monitor_message(peer.events)["event"]
        peer.reached = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if not peer.reached and member in self._view.members:
            self.broken = self._view.number
        self._notify()


def set_limits(socket: zmq.Socket, heartbeat_s: float) -> None:
    """Limit the size of a message, and the time until a connection is closed whose other end does not answer or authenticate itself."""
    socket.maxmsgsize = PIECE + 1024  # including the overhead of encryption
    socket.reconnect_ivl, socket.reconnect_ivl_max = RETRY_MS, 10 * RETRY_MS
    socket.connect_timeout = socket.handshake_ivl = socket.tcp_maxrt = round(1000 * heartbeat_s)
    socket.tcp_keepalive = socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = 1
    socket.tcp_keepalive_cnt = max(1, round(heartbeat_s) - 1)


def terminate(context: zmq.Context, linger_s: float = 0.0) -> None:
    """Terminate a context whose sockets are closed and send their last messages for up to `linger_s`.

    On a busy machine ZeroMQ may wait forever for a socket that authenticates connections (its issue 2733), so the wait is bounded.
    """
    thread = threading.Thread(target=context.term, name="elastic-terminate", daemon=True)
    thread.start()
    thread.join(linger_s + 1.0)


def detect_silence(socket: zmq.Socket, heartbeat_s: float) -> None:
    """Close a connection, in ZeroMQ's threads, if the process at its other end does not run for `heartbeat_s`."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = round(1000 * heartbeat_s / BEATS), round(800 * heartbeat_s)
