"""How a process joins the others of a run and gets its devices, and how it leaves after an error.

Under `srun`, `mpirun` and Kubernetes a process finds the others in its environment; launch.local, launch.cluster and processes started
by hand use the flags defined here.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import importlib
import json
import os
import sys
import time
import traceback
from typing import NoReturn

from absl import flags
import jax
from jax.extend import backend

from decjax import config as parts
from decjax.elastic.membership import Excluded, Membership
from decjax.elastic.view import BEATS
from launch import command, elastic, memory, ranks

_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0, or 'auto' to find it (Kubernetes); not needed under srun and mpirun."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes, with --coordinator=HOST:PORT.")
_PROCESS_INDEX = flags.DEFINE_integer("process_index", None, "Index of this process, with --coordinator=HOST:PORT.")


class _OfLauncher(flags.ArgumentParser):
    """The parser of a flag that only a launcher of elastic runs sets."""

    def parse(self, argument: str) -> str:
        if elastic.KEYS not in os.environ:
            command.refuse(
                "only a launcher sets it; write python -m launch.local --num_processes=4 --elastic -- before the options"
            )
        return argument


_ELASTIC = flags.DEFINE(_OfLauncher(), "elastic", None, "HOST:PORT of the coordinator of an elastic run, set by the launcher.")

_STANDBY = flags.DEFINE_boolean(
    "standby", False, "Wait on standard input for a slot assignment; set by the launcher for spare processes."
)

LOST_CONTACT = 3
MAX_CPU_DEVICES = 1024  # per process; JAX takes hours to create many more
HEARTBEAT_TIMEOUT_S = 30


def set_up_devices(workers: int, simulate: bool = False, devices_of_worker: int = 1) -> None:
    """Join the other processes and set the number of CPU devices, before the first use of a device.

    Args:
        workers: over all processes; 0: one device per process, or `parts.SIMULATED_WORKERS` in a single process.
        simulate: whether all workers share one device.
        devices_of_worker: devices per worker.
    """
    rank = ranks.from_environment(os.environ)
    coordinator, processes = _COORDINATOR.value, _NUM_PROCESSES.value or (rank.num_processes if rank else 1)
    devices = workers * devices_of_worker or max(devices_of_worker, processes if processes > 1 else parts.SIMULATED_WORKERS)
    check_flags(coordinator, _NUM_PROCESSES.value, _PROCESS_INDEX.value)
    problem = f"workers={workers} need {devices} devices, and a process has {MAX_CPU_DEVICES} at most"
    fits = simulate or devices <= MAX_CPU_DEVICES * processes
    command.check((fits, problem, "use fewer, or simulate them on one device"))
    if devices == processes:  # Several devices of a process would contend for its allocator.
        memory.keep_freed()
    if coordinator and coordinator != "auto":
        _join(ranks.Rank(coordinator, processes, _PROCESS_INDEX.value or 0))
    elif coordinator == "auto" or (processes > 1 and not (rank and rank.coordinator)):
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S)
    elif rank and processes > 1:
        _join(rank)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 1 if simulate else max(1, devices // processes))
    if rank and not coordinator and not simulate:
        ranks.check_devices(rank, os.environ, jax.local_device_count(), jax.local_devices()[0].platform)


def is_elastic() -> bool:
    """Whether this process is a member of an elastic run."""
    return _ELASTIC.value is not None


def stand_by(prepare: Callable[[], None]) -> None:
    """In a spare process, wait for a slot assignment from the launcher; call `prepare` first unless it would occupy an accelerator."""
    if not _STANDBY.value:
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        prepare()
    if not (line := sys.stdin.readline()):
        sys.exit(0)  # The launcher is gone.
    assignment = json.loads(line)
    os.environ.update(assignment["environment"])
    flags.FLAGS.process_index = assignment["process_index"]


def membership(settings: parts.Elastic) -> Membership:
    """Join an elastic run, waiting until the coordinator is reachable."""
    assert _ELASTIC.value and _PROCESS_INDEX.value is not None
    host, _, port = _ELASTIC.value.rpartition(":")
    while True:
        try:
            return Membership((host, int(port)), _PROCESS_INDEX.value, settings.heartbeat_s, elastic.keys(), settings.encrypt)
        except Excluded:
            raise
        except OSError:  # The host may be cut off. This process ends with its launcher.
            time.sleep(settings.heartbeat_s / BEATS)


def slots() -> int:
    """Return the number of slots of an elastic run."""
    return _NUM_PROCESSES.value or 1


def _join(rank: ranks.Rank) -> None:
    """Connect this process to the others; it listens only at the address at which they reach it."""
    jax.distributed.initialize(
        rank.coordinator,
        rank.num_processes,
        rank.process_index,
        local_device_ids=ranks.device_ids(rank, os.environ),
        cluster_detection_method="deactivate",
        coordinator_bind_address=None if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ else ranks.bind_address(rank.coordinator),
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )
    implementation = getattr(jax.config, "jax_cpu_collectives_implementation", "")
    if implementation == "gloo" and (address := ranks.own_address(rank.coordinator)):
        _gloo_listens_at(address)


def _gloo_listens_at(address: str) -> None:
    """Let gloo, JAX's collectives on CPUs, listen at an address instead of that of the machine's name. JAX has no public option for
    it; if its internals have changed, this does nothing."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import distributed, xla_bridge

        make, client = importlib.import_module("jaxlib._jax").make_gloo_tcp_collectives, xla_bridge.make_cpu_client
        collectives = functools.partial(make, distributed_client=distributed.global_state.client, hostname=address)
        backend.register_backend_factory("cpu", lambda: client(collectives=collectives()), priority=0, fail_quietly=False)


