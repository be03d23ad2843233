"""What codecs cost: encoding and decoding, against a copy of the same array in memory.

    python -m experiments.bench.codecs --peers=PYTHON
    python -m experiments.bench.codecs --accelerator --side=16384

On one core, in rounds: every codec's encode and decode, each beside a copy of its own, and the straightforward PyTorch
equivalent, if PYTHON is an interpreter that has torch. A number is the median over the rounds of the copy's time ÷ the codec's:
1 is as fast as a copy. Beside it stands how much smaller a message is, and which share of the energy of normal values it loses.

On an accelerator, where a copy runs at the bandwidth of its memory, ratios above 1 are no mistake: a codec reads all values, but
writes few. Arrays have to be large there, or the start of a program is what is timed.
"""

import functools
import math
import os
import statistics
import time

from absl import flags
import jax
import jax.numpy as jnp
import rich.box
import rich.console
import rich.table

from decjax import codecs
from experiments import checks as checks_lib
from experiments.bench.peer import Peer
from experiments.checks import Check
from launch import command, memory

_SIDE = flags.DEFINE_integer("side", 2048, "The array is a matrix of side × side float32, a multiple of 64.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Timed rounds.")
_CODECS = flags.DEFINE_list("codecs", None, "Rows of the table; all by default.")
_ACCELERATOR = flags.DEFINE_bool("accelerator", False, "On JAX's default device, without peers, instead of a core.")
_PEERS = flags.DEFINE_string("peers", None, "An interpreter that has torch, such as .venv-peers/bin/python.")

VARIANTS = {
    "int8 stochastic": functools.partial(codecs.make, "int8", rounding="stochastic"),
    "int4 stochastic": functools.partial(codecs.make, "int4", rounding="stochastic"),
}
ROWS = (*(name for name in codecs.names() if name != "integers"), *VARIANTS)
TOP_K, BLOCK_TOP_K = "jax.lax.top_k, 1 %", "block_topk"
# The least ratios to a copy's speed that are asked for on one core: of encoding and decoding, or of encoding alone.
ASKED = {("int8", "both"): 0.4, ("int4", "both"): 0.25, ("int8 stochastic", "encode"): 0.2, ("int4 stochastic", "encode"): 0.2}


class Row:
    """One codec's programs, compiled and warmed up."""

    def __init__(self, name: str, x: jax.Array):
        codec = VARIANTS[name]() if name in VARIANTS else codecs.make(name)
        matrix = codec.traits.matrix
        self.x = x if matrix else x.ravel()
        shape, key = self.x.shape, jax.random.key(0) if codec.traits.random else None
        state = codec.init(shape, x.dtype)
        self.encode = jax.jit(lambda x: codec.encode(x, state, key))
        self.decode = jax.jit(lambda message: codec.decode(message, shape, x.dtype))
        self.smaller = x.nbytes / codec.num_bytes(shape, x.dtype)
        back = self.decode(self.encode(self.x))
        self.error = float(jnp.square(self.x - back).sum() / jnp.square(self.x).sum())


def seconds(program, *arguments):
    begun = time.perf_counter()
    result = jax.block_until_ready(program(*arguments))
    return time.perf_counter() - begun, result


