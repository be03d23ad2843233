"""Rankings of methods for a cluster and a workload, and whether decentralized training pays there."""

from collections.abc import Sequence
import functools
import math
from typing import NamedTuple

import numpy as np

from decjax import topology as topology_lib
from decjax.costmodel.methods import GRADIENTS, Method, MethodOptions, Order, all_reduce, gossip, graphs, no_communication
from decjax.costmodel.model import Prediction, predict, single_stage
from decjax.costmodel.profile import Cluster, Jitter, Workload
from decjax.costmodel.simulator import horizon, simulate
from decjax.topology import Topology

# Topologies that are compared by default: one or few neighbors in a round, and known to mix well.
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
PAYS = 1.05  # least speed-up for which a change of algorithm is said to pay; smaller ones are within the model's error
MORE_STEPS = "1.1 to 1.5"  # times all-reduce's, to its final loss, in short runs of 4 workers; docs/results/race.md has longer ones
TIE = 1.03  # methods within this factor of the fastest count as equally fast
BANDWIDTHS_Bps = (1e5, 1e12)  # interval in which a threshold is searched
STEPS, REPLICAS = 80, 4  # of each simulation of `regions`
SHOWN = 12  # the iteration that a timeline shows; those before it are the warm-up


class Ranked(NamedTuple):
    """A method with its predicted time on a cluster."""

    method: Method
    prediction: Prediction
    speedup: float  # time of synchronous all-reduce in one message ÷ time of this method
    gap: float  # spectral gap 1 − ‖W − J/n‖₂ of a period of rounds; 1 is exact averaging, 0 none
    period: int  # rounds in a period

    @property
    def is_gossip(self) -> bool:
        """Whether parameters are mixed over a topology."""
        return self.method.topology is not None and self.method.message != GRADIENTS


def candidates(
    cluster: Cluster,
    topologies: Sequence[str] = TOPOLOGIES,
    orders: Sequence[Order] = ("awc", "atc"),
    *,
    bucketed: bool = True,
    ratio: float = 1.0,
    codec: str = "",
    every: int = 1,
) -> tuple[list[Method], dict[str, str]]:
    """Return methods to compare: no communication, three forms of all-reduce, and gossip over each topology that exists for this size.

    Args:
        cluster: gives the number of workers and how many share a node.
        topologies: names of topologies.
        orders: "awc", "atc" or both.
        bucketed: whether to include all-reduce in buckets, sent during the backward pass.
        ratio, every: of `Method`.
        codec: of gossip's messages; all-reduce is then not compressed, since encoded messages cannot be summed.

    Returns:
        The methods, and for topologies that do not exist at this size the reason why not.
    """
    n = cluster.num_workers
    options = MethodOptions(ratio=ratio, codec=codec, every=every)
    exact = MethodOptions(every=every) if codec else options
    methods = [
        no_communication(),
        all_reduce(n, **exact),
        *([all_reduce(n, bucketed=True, **exact)] if bucketed else []),
        all_reduce(n, overlap=True, **exact),
    ]
    existing, refused = graphs(topologies, n, cluster.workers_per_node)
    different: dict[tuple, Topology] = {}  # For few workers, many topologies are the same.
    for topology in existing.values():
        different.setdefault(topology.rounds, topology)
    return methods + [gossip(topology, order=order, **options) for topology in different.values() for order in orders], refused


@functools.cache  # Singular values of a thousand workers take seconds, and every order of a method needs them.
def _mixing(topology: Topology | None) -> tuple[float, int]:
    """Return (spectral gap of a period, rounds in it)."""
    if topology is None:
        return 0.0, 1
    if topology.name == "complete":
        return 1.0, 1
    return topology_lib.spectral_gap(topology), topology.period


def rank(cluster: Cluster, workload: Workload, methods: Sequence[Method]) -> list[Ranked]:
    """Return all methods with their predicted times, fastest first, after no communication, which bounds all of them."""
    reference_s = predict(cluster, workload, all_reduce(cluster.num_workers)).mean_s
    predictions = [(method, predict(cluster, workload, method)) for method in methods]
    ranked = [Ranked(method, each, reference_s / each.mean_s, *_mixing(method.topology)) for method, each in predictions]
    # Equally fast ones, to a tenth of a percent, are ordered by their spectral gap.
    return sorted(ranked, key=lambda r: (r.method.topology is not None, round(math.log(r.prediction.mean_s), 3), -r.gap))


