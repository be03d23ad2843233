"""Speed of codecs: encoding and decoding, compared with a copy of the same array in memory.

    python -m experiments.bench.codecs
    python -m experiments.bench.codecs --peers=.venv-peers/bin/python
    python -m experiments.bench.codecs --accelerator --side=16384

On one core, in rounds: every codec's encode and decode, each with a copy, and the straightforward PyTorch equivalent, if --peers is an
interpreter that has torch. A number is the median over the rounds of the copy's time ÷ the codec's: 1 is as fast as a copy. Other columns
have the size of a message and the share of the energy of normal values that it loses.

On an accelerator, where a copy runs at the bandwidth of its memory, ratios above 1 are possible: a codec reads all values, but writes
few. Arrays have to be large there, or the start of a program dominates.
"""

import math
import statistics

from absl import flags
import jax
import jax.numpy as jnp

from decjax import codecs
from experiments import script
from experiments.bench.timing import Peer, on_core, rotated, seconds
from experiments.script import Check
from launch import command

FLAGS = flags.FLAGS

VARIANTS = {f"{name} stochastic": f"{name}(rounding=stochastic)" for name in ("int8", "int4")}
ROWS = (*(name for name in codecs.names() if name != "integers"), *VARIANTS)
TOP_K, BLOCK_TOP_K = "jax.lax.top_k, 1 %", "block_topk"
PARTS = ("encode", "decode", "both", "peer")
# Lower bounds of a codec's speed ÷ a copy's on one core, for encoding and decoding ("both") or for encoding alone.
ASKED = {("int8", "both"): 0.4, ("int4", "both"): 0.25, ("int8 stochastic", "encode"): 0.2, ("int4 stochastic", "encode"): 0.2}


class Row:
    """The compiled programs of a codec, its compression ratio, and the share of energy that it loses."""

    def __init__(self, name: str, x: jax.Array):
        codec = codecs.make(VARIANTS.get(name, name))
        self.x = x if codec.matrix else x.ravel()
        shape, key = self.x.shape, jax.random.key(0) if codec.random else None
        state = codec.init(shape, x.dtype)
        self.encode = jax.jit(lambda x: codec.encode(x, state, key))
        self.decode = jax.jit(lambda message: codec.decode(message, shape, x.dtype))
        self.smaller = x.nbytes / codec.num_bytes(shape, x.dtype)
        back = self.decode(self.encode(self.x))
        self.error = float(jnp.square(self.x - back).sum() / jnp.square(self.x).sum())


def checks(medians: dict[tuple[str, str], float]) -> list[Check]:
    """Return the checks of the rows that ran, from the medians of `measure`."""
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
    """Return speeds relative to a copy (medians over rounds), by (row, one of PARTS); of `TOP_K` "encode" only, with `BLOCK_TOP_K`."""
    names, copy = list(rows), jax.jit(jnp.copy)
    top_k = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x).ravel(), math.ceil(0.01 * x.size)))
    ratios = {(name, part): [] for name in (*names, TOP_K) for part in PARTS}
    for k in range(rounds + 1):  # The first one warms up.
        for name in rotated(names, k):
            row = rows[name]
            copy_s, _ = seconds(copy, row.x)
            encode_s, message = seconds(row.encode, row.x)
            decode_s, _ = seconds(row.decode, message)
            del message
            peer_s = peer and peer.ask("times_s", name=name)
            copy_s = (copy_s + seconds(copy, row.x)[0]) / 2
            ratios[name, "encode"].append(copy_s / encode_s)
            ratios[name, "decode"].append(copy_s / decode_s)
            ratios[name, "both"].append(copy_s / (encode_s + decode_s))
            if peer_s:
                ratios[name, "peer"].append(copy_s / sum(peer_s))
        if BLOCK_TOP_K in rows:
            ratios[TOP_K, "encode"].append(seconds(copy, x)[0] / seconds(top_k, x)[0])
    return {at: statistics.median(found[1:]) for at, found in ratios.items() if found}


def tabulate(title: str, rows: dict[str, Row], medians: dict[tuple[str, str], float], has_peer: bool) -> script.Table:
    """Return every codec's speed, and that of `TOP_K` last."""
    theirs = "PyTorch, both" if has_peer else "PyTorch, both (no --peers)"
    columns = ("codec", "times smaller", "error share", "encode", "decode", "both", theirs, "ours ÷ PyTorch")
    table = script.table(*columns, title=title)
    for name in (*rows, TOP_K):
        row, (encode, decode, both, other) = rows.get(name), (medians.get((name, part)) for part in PARTS)
        beside = both / other if both and other else None
        values = (row and row.smaller, row and row.error, encode, decode, both, other, beside)
        table.add_row(name, *("–" if value is None else f"{value:.3g}" for value in values))
    return table


def main() -> None:
    if FLAGS.side < 64 or FLAGS.side % 64:
        command.refuse(f"--side={FLAGS.side} must be a positive multiple of 64", "use one such as 2048")
    names = FLAGS.codecs or ROWS
    script.check_names("codecs", names, ROWS)
    if FLAGS.accelerator and FLAGS.peers:
        command.refuse("--peers with --accelerator: PyTorch is timed on a core", "leave one of them out")
    if not FLAGS.accelerator:
        on_core()
        jax.config.update("jax_platforms", "cpu")
    x = jax.random.normal(jax.random.key(1), (FLAGS.side, FLAGS.side))
    peer = Peer(FLAGS.peers, "experiments.bench.codecs_torch", str(x.size)) if FLAGS.peers else None
    rows = {name: Row(name, x) for name in names}
    medians = measure(x, rows, peer, FLAGS.rounds)
    where = jax.devices()[0].device_kind if FLAGS.accelerator else "one core"
    title = f"speed of codecs on {where}, as a ratio to a copy of {x.size / 1e6:.1f}M float32"
    script.show(tabulate(title, rows, medians, peer is not None))
    if not FLAGS.accelerator:
        script.show(script.tabulate(checks(medians)))


if __name__ == "__main__":
    flags.DEFINE_integer("side", 2048, "The array is a matrix of side × side float32, a multiple of 64.")
    flags.DEFINE_integer("rounds", 15, "Timed rounds.")
    flags.DEFINE_list("codecs", None, "Rows of the table; none: all.")
    flags.DEFINE_bool("accelerator", False, "On JAX's default device, without peers, instead of a core.")
    flags.DEFINE_string("peers", None, "An interpreter that has torch, such as .venv-peers/bin/python.")
    script.run(main)
