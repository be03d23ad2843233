"""Waiting for the slowest: real processes whose compute times jitter, and the prediction of the cost model.

    python -m experiments.stragglers --hosts=8 --jitter_ms=50

Eight emulated hosts with unlimited links (launch.cluster: root and iproute2). A worker's gradient is that of a tiny model after a pause
of 50 ms plus an exponential variable of mean `jitter_ms`, drawn for every worker and step: pausing keeps no core busy, so
eight hosts fit on a machine of two cores.

The model uses two numbers, from steps without jitter in the same run: the time of a step without communication, and the additional
time of all-reduce, which gives the latency of a hop. The waiting times are predicted.
"""

from collections.abc import Sequence
import statistics

from absl import flags

from decjax import costmodel
from experiments import methods, script
from experiments.bench.cluster.systems import ERRORS, Runner, decjax
from experiments.methods import ALONE, ONE_PEER, RING, SHORTHANDS, STALE, SYNC
from launch import cluster

FLAGS = flags.FLAGS

TINY = dict(vocabulary=256, context=32, width=16, hidden=32, heads=2, depth=1)
METHODS = (ALONE, SYNC, STALE, ONE_PEER, RING)


def measure(runner: Runner, compute_s: float, jitters_s: Sequence[float], steps: int, rounds: int) -> list[dict[str, float]]:
    """Return the median seconds per step by method, for every mean of the jitter; methods take turns."""
    rows = [decjax(name, SHORTHANDS[name], model=TINY, batch_size=1, pauses=True) for name in METHODS]
    for row in rows:
        runner.prepare(row, needed=True)
    times_s = {jitter_s: {name: [] for name in METHODS} for jitter_s in jitters_s}
    for seed in range(rounds):
        for jitter_s in jitters_s:
            for row in rows:
                visit = runner.visit(row, steps, pause_s=(compute_s, jitter_s), seed=seed)
                times_s[jitter_s][row.name].append(visit.step_s)
    return [{name: statistics.median(times) for name, times in times_s[jitter_s].items()} for jitter_s in jitters_s]


def predict(steady_s: dict[str, float], hosts: int, jitter_s: float) -> dict[str, float]:
    """Return the predicted seconds per step with jitter of mean `jitter_s`, from those measured without jitter."""
    hop_s = max(0.0, steady_s[SYNC] - steady_s[ALONE]) / (2 * (hosts - 1))
    link = costmodel.Link(hop_s, 1e12)  # The messages are tiny.
    emulated = costmodel.Cluster("emulated", hosts, 1, link, link)
    workload = costmodel.Workload(steady_s[ALONE], (0.0,), (1.0,), jitter=costmodel.Jitter("exponential", scale_s=jitter_s))
    known = methods.modeled(hosts)
    return {name: costmodel.predict(emulated, workload, known[name]).mean_s for name in METHODS}


def main() -> None:
    jitter_s = FLAGS.jitter_ms / 1e3
    with cluster.network(hosts=FLAGS.hosts, rate=cluster.UNLIMITED) as network, Runner(network) as runner:
        steady_s, jittered_s = measure(runner, FLAGS.compute_ms / 1e3, (0.0, jitter_s), FLAGS.steps, FLAGS.rounds)
    predicted_s = predict(steady_s, FLAGS.hosts, jitter_s)
    jitter = f"jitter of mean {FLAGS.jitter_ms:g} ms"
    table = script.table("ms per step", "no jitter", jitter, "predicted", "stale all-reduce ÷ this", "predicted")
    for name in METHODS:
        times = (script.ms(found_s[name]) for found_s in (steady_s, jittered_s, predicted_s))
        table.add_row(name, *times, *(f"{found_s[STALE] / found_s[name]:.2f}" for found_s in (jittered_s, predicted_s)))
    script.show(table)


if __name__ == "__main__":
    flags.DEFINE_integer("hosts", 8, "Hosts, one process each.", lower_bound=2)
    flags.DEFINE_float("compute_ms", 50.0, "Minimum pause of every step.", lower_bound=0.0)
    flags.DEFINE_float("jitter_ms", 50.0, "Mean of the exponential variable.", lower_bound=0.0)
    flags.DEFINE_integer("steps", 60, "Steps of a visit.", lower_bound=2)
    flags.DEFINE_integer("rounds", 3, "Visits of each method, with and without jitter.", lower_bound=1)
    script.run(main, ERRORS)
