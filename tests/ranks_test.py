"""The environment of srun and mpirun tasks, GPU assignment, and listening addresses."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from launch import command, ranks
from tests import commands
from tests.cluster_test import NAME, needs_namespaces

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 300


def srun(task, node, local, of_nodes="1(x4)", nodes="n[1-4]", gpus=8, **others):
    """Variables of a task started by srun, as in Slurm 22.05."""
    return {
        "SLURM_JOB_ID": "5000",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": str(sum(eval(part.replace("(x", "*(")) for part in of_nodes.split(","))),
        "SLURM_STEP_TASKS_PER_NODE": of_nodes,
        "SLURM_PROCID": str(task),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURMD_NODENAME": f"n{node + 1}",
        "SLURM_GPUS_ON_NODE": str(gpus),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
    } | others


MPI = {
    "OMPI_MCA_orte_hnp_uri": "20480.0;tcp://10.0.0.7,192.168.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


# -- Among the others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment, expected",
    [
        (srun(2, 2, 0), ranks.Rank(f"n1:{61440 + 5000 % 4096}", 4, 2, 1, 0)),
        (srun(2, 2, 0, SLURM_RESTART_COUNT="1"), ranks.Rank(f"n1:{61440 + (5000 + 1009) % 4096}", 4, 2, 1, 0)),
        (srun(11, 1, 3, "8(x4)"), ranks.Rank("n1:62344", 32, 11, 8, 3)),
        (srun(8, 1, 0, "8,2(x2),1"), ranks.Rank("n1:62344", 13, 8, 2, 0)),
        (srun(0, 0, 0, nodes="gpu003,gpu[007-9]", JAX_COORDINATOR_PORT="77"), ranks.Rank("gpu003:77", 4, 0, 1, 0)),
        (srun(0, 0, 0, nodes="gpu[003,7]-ib"), ranks.Rank("gpu003-ib:62344", 4, 0, 1, 0)),
        (srun(0, 0, 0, nodes="r[1-2]n[3-4],x"), ranks.Rank("r1n3:62344", 4, 0, 1, 0)),
        (srun(0, 0, 0, nodes="r[01,3]n[2]b-ib,r[1-2]n[3-4]"), ranks.Rank("r01n2b-ib:62344", 4, 0, 1, 0)),
        (
            srun(1, 1, 0, SLURM_RESTART_COUNT="", SLURM_NODEID="", SLURM_LOCALID="", SLURM_STEP_TASKS_PER_NODE="")
            | {"JAX_COORDINATOR_PORT": ""},
            ranks.Rank("n1:62344", 4, 1, 0, 0),
        ),
        (MPI, ranks.Rank("10.0.0.7:61445", 16, 9, 8, 1)),
        (MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::1,2620::2]:43370"}, ranks.Rank("[fe80::1]:61441", 16, 9, 8, 1)),
        (MPI | srun(0, 0, 0), ranks.Rank("10.0.0.7:61445", 16, 9, 8, 1)),  # mpirun in a Slurm allocation
        ({k: v for k, v in MPI.items() if "uri" not in k}, ranks.Rank("", 16, 9, 8, 1)),  # Open MPI 5
        ({"SLURM_JOB_ID": "1", "PATH": ""}, None),  # a batch script, not srun
    ],
)
def test_a_process_knows_its_place(environment, expected):
    assert ranks.from_environment(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        *(
            srun(0, 0, 0) | {name: value}
            for name in ("SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
            for value in ("", "x")
        ),
        *(
            srun(0, 0, 0, **{name: "-1"})
            for name in ("SLURM_NODEID", "SLURM_LOCALID", "SLURM_RESTART_COUNT", "JAX_COORDINATOR_PORT")
        ),
        *(srun(0, 0, 0, JAX_COORDINATOR_PORT=port) for port in ("0", "65536", "9" * 18)),
        *(srun(0, 0, 0, nodes=nodes) for nodes in ("", "n[", "n[1-4", "n[a]", "[]", ",n1")),
        *(MPI | {name: "²"} for name in MPI if "uri" not in name),
    ],
)
def test_odd_variables_are_one_line(environment):
    with pytest.raises(command.UserError, match=r"^(SLURM|OMPI|JAX)_\w+='.*' must be .*; (start|leave)"):
        ranks.from_environment(environment)


@pytest.mark.parametrize(
    "text, gpus",
    [("8", 8), ("gpu:2", 2), ("gpu:a100:4", 4), ("gpu:a100:4,gpu:v100:2", 6), ("", 0), ("gpu:x", None), ("many", None)],
)
def test_gpus_of_a_node_as_slurm_may_write_them(text, gpus):
    environment = srun(0, 0, 0, SLURM_GPUS_ON_NODE=text)
    task = ranks.from_environment(environment)
    if gpus is None:
        with pytest.raises(command.UserError, match="SLURM_GPUS_ON_NODE='.*' must be a whole number"):
            ranks.check_devices(task, environment, 1, "gpu")
    elif gpus:
        with pytest.raises(command.UserError, match=f"node n1 has {gpus} GPUs, and its 1 task uses 1"):
            ranks.check_devices(task, environment, 1, "gpu")
    else:
        ranks.check_devices(task, environment, 1, "gpu")


def test_the_coordinator_is_the_one_that_jax_finds(monkeypatch):
    from jax._src.clusters import ompi_cluster, slurm_cluster

    for environment, cluster in ((srun(2, 2, 0), slurm_cluster.SlurmCluster), (MPI, ompi_cluster.OmpiCluster)):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert cluster.get_coordinator_address(60, None) == ranks.from_environment(environment).coordinator


# -- Its GPUs ---------------------------------------------------------------------------------------------------------


def shares(environments):
    """GPUs of the tasks of a node: what each sees, and which of them it uses."""
    for environment in environments:
        seen = environment["CUDA_VISIBLE_DEVICES"].split(",")
        chosen = ranks.device_ids(ranks.from_environment(environment), environment)
        yield seen if chosen is None else [seen[index] for index in chosen]


def each(tasks, gpus_seen=None, **others):
    """Environments of the tasks on one of four nodes with eight GPUs."""
    for local in range(tasks):
        seen = {"CUDA_VISIBLE_DEVICES": gpus_seen.format(local)} if gpus_seen else {}
        yield srun(tasks + local, 1, local, f"{tasks}(x4)") | seen | others


@pytest.mark.parametrize(
    "environments",
    [
        each(1),
        each(8),
        each(2),
        each(8, "{}"),  # --gpus-per-task=1
        each(1, ROCR_VISIBLE_DEVICES="0,1,2,3,4,5,6,7"),
    ],
    ids=["a task a node", "a task a GPU", "two tasks", "a GPU bound to each task", "AMD"],
)
def test_the_tasks_of_a_node_share_all_of_its_gpus(environments):
    found = list(shares(environments))
    assert sorted(gpu for gpus in found for gpu in gpus) == [str(gpu) for gpu in range(8)]
    assert len({len(gpus) for gpus in found}) == 1


def test_without_variables_the_gpus_of_the_machine_are_shared(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "_DEVICES", tmp_path)
    bare = {k: v for k, v in srun(5, 1, 1, "4(x4)").items() if k not in ("SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES")}
    assert ranks.device_ids(ranks.from_environment(bare), bare) is None
    for name in (*(f"nvidia{k}" for k in range(8)), "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert ranks.device_ids(ranks.from_environment(bare), bare) == [2, 3]
    assert ranks.device_ids(ranks.from_environment(MPI), MPI) == [1]
    assert ranks.device_ids(ranks.from_environment(bare), bare | {"JAX_PLATFORMS": "cpu"}) is None
    assert ranks.device_ids(ranks.from_environment(bare), bare | {"JAX_LOCAL_DEVICE_IDS": "0"}) is None


def test_gpus_that_cannot_be_divided_are_refused():
    environment = srun(3, 1, 0, "3(x4)")
    with pytest.raises(command.UserError, match="3 tasks on node n2 share 8 GPUs.*--ntasks-per-node=8"):
        ranks.device_ids(ranks.from_environment(environment), environment)


@pytest.mark.parametrize(
    "environment, used, platform, problem",
    [
        (srun(0, 0, 0), 8, "gpu", None),
        (srun(0, 0, 0), 1, "gpu", "node n1 has 8 GPUs, and its 1 task uses 1: let a task see all GPUs of its node"),
        (srun(0, 0, 0, "1", "n1"), 1, "gpu", "its 1 task uses 1"),
        (srun(8, 1, 0, "8(x2)"), 1, "gpu", None),
        (srun(4, 1, 0, "4(x2)"), 1, "gpu", "node n2 has 8 GPUs, and its 4 tasks use 4.*--ntasks-per-node=8"),
        (srun(0, 0, 0), 1, "cpu", "uses 0: install JAX for them.*JAX_PLATFORMS=cpu"),
        (srun(0, 0, 0, JAX_PLATFORMS="cpu"), 1, "cpu", None),
        (srun(0, 0, 0, gpus=0), 1, "cpu", None),
        ({}, 1, "cpu", None),
    ],
)
def test_gpus_that_nobody_uses_are_refused(environment, used, platform, problem):
    if problem is None:
        ranks.check_devices(ranks.from_environment(environment), environment, used, platform)
    else:
        with pytest.raises(command.UserError, match=problem):
            ranks.check_devices(ranks.from_environment(environment), environment, used, platform)


def emulated(environment):
    """A task on a node of eight GPUs: launch.join and jax.distributed are real, the GPUs and the other tasks are not."""
    return commands.run("tests.emulated_gpus", **{"JAX_PLATFORMS": ""} | environment)


@pytest.mark.parametrize("tasks", [1, 8, 2], ids=["1 task × 8 GPUs", "8 tasks × 1 GPU", "2 tasks × 4 GPUs"])
def test_jax_has_all_gpus_of_the_node(tasks):
    done = [emulated(environment) for environment in each(tasks)]
    assert [one.returncode for one in done] == [0] * tasks, done[0].stderr
    assert [one.stdout.split() for one in done] == np.arange(8).reshape(tasks, -1).astype(str).tolist()


@pytest.mark.parametrize(
    "environment, problem",
    [
        (srun(1, 1, 0, CUDA_VISIBLE_DEVICES="3"), "its 1 task uses 1: let a task see all GPUs of its node (--gpus-per-node"),
        (srun(1, 1, 0, JAX_LOCAL_DEVICE_IDS="0,1"), "its 1 task uses 2: let a task see all GPUs"),
        (srun(5, 1, 1, "4(x4)", CUDA_VISIBLE_DEVICES="1"), "its 4 tasks use 4: let a task see all GPUs"),
    ],
    ids=["bound", "JAX_LOCAL_DEVICE_IDS", "tasks that are bound"],
)
def test_a_run_that_sees_fewer_gpus_than_its_node_has_is_refused(environment, problem):
    done = emulated(environment)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"error: node n2 has 8 GPUs, and {problem}")
    assert "or start a task a GPU (--ntasks-per-node=8)" in line


# -- GPUs of a group on one machine -----------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with four GPUs, and JAX's plugin for them."""
    monkeypatch.setattr(ranks, "_DEVICES", tmp_path)
    monkeypatch.setattr(ranks, "_PLUGINS", ("json",))
    for k in range(4):
        (tmp_path / f"nvidia{k}").touch()
    return monkeypatch