def _best(ranked: Sequence[Ranked]) -> Ranked:
    """Return the method with the largest spectral gap among those within `TIE` of the fastest."""
    fastest_s = min(r.prediction.mean_s for r in ranked)
    return max((r for r in ranked if r.prediction.mean_s <= TIE * fastest_s), key=lambda r: (r.gap, -r.prediction.mean_s))


def verdict(cluster: Cluster, workload: Workload, ranked: Sequence[Ranked]) -> str:
    """Return a few sentences on whether decentralized training pays on this cluster, and below which bandwidth it does.

    Gossip is compared with the fastest *synchronous* all-reduce, in one message or in buckets. One-step-stale all-reduce is compared
    separately, since its gradients are a step old. Where gossip is faster than both, the verdict ends with the shorthand that trains
    it. A ValueError is raised if there is no synchronous all-reduce or no gossip among the methods from `rank`.
    """
    reduces, mixing = [r for r in ranked if r.method.message == GRADIENTS], [r for r in ranked if r.is_gossip]
    exact, stale = [r for r in reduces if not r.method.overlap], [r for r in reduces if r.method.overlap]
    if not exact or not mixing:
        raise ValueError("a verdict needs an all-reduce and a gossip method among those that are ranked; add them")
    reference, best = min(exact, key=lambda r: r.prediction.mean_s), _best(mixing)
    gain = reference.prediction.mean_s / best.prediction.mean_s
    stale_s = min((r.prediction.mean_s for r in stale), default=math.inf)
    if gain >= PAYS:
        text = (
            f"Decentralization pays on {cluster.name!r}: a step of {best.method.name!r} is {gain:.2f}× faster than one of "
            f"{reference.method.name!r}, the fastest synchronous all-reduce"
        )
        against = stale_s / best.prediction.mean_s
        if against < TIE:
            as_fast = f"{1 / against:.2f}× faster than this gossip" if against * TIE < 1 else "as fast"
            text += f". But one-step-stale all-reduce is {as_fast}, and averages over all workers"
        elif stale:
            text += f", and {against:.2f}× faster than one of one-step-stale all-reduce"
        if best.method.overlap:
            text += ". In short runs with 4 workers, overlapped gossip needed "
            text += f"{MORE_STEPS} times as many steps as all-reduce to the same loss; with more workers it may need more"
    else:
        busy = reference.prediction.compute_s / reference.prediction.mean_s
        text = (
            f"Decentralization does not pay on {cluster.name!r}: {reference.method.name!r} already computes "
            f"{100 * busy:.0f} % of the time, and the best gossip method ({best.method.name!r}) "
            + (f"would make a step only {gain:.2f}× faster" if gain > 1.005 else "is not faster")
        )
        if (ahead := reference.prediction.mean_s / stale_s) >= PAYS:
            text += f". One-step-stale all-reduce would make it {ahead:.2f}× faster"
    text += "." + _threshold(cluster, workload, reference.method, best.method, gain >= PAYS)
    return text + (_how_to_train(cluster, best.method) if gain >= PAYS and stale_s >= TIE * best.prediction.mean_s else "")


def _how_to_train(cluster: Cluster, method: Method) -> str:
    """Return a sentence with the shorthand of a gossip method; empty if the shorthand cannot express it."""
    if not method.topology or not topology_lib.is_doubly_stochastic(method.topology) or (method.ratio != 1 and not method.codec):
        return ""
    words = [f"topology={method.topology.name}"]
    words += [f"local_size={cluster.workers_per_node}"] if cluster.workers_per_node > 1 else []
    words += [f"fsdp={cluster.devices_per_worker}"] if cluster.devices_per_worker > 1 else []
    words += ["order=awc" if method.overlap else "order=atc"]
    words += [f"codec={method.codec}"] if method.codec else []
    words += [f"every={method.every}"] if method.every > 1 else []
    return f" Train it: --config=FILE.py:{','.join(words)}."


