"""iproute2's tools, which make namespaces, links and their rates; what cannot be had raises a `ClusterError`."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys

from launch import processes

UNLIMITED = "none"
# A bucket that holds 10 ms of the rate, but never less than the largest packet, and a queue of 50 ms before packets are dropped, as in a
# small switch. A larger bucket would carry messages for nothing after every pause.
_BURST_S, _LEAST_BURST, _QUEUE = 0.01, 2**16, "50ms"
_LEAST_RATE, _LARGEST_RATE = 1e3, 1e12  # bits per second
_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


class ClusterError(Exception):
    """What the user or the machine lacks, told in one line."""


def require_privileges() -> None:
    """Refuses where namespaces cannot be made."""
    if sys.platform != "linux":
        raise ClusterError(
            f"platform {sys.platform!r}: network namespaces need Linux; launch.local runs several processes anywhere"
        )
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise ClusterError(f"{' and '.join(missing)} not found: network namespaces need iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise ClusterError(
            f"user id {os.geteuid()}: network namespaces need root; start the command with sudo, "
            "or use launch.local, which needs no network"
        )


def do(*command_line: str) -> str:
    """Runs one of iproute2's tools; returns what it prints."""
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or processes.how_it_ended(done.returncode)
        hint = "; in a container, start that with --privileged" if "not permitted" in said else ""
        raise ClusterError(f"{shlex.join(command_line)}: {said}{hint}")
    return done.stdout


def processes_in(space: str) -> list[int]:
    return [int(process_id) for process_id in do("ip", "netns", "pids", space).split()]


def checked_rate(rate: str) -> str:
    if rate != UNLIMITED and not _LEAST_RATE <= _bits(rate) <= _LARGEST_RATE:
        shown = rate if len(rate) <= 40 else f"{rate[:37]}…"
        raise ClusterError(
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


def discipline(rate: str) -> list[str]:
    """Arguments of tc for a link of a rate."""
    rate = checked_rate(rate)
    return ["noqueue"] if rate == UNLIMITED else ["tbf", "rate", rate, "burst", str(_burst(rate)), "latency", _QUEUE]
