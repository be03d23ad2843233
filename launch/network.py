"""Hosts on this machine, on a switch whose links have a limited rate: network namespaces, made, found again and removed.

See launch.cluster, which is its command. A host is a network namespace, `decjax0`, `decjax1`, …; the switch is a bridge in one of its
own. It needs Linux, root and iproute2. What cannot be had raises a `ClusterError`.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import ipaddress
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from typing import NamedTuple

from launch import processes

NAME = "decjax"
SUBNET = "10.77.0.0/24"
UNLIMITED = "none"
# A bucket that holds 10 ms of the rate, but never less than the largest packet, and a queue of 50 ms before packets are dropped, as in a
# small switch. A larger bucket would carry messages for nothing after every pause.
_BURST_S, _LEAST_BURST, _QUEUE = 0.01, 2**16, "50ms"
_LEAST_RATE, _LARGEST_RATE = 1e3, 1e12  # bits per second
_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
# Where machines default to BBR, its pause of 200 ms every ten seconds, for a look at the delay, would hit some steps and miss others.
_CONGESTION_CONTROL = "reno"  # every kernel has it
_HOSTS_FILES = pathlib.Path("/etc/netns")  # `ip netns exec` shows a host NAME/hosts from here as its /etc/hosts.
_NAMESPACES = pathlib.Path("/var/run/netns")
_STATE = pathlib.Path("/run")  # Forgotten at a reboot, as the namespaces are.


class ClusterError(Exception):
    """What the user or the machine lacks, told in one line."""


class HostBytes(NamedTuple):
    """Bytes over the link of one host, with the headers that the kernel counts."""

    sent: int
    received: int


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts that are up."""

    name: str  # what the names of their namespaces begin with
    addresses: tuple[str, ...]  # one per host
    owner: str = ""  # the process that takes it down, as `_identity` has it; empty: it stays until `down`

    @property
    def hosts(self) -> list[str]:
        """Names of the namespaces."""
        return [f"{self.name}{host}" for host in range(len(self.addresses))]

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    def inside(self, host: int, command_line: Sequence[str]) -> list[str]:
        """The command line that runs another one on a host."""
        return ["ip", "netns", "exec", self.hosts[host], *command_line]

    def set_rate(self, rate: str) -> None:
        """Limits every link, both ways, to a rate as `200mbit`, or frees it with `none`."""
        rate = _checked_rate(rate)
        discipline = ["noqueue"] if rate == UNLIMITED else ["tbf", "rate", rate, "burst", str(_burst(rate)), "latency", _QUEUE]
        for port, host in enumerate(self.hosts):
            _do("tc", "-n", host, "qdisc", "replace", "dev", "eth0", "root", *discipline)
            _do("tc", "-n", self.switch, "qdisc", "replace", "dev", f"p{port}", "root", *discipline)

    def rate_Bps(self, host: int) -> float | None:
        """Bytes per second that the link of a host carries each way; None: not limited."""
        (discipline,) = json.loads(_do("tc", "-j", "-n", self.hosts[host], "qdisc", "show", "dev", "eth0", "root"))
        return discipline["options"].get("rate")

    def bytes(self) -> list[HostBytes]:
        """What each host has sent and received so far, as its interface counts."""
        shown = [json.loads(_do("ip", "-j", "-s", "-n", host, "link", "show", "eth0")) for host in self.hosts]
        return [HostBytes(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]) for (link,) in shown]

    def run(
        self, module: str, arguments: Sequence[str] = (), processes_per_host: int = 1, pin: bool = False, again: str = ""
    ) -> int:
        """Runs a module on every host, as `processes.run_together` does; neighbours in the order of the processes' indices share
        one."""
        lines = processes.members(module, arguments, len(self.hosts) * processes_per_host, self.addresses[0])
        inside = [self.inside(index // processes_per_host, line) for index, line in enumerate(lines)]
        return processes.run_together(inside, again, pin)


# -- Up and down ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def network(hosts: int | None = None, rate: str | None = None, name: str = NAME, subnet: str = SUBNET) -> Iterator[Network]:
    """The network that is up, or else one that is made for us and goes with us, whatever happens.

    Args:
        hosts: how many; of a network that is up, the first ones, or all if None.
        rate: of every link and both ways, as `200mbit`; a network that is up is set to it, None leaves it.
        name, subnet: see `Network`; a network that is up has its own addresses.
    """
    if existing := _find_free(name):
        if hosts is not None and not 1 <= hosts <= len(existing.hosts):
            raise ClusterError(
                f"hosts={hosts}: network {name!r} is up with {len(existing.hosts)}; take it down first "
                "(python -m launch.cluster down)"
            )
        if rate is not None:
            existing.set_rate(rate)
        yield dataclasses.replace(existing, addresses=existing.addresses[:hosts])
    elif hosts is None:
        raise ClusterError(f"no network {name!r} is up; --hosts=4 makes one of four hosts for this run")
    else:
        with processes.unwinding_signals(), _made(hosts, rate or UNLIMITED, name, subnet) as made:
            yield made
            _remove(made)


def up(hosts: int, rate: str = UNLIMITED, name: str = NAME, subnet: str = SUBNET) -> Network:
    """Makes a network that stays until `down`."""
    if existing := _find_free(name):
        raise ClusterError(
            f"network {name!r} is up already, with {len(existing.hosts)} hosts; `rate` changes its links, `down` removes it"
        )
    with processes.unwinding_signals(), _made(hosts, rate, name, subnet) as made:
        kept = dataclasses.replace(made, owner="")
        _write_state(kept)
    return kept


def find(name: str = NAME) -> Network | None:
    """The network that is up under a name; one that a killed command left behind is removed."""
    _require_privileges()
    found = _read_state(name)
    if found and found.owner and _identity(found.owner.split()[0]) != found.owner:
        print(f"removing network {name!r}: the command that made it was killed", file=sys.stderr)
        _remove(found)
        return None
    return found


def _find_free(name: str) -> Network | None:
    """The same; refused if it belongs to a command that still runs and will take it down."""
    found = find(name)
    if found and found.owner:
        raise ClusterError(
            f"network {name!r} belongs to process {found.owner.split()[0]} and ends with it; "
            "wait, stop that process, or choose another --name"
        )
    return found


def down(name: str = NAME) -> bool:
    """Removes a network, unless something still runs on it; returns whether there was one."""
    was_up, existing = _state_of(name).exists(), _find_free(name)  # Looking for it removes what a killed command left.
    if existing:
        if running := [process_id for host in existing.hosts for process_id in _processes_in(host)]:
            raise ClusterError(f"network {name!r} is in use; stop process {', '.join(map(str, running))} first")
        _remove(existing)
    return was_up


@contextlib.contextmanager
def _made(hosts: int, rate: str, name: str, subnet: str) -> Iterator[Network]:
    """Makes a network of our own; unmakes it if that, or what follows, fails."""
    made = dataclasses.replace(_planned(hosts, name, subnet), owner=_identity(os.getpid()))
    rate = _checked_rate(rate)
    if taken := [space for space in (made.switch, *made.hosts) if (_NAMESPACES / space).exists()]:
        raise ClusterError(f"namespace {taken[0]!r} exists already and is not of this command; choose another --name")
    try:
        _write_state(made, new=True)
    except FileExistsError:
        raise ClusterError(f"network {name!r} is being made by another command; choose another --name") from None
    try:
        _build(made, ipaddress.IPv4Network(subnet).prefixlen)
        made.set_rate(rate)
        yield made
    except BaseException:
        _remove(made)
        raise


def _planned(hosts: int, name: str, subnet: str) -> Network:
    """The network of these properties, which need not exist."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ClusterError(f"name={name!r}: must be a letter, then letters, digits, - and _, as in {NAME}")
    try:
        addresses = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        raise ClusterError(f"subnet={subnet!r}: {error}; write it as in {SUBNET}") from None
    if not 1 <= hosts <= addresses.num_addresses - 2:
        raise ClusterError(
            f"hosts={hosts}: must be at least 1, and at most {addresses.num_addresses - 2} in subnet "
            f"{subnet}; --subnet chooses a larger one"
        )
    return Network(name, tuple(str(addresses[host + 1]) for host in range(hosts)))


def _build(made: Network, prefix_length: int) -> None:
    """Namespaces, the bridge, one pair of interfaces per host, and what host names mean inside."""
    _do("ip", "netns", "add", made.switch)
    _do("ip", "-n", made.switch, "link", "add", "br0", "type", "bridge")
    _do("ip", "-n", made.switch, "link", "set", "br0", "addrgenmode", "none", "up")
    everybody = "".join(f"{address} {host}\n" for host, address in zip(made.hosts, made.addresses, strict=True))
    for port, (host, address) in enumerate(zip(made.hosts, made.addresses, strict=True)):
        _do("ip", "netns", "add", host)
        _do("ip", "link", "add", f"p{port}", "netns", made.switch, "type", "veth", "peer", "name", "eth0", "netns", host)
        # addrgenmode: without IPv6 addresses nothing talks on the links but the processes.
        _do("ip", "-n", made.switch, "link", "set", f"p{port}", "master", "br0", "addrgenmode", "none", "up")
        _do("ip", "-n", host, "link", "set", "lo", "up")
        _do("ip", "-n", host, "link", "set", "eth0", "addrgenmode", "none", "up")
        _do("ip", "-n", host, "address", "add", f"{address}/{prefix_length}", "dev", "eth0")
        _do("ip", "netns", "exec", host, "sh", "-c", f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control")
        # gloo listens where this machine's name leads.
        own = _HOSTS_FILES / host
        own.mkdir(parents=True, exist_ok=True)
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n{everybody}")


def _remove(made: Network) -> None:
    """Removes what there is of a network, and ends what still runs on it."""
    with processes.caught_signals():  # Half a network is worse than a late exit.
        for space in (*made.hosts, made.switch):
            if (_NAMESPACES / space).exists():
                for process_id in _processes_in(space):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process_id, signal.SIGKILL)
                _do("ip", "netns", "delete", space)
            shutil.rmtree(_HOSTS_FILES / space, ignore_errors=True)
        with contextlib.suppress(OSError):
            _HOSTS_FILES.rmdir()  # Others may have theirs.
        _state_of(made.name).unlink(missing_ok=True)


# -- What remembers it ------------------------------------------------------------------------------------------------


def _state_of(name: str) -> pathlib.Path:
    return _STATE / f"decjax-cluster-{name}.json"


def _write_state(made: Network, new: bool = False) -> None:
    with _state_of(made.name).open("x" if new else "w") as file:
        json.dump({"addresses": made.addresses, "owner": made.owner}, file)


def _read_state(name: str) -> Network | None:
    try:
        state = json.loads(_state_of(name).read_text())
        return Network(name, tuple(state["addresses"]), state["owner"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):  # Killed while writing it, before anything else was made.
        return Network(name, (), owner="0")


def _identity(process_id: int | str) -> str:
    """A process id and when the process began, since ids come again; empty if there is no such process."""
    try:
        after_its_name = pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{process_id} {after_its_name[19]}"


# -- The tools --------------------------------------------------------------------------------------------------------


def _require_privileges() -> None:
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


def _do(*command_line: str) -> str:
    """Runs one of iproute2's tools; returns what it prints."""
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or processes.how_it_ended(done.returncode)
        hint = "; in a container, start that with --privileged" if "not permitted" in said else ""
        raise ClusterError(f"{shlex.join(command_line)}: {said}{hint}")
    return done.stdout


def _processes_in(space: str) -> list[int]:
    return [int(process_id) for process_id in _do("ip", "netns", "pids", space).split()]


def _checked_rate(rate: str) -> str:
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
