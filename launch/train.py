"""Trains a config: python -m launch.train --config=configs/lm.py --workdir=runs/lm"""

import os
import shlex
import sys
import traceback
from typing import NoReturn

from absl import flags
import jax
from ml_collections import config_flags

from decjax import train
from launch import command

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with an optional shorthand after a colon: configs/lm.py:workers=4,smoke.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: config, metrics, checkpoints, summary.")
_RESUME_FROM = flags.DEFINE_string(
    "resume_from", None, "Start from the newest checkpoint of another run, with any number of workers.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0, or 'auto' to ask the cluster (Kubernetes); under srun and mpirun nothing is needed.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes, with --coordinator=HOST:PORT.")
_PROCESS_INDEX = flags.DEFINE_integer("process_index", None, "Index of this process, with --coordinator=HOST:PORT.")
flags.mark_flags_as_required(["config", "workdir"])

LOST_CONTACT = 3
HEARTBEAT_TIMEOUT_S = 30


def started_tasks() -> int:
    """Processes that Slurm's `srun` or Open MPI's `mpirun` started with this one; 1 without them."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)


def set_up_devices(config) -> None:
    """Joins the other processes, and forces one CPU device per worker; both must precede the first use of a device."""
    coordinator, processes = _COORDINATOR.value, _NUM_PROCESSES.value or started_tasks()
    if coordinator and coordinator != "auto":
        if _NUM_PROCESSES.value is None or _PROCESS_INDEX.value is None:
            command.fail("--coordinator=HOST:PORT needs --num_processes and --process_index")
        jax.distributed.initialize(coordinator, processes, _PROCESS_INDEX.value, cluster_detection_method="deactivate",
                                   heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S)
    elif coordinator == "auto" or processes > 1:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S)
    workers = config.workers or (processes if processes > 1 else train.SIMULATED_WORKERS)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 1 if config.simulate else max(1, workers // processes))


def main(argv: list[str]) -> int:
    if argv:
        command.fail(f"unexpected argument {argv[0]!r}; options start with --")
    try:
        set_up_devices(_CONFIG.value)
        run = train.Run(train.build(_CONFIG.value), _WORKDIR.value, _RESUME_FROM.value)
        outcome = run.train()
    except (Exception, KeyboardInterrupt) as error:
        if not jax.distributed.is_initialized():
            raise
        leave(error)
    if jax.process_index() == 0:
        report(outcome)
    return 128 + outcome.signal if outcome.signal else 0


def leave(error: BaseException) -> NoReturn:
    """Ends one process of several at once: an orderly exit would wait for the others, which wait for this one."""
    if isinstance(error, train.TrainingError):
        message, code = f"error: {' '.join(str(error).split())}", command.USER_ERROR
    elif isinstance(error, jax.errors.JaxRuntimeError):
        message, code = (f"error: process {jax.process_index()} lost contact with another, whose own output says why "
                         f"({str(error).splitlines()[0][:160]}); run the same command to continue from the last checkpoint",
                         LOST_CONTACT)
    else:
        message, code = "".join(traceback.format_exception(error)), 1
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


def report(outcome: train.Outcome) -> None:
    """Prints how the run ended."""
    if outcome.summary and outcome.sample is None:
        print(f"the run in {_WORKDIR.value} is finished already, after {outcome.step} steps; another --workdir starts a new run")
    if outcome.signal:
        print(f"interrupted by {outcome.signal.name}; saved step {outcome.step} in {_WORKDIR.value}")
        if command.LAUNCHER not in os.environ:  # Otherwise the launcher knows the command that continues.
            print(f"To continue:\n  {shlex.join(['python', '-m', 'launch.train', *sys.argv[1:]])}")
        return
    summary = outcome.summary
    print(f"averaged model after {summary['steps']} steps and {summary['time_s']:.0f} s: "
          f"{summary['eval_loss']:.4f} nats/byte on validation text "
          f"(a bigram model's limit: {summary['corpus_order1_entropy']:.2f}); "
          f"single workers {summary['local_eval_loss_min']:.4f} to {summary['local_eval_loss_max']:.4f}; "
          f"{summary['bytes_per_step_per_worker'] / 1e6:.2f} MB sent per worker and step")
    if outcome.sample is not None:
        print(f"--- text by the averaged model, after 32 bytes of validation text ---\n{outcome.sample}\n---")


if __name__ == "__main__":
    command.run(main, errors=(train.TrainingError, OSError))