def _threshold(cluster: Cluster, workload: Workload, reference: Method, best: Method, pays: bool) -> str:
    """Return a sentence about the bandwidth at which the answer changes, found by bisection."""

    def gain(bandwidth_Bps: float) -> float:
        changed = cluster.at_bandwidth(bandwidth_Bps)
        first, second = (predict(changed, workload, each, num_steps=100, num_replicas=4).mean_s for each in (reference, best))
        return first / second

    now = cluster.bottleneck.bandwidth_Bps
    low, high = (now, BANDWIDTHS_Bps[1]) if pays else (BANDWIDTHS_Bps[0], now)
    far = high if pays else low
    links = "between nodes" if cluster.num_nodes > 1 else "inside the node"
    if (gain(far) >= PAYS) == pays:
        return (
            f" Even on infinitely fast links {links} gossip would stay faster than synchronous all-reduce in this model, because "
            "it has fewer latencies and waits for fewer workers."
            if pays
            else " Gossip would not pay with slower links either."
        )
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) >= PAYS else (low, middle)
    rate, changes = shown_rate(math.sqrt(low * high)), "no longer pays above" if pays else "would pay below"
    return f" Against synchronous all-reduce gossip {changes} about {rate} {links} (now {shown_rate(now)})."


def shown_rate(bandwidth_Bps: float) -> str:
    """Format a bandwidth in bits, as "100 Mbit/s"."""
    bits = 8 * bandwidth_Bps
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


class Regions(NamedTuple):
    """Which of M methods to prefer at V variations of compute time and B bandwidths."""

    methods: list[Method]  # in order of preference: all-reduce first, then by spectral gap
    time_s: np.ndarray  # [M, V, B], mean per iteration
    winner: np.ndarray  # [V, B], index of the first method that is within 3 % of the fastest


def _preference(method: Method) -> tuple:
    """Return the key that sorts methods of equal time: all-reduce first, then by spectral gap, and simpler ones first."""
    degree = method.topology.max_degree if method.topology else 0
    return method.message != GRADIENTS, -round(_mixing(method.topology)[0], 3), method.overlap, method.bucketed, degree


def regions(
    cluster: Cluster,
    workload: Workload,
    methods: Sequence[Method],
    bandwidth_Bps: Sequence[float] | np.ndarray,
    variation: Sequence[float] | np.ndarray,
) -> Regions:
    """Return the fastest of several methods, except no communication, at each bandwidth and variation of compute time.

    Args:
        cluster, workload: all but the bandwidth and the jitter.
        methods: to compare.
        bandwidth_Bps: B bandwidths of the cluster's bottleneck.
        variation: V coefficients of variation of compute times (log-normal).
    """
    methods = sorted((method for method in methods if method.topology is not None), key=_preference)
    clusters = [cluster.at_bandwidth(float(b)) for b in bandwidth_Bps]
    time_s = np.empty((len(methods), len(variation), len(clusters)))
    for m, method in enumerate(methods):
        steps = [single_stage(changed, workload, method) for changed in clusters]
        cost_s = [np.concatenate(phase, axis=1).repeat(REPLICAS, axis=1) for phase in zip(*(step.cost_s for step in steps))]
        step = steps[0]._replace(cost_s=cost_s)
        warm_up, T = horizon(method, STEPS)
        for v, cv in enumerate(variation):
            jitter = Jitter("lognormal", scale_s=float(cv) * workload.compute_s)
            compute = jitter.sample(np.random.default_rng(0), workload.compute_s, (T, REPLICAS, cluster.num_workers))
            run = simulate(method, step, np.tile(compute, (1, len(clusters), 1)))
            time_s[m, v] = run.step_KxN(warm_up).reshape(len(clusters), -1).mean(axis=1)
    return Regions(methods, time_s, winner=(time_s <= TIE * time_s.min(axis=0)).argmax(axis=0))


class Timeline(NamedTuple):
    """Times of events in one iteration of N workers, in seconds from when the first of them starts it; see `simulator.Times`."""

    start_N: np.ndarray
    computed_N: np.ndarray
    end_N: np.ndarray
    launched_N: np.ndarray
    arrived_N: np.ndarray


def timeline(cluster: Cluster, workload: Workload, method: Method) -> Timeline:
    """Return the times of one iteration, from a simulation in which all methods have the same compute times."""
    compute = workload.jitter.sample(np.random.default_rng(0), workload.compute_s, (SHOWN + 2, 1, cluster.num_workers))
    run = simulate(method, single_stage(cluster, workload, method), compute)
    start, computed, launched, arrived = (times[:, 0] for times in run)
    times_N = (start[SHOWN], computed[SHOWN], start[SHOWN + 1], launched[SHOWN], arrived[SHOWN])
    return Timeline(*(each_N - start[SHOWN].min() for each_N in times_N))
