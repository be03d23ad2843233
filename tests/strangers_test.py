"""A run is reachable over its own network only: what listens in an emulated cluster, and on loopback under launch.local."""

import re
import subprocess
import sys
import textwrap

import pytest

from launch import cluster, processes
from launch import network as network_lib
from tests.cluster_test import NAME as TEST
from tests.cluster_test import RECEIVE, ROOT, TIMEOUT_S, needs_namespaces, wait_for

pytestmark = needs_namespaces
NAME, HOSTS, OWN, OTHER = f"{TEST}strange", 2, "10.87.0", "10.88.0"
OPEN = 5000  # the port of RECEIVE, which listens on all addresses
# Connect to HOST:PORT …, send what no program expects, and print which connections were accepted.
STRANGER = """
    import socket, sys
    for address in sys.argv[1:]:
        host, port = address.split(":")
        try:
            with socket.create_connection((host, int(port)), 5) as connection:
                connection.sendall(bytes(1000))
                print(address, flush=True)
        except ConnectionRefusedError:
            pass
"""


@pytest.fixture
def network():
    """Two hosts and the switch, which are on another network as well; the third host is on that one only."""
    made = cluster.up(HOSTS + 1, name=NAME, subnet=f"{OWN}.0/24")
    try:
        for host, name in enumerate(made.hosts):
            network_lib.run_tool("ip", "-n", name, "address", "add", f"{OTHER}.{host + 1}/24", "dev", "eth0")
        network_lib.run_tool("ip", "-n", made.switch, "address", "add", f"{OTHER}.254/24", "dev", "br0")
        network_lib.run_tool("ip", "-n", made.hosts[HOSTS], "address", "delete", f"{OWN}.{HOSTS + 1}/24", "dev", "eth0")
        yield made
    finally:
        cluster.down(NAME)


@pytest.fixture
def training(tmp_path):
    """Start a launcher with a run that continues until the returned function is called; that returns the run's exit code."""
    (slowly := tmp_path / "slowly").touch()
    config = [
        "--config=experiments/paced.py:workers=2,simulate=false,steps=100",
        f"--config.data.waits_for={slowly}",
        "--config.data.wait_s=1",
    ]
    fields = ["--config.log_every=1", "--config.eval.every=100", "--config.checkpoint.every=100", f"--workdir={tmp_path / 'run'}"]
    started = []

    def training(prefix, module, *options):
        line = [*prefix, *processes.python(module, [*options, "--", *config, *fields])]
        with (tmp_path / "said").open("w") as said:
            started.append(subprocess.Popen(line, cwd=ROOT, stdout=said, stderr=said))
        wait_for((tmp_path / "run" / "metrics.jsonl").exists, started[-1])

        def ended():
            slowly.unlink()
            assert started[-1].wait(TIMEOUT_S) == 0, (tmp_path / "said").read_text()

        return ended

    yield training
    for process in started:
        process.terminate()
        process.wait(TIMEOUT_S)


def listening(space):
    """Return (address, port) of everything that listens in a namespace."""
    shown = network_lib.run_tool("ip", "netns", "exec", space, "ss", "--no-header", "--tcp", "--listening", "--numeric")
    # Such as 10.87.0.1:4321 and [::ffff:10.87.0.1]:4321.
    return [re.fullmatch(r"(?:\[::ffff:)?(.*?)\]?:(\d+)", line.split()[3]).groups() for line in shown.splitlines()]


def reached(network, addresses):
    """Return those HOST:PORT addresses to which the third host can connect."""
    line = network.inside(HOSTS, [sys.executable, "-c", textwrap.dedent(STRANGER), *addresses])
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout.split()


@pytest.mark.parametrize("options", [[], ["--elastic"]], ids=["plain", "elastic"])
def test_a_stranger_on_another_network_does_not_reach_a_run(network, training, options):
    ended = training([], "launch.cluster", "run", f"--name={NAME}", f"--hosts={HOSTS}", *options)
    spaces = {space: f"{OTHER}.{host}" for space, host in zip([*network.hosts[:HOSTS], network.switch], (1, 2, 254), strict=True)}
    found = {space: listening(space) for space in spaces}
    assert all(found[host] for host in network.hosts[:HOSTS]) and bool(found[network.switch]) == bool(options)
    assert {address.rpartition(".")[0] for of_space in found.values() for address, _ in of_space} == {OWN}
    with subprocess.Popen(
        network.inside(0, [sys.executable, "-c", textwrap.dedent(RECEIVE), "1"]), stdout=subprocess.PIPE
    ) as open_:
        assert open_.stdout.readline() == b"ready\n"
        tried = [f"{other}:{port}" for space, other in spaces.items() for _, port in found[space]]
        assert reached(network, [*tried, f"{OTHER}.1:{OPEN}"]) == [f"{OTHER}.1:{OPEN}"]
    ended()


@pytest.mark.parametrize("options", [[], ["--elastic"]], ids=["plain", "elastic"])
def test_launch_local_opens_nothing_but_loopback(network, training, options):
    """In a separate namespace, where nothing else listens; the launcher counts as well."""
    ended = training(network.inside(0, []), "launch.local", "--num_processes=2", *options)
    found = listening(network.hosts[0])
    assert found and {address for address, _ in found} == {"127.0.0.1"}
    ended()
