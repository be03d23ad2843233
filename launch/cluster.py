"""Emulate a cluster: several hosts on this machine, on a switch whose links have a limited rate.

    python -m launch.cluster run --hosts=4 --rate=200mbit -- --config=configs/lm.py --workdir=runs/lm

creates the network, runs launch.train on every host, prints the bytes sent and received, and removes the network. For several runs:

    python -m launch.cluster up --hosts=4 --rate=200mbit
    python -m launch.cluster run -- --config=configs/lm.py --workdir=runs/lm
    python -m launch.cluster rate --rate=50mbit        # none: unlimited
    python -m launch.cluster bytes
    python -m launch.cluster down

In Python: `with cluster.network(hosts=4, rate="200mbit") as network: network.run("launch.train", arguments)`. Hosts are network
namespaces, `decjax0`, `decjax1`, …, and the switch is a bridge in `decjax-switch`, so the machine's own network is unchanged. Token
buckets limit each direction of a link; TCP uses Reno. Requires Linux, root and iproute2.
"""

import shlex

from absl import flags
import rich.console
import rich.table

from launch import chaos, command, elastic, processes
from launch.network import NAME, SUBNET, UNLIMITED, HostBytes, Network, checked_rate, down, find, network, up

# Option -> the verbs that have it.
_VERBS_OF = {
    "hosts": ("up", "run"),
    "rate": ("up", "run", "rate"),
    "subnet": ("up", "run"),
    "pairs": ("up", "run"),
    "processes_per_host": ("run",),
    "module": ("run",),
    "pin": ("run",),
    "elastic": ("run",),
    "chaos": ("run",),
}
_VERBS = ("up", "run", "rate", "bytes", "down")


class Rates(flags.ListParser):
    """Parser of a flag with several rates."""

    def parse(self, argument: str | list[str]) -> list[str]:
        rates = [checked_rate(rate) for rate in super().parse(argument)]
        return rates or command.refuse("there must be at least one rate", "write them as in 50mbit,100mbit")


def tabulate(links: Network, counted: list[HostBytes]) -> rich.table.Table:
    """Return a table with one row per host."""
    table = command.table("host", "address", "rate, Mbit/s", "sent, MB", "received, MB", words=2)
    for index, (name, address, passed) in enumerate(zip(links.hosts, links.addresses, counted, strict=True)):
        rate_Bps = links.rate_Bps(index)
        rate = f"{rate_Bps * 8 / 1e6:g}" if rate_Bps else UNLIMITED
        table.add_row(name, address, rate, f"{passed.sent / 1e6:.3f}", f"{passed.received / 1e6:.3f}")
    return table


def run(arguments: list[str], console: rich.console.Console) -> int:
    """Run the verb `run`."""
    chosen = flags.FLAGS
    existing = find(chosen.name)
    hosts = chosen.hosts or (len(existing.hosts) if existing else 1)
    processes.check(chosen.module, arguments, hosts * chosen.processes_per_host)
    again = processes.how_to_continue("launch.cluster", chosen.module)
    with network(chosen.hosts, chosen.rate, chosen.name, chosen.subnet) as links:
        links.set_pairs(chosen.pairs)
        before = links.bytes()
        hosts = len(links.hosts)
        faults = chaos.parse(chosen.chaos, hosts * chosen.processes_per_host, hosts)
        settings = elastic.options(chosen.module, arguments)
        code = links.run(chosen.module, arguments, chosen.processes_per_host, settings, chosen.pin, again, faults)
        if code != command.USER_ERROR:
            during = [
                HostBytes(late.sent - early.sent, late.received - early.received)
                for early, late in zip(before, links.bytes(), strict=True)
            ]
            console.print(tabulate(links, during))
    return code


def main(argv: list[str]) -> int:
    chosen, console = flags.FLAGS, rich.console.Console(highlight=False)
    verb, *arguments = argv or [""]
    unexpected = ", ".join(map(repr, arguments[:1]))
    misplaced = [option for option, verbs in _VERBS_OF.items() if chosen[option].present and verb not in verbs]
    its_verbs = ", ".join(_VERBS_OF[misplaced[0]]) if misplaced else ""
    command.check(
        (verb in _VERBS, f"verb {verb!r}: must be one of {', '.join(_VERBS)}", "write it as in launch.cluster up --hosts=4"),
        (not misplaced, f"--{', '.join(misplaced[:1])}: not an option of {verb}, but of {its_verbs}", "leave it out"),
        (verb == "run" or not arguments, f"unexpected argument {unexpected}: {verb} takes options only", "leave it out"),
        (not (chosen.pin and chosen.elastic), "--pin has no effect with --elastic: its processes share the cores", "leave out one"),
        (verb != "up" or chosen.hosts is not None, "--hosts is missing", "give it as --hosts=4"),
        (verb != "rate" or chosen.rate is not None, "--rate is missing", "give it as --rate=50mbit"),
    )
    if verb == "run":
        return run(arguments, console)
    if verb == "up":
        made = up(chosen.hosts or 0, chosen.rate or UNLIMITED, chosen.name, chosen.subnet)
        made.set_pairs(chosen.pairs)
        print(f"up: {', '.join(made.hosts)}; to run a command on one: {shlex.join(made.inside(0, ['COMMAND']))}")
    elif verb == "down":
        print(f"network {chosen.name!r} {'is down' if down(chosen.name) else 'was not up'}")
    else:
        existing = find(chosen.name)
        if existing is None:
            command.refuse(f"no network {chosen.name!r} is up; python -m launch.cluster up --hosts=4 makes one")
        if verb == "rate":
            existing.set_rate(chosen.rate or UNLIMITED)
        console.print(tabulate(existing, existing.bytes()))
    return 0


if __name__ == "__main__":
    # Defined here, because experiments use this module and have flags of their own.
    flags.DEFINE_integer("hosts", None, "Number of hosts; default: all of a network that is up.")
    flags.DEFINE_string("rate", None, "Rate of every link in each direction, such as 200mbit; none: unlimited.")
    flags.DEFINE_string("pairs", "", "Pairs of hosts with slower links, such as 0-1:10mbit,4-5:10mbit.")
    flags.DEFINE_string("name", NAME, "Prefix of the network namespaces.")
    flags.DEFINE_string("subnet", SUBNET, "Subnet of the hosts' addresses.")
    processes.define_count("processes_per_host", 1, "Processes per host, one CPU worker each.")
    flags.DEFINE_string("module", processes.TRAIN, "Module with the coordinator flags of launch.train.")
    flags.DEFINE_boolean("pin", False, "Pin process i to core i, modulo the number of cores.")
    elastic.define_flags()
    flags.FLAGS.set_gnu_getopt()  # The verb stands before the options.
    command.run(main)
