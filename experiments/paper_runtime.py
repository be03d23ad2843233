"""The cost model compared with the paper's measured iteration times: fitted, predicted, and extrapolated.

    python -m experiments.paper_runtime --out=paper_runtime.png
    python -m experiments.paper_runtime --leave_one_out
    python -m experiments.paper_runtime --cluster=a40 --gpus=32 --json

Measured: arXiv 2410.11998, Fig. 6: Transformer-base, 25K tokens per step over all GPUs (strong scaling), three clusters, four
methods, two sizes each. Predicted: `decjax.costmodel`, whose equations are derived in this repository; they are not the
paper's. Per cluster six measurable quantities are fitted to its eight measurements:

    work_s          GPU-seconds of a step's 25K tokens: a worker computes for C = work_s / GPUs + overhead_s
    overhead_s      what does not shrink with the batch: launching kernels, the optimizer
    nic_Bps         a node's NIC, shared by its workers
    intra_Bps       a worker's link inside its node
    efficiency      fraction of the link that reductions reach
    variation       coefficient of variation of compute times (log-normal)

Eight numbers do not determine six parameters, so each but `work_s` has a prior (`PRIORS`): the links' datasheets, and values common
to all three clusters. Residuals are relative errors in units of 3 %, those of priors are of logarithms.

The four methods, as their public implementations work: all-reduce overlaps with the backward pass in buckets; SGP averages
inside a node and then sends from node to node (directed, one-peer exponential), after the update; the decentralized ones
adapt while communicating, in buckets: pairs i ↔ i XOR 2^k ("exp"), and AER with one reduction over both nodes that meet.
Reductions over several nodes are hierarchical. Tried and left out: flat rings, which make all-reduce on 16 A40 13 % too
fast and AER there 10 % too slow, or need a latency of 0.4 ms a hop to fit.

Assumed for all: 65 million parameters, 29 % of them in embeddings whose gradient is ready last and cannot hide; the backward
pass takes 2/3 of the time. Messages take two bytes per parameter: with four, the rows of the A40 would need more than
twice the line rate of its NIC. Whether messages were of 16 bits or the links faster than stated, the rows cannot tell: only
the quotient of bytes and bandwidth matters.
"""

from collections.abc import Sequence
import functools
import json
from typing import NamedTuple

from absl import flags
import numpy as np
import rich.box
from scipy import optimize

from decjax import costmodel
from decjax import topology as topology_lib
from experiments import script
from launch import command

FLAGS = flags.FLAGS

METHODS = {"all_reduce": "all-reduce", "sgp": "SGP (exp)", "exp": "decentralized (exp)", "aer": "decentralized (AER)"}

# GPUs -> ms per iteration, in the order of METHODS.
MEASURED_MS = {
    "t4": {16: (372.5, 425.5, 314.8, 312.3), 32: (225.5, 292.4, 178.8, 178.8)},
    "a100": {8: (73.0, 69.4, 63.4, 61.7), 16: (54.8, 53.0, 46.8, 45.8)},
    "a40": {8: (166.1, 150.5, 122.8, 122.0), 16: (195.5, 99.9, 97.4, 78.9)},
}


class Hardware(NamedTuple):
    """A cluster, by its datasheets."""

    title: str
    gpus_per_node: int
    latency_s: float  # of a message between nodes: InfiniBand; TCP
    nic_Bps: float  # InfiniBand and Ethernet as stated
    intra_Bps: float  # PCIe 3; NVLink; PCIe 4


CLUSTERS = {
    "t4": Hardware("8 T4 per node, 100 Gb/s InfiniBand", 8, 1e-5, 12.5e9, 5e9),
    "a100": Hardware("4 A100 per node, 100 Gb/s InfiniBand", 4, 1e-5, 12.5e9, 100e9),
    "a40": Hardware("4 A40 per node, 25 Gb/s Ethernet", 4, 5e-5, 3.125e9, 10e9),
}
INTRA_LATENCY_S = 5e-6

NUM_BYTES = 2 * 65e6
EMBEDDING_SHARE = 0.29  # about 37,000 tokens × 512 of 65 million
LAYER_BUCKETS = 7

PARAMETERS = ("work_s", "overhead_s", "nic_Bps", "intra_Bps", "efficiency", "variation")
# Priors of all parameters but the first, log-normal: (median, standard deviation of the logarithm).
PRIORS = {
    name: ((0.03, 0.4), (cluster.nic_Bps, 0.7), (cluster.intra_Bps, 0.7), (0.6, 0.4), (0.04, 0.5))
    for name, cluster in CLUSTERS.items()
}
RESIDUAL_UNIT = 0.03


