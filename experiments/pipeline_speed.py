"""What compressed messages between stages gain on a slow link: one table, from one interleaved run, beside the cost model.

    python -m experiments.pipeline_speed --out=runs/pipeline_speed.json

Four hosts in a box (launch.cluster: root and iproute2) are the four stages of one pipeline; a transformer of width 32 with a layer
a host, 1F1B, 128 sequences of 64 tokens in a microbatch, float32. It is so narrow that hosts that share two cores seldom compute at
the same time: a message travels several times as long as its microbatch is computed. Rows take turns; a figure is the median
over the rounds of the mean time of an iteration.

The model is told what was measured without pipelines, or without the slow link: α and β of exchanges between the hosts
(launch.calibrate at the rate in question), and how long each row's iteration takes on free links. The latter is the time of all
passes, on cores that hosts share, which it divides among stages and between F and B as their operations are; what it takes longer
with coded messages is their codecs' time. Nothing is fitted to the times that are predicted.
"""

from collections.abc import Callable
import dataclasses
import json
import pathlib
from typing import Any

from absl import flags
import rich.box
import rich.console
import rich.table

from decjax import costmodel
from decjax.costmodel.transformer import low_rank_ratio
from experiments import box_runtime, speedup
from experiments.bench.box import systems
from experiments.bench.box.group import Failed
from launch import cluster, command

STAGES, SIZE = 4, 128  # SIZE: sequences of a microbatch
STEPS = 2  # of a visit at least
MODEL = dict(vocabulary=256, context=64, width=32, hidden=128, heads=2, depth=STAGES)
DENSE, RANK = "as they are", 4
LOW_RANK = f"low_rank(rank={RANK})"
ROWS = {  # name -> codec of gradients, of activations, which gradients
    DENSE: ("", "", "epilogue"),
    "gradients of the cool-down, low rank": (LOW_RANK, "", "epilogue"),
    "all gradients, low rank": (LOW_RANK, "", "always"),
    "all gradients, int8": ("int8", "", "always"),
    "gradients and activations, int8": ("int8", "int8", "always"),
}
# Messages are a microbatch's activations, one row a token; int8 has a scale for each block of 256 values.
RATIOS = {LOW_RANK: 1 / low_rank_ratio(SIZE * MODEL["context"], MODEL["width"], RANK), "int8": 1 / 4 + 1 / 256}
MESSAGE_BYTES = 4 * SIZE * MODEL["context"] * MODEL["width"]
FREE_BPS = 1e15  # of links that are not limited


def row(name: str, microbatches: int) -> systems.Row:
    """A pipeline of four hosts."""
    backward, forward, when = ROWS[name]
    argument = ",".join(
        filter(
            None,
            (
                f"method=local,stages={STAGES},schedule=1f1b,microbatches={microbatches}",
                backward and f"backward={backward}",
                forward and f"forward={forward}",
            ),
        )
    )
    fields: dict[str, Any] = {"boundary.when": when} if backward else {}
    return systems.decjax(name, argument, batch_size=SIZE * microbatches, model=MODEL, **fields)


def boundary(codec: str, when: str) -> costmodel.Boundary:
    """As the cost model knows it."""
    return costmodel.Boundary(RATIOS[codec], codec, when)


def iteration_s(name: str, microbatches: int, link: costmodel.Link, compute_s: float, codec_s: float) -> float:
    """Seconds of an iteration, as the model has it.

    Args:
        name: of the row.
        microbatches: M.
        link: of every host.
        compute_s: of all passes of one microbatch.
        codec_s: of one message, at both ends together.
    """
    backward, forward, when = ROWS[name]
    layers, width = MODEL["depth"], MODEL["width"]
    model = costmodel.Transformer(
        layers, width, MODEL["heads"], MODEL["vocabulary"], MODEL["context"], batch_size=SIZE * microbatches, hidden=MODEL["hidden"]
    )
    layout = costmodel.Layout(stages=STAGES, microbatches=microbatches)
    counted = costmodel.work(model, layout, 1.0)
    scale_s = compute_s / (sum(counted.forward_s) + sum(counted.backward_s))
    load = costmodel.Work(
        tuple(scale_s * seconds for seconds in counted.forward_s),
        tuple(scale_s * seconds for seconds in counted.backward_s),
        counted.boundary_bytes,
        0.0,
        (0.0,) * STAGES,
        (0.0,) * STAGES,
        (0.0,) * STAGES,
    )
    box = costmodel.Cluster("box", STAGES, 1, link, link, codec_Bps=counted.boundary_bytes / codec_s if codec_s else None)
    traffic = costmodel.Traffic(
        costmodel.no_communication(),
        backward=boundary(backward, when) if backward else costmodel.Boundary(),
        forward=boundary(forward, "always") if forward else costmodel.Boundary(),
    )
    return costmodel.predict_layout(box, load, layout, traffic).time_s


