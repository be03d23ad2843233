"""Computation that overlaps with communication, in the schedules of accelerator compilers for a step.

    python -m experiments.bench.overlap                        # a TPU's, ahead of time
    python -m experiments.bench.overlap --topology=v6e:2x4
    python -m experiments.bench.overlap --attached             # of the GPUs or TPUs of this machine, two or more

Ahead-of-time compilation needs no TPU, but its compiler: `pip install -r tests/requirements-aot.txt`. Nothing is run in either case.

The step is the one that `launch.train` runs: `train.Trainer` of a method and of a dense language model whose layers are
scanned, one worker per chip. A row has the worst message of all phases of a method:

    messages       collectives of a step, as the compiler has combined them
    asynchronous   number of them that the program does not wait for at once
    starts         share of the forward pass before the start
    ends           share of the backward pass before the program waits for the message
    meanwhile      share of the matrix products of both passes between the two
"""
# pyright: reportInvalidTypeForm=false

from collections.abc import Iterator, Sequence
import importlib.util
import os

from absl import flags
import jax
from jax.experimental import topologies

from configs import lm
from decjax import config as parts
from decjax import train
from decjax.contrib import overlap
from decjax.program import hlo
from experiments import script
from launch import command

FLAGS = flags.FLAGS

TOPOLOGY = "v5e:2x4"
# Compiles in seconds; large enough to have more messages than compilers allow in flight by default.
MODEL = dict(vocabulary=256, context=64, width=512, hidden=1024, heads=4, depth=4, dtype="bfloat16")
METHODS = {  # shorthand of configs/lm.py, further fields of `config.method`
    "one-peer exponential": ("topology=one_peer_exponential", {}),
    "one-peer, 16 bits": ("topology=one_peer_exponential,codec=bfloat16", {}),
    "one-peer, 8 bits": ("topology=one_peer_exponential,codec=int8", {}),
    "ring": ("topology=ring", {}),
    "one-peer, adapt then communicate": ("topology=one_peer_exponential,order=atc", {}),
    "one-peer, phase traced": ("topology=one_peer_exponential", dict(static_phase=False)),
    "all-reduce": ("method=allreduce", {}),
    "all-reduce, one step stale": ("method=allreduce,stale", {}),
}
# Use the compiler alone: libtpu needs no hardware, locks none, and writes no logs.
COMPILER_ONLY = dict(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_LOG_DIR="disabled",
)


def described(topology: str, slices: int = 1) -> Sequence[jax.Device]:
    """Return the devices of one or more TPU slices of a topology such as "v5e:2x4", for which programs can be compiled but not run."""
    if not importlib.util.find_spec("libtpu"):
        command.refuse("libtpu, the compiler for TPUs, is not installed", "pip install -r tests/requirements-aot.txt")
    for name, value in COMPILER_ONLY.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")  # Otherwise JAX would look for TPUs.
    try:
        several = {"num_slices": slices} if slices > 1 else {}
        devices = topologies.get_topology_desc(topology, platform="tpu", **several).devices
    except RuntimeError:
        command.refuse(f"topology {topology!r} is unknown to libtpu", f"use one such as {TOPOLOGY} or v6e:2x4")
    if len({tuple(device.coords) for device in devices}) * slices < len(devices):
        command.refuse(f"topology {topology!r} has several devices on a chip", f"use one such as {TOPOLOGY} or v6e:2x4")
    return devices


def attached() -> Sequence[jax.Device]:
    """Return the accelerators of this machine."""
    devices = jax.devices()
    if len(devices) == 1 or devices[0].platform == "cpu":
        problem = f"--attached needs two or more GPUs or TPUs, and JAX finds {len(devices)} {devices[0].platform}"
        command.refuse(problem, f"use --topology={TOPOLOGY}, which needs none")
    return devices


def schedules(argument: str, devices: Sequence[jax.Device], **mixing: bool) -> Iterator[overlap.Overlap]:
    """Yield the compiled schedule of each phase of a shorthand of `configs/lm.py`, with further fields of `config.method`."""
    n = len(devices)
    config = lm.get_config(f"workers={n},{argument}")
    fields = {f"model.{name}": value for name, value in MODEL.items()} | {f"method.{name}": value for name, value in mixing.items()}
    config.update_from_flattened_dict(fields)
    trainer = train.Trainer(parts.resolve(config, n), devices)
    tokens = trainer.setup.task.examples(trainer.spec.batch_per_worker)
    batch = jax.ShapeDtypeStruct((n, *tokens.shape), tokens.dtype, sharding=trainer.workers.stacked)
    num_steps = trainer.setup.topology.period if trainer.setup.topology else 1
    steps = {trainer.method.phase(step): step for step in reversed(range(num_steps))}
    for phase in sorted(steps, key=steps.__getitem__):
        (executable,) = trainer.program(trainer.abstract, batch, steps[phase]).executables
        yield overlap.read(hlo.text(executable), n)


def row(found: Sequence[overlap.Overlap]) -> tuple[str, ...]:
    """Return the cells of a method's row: the worst values over its phases."""
    transfers = [transfer for schedule in found for transfer in schedule.in_flight]
    places = {f" in a {transfer.inside}" for transfer in transfers if transfer.inside}
    asynchronous = sum(transfer.asynchronous for transfer in transfers) // len(found)
    started, finished, hidden = zip(*(transfer[-3:] for transfer in transfers))
    return (
        f"{len(transfers) // len(found)} {transfers[0].collective.kind}{''.join(places)}",
        str(asynchronous),
        *(f"{100 * share:.0f}" for share in (max(started), min(finished), min(hidden))),
    )


def main() -> None:
    devices = attached() if FLAGS.attached else described(FLAGS.topology)
    title = f"{len(devices)} × {devices[0].device_kind}, one worker each"
    table = script.table("method", "messages", "asynchronous", "starts, %", "ends, %", "meanwhile, %", title=title)
    for name, (argument, mixing) in METHODS.items():
        table.add_row(name, *row(list(schedules(argument, devices, **mixing))))
    script.show(table)


if __name__ == "__main__":
    flags.DEFINE_string("topology", TOPOLOGY, "TPU topology to compile for.")
    flags.DEFINE_bool("attached", False, "Compile for the GPUs or TPUs of this machine instead.")
    script.run(main, errors=(train.TrainingError, ValueError))
