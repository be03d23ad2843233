"""Workers of several chips, which divide parameters and batch (fsdp), in the program that a TPU compiler makes of a step.

    python -m experiments.bench.fsdp
    python -m experiments.bench.fsdp --row="8 × 32, 1B"

Programs are compiled ahead of time, without a TPU: `pip install -r tests/requirements-aot.txt`. Nothing is run. The step is the one that
`launch.train` runs with configs/llama.py and overlapped gossip (one-peer exponential, one sequence per chip). Rows are workers × chips of
each, on one TPU slice or two. Without --row the models are small; 1B takes many minutes.

    GiB            memory of a chip
    gossip         messages between workers, as the compiler has combined them
    asynchronous   number of them that the program does not wait for at once
    meanwhile, %   matrix products of both passes between start and end of a message, mean over the bytes of messages
    MB             sent by a chip to other workers
    within         collectives between the chips of a worker in the text of the program, where a loop over layers counts once
    slices         `send` instructions between two slices, which gossip's columns leave out, and other collectives between them
    lines          instructions of the program
    s              to trace and compile it
"""
# pyright: reportInvalidTypeForm=false

from collections.abc import Sequence
import time
from typing import NamedTuple

from absl import flags
import jax

from configs import llama
from decjax import config as parts
from decjax import train
from decjax.contrib import overlap
from decjax.program import hlo
from experiments import script
from experiments.bench.overlap import described

FLAGS = flags.FLAGS


class Row(NamedTuple):
    """N workers of equally many chips of a TPU topology."""

    name: str
    topology: str
    workers: int
    slices: int = 1
    size: str = ""  # of configs/llama.py; empty: `SMALL`


ROWS = (
    Row("2 × 4", "v5e:2x4", 2),
    Row("4 × 4", "v5e:4x4", 4),
    Row("8 × 4", "v5e:4x8", 8),
    Row("8 × 4, v6e", "v6e:4x8", 8),
    Row("2 × 8, two slices", "v5e:2x4", 2, slices=2),
)
LARGE = (Row("8 × 32, 1B", "v5e:16x16", 8, size="1B"), Row("8 × 32, 1B, v6e", "v6e:16x16", 8, size="1B"))
SMALL = dict(vocabulary=4096, context=256, width=1024, hidden=2048, heads=8, kv_heads=8, depth=4, dtype="bfloat16", remat="full")


class Program(NamedTuple):
    """The program of a step.

    Attributes:
        text: HLO.
        num_bytes: memory of a chip.
        compile_s: seconds to trace and compile it.
    """

    text: str
    num_bytes: int
    compile_s: float


def compiled(row: Row) -> tuple[Program, int]:
    """Return (the program of a step of the first phase, the number of chips)."""
    devices = described(row.topology, row.slices)
    chips = len(devices) // row.workers
    size = f",size={row.size}" * bool(row.size)
    config = llama.get_config(f"workers={row.workers},fsdp={chips},batch_size={len(devices)},topology=one_peer_exponential{size}")
    config.data.tokenizer = "bytes"  # The program is the same, and byte-pair encoding takes long to train.
    if not row.size:
        config.model.update(SMALL)
    trainer = train.Trainer(parts.resolve(config, len(devices)), devices)
    tokens, stacked = trainer.setup.task.examples(chips), trainer.workers.stacked
    assert isinstance(stacked, jax.sharding.NamedSharding)
    sharding = jax.sharding.NamedSharding(stacked.mesh, jax.sharding.PartitionSpec(*stacked.spec, stacked.mesh.axis_names[-1]))
    batch = jax.ShapeDtypeStruct((row.workers, *tokens.shape), tokens.dtype, sharding=sharding)
    start_s = time.perf_counter()
    (executable,) = trainer.program(trainer.abstract, batch, 0).executables
    compile_s = time.perf_counter() - start_s
    return Program(hlo.text(executable), hlo.device_bytes(executable), compile_s), len(devices)


def crosses(collective: hlo.Collective, size: int) -> bool:
    """Return whether a collective sends between groups of so many chips, such as workers or slices."""
    return any(len({chip // size for chip in group}) > 1 for group in collective.groups)


def meanwhile(gossip: Sequence[overlap.InFlight]) -> float:
    """Return the share of the matrix products between start and end of a message, mean over bytes."""
    return sum(x.hidden * x.collective.num_bytes for x in gossip) / sum(x.collective.num_bytes for x in gossip)


def transfers(program: Program, chips: int, row: Row) -> tuple[Sequence[overlap.InFlight], Sequence[overlap.InFlight]]:
    """Return (all collectives in the schedule of a program, those between workers)."""
    found = overlap.read(program.text, chips).in_flight
    return found, [transfer for transfer in found if crosses(transfer.collective, chips // row.workers)]


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row."""
    program, chips = compiled(row)
    found, gossip = transfers(program, chips, row)
    module = hlo.Module(program.text)
    sends = [instruction for instruction in module.instructions.values() if instruction.opcode == "send"]
    others = sum(crosses(transfer.collective, chips // row.slices) for transfer in found if transfer not in gossip)
    return (
        row.name,
        f"{program.num_bytes / 2**30:.2f}",
        f"{len(gossip)}",
        f"{sum(transfer.asynchronous for transfer in gossip)}",
        f"{100 * meanwhile(gossip):.0f}" if gossip else "–",
        f"{sum(transfer.collective.num_bytes for transfer in gossip) / 1e6:.1f}",
        f"{len(found) - len(gossip)}",
        f"{len(sends)}, {others}" if row.slices > 1 else "–",
        f"{len(module.instructions)}",
        f"{program.compile_s:.0f}",
    )


def main() -> None:
    rows = script.choose((*ROWS, *LARGE), FLAGS.row) if FLAGS.row else ROWS
    columns = ("workers × chips", "GiB", "gossip", "asynchronous", "meanwhile, %", "MB", "within", "slices", "lines", "s")
    table = script.table(*columns, title="train steps for TPU v5e and v6e, per chip")
    for row in rows:
        table.add_row(*cells(row))
    script.show(table)


if __name__ == "__main__":
    flags.DEFINE_multi_string("row", [], f"Row, of {'; '.join(row.name for row in (*ROWS, *LARGE))}; none: all but those of 1B.")
    script.selects("row")
    script.run(main, errors=(train.TrainingError, ValueError))
