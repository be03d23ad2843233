"""Ranks methods for a cluster and a workload, and says when decentralized training does not pay there; ranks 3D layouts."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from decjax import topology as topology_lib
from decjax.costmodel import model
from decjax.costmodel.footprint import Memory, memory
from decjax.costmodel.iteration import LayoutPrediction, choose_compressed_stages, predict_layout
from decjax.costmodel.layout import EPILOGUE, Boundary, Layout, Traffic, Work, work
from decjax.costmodel.model import GRADIENTS, Method, Prediction, all_reduce, gossip, no_communication, predict
from decjax.costmodel.profile import Cluster, Jitter, Workload
from decjax.costmodel.transformer import Transformer, low_rank_ratio
from decjax.topology import Topology

# Graphs that are compared unless told otherwise: one or few neighbours, known for mixing well.
TOPOLOGIES = (
    "one_peer_exponential",
    "alternating_exponential_ring",
    "hierarchical",
    "base_k",
    "exponential",
    "ring",
    "one_peer_ring",
    "torus",
)
PAYS = 1.05  # A smaller speed-up is not worth a change of algorithm, nor within what the model can tell.
TIE = 1.03  # Methods within this factor of the fastest count as equally fast.
BANDWIDTHS_Bps = (1e5, 1e12)  # where a threshold is looked for


class Ranked(NamedTuple):
    """A method with what it takes on a cluster.

    Attributes:
        method: the method.
        prediction: time and bytes.
        speedup: time of synchronous all-reduce in one message ÷ time of this method.
        gap: spectral gap 1 − ‖W − J/n‖₂ of a period of rounds; 1 is exact averaging, 0 none.
        period: rounds in a period.
    """

    method: Method
    prediction: Prediction
    speedup: float
    gap: float
    period: int

    @property
    def is_gossip(self) -> bool:
        return self.method.topology is not None and self.method.message != GRADIENTS


def candidates(
    cluster: Cluster,
    topologies: Sequence[str] = TOPOLOGIES,
    orders: Sequence[str] = ("awc", "atc"),
    *,
    bucketed: bool = True,
    ratio: float = 1.0,
    codec: str = "",
    every: int = 1,
) -> tuple[list[Method], dict[str, str]]:
    """No communication, three forms of all-reduce, and gossip over each topology that exists for the cluster's size.

    Args:
        cluster: gives the number of workers and how many share a node.
        topologies: names of the catalogue.
        orders: "awc", "atc" or both.
        bucketed: whether all-reduce is also considered in buckets behind the backward pass.
        ratio: of every message, see `Method`.
        codec: which one makes gossip's messages of that ratio; gradients then travel as they are, since a sum cannot be coded.
        every: communicate in every p-th step.

    Returns:
        The methods, and for topologies that do not exist at this size the reason why not.

    Raises:
        ValueError: for an unknown topology or order, or another bad option.
    """
    n, options = cluster.num_workers, dict(ratio=ratio, codec=codec, every=every)
    exact = options | ({"ratio": 1.0, "codec": ""} if codec else {})
    methods = [
        no_communication(),
        all_reduce(n, **exact),
        *([all_reduce(n, bucketed=True, **exact)] if bucketed else []),
        all_reduce(n, overlap=True, **exact),
    ]
    refused, seen = {}, set()
    for name in topologies:
        local = {"local_size": cluster.workers_per_node} if "local_size" in topology_lib.options(name) else {}
        try:
            topology = topology_lib.make(name, n, **local)
        except ValueError as error:
            refused[name] = str(error)
            continue
        if topology.rounds not in seen:  # On few workers, many graphs are the same.
            methods += [gossip(topology, order=order, **options) for order in orders]
        seen.add(topology.rounds)
    return methods, refused


@functools.cache  # Singular values of a thousand workers take seconds, and every order of a method needs them.
def _mixing(topology: Topology | None) -> tuple[float, int]:
    """(spectral gap of a period, rounds in it)."""
    if topology is None:
        return 0.0, 1
    if topology.name == "complete":
        return 1.0, 1
    return topology_lib.spectral_gap(topology), topology.period


def rank(cluster: Cluster, workload: Workload, methods: Sequence[Method], **options) -> list[Ranked]:
    """Predicts every method, fastest first. No communication comes first of all: nothing can be faster.

    Args:
        cluster: where.
        workload: one worker's iteration.
        methods: e.g. from `candidates`.
        **options: of `predict`.
    """
    reference_s = predict(cluster, workload, all_reduce(cluster.num_workers), **options).mean_s
    ranked = []
    for method in methods:
        prediction = predict(cluster, workload, method, **options)
        ranked.append(Ranked(method, prediction, reference_s / prediction.mean_s, *_mixing(method.topology)))
    # Equally fast ones in the order of how well they mix; tenths of a percent are noise.
    return sorted(ranked, key=lambda r: (r.method.topology is not None, round(math.log(r.prediction.mean_s), 3), -r.gap))


def _best(ranked: Sequence[Ranked]) -> Ranked:
    """Of the fastest ones, the one that mixes best."""
    fastest_s = min(r.prediction.mean_s for r in ranked)
    return max((r for r in ranked if r.prediction.mean_s <= TIE * fastest_s), key=lambda r: (r.gap, -r.prediction.mean_s))


def verdict(cluster: Cluster, workload: Workload, ranked: Sequence[Ranked], **options) -> str:
    """One or two plain sentences: whether decentralization pays on this cluster, and below which bandwidth it does.

    Args:
        cluster, workload: as they were ranked.
        ranked: from `rank`; with an all-reduce and a gossip method at least.
        **options: of `predict`, for the bisection of the bandwidth.

    The yardstick is the fastest *exact* all-reduce, in one message or in buckets; one-step-stale all-reduce is told apart,
    since it changes the algorithm as well.

    Raises:
        ValueError: if there is nothing to compare.
    """
    exact = [r for r in ranked if r.method.topology is not None and not r.is_gossip and not r.method.overlap]
    stale = [r for r in ranked if r.method.topology is not None and not r.is_gossip and r.method.overlap]
    mixing = [r for r in ranked if r.is_gossip]
    if not exact or not mixing:
        raise ValueError("a verdict needs an all-reduce and a gossip method among those that are ranked")
    reference, best = min(exact, key=lambda r: r.prediction.mean_s), _best(mixing)
    gain = reference.prediction.mean_s / best.prediction.mean_s
    if gain >= PAYS:
        text = (
            f"Decentralization pays on {cluster.name!r}: an iteration of {best.method.name!r} is {gain:.2f} times as fast as "
            f"that of the best synchronous form, {reference.method.name!r}"
        )
        if stale:
            against = stale[0].prediction.mean_s / best.prediction.mean_s
            text += (
                f", and {against:.2f} times as fast as one-step-stale all-reduce"
                if against >= TIE
                else "; but all-reduce one step stale is as fast, and averages exactly"
            )
    else:
        idle = 1 - reference.prediction.compute_s / reference.prediction.mean_s
        text = (
            f"Decentralization does not pay on {cluster.name!r}: {reference.method.name!r} already computes "
            f"{100 * (1 - idle):.0f} % of the time, and the best gossip method ({best.method.name!r}) "
            + (f"would make an iteration only {gain:.2f} times as fast" if gain > 1.005 else "is not faster")
        )
    return text + "." + _threshold(cluster, workload, reference.method, best.method, gain >= PAYS, **options)


def _threshold(cluster: Cluster, workload: Workload, reference: Method, best: Method, pays: bool, **options) -> str:
    """At which bandwidth between nodes (inside, if there is one node) the answer changes, by bisection."""
    where = "inter" if cluster.num_nodes > 1 else "intra"

    def gain(bandwidth_Bps):
        link = dataclasses.replace(getattr(cluster, where), bandwidth_Bps=bandwidth_Bps)
        changed = dataclasses.replace(cluster, **{where: link})
        first, second = (
            predict(changed, workload, method, **{"num_steps": 100, "num_replicas": 4} | options).mean_s
            for method in (reference, best)
        )
        return first / second

    now = getattr(cluster, where).bandwidth_Bps
    low, high = (now, BANDWIDTHS_Bps[1]) if pays else (BANDWIDTHS_Bps[0], now)
    far = high if pays else low
    if (gain(far) >= PAYS) == pays:
        return (
            " It does so on links of any bandwidth: latencies, and waiting for each other, remain."
            if pays
            else " Nor would it with slower links."
        )
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) >= PAYS else (low, middle)
    links = "between nodes" if where == "inter" else "inside the node"
    rate = _rate(math.sqrt(low * high))
    return f" It {'no longer pays above' if pays else 'would below'} about {rate} {links} (now {_rate(now)})."


def _rate(bandwidth_Bps: float) -> str:
    bits = 8 * bandwidth_Bps
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


class Regions(NamedTuple):
    """Which method is to be preferred where.

    Attributes:
        bandwidth_Bps: [B] between nodes (inside, if there is one node).
        variation: [V] coefficients of variation of compute times (log-normal).
        methods: M of them, in order of preference: exact ones first, then by spectral gap.
        time_s: [M, V, B] mean time per iteration.
        winner: [V, B] index of the first method that is within 3 % of the fastest.
    """

    bandwidth_Bps: np.ndarray
    variation: np.ndarray
    methods: list[Method]
    time_s: np.ndarray
    winner: np.ndarray


def regions(
    cluster: Cluster,
    workload: Workload,
    methods: Sequence[Method],
    bandwidth_Bps: Sequence[float],
    variation: Sequence[float],
    *,
    num_steps: int = 80,
    num_replicas: int = 4,
    seed: int = 0,
) -> Regions:
    """Predicts methods over bandwidths and variations of compute time; all bandwidths in one simulation.

    Args:
        cluster: what else is fixed.
        workload: its own jitter is replaced.
        methods: those to compare; no communication is left out.
        bandwidth_Bps: B bandwidths.
        variation: V coefficients of variation.
        num_steps: of each simulation, a quarter more for warming up.
        num_replicas: of each simulation.
        seed: of the compute times.
    """
    bandwidths, variations = np.asarray(bandwidth_Bps, float), np.asarray(variation, float)
    where = "inter" if cluster.num_nodes > 1 else "intra"
    methods = [method for method in methods if method.topology is not None]
    gaps = [_mixing(method.topology)[0] for method in methods]
    order = sorted(
        range(len(methods)),
        key=lambda m: (
            methods[m].message != GRADIENTS,
            -round(gaps[m], 3),
            methods[m].overlap,
            methods[m].bucketed,
            methods[m].topology.max_degree,
        ),
    )
    methods = [methods[m] for m in order]
    links = [dataclasses.replace(getattr(cluster, where), bandwidth_Bps=float(b)) for b in bandwidths]
    clusters = [dataclasses.replace(cluster, **{where: link}) for link in links]
    time_s = np.empty((len(methods), len(variations), len(bandwidths)))
    for m, method in enumerate(methods):
        model.check(cluster, method)
        per_bandwidth = [model.durations(changed, workload, method) for changed in clusters]
        cost_s = [
            np.concatenate([c[phase].repeat(num_replicas, axis=1) for c in per_bandwidth], axis=1)
            for phase in range(method.topology.period)
        ]
        routes, codec_s = model.exchanges(cluster, method), model.codec_time_s(cluster, workload, method)
        warm_up, T = model.horizon(method, num_steps)
        for v, cv in enumerate(variations):
            jitter = Jitter("lognormal", scale_s=float(cv) * workload.compute_s)
            compute = jitter.sample(np.random.default_rng(seed), workload.compute_s, (T, num_replicas, cluster.num_workers))
            run = model.simulate(method, workload, routes, cost_s, np.tile(compute, (1, len(bandwidths), 1)), codec_s)
            elapsed_KxN = (run.start_TxKxN[-1] - run.start_TxKxN[warm_up]) / (T - warm_up)
            time_s[m, v] = elapsed_KxN.reshape(len(bandwidths), -1).mean(axis=1)
    winner = (time_s <= TIE * time_s.min(axis=0)).argmax(axis=0)
    return Regions(bandwidths, variations, methods, time_s, winner)


class Timeline(NamedTuple):
    """One iteration of N workers, seconds from when the first of them starts it.

    Attributes:
        start_N, computed_N, end_N: an iteration starts, its gradient is done, the next one starts.
        launched_N, arrived_N: the exchange that is needed in this iteration; nan if there is none.
    """

    start_N: np.ndarray
    computed_N: np.ndarray
    end_N: np.ndarray
    launched_N: np.ndarray
    arrived_N: np.ndarray


def timeline(cluster: Cluster, workload: Workload, method: Method, *, step: int = 12, seed: int = 0) -> Timeline:
    """One iteration, from a simulation. Methods that are compared share their compute times.

    Args:
        cluster: where.
        workload: one worker's iteration.
        method: which method.
        step: which iteration to look at, after those before it.
        seed: of the compute times.
    """
    model.check(cluster, method)
    compute = workload.jitter.sample(np.random.default_rng(seed), workload.compute_s, (step + 2, 1, cluster.num_workers))
    run = model.simulate(
        method,
        workload,
        model.exchanges(cluster, method),
        model.durations(cluster, workload, method),
        compute,
        model.codec_time_s(cluster, workload, method),
    )
    zero = run.start_TxKxN[step].min()
    return Timeline(
        *(
            times[index, 0] - zero
            for times, index in (
                (run.start_TxKxN, step),
                (run.computed_TxKxN, step),
                (run.start_TxKxN, step + 1),
                (run.launched_TxKxN, step),
                (run.arrived_TxKxN, step),
            )
        )
    )


# -- Three dimensions -------------------------------------------------------------------------------------------------

BOUNDARY_RANK, WORKERS_RANK = 16, 128  # of Optimus-CC's runs, arXiv 2301.09830


class RankedLayout(NamedTuple):
    """A layout with what it takes on a cluster.

    Attributes:
        layout: workers × stages × tensor and the schedule.
        name: of what is sent: "all-reduce" or a graph, with "CB" (compressed backpropagation), "FE" (fused embedding
            synchronization) and "SC k" (the first k stages send low-rank gradients; "PowerSGD" where there is only one).
        traffic: the same.
        prediction: time and where it goes.
        memory: of the fullest device.
        speedup: time of the fastest layout with plain all-reduce ÷ time of this one.
    """

    layout: Layout
    name: str
    traffic: Traffic
    prediction: LayoutPrediction
    memory: Memory
    speedup: float


def layouts(model: Transformer, num_devices: int, *, microbatch_size: int = 1, **options) -> tuple[list[Layout], dict[str, str]]:
    """All divisions of devices into workers × stages × tensor that the model allows.

    Args:
        model: is divided.
        num_devices: of all axes together.
        microbatch_size: sequences in a microbatch.
        **options: of `Layout`; chunks count where there are stages to interleave.

    Returns:
        The layouts, and for the others the reason why not.
    """
    found, refused = [], {}
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    for workers, stages in ((n, s) for n in divisors for s in divisors if num_devices % (n * s) == 0):
        tensor = num_devices // (workers * stages)
        flat = dict(schedule="1f1b", chunks=1) if stages == 1 else {}
        try:
            if model.batch_size % (workers * microbatch_size):
                raise ValueError(
                    f"batch_size={model.batch_size} does not divide into workers={workers} × microbatches of "
                    f"{microbatch_size}; use a multiple of {workers * microbatch_size}"
                )
            microbatches = model.batch_size // (workers * microbatch_size)
            layout = Layout(workers, stages, tensor, microbatches, **options | flat)
            layout.check(model)
        except ValueError as error:
            refused[f"{workers}×{stages}×{tensor}"] = str(error)
        else:
            found.append(layout)
    return found, refused


def compressions(
    cluster: Cluster,
    model: Transformer,
    load: Work,
    layout: Layout,
    *,
    boundary_rank: int = BOUNDARY_RANK,
    workers_rank: int = WORKERS_RANK,
) -> dict[str, Traffic]:
    """All-reduce plain, and with one part of Optimus-CC after the other, as far as the layout has a use for them.

    CB sends gradients that stages wait for as low-rank matrices of a device's share; FE averages a tied embedding at once; SC
    sends low-rank gradients between workers from the first k stages, k by `choose_compressed_stages`. Their codecs are called
    "low_rank" and "powersgd" where the cluster tells codecs apart.
    """
    name, traffic = "all-reduce", Traffic(all_reduce(layout.workers))
    variants = {name: traffic}
    rows = layout.microbatch_size(model) * model.context / (layout.tensor if layout.split_boundary else 1)
    if layout.stages > 1 and low_rank_ratio(rows, model.width, boundary_rank) > 1:
        ratio = 1 / low_rank_ratio(rows, model.width, boundary_rank)
        name, traffic = f"{name} CB", dataclasses.replace(traffic, backward=Boundary(ratio, "low_rank", EPILOGUE))
        variants[name] = traffic
    if load.embedding_bytes:
        name, traffic = f"{name} FE", dataclasses.replace(traffic, fused_embedding=True)
        variants[name] = traffic
    if layout.workers > 1 and model.low_rank_ratio(workers_rank, layout.tensor) > 1:
        method = all_reduce(layout.workers, ratio=1 / model.low_rank_ratio(workers_rank, layout.tensor), codec="powersgd")
        traffic = dataclasses.replace(traffic, method=method)
        k, _ = choose_compressed_stages(cluster, load, layout, traffic)
        variants[f"{name} SC {k}" if layout.stages > 1 else f"{name} PowerSGD"] = dataclasses.replace(traffic, compressed_stages=k)
    return variants


def gossips(
    cluster: Cluster, layout: Layout, topologies: Sequence[str], orders: Sequence[str], boundaries: dict[str, Boundary]
) -> dict[str, Traffic]:
    """Gossip between pipelines over each topology that exists for so many workers, with each way to send gradients back."""
    found: dict[str, Traffic] = {}
    local_size = max(1, cluster.workers_per_node // (layout.tensor * (layout.stages if layout.inner == "stage" else 1)))
    for name in topologies if layout.workers > 1 else ():
        local = {"local_size": local_size} if "local_size" in topology_lib.options(name) else {}
        try:
            topology = topology_lib.make(name, layout.workers, **local)
        except ValueError:
            continue  # Not of this size.
        found |= {
            f"{name} {order}{suffix}": Traffic(gossip(topology, order=order), backward=boundary)
            for order in orders
            for suffix, boundary in boundaries.items()
        }
    return found


def rank_layouts(
    cluster: Cluster,
    model: Transformer,
    candidates: Sequence[Layout],
    *,
    topologies: Sequence[str] = ("one_peer_exponential",),
    orders: Sequence[str] = ("awc",),
    boundary_rank: int = BOUNDARY_RANK,
    workers_rank: int = WORKERS_RANK,
) -> tuple[list[RankedLayout], dict[str, str]]:
    """Predicts every layout with every way to send, fastest first.

    Args:
        cluster: as large as the layouts, with `flops`; layouts that need more than its `memory_bytes` are refused.
        model: what is trained.
        candidates: e.g. from `layouts`.
        topologies, orders: of gossip between pipelines; none: all-reduce only.
        boundary_rank, workers_rank: see `compressions`.

    Returns:
        The ranking; and for layouts that do not fit (or, after " with ", for ways to send that do not), what they need.

    Raises:
        ValueError: if the cluster does not tell `flops`, or a layout has another number of devices.
    """
    if cluster.flops is None:
        raise ValueError(
            f"cluster {cluster.name!r} does not tell flops, which the time of a pass follows from; enter what a device sustains"
        )
    rows, refused = [], {}
    for layout in candidates:
        bare = memory(model, layout, Traffic(no_communication()))
        if not _fits(cluster, bare):
            refused[layout.name] = _needs(cluster, bare)
            continue
        load = work(model, layout, cluster.flops)
        ways = compressions(cluster, model, load, layout, boundary_rank=boundary_rank, workers_rank=workers_rank)
        boundaries = {"": Boundary()} | ({" CB": ways["all-reduce CB"].backward} if "all-reduce CB" in ways else {})
        for name, traffic in (ways | gossips(cluster, layout, topologies, orders, boundaries)).items():
            held = memory(model, layout, traffic)
            if _fits(cluster, held):
                rows.append((layout, name, traffic, predict_layout(cluster, load, layout, traffic), held))
            else:
                refused[f"{layout.name} with {name}"] = _needs(cluster, held)
    plain_s = min((row[3].time_s for row in rows if row[1] == "all-reduce"), default=math.nan)
    ranked = [RankedLayout(*row, plain_s / row[3].time_s) for row in rows]
    return sorted(ranked, key=lambda r: r.prediction.time_s), refused


def _fits(cluster: Cluster, held: Memory) -> bool:
    return cluster.memory_bytes is None or held.total <= cluster.memory_bytes


def _needs(cluster: Cluster, held: Memory) -> str:
    parts = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in held._asdict().items() if name != "stage" and value)
    return (
        f"a device of stage {held.stage} needs {held.total / 1e9:.3g} GB ({parts}) and has {cluster.memory_bytes / 1e9:.3g}; "
        "use more stages or tensor devices, smaller microbatches, or more remat"
    )
