"""launch/cluster.py: errors are reported on any machine; with root and iproute2: real namespaces, rates, bytes and shutdown."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

from absl import flags
import pytest

from launch import cluster, command
from launch import network as network_lib

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 240
NAME = f"test{os.getpid()}-"  # an address range of its own, so that a running network stays untouched
TINY = (
    "--config.model.depth=1",
    "--config.model.width=8",
    "--config.model.hidden=8",
    "--config.model.context=8",
    "--config.data.sample_bytes=1",
    "--config.eval.num_windows=2",
)

# Write the process id to a file and wait.
IDLE = """
    import os, pathlib, sys, time
    flags = dict(argument.lstrip("-").partition("=")[::2] for argument in sys.argv[1:])
    pathlib.Path(flags["pids"], flags["process_index"]).write_text(str(os.getpid()))
    time.sleep(120)
"""
# Receive from --senders connections; print the bytes and the seconds from the first to the last one.
RECEIVE = """
    import selectors, socket, sys, time
    server = socket.create_server(("", 5000))
    print("ready", flush=True)
    connections = selectors.DefaultSelector()
    for _ in range(int(sys.argv[1])):
        connections.register(server.accept()[0], selectors.EVENT_READ)
    begun, received = time.monotonic(), 0
    while connections.get_map():
        for key, _ in connections.select():
            if not (data := key.fileobj.recv(1 << 16)):
                connections.unregister(key.fileobj)
            received += len(data)
    print(received, time.monotonic() - begun)
"""
SEND = """
    import socket, sys
    with socket.create_connection((sys.argv[1], 5000)) as connection:
        connection.sendall(bytes(int(sys.argv[2])))
