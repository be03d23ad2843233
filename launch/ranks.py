"""Rank of a process in its run, as srun or mpirun set it, its GPUs, and the addresses at which it listens.

Nothing here starts JAX; `launch.join` does.
"""

from collections.abc import Mapping
import contextlib
import importlib.util
import ipaddress
import os
import pathlib
import re
import socket
from typing import NamedTuple

from launch import command

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_OF_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
_RESTART = 1009  # ports from one start of a job to the next
_PORTS = 2**12  # the last ports, of which jax.distributed takes that of the job
LAST_PORT = 2**16 - 1
_DEVICES = pathlib.Path("/dev")
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # without one of them JAX uses no NVIDIA GPU
_GPU_PLATFORMS = {"cuda", "gpu"}  # in JAX_PLATFORMS


class Rank(NamedTuple):
    """One process of a run.

    Attributes:
        coordinator: HOST:PORT of process 0; "": only JAX can find it.
        num_processes, process_index: of the run.
        on_node: processes of the run on the same node; 0: unknown.
        local_index: index among them.
    """

    coordinator: str
    num_processes: int
    process_index: int
    on_node: int = 0
    local_index: int = 0


def from_environment(environment: Mapping[str, str]) -> Rank | None:
    """Return the rank that srun or mpirun has set; None if neither started this process.

    The coordinators are those of jax.distributed, except after a restart of a job.
    """
    if "OMPI_COMM_WORLD_SIZE" in environment:  # First: in an allocation of Slurm, what mpirun starts has both.
        return _of_open_mpi(environment)
    return _of_slurm(environment) if all(name in environment for name in _OF_SLURM) else None


def _of_open_mpi(environment: Mapping[str, str]) -> Rank:
    # For example 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, where mpirun runs. Open MPI 5 has no such variable.
    match = re.match(r"(\d+)\.\d+;(?:tcp://([^,:]+)|tcp6://\[([^],]+))", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    return Rank(
        _address(match[2] or f"[{match[3]}]", int(match[1]) // 2**12, environment) if match else "",
        _number(environment, "OMPI_COMM_WORLD_SIZE"),
        _number(environment, "OMPI_COMM_WORLD_RANK"),
        _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 0),
        _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
    )


def _of_slurm(environment: Mapping[str, str]) -> Rank:
    # Tasks of each node, as 8(x3),4.
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""), re.ASCII)
    of_nodes = [int(tasks) for tasks, times in runs for _ in range(int(times or 1))]
    node = _number(environment, "SLURM_NODEID", 0)
    # Tasks of a lost node may outlive it; they must not reach the coordinator of the restarted job.
    job = _number(environment, "SLURM_JOB_ID") + _RESTART * _number(environment, "SLURM_RESTART_COUNT", 0)
    return Rank(
        _address(_first_node(environment["SLURM_STEP_NODELIST"]), job, environment),
        _number(environment, "SLURM_STEP_NUM_TASKS"),
        _number(environment, "SLURM_PROCID"),
        of_nodes[node] if node < len(of_nodes) else 0,
        _number(environment, "SLURM_LOCALID", 0),
    )


def _first_node(nodes: str) -> str:
    """Return the first of node001,node002 or node[001-004,007] or rack[1-2]node[3-4]-ib."""
    first = re.match(r"(?:[^,[\]]|\[\d[\d,-]*\])+", nodes, re.ASCII)
    if not first or (first.end() < len(nodes) and nodes[first.end()] != ","):
        command.refuse(f"SLURM_STEP_NODELIST={nodes!r} must be names of nodes, as n3,n[7-9]; start the tasks with srun")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])


