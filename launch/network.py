"""Emulated hosts on a switch with rate-limited links: network namespaces of Linux, for launch.cluster."""

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import fcntl
import ipaddress
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import sys
import time
from typing import NamedTuple, TypeVar

from decjax import config
from launch import chaos, command, elastic, iproute, processes
from launch.iproute import UNLIMITED

T = TypeVar("T")

NAME = "decjax"
SUBNET = "10.77.0.0/24"
# BBR, the default of some machines, pauses for 200 ms every ten seconds, which would slow down some steps only.
_CONGESTION_CONTROL = "reno"  # in every kernel
_HOSTS_FILES = pathlib.Path("/etc/netns")  # `ip netns exec` mounts NAME/hosts as /etc/hosts
_NAMESPACES = pathlib.Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000  # of Linux's sched.h
_STATE = pathlib.Path("/run")  # cleared at a reboot, as are the namespaces


class HostBytes(NamedTuple):
    """Bytes over the link of one host, including headers."""

    sent: int
    received: int


@dataclasses.dataclass(frozen=True)
class Network:
    """A network that is up.

    Attributes:
        name: prefix of the namespaces.
        addresses: one per host.
        owner: identity of the process that removes it; empty: it stays until `down`.
    """

    name: str
    addresses: tuple[str, ...]
    owner: str = ""

    @property
    def hosts(self) -> list[str]:
        """Names of the namespaces."""
        return [f"{self.name}{host}" for host in range(len(self.addresses))]

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    def inside(self, host: int, command_line: Sequence[str]) -> list[str]:
        """Return the command line that runs another one on a host."""
        return ["ip", "netns", "exec", self.hosts[host], *command_line]

    def set_rate(self, rate: str, host: int | None = None) -> None:
        """Limit both directions of all links, or of the link of one host, to a rate such as `200mbit`; `none` removes the limit."""
        discipline = iproute.discipline(rate)
        for port, name in enumerate(self.hosts):
            if host not in (None, port):
                continue
            iproute.do("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *discipline)
            iproute.do("tc", "-n", self.switch, "qdisc", "replace", "dev", f"p{port}", "root", *discipline)

    def set_pair(self, one: int, other: int, rate: str) -> None:
        """Limit messages between two hosts to a rate below that of their links, which must be limited."""
        for here, there in ((one, other), (other, one)):
            if self.rate_Bps(here) is None:
                command.refuse(f"pairs={one}-{other}:{rate}: the links have no rate; set one, such as --rate=100mbit")
            space = ("tc", "-n", self.hosts[here])
            if "htb" not in iproute.do(*space, "qdisc", "show", "dev", "eth0"):  # Below the token bucket; class 1 is unlimited.
                iproute.do(*space, "qdisc", "replace", "dev", "eth0", "parent", "1:1", "handle", "10:", "htb", "default", "1")
                iproute.do(*space, "class", "replace", "dev", "eth0", "parent", "10:", "classid", "10:1", "htb", "rate", "100gbit")
            for what, verb, *rest in iproute.slow_class(rate, there + 2, self.addresses[there]):
                iproute.do(*space, what, verb, "dev", "eth0", *rest)

    def set_pairs(self, text: str) -> None:
        """Call `set_pair` for pairs such as `0-1:10mbit,4-5:10mbit`."""
        for pair in iproute.pairs(text, len(self.hosts)):
            self.set_pair(*pair)

    def set_link(self, host: int, up: bool) -> None:
        """Take the link of a host down or up."""
        iproute.do("ip", "-n", self.switch, "link", "set", f"p{host}", "up" if up else "down")

    def set_route(self, one: int, other: int, up: bool) -> None:
        """Disconnect two hosts from each other, or connect them again; both still reach all other hosts."""
        for here, there in ((one, other), (other, one)):
            iproute.do("ip", "-n", self.hosts[here], "route", "del" if up else "replace", "blackhole", self.addresses[there])

    def rate_Bps(self, host: int) -> float | None:
        """Return the bytes per second of a link in each direction; None: unlimited."""
        (discipline,) = json.loads(iproute.do("tc", "-j", "-n", self.hosts[host], "qdisc", "show", "dev", "eth0", "root"))
        return discipline["options"].get("rate")

    def bytes(self) -> list[HostBytes]:
        """Return the bytes that each host has sent and received."""
        links = [json.loads(iproute.do("ip", "-j", "-s", "-n", host, "link", "show", "eth0")) for host in self.hosts]
        return [HostBytes(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]) for (link,) in links]

    def run(
        self,
        module: str,
        arguments: Sequence[str] = (),
        processes_per_host: int = 1,
        pin: bool = False,
        again: str = "",
        faults: Iterator[chaos.Event] = iter(()),
    ) -> int:
        """Run a module on every host with `processes.run_together`; consecutive process indices share a host."""
        lines = processes.command_lines(module, arguments, len(self.hosts) * processes_per_host, self.addresses[0])
        inside = self._on_hosts(lines, processes_per_host)
        return processes.run_together(inside, again, pin, self._nccl(inside), faults, self)

    def run_elastic(
        self,
        settings: config.Elastic,
        module: str,
        arguments: Sequence[str] = (),
        processes_per_host: int = 1,
        again: str = "",
        faults: Iterator[chaos.Event] = iter(()),
    ) -> int:
        """Run an elastic run with `elastic.run_together`, with the coordinator at the switch."""

        def lines(options):
            inside = processes.elastic_command_lines(module, arguments, len(self.hosts) * processes_per_host, options)
            return self._on_hosts(inside, processes_per_host)

        hosts = elastic.Hosts(self._at_switch, self._nccl(lines([])), self, processes_per_host)
        return elastic.run_together(lines, self.gateway, settings, again, faults, hosts)

    def _on_hosts(self, lines: Sequence[list[str]], processes_per_host: int) -> list[list[str]]:
        return [self.inside(index // processes_per_host, line) for index, line in enumerate(lines)]

    def _nccl(self, inside: Sequence[list[str]]) -> list[dict[str, str]]:
        """Return variables without which NCCL would detect a single machine and bypass the links."""
        return [{"NCCL_HOSTID": line[3], "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"} for line in inside]

    @property
    def gateway(self) -> str:
        """Address of the switch, where the coordinator of elastic runs listens."""
        (bridge,) = json.loads(iproute.do("ip", "-j", "-4", "-n", self.switch, "address", "show", "dev", "br0"))
        return bridge["addr_info"][0]["local"]

    def _at_switch(self, make: Callable[[], T]) -> T:
        """Call `make` in the namespace of the switch, where its sockets stay."""

        def run():
            with (_NAMESPACES / self.switch).open() as space:
                if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):  # of this thread alone
                    raise OSError(ctypes.get_errno(), "setns")
            return make()

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()


# -- Up and down ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def network(hosts: int | None = None, rate: str | None = None, name: str = NAME, subnet: str = SUBNET) -> Iterator[Network]:
    """Context manager with the network that is up, or with a new one that is removed at the end, even if this process is killed.

    Args:
        hosts: number of hosts; of a network that is up, the first ones, or all if None.
        rate: of every link in each direction, such as `200mbit`; None: unchanged, or unlimited.
        name, subnet: of a new network.
    """
    if existing := _find_free(name):
        if hosts is not None and not 1 <= hosts <= len(existing.hosts):
            problem = f"hosts={hosts}: network {name!r} is up with {len(existing.hosts)}"
            command.refuse(problem, "take it down first (python -m launch.cluster down)")
        if rate is not None:
            existing.set_rate(rate)
        yield dataclasses.replace(existing, addresses=existing.addresses[:hosts])
    elif hosts is None:
        command.refuse(f"no network {name!r} is up; --hosts=4 creates one with four hosts for this run")
    else:
        with processes.unwinding_signals(), _made(hosts, rate or UNLIMITED, name, subnet) as made, _watched(name):
            yield made
            _remove(made)


def up(hosts: int, rate: str = UNLIMITED, name: str = NAME, subnet: str = SUBNET) -> Network:
    """Create a network that stays until `down`."""
    if existing := _find_free(name):
        problem = f"network {name!r} is up already, with {len(existing.hosts)} hosts"
        command.refuse(problem, "`rate` changes its links, `down` removes it")
    with processes.unwinding_signals(), _made(hosts, rate, name, subnet) as made:
        kept = dataclasses.replace(made, owner="")
        _write_state(kept)
    return kept


def find(name: str = NAME) -> Network | None:
    """Return the network with a name that is up; remove one that a killed command has left behind."""
    iproute.require_privileges()
    existing = _read_state(name)
    if existing and existing.owner and _identity(existing.owner.split()[0]) != existing.owner:
        if _remove(existing):
            print(f"removed network {name!r}: the command that created it was killed", file=sys.stderr)
        return None
    return existing


def _watched(name: str) -> contextlib.AbstractContextManager[None]:
    """Context manager in which another process removes the network if this one is killed."""
    cleanup = f"import sys; sys.stdin.read(); from launch import network; network.remove_orphan({name!r})"
    return processes.survived_by([sys.executable, "-c", cleanup], cwd=pathlib.Path(__file__).resolve().parents[1])


def remove_orphan(name: str) -> None:
    """Remove a network whose owner has just been killed, as soon as the owner is gone."""
    for _ in range(50):
        if find(name) is None:
            return
        time.sleep(0.1)


def _find_free(name: str) -> Network | None:
    """Return `find(name)`; refuse a network of a command that is still running."""
    existing = find(name)
    if existing and existing.owner:
        problem = f"network {name!r} belongs to process {existing.owner.split()[0]} and ends with it"
        command.refuse(problem, "wait, stop that process, or choose another --name")
    return existing


def down(name: str = NAME) -> bool:
    """Remove a network unless processes still run on it; return whether there was one."""
    was_up, existing = _state_of(name).exists(), _find_free(name)  # `find` removes what a killed command has left.
    if existing:
        if running := [process_id for host in existing.hosts for process_id in iproute.processes_in(host)]:
            command.refuse(f"network {name!r} is in use; stop process {', '.join(map(str, running))} first")
        _remove(existing)
    return was_up


@contextlib.contextmanager
def _made(hosts: int, rate: str, name: str, subnet: str) -> Iterator[Network]:
    """Context manager with a new network, which is removed after an error."""
    made = dataclasses.replace(_planned(hosts, name, subnet), owner=_identity(os.getpid()))
    rate = iproute.checked_rate(rate)
    if taken := [space for space in (made.switch, *made.hosts) if (_NAMESPACES / space).exists()]:
        command.refuse(f"namespace {taken[0]!r} exists already; choose another --name")
    try:
        _write_state(made, new=True)
    except FileExistsError:
        command.refuse(f"network {name!r} is being created by another command; choose another --name")
    try:
        _build(made, ipaddress.IPv4Network(subnet).prefixlen)
        made.set_rate(rate)
        yield made
    except BaseException:
        _remove(made)
        raise


def _planned(hosts: int, name: str, subnet: str) -> Network:
    """Check the properties of a network, and return it without creating it."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        command.refuse(f"name={name!r}: must be a letter, then letters, digits, - and _, such as {NAME}")
    try:
        addresses = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        command.refuse(f"subnet={subnet!r}: {error}; write it as {SUBNET}")
    if not 1 <= hosts <= addresses.num_addresses - 3:  # One is the switch's.
        problem = f"hosts={hosts}: must be at least 1, and at most {addresses.num_addresses - 3} in subnet {subnet}"
        command.refuse(problem, "choose a larger one with --subnet")
    return Network(name, tuple(str(addresses[host + 1]) for host in range(hosts)))


def _build(made: Network, prefix_length: int) -> None:
    """Create namespaces, the bridge, one pair of interfaces per host, and the hosts' /etc/hosts."""
    iproute.do("ip", "netns", "add", made.switch)
    iproute.do("ip", "-n", made.switch, "link", "set", "lo", "up")  # The launcher checks that its coordinator is reachable.
    iproute.do("ip", "-n", made.switch, "link", "add", "br0", "type", "bridge")
    iproute.do("ip", "-n", made.switch, "link", "set", "br0", "addrgenmode", "none", "up")
    gateway = ipaddress.ip_interface(f"{made.addresses[0]}/{prefix_length}").network.broadcast_address - 1
    iproute.do("ip", "-n", made.switch, "address", "add", f"{gateway}/{prefix_length}", "dev", "br0")
    all_hosts = "".join(f"{address} {host}\n" for host, address in zip(made.hosts, made.addresses, strict=True))
    for port, (host, address) in enumerate(zip(made.hosts, made.addresses, strict=True)):
        iproute.do("ip", "netns", "add", host)
        iproute.do("ip", "link", "add", f"p{port}", "netns", made.switch, "type", "veth", "peer", "name", "eth0", "netns", host)
        # addrgenmode: without IPv6 addresses the links carry messages of the processes only.
        iproute.do("ip", "-n", made.switch, "link", "set", f"p{port}", "master", "br0", "addrgenmode", "none", "up")
        iproute.do("ip", "-n", host, "link", "set", "lo", "up")
        iproute.do("ip", "-n", host, "link", "set", "eth0", "addrgenmode", "none", "up")
        iproute.do("ip", "-n", host, "address", "add", f"{address}/{prefix_length}", "dev", "eth0")
        set_tcp = f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
        iproute.do("ip", "netns", "exec", host, "sh", "-c", set_tcp)
        # gloo listens at the address of this machine's name.
        folder = _HOSTS_FILES / host
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n{all_hosts}")


def _remove(made: Network) -> bool:
    """Remove a network and kill its processes; return False if another command has removed it meanwhile."""
    state = _state_of(made.name)
    # A signal must not leave half a network behind.
    with processes.caught_signals(), contextlib.suppress(FileNotFoundError), state.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if os.fstat(held.fileno()).st_nlink == 0:
            return False
        for space in (*made.hosts, made.switch):
            if (_NAMESPACES / space).exists():
                for process_id in iproute.processes_in(space):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process_id, signal.SIGKILL)
                iproute.do("ip", "netns", "delete", space)
            shutil.rmtree(_HOSTS_FILES / space, ignore_errors=True)
        with contextlib.suppress(OSError):
            _HOSTS_FILES.rmdir()  # Not empty if there are other networks.
        state.unlink()
        return True
    return False


# -- State file ------------------------------------------------------------------------------------------------------


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
    except (ValueError, TypeError, KeyError):  # Its writer was killed before it created anything else.
        return Network(name, (), owner="0")


def _identity(process_id: int | str) -> str:
    """Return a process id with its start time, since ids are reused; empty if the process has ended."""
    try:
        fields = pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else f"{process_id} {fields[19]}"