"""


def why_not():
    """Return why namespaces do not work here, or nothing."""
    try:
        network_lib.require_privileges()
    except command.UserError as error:
        return str(error)
    probe = f"{NAME}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        shape = ["tbf", "rate", "1mbit", "burst", "10kb", "latency", "50ms"]
        made = subprocess.run(
            ["tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", *shape], capture_output=True, text=True, check=False
        )
        subprocess.run(["ip", "netns", "delete", probe], check=True)
    return made.stderr.strip()


needs_namespaces = pytest.mark.skipif(bool(reason := why_not()), reason=reason or "namespaces work")


def left_over():
    """Names of the namespaces and paths of the files that this test file creates."""
    folders = [pathlib.Path(folder) for folder in ("/var/run/netns", "/etc/netns", "/run")]
    return [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir() if NAME in path.name]


def launch(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "launch.cluster", *arguments],
        cwd=ROOT,
        text=True,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process):
    """Run the command; return output, errors and exit code."""
    return *process.communicate(timeout=TIMEOUT_S), process.returncode


def wait_for(condition, process=None):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def idle(tmp_path):
    """A command that created a network of two hosts for two waiting processes, and the files with their ids."""
    (tmp_path / "idle.py").write_text(textwrap.dedent(IDLE))
    arguments = ["run", f"--name={NAME}", "--hosts=2", "--module=idle", "--", f"--pids={tmp_path}"]
    return launch(*arguments, PYTHONPATH=str(tmp_path)), [tmp_path / "0", tmp_path / "1"]


def ids(notes):
    wait_for(lambda: all(note.exists() and note.read_text() for note in notes))
    return [int(note.read_text()) for note in notes]


def alive(process_id):
    return bool(network_lib._identity(process_id))


# -- Anywhere ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, problems",
    [
        ([], ["verb ''", "up, run, rate, bytes, down"]),
        (["start"], ["verb 'start'", "up, run, rate, bytes, down"]),
        (["down", "--rate=50mbit"], ["--rate", "not an option of down"]),
        (["up", "all", "--hosts=2"], ["unexpected argument 'all'"]),
        (["run", "configs/lm.py", "--hosts=2"], ["unexpected argument 'configs/lm.py'", "--"]),
        (["run", "--hosts=2", "--config=configs/lm.py"], ["config"]),
        (["run", "--hosts=2", "--module=experiments.nothing"], ["module='experiments.nothing'"]),
        (["run", "--hosts=2", "--processes_per_host=0", "--", "--x"], ["processes_per_host=0", "0 is not"]),
        (["up", "--hosts=many"], ["many"]),
        (["run", "--pairs=0-1:5mbit", "--module=experiments.nothing"], ["experiments.nothing"]),
        (["down", "--pairs=0-1:5mbit"], ["--pairs", "not an option of down"]),
        (["run", "--hosts=2", "--pin", "--elastic", "--", "--x"], ["--pin has no effect with --elastic"]),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, problems):
    output, errors, code = ended(launch(*arguments))
    (line,) = errors.splitlines()
    assert (code, output) == (2, "")
    assert line.startswith("error: ") and all(problem in line for problem in problems)


@pytest.mark.parametrize(
    "rate",
    ["", "fast", "200", "200mbps", "-1mbit", "0mbit", "1e3mbit", "mbit", "9" * 160 + "mbit", "1" * 400 + "bit", "1bit", "٣mbit"],
)
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(command.UserError, match=r"rate='.*as in 200mbit"):
        network_lib.checked_rate(rate)


@pytest.mark.parametrize("rates, problem", [("50mbit,fast", "rate='fast': must be a number with bit"), ("", "at least one rate")])
def test_a_list_of_rates_is_refused_before_the_first_is_measured(rates, problem):
    values = flags.FlagValues()
    flags.DEFINE(cluster.Rates(), "rates", ["50mbit", "none"], "", flag_values=values)
    with pytest.raises(command.UserError, match=f"flag --rates={rates}: .*{problem}"):
        command.parsed(["experiment", f"--rates={rates}"], values)
    command.parsed(["experiment"], values)
    assert values.rates == ["50mbit", "none"]


@pytest.mark.parametrize("state", ['{"addresses": ["10.77.0.1"], "owner": "1 0"}', '{"addres', "[]", "{}"])
def test_down_after_a_kill_says_that_the_network_is_down(state, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(network_lib, "require_privileges", lambda: None)
    monkeypatch.setattr(network_lib, "_STATE", tmp_path)
    monkeypatch.setattr(network_lib, "_NAMESPACES", tmp_path)
    monkeypatch.setattr(network_lib, "_HOSTS_FILES", tmp_path / "netns")
    network_lib._state_of("x").write_text(state)
    assert cluster.down("x") and "was killed" in capsys.readouterr().err
    assert not network_lib._state_of("x").exists() and not cluster.down("x")


@pytest.mark.parametrize("rate", ["200mbit", "1.5gbit", "64kbit", "9600bit", "none"])
def test_rates_as_tc_writes_them(rate):
    assert network_lib.checked_rate(rate) == rate


@pytest.mark.parametrize(
    "hosts, name, subnet, problem",
    [
        (0, "box", "10.77.0.0/24", "hosts=0: must be at least 1, and at most 253"),
        (7, "box", "10.77.0.0/29", "at most 5 in subnet 10.77.0.0/29"),
        (2, "../box", "10.77.0.0/24", "name='../box'"),
        (2, "box", "10.77.0.1/24", "subnet='10.77.0.1/24': 10.77.0.1/24 has host bits set"),
        (2, "box", "here", "subnet='here'"),
    ],
)
def test_a_network_that_cannot_be_is_refused(hosts, name, subnet, problem):
    with pytest.raises(command.UserError) as refused:
        network_lib._planned(hosts, name, subnet)
    assert problem in str(refused.value)


def test_hosts_have_the_first_addresses():
    planned = network_lib._planned(3, "box", "10.5.0.0/16")
    assert planned.addresses == ("10.5.0.1", "10.5.0.2", "10.5.0.3")
    assert planned.inside(2, ["true"]) == ["ip", "netns", "exec", "box2", "true"]


@pytest.mark.parametrize(
    "lacking, problem",
    [
        (("os.geteuid", lambda: 1000), "user id 1000: network namespaces need root"),
        (("shutil.which", lambda tool: None if tool == "tc" else tool), "tc not found: network namespaces need iproute2"),
        (("sys.platform", "darwin"), "platform 'darwin': network namespaces need Linux"),
    ],
)
def test_what_the_machine_lacks_is_told(monkeypatch, lacking, problem):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(*lacking)
    with pytest.raises(command.UserError, match=problem):
        cluster.find(NAME)


# -- With namespaces --------------------------------------------------------------------------------------------------


@needs_namespaces
def test_the_switch_reaches_itself():
    """Otherwise the launcher reports an unreachable coordinator."""
    with network_lib.network(1, name=NAME) as made, made._at_switch(lambda: socket.create_server((made.gateway, 0))) as server:
        made._at_switch(lambda: socket.create_connection(server.getsockname(), TIMEOUT_S)).close()


@needs_namespaces
def test_up_rate_bytes_down():
    verbs = [
        ["up", "--hosts=3", "--rate=200mbit", "--subnet=10.9.8.0/24"],
        ["up", "--hosts=3"],
        ["rate", "--rate=50mbit"],
        ["run", "--hosts=4", "--", "--config=configs/lm.py", "--workdir=unused"],
        ["rate", "--rate=none"],
        ["down"],
        ["down"],
        ["bytes"],
    ]
    outcomes = [ended(launch(verb, f"--name={NAME}", *options)) for verb, *options in verbs]
    assert [code for _, _, code in outcomes] == [0, 2, 0, 2, 0, 0, 0, 2]
    assert f"{NAME}0, {NAME}1, {NAME}2" in outcomes[0][0]
    assert "is up already, with 3 hosts" in outcomes[1][1]
    assert [line.split()[1:3] for line in outcomes[2][0].splitlines() if NAME in line] == [
        ["10.9.8.1", "50"],
        ["10.9.8.2", "50"],
        ["10.9.8.3", "50"],
    ]
    assert "hosts=4" in outcomes[3][1] and "is up with 3" in outcomes[3][1]
    assert outcomes[4][0].count("none") == 3
    assert "is down" in outcomes[5][0] and "was not up" in outcomes[6][0]
    assert f"no network '{NAME}' is up" in outcomes[7][1]
    assert left_over() == []


def transfer_s(network, senders, num_bytes):
    """Return the seconds in which host 0 receives `num_bytes` from each of the other hosts."""

    def python(host, program, *arguments, **options):
        line = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
        return subprocess.Popen(network.inside(host, line), **options)

    receiver = python(0, RECEIVE, senders, stdout=subprocess.PIPE, text=True)
    assert receiver.stdout.readline() == "ready\n"
    sending = [python(host, SEND, network.addresses[0], num_bytes) for host in range(1, senders + 1)]
    received, time_s = receiver.communicate(timeout=TIMEOUT_S)[0].split()
    assert [sender.wait() for sender in sending] == [0] * senders and int(received) == senders * num_bytes
    return float(time_s)


@needs_namespaces
def test_a_link_carries_its_rate_and_no_more_both_ways():
    num_bytes, burst = 2_000_000, 600_000  # what two full buckets release at once, plus a margin
    with cluster.network(3, "16mbit", NAME) as network:
        assert network.rate_Bps(1) == 2e6
        before = network.bytes()
        slow_s = transfer_s(network, 1, num_bytes)
        sent = network.bytes()[1].sent - before[1].sent
        received = network.bytes()[0].received - before[0].received
        both_s = transfer_s(network, 2, num_bytes)  # two links send, one receives
        network.set_rate("64mbit")
        fast_s = transfer_s(network, 1, num_bytes)
        network.set_rate("none")
        assert network.rate_Bps(1) is None
        transfer_s(network, 1, num_bytes)
    assert num_bytes <= sent < 1.2 * num_bytes and num_bytes <= received < 1.2 * num_bytes
    # Nothing is faster than the rate; how much slower depends on the load of the cores.
    assert (num_bytes - burst) / 2e6 <= slow_s
    assert (2 * num_bytes - 2 * burst) / 2e6 <= both_s
    assert (num_bytes - burst) / 8e6 <= fast_s
    assert left_over() == []


@needs_namespaces
def test_a_pair_of_hosts_may_be_slower():
    num_bytes, burst = 2_000_000, 600_000
    with cluster.network(3, "64mbit", NAME) as network:
        network.set_pairs("1-2:8mbit")
        open_s = transfer_s(network, 1, num_bytes)
        network.set_pairs("0-1:8mbit")
        assert network.rate_Bps(0) == 8e6  # of the link
        slow_s = transfer_s(network, 1, num_bytes)
        network.set_rate("none")
        network.set_rate("64mbit")
        again_s = transfer_s(network, 1, num_bytes)
        network.set_rate("none")
        with pytest.raises(command.UserError, match="the links have no rate"):
            network.set_pair(0, 1, "8mbit")
    assert (num_bytes - burst) / 1e6 <= slow_s and max(open_s, again_s) < slow_s
    assert left_over() == []


@needs_namespaces
def test_two_hosts_may_be_cut_off_from_each_other():
    with cluster.network(3, "none", NAME) as network:

        def routed(here, there):
            line = network.inside(here, ["ip", "route", "get", network.addresses[there]])
            return subprocess.run(line, capture_output=True).returncode == 0

        network.set_route(0, 1, up=False)
        assert [routed(0, 1), routed(1, 0), routed(0, 2), routed(2, 1)] == [False, False, True, True]
        network.set_route(0, 1, up=True)
        assert routed(0, 1) and routed(1, 0)
    assert left_over() == []


@pytest.mark.parametrize("text", ["0-0:1mbit", "0-3:1mbit", "0-1", "0-1:fast", "0-1:none", "a-b:1mbit"])
def test_pairs_that_cannot_be_are_refused(text):
    with pytest.raises(command.UserError, match="mbit"):
        network_lib.pairs(text, 3)


@needs_namespaces
def test_two_hosts_train_over_their_links(tmp_path):
    output, errors, code = ended(
        launch(
            "run",
            f"--name={NAME}",
            "--hosts=2",
            "--rate=100mbit",
            "--pin",
            "--",
            "--config=configs/lm.py:smoke,steps=4",
            *TINY,
            f"--workdir={tmp_path}",
            XLA_FLAGS="--xla_backend_optimization_level=0",
        )
    )
    assert code == 0, errors
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 4 and json.loads((tmp_path / "config.json").read_text())["workers"] == 2
    links = [line.split() for line in output.splitlines() if line.strip().startswith(NAME)]
    assert [link[:3] for link in links] == [[f"{NAME}0", "10.77.0.1", "100"], [f"{NAME}1", "10.77.0.2", "100"]]
    for *_, sent, received in links:
        assert summary["bytes_per_step_per_worker"] > 0
        assert min(float(sent), float(received)) * 1e6 > 4 * summary["bytes_per_step_per_worker"]
    assert left_over() == []


@needs_namespaces
def test_processes_of_a_host_are_neighbors_and_see_each_other(tmp_path):
    (tmp_path / "tell.py").write_text(
        textwrap.dedent("""
        import os, pathlib, socket, sys
        flags = dict(argument.lstrip("-").partition("=")[::2] for argument in sys.argv[1:])
        host = os.stat("/proc/self/ns/net").st_ino
        own = socket.gethostbyname(socket.gethostname())
        address, cores = flags["coordinator"].partition(":")[0], len(os.sched_getaffinity(0))
        told = " ".join(map(str, [address, flags["num_processes"], own, host, cores]))
        pathlib.Path(flags["out"], flags["process_index"]).write_text(told)
    """)
    )
    _, errors, code = ended(
        launch(
            "run",
            f"--name={NAME}",
            "--hosts=2",
            "--processes_per_host=2",
            "--module=tell",
            "--pin",
            "--",
            f"--out={tmp_path}",
            PYTHONPATH=str(tmp_path),
        )
    )
    assert (code, errors) == (0, "")
    told = [(tmp_path / str(index)).read_text().split() for index in range(4)]
    assert [line[:3] for line in told] == [["10.77.0.1", "4", f"10.77.0.{host}"] for host in (1, 1, 2, 2)]
    assert told[0][3] == told[1][3] != told[2][3] == told[3][3]
    assert {line[4] for line in told} == {"1"}


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_takes_its_network_down(idle, number):
    launcher, notes = idle
    process_ids = ids(notes)
    assert len(left_over()) == 6  # three namespaces, two hosts files, the state file
    launcher.send_signal(number)
    _, errors, code = ended(launcher)
    assert code == 128 + number and f"interrupted by {number.name}" in errors
    assert left_over() == [] and not any(map(alive, process_ids))


@needs_namespaces
def test_a_killed_process_ends_the_others_and_the_network(idle):
    launcher, notes = idle
    process_ids = ids(notes)
    os.kill(process_ids[1], signal.SIGKILL)
    _, errors, code = ended(launcher)
    assert code == 1 and "error: process 1 was killed by SIGKILL, the other processes were ended" in errors
    assert left_over() == [] and not any(map(alive, process_ids))


def watchers(launcher):
    """Ids of the processes that remove a network if its launcher is killed."""
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(child) for child in children if b"remove_orphan" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes()]


@needs_namespaces
def test_the_network_of_a_killed_launcher_is_removed(idle):
    launcher, notes = idle
    process_ids = ids(notes)
    (watcher,) = watchers(launcher)
    launcher.kill()
    _, errors = launcher.communicate(timeout=TIMEOUT_S)  # ends together with its watcher
    wait_for(lambda: not any(map(alive, [watcher, *process_ids])))
    assert left_over() == []
    assert errors == f"removed network '{NAME}': the command that created it was killed\n"


@needs_namespaces
def test_a_network_that_nobody_removed_is_removed_by_the_next_command(idle):
    launcher, notes = idle
    process_ids = ids(notes)
    with pytest.raises(command.UserError, match=f"belongs to process {launcher.pid}"):
        cluster.down(NAME)
    assert len(cluster.find(NAME).hosts) == 2
    os.kill(watchers(launcher)[0], signal.SIGKILL)
    launcher.kill()
    launcher.communicate()
    wait_for(lambda: not any(map(alive, process_ids)))
    assert len(left_over()) == 6
    with cluster.network(1, name=NAME) as network:
        assert network.hosts == [f"{NAME}0"]
    assert left_over() == []


@needs_namespaces
def test_a_network_goes_with_an_error_or_a_signal_and_stays_if_it_was_up():
    with pytest.raises(ZeroDivisionError), cluster.network(2, name=NAME):
        1 / 0
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)), cluster.network(2, name=NAME):
        os.kill(os.getpid(), signal.SIGTERM)
    assert left_over() == []
    cluster.up(3, name=NAME)
    with cluster.network(2, "10mbit", NAME) as network:
        assert network.hosts == [f"{NAME}0", f"{NAME}1"] and network.rate_Bps(0) == 1.25e6
        with subprocess.Popen(network.inside(1, ["sleep", "100"])) as sleeper:
            wait_for(lambda: network_lib.processes_in(network.hosts[1]))
            with pytest.raises(command.UserError, match=f"in use; stop process {sleeper.pid} first"):
                cluster.down(NAME)
            sleeper.kill()
    assert cluster.down(NAME) and left_over() == []


@needs_namespaces
def test_a_namespace_of_somebody_else_is_left_alone():
    subprocess.run(["ip", "netns", "add", f"{NAME}1"], check=True)
    try:
        with pytest.raises(command.UserError, match=f"namespace '{NAME}1' exists already"):
            cluster.up(2, name=NAME)
        assert left_over() == [f"/var/run/netns/{NAME}1"]
    finally:
        subprocess.run(["ip", "netns", "delete", f"{NAME}1"], check=True)
