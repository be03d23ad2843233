"""Keys of a group, and the check that admits only its processes: ZeroMQ's handshakes (CURVE, PLAIN), made before a message is read.

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
        own: secret key of the coordinator; empty in members.
    """

    coordinator: bytes
    public: bytes
    secret: bytes
    own: bytes = b""

    @classmethod
    def made(cls) -> "Keys":
        """Generate the keys of a new group, for its coordinator."""
        coordinator, own = zmq.curve_keypair()
        return cls(coordinator, *zmq.curve_keypair(), own)

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
            socket.curve_server, socket.curve_secretkey = True, self.own or self.secret
        else:
            socket.plain_server = True
        socket.zap_domain = b"decjax"

    def enter(self, socket: zmq.Socket, server: bytes, encrypt: bool = True) -> None:
        """Let a socket authenticate itself when it connects to one that is guarded with the key `server`."""
        if encrypt:
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, self.public, self.secret
        else:
            socket.plain_username, socket.plain_password = _PLAIN_USER, self.password


class Gate:
    """Answers ZeroMQ's requests for authentication, for the guarded sockets of one context; create it before they are bound.

    Args:
        context: of the guarded sockets.
        keys: of the group.
    """

    def __init__(self, context: zmq.Context, keys: Keys):
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ADDRESS)
        self._allowed = (b"CURVE", z85.decode(keys.public)), (b"PLAIN", _PLAIN_USER, keys.password)

    def answer(self) -> bytes | None:
        """Answers one request; returns the routing id of a connection that is admitted."""
        version, request, _, _, routing_id, *credentials = self.socket.recv_multipart()
        said = b"\0".join(credentials)
        known = any(hmac.compare_digest(said, b"\0".join(allowed)) for allowed in self._allowed)
        self.socket.send_multipart([version, request, *((b"200", b"") if known else (b"400", b"not a member")), b"", b""])
        return routing_id if known else None