@functools.cache
def methods(num_gpus: int, per_node: int) -> tuple[costmodel.Method, ...]:
    """Return the four methods for so many GPUs, in the order of METHODS."""

    graph = lambda name, **options: topology_lib.make(name, num_gpus, **options)
    several = num_gpus > per_node  # On one node all methods are an exact mean inside it.
    sgp = graph("hierarchical", local_size=per_node, outer="one_peer_exponential") if several else graph("complete")
    aer = graph("alternating_exponential_ring", local_size=per_node) if several else graph("complete")
    return (
        costmodel.all_reduce(num_gpus, bucketed=True),
        costmodel.gossip(sgp, order="atc", name="SGP"),
        costmodel.gossip(graph("one_peer_exponential", pairwise=True), bucketed=True),
        costmodel.gossip(aer, bucketed=True, joint_ring=several),
    )


def predict_ms(name: str, num_gpus: int, theta: np.ndarray, **options) -> np.ndarray:
    """Return the predicted ms per iteration of the four methods on a cluster; `theta` are the logarithms of PARAMETERS."""
    value = dict(zip(PARAMETERS, np.exp(theta).tolist(), strict=True))
    cluster = costmodel.Cluster(
        name,
        1,
        CLUSTERS[name].gpus_per_node,
        costmodel.Link(INTRA_LATENCY_S, value["intra_Bps"]),
        costmodel.Link(CLUSTERS[name].latency_s, value["nic_Bps"]),
        all_reduce_efficiency=min(1.0, value["efficiency"]),
        hierarchical_all_reduce=True,
    ).resize(num_gpus)
    compute_s = value["work_s"] / num_gpus + value["overhead_s"]
    layers = np.full(LAYER_BUCKETS, 1 / LAYER_BUCKETS)
    workload = costmodel.Workload(
        compute_s / 3,
        (*(2 / 3 * compute_s * layers).tolist(), 0.0),
        (*((1 - EMBEDDING_SHARE) * NUM_BYTES * layers).tolist(), EMBEDDING_SHARE * NUM_BYTES),
        jitter=costmodel.Jitter("lognormal", scale_s=value["variation"] * compute_s),
    )
    compared = methods(num_gpus, cluster.workers_per_node)
    return np.array([1e3 * costmodel.predict(cluster, workload, method, **options).mean_s for method in compared])


@functools.cache
def fit(name: str, sizes: tuple[int, ...]) -> np.ndarray:
    """Return the logarithms of PARAMETERS, fitted to a cluster's measurements at these sizes."""
    means, spread = map(np.array, zip(*PRIORS[name]))
    expected = np.log(means)

    def residuals(theta):
        errors = [np.log(predict_ms(name, size, theta, num_steps=96, num_replicas=4) / MEASURED_MS[name][size]) for size in sizes]
        return np.concatenate([np.concatenate(errors) / RESIDUAL_UNIT, (theta[1:] - expected) / spread])

    work_s = sizes[0] * MEASURED_MS[name][sizes[0]][-1] / 1e3
    # Differences are larger than the noise of a simulation.
    return optimize.least_squares(residuals, [np.log(0.8 * work_s), *expected], "3-point", diff_step=1e-3, max_nfev=15, ftol=1e-3).x


def predict_at(name: str, num_gpus: int, sizes: tuple[int, ...] | None = None) -> np.ndarray:
    """Return the predicted ms per iteration at any size, from a fit to the measurements at `sizes` (None: all).

    Raises:
        ValueError: if `num_gpus` is no power of two, which two of the graphs need.
    """
    if num_gpus < 2 or num_gpus & (num_gpus - 1):
        raise ValueError(f"gpus={num_gpus} must be a power of two of at least 2, as 'exp' and 'aer' need it; use 8, 16, 32, …")
    theta = fit(name, sizes or tuple(MEASURED_MS[name]))
    return predict_ms(name, num_gpus, theta, num_steps=400, num_replicas=8)


def fitted(names: Sequence[str]) -> list[tuple[str, int, np.ndarray]]:
    """Return (cluster, GPUs, predicted ms) of the measured sizes of clusters, and of the next larger one."""
    sizes_of = {name: tuple(MEASURED_MS[name]) for name in names}
    return [(name, size, predict_at(name, size)) for name, sizes in sizes_of.items() for size in (*sizes, 2 * sizes[-1])]


def errors(name: str, num_gpus: int, predicted_ms: np.ndarray) -> np.ndarray:
    """Return the relative errors of predictions at a measured size, in percent."""
    return 100 * (predicted_ms / np.array(MEASURED_MS[name][num_gpus]) - 1)


def tabulate(title: str, rows: list[tuple[str, int, np.ndarray]]) -> script.Table:
    """Return a table with "measured | predicted (error)" in each cell, and predictions alone where nothing was measured."""
    table = script.table("cluster", "GPUs", *METHODS.values(), box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title)
    for name, num_gpus, predicted_ms in rows:
        cells = [f"– | {predicted:.1f}" for predicted in predicted_ms]
        if measured_ms := MEASURED_MS[name].get(num_gpus):
            compared = zip(measured_ms, predicted_ms, errors(name, num_gpus, predicted_ms), strict=True)
            cells = [f"{measured:.1f} | {predicted:.1f} ({error:+.1f} %)" for measured, predicted, error in compared]
        table.add_row(name, str(num_gpus), *cells)
    return table


