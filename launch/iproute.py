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
# A bucket of 10 ms of the rate, but at least the largest packet, and a queue of 50 ms, as in a small switch. A larger bucket would carry
# messages without delay after every pause.
_BURST_S, _LEAST_BURST, _QUEUE = 0.01, 2**16, "50ms"
_LEAST_RATE, _LARGEST_RATE = 1e3, 1e12  # bits per second
_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


def require_privileges() -> None:
    """Refuse machines and users that cannot create namespaces."""
    if sys.platform != "linux":
        command.refuse(f"platform {sys.platform!r}: network namespaces need Linux; launch.local runs several processes anywhere")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        command.refuse(f"{' and '.join(missing)} not found: network namespaces need iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        command.refuse(f"user id {os.geteuid()}: network namespaces need root; start the command with sudo, or use launch.local")


def do(*command_line: str) -> str:
    """Run one of iproute2's tools; return its output."""
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
        units = "must be a number with bit, kbit, mbit or gbit (per second)"
        command.refuse(f"rate={shown!r}: {units}, as in 200mbit, from 1kbit to 1000gbit, or {UNLIMITED}")
    return rate


def _bits(rate: str) -> float:
    """Return the bits per second of a rate; nan if it is invalid."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([kmg]?)bit", rate)
    return float(match[1]) * _BITS[match[2]] if match else math.nan


def _burst(rate: str) -> int:
    """Return the bytes of a link's token bucket."""
    return max(_LEAST_BURST, int(_BURST_S * _bits(rate) / 8))


def pairs(text: str, hosts: int) -> list[tuple[int, int, str]]:
    """Parse pairs of hosts with rates, such as `0-1:10mbit,4-5:10mbit`."""
    parsed = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,4})-(\d{1,4}):(\w[\w.]*)", part)
        valid = match and match[1] != match[2] and max(int(match[1]), int(match[2])) < hosts and match[3] != UNLIMITED
        if not match or not valid:
            command.refuse(f"pairs={part!r}: must be two hosts from 0 to {hosts - 1} and a rate, as in 0-1:10mbit,4-5:10mbit")
        parsed.append((int(match[1]), int(match[2]), checked_rate(match[3])))
    return parsed


def slow_class(rate: str, number: int, address: str) -> list[list[str]]:
    """Return arguments of tc, after the interface, for a class with a rate below an interface's token bucket.

    They create the class, its queue, and the filter of packets to an address.
    """
    queue_bytes = max(_LEAST_BURST, int(_bits(rate) / 8 * 0.05))
    return [
        ["class", "replace", "parent", "10:", "classid", f"10:{number}", "htb", "rate", rate, "burst", str(_burst(rate))],
        ["qdisc", "replace", "parent", f"10:{number}", "bfifo", "limit", str(queue_bytes)],
        [*"filter add parent 10: protocol ip prio 1 u32 match ip dst".split(), address, "flowid", f"10:{number}"],
    ]


def discipline(rate: str) -> list[str]:
    """Return the arguments of tc for a link with a rate."""
    rate = checked_rate(rate)
    return (
        ["noqueue"] if rate == UNLIMITED else ["handle", "1:", "tbf", "rate", rate, "burst", str(_burst(rate)), "latency", _QUEUE]
    )