def test_each_process_gets_a_gpu_of_its_own(machine):
    def visible(count, **environment):
        return [variables.get("CUDA_VISIBLE_DEVICES") for variables in ranks.gpu_environments(count, environment)]

    assert visible(4) == ["0", "1", "2", "3"] and visible(2) == ["0", "1"]
    assert visible(2, CUDA_VISIBLE_DEVICES="3, 1") == ["3", "1"] and visible(2, JAX_PLATFORMS="cuda,cpu") == ["0", "1"]
    for count, environment in ((5, {}), (3, {"CUDA_VISIBLE_DEVICES": "0,2"})):
        with pytest.raises(command.UserError, match=f"{count} processes for . visible GPUs.*JAX_PLATFORMS=cpu"):
            ranks.gpu_environments(count, environment)


def test_without_gpus_the_processes_run_on_the_cpu_and_jax_platforms_is_the_users(machine):
    assert ranks.gpu_environments(2, {"JAX_PLATFORMS": "cpu"}) == [{}, {}]
    assert ranks.gpu_environments(9, {"JAX_PLATFORMS": "tpu"}) == [{}] * 9
    assert ranks.gpu_environments(2, {"CUDA_VISIBLE_DEVICES": ""}) == [{"JAX_PLATFORMS": "cpu"}] * 2
    machine.setattr(ranks, "_PLUGINS", ("no_such_plugin",))
    assert ranks.gpu_environments(2, {}) == [{"JAX_PLATFORMS": "cpu"}] * 2
    assert ranks.gpu_environments(2, {"JAX_PLATFORMS": "cuda"}) == [{}, {}]