def inverse(function: Callable[[float], float], value: float, high: float) -> float:
    """Where a growing function, linear in parts, takes a value: between 0 and `high`, or the nearer end."""
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return high


def predict(microbatches: int, free_s: dict[str, float], link: costmodel.Link) -> dict[str, float]:
    """Seconds of an iteration of every row.

    Args:
        microbatches: M.
        free_s: row -> seconds of an iteration on free links.
        link: of every host, as calibrated.
    """
    free = costmodel.Link(0.0, FREE_BPS)
    compute_s = free_s[DENSE] / iteration_s(DENSE, microbatches, free, 1.0, 0.0)
    codec_s = {
        name: inverse(lambda s, name=name: iteration_s(name, microbatches, free, compute_s, s), seconds, seconds)
        for name, seconds in free_s.items()
    }
    return {name: iteration_s(name, microbatches, link, compute_s, codec_s[name]) for name in free_s}


def tabulate(measured: speedup.Measured, predicted_s: dict[str, float]) -> rich.table.Table:
    """All rows: time, gain, bytes, and what the model said."""
    table = rich.table.Table(box=rich.box.MARKDOWN)
    for column in ("messages between stages", "ms per iteration", "speed-up", "MB out of a host", "predicted", "error"):
        table.add_column(column, justify="left" if column.startswith("messages") else "right")
    for name, told in predicted_s.items():
        step_s = measured.time_s(name)
        table.add_row(
            name,
            f"{step_s * 1e3:.0f}",
            f"{measured.time_s(DENSE) / step_s:.2f}",
            f"{measured.sent_bytes[name] / 1e6:.2f}",
            f"{told * 1e3:.0f}",
            f"{100 * (told / step_s - 1):+.1f} %",
        )
    return table


def main(argv: list[str]) -> None:
    chosen = flags.FLAGS
    if argv:
        command.fail(f"unexpected argument {argv[0]!r}; options start with --")
    M = chosen.microbatches
    rows = [row(name, M) for name in ROWS]
    with cluster.network(hosts=STAGES, rate=chosen.rate) as network, systems.Box(network) as box:
        profile, _ = box_runtime.calibrate(network, chosen.rate, chosen.seconds, model=MODEL, bucket_bytes=MESSAGE_BYTES)
        network.set_rate(cluster.UNLIMITED)
        for each in rows:
            box.prepare(each)
            if each.name in box.refused:
                raise Failed(f"{each.name}: {box.refused[each.name]}")
            print(f"{each.name}: ready", flush=True)
        free = speedup.measure(box, rows, cluster.UNLIMITED, chosen.rounds, steps=lambda _: 3 * STEPS)
        measured = speedup.measure(box, rows, chosen.rate, chosen.rounds, steps=lambda _: STEPS)
    free_s, link = {name: free.time_s(name) for name in ROWS}, profile.inter
    predicted_s = predict(M, free_s, link)
    console = rich.console.Console(width=140, highlight=False)
    console.print(tabulate(measured, predicted_s))
    console.print(
        f"{M} microbatches; {link.bandwidth_Bps * 8 / 1e6:.1f} Mbit/s and {link.latency_s * 1e3:.1f} ms by calibration; "
        f"an iteration on free links takes {free_s[DENSE] * 1e3:.0f} ms"
    )
    if chosen.out:
        found = {"free_s": free_s, "predicted_s": predicted_s, "link": dataclasses.asdict(link), "measured": measured._asdict()}
        pathlib.Path(chosen.out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    # Defined here, because tests import several experiments.
    flags.DEFINE_string("rate", "50mbit", "Of every link, both ways.")
    flags.DEFINE_integer("microbatches", 8, "M.", lower_bound=STAGES)
    flags.DEFINE_float("seconds", 40.0, "About how long to calibrate.", lower_bound=1.0)
    flags.DEFINE_integer("rounds", 3, "Visits of each row.", lower_bound=1)
    flags.DEFINE_string("out", None, "JSON of everything measured.")
    command.run(main, errors=(cluster.ClusterError, Failed, OSError))
