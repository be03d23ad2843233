"""Ranks methods for a cluster and a workload, and says when decentralized training does not pay there; ranks 3D layouts."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np

from decjax import topology as topology_lib
from decjax.costmodel import model
from decjax.costmodel.method import GRADIENTS, Method, all_reduce, gossip, no_communication
from decjax.costmodel.model import Prediction, predict
from decjax.costmodel.profile import Cluster, Jitter, Workload
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
    n = cluster.num_workers
    options: dict[str, Any] = dict(ratio=ratio, codec=codec, every=every)
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
    bandwidth_Bps: Sequence[float] | np.ndarray,
    variation: Sequence[float] | np.ndarray,
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
    graphs = [method.topology for method in methods if method.topology is not None]
    gaps = [_mixing(graph)[0] for graph in graphs]
    order = sorted(
        range(len(methods)),
        key=lambda m: (
            methods[m].message != GRADIENTS,
            -round(gaps[m], 3),
            methods[m].overlap,
            methods[m].bucketed,
            graphs[m].max_degree,
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
            for phase in range(graphs[order[m]].period)
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
