"""The cost model compared with real processes: calibrated at two rates, it predicts a third, also with jitter.

    python -m experiments.cluster_runtime --calibrate_at=50mbit,200mbit --predict_at=100mbit

Four emulated hosts (launch.cluster: root and iproute2), the transformer of experiments.speedup. At two rates launch.calibrate measures
a worker's step, α and β of exchanges, and codecs. For the rate between them bandwidth and latency are interpolated, and everything
else is averaged; nothing is fitted to the times that are predicted. At that rate all methods take turns, without and with jitter.

With jitter the batch is one sequence after a pause of `compute_ms` plus an exponential variable of mean `jitter_ms`: hosts that share
cores would otherwise compute faster while others pause. The time of such a step without communication and jitter is measured.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import pathlib
import statistics
import tempfile

from absl import flags
import numpy as np

from decjax import costmodel
from experiments import methods, script
from experiments.bench.cluster import systems
from experiments.bench.cluster.group import done
from experiments.methods import ALONE, HOSTS, SHORTHANDS
from launch import cluster, command

FLAGS = flags.FLAGS

STEPS = 12  # of a visit with jitter


def calibrate(
    network: cluster.Network,
    rate: str,
    seconds: float,
    batch_size: int = systems.BATCH_SIZE,
    compressed: Sequence[str] = (),
    model: Mapping[str, int] = systems.MODEL,
    bucket_bytes: int = systems.BUCKET,
    config: str = "configs/lm.py",
    fields: Mapping[str, object] = {},
) -> tuple[costmodel.Cluster, costmodel.Workload]:
    """Return the cluster and the workload that launch.calibrate measures at a rate, with these compressed methods.

    The workload is that of a config file with a model of these sizes and further fields.
    """
    network.set_rate(rate)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "profile.json"
        sizes = {f"model.{key}": size for key, size in model.items()}
        sizes |= {"bucket_bytes": bucket_bytes, "batch_size": HOSTS * batch_size}
        options = [f"--config={config}:workers={HOSTS}", f"--out={path}", f"--seconds={seconds}", f"--name={rate}"]
        options += [f"--compressed={text}" for text in compressed]
        options += [f"--config.{key}={value}" for key, value in {**sizes, **fields}.items()]
        done(f"launch.calibrate at {rate}", network.run("launch.calibrate", options))
        measured, workload = costmodel.load(path)
    assert workload is not None  # Calibration always writes one.
    return measured, workload


def interpolate(low: costmodel.Cluster, high: costmodel.Cluster, share: float) -> costmodel.Cluster:
    """Interpolate between two clusters that differ in rate; `share` is 0 for the first, 1 for the second."""

    def between(get: Callable[[costmodel.Cluster], float]) -> float:
        return (1 - share) * get(low) + share * get(high)

    inter = costmodel.Link(between(lambda c: c.inter.latency_s), between(lambda c: c.inter.bandwidth_Bps))
    assert isinstance(low.codec_Bps, dict)  # Measured profiles have a rate for each codec.
    codec_Bps = {codec: between(lambda c, codec=codec: c.codec_rate(codec) or 0.0) for codec in low.codec_Bps}
    return dataclasses.replace(
        low, name="between", inter=inter, codec_Bps=codec_Bps, all_reduce_efficiency=between(lambda c: c.all_reduce_efficiency)
    )


def average(first: costmodel.Workload, second: costmodel.Workload) -> costmodel.Workload:
    """Return the mean of two measurements of one workload."""

    mean = lambda name: np.mean([getattr(first, name), getattr(second, name)], axis=0).tolist()
    traces = [workload.jitter.trace_s or (workload.compute_s,) * 25 * HOSTS for workload in (first, second)]
    return dataclasses.replace(
        first,
        backward_s=tuple(mean("backward_s")),
        jitter=costmodel.Jitter("trace", trace_s=(*traces[0], *traces[1]), together=HOSTS),
        **{name: mean(name) for name in ("forward_s", "optimizer_s", "combine_s", "beside_s")},
    )


def paused(workload: costmodel.Workload, step_s: float, jitter_s: float) -> costmodel.Workload:
    """Return the workload with jitter and a step of `step_s` without communication; the optimizer's time is the measured one."""
    jitter = costmodel.Jitter("exponential", scale_s=jitter_s)
    return dataclasses.replace(workload, forward_s=0.0, backward_s=(step_s - workload.optimizer_s,), jitter=jitter)


