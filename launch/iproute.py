"""Calls of iproute2's `ip` and `tc`, which create namespaces and limit the rates of links."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys

from launch import command, processes

UNLIMITED = "none"
# A bucket that holds 10 ms of the rate, but never less than the largest packet, and a queue of 50 ms before packets are dropped, as in a
# small switch. A larger bucket would carry messages for nothing after every pause.
_BURST_S, _LEAST_BURST, _QUEUE = 0.01, 2**16, "50ms"
_LEAST_RATE, _LARGEST_RATE = 1e3, 1e12  # bits per second
_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


def require_privileges() -> None:
    """Refuses where namespaces cannot be made."""
    if sys.platform != "linux":
        command.refuse(f"platform {sys.platform!r}: network namespaces need Linux; launch.local runs several processes anywhere")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        command.refuse(f"{' and '.join(missing)} not found: network namespaces need iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        command.refuse(
            f"user id {os.geteuid()}: network namespaces need root; start the command with sudo, "
            "or use launch.local, which needs no network"
        )


def do(*command_line: str) -> str:
    """Runs one of iproute2's tools; returns what it prints."""
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or processes.how_it_ended(done.returncode)
        hint = "; in a container, start that with --privileged" if "not permitted" in said else ""
        command.refuse(f"{shlex.join(command_line)}: {said}{hint}")
    return done.stdout


def processes_in(space: str) -> list[int]:
    return [int(process_id) for process_id in do("ip", "netns", "pids", space).split()]


def checked_rate(rate: str) -> str:
    if rate != UNLIMITED and not _LEAST_RATE <= _bits(rate) <= _LARGEST_RATE:
        shown = rate if len(rate) <= 40 else f"{rate[:37]}…"
        command.refuse(
            f"rate={shown!r}: must be a number with bit, kbit, mbit or gbit (per second), as in 200mbit, from 1kbit to 1000gbit, "
            f"or {UNLIMITED}"
        )
    return rate


def _bits(rate: str) -> float:
    """Per second; nan of what is no rate."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([kmg]?)bit", rate)
    return float(match[1]) * _BITS[match[2]] if match else math.nan


def _burst(rate: str) -> int:
    """Bytes of the bucket of a link."""
    return max(_LEAST_BURST, int(_BURST_S * _bits(rate) / 8))


def pairs(text: str, hosts: int) -> list[tuple[int, int, str]]:
    """The hosts and rates of a text such as `0-1:10mbit,4-5:10mbit`."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,4})-(\d{1,4}):(\w[\w.]*)", part)
        if (
            not match
            or match[1] == match[2]
            or not all(int(host) < hosts for host in (match[1], match[2]))
            or match[3] == UNLIMITED
        ):
            command.refuse(f"pairs={part!r}: must be two hosts from 0 to {hosts - 1} and a rate, as in 0-1:10mbit,4-5:10mbit")
        found.append((int(match[1]), int(match[2]), checked_rate(match[3])))
    return found


def slow_class(rate: str, number: int, address: str) -> list[list[str]]:
    """Arguments of tc, each behind the interface, for what goes to an address, below the token bucket of an interface's own rate:
    a class of that rate, its queue, and the filter that leads there."""
    queue_bytes = max(_LEAST_BURST, int(_bits(rate) / 8 * 0.05))
    return [
        ["class", "replace", "parent", "10:", "classid", f"10:{number}", "htb", "rate", rate, "burst", str(_burst(rate))],
        ["qdisc", "replace", "parent", f"10:{number}", "bfifo", "limit", str(queue_bytes)],
        [
            "filter",
            "add",
            "parent",
            "10:",
            "protocol",
            "ip",
            "prio",
            "1",
            "u32",
            "match",
            "ip",
            "dst",
            address,
            "flowid",
            f"10:{number}",
        ],
    ]


def discipline(rate: str) -> list[str]:
    """Arguments of tc for a link of a rate."""
    rate = checked_rate(rate)
    return (
        ["noqueue"] if rate == UNLIMITED else ["handle", "1:", "tbf", "rate", rate, "burst", str(_burst(rate)), "latency", _QUEUE]
    )
