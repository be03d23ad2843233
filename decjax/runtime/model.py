"""How long an iteration takes: a max-plus recursion over workers, by Monte Carlo, with closed forms where they exist.

A method sends messages over a topology's rounds. All-reduce is the topology "complete" with gradients as messages, so
there is one recursion. For worker i, bucket b, step t, with D(i) the workers whose messages i needs in that phase,

    compute        r_{i,b} = S_i + F_i + Σ_{k≤b} B_{i,k}                                 S_i: start of the step
    exchange       e_{i,b} = max_{j∈D(i)} max(ready_{j,b}, free_j) + c_{i,b}             free_j = e_{j,b−1}: one at a time

    not overlapped (all-reduce; adapt then communicate)
        gradients    ready = r,                         S' = e_last + opt
        parameters   ready = r + opt_{≤b},              S' = e_last + combine
    overlapped: what was sent in step t − 1 is needed in step t
        gradients    ready = r,                         S' = max(r_last, e⁻_last) + opt      (one step stale)
        parameters   u_b = max(u_{b−1} + B_b, e⁻_b) + opt_b, ready = u,  S' = u_last         (adapt while communicating)

where e⁻ was computed when it was sent. Nobody waits for workers outside D(i), and a late neighbour costs nothing as long
as its message arrives within the step. An exchange of b bytes takes c = α + b·β⁻¹ (`exchange_cost`), where messages that
leave a node at the same time share its NIC.

The equations are derived here from how these systems work; they are not copied from a paper. Arrays are [K, N]: K
independent systems (replicas, bandwidths, …) of N workers, so that nothing loops over workers.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from decjax import topology as topology_lib
from decjax.runtime.profile import Cluster, Workload
from decjax.topology import Round, Topology

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
GRADIENTS, PARAMETERS = "gradients", "parameters"


# -- Methods ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Method:
    """What is sent over which topology, and whether it hides behind computation. See the module's equations.

    Args:
        name: what tables call it.
        topology: who needs whose messages; None: nothing is sent.
        message: "gradients" (the optimizer waits for them) or "parameters" (sent after the optimizer).
        overlap: whether a message has a whole step to arrive.
        bucketed: whether buckets travel as they get ready; else everything is one message.
        ratio: bytes of a message ÷ bytes of the parameters. Anything but 1 costs codec time.
        codec: which codec makes them so, for clusters that tell codecs apart.
        every: p, messages are exchanged in every p-th step only.
        joint_ring: nodes that meet in pairs run one all-reduce over all their workers, which as a ring takes
            2(2L − 1)/2L parameter-sized messages out of a node, instead of exchanging shards, which takes one.

    Raises:
        ValueError: naming the value, the constraint and the fix.
    """

    name: str
    topology: Topology | None
    message: str = PARAMETERS
    overlap: bool = False
    bucketed: bool = False
    ratio: float = 1.0
    codec: str = ""
    every: int = 1
    joint_ring: bool = False

    def __post_init__(self):
        if self.message not in (GRADIENTS, PARAMETERS):
            raise ValueError(f"message={self.message!r} must be '{GRADIENTS}' or '{PARAMETERS}'")
        if not (isinstance(self.ratio, (int, float)) and 0 < self.ratio < math.inf):
            raise ValueError(f"ratio={self.ratio!r} must be a positive number; 0.5 are 16-bit messages of float32 parameters")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every={self.every!r} must be a whole number of at least 1; 1 communicates in each step")

    def due(self, step: int) -> int | None:
        """The phase whose round is needed at the end of a step; None if the step is local (cf. `gossip.every`)."""
        if self.topology is None or (step + 1) % self.every:
            return None
        return step // self.every % self.topology.period

    @property
    def period(self) -> int:
        """Steps after which the schedule repeats."""
        return 1 if self.topology is None else self.every * self.topology.period


def no_communication() -> Method:
    """Workers train apart: the lower bound of every method."""
    return Method("no communication", None)


def all_reduce(num_workers: int, *, overlap: bool = False, bucketed: bool = False, **options) -> Method:
    """The mean of all gradients: synchronous, `bucketed` behind the backward pass, or with `overlap` one step stale."""
    name = "all-reduce" + (", one step stale" if overlap else "") + (", bucketed" if bucketed else "")
    return Method(name, topology_lib.make("complete", num_workers), GRADIENTS, overlap, bucketed, **options)


def gossip(topology: Topology, *, order: str = "awc", name: str | None = None, **options) -> Method:
    """Parameters mix over a topology: order "awc" (adapt while communicating, overlaps) or "atc" (after the update).

    Raises:
        ValueError: for another order.
    """
    if order not in ("awc", "atc"):
        raise ValueError(f"order={order!r} must be 'awc' (overlaps with the gradient) or 'atc' (after the update)")
    return Method(name or f"{topology.name} {order}", topology, PARAMETERS, order == "awc", **options)


# -- What an exchange costs -------------------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """A round on a cluster: who waits for whom and how long messages take.

    Attributes:
        group_size: g, workers of a group; they wait for each other.
        sources: for each shift, which group a group hears, [N/g]; itself if none.
        latency_N: α of everything a worker takes part in, seconds.
        per_byte_N: seconds per byte of the parameters.
        sent_N: parameter-sized messages that each worker sends.
        nic_M: parameter-sized messages that leave each of M nodes.
    """

    group_size: int
    sources: tuple[np.ndarray, ...]
    latency_N: np.ndarray
    per_byte_N: np.ndarray
    sent_N: np.ndarray
    nic_M: np.ndarray

    def arrival(self, ready_KxN: np.ndarray) -> np.ndarray:
        """max_{j∈D(i)} ready_j, [K, N]."""
        g = self.group_size
        ready_KxG = ready_KxN if g == 1 else ready_KxN.reshape(len(ready_KxN), -1, g).max(axis=2)
        latest = ready_KxG
        for source_G in self.sources:
            latest = np.maximum(latest, ready_KxG[:, source_G])
        return latest if g == 1 else np.repeat(latest, g, axis=1)


def _mean(cluster: Cluster, members_GxM: np.ndarray) -> tuple[np.ndarray, ...]:
    """Means over G groups of M workers at the same time: (latency_G, per_byte_G, sent_G, nic_M).

    Ring: 2(M−1) steps of 1/M of the bytes each, and the slowest hop sets the pace,

        α = 2(M−1) α_hop,     β⁻¹ = 2(M−1)/M · max_hops(1/bandwidth) / efficiency.

    Hierarchical (l workers on each of m nodes, M = l·m): shards are reduced inside nodes, then by l rings between nodes that
    share the NIC, and gathered; chunks pass through both levels in a pipeline, so the slower level sets the pace,

        α = 2(m−1) α_inter + 2(l−1) α_intra,     β⁻¹ = max(2(m−1)/m / NIC, 2(l−1)/l / intra) / efficiency.
    """
    groups, M = members_GxM.shape
    if M == 1:
        return np.zeros(groups), np.zeros(groups), np.zeros(groups), np.zeros(cluster.num_nodes)
    nodes_GxM = members_GxM // cluster.workers_per_node
    next_GxM = np.roll(nodes_GxM, -1, axis=1)
    leaves_GxM = nodes_GxM != next_GxM
    out = np.bincount(nodes_GxM[leaves_GxM], minlength=cluster.num_nodes)
    into = np.bincount(next_GxM[leaves_GxM], minlength=cluster.num_nodes)
    sharing_GxM = np.maximum(out[nodes_GxM], into[next_GxM]) * leaves_GxM
    m_G = np.maximum(1, leaves_GxM.sum(axis=1))
    if cluster.hierarchical_all_reduce:
        l_G = M / m_G
        inter_G, intra_G = 2 * (m_G - 1) / m_G, 2 * (l_G - 1) / l_G
        per_byte_G = np.maximum(inter_G * sharing_GxM.max(axis=1) / cluster.inter.bandwidth_Bps,
                                intra_G / cluster.intra.bandwidth_Bps)
        latency_G = 2 * (m_G - 1) * cluster.inter.latency_s + 2 * (l_G - 1) * cluster.intra.latency_s
        # Every worker sends its shard of 1/l through the NIC.
        sent_G, leaving_GxM = intra_G + inter_G / l_G, leaves_GxM * inter_G[:, None]
    else:
        sent_G, leaving_GxM = np.full(groups, 2 * (M - 1) / M), leaves_GxM * (2 * (M - 1) / M)
        hop_GxM = np.where(leaves_GxM, sharing_GxM / cluster.inter.bandwidth_Bps, 1 / cluster.intra.bandwidth_Bps)
        per_byte_G = sent_G * hop_GxM.max(axis=1)
        latency_G = 2 * (M - 1) * np.where(leaves_GxM, cluster.inter.latency_s, cluster.intra.latency_s).max(axis=1)
    nic_M = np.bincount(nodes_GxM.ravel(), leaving_GxM.ravel(), cluster.num_nodes)
    return latency_G, per_byte_G / cluster.all_reduce_efficiency, sent_G, nic_M


def _messages(cluster: Cluster, shifts: Sequence[np.ndarray], num_workers: int) -> tuple[np.ndarray, ...]:
    """Point-to-point messages at the same time, [2, E] workers (source, target) a shift: (latency_N, per_byte_N, nic_M).

    A NIC is shared by all messages that leave (or enter) its node; inside a node, by those of one worker.
    """
    latency_N, per_byte_N = np.zeros(num_workers), np.zeros(num_workers)
    if not shifts:
        return latency_N, per_byte_N, np.zeros(cluster.num_nodes)
    source_E, target_E = np.concatenate(shifts, axis=1)
    weight_E = np.ones(len(source_E))
    if not cluster.full_duplex_pairs:  # Both directions of one shift share a connection, and take turns.
        weight_E = np.concatenate([1.0 + np.isin(s * num_workers + t, t * num_workers + s) for s, t in shifts])
    from_E, to_E = source_E // cluster.workers_per_node, target_E // cluster.workers_per_node
    leaves_E = from_E != to_E

    def load(index_E, which_E, length):
        return np.bincount(index_E[which_E], weight_E[which_E], length)

    nic = np.maximum(load(from_E, leaves_E, cluster.num_nodes)[from_E], load(to_E, leaves_E, cluster.num_nodes)[to_E])
    own = np.maximum(load(source_E, ~leaves_E, num_workers)[source_E], load(target_E, ~leaves_E, num_workers)[target_E])
    np.maximum.at(per_byte_N, target_E,
                  np.where(leaves_E, nic / cluster.inter.bandwidth_Bps, own / cluster.intra.bandwidth_Bps))
    np.add.at(latency_N, target_E, np.where(leaves_E, cluster.inter.latency_s, cluster.intra.latency_s))
    return latency_N, per_byte_N, np.bincount(from_E[leaves_E], minlength=cluster.num_nodes).astype(float)


def exchange_cost(cluster: Cluster, round_: Round, joint_ring: bool = False) -> Exchange:
    """What one round costs on a cluster.

    A group mean of g workers is a reduce-scatter and an all-gather, 2(g−1)/g of the bytes; with messages between groups,
    each member sends its share of 1/g in between, so that a joint mean of two nodes takes P bytes out of a node.

    Args:
        cluster: where.
        round_: who mixes with whom.
        joint_ring: see `Method`; only for rounds in which groups meet in pairs.

    Raises:
        ValueError: if the round is for another number of workers, or `joint_ring` does not fit.
    """
    N, g = round_.num_workers, round_.group_size
    if N != cluster.num_workers:
        raise ValueError(f"the round is for {N} workers, cluster {cluster.name!r} has {cluster.num_workers}; resize one of them")
    workers_GxM = np.arange(N).reshape(-1, g)
    pairs = [np.array(shift.pairs).T for shift in round_.shifts]
    sources = []
    for source, target in pairs:
        heard = np.arange(round_.num_nodes)
        heard[target] = source
        sources.append(heard)
    *mean, mean_nic_M = _mean(cluster, workers_GxM)
    latency_N, per_byte_N, sent_N = (np.repeat(of_group_G, g) for of_group_G in mean)
    if joint_ring and g > 1 and pairs:
        (source, target), = pairs if len(pairs) == 1 else [(np.array([0]), np.array([0]))]
        if len(pairs) > 1 or not np.isin(source * N + target, target * N + source).all():
            raise ValueError("joint_ring=True needs rounds in which nodes meet in pairs, as in "
                             "'alternating_exponential_ring'; leave it out")
        # Both groups are busy with one ring of 2g workers instead of their own.
        first = source < target
        joint_GxM = np.concatenate([workers_GxM[source[first]], workers_GxM[target[first]]], axis=1)
        *joint, nic_M = _mean(cluster, joint_GxM)
        for of_all_N, of_joint_G in zip((latency_N, per_byte_N, sent_N), joint, strict=True):
            of_all_N[joint_GxM] = of_joint_G[:, None]
        return Exchange(g, tuple(sources), latency_N, per_byte_N, sent_N, nic_M)
    shifts = [np.stack([workers_GxM[source].ravel(), workers_GxM[target].ravel()]) for source, target in pairs]
    latency, per_byte, nic_M = _messages(cluster, shifts, N)
    for source, _ in shifts:
        sent_N[source] += 1 / g
    return Exchange(g, tuple(sources), latency_N + latency, per_byte_N + per_byte / g, sent_N, mean_nic_M + nic_M / g)


def exchanges(cluster: Cluster, method: Method) -> list[Exchange]:
    """The costs of all phases; equal rounds are looked at once."""
    if method.topology is None:
        return []
    once = functools.cache(lambda round_: exchange_cost(cluster, round_, method.joint_ring))
    return [once(round_) for round_ in method.topology.rounds]


# -- The recursion ----------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Times of K systems of N workers over T steps, in seconds from the start.

    Attributes:
        start_TxKxN: [T + 1, K, N], when each step starts; the last one is the end.
        computed_TxKxN: [T, K, N], when the gradient is done.
        launched_TxKxN: [T, K, N], when the first message of the exchange needed in a step sets out; nan in local steps.
        arrived_TxKxN: [T, K, N], when everything of it is there; nan in local steps.
    """

    start_TxKxN: np.ndarray
    computed_TxKxN: np.ndarray
    launched_TxKxN: np.ndarray
    arrived_TxKxN: np.ndarray


