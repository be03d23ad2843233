"""Keys of a group, and authentication of its processes by ZeroMQ's handshakes (CURVE, PLAIN), before any message is read.

CURVE encrypts. PLAIN does not: a connection begins with a password in plain text, for networks on which no other user listens.
"""

import hashlib
import hmac
from typing import NamedTuple

import zmq
from zmq.utils import z85

_PLAIN_USER = b"member"
_ADDRESS = "inproc://zeromq.zap.01"  # to which ZeroMQ sends requests for authentication; see its RFC 27


class Keys(NamedTuple):
    """The keys of a group's processes.

    Attributes:
        coordinator: public key of the coordinator.
        public: public key of all members.
        secret: secret key of all members.
        coordinator_secret: secret key of the coordinator; empty in members.
    """

    coordinator: bytes
    public: bytes
    secret: bytes
    coordinator_secret: bytes = b""

    @classmethod
    def made(cls) -> "Keys":
        """Generate the keys of a new group, for its coordinator."""
        coordinator, coordinator_secret = zmq.curve_keypair()
        return cls(coordinator, *zmq.curve_keypair(), coordinator_secret)

    @property
    def text(self) -> str:
        """The keys of a member as text, for its environment."""
        return b" ".join(self[:3]).decode()

    @classmethod
    def of(cls, text: str) -> "Keys":
        """Parse `text`."""
        return cls(*text.encode().split())

    @property
    def password(self) -> bytes:
        return hashlib.blake2b(self.secret, digest_size=32).hexdigest().encode()

    def guard(self, socket: zmq.Socket, encrypt: bool = True) -> None:
        """Let only members connect to a socket; call it before the socket is bound."""
        if encrypt:
            socket.curve_server, socket.curve_secretkey = True, self.coordinator_secret or self.secret
        else:
            socket.plain_server = True
        socket.zap_domain = b"decjax"

    def enter(self, socket: zmq.Socket, server: bytes, encrypt: bool = True) -> None:
        """Let a socket authenticate itself to one that is guarded with the public key `server`."""
        if encrypt:
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, self.public, self.secret
        else:
            socket.plain_username, socket.plain_password = _PLAIN_USER, self.password


class Gate:
    """Answers ZeroMQ's requests for authentication, for the guarded sockets of one context; create it before they are bound."""

    def __init__(self, context: zmq.Context, keys: Keys):
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ADDRESS)
        self._allowed = (b"CURVE", z85.decode(keys.public)), (b"PLAIN", _PLAIN_USER, keys.password)

    def answer(self) -> bytes | None:
        """Answer one request; return the routing id of the connection if it is admitted."""
        version, request, _, _, routing_id, *credentials = self.socket.recv_multipart()
        presented = b"\0".join(credentials)
        is_member = any(hmac.compare_digest(presented, b"\0".join(allowed)) for allowed in self._allowed)
        self.socket.send_multipart([version, request, *((b"200", b"") if is_member else (b"400", b"not a member")), b"", b""])
        return routing_id if is_member else None
