"""Time per iteration of a method: a max-plus recursion over workers, by Monte Carlo, with closed forms where they exist.

A method sends messages over a topology's rounds. All-reduce is the topology "complete" with gradients as messages, so there is one
recursion for all methods. For worker i, bucket b and one step, with D(i) the workers whose messages i needs in that step's phase,

    compute        r_{i,b} = S_i + F_i + Σ_{k≤b} B_{i,k}                                 S_i: start of the step
    exchange       e_{i,b} = max_{j∈D(i)} max(ready_{j,b}, free_j) + c_{i,b}             free_j = e_{j,b−1}: one at a time

    not overlapped (all-reduce; adapt then communicate)
        gradients    ready = r,                         S' = e_last + opt
        parameters   ready = r + opt_{≤b},              S' = e_last + combine
    overlapped: what was sent in step t − 1 is needed in step t
        gradients    ready = r,                         S' = max(r_last, e⁻_last) + opt      (one step stale)
        parameters   u_b = max(u_{b−1} + B_b + opt_b, e⁻_b) + combine_b, ready = u,  S' = u_last   (adapt while communicating)

where e⁻ is the e of the exchange that was sent in the step before. A worker waits only for those in D(i), and a late neighbour costs
nothing as long as its message arrives within the step. An exchange of b bytes takes c = α + b·β⁻¹ (`exchange_cost`), where messages
that leave a node at the same time share its NIC; overlapped it takes `beside_s` longer, where computing slows it down.

The equations are derived here from how these systems work, not taken from a paper. Arrays are [K, N]: K independent systems
(replicas, bandwidths, …) of N workers, so that no loop runs over workers.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import numpy as np

from decjax.costmodel.exchange import Exchange, exchange_cost
from decjax.costmodel.methods import GRADIENTS, PARAMETERS, Method
from decjax.costmodel.profile import Cluster, Workload

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


# -- The recursion ----------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Times of events in K systems of N workers over T steps, in seconds from the start."""

    start_TxKxN: np.ndarray  # [T + 1, K, N], when each step starts; the last entry is the end of the last step
    computed_TxKxN: np.ndarray  # [T, K, N], when the gradient is done
    launched_TxKxN: np.ndarray  # when the first message of the exchange needed in a step is sent; nan in steps without one
    arrived_TxKxN: np.ndarray  # when all messages of that exchange have arrived; nan in steps without one


def messages(workload: Workload, method: Method) -> Workload:
    """The workload in the method's messages: its buckets, or all of them as one."""
    return workload if method.bucketed else workload.one_bucket()


def join_time_s(workload: Workload, method: Method) -> float:
    """Seconds to combine arrived parameters with the worker's own; 0 for a method that averages gradients."""
    return workload.combine_s if method.message == PARAMETERS else 0.0


def exchanges(cluster: Cluster, method: Method) -> list[Exchange]:
    """The cost of each phase's round on the cluster; ValueError if the topology is for another number of workers."""
    if method.topology is None:
        return []
    if method.topology.num_workers != cluster.num_workers:
        raise ValueError(
            f"method {method.name!r} is for {method.topology.num_workers} workers, cluster {cluster.name!r} has "
            f"{cluster.num_workers}; use cluster.resize({method.topology.num_workers})"
        )
    once = functools.cache(lambda round_: exchange_cost(cluster, round_, method.joint_ring))
    return [once(round_) for round_ in method.topology.rounds]


def codec_time_s(cluster: Cluster, workload: Workload, method: Method) -> float:
    """Seconds to encode and decode one exchange, during which the worker computes nothing else."""
    if method.topology is None or method.ratio == 1:
        return 0.0
    return cluster.coding_s(workload.total_bytes, method.codec) if method.coding_s is None else method.coding_s


def durations(cluster: Cluster, workload: Workload, method: Method) -> list[np.ndarray]:
    """For each phase the times c_{i,b} of its exchange, [buckets, 1, N] seconds."""
    bytes_b = method.ratio * np.array(messages(workload, method).num_bytes)
    beside_s = workload.beside_s / len(bytes_b) if method.overlap else 0.0
    return [
        (method.latencies * exchange.latency_N + bytes_b[:, None] * exchange.per_byte_N + beside_s)[:, None]
        for exchange in exchanges(cluster, method)
    ]