def summary(rows: list[tuple[str, int, np.ndarray]]) -> str:
    """Return the errors of all measured rows as text, such as 'median error 1.6 %, worst 7.7 %'."""
    absolute = np.abs(np.concatenate([errors(*row) for row in rows if row[1] in MEASURED_MS[row[0]]]))
    return f"median error {np.median(absolute):.1f} %, worst {absolute.max():.1f} %"


def plot(path: str, rows: list[tuple[str, int, np.ndarray]]) -> None:
    """Draw a panel per cluster: predictions as lines, measurements as points."""
    caption = (
        "points: measured (arXiv 2410.11998, Fig. 6); lines: predicted, fitted to the points; gray: sizes that were not fitted"
    )
    colors, markers = ("#0072B2", "#CC79A7", "#D55E00", "#009E73"), ("o", "D", "s", "^")
    names = list(dict.fromkeys(name for name, _, _ in rows))
    with script.panels(path, len(names), (4.3 * len(names), 4.4), caption) as axes:
        for axis, name in zip(axes, names, strict=True):
            sizes = [num_gpus for cluster, num_gpus, _ in rows if cluster == name]
            predicted = np.array([ms for cluster, _, ms in rows if cluster == name])
            measured = np.array(list(MEASURED_MS[name].values()))
            for index, (label, color, marker) in enumerate(zip(METHODS.values(), colors, markers, strict=True)):
                width = 3.5 if label == METHODS["exp"] else 1.5  # wide, since it often coincides with the line of AER
                axis.plot(sizes, predicted[:, index], color=color, linewidth=width, label=label)
                axis.plot(list(MEASURED_MS[name]), measured[:, index], marker, color=color, markersize=6, markeredgecolor="white")
            axis.axvspan(max(MEASURED_MS[name]) * 2**0.25, sizes[-1] * 2**0.25, color="0.93", zorder=0)
            axis.set(xscale="log", xlabel="GPUs", xlim=(sizes[0] * 2**-0.25, sizes[-1] * 2**0.25))
            axis.set(ylabel="ms per iteration", ylim=(0, None))
            axis.set_title(CLUSTERS[name].title, fontsize=10)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def main() -> None:
    if FLAGS.json or FLAGS.gpus is not None:
        if FLAGS.cluster is None or FLAGS.gpus is None:
            command.fail("--gpus needs --cluster, and --json both: --cluster=a40 --gpus=32 --json")
        if FLAGS.out or FLAGS.leave_one_out:
            which = f"--out={FLAGS.out}" if FLAGS.out else "--leave_one_out"
            command.fail(f"{which} has no effect with --gpus={FLAGS.gpus}; leave out one of them")
        predicted = dict(zip(METHODS, predict_at(FLAGS.cluster, FLAGS.gpus).round(2).tolist(), strict=True))
        lines = (f"{METHODS[key]}: {ms:.1f} ms" for key, ms in predicted.items())
        print(json.dumps(predicted) if FLAGS.json else "\n".join(lines))
        return
    sizes_of = {name: tuple(MEASURED_MS[name]) for name in ([FLAGS.cluster] if FLAGS.cluster else CLUSTERS)}
    rows = fitted(list(sizes_of))
    script.show(tabulate("ms per iteration, measured | predicted", rows), summary(rows) + " over the fitted rows")
    if FLAGS.leave_one_out:
        left_out = [
            (name, size, predict_at(name, size, tuple(other for other in sizes if other != size)))
            for name, sizes in sizes_of.items()
            for size in sizes
        ]
        script.show(tabulate("each size predicted from the other one alone", left_out), summary(left_out))
    for name, sizes in sizes_of.items():
        values = zip(PARAMETERS, np.exp(fit(name, sizes)), strict=True)
        script.show(f"{name}: " + ", ".join(f"{parameter} {value:.3g}" for parameter, value in values))
    if FLAGS.out:
        plot(FLAGS.out, rows)
        script.show(f"wrote {FLAGS.out}")


if __name__ == "__main__":
    flags.DEFINE_enum("cluster", None, list(CLUSTERS), "One cluster instead of all.")
    flags.DEFINE_integer("gpus", None, "Number of GPUs to predict, with --cluster.")
    flags.DEFINE_bool("json", False, "Print ms per iteration as one JSON object, with --cluster and --gpus.")
    flags.DEFINE(command.FIGURE, "out", None, "Where to write the figure, such as paper_runtime.png.")
    flags.DEFINE_bool("leave_one_out", False, "Also predict each size from the other one alone.")
    script.run(main, errors=(ValueError, OSError))
