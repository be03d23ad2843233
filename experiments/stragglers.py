"""Waiting for the slowest: real processes whose compute times jitter, and what the cost model says of them.

    python -m experiments.stragglers --hosts=8 --jitter_ms=50

Eight hosts in a box with free links (launch.cluster: root and iproute2). A worker's gradient is that of a tiny model behind a pause
of 50 ms plus an exponential variable of mean `jitter_ms`, drawn anew for every worker and step: pausing keeps no core busy, so
eight hosts fit on a machine of two cores.

The model is told two numbers, from steps without jitter in the same run: a step without communication, and what all-reduce adds to
it, which gives the latency of a hop. The rest is predicted: who waits for whom.
"""

import collections
from collections.abc import Iterator, Sequence
import statistics

from absl import flags
import rich.box
import rich.console
import rich.table

from decjax import costmodel, topology
from experiments.bench.box.group import Failed
from experiments.bench.box.systems import Box, decjax
from launch import cluster, command

TINY = dict(vocabulary=256, context=32, width=16, hidden=32, heads=2, depth=1)
ALONE, SYNC, STALE = "no communication", "all-reduce", "all-reduce, one step stale"
SHORTHANDS = {
    ALONE: "method=local",
    SYNC: "method=allreduce",
    STALE: "method=allreduce,stale",
    "one-peer exponential": "topology=one_peer_exponential",
    "ring": "topology=ring",
}


def methods(hosts: int) -> dict[str, costmodel.Method]:
    """The same methods, as the model knows them."""
    return {
        ALONE: costmodel.no_communication(),
        SYNC: costmodel.all_reduce(hosts),
        STALE: costmodel.all_reduce(hosts, overlap=True),
        "one-peer exponential": costmodel.gossip(topology.make("one_peer_exponential", hosts)),
        "ring": costmodel.gossip(topology.make("ring", hosts)),
    }


def measure(box: Box, compute_s: float, jitters_s: Sequence[float], steps: int, rounds: int) -> Iterator[tuple[str, float, float]]:
    """(method, mean of the jitter, seconds per step) of every visit; methods take turns."""
    rows = [decjax(name, shorthand, model=TINY, batch_size=1, pauses=True) for name, shorthand in SHORTHANDS.items()]
    for row in rows:
        box.prepare(row)
        if row.name in box.refused:
            raise Failed(f"{row.name}: {box.refused[row.name]}")
    for seed in range(rounds):
        for jitter_s in jitters_s:
            for row in rows:
                visit = box.visit(row, -(-steps // box.periods[row.name]), pause_s=(compute_s, jitter_s), seed=seed)
                yield row.name, jitter_s, visit.step_s


def predict(steady_s: dict[str, float], hosts: int, jitter_s: float) -> dict[str, float]:
    """Seconds per step with jitter, from those without."""
    hop_s = max(0.0, steady_s[SYNC] - steady_s[ALONE]) / (2 * (hosts - 1))
    link = costmodel.Link(hop_s, 1e12)  # The messages are tiny.
    workload = costmodel.Workload(steady_s[ALONE], (0.0,), (1.0,), jitter=costmodel.Jitter("exponential", scale_s=jitter_s))
    return {
        name: costmodel.predict(costmodel.Cluster("box", hosts, 1, link, link), workload, method).mean_s
        for name, method in methods(hosts).items()
    }


def main(argv: list[str]) -> None:
    chosen = flags.FLAGS
    if argv:
        command.fail(f"unexpected argument {argv[0]!r}; options start with --")
    jitter_s = chosen.jitter_ms / 1e3
    times_s = collections.defaultdict(list)
    with cluster.network(hosts=chosen.hosts, rate=cluster.UNLIMITED) as network, Box(network) as box:
        for name, mean_s, step_s in measure(box, chosen.compute_ms / 1e3, (0.0, jitter_s), chosen.steps, chosen.rounds):
            times_s[name, mean_s].append(step_s)
    steady_s = {name: statistics.median(times_s[name, 0.0]) for name in SHORTHANDS}
    jittered_s = {name: statistics.median(times_s[name, jitter_s]) for name in SHORTHANDS}
    predicted_s = predict(steady_s, chosen.hosts, jitter_s)
    table = rich.table.Table(box=rich.box.MARKDOWN)
    table.add_column("ms per step")
    for column in ("no jitter", f"jitter of mean {chosen.jitter_ms:g} ms", "predicted", "stale all-reduce ÷ this", "predicted"):
        table.add_column(column, justify="right")
    for name in SHORTHANDS:
        table.add_row(
            name,
            f"{steady_s[name] * 1e3:.0f}",
            f"{jittered_s[name] * 1e3:.0f}",
            f"{predicted_s[name] * 1e3:.0f}",
            f"{jittered_s[STALE] / jittered_s[name]:.2f}",
            f"{predicted_s[STALE] / predicted_s[name]:.2f}",
        )
    rich.console.Console(width=140, highlight=False).print(table)


if __name__ == "__main__":
    # Defined here, because tests import several experiments.
    flags.DEFINE_integer("hosts", 8, "Hosts, one process each.", lower_bound=2)
    flags.DEFINE_float("compute_ms", 50.0, "What every step pauses at least.", lower_bound=0.0)
    flags.DEFINE_float("jitter_ms", 50.0, "Mean of the exponential variable.", lower_bound=0.0)
    flags.DEFINE_integer("steps", 60, "Steps of a visit.", lower_bound=2)
    flags.DEFINE_integer("rounds", 3, "Visits of each method, with and without jitter.", lower_bound=1)
    command.run(main, errors=(cluster.ClusterError, Failed, OSError))