def simulate(
    cluster: Cluster, workload: Workload, method: Method, compute_TxKxN: np.ndarray, cost_s: Sequence[np.ndarray] | None = None
) -> Times:
    """Times of all events over T steps, by the recursion of the module's docstring.

    Args:
        cluster: as in `predict`.
        workload: as in `predict`; its times of forward and backward are scaled to the sampled compute time.
        method: as in `predict`.
        compute_TxKxN: compute times in seconds.
        cost_s: c of every phase, [buckets, K or 1, N] seconds; None: `durations` on the cluster.
    """
    routes, codec_s = exchanges(cluster, method), codec_time_s(cluster, workload, method)
    cost_s = durations(cluster, workload, method) if cost_s is None else cost_s
    workload = messages(workload, method)
    T, K, N = compute_TxKxN.shape
    starts, computed = np.zeros((T + 1, K, N)), np.zeros((T, K, N))
    launched, arrived = np.full((T, K, N), np.nan), np.full((T, K, N), np.nan)
    parameters, free, pending = method.message == PARAMETERS, np.zeros((K, N)), None

    for t in range(T):
        phase = method.due(t)
        sends = method.due(t + 1) if method.overlap else phase  # The phase of the exchange that starts in this step.
        join_s = join_time_s(workload, method) if phase is not None else 0.0
        ready_b = _ready(workload, method, starts[t], compute_TxKxN[t], pending, join_s, 0.0 if sends is None else codec_s)
        u = ready_b[-1]
        computed[t] = starts[t] + compute_TxKxN[t]
        arrivals = None
        if sends is not None:
            arrivals = _arrivals(routes[sends], cost_s[sends], ready_b, free)
            free, step = arrivals[-1], t + method.overlap
            if step < T:
                launched[step], arrived[step] = arrivals[0] - cost_s[sends][0], free
        if not method.overlap and arrivals is not None:
            u = arrivals[-1] + (join_s if parameters else workload.optimizer_s)
        elif method.overlap:
            if not parameters:
                u = (u if pending is None else np.maximum(u, pending[-1])) + workload.optimizer_s
            pending = arrivals
        elif not parameters:
            u = u + workload.optimizer_s
        starts[t + 1] = u
    return Times(starts, computed, launched, arrived)


def _arrivals(route: Exchange, cost_b, ready_b: list[np.ndarray], free_KxN: np.ndarray) -> list[np.ndarray]:
    """When each bucket of an exchange arrives, one after the other; `free_KxN`: when all earlier exchanges have arrived."""
    arrivals = []
    for ready, cost in zip(ready_b, cost_b, strict=True):
        free_KxN = route.arrival(np.maximum(ready, free_KxN)) + cost
        arrivals.append(free_KxN)
    return arrivals


def _ready(workload: Workload, method: Method, start_KxN, compute_KxN, pending, join_s: float, codec_s: float) -> list[np.ndarray]:
    """When each bucket of a step is ready to be sent; `pending`: when those on their way arrive."""
    total, buckets = workload.total_bytes, len(workload.num_bytes)
    u, ready_b = start_KxN + workload.forward_s / workload.compute_s * compute_KxN, []
    for b, backward_s in enumerate(workload.backward_s):
        share = workload.num_bytes[b] / total if total else 1 / buckets
        u = u + backward_s / workload.compute_s * compute_KxN
        if method.message == PARAMETERS:
            u = u + share * workload.optimizer_s
            if pending is not None:
                u = np.maximum(u, pending[b])
            if method.overlap:
                u = u + share * join_s
        ready_b.append(u := u + share * codec_s)
    return ready_b


# -- Closed forms -----------------------------------------------------------------------------------------------------


def closed_form(cluster: Cluster, workload: Workload, method: Method) -> float | None:
    """Mean seconds per iteration by a formula; None where there is none.

    There are formulas for messages of one bucket in every step (p = 1) between workers that are equally fast:

        nothing sent                         C + opt                                        any jitter; C its mean
        all-reduce, C constant or C + s·Exp  C + s H_N + c + opt,  H_N = Σ_{k≤N} 1/k        mean of the slowest of N
        all-reduce one step stale            max(C + opt, c)                                C constant
        gossip, adapt while communicating    mean over phases of max(C + opt, c) + combine  C constant, c equal for all
        gossip, adapt then communicate       C + opt + combine + mean over phases of c      C constant, c equal for all
    """
    if not workload.jitter.is_uniform or method.every > 1 or (method.bucketed and len(workload.num_bytes) > 1):
        return None
    compute_s = _expected_compute_s(cluster, workload, method)
    if compute_s is None or method.topology is None:
        return None if compute_s is None else compute_s + workload.optimizer_s
    cost_s = np.stack(durations(cluster, workload, method))[:, 0, 0]  # [phases, N]
    if np.ptp(cost_s, axis=1).max() > 1e-12 * cost_s.max():
        return None
    c, busy_s = cost_s[:, 0], _busy_s(cluster, workload, method)
    if not method.overlap:
        return float(compute_s + c.mean() + busy_s)
    if method.message == PARAMETERS:
        return float(np.maximum(compute_s + workload.optimizer_s, c).mean() + busy_s - workload.optimizer_s)
    return float(max(compute_s + busy_s, c[0])) if len(c) == 1 else None


def _expected_compute_s(cluster: Cluster, workload: Workload, method: Method) -> float | None:
    """Expected seconds until a worker and all that it waits for have computed; None where there is no formula."""
    jitter, compute_s = workload.jitter, workload.compute_s
    if jitter.is_deterministic:
        return jitter.trace_s[0] if jitter.kind == "trace" else compute_s
    if method.topology is None:
        means_s = {"trace": np.mean(jitter.trace_s or 0.0), "exponential": compute_s + jitter.scale_s, "lognormal": compute_s}
        return float(means_s[jitter.kind]) if jitter.kind in means_s else None
    waits_for_all = method.message == GRADIENTS and not method.overlap and method.topology.name == "complete"
    if waits_for_all and jitter.kind == "exponential":
        return compute_s + jitter.scale_s * sum(1 / k for k in range(1, cluster.num_workers + 1))
    return None