# -- Where it listens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "coordinator, bound, own",
    [
        ("127.0.0.1:4321", "127.0.0.1:4321", "127.0.0.1"),
        ("[::1]:4321", "[::1]:4321", "::1"),
        ("192.0.2.1:4321", None, ...),  # of no machine: process 0 is elsewhere, or behind it
        ("no-such-host.invalid:4321", None, None),
    ],
)
def test_a_process_listens_where_the_others_reach_it(coordinator, bound, own):
    if "::1" in coordinator and not pathlib.Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    assert ranks.bind_address(coordinator) == bound
    assert own is ... or ranks.own_address(coordinator) == own


def test_a_name_that_means_loopback_here_only_is_not_bound(monkeypatch):
    """As Debian's installer writes /etc/hosts; the others reach the machine by another address."""
    of_name = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **options: of_name)
    assert ranks.bind_address("node1:4321") is None and ranks.own_address("node1:4321") is None


# Join the others, exchange values, and print the addresses at which this process listens.
LISTENERS = """
import pathlib, socket, struct, sys
from absl import flags
import jax
from launch import command, join

def addresses():
    inodes = {link.stat().st_ino for link in pathlib.Path("/proc/self/fd").iterdir() if link.is_socket()}
    for name in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[index] for index in (1, 3, 9))
            if state == "0A" and int(inode) in inodes:
                raw = bytes.fromhex(local.partition(":")[0])
                raw = b"".join(raw[index : index + 4][::-1] for index in range(0, len(raw), 4))
                yield socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw).removeprefix("::ffff:")

def main(argv):
    join.set_up_devices(2)
    from jax.experimental import multihost_utils
    assert multihost_utils.process_allgather(jax.process_index()).tolist() == [0, 1]
    pathlib.Path(argv[0], str(jax.process_index())).write_text(" ".join(sorted(set(addresses()))))
    multihost_utils.sync_global_devices("told")

command.run(main)
"""