def messages(workload: Workload, method: Method) -> Workload:
    """The workload in the buckets in which the method sends."""
    return workload if method.bucketed else workload.one_bucket()


def join_time_s(workload: Workload, method: Method) -> float:
    """Seconds to join what has arrived with the worker's own parameters; averaged gradients are joined with nothing."""
    return workload.combine_s if method.message == PARAMETERS else 0.0


def codec_time_s(cluster: Cluster, workload: Workload, method: Method) -> float:
    """Time to encode and decode one exchange, seconds; it occupies the worker itself."""
    if method.topology is None or method.ratio == 1:
        return 0.0
    rate_Bps = cluster.codec_rate(method.codec)
    return workload.total_bytes / rate_Bps if rate_Bps else 0.0


def durations(cluster: Cluster, workload: Workload, method: Method) -> list[np.ndarray]:
    """c_{i,b} of every phase in seconds, [buckets, 1, N]."""
    bytes_b = method.ratio * np.array(messages(workload, method).num_bytes)
    return [(exchange.latency_N + bytes_b[:, None] * exchange.per_byte_N)[:, None] for exchange in exchanges(cluster, method)]


def simulate(method: Method, workload: Workload, routes: Sequence[Exchange], cost_s: Sequence[np.ndarray],
             compute_TxKxN: np.ndarray, codec_s: float = 0.0) -> Run:
    """Runs the recursion of the module's docstring.

    Args:
        method: what is sent when.
        workload: nominal times; in each step those of forward and backward are scaled to the sampled compute time.
        routes: who waits for whom in every phase, from `exchanges`.
        cost_s: c of every phase, [buckets, K or 1, N] seconds.
        compute_TxKxN: compute times in seconds.
        codec_s: codec time of an exchange in seconds.

    Returns:
        The `Run`.
    """
    workload = messages(workload, method)
    T, K, N = compute_TxKxN.shape
    share_b = np.array(workload.num_bytes) / workload.total_bytes if workload.total_bytes else np.full(
        len(workload.num_bytes), 1 / len(workload.num_bytes))
    forward = workload.forward_s / workload.compute_s
    backward_b = [backward_s / workload.compute_s for backward_s in workload.backward_s]
    parameters = method.message == PARAMETERS
    starts, computed = np.zeros((T + 1, K, N)), np.zeros((T, K, N))
    launched, arrived = np.full((T, K, N), np.nan), np.full((T, K, N), np.nan)
    free = np.zeros((K, N))

    def exchange(step, phase, ready_b):
        nonlocal free
        arrivals = []
        for ready, cost in zip(ready_b, cost_s[phase], strict=True):
            free = routes[phase].arrival(np.maximum(ready, free)) + cost
            arrivals.append(free)
        if step < T:
            launched[step], arrived[step] = arrivals[0] - cost_s[phase][0], free
        return arrivals

    pending = None
    for t in range(T):
        phase = method.due(t)
        sends = method.due(t + 1) if method.overlap else phase  # The exchange that starts in this step.
        u = starts[t] + forward * compute_TxKxN[t]
        ready_b, busy_s = [], workload.optimizer_s + (join_time_s(workload, method) if phase is not None else 0.0)
        for b, backward in enumerate(backward_b):
            u = u + backward * compute_TxKxN[t]
            if parameters:
                if pending is not None:
                    u = np.maximum(u, pending[b])
                u = u + share_b[b] * (busy_s if method.overlap else workload.optimizer_s)
            if sends is not None:
                u = u + share_b[b] * codec_s
            ready_b.append(u)
        computed[t] = starts[t] + compute_TxKxN[t]
        if not method.overlap and phase is not None:
            u = exchange(t, phase, ready_b)[-1]
            u = u + (workload.combine_s if parameters else busy_s)
        elif method.overlap:
            if not parameters:
                u = (u if pending is None else np.maximum(u, pending[-1])) + busy_s
            pending = None if sends is None else exchange(t + 1, sends, ready_b)
        elif not parameters:
            u = u + busy_s
        starts[t + 1] = u
    return Run(starts, computed, launched, arrived)


