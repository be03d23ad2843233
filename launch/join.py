"""One process of several: how it joins the others and gets its devices, and how it leaves them when something goes wrong.

`srun`, `mpirun` and Kubernetes tell a process by themselves where the others are; launch.local, launch.cluster and hand-started
processes use the flags that are defined here, once for all commands that train or measure.
"""

from collections.abc import Iterator
import contextlib
import os
import re
import sys
import traceback
from typing import Any, NoReturn

from absl import flags
import jax

from decjax import config as parts
from launch import command, memory

_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of process 0, or 'auto' to ask the cluster (Kubernetes); under srun and mpirun nothing is needed.",
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes, with --coordinator=HOST:PORT.")
_PROCESS_INDEX = flags.DEFINE_integer("process_index", None, "Index of this process, with --coordinator=HOST:PORT.")

LOST_CONTACT = 3
MAX_CPU_DEVICES = 1024  # of a process; many more take JAX hours to make
HEARTBEAT_TIMEOUT_S = 30


def set_up_devices(workers: int, simulate: bool = False, each: int = 1) -> None:
    """Joins the other processes, and forces the CPU devices of all workers; both must precede the first use of a device.

    Args:
        workers: over all processes; 0: one device per process, or `parts.SIMULATED_WORKERS` in a lone one.
        simulate: whether all workers share one device.
        each: devices of a worker.
    """
    # Slurm's `srun` and Open MPI's `mpirun` tell how many tasks they have started together.
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    coordinator, processes = _COORDINATOR.value, _NUM_PROCESSES.value or tasks
    devices = workers * each or max(each, processes if processes > 1 else parts.SIMULATED_WORKERS)
    check_flags(coordinator, _NUM_PROCESSES.value, _PROCESS_INDEX.value)
    if not simulate and devices > MAX_CPU_DEVICES * processes:
        raise command.UserError(
            f"workers={workers} need {devices} devices, and a process has {MAX_CPU_DEVICES} at most; use fewer, or "
            "simulate them on one device"
        )
    if devices == processes:  # Several devices of a process would wait for each other where its memory is given out.
        memory.keep_freed()
    if coordinator and coordinator != "auto":
        jax.distributed.initialize(
            coordinator,
            processes,
            _PROCESS_INDEX.value,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    elif coordinator == "auto" or processes > 1:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 1 if simulate else max(1, devices // processes))


def resolved(config: Any) -> parts.RunSpec:
    """The spec of a config, on the devices that there are."""
    devices = jax.device_count()
    return parts.resolve(config, devices, devices == 1 and jax.process_count() == 1 and jax.devices()[0].platform != "cpu")


def check_flags(coordinator: str | None, num_processes: int | None, process_index: int | None) -> None:
    """Refuses coordinator flags with which no process finds the others."""
    if not coordinator:
        for name, value in (("num_processes", num_processes), ("process_index", process_index)):
            if value is not None:
                raise command.UserError(f"--{name}={value} needs --coordinator=HOST:PORT; leave it out under srun and mpirun")
    elif coordinator != "auto":
        if not re.fullmatch(r".+:\d+", coordinator):
            raise command.UserError(f"--coordinator={coordinator}: must be HOST:PORT of process 0, or 'auto'")
        if num_processes is None or process_index is None:
            raise command.UserError("--coordinator=HOST:PORT needs --num_processes and --process_index; give each process both")
        if num_processes < 1:
            raise command.UserError(f"--num_processes={num_processes}: must be at least 1; give how many processes are started")
        if not 0 <= process_index < num_processes:
            allowed = f"must be from 0 to {num_processes - 1}, one less than --num_processes={num_processes}"
            raise command.UserError(f"--process_index={process_index}: {allowed}")


@contextlib.contextmanager
def leaving_at_once(errors: tuple[type[Exception], ...], again: str) -> Iterator[None]:
    """Ends one process of several at once when it fails: an orderly exit would wait for the others, which wait for this one.

    Args:
        errors: those that speak to the user and are told in one line.
        again: what to do when contact with another process was lost.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not jax.distributed.is_initialized():
            raise
        _leave(error, errors, again)


def _leave(error: BaseException, errors: tuple[type[Exception], ...], again: str) -> NoReturn:
    message, code = "".join(traceback.format_exception(error)), 1
    if isinstance(error, (command.UserError, *errors)):
        message, code = f"error: {' '.join(str(error).split())}", command.code_of(error)
    elif isinstance(error, jax.errors.JaxRuntimeError):
        lost = f"error: process {jax.process_index()} lost contact with another, whose own output says why"
        message, code = f"{lost} ({str(error).splitlines()[0][:160]}); {again}", LOST_CONTACT
    print(message, file=sys.stderr, flush=True)
    os._exit(code)