@pytest.fixture
def listeners(tmp_path):
    (tmp_path / "listeners.py").write_text(LISTENERS)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}

    def listeners(prefix=(), *command_line):
        """Return the addresses at which the processes of a command listen, by index."""
        line = [*prefix, sys.executable, "-m", *command_line, str(tmp_path)]
        done = subprocess.run(line, cwd=ROOT, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [(tmp_path / str(index)).read_text().split() for index in range(2)]

    return listeners


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/net/tcp")
def test_launch_local_listens_on_loopback_only(listeners):
    assert listeners((), "launch.local", "--num_processes=2", "--module=listeners", "--") == [["127.0.0.1"]] * 2


@needs_namespaces
def test_hosts_of_a_network_listen_at_their_own_addresses(listeners):
    """launch.local on one of them uses loopback, although the machine's name resolves to the network there."""
    from launch import cluster

    name = f"{NAME}listen"
    with cluster.network(2, name=name, subnet="10.89.0.0/24") as network:
        inside = network.inside(0, [])
        assert listeners(inside, "launch.local", "--num_processes=2", "--module=listeners", "--") == [["127.0.0.1"]] * 2
    run = ("launch.cluster", "run", "--hosts=2", f"--name={name}", "--subnet=10.89.0.0/24", "--module=listeners", "--")
    assert listeners((), *run) == [["10.89.0.1"], ["10.89.0.2"]]