def check_flags(coordinator: str | None, num_processes: int | None, process_index: int | None) -> None:
    """Refuse coordinator flags that do not go together."""
    listens = coordinator not in (None, "", "auto")
    count, index = num_processes or 1, process_index or 0
    address = f"--coordinator={coordinator}: must be HOST:PORT of process 0, PORT ≤ {ranks.LAST_PORT}, or 'auto'"
    needs = "needs --coordinator=HOST:PORT"
    both = "--coordinator=HOST:PORT needs --num_processes and --process_index"
    command.check(
        (coordinator or num_processes is None, f"--num_processes={num_processes} {needs}", "leave it out under srun and mpirun"),
        (coordinator or process_index is None, f"--process_index={process_index} {needs}", "leave it out under srun and mpirun"),
        (not listens or ranks.is_address(str(coordinator)), address, "give each process the same"),
        (not listens or None not in (num_processes, process_index), both, "give each process both"),
        (count >= 1 and num_processes != 0, f"--num_processes={num_processes}: must be at least 1", "give the number of processes"),
        (
            not listens or 0 <= index < count,
            f"--process_index={index}: must be from 0 to {count - 1}, one less than --num_processes={count}",
            "number the processes from 0",
        ),
    )


@contextlib.contextmanager
def leaving_at_once(errors: tuple[type[Exception], ...], again: str) -> Iterator[None]:
    """Context manager that ends one of several processes at once after an error: a normal exit would wait for the others.

    Args:
        errors: user errors, which are reported on one line.
        again: how to continue after contact with another process was lost.
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
        lost = f"error: process {jax.process_index()} lost contact with another; see the output of that one"
        message, code = f"{lost} ({str(error).splitlines()[0][:160]}); {again}", LOST_CONTACT
    elif isinstance(error, (command.UserError, *errors)):
        message, code = f"error: {' '.join(str(error).split())}", command.code_of(error)
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


def _is_lost_contact(error: BaseException) -> bool:
    """Whether JAX reports the loss of another process. Gloo raises ValueErrors if it fails during a call."""
    return isinstance(error, jax.errors.JaxRuntimeError) or (isinstance(error, ValueError) and "Gloo" in str(error))
