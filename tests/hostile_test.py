"""Strangers at every listener of an elastic run: nothing they send affects the members.

The seed and the number of strangers are the test's parameters; the larger number is among the slow tests.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import random
import resource
import socket
import threading

import numpy as np
import pytest
import zmq

from decjax.elastic.keys import Keys
from tests.elastic_test import KEYS, Band, groups, together

MOST_HELD = 100  # connections open at a time
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP 3.1


def raw(chance):
    """Bytes of a stranger that does not speak ZeroMQ, or stops midway."""
    mechanism = chance.choice([b"CURVE", b"PLAIN", b"NULL", b"GSSAPI"]).ljust(20, b"\0")
    greeting = GREETING[:12] + mechanism + GREETING[32:]
    huge = chance.choice([2**20, 2**31, 2**40, 2**63 - 1, 2**64 - 1]).to_bytes(8, "big")
    hello = b"\x05HELLO" + b"\x06member" + b"\x05wrong"
    return chance.choice([
        lambda: b"",
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: b"[" * 60000,
        lambda: b'{"secret": "guessed", "slot": 0, "life": "", "host": "", "port": 1}\n',
        lambda: chance.randbytes(chance.randrange(1, 5000)),
        lambda: greeting[: chance.randrange(1, 64)],
        lambda: greeting + chance.randbytes(chance.randrange(1, 5000)),
        lambda: greeting + bytes([chance.choice([2, 6])]) + huge + chance.randbytes(chance.randrange(0, 10000)),
        lambda: greeting + b"\x04" + bytes([len(hello)]) + hello,
        lambda: greeting + b"\x00\x05hello" * chance.randrange(1, 1000),
    ])()  # fmt: skip


def speaks(context, address, chance):
    """A stranger with ZeroMQ and its own keys or password."""
    wrong = context.socket(chance.choice([zmq.DEALER, zmq.PUSH]))
    wrong.linger = 0
    kind = chance.randrange(3)
    if kind == 0:
        Keys.made().enter(wrong, chance.choice([KEYS.coordinator, KEYS.public, zmq.curve_keypair()[0]]))
    elif kind == 1:
        Keys.made().enter(wrong, b"", encrypt=False)
    wrong.connect(f"tcp://{address[0]}:{address[1]}")
    with contextlib.suppress(zmq.Again):
        wrong.send(chance.randbytes(1000), zmq.NOBLOCK)
    return wrong


def attack(addresses, seed, count):
    """Connect so many strangers to the addresses in turn."""
    chance, held, context = random.Random(seed), [], zmq.Context()
    for number, address in zip(range(count), itertools.cycle(addresses)):
        if number % 10 == 0:
            held.append(speaks(context, address, chance))
        else:
            stranger = socket.create_connection(address)
            stranger.settimeout(1.0)
            with contextlib.suppress(OSError):
                stranger.sendall(raw(chance))
            held.append(stranger)
            if chance.random() < 0.5:
                held.pop().close()
        if len(held) > MOST_HELD:
            held.pop(chance.randrange(len(held))).close()
    for stranger in held:
        stranger.close()
    context.term()


def memory_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("count", [200, 2000])
@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_strangers_change_nothing(count, encrypt):
    band = Band(3, encrypt=encrypt)
    try:
        members = groups(band, range(3))
        listeners = [band.coordinator.address, *(group.membership.transport.address for group in members)]
        before, over = memory_bytes(), threading.Event()

        def attacked():
            try:
                attack(listeners, seed=count, count=count)
            finally:
                over.set()

        def trains(group):
            """Sum in rings until the attack is over, as many times as the others."""
            steps = 0
            while not group.channel.ring_sum(np.array([float(over.is_set())]), range(3))[0]:
                total = group.channel.ring_sum(np.full(1000, group.index + 1.0), range(3))
                assert (total == 6).all()
                steps += 1
            return steps

        _, *steps = together([attacked, *(functools.partial(trains, group) for group in members)], timeout_s=500)
        assert len({*steps}) == 1 and steps[0] > 0
        assert memory_bytes() - before < 200e6
        assert band.coordinator.view.number == 1 and not band.coordinator.silent and len(band.coordinator._sessions) == 3
    finally:
        band.end()


def test_exhausted_descriptors_are_no_end():
    """Strangers occupy all connections; when they release them, a process joins and messages pass as before."""
    band, held = Band(3), []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        members = groups(band, range(3))
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, limits[1]))
        with pytest.raises(OSError):
            while True:
                held.append(socket.create_connection(members[0].membership.transport.address))
        for stranger in held:
            stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        members[2].membership.close()
        together([group.enter for group in members[:2]])
        late = band.join(2)
        assert late.is_late
        together([late.next_view, *(group.enter for group in members[:2])])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        band.end()
