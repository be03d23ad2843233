"""Overhead of ZeroMQ in elastic runs: throughput between two processes on loopback, compared with plain sockets.

    python -m experiments.bench.transport
    python -m experiments.bench.transport --megabytes=50 --rounds=10

The kinds take turns: sockets that a process reads and writes itself, `decjax.elastic.transport`, and the same with encryption. The table
has the median GB/s over all rounds, and the least and the largest.
"""

from collections.abc import Callable
import multiprocessing
from multiprocessing.connection import Connection
import socket
import statistics
import threading
import time

from absl import flags
import numpy as np

from decjax.elastic.keys import Keys
from decjax.elastic.transport import Key, Transport
from decjax.elastic.view import Member, View
from experiments import script

FLAGS = flags.FLAGS
HEARTBEAT_S = 60.0
HEADER = 32  # bytes before each message of the plain sockets


def exactly(connection: socket.socket, size: int) -> None:
    """Read so many bytes into new memory."""
    rest = memoryview(bytearray(size))
    while len(rest):
        rest = rest[connection.recv_into(rest) :]


def receive_plain(pipe: Connection, size: int, count: int) -> None:
    """Receive messages over a plain socket; send its port to `pipe`, and then the seconds from the first to the last message."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        times = []
        for _ in range(count):
            exactly(connection, HEADER)
            exactly(connection, size)
            times.append(time.perf_counter())
    pipe.send(times[-1] - times[0])


def send_plain(pipe: Connection, size: int, count: int) -> float:
    """Send messages to `receive_plain`; return the seconds that it measured."""
    data = memoryview(np.random.default_rng(0).bytes(size))
    with socket.create_connection(("127.0.0.1", pipe.recv())) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            connection.sendall(bytes(HEADER))
            connection.sendall(data)
        return pipe.recv()


def _member(slot: int, keys: Keys, encrypt: bool) -> tuple[Transport, Member]:
    transport = Transport("127.0.0.1", keys, HEARTBEAT_S, encrypt)
    return transport, Member(slot, str(slot), *transport.address)


def receive(pipe: Connection, size: int, count: int, keys: Keys, encrypt: bool) -> None:
    """Do the same as `receive_plain`, as a member."""
    transport, own = _member(1, keys, encrypt)
    pipe.send(own)
    transport.enter(View(1, 0, (pipe.recv(), own)))
    times = []
    for number in range(count):
        transport.receive(Key(1, 0, 0, number))
        times.append(time.perf_counter())
    pipe.send(times[-1] - times[0])
    transport.close()


def send(pipe: Connection, size: int, count: int, keys: Keys, encrypt: bool) -> float:
    """Send messages to `receive`; return the seconds that it measured."""
    data, reached = memoryview(np.random.default_rng(0).bytes(size)), threading.Event()
    transport = Transport("127.0.0.1", keys, HEARTBEAT_S, encrypt, reached.set)
    own, other = Member(0, "0", *transport.address), pipe.recv()
    pipe.send(own)
    transport.connect([other])
    reached.wait(HEARTBEAT_S)
    transport.enter(View(1, 0, (own, other)))
    for number in range(count):
        transport.send(Key(1, 0, 0, number), other, data)
    took_s = pipe.recv()
    transport.close()
    return took_s


def throughput_GBps(receiver: Callable, sender: Callable, *how: object) -> float:
    """Return the throughput of messages from this process to another."""
    size, count = round(1e6 * FLAGS.megabytes), FLAGS.messages
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receiver, args=(there, size, count, *how))
    process.start()
    took_s = sender(here, size, count, *how)
    process.join()
    return (count - 1) * size / took_s / 1e9


def main() -> None:
    keys = Keys.of(Keys.made().text)  # as members have them
    kinds = {
        "plain sockets": (receive_plain, send_plain),
        "ZeroMQ, PLAIN": (receive, send, keys, False),
        "ZeroMQ, CURVE": (receive, send, keys, True),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(FLAGS.rounds):
        for name, kind in kinds.items():
            found[name].append(throughput_GBps(*kind))
    table = script.table(f"GB/s, messages of {FLAGS.megabytes:g} MB", "median", "least", "largest")
    for name, rates in found.items():
        table.add_row(name, *(f"{rate:.2f}" for rate in (statistics.median(rates), min(rates), max(rates))))
    script.show(table)


if __name__ == "__main__":
    flags.DEFINE_float("megabytes", 5.0, "Size of a message.", lower_bound=1e-6)
    flags.DEFINE_integer("messages", 100, "Messages of a round.", lower_bound=2)
    flags.DEFINE_integer("rounds", 5, "Rounds, each with every kind once.", lower_bound=1)
    script.run(main)