# -- Closed forms -----------------------------------------------------------------------------------------------------


def closed_form(cluster: Cluster, workload: Workload, method: Method) -> float | None:
    """Mean time per iteration in seconds where a formula exists, else None. One bucket, p = 1, uniform workers:

        nothing sent                         C + opt                                        any jitter; C its mean
        all-reduce, C constant or C + s·Exp  C + s H_N + c + opt,  H_N = Σ_{k≤N} 1/k        E of the largest of N
        all-reduce one step stale            max(C + opt, c)                                C constant
        gossip, adapt while communicating    mean over phases of max(C, c) + opt + combine  C constant, c equal for all
        gossip, adapt then communicate       C + opt + combine + mean over phases of c      C constant, c equal for all
    """
    jitter = workload.jitter
    if not jitter.is_uniform or method.every > 1 or (method.bucketed and len(workload.num_bytes) > 1):
        return None
    compute_s = jitter.trace_s[0] if jitter.kind == "trace" else workload.compute_s
    if method.topology is None:
        mean_s = {"trace": np.mean(jitter.trace_s or 0.0), "exponential": compute_s + jitter.scale_s, "normal": None}
        mean_s = compute_s if jitter.is_deterministic else mean_s.get(jitter.kind, compute_s)
        return None if mean_s is None else float(mean_s + workload.optimizer_s)
    cost_s = np.stack(durations(cluster, workload, method))[:, 0, 0]  # [phases, N]
    codec_s = codec_time_s(cluster, workload, method)
    if method.message == GRADIENTS and not method.overlap and jitter.kind == "exponential" and method.topology.name == "complete":
        compute_s += jitter.scale_s * sum(1 / k for k in range(1, cluster.num_workers + 1))
    elif not jitter.is_deterministic:
        return None
    if np.ptp(cost_s, axis=1).max() > 1e-12 * cost_s.max():
        return None
    c, busy_s = cost_s[:, 0], workload.optimizer_s + join_time_s(workload, method)
    if method.message == GRADIENTS:
        if method.overlap and len(c) > 1:
            return None
        total_s = max(compute_s + codec_s + busy_s, c[0]) if method.overlap else compute_s + codec_s + c.mean() + busy_s
    elif method.overlap:
        total_s = np.maximum(compute_s, c).mean() + busy_s + codec_s
    else:
        total_s = compute_s + c.mean() + busy_s + codec_s
    return float(total_s)


