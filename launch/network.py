"""Hosts on this machine, on a switch whose links have a limited rate: network namespaces, made, found again and removed.

See launch.cluster, which is its command. A host is a network namespace, `decjax0`, `decjax1`, …; the switch is a bridge in one of its
own. It needs Linux, root and iproute2. What cannot be had raises a `ClusterError`.
"""

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
# Where machines default to BBR, its pause of 200 ms every ten seconds, for a look at the delay, would hit some steps and miss others.
_CONGESTION_CONTROL = "reno"  # every kernel has it
_HOSTS_FILES = pathlib.Path("/etc/netns")  # `ip netns exec` shows a host NAME/hosts from here as its /etc/hosts.
_NAMESPACES = pathlib.Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000  # of Linux's sched.h
_STATE = pathlib.Path("/run")  # Forgotten at a reboot, as the namespaces are.


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

    def set_rate(self, rate: str, host: int | None = None) -> None:
        """Limits every link, or that of one host, both ways, to a rate as `200mbit`, or frees it with `none`."""
        discipline = iproute.discipline(rate)
        for port, name in enumerate(self.hosts):
            if host not in (None, port):
                continue
            iproute.do("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *discipline)
            iproute.do("tc", "-n", self.switch, "qdisc", "replace", "dev", f"p{port}", "root", *discipline)

    def set_pair(self, one: int, other: int, rate: str) -> None:
        """Limits what two hosts send each other to a rate below that of their links, which must have one, until they are freed."""
        for here, there in ((one, other), (other, one)):
            if self.rate_Bps(here) is None:
                command.refuse(f"pairs={one}-{other}:{rate}: the links have no rate; give them one, as in --rate=100mbit")
            space = ("tc", "-n", self.hosts[here])
            if "htb" not in iproute.do(
                *space, "qdisc", "show", "dev", "eth0"
            ):  # Below the token bucket, with an open class for the rest.
                iproute.do(*space, "qdisc", "replace", "dev", "eth0", "parent", "1:1", "handle", "10:", "htb", "default", "1")
                iproute.do(*space, "class", "replace", "dev", "eth0", "parent", "10:", "classid", "10:1", "htb", "rate", "100gbit")
            for what, verb, *rest in iproute.slow_class(rate, there + 2, self.addresses[there]):
                iproute.do(*space, what, verb, "dev", "eth0", *rest)

    def set_pairs(self, text: str) -> None:
        """The same for the pairs of a text such as `0-1:10mbit,4-5:10mbit`."""
        for pair in iproute.pairs(text, len(self.hosts)):
            self.set_pair(*pair)

    def set_link(self, host: int, up: bool) -> None:
        """Takes the link of a host down, or up again."""
        iproute.do("ip", "-n", self.switch, "link", "set", f"p{host}", "up" if up else "down")

    def set_route(self, one: int, other: int, up: bool) -> None:
        """Cuts two hosts off from each other, or connects them again; both still reach all other hosts."""
        for here, there in ((one, other), (other, one)):
            iproute.do("ip", "-n", self.hosts[here], "route", "del" if up else "replace", "blackhole", self.addresses[there])

    def rate_Bps(self, host: int) -> float | None:
        """Bytes per second that the link of a host carries each way; None: not limited."""
        (discipline,) = json.loads(iproute.do("tc", "-j", "-n", self.hosts[host], "qdisc", "show", "dev", "eth0", "root"))
        return discipline["options"].get("rate")

    def bytes(self) -> list[HostBytes]:
        """What each host has sent and received so far, as its interface counts."""
        shown = [json.loads(iproute.do("ip", "-j", "-s", "-n", host, "link", "show", "eth0")) for host in self.hosts]
        return [HostBytes(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]) for (link,) in shown]

    def run(
        self,
        module: str,
        arguments: Sequence[str] = (),
        processes_per_host: int = 1,
        pin: bool = False,
        again: str = "",
        faults: Iterator[chaos.Event] = iter(()),
    ) -> int:
        """Runs a module on every host, as `processes.run_together` does; neighbours in the order of the processes' indices share
        one."""
        lines = processes.command_lines(module, arguments, len(self.hosts) * processes_per_host, self.addresses[0])
        inside = self._on_hosts(lines, processes_per_host)
        return processes.run_together(inside, again, pin, self._apart(inside), faults, self)

    def run_elastic(
        self,
        given: config.Elastic,
        module: str,
        arguments: Sequence[str] = (),
        processes_per_host: int = 1,
        again: str = "",
        faults: Iterator[chaos.Event] = iter(()),
    ) -> int:
        """The same for an elastic run, as `elastic.run_together` does it, with the coordinator at the switch."""

        def lines(options):
            made = processes.elastic_command_lines(module, arguments, len(self.hosts) * processes_per_host, options)
            return self._on_hosts(made, processes_per_host)

        box = elastic.Box(self._at_switch, self._apart(lines([])), self, processes_per_host)
        return elastic.run_together(lines, self.gateway, given, again, faults, box)

    def _on_hosts(self, lines: Sequence[list[str]], processes_per_host: int) -> list[list[str]]:
        return [self.inside(index // processes_per_host, line) for index, line in enumerate(lines)]

    def _apart(self, inside: Sequence[list[str]]) -> list[dict[str, str]]:
        """Variables without which NCCL would see that all hosts are one machine, and send nothing over the links."""
        return [{"NCCL_HOSTID": line[3], "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"} for line in inside]

    @property
    def gateway(self) -> str:
        """The switch's own address, where what does not train listens."""
        (found,) = json.loads(iproute.do("ip", "-j", "-4", "-n", self.switch, "address", "show", "dev", "br0"))
        return found["addr_info"][0]["local"]

    def _at_switch(self, make: Callable[[], T]) -> T:
        """What `make` gives in the namespace of the switch; sockets that it opens stay there."""

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
    """The network that is up, or else one that is made for us and goes with us, whatever happens.

    Args:
        hosts: how many; of a network that is up, the first ones, or all if None.
        rate: of every link and both ways, as `200mbit`; a network that is up is set to it, None leaves it.
        name, subnet: see `Network`; a network that is up has its own addresses.
    """
    if existing := _find_free(name):
        if hosts is not None and not 1 <= hosts <= len(existing.hosts):
            command.refuse(
                f"hosts={hosts}: network {name!r} is up with {len(existing.hosts)}; take it down first "
                "(python -m launch.cluster down)"
            )
        if rate is not None:
            existing.set_rate(rate)
        yield dataclasses.replace(existing, addresses=existing.addresses[:hosts])
    elif hosts is None:
        command.refuse(f"no network {name!r} is up; --hosts=4 makes one of four hosts for this run")
    else:
        with processes.unwinding_signals(), _made(hosts, rate or UNLIMITED, name, subnet) as made, _watched(name):
            yield made
            _remove(made)


def up(hosts: int, rate: str = UNLIMITED, name: str = NAME, subnet: str = SUBNET) -> Network:
    """Makes a network that stays until `down`."""
    if existing := _find_free(name):
        command.refuse(
            f"network {name!r} is up already, with {len(existing.hosts)} hosts; `rate` changes its links, `down` removes it"
        )
    with processes.unwinding_signals(), _made(hosts, rate, name, subnet) as made:
        kept = dataclasses.replace(made, owner="")
        _write_state(kept)
    return kept


def find(name: str = NAME) -> Network | None:
    """The network that is up under a name; one that a killed command left behind is removed."""
    iproute.require_privileges()
    found = _read_state(name)
    if found and found.owner and _identity(found.owner.split()[0]) != found.owner:
        if _remove(found):
            print(f"removed network {name!r}: the command that made it was killed", file=sys.stderr)
        return None
    return found


def _watched(name: str) -> contextlib.AbstractContextManager[None]:
    """A context in which another process removes the network if this one is killed."""
    waits = f"import sys; sys.stdin.read(); from launch import network; network.remove_orphan({name!r})"
    return processes.survived_by([sys.executable, "-c", waits], cwd=pathlib.Path(__file__).resolve().parents[1])


def remove_orphan(name: str) -> None:
    """Removes a network whose owner has just been killed, as soon as it is gone."""
    for _ in range(50):
        if find(name) is None:
            return
        time.sleep(0.1)


def _find_free(name: str) -> Network | None:
    """The same; refused if it belongs to a command that still runs and will take it down."""
    found = find(name)
    if found and found.owner:
        command.refuse(
            f"network {name!r} belongs to process {found.owner.split()[0]} and ends with it; "
            "wait, stop that process, or choose another --name"
        )
    return found


def down(name: str = NAME) -> bool:
    """Removes a network, unless something still runs on it; returns whether there was one."""
    was_up, existing = _state_of(name).exists(), _find_free(name)  # Looking for it removes what a killed command left.
    if existing:
        if running := [process_id for host in existing.hosts for process_id in iproute.processes_in(host)]:
            command.refuse(f"network {name!r} is in use; stop process {', '.join(map(str, running))} first")
        _remove(existing)
    return was_up


@contextlib.contextmanager
def _made(hosts: int, rate: str, name: str, subnet: str) -> Iterator[Network]:
    """Makes a network of our own; unmakes it if that, or what follows, fails."""
    made = dataclasses.replace(_planned(hosts, name, subnet), owner=_identity(os.getpid()))
    rate = iproute.checked_rate(rate)
    if taken := [space for space in (made.switch, *made.hosts) if (_NAMESPACES / space).exists()]:
        command.refuse(f"namespace {taken[0]!r} exists already and is not of this command; choose another --name")
    try:
        _write_state(made, new=True)
    except FileExistsError:
        command.refuse(f"network {name!r} is being made by another command; choose another --name")
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
        command.refuse(f"name={name!r}: must be a letter, then letters, digits, - and _, as in {NAME}")
    try:
        addresses = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        command.refuse(f"subnet={subnet!r}: {error}; write it as in {SUBNET}")
    if not 1 <= hosts <= addresses.num_addresses - 3:  # The switch has one as well.
        command.refuse(
            f"hosts={hosts}: must be at least 1, and at most {addresses.num_addresses - 3} in subnet "
            f"{subnet}; --subnet chooses a larger one"
        )
    return Network(name, tuple(str(addresses[host + 1]) for host in range(hosts)))


def _build(made: Network, prefix_length: int) -> None:
    """Namespaces, the bridge, one pair of interfaces per host, and what host names mean inside."""
    iproute.do("ip", "netns", "add", made.switch)
    iproute.do("ip", "-n", made.switch, "link", "set", "lo", "up")  # The launcher tries to reach its own coordinator.
    iproute.do("ip", "-n", made.switch, "link", "add", "br0", "type", "bridge")
    iproute.do("ip", "-n", made.switch, "link", "set", "br0", "addrgenmode", "none", "up")
    own = ipaddress.ip_interface(f"{made.addresses[0]}/{prefix_length}").network.broadcast_address - 1
    iproute.do("ip", "-n", made.switch, "address", "add", f"{own}/{prefix_length}", "dev", "br0")
    everybody = "".join(f"{address} {host}\n" for host, address in zip(made.hosts, made.addresses, strict=True))
    for port, (host, address) in enumerate(zip(made.hosts, made.addresses, strict=True)):
        iproute.do("ip", "netns", "add", host)
        iproute.do("ip", "link", "add", f"p{port}", "netns", made.switch, "type", "veth", "peer", "name", "eth0", "netns", host)
        # addrgenmode: without IPv6 addresses nothing talks on the links but the processes.
        iproute.do("ip", "-n", made.switch, "link", "set", f"p{port}", "master", "br0", "addrgenmode", "none", "up")
        iproute.do("ip", "-n", host, "link", "set", "lo", "up")
        iproute.do("ip", "-n", host, "link", "set", "eth0", "addrgenmode", "none", "up")
        iproute.do("ip", "-n", host, "address", "add", f"{address}/{prefix_length}", "dev", "eth0")
        iproute.do(
            "ip", "netns", "exec", host, "sh", "-c", f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
        )
        # gloo listens where this machine's name leads.
        own = _HOSTS_FILES / host
        own.mkdir(parents=True, exist_ok=True)
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n{everybody}")


def _remove(made: Network) -> bool:
    """Removes what there is of a network, and ends what still runs on it; False if another command has done that meanwhile."""
    state = _state_of(made.name)
    # Half a network is worse than a late exit.
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
            _HOSTS_FILES.rmdir()  # Others may have theirs.
        state.unlink()
        return True
    return False


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
    """A process id and when the process began, since ids come again; empty if there is no such process, or only its exit code."""
    try:
        after_its_name = pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_its_name[0] in ("Z", "X") else f"{process_id} {after_its_name[19]}"