def on_one_core() -> None:
    """Before any backend starts its threads; peers inherit it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    memory.keep_freed()
    jax.config.update("jax_platforms", "cpu")


def checks(medians: dict[tuple[str, str], float]) -> list[Check]:
    """What is asked for of the rows that ran.

    Args:
        medians: as of `measure`.
    """
    found = [
        Check(f"{name}, {part} ÷ copy", "one core", medians[name, part], least, False)
        for (name, part), least in ASKED.items()
        if (name, part) in medians
    ]
    if (BLOCK_TOP_K, "encode") in medians:
        ratio = medians[BLOCK_TOP_K, "encode"] / medians[TOP_K, "encode"]
        found.append(Check(f"speed of {BLOCK_TOP_K} ÷ {TOP_K}", "one core", ratio, 5.0, False))
    beside = {name: medians[name, "both"] / ratio for (name, part), ratio in medians.items() if part == "peer"}
    if beside:
        slowest = min(beside, key=beside.__getitem__)
        found.append(Check(f"slowest beside PyTorch: {slowest}, speed ÷ PyTorch's", "one core", beside[slowest], 0.5, False))
    return found


def measure(x: jax.Array, rows: dict[str, Row], peer: Peer | None, rounds: int) -> dict[tuple[str, str], float]:
    """(row, "encode" | "decode" | "both" | "peer") -> a copy's time ÷ its own, median of the rounds; of `TOP_K` "encode" alone."""
    names, copy = list(rows), jax.jit(jnp.copy)
    top_k = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x).ravel(), math.ceil(0.01 * x.size)))
    ratios = {(name, part): [] for name in (*names, TOP_K) for part in ("encode", "decode", "both", "peer")}
    for k in range(-1, rounds):  # The first one warms up.
        for i in range(len(names)):
            name = names[(i + k) % len(names)]  # Nobody always goes first.
            row = rows[name]
            copy_s, _ = seconds(copy, row.x)
            encode_s, message = seconds(row.encode, row.x)
            decode_s, _ = seconds(row.decode, message)
            del message
            peer_s = peer and peer.ask("times_s", name=name)
            copy_s = (copy_s + seconds(copy, row.x)[0]) / 2
            if k >= 0:
                ratios[name, "encode"].append(copy_s / encode_s)
                ratios[name, "decode"].append(copy_s / decode_s)
                ratios[name, "both"].append(copy_s / (encode_s + decode_s))
                if peer_s:
                    ratios[name, "peer"].append(copy_s / sum(peer_s))
        if k >= 0:
            ratios[TOP_K, "encode"].append(seconds(copy, x)[0] / seconds(top_k, x)[0])
    return {at: statistics.median(found) for at, found in ratios.items() if found}


def tabulate(title: str, rows: dict[str, Row], medians: dict[tuple[str, str], float], has_peer: bool) -> rich.table.Table:
    """Every row, and `TOP_K` last."""
    table = rich.table.Table(box=rich.box.MARKDOWN, title=title)
    table.add_column("codec")
    theirs = "PyTorch, both" if has_peer else "PyTorch, both (no --peers)"
    for column in ("times smaller", "error share", "encode", "decode", "both", theirs, "ours ÷ PyTorch"):
        table.add_column(column, justify="right")

    def cell(value):
        return "–" if value is None else f"{value:.3g}"

    for name in (*rows, TOP_K):
        row, (both, other) = rows.get(name), (medians.get((name, part)) for part in ("both", "peer"))
        table.add_row(
            name,
            cell(row and row.smaller),
            cell(row and row.error),
            cell(medians.get((name, "encode"))),
            cell(medians.get((name, "decode"))),
            cell(both),
            cell(other),
            cell(both / other if both and other else None),
        )
    return table


def main(argv: list[str]) -> None:
    del argv
    if _SIDE.value < 64 or _SIDE.value % 64:
        raise command.UserError(f"--side={_SIDE.value} must be a positive multiple of 64")
    names = _CODECS.value or ROWS
    if unknown := [name for name in names if name not in ROWS]:
        raise command.UserError(f"--codecs={unknown[0]}: unknown; use some of {', '.join(ROWS)}")
    if _ACCELERATOR.value and _PEERS.value:
        raise command.UserError("--peers with --accelerator: PyTorch is timed on a core; leave one of them out")
    if not _ACCELERATOR.value:
        on_one_core()
    x = jax.random.normal(jax.random.key(1), (_SIDE.value, _SIDE.value))
    peer = Peer(_PEERS.value, "experiments.bench.codecs_torch", str(x.size)) if _PEERS.value else None
    rows = {name: Row(name, x) for name in names}
    medians = measure(x, rows, peer, _ROUNDS.value)
    where = jax.devices()[0].device_kind if _ACCELERATOR.value else "one core"
    title = f"speed of codecs on {where}, as a ratio to a copy of {x.size / 1e6:.1f}M float32"
    console = rich.console.Console(width=140)
    console.print(tabulate(title, rows, medians, peer is not None))
    if not _ACCELERATOR.value:
        console.print(checks_lib.tabulate(checks(medians)))


if __name__ == "__main__":
    command.run(main)
