"""What compressed messages between stages gain on a slow link: one table, from one interleaved run, with the cost model.

    python -m experiments.pipeline_speed --out=runs/pipeline_speed.json

Four emulated hosts (launch.cluster: root and iproute2) are the four stages of one pipeline; a transformer of width 32 with a layer
a host, 1F1B, 128 sequences of 64 tokens in a microbatch, float32. It is so narrow that hosts that share two cores seldom compute at
the same time: a message takes several times as long as its microbatch. Rows take turns; a figure is the median over the rounds of the
mean time of an iteration.

The cost model uses α and β of exchanges between the hosts (launch.calibrate at the rate in question), and the time of each row's
iteration on unlimited links. The latter is the time of all passes, on cores that hosts share; the model divides it among stages and
between F and B in proportion to their operations. The extra time with coded messages is that of their codecs. Nothing is fitted to the
times that are predicted.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

from absl import flags

from decjax import costmodel
from decjax.contrib import layouts
from experiments import cluster_runtime, script, speedup
from experiments.bench.cluster import systems
from launch import cluster

FLAGS = flags.FLAGS

STAGES, SIZE = 4, 128  # SIZE: sequences of a microbatch
STEPS = 2  # minimum of a visit
MODEL: dict[str, Any] = dict(vocabulary=256, context=64, width=32, hidden=128, heads=2, depth=STAGES)
DENSE, RANK = "uncompressed", 4
LOW_RANK = f"low_rank(rank={RANK})"
When = Literal["always", "epilogue"]
ROWS: dict[str, tuple[str, str, When]] = {  # name -> codec of gradients, of activations, which gradients
    DENSE: ("", "", "epilogue"),
    "gradients of the cool-down, low rank": (LOW_RANK, "", "epilogue"),
    "all gradients, low rank": (LOW_RANK, "", "always"),
    "all gradients, int8": ("int8", "", "always"),
    "gradients and activations, int8": ("int8", "int8", "always"),
}
# Messages are a microbatch's activations, one row a token; int8 has a scale for each block of 256 values.
RATIOS = {LOW_RANK: 1 / layouts.low_rank_ratio(SIZE * MODEL["context"], MODEL["width"], RANK), "int8": 1 / 4 + 1 / 256}
MESSAGE_BYTES = 4 * SIZE * MODEL["context"] * MODEL["width"]
FREE_BPS = 1e15  # of links that are not limited


def row(name: str, microbatches: int) -> systems.Row:
    """Return the row of this name in ROWS: a pipeline of four hosts."""
    backward, forward, when = ROWS[name]
    argument = f"method=local,stages={STAGES},schedule=1f1b,microbatches={microbatches}"
    argument += f",backward={backward}" * bool(backward) + f",forward={forward}" * bool(forward)
    fields: dict[str, Any] = {"boundary.when": when} if backward else {}
    return systems.decjax(name, argument, batch_size=SIZE * microbatches, model=MODEL, **fields)


def boundary(codec: str, when: When = "always") -> layouts.Boundary:
    """Return the cost model's description of messages with a codec."""
    return layouts.Boundary(RATIOS[codec], codec, when) if codec else layouts.Boundary()


def iteration_s(name: str, microbatches: int, link: costmodel.Link, compute_s: float, codec_s: float) -> float:
    """Return the predicted seconds of an iteration of a row on links like `link`.

    All passes of one microbatch together compute for `compute_s`; compressing and decompressing one message takes `codec_s`.
    """
    backward, forward, when = ROWS[name]
    layout = layouts.DeviceLayout(stages=STAGES, microbatches=microbatches)
    counted = layouts.work(layouts.Transformer(batch_size=SIZE * microbatches, **MODEL), layout, 1.0)
    scale_s, none = compute_s / (sum(counted.forward_s) + sum(counted.backward_s)), (0.0,) * STAGES
    forward_s, backward_s = (tuple(scale_s * s for s in passes) for passes in (counted.forward_s, counted.backward_s))
    load = layouts.Work(forward_s, backward_s, counted.boundary_bytes, 0.0, none, none, none)
    emulated = costmodel.Cluster("emulated", STAGES, 1, link, link, codec_Bps=counted.boundary_bytes / codec_s if codec_s else None)
    traffic = layouts.Traffic(costmodel.no_communication(), backward=boundary(backward, when), forward=boundary(forward))
    return layouts.predict_layout(emulated, load, layout, traffic).time_s


