"""Emulated hosts on a switch with rate-limited links, for launch.cluster: network namespaces, made by iproute2's `ip` and `tc`."""

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import fcntl
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
import time
from typing import NamedTuple, TypeVar

from decjax import config
from launch import chaos, command, elastic, processes

T = TypeVar("T")

NAME = "decjax"
SUBNET = "10.77.0.0/24"
# BBR, the default of some machines, pauses for 200 ms every ten seconds, which would slow down some steps only.
_CONGESTION_CONTROL = "reno"  # in every kernel
_HOSTS_FILES = pathlib.Path("/etc/netns")  # `ip netns exec` mounts NAME/hosts as /etc/hosts
_NAMESPACES = pathlib.Path("/var/run/netns")
_NCCL = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}  # otherwise NCCL detects a single machine and bypasses the links
_CLONE_NEWNET = 0x40000000  # of Linux's sched.h
_STATE = pathlib.Path("/run")  # cleared at a reboot, as are the namespaces
UNLIMITED = "none"
# A bucket of 10 ms of the rate, but at least the largest packet, and a queue of 50 ms, as in a small switch. A larger bucket would carry
# messages without delay after every pause.
_BURST_S, _LEAST_BURST, _QUEUE = 0.01, 2**16, "50ms"
_LEAST_RATE, _LARGEST_RATE = 1e3, 1e12  # bits per second
_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


# -- Calls of iproute2's `ip` and `tc` --------------------------------------------------------------------------------


def require_privileges() -> None:
    """Refuse machines and users that cannot create namespaces."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    needs, user = "network namespaces need", os.geteuid()
    command.check(
        (sys.platform == "linux", f"platform {sys.platform!r}: {needs} Linux", "launch.local runs several processes anywhere"),
        (not missing, f"{' and '.join(missing)} not found: {needs} iproute2", "install it, as with apt-get install iproute2"),
        (user == 0, f"user id {user}: {needs} root", "start the command with sudo, or use launch.local"),
    )


def run_tool(*command_line: str) -> str:
    """Run one of iproute2's tools; return its output."""
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or processes.how_it_ended(done.returncode)
        hint = "; in a container, start that with --privileged" if "not permitted" in reason else ""
        command.refuse(f"{shlex.join(command_line)}: {reason}{hint}")
    return done.stdout


def processes_in(space: str) -> list[int]:
    return [int(process_id) for process_id in run_tool("ip", "netns", "pids", space).split()]


def checked_rate(rate: str) -> str:
    if rate != UNLIMITED and not _LEAST_RATE <= bits_per_s(rate) <= _LARGEST_RATE:
        shown = rate if len(rate) <= 40 else f"{rate[:37]}…"
        units = "must be a number with bit, kbit, mbit or gbit (per second)"
        command.refuse(f"rate={shown!r}: {units}, as in 200mbit, from 1kbit to 1000gbit, or {UNLIMITED}")
    return rate


def bits_per_s(rate: str) -> float:
    """Return the bits per second of a rate; nan if it is invalid."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([kmg]?)bit", rate)
    return float(match[1]) * _BITS[match[2]] if match else math.nan


def _burst(rate: str) -> int:
    """Return the bytes of a link's token bucket."""
    return max(_LEAST_BURST, int(_BURST_S * bits_per_s(rate) / 8))


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
    queue_bytes = max(_LEAST_BURST, int(bits_per_s(rate) / 8 * 0.05))
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


