"""Keys of a group, and the check that lets nobody else in: ZeroMQ's own handshakes (CURVE, PLAIN), asked for before a message is read.

CURVE encrypts. PLAIN does not: it begins a connection with a password, for a network that is trusted to read along.
"""

import hashlib
import hmac
from typing import NamedTuple

import zmq
from zmq.utils import z85

_PLAIN_USER = b"member"
_ADDRESS = "inproc://zeromq.zap.01"  # where ZeroMQ asks; see its RFC 27


class Keys(NamedTuple):
    """What a group's processes know.

    Attributes:
        coordinator: its public key.
        public, secret: those of all members.
        own: the coordinator's secret key; empty in members.
    """

    coordinator: bytes
    public: bytes
    secret: bytes
    own: bytes = b""

    @classmethod
    def made(cls) -> "Keys":
        """New ones, the coordinator's."""
        coordinator, own = zmq.curve_keypair()
        return cls(coordinator, *zmq.curve_keypair(), own)

    @property
    def text(self) -> str:
        """Those of a member, for its environment."""
        return b" ".join(self[:3]).decode()

    @classmethod
    def of(cls, text: str) -> "Keys":
        """Those in the text."""
        return cls(*text.encode().split())

    @property
    def password(self) -> bytes:
        return hashlib.blake2b(self.secret, digest_size=32).hexdigest().encode()

    def guard(self, socket: zmq.Socket, encrypt: bool = True) -> None:
        """Lets only members connect to a socket, which is bound afterwards."""
        if encrypt:
            socket.curve_server, socket.curve_secretkey = True, self.own or self.secret
        else:
            socket.plain_server = True
        socket.zap_domain = b"decjax"

    def enter(self, socket: zmq.Socket, server: bytes, encrypt: bool = True) -> None:
        """Makes a socket say who it is when it connects to one that is guarded with the key `server`."""
        if encrypt:
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, self.public, self.secret
        else:
            socket.plain_username, socket.plain_password = _PLAIN_USER, self.password


class Gate:
    """Answers ZeroMQ's question who may come in, for the guarded sockets of one context; it must be there before they are bound.

    Args:
        context: theirs.
        keys: of the group.
    """

    def __init__(self, context: zmq.Context, keys: Keys):
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ADDRESS)
        self._allowed = (b"CURVE", z85.decode(keys.public)), (b"PLAIN", _PLAIN_USER, keys.password)

    def answer(self) -> bytes | None:
        """Answers one question; the routing id of whoever may come in."""
        version, request, _, _, routing_id, *credentials = self.socket.recv_multipart()
        said = b"\0".join(credentials)
        known = any(hmac.compare_digest(said, b"\0".join(allowed)) for allowed in self._allowed)
        self.socket.send_multipart([version, request, *((b"200", b"") if known else (b"400", b"not a member")), b"", b""])
        return routing_id if known else None
