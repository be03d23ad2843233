"""What compressed messages between stages gain on a slow link: one table, from one interleaved run, beside the runtime model.

    python -m experiments.pipeline_speed --out=runs/pipeline_speed.json

Four hosts in a box (launch.cluster: root and iproute2) are the four stages of one pipeline; a transformer of width 128 with a layer a
host, 1F1B, 16 sequences of 128 tokens in a microbatch, float32. It is so narrow that hosts that share two cores seldom compute at
the same time: a message travels several times as long as its microbatch is computed. Rows take turns; a figure is the median
over the rounds of the mean time of an iteration.

The model is told what was measured without the slow link and without a pipeline's overlap: an iteration of a single microbatch
on free links, where one stage works at a time. That is the time of all passes together, which it divides among stages and
between F and B as their operations are; what it takes longer with coded messages is their codecs' time. The link is the throughput
of one TCP connection. Nothing is fitted to the times that are predicted.
"""

import json
import pathlib

from absl import flags
import rich.box
import rich.console
import rich.table

from decjax import runtime
from decjax.runtime.transformer import low_rank_ratio
from experiments import speedup
from experiments.bench.box import systems
from experiments.bench.box.group import Failed
from launch import cluster
from launch import command

STAGES, SIZE = 4, 16  # SIZE: sequences of a microbatch
STEPS = 2  # of a visit at least
MODEL = dict(vocabulary=256, context=128, width=128, hidden=512, heads=4, depth=STAGES)
DENSE, LOW_RANK = "as they are", "low_rank(rank=16)"
ROWS = {  # name -> codec of gradients, of activations, which gradients
    DENSE: ("", "", "epilogue"),
    "gradients of the cool-down, low rank": (LOW_RANK, "", "epilogue"),
    "all gradients, low rank": (LOW_RANK, "", "always"),
    "all gradients, int8": ("int8", "", "always"),
    "gradients and activations, int8": ("int8", "int8", "always"),
}
# Messages are a microbatch's activations, one row a token; int8 has a scale for each block of 256 values.
RATIOS = {LOW_RANK: 1 / low_rank_ratio(SIZE * MODEL["context"], MODEL["width"], 16), "int8": 1 / 4 + 1 / 256}
ALONE = "one microbatch, "


def row(name: str, microbatches: int, prefix: str = "") -> systems.Row:
    """A pipeline of four hosts."""
    backward, forward, when = ROWS[name]
    argument = ",".join(filter(None, (
        f"method=local,stages={STAGES},schedule=1f1b,microbatches={microbatches}", backward and f"backward={backward}",
        forward and f"forward={forward}")))
    return systems.decjax(prefix + name, argument, batch_size=SIZE * microbatches, model=MODEL, **{"boundary.when": when})


def boundary(codec: str, when: str) -> runtime.Boundary:
    """As the runtime model knows it."""
    return runtime.Boundary(RATIOS[codec], codec, "critical" if when == "epilogue" else "always")


def predict(name: str, microbatches: int, alone_s: dict[str, float], throughput_Bps: float) -> float:
    """Seconds of an iteration.

    Args:
        name: of the row.
        microbatches: M.
        alone_s: row -> seconds of an iteration of one microbatch on free links.
        throughput_Bps: bytes per second that a link carries one way.
    """
    backward, forward, when = ROWS[name]
    layers, width = MODEL["depth"], MODEL["width"]
    model = runtime.Transformer(layers, width, MODEL["heads"], MODEL["vocabulary"], MODEL["context"],
                                batch_size=SIZE * microbatches, hidden=MODEL["hidden"])
    layout = runtime.Layout(stages=STAGES, microbatches=microbatches)
    counted = runtime.work(model, layout, 1.0)
    scale_s = alone_s[DENSE] / (sum(counted.forward_s) + sum(counted.backward_s))
    load = runtime.Work(*(tuple(scale_s * seconds for seconds in passes) for passes in (counted.forward_s, counted.backward_s)),
                        counted.boundary_bytes, 0.0, (0.0,) * STAGES, (0.0,) * STAGES, (0.0,) * STAGES)
    messages = (STAGES - 1) * ((backward != "") + (forward != ""))  # All gradients of one microbatch are of the cool-down.
    codec_s = max(alone_s[name] - alone_s[DENSE], 1e-6) / messages if messages else 0.0
    host = runtime.Link(0.0, throughput_Bps)
    box = runtime.Cluster("box", STAGES, 1, host, host, codec_Bps=counted.boundary_bytes / codec_s if codec_s else None)
    traffic = runtime.Traffic(runtime.no_communication(), backward=boundary(backward, when) if backward else runtime.Boundary(),
                              forward=boundary(forward, "always") if forward else runtime.Boundary())
    return runtime.predict_layout(box, load, layout, traffic).time_s


def tabulate(measured: speedup.Measured, predicted_s: dict[str, float]) -> rich.table.Table:
    """All rows: time, gain, bytes, and what the model said."""
    table = rich.table.Table(box=rich.box.MARKDOWN)
    for column in ("messages between stages", "ms per iteration", "speed-up", "MB out of a host", "predicted", "error"):
        table.add_column(column, justify="left" if column.startswith("messages") else "right")
    for name, told in predicted_s.items():
        step_s = measured.time_s(name)
        table.add_row(name, f"{step_s * 1e3:.0f}", f"{measured.time_s(DENSE) / step_s:.2f}", f"{measured.sent_bytes[name] / 1e6:.2f}",
                      f"{told * 1e3:.0f}", f"{100 * (told / step_s - 1):+.1f} %")
    return table


def main(argv: list[str]) -> None:
    chosen = flags.FLAGS
    if argv:
        command.fail(f"unexpected argument {argv[0]!r}; options start with --")
    M = chosen.microbatches
    rows, alone = [row(name, M) for name in ROWS], [row(name, 1, ALONE) for name in ROWS]
    with cluster.network(hosts=STAGES, rate=cluster.UNLIMITED) as network, systems.Box(network) as box:
        for each in (*rows, *alone):
            box.prepare(each)
            if each.name in box.refused:
                raise Failed(f"{each.name}: {box.refused[each.name]}")
            print(f"{each.name}: ready", flush=True)
        free = speedup.measure(box, alone, cluster.UNLIMITED, chosen.rounds, steps=lambda _: 3 * STEPS)
        measured = speedup.measure(box, rows, chosen.rate, chosen.rounds, steps=lambda _: STEPS)
    alone_s = {name: free.time_s(ALONE + name) for name in ROWS}
    predicted_s = {name: predict(name, M, alone_s, measured.throughput_Bps) for name in ROWS}
    console = rich.console.Console(width=140, highlight=False)
    console.print(tabulate(measured, predicted_s))
    console.print(f"{M} microbatches; {measured.throughput_Bps * 8 / 1e6:.1f} Mbit/s one way; a single microbatch on free links takes "
                  f"{alone_s[DENSE] * 1e3:.0f} ms")
    if chosen.out:
        pathlib.Path(chosen.out).write_text(json.dumps({"alone_s": alone_s, "predicted_s": predicted_s,
                                                        "measured": measured._asdict()}, indent=2) + "\n")


if __name__ == "__main__":
    # Defined here, because tests import several experiments.
    flags.DEFINE_string("rate", "50mbit", "Of every link, both ways.")
    flags.DEFINE_integer("microbatches", 8, "M.", lower_bound=STAGES)
    flags.DEFINE_integer("rounds", 3, "Visits of each row.", lower_bound=1)
    flags.DEFINE_string("out", None, "JSON of everything measured.")
    command.run(main, errors=(cluster.ClusterError, Failed, OSError))