def measure(runner: systems.Runner, rounds: int, compute_s: float, jitter_s: float) -> dict[str, dict[str, float]]:
    """Return the median seconds per step, by kind and method: "as it is", "pause" (ALONE only, a fixed pause) and "jitter"."""
    plain = [systems.decjax(name, shorthand) for name, shorthand in SHORTHANDS.items()]
    pausing = [systems.decjax(f"{name}, pauses", shorthand, batch_size=1, pauses=True) for name, shorthand in SHORTHANDS.items()]
    for row in (*plain, *pausing):
        runner.prepare(row, needed=True)
    times_s = {kind: collections.defaultdict(list) for kind in ("as it is", "pause", "jitter")}
    for seed in range(rounds):
        for name, row, pause in zip(SHORTHANDS, plain, pausing, strict=True):
            times_s["as it is"][name].append(runner.visit(row).step_s)
            times_s["jitter"][name].append(runner.visit(pause, STEPS, pause_s=(compute_s, jitter_s), seed=seed).step_s)
            if name == ALONE:
                times_s["pause"][name].append(runner.visit(pause, STEPS, pause_s=(compute_s, 0.0)).step_s)
    return {kind: {name: statistics.median(values) for name, values in by_name.items()} for kind, by_name in times_s.items()}


def tabulate(measured_s: dict[str, float], predicted_s: dict[str, float]) -> script.Table:
    """Return every method's measured and predicted time."""
    table = script.table("ms per step", "measured", "predicted", "error")
    for name, step_s in measured_s.items():
        forecast_s = predicted_s[name]
        table.add_row(name, script.ms(step_s), script.ms(forecast_s), script.difference(forecast_s, step_s))
    return table


def main() -> None:
    rates = ",".join(FLAGS.calibrate_at)
    if len(FLAGS.calibrate_at) != 2:
        command.fail(f"calibrate_at={rates}: must be two rates, as 50mbit,200mbit")
    with cluster.network(hosts=HOSTS, rate=cluster.UNLIMITED) as network:
        nominal_Bps = []
        for rate in (*FLAGS.calibrate_at, FLAGS.predict_at):
            network.set_rate(rate)
            nominal_Bps.append(network.rate_Bps(0) or float("inf"))
        low, high, wanted = nominal_Bps
        if not low < wanted < high < float("inf"):
            command.fail(f"predict_at={FLAGS.predict_at}: must lie between the rates of calibrate_at={rates}")
        profiles, workloads = zip(*(calibrate(network, rate, FLAGS.seconds) for rate in FLAGS.calibrate_at))
        network.set_rate(FLAGS.predict_at)
        with systems.Runner(network) as runner:
            measured_s = measure(runner, FLAGS.rounds, FLAGS.compute_ms / 1e3, FLAGS.jitter_ms / 1e3)
    between, workload = interpolate(profiles[0], profiles[1], (wanted - low) / (high - low)), average(*workloads)
    jittered, errors = paused(workload, measured_s["pause"][ALONE], FLAGS.jitter_ms / 1e3), []
    for kind, assumed in (("as it is", workload), ("jitter", jittered)):
        modeled = methods.modeled().items()
        predicted_s = {name: costmodel.predict(between, assumed, method).mean_s for name, method in modeled}
        script.show(f"{FLAGS.predict_at}, {kind}", tabulate(measured_s[kind], predicted_s))
        errors += [abs(predicted_s[name] / step_s - 1) for name, step_s in measured_s[kind].items()]
    script.show(f"error: median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %")


if __name__ == "__main__":
    flags.DEFINE(cluster.Rates(), "calibrate_at", ["50mbit", "200mbit"], "Two rates of every link.")
    flags.DEFINE_string("predict_at", "100mbit", "A rate between them.")
    flags.DEFINE_float("seconds", 60.0, "Approximate duration of the calibration at each rate.", lower_bound=1.0)
    flags.DEFINE_integer("rounds", 3, "Visits of each method.", lower_bound=1)
    flags.DEFINE_float("compute_ms", 700.0, "Minimum pause of a step, with jitter.", lower_bound=0.0)
    flags.DEFINE_float("jitter_ms", 300.0, "Mean of the exponential variable.", lower_bound=0.0)
    script.run(main, systems.ERRORS)