def inverse(function: Callable[[float], float], value: float, high: float) -> float:
    """Return the argument between 0 and `high` at which a growing function has a value, by bisection; else the nearer end."""
    low = 0.0
    for _ in range(30):  # The upper end is returned, which is never 0: a codec's rate is computed from it.
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return high


def predict(microbatches: int, free_s: dict[str, float], link: costmodel.Link) -> dict[str, float]:
    """Return the predicted seconds of an iteration of every row, from `free_s`, those measured on unlimited links."""
    free = costmodel.Link(0.0, FREE_BPS)
    compute_s = free_s[DENSE] / iteration_s(DENSE, microbatches, free, 1.0, 0.0)
    predicted_s = {}
    for name, seconds in free_s.items():
        codec_s = inverse(lambda s, name=name: iteration_s(name, microbatches, free, compute_s, s), seconds, seconds)
        predicted_s[name] = iteration_s(name, microbatches, link, compute_s, codec_s)
    return predicted_s


def tabulate(measured: speedup.Measured, predicted_s: dict[str, float]) -> script.Table:
    """Return time, speed-up, bytes and predicted time of all rows."""
    table = script.table("messages between stages", "ms per iteration", "speed-up", "MB per host", "predicted", "error")
    for name, forecast_s in predicted_s.items():
        step_s = measured.time_s(name)
        gain, sent = f"{measured.time_s(DENSE) / step_s:.2f}", f"{measured.sent_bytes[name] / 1e6:.2f}"
        table.add_row(name, script.ms(step_s), gain, sent, script.ms(forecast_s), script.difference(forecast_s, step_s))
    return table


def main() -> None:
    M = FLAGS.microbatches
    rows = [row(name, M) for name in ROWS]
    with cluster.network(hosts=STAGES, rate=FLAGS.rate) as network, systems.Runner(network) as runner:
        profile, _ = cluster_runtime.calibrate(network, FLAGS.rate, FLAGS.seconds, model=MODEL, bucket_bytes=MESSAGE_BYTES)
        network.set_rate(cluster.UNLIMITED)
        runner.prepare_all(rows, needed=True)
        free = speedup.measure(runner, rows, cluster.UNLIMITED, FLAGS.rounds, steps=lambda _: 3 * STEPS)
        measured = speedup.measure(runner, rows, FLAGS.rate, FLAGS.rounds, steps=lambda _: STEPS)
    free_s, link = {name: free.time_s(name) for name in ROWS}, profile.inter
    predicted_s = predict(M, free_s, link)
    script.show(
        tabulate(measured, predicted_s),
        f"{M} microbatches; {link.bandwidth_Bps * 8 / 1e6:.1f} Mbit/s and {link.latency_s * 1e3:.1f} ms by calibration; "
        f"an iteration on free links takes {script.ms(free_s[DENSE])} ms",
    )
    script.save(FLAGS.out, free_s=free_s, predicted_s=predicted_s, link=dataclasses.asdict(link), measured=measured._asdict())


if __name__ == "__main__":
    script.define("json")
    flags.DEFINE_string("rate", "50mbit", "Rate of every link, both ways.")
    flags.DEFINE_integer("microbatches", 8, "M.", lower_bound=STAGES)
    flags.DEFINE_float("seconds", 40.0, "Approximate duration of the calibration.", lower_bound=1.0)
    flags.DEFINE_integer("rounds", 3, "Visits of each row.", lower_bound=1)
    script.run(main, systems.ERRORS)