# -- The network ------------------------------------------------------------------------------------------------------


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
        arguments = discipline(rate)
        for port, name in enumerate(self.hosts):
            if host not in (None, port):
                continue
            run_tool("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *arguments)
            run_tool("tc", "-n", self.switch, "qdisc", "replace", "dev", f"p{port}", "root", *arguments)

    def set_pair(self, one: int, other: int, rate: str) -> None:
        """Limit messages between two hosts to a rate below that of their links, which must be limited."""
        for here, there in ((one, other), (other, one)):
            if self.rate_Bps(here) is None:
                command.refuse(f"pairs={one}-{other}:{rate}: the links have no rate; set one, such as --rate=100mbit")
            space = ("tc", "-n", self.hosts[here])
            if "htb" not in run_tool(*space, "qdisc", "show", "dev", "eth0"):  # Below the token bucket; class 1 is unlimited.
                run_tool(*space, "qdisc", "replace", "dev", "eth0", "parent", "1:1", "handle", "10:", "htb", "default", "1")
                run_tool(*space, "class", "replace", "dev", "eth0", "parent", "10:", "classid", "10:1", "htb", "rate", "100gbit")
            for what, verb, *rest in slow_class(rate, there + 2, self.addresses[there]):
                run_tool(*space, what, verb, "dev", "eth0", *rest)

    def set_pairs(self, text: str) -> None:
        """Call `set_pair` for pairs such as `0-1:10mbit,4-5:10mbit`."""
        for pair in pairs(text, len(self.hosts)):
            self.set_pair(*pair)

    def set_link(self, host: int, up: bool) -> None:
        """Take the link of a host down or up."""
        run_tool("ip", "-n", self.switch, "link", "set", f"p{host}", "up" if up else "down")

    def set_route(self, one: int, other: int, up: bool) -> None:
        """Disconnect two hosts from each other, or connect them again; both still reach all other hosts."""
        for here, there in ((one, other), (other, one)):
            run_tool("ip", "-n", self.hosts[here], "route", "del" if up else "replace", "blackhole", self.addresses[there])

    def rate_Bps(self, host: int) -> float | None:
        """Return the bytes per second of a link in each direction; None: unlimited."""
        (root,) = json.loads(run_tool("tc", "-j", "-n", self.hosts[host], "qdisc", "show", "dev", "eth0", "root"))
        return root["options"].get("rate")

    def bytes(self) -> list[HostBytes]:
        """Return the bytes that each host has sent and received."""
        links = [json.loads(run_tool("ip", "-j", "-s", "-n", host, "link", "show", "eth0")) for host in self.hosts]
        return [HostBytes(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]) for (link,) in links]

    def run(
        self,
        module: str,
        arguments: Sequence[str] = (),
        processes_per_host: int = 1,
        settings: config.Elastic | None = None,
        pin: bool = False,
        again: str = "",
        faults: Iterator[chaos.Event] = iter(()),
    ) -> int:
        """Run a module on every host with `elastic.run`; consecutive process indices share a host.

        The coordinator of elastic runs listens at the switch.
        """
        hosts = elastic.Hosts(
            self.addresses[0],
            lambda index, line: self.inside(index // processes_per_host, line),
            self.gateway if settings else "",
            self._at_switch,
            lambda index: {"NCCL_HOSTID": self.hosts[index // processes_per_host]} | _NCCL,
            self,
            processes_per_host,
        )
        count = len(self.hosts) * processes_per_host
        return elastic.run(module, arguments, count, settings, hosts=hosts, pin=pin, again=again, faults=faults)

    @property
    def gateway(self) -> str:
        """Address of the switch, where the coordinator of elastic runs listens."""
        (bridge,) = json.loads(run_tool("ip", "-j", "-4", "-n", self.switch, "address", "show", "dev", "br0"))
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
        problem = f"hosts={hosts}: network {name!r} is up with {len(existing.hosts)}"
        command.check((hosts is None or 1 <= hosts <= len(existing.hosts), problem, "take it down first (launch.cluster down)"))
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
    existing = _find_free(name)
    num_hosts = len(existing.hosts) if existing else 0
    command.check(
        (not existing, f"network {name!r} is up already, with {num_hosts} hosts", "`rate` changes its links, `down` removes it")
    )
    with processes.unwinding_signals(), _made(hosts, rate, name, subnet) as made:
        kept = dataclasses.replace(made, owner="")
        _write_state(kept)
    return kept


def find(name: str = NAME) -> Network | None:
    """Return the network with a name that is up; remove one that a killed command has left behind."""
    require_privileges()
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
        if running := [process_id for host in existing.hosts for process_id in processes_in(host)]:
            command.refuse(f"network {name!r} is in use; stop process {', '.join(map(str, running))} first")
        _remove(existing)
    return was_up


@contextlib.contextmanager
def _made(hosts: int, rate: str, name: str, subnet: str) -> Iterator[Network]:
    """Context manager with a new network, which is removed after an error."""
    made = dataclasses.replace(_planned(hosts, name, subnet), owner=_identity(os.getpid()))
    rate = checked_rate(rate)
    taken = [space for space in (made.switch, *made.hosts) if (_NAMESPACES / space).exists()]
    is_new = not taken and _write_state(made, new=True)
    command.check(
        (not taken, f"namespace {', '.join(map(repr, taken[:1]))} exists already", "choose another --name"),
        (is_new, f"network {name!r} is being created by another command", "choose another --name"),
    )
    try:
        _build(made, ipaddress.IPv4Network(subnet).prefixlen)
        made.set_rate(rate)
        yield made
    except BaseException:
        _remove(made)
        raise


def _planned(hosts: int, name: str, subnet: str) -> Network:
    """Check the properties of a network, and return it without creating it."""
    with command.refusing(f"subnet={subnet!r}", f"write it as {SUBNET}"):
        addresses = ipaddress.IPv4Network(subnet)
    most = addresses.num_addresses - 3  # One is the switch's.
    is_name = re.fullmatch(r"[A-Za-z][\w-]*", name)
    command.check(
        (is_name, f"name={name!r}: must be a letter, then letters, digits, - and _", f"write it as {NAME}"),
        (
            1 <= hosts <= most,
            f"hosts={hosts}: must be at least 1, and at most {most} in subnet {subnet}",
            "choose a larger --subnet",
        ),
    )
    return Network(name, tuple(str(addresses[host + 1]) for host in range(hosts)))


def _build(made: Network, prefix_length: int) -> None:
    """Create namespaces, the bridge, one pair of interfaces per host, and the hosts' /etc/hosts."""
    run_tool("ip", "netns", "add", made.switch)
    run_tool("ip", "-n", made.switch, "link", "set", "lo", "up")  # The launcher checks that its coordinator is reachable.
    run_tool("ip", "-n", made.switch, "link", "add", "br0", "type", "bridge")
    run_tool("ip", "-n", made.switch, "link", "set", "br0", "addrgenmode", "none", "up")
    gateway = ipaddress.ip_interface(f"{made.addresses[0]}/{prefix_length}").network.broadcast_address - 1
    run_tool("ip", "-n", made.switch, "address", "add", f"{gateway}/{prefix_length}", "dev", "br0")
    all_hosts = "".join(f"{address} {host}\n" for host, address in zip(made.hosts, made.addresses, strict=True))
    for port, (host, address) in enumerate(zip(made.hosts, made.addresses, strict=True)):
        run_tool("ip", "netns", "add", host)
        run_tool("ip", "link", "add", f"p{port}", "netns", made.switch, "type", "veth", "peer", "name", "eth0", "netns", host)
        # addrgenmode: without IPv6 addresses the links carry messages of the processes only.
        run_tool("ip", "-n", made.switch, "link", "set", f"p{port}", "master", "br0", "addrgenmode", "none", "up")
        run_tool("ip", "-n", host, "link", "set", "lo", "up")
        run_tool("ip", "-n", host, "link", "set", "eth0", "addrgenmode", "none", "up")
        run_tool("ip", "-n", host, "address", "add", f"{address}/{prefix_length}", "dev", "eth0")
        set_tcp = f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
        run_tool("ip", "netns", "exec", host, "sh", "-c", set_tcp)
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
                for process_id in processes_in(space):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process_id, signal.SIGKILL)
                run_tool("ip", "netns", "delete", space)
            shutil.rmtree(_HOSTS_FILES / space, ignore_errors=True)
        with contextlib.suppress(OSError):
            _HOSTS_FILES.rmdir()  # Not empty if there are other networks.
        state.unlink()
        return True
    return False


# -- State file ------------------------------------------------------------------------------------------------------


def _state_of(name: str) -> pathlib.Path:
    return _STATE / f"decjax-cluster-{name}.json"


def _write_state(made: Network, new: bool = False) -> bool:
    """Write the state of a network; return False if it should be new and is not."""
    with contextlib.suppress(FileExistsError), _state_of(made.name).open("x" if new else "w") as file:
        json.dump({"addresses": made.addresses, "owner": made.owner}, file)
        return True
    return False


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