def _number(environment: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    """Return the value of a whole-number variable; `otherwise` if it is missing or empty."""
    text = environment.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        command.refuse(f"{name}={text!r} must be a whole number; leave it as srun or mpirun sets it, or unset it")
    return int(text)


def _gpus_of_node(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs of the job on this node, from 8 or gpu:8 or gpu:a100:4,gpu:v100:4; 0: unknown."""
    parts = environment.get("SLURM_GPUS_ON_NODE", "").split(",")
    return sum(_number({"SLURM_GPUS_ON_NODE": part.rpartition(":")[2]}, "SLURM_GPUS_ON_NODE", 0) for part in parts)


def _address(host: str, job: int, environment: Mapping[str, str]) -> str:
    port = _number(environment, "JAX_COORDINATOR_PORT", LAST_PORT + 1 - _PORTS + job % _PORTS)
    if not 1 <= port <= LAST_PORT:
        command.refuse(f"JAX_COORDINATOR_PORT='{port}' must be a port from 1 to {LAST_PORT}; leave it unset, or choose another")
    return f"{host}:{port}"


def is_address(text: str) -> bool:
    """Return whether a text is HOST:PORT; processes would wait minutes for an invalid address."""
    match = re.fullmatch(r"\S+:([0-9]{1,5})", text)
    return bool(match) and 1 <= int(match[1]) <= LAST_PORT


# -- GPUs -------------------------------------------------------------------------------------------------------------


def device_ids(rank: Rank, environment: Mapping[str, str]) -> list[int] | None:
    """Return the visible GPUs that belong to this process among those of its node; None: all.

    Raises:
        UserError: if the node's GPUs cannot be divided evenly.
    """
    if rank.on_node < 2 or _is_on_cpu(environment) or environment.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    here = count_gpus()
    seen = next((_count(environment[name]) for name in _VISIBLE if name in environment), here)
    if seen == 0 or seen < (_gpus_of_node(environment) or here):
        return None  # Each task sees only its own.
    each, rest = divmod(seen, rank.on_node)
    if rest:
        command.refuse(
            f"{rank.on_node} tasks on {_node(environment)} share {seen} GPUs, which must be a multiple of the tasks; "
            f"start a task a node (--ntasks-per-node=1) or a task a GPU (--ntasks-per-node={seen})"
        )
    return list(range(rank.local_index * each, (rank.local_index + 1) * each))


def check_devices(rank: Rank | None, environment: Mapping[str, str], used: int, platform: str) -> None:
    """Refuse a process that uses fewer GPUs than its share of the job's GPUs on its node.

    Args:
        rank: of the process.
        environment: of the process.
        used: its devices.
        platform: platform of the devices in JAX.
    """
    have, tasks = _gpus_of_node(environment), rank.on_node if rank else 0
    used = 0 if platform == "cpu" else used
    if tasks == 0 or used * tasks >= have or _is_on_cpu(environment):
        return
    if used == 0:
        fix = "install JAX for them, as with make train JAX=cuda13, or set JAX_PLATFORMS=cpu to leave them idle"
    else:
        fix = (
            "let a task see all GPUs of its node (--gpus-per-node, without --gpus-per-task, --gpu-bind or JAX_LOCAL_DEVICE_IDS), "
            f"or start a task a GPU (--ntasks-per-node={have})"
        )
    command.refuse(
        f"{_node(environment)} has {have} GPUs, and its {tasks} {'tasks use' if tasks > 1 else 'task uses'} {used * tasks}: {fix}"
    )


def _is_on_cpu(environment: Mapping[str, str]) -> bool:
    return environment.get("JAX_PLATFORMS") == "cpu"


def _count(visible: str) -> int:
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])


def _node(environment: Mapping[str, str]) -> str:
    return f"node {environment.get('SLURMD_NODENAME') or socket.gethostname()}"


def gpu_environments(count: int, environment: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Return variables that give process i of `count` the i-th visible GPU, or run all on the CPU if there is none.

    JAX_PLATFORMS is kept if the user has set it.

    Raises:
        UserError: if there are GPUs, but fewer than processes.
    """
    platforms = {name.strip() for name in environment.get("JAX_PLATFORMS", "").split(",")} - {""}
    gpus = [] if platforms and not platforms & _GPU_PLATFORMS else _gpus(environment)
    if not gpus:
        return [{} if platforms else {"JAX_PLATFORMS": "cpu"}] * count
    if len(gpus) < count:
        command.refuse(
            f"{count} processes for {len(gpus)} visible GPU{'s' * (len(gpus) > 1)}: each process needs one of its own; "
            f"start {len(gpus)}, or set JAX_PLATFORMS=cpu to run on the CPU"
        )
    return [{"CUDA_VISIBLE_DEVICES": name} for name in gpus[:count]]


def _gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the NVIDIA GPUs that JAX can use, as in CUDA_VISIBLE_DEVICES."""
    if not any(importlib.util.find_spec(plugin) for plugin in _PLUGINS):
        return []
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in (part.strip() for part in chosen.split(",")) if name not in ("", "-1")]
    return [str(index) for index in range(count_gpus())]


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine, by the files of their driver."""
    return len([*_DEVICES.glob("nvidia[0-9]*")])


# -- Addresses -------------------------------------------------------------------------------------------------------


def bind_address(coordinator: str) -> str | None:
    """Return the address at which process 0 listens as the coordinator; None: all addresses of the machine.

    None is for a name that leads to a service in front of it, or to loopback on this machine only.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        found = ipaddress.ip_address(address[0])
        if found.is_loopback and not _is_written_loopback(host):
            return None
        with socket.socket(family) as probe:
            probe.bind((str(found), 0))
        return f"[{found}]:{port}" if found.version == 6 else f"{found}:{port}"
    return None


def own_address(coordinator: str) -> str | None:
    """Return the address from which this machine reaches the coordinator; None if unknown."""
    host = coordinator.rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # Sends nothing.
            own = probe.getsockname()[0]
        return None if ipaddress.ip_address(own).is_loopback and not _is_written_loopback(host) else own
    return None


def _is_written_loopback(host: str) -> bool:
    """Return whether a host is written as loopback, not only resolved to it on this machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