def _busy_s(cluster: Cluster, workload: Workload, method: Method) -> float:
    """Seconds that a worker computes, besides the gradient, in a step with an exchange."""
    return workload.optimizer_s + join_time_s(workload, method) + codec_time_s(cluster, workload, method)


# -- Prediction -------------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """Time per iteration and where it goes: mean_s = compute_s + waiting_s + exposed_s.

    Attributes:
        mean_s: seconds per iteration, mean over workers and steps.
        quantiles_s: quantiles of the time of one worker's iteration, by the levels in `QUANTILES`.
        compute_s: mean seconds of a worker's forward, backward, optimizer, combine and codec.
        waiting_s: mean seconds of waiting for slower workers, as if messages took no time.
        exposed_s: mean seconds that messages add to that.
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


def predict(
    cluster: Cluster,
    workload: Workload,
    method: Method,
    *,
    num_steps: int | None = None,
    num_replicas: int | None = None,
    seed: int = 0,
) -> Prediction:
    """The predicted time per iteration of a method. Equal seeds give all methods the same compute times.

    Args:
        cluster: links and nodes, of as many workers as the method is for.
        workload: one worker's iteration.
        method: what is sent, over which topology.
        num_steps: steps that are simulated, after a quarter as many to warm up; None: 1,000, or fewer if nothing is random.
        num_replicas: independent repetitions; None: as many as give about 1,000 workers, at most 16.
        seed: of the compute times.

    Raises:
        ValueError: if the method is for another number of workers than the cluster has.

    Examples:
        >>> from decjax import topology
        >>> from decjax.costmodel import Cluster, Link, Workload, gossip, predict
        >>> box = Cluster("box", 4, 1, Link(0, 1e9), Link(0, 25e6))
        >>> load = Workload(forward_s=0.1, backward_s=(0.2,), num_bytes=(24e6,))
        >>> round(predict(box, load, gossip(topology.make("one_peer_exponential", 4))).mean_s, 3)
        0.96
    """
    for name, value in (("num_steps", num_steps), ("num_replicas", num_replicas)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1; leave it out for a sensible default")
    still = workload.jitter.is_deterministic
    warm_up, T = horizon(method, num_steps or (max(64, 8 * method.period) if still else 1000))
    R = num_replicas or (1 if still else max(1, min(16, 1000 // cluster.num_workers)))
    compute_TxRxN = workload.jitter.sample(np.random.default_rng(seed), workload.compute_s, (T, R, cluster.num_workers))
    pays_K = np.repeat([1.0, 0.0], R)[:, None]  # One simulation of 2R systems: in the second half messages take no time.
    cost_s = [c * pays_K for c in durations(cluster, workload, method)]
    run = simulate(cluster, workload, method, np.concatenate([compute_TxRxN] * 2, axis=1), cost_s)
    step_s, free_step_s = np.split(np.diff(run.start_TxKxN[warm_up:], axis=0), 2, axis=1)
    mean_s, free_s = step_s.mean(), float(free_step_s.mean())
    compute_s, exact_s = compute_TxRxN[warm_up:].mean(), closed_form(cluster, workload, method)
    if method.topology is None:
        busy_s = free_s = mean_s = exact_s or compute_s + workload.optimizer_s
    else:
        busy_s = compute_s + workload.optimizer_s + (_busy_s(cluster, workload, method) - workload.optimizer_s) / method.every
        if exact_s is not None:  # What messages add, and how long workers wait for each other, is as in the simulation.
            mean_s, free_s = exact_s, free_s + exact_s - mean_s
    return Prediction(
        float(mean_s),
        dict(zip(QUANTILES, map(float, np.quantile(step_s, QUANTILES)), strict=True)),
        float(busy_s),
        float(free_s - busy_s),
        float(mean_s - free_s),
        *_bytes(cluster, workload, method),
    )


def horizon(method: Method, num_steps: int) -> tuple[int, int]:
    """(steps to warm up, all steps): a quarter of `num_steps` and as many more, in whole periods, so that all phases count alike."""
    warm_up = -(-num_steps // 4 // method.period) * method.period
    return warm_up, warm_up + -(-num_steps // method.period) * method.period


def _bytes(cluster: Cluster, workload: Workload, method: Method) -> tuple[float, float]:
    """Bytes per step that a worker sends, and bytes per step that leave the busiest node; means over the period."""
    routes = exchanges(cluster, method)
    if not routes:
        return 0.0, 0.0
    num_bytes = method.ratio * workload.total_bytes / method.every
    return (
        num_bytes * float(np.mean([route.sent_N.mean() for route in routes])),
        num_bytes * float(np.mean([route.nic_M for route in routes], axis=0).max()),
    )