# -- Prediction -------------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """Time per iteration and where it goes: mean_s = compute_s + waiting_s + exposed_s.

    Attributes:
        mean_s: mean over workers and steps, seconds.
        quantiles_s: of one worker's iteration, for the levels in `QUANTILES`.
        compute_s: forward, backward, optimizer, combine and codec of a worker, mean.
        waiting_s: waiting for slower workers, as it would be if messages took no time.
        exposed_s: what messages add to that.
        bytes_per_worker: bytes that a worker sends per step, mean over workers and the period.
        bytes_per_nic: bytes that leave the busiest node per step, mean over the period.
    """

    mean_s: float
    quantiles_s: dict[float, float]
    compute_s: float
    waiting_s: float
    exposed_s: float
    bytes_per_worker: float
    bytes_per_nic: float


def check(cluster: Cluster, method: Method) -> None:
    """Refuses a topology of another size.

    Raises:
        ValueError: naming both sizes.
    """
    topology = method.topology
    if topology is not None and topology.num_workers != cluster.num_workers:
        raise ValueError(f"method {method.name!r} is for {topology.num_workers} workers, cluster {cluster.name!r} has "
                         f"{cluster.num_workers}; use cluster.resize({topology.num_workers})")


def predict(cluster: Cluster, workload: Workload, method: Method, *, num_steps: int | None = None,
            num_replicas: int | None = None, seed: int = 0) -> Prediction:
    """Predicts the time per iteration.

    Methods that are compared share their random numbers: same seed, same compute times.

    Args:
        cluster: links and nodes.
        workload: one worker's iteration.
        method: what is sent, over which topology.
        num_steps: T of the simulation, after a warm-up of a quarter of it. Default: 1,000; less if nothing is random.
        num_replicas: independent repetitions. Default: as many as give about 1,000 workers, at most 16.
        seed: of the compute times.

    Returns:
        The `Prediction`.

    Raises:
        ValueError: if the method is for another number of workers, or a number is out of range.

    Example:
        >>> from decjax import topology
        >>> from decjax.runtime import Cluster, Link, Workload, gossip, predict
        >>> box = Cluster("box", 4, 1, Link(0, 1e9), Link(0, 25e6))
        >>> load = Workload(forward_s=0.1, backward_s=(0.2,), num_bytes=(24e6,))
        >>> round(predict(box, load, gossip(topology.make("one_peer_exponential", 4))).mean_s, 3)
        0.96
    """
    check(cluster, method)
    for name, value in (("num_steps", num_steps), ("num_replicas", num_replicas)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1; leave it out for a sensible default")
    still = workload.jitter.is_deterministic
    T = num_steps or (max(64, 8 * method.period) if still else 1000)
    R = num_replicas or (1 if still else max(1, min(16, 1000 // cluster.num_workers)))
    warm_up = -(-T // 4 // method.period) * method.period
    T = warm_up + -(-T // method.period) * method.period  # Whole periods, so that no phase counts more than others.
    compute_TxRxN = workload.jitter.sample(np.random.default_rng(seed), workload.compute_s, (T, R, cluster.num_workers))
    # The first R systems pay for messages, the others get them for nothing: the difference is what messages cost.
    pays_K = np.repeat([1.0, 0.0], R)[:, None]
    cost_s = [c * pays_K for c in durations(cluster, workload, method)]
    routes, codec_s = exchanges(cluster, method), codec_time_s(cluster, workload, method)
    run = simulate(method, workload, routes, cost_s, np.concatenate([compute_TxRxN] * 2, axis=1), codec_s)
    start_TxKxN = run.start_TxKxN[warm_up:]
    mean_K = (start_TxKxN[-1] - start_TxKxN[0]).mean(axis=1) / (len(start_TxKxN) - 1)
    mean_s, free_s = mean_K[:R].mean(), mean_K[R:].mean()
    sending = (method.topology is not None) / method.every
    busy_s = compute_TxRxN[warm_up:].mean() + workload.optimizer_s + sending * (join_time_s(workload, method) + codec_s)
    exact_s = closed_form(cluster, workload, method)
    quantiles = np.quantile(np.diff(start_TxKxN[:, :R], axis=0), QUANTILES)
    if exact_s is not None and method.topology is None:
        busy_s = free_s = mean_s = exact_s
    elif exact_s is not None:
        free_s, mean_s = free_s + exact_s - mean_s, exact_s
    num_bytes = method.ratio * sending * workload.total_bytes
    return Prediction(
        float(mean_s), dict(zip(QUANTILES, map(float, quantiles), strict=True)), float(busy_s), float(free_s - busy_s),
        float(mean_s - free_s),
        num_bytes * float(np.mean([route.sent_N.mean() for route in routes])) if routes else 0.0,
        num_bytes * float(np.mean([route.nic_M for route in routes], axis=0).max()) if routes else 0.0)
