"""Overhead of `--elastic` without failures: ratio of the step time with and without it, on an emulated cluster.

    python -m experiments.bench.elastic --out=runs/elastic_price
    python -m experiments.bench.elastic --out=runs/elastic_price --rate=1gbit --rounds=5

Four hosts (launch.cluster: root and iproute2), one process a host, the transformer of 5.9M parameters of experiments.speedup. Both
kinds take turns; a run's step is the median over its intervals of five steps, without the first two. The table has the median ratio of
all rounds, and the least and the largest.
"""

import pathlib
import statistics

from absl import flags

from decjax import config
from experiments import script, trials
from experiments.bench.cluster import systems
from experiments.bench.cluster.group import done
from experiments.methods import HOSTS, ONE_PEER, SHORTHANDS, SYNC
from launch import cluster, processes

FLAGS = flags.FLAGS

INT8 = f"{ONE_PEER}, int8"
METHODS = (ONE_PEER, INT8, SYNC)
EVERY, LEFT_OUT = 5, 2  # steps of an interval; intervals at the start of a run


def trial(method: str, workdir: pathlib.Path) -> trials.Trial:
    """Return a run of a method."""
    fields = {f"model.{name}": size for name, size in systems.MODEL.items()} | trials.TIMED
    bucket_bytes = systems.WHOLE if method == SYNC else 2**21
    fields |= {"batch_size": HOSTS * FLAGS.batch_size, "log_every": EVERY, "bucket_bytes": bucket_bytes}
    return trials.Trial(workdir, f"configs/lm.py:{SHORTHANDS[method]},workers={HOSTS},steps={FLAGS.steps}", tuple(fields.items()))


def measure(network: cluster.Network, out: pathlib.Path, method: str, number: int) -> tuple[float, float]:
    """Return the median seconds of a step without and with `--elastic`; their order alternates."""
    found, tokens = {}, HOSTS * FLAGS.batch_size * systems.MODEL["context"]
    for elastic in (False, True) if number % 2 else (True, False):
        run = trial(method, out / f"{trials.name_of(method)}_{number}{'_elastic' if elastic else ''}")
        if not run.finished:
            line = processes.TRAIN, run.arguments
            done(method, network.run(*line, settings=config.Elastic() if elastic else None))
        found[elastic] = statistics.median(run.step_s(tokens, LEFT_OUT))
    return found[False], found[True]


def main() -> None:
    out = script.folder()
    table = script.table("ms per step", "without", "with --elastic", "ratio", "least", "largest")
    with cluster.network(hosts=HOSTS, rate=FLAGS.rate) as network:
        pairs = {method: [] for method in FLAGS.method}
        for number in range(FLAGS.rounds):
            for method in FLAGS.method:
                pairs[method].append(measure(network, out, method, number))
    for method, times in pairs.items():
        ratios = [own / plain for plain, own in times]
        plain_s, own_s = (statistics.median(column) for column in zip(*times, strict=True))
        shown = (f"{ratio:.3f}" for ratio in (statistics.median(ratios), min(ratios), max(ratios)))
        table.add_row(method, script.ms(plain_s), script.ms(own_s), *shown)
    script.report("elastic_price", table)


if __name__ == "__main__":
    script.define("out", "pages")
    flags.DEFINE_string("rate", "100mbit", "Rate of every link.")
    flags.DEFINE_multi_enum("method", METHODS, METHODS, "A method to measure; may be repeated.")
    script.selects("method")
    flags.DEFINE_integer("rounds", 3, "Runs of each method with and without.", lower_bound=1)
    flags.DEFINE_integer("steps", 30, "Steps of a run.", lower_bound=(LEFT_OUT + 1) * EVERY)
    flags.DEFINE_integer("batch_size", 2, "Sequences of a worker's step.", lower_bound=1)
    script.run(main, (*systems.ERRORS, trials.Broken))
