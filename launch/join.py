"""One process of several: how it joins the others and gets its devices, and how it leaves them when something goes wrong.

`srun`, `mpirun` and Kubernetes tell a process by themselves where the others are; launch.local, launch.cluster and hand-started
processes use the flags that are defined here, once for all commands that train or measure.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import json
import os
import re
import sys
import time
import traceback
from typing import Any, NoReturn

from absl import flags
import jax
from jax.extend import backend

from decjax import config as parts
from decjax.elastic.membership import Excluded, Membership
from decjax.elastic.view import BEATS
from launch import command, elastic, memory
from launch import place as places

_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of process 0, or 'auto' to ask the cluster (Kubernetes); under srun and mpirun nothing is needed.",
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes, with --coordinator=HOST:PORT.")
_PROCESS_INDEX = flags.DEFINE_integer("process_index", None, "Index of this process, with --coordinator=HOST:PORT.")

_ELASTIC = flags.DEFINE_string("elastic", None, "HOST:PORT of the coordinator of an elastic run, which its launcher gives.")

_STANDBY = flags.DEFINE_boolean("standby", False, "Wait on standard input for whose place to take; of a launcher's spare process.")

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
    place = places.told(os.environ)
    coordinator, processes = _COORDINATOR.value, _NUM_PROCESSES.value or (place.num_processes if place else 1)
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
        _join(places.Place(coordinator, processes, _PROCESS_INDEX.value or 0))
    elif coordinator == "auto" or (processes > 1 and not (place and place.coordinator)):
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S)
    elif place and processes > 1:
        _join(place)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 1 if simulate else max(1, devices // processes))
    if place and not coordinator and not simulate:
        places.check_devices(place, os.environ, jax.local_device_count(), jax.local_devices()[0].platform)


def is_elastic() -> bool:
    """Whether this process is a member of an elastic run."""
    return _ELASTIC.value is not None


def stand_by(prepare: Callable[[], None]) -> None:
    """Waits, if this process is a spare one, until its launcher tells it whose place to take. Meanwhile it prepares itself, unless
    that would occupy an accelerator."""
    if not _STANDBY.value:
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        prepare()
    if not (line := sys.stdin.readline()):
        sys.exit(0)  # The launcher is gone.
    told = json.loads(line)
    os.environ.update(told["environment"])
    flags.FLAGS.process_index = told["process_index"]


def membership(how: parts.Elastic) -> Membership:
    """This process's part in an elastic run; it waits until its host reaches the coordinator."""
    assert _ELASTIC.value and _PROCESS_INDEX.value is not None
    host, _, port = _ELASTIC.value.rpartition(":")
    while True:
        try:
            return Membership((host, int(port)), _PROCESS_INDEX.value, how.heartbeat_s, elastic.keys(), how.encrypt)
        except Excluded:
            raise
        except OSError:  # The host may be cut off for a while; the launcher's end is ours.
            time.sleep(how.heartbeat_s / BEATS)


def slots() -> int:
    """How many processes an elastic run has."""
    return _NUM_PROCESSES.value or 1


def _join(place: places.Place) -> None:
    """Connects this process to the others; it listens at the address that they reach it by, and nowhere else."""
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_index,
        local_device_ids=places.device_ids(place, os.environ),
        cluster_detection_method="deactivate",
        coordinator_bind_address=None if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ else places.bind_address(place.coordinator),
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )
    implementation = getattr(jax.config, "jax_cpu_collectives_implementation", "")
    if implementation == "gloo" and (address := places.own_address(place.coordinator)):
        _gloo_listens_at(address)


def _gloo_listens_at(address: str) -> None:
    """Lets gloo, through which CPU devices of several processes talk, listen at an address; by itself it listens where the machine's
    name leads. JAX has no public option for it: where a later one has its client made otherwise, gloo stays as it is."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        make, client = _jax.make_gloo_tcp_collectives, xla_bridge.make_cpu_client
        collectives = functools.partial(make, distributed_client=distributed.global_state.client, hostname=address)
        backend.register_backend_factory("cpu", lambda: client(collectives=collectives()), priority=0, fail_quietly=False)


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
    if missing := command.no_devices(error):
        message, code = f"error: {missing}", command.USER_ERROR
    elif _is_lost_contact(error):
        lost = f"error: process {jax.process_index()} lost contact with another, whose own output says why"
        message, code = f"{lost} ({str(error).splitlines()[0][:160]}); {again}", LOST_CONTACT
    elif isinstance(error, (command.UserError, *errors)):
        message, code = f"error: {' '.join(str(error).split())}", command.code_of(error)
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


def _is_lost_contact(error: BaseException) -> bool:
    """Whether JAX reports that another process does not answer; what Gloo fails of is a ValueError if it fails while it is called."""
    return isinstance(error, jax.errors.JaxRuntimeError) or (isinstance(error, ValueError) and "Gloo" in str(error))
