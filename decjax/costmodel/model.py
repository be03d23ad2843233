"""Time per iteration of a method where each worker is one device, by Monte Carlo with the simulator.

An exchange of b bytes takes c = α + b·β⁻¹ (`exchange_cost`), where messages that leave a node at the same time share its NIC. If it
overlaps with computing, it takes `beside_s` longer.
"""

import functools
from typing import NamedTuple

import numpy as np

from decjax.costmodel.exchange import exchange_cost
from decjax.costmodel.methods import PARAMETERS, Method
from decjax.costmodel.profile import Cluster, Workload
from decjax.costmodel.simulator import StepCosts, horizon, simulate
from decjax.options import Count, Seed, checked

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def single_stage(cluster: Cluster, workload: Workload, method: Method) -> StepCosts:
    """Return a step of workers that are one device each, for the simulator.

    Raises:
        ValueError: if the method is for another number of workers than the cluster has.
    """
    load = workload if method.bucketed else workload.one_bucket()
    total, buckets = load.total_bytes, len(load.num_bytes)
    routes, codec_s = [], 0.0
    if method.topology is not None:
        once = functools.cache(lambda round_: exchange_cost(cluster, round_, method.joint_ring))
        routes = [once(round_) for round_ in method.topology.rounds]
        if method.ratio != 1:
            codec_s = cluster.coding_s(workload.total_bytes, method.codec) if method.coding_s is None else method.coding_s
    bytes_b, beside_s = method.ratio * np.array(load.num_bytes), workload.beside_s / buckets if method.overlap else 0.0
    return StepCosts(
        load.forward_s / load.compute_s,
        [backward_s / load.compute_s for backward_s in load.backward_s],
        [num_bytes / total if total else 1 / buckets for num_bytes in load.num_bytes],
        workload.optimizer_s,
        workload.combine_s if method.message == PARAMETERS else 0.0,
        codec_s,
        routes,
        [(method.latencies * route.latency_N + bytes_b[:, None] * route.per_byte_N + beside_s)[:, None] for route in routes],
    )


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


@checked
def predict(
    cluster: Cluster,
    workload: Workload,
    method: Method,
    *,
    num_steps: Count | None = None,
    num_replicas: Count | None = None,
    seed: Seed = 0,
) -> Prediction:
    """Return the predicted time per iteration of a method. Equal seeds give all methods the same compute times.

    Args:
        cluster: links and nodes, of as many workers as the method is for.
        workload: one worker's iteration.
        method: what is sent, over which topology.
        num_steps: simulated steps, after a quarter as many to warm up; None: 1,000, or fewer if nothing is random.
        num_replicas: independent repetitions; None: enough for about 1,000 workers, at most 16.
        seed: of the compute times.

    Raises:
        ValueError: if the method is for another number of workers than the cluster has.

    Examples:
        >>> from decjax import topology
        >>> from decjax.costmodel import Cluster, Link, Workload, gossip, predict
        >>> hosts = Cluster("four hosts", 4, 1, Link(0, 1e9), Link(0, 25e6))
        >>> load = Workload(forward_s=0.1, backward_s=(0.2,), num_bytes=(24e6,))
        >>> round(predict(hosts, load, gossip(topology.make("one_peer_exponential", 4))).mean_s, 3)
        0.96
    """
    step, still = single_stage(cluster, workload, method), workload.jitter.is_deterministic
    warm_up, T = horizon(method, num_steps or (max(64, 8 * method.period) if still else 1000))
    R = num_replicas or (1 if still else max(1, min(16, 1000 // cluster.num_workers)))
    compute_TxRxN = workload.jitter.sample(np.random.default_rng(seed), workload.compute_s, (T, R, cluster.num_workers))
    pays_K = np.repeat([1.0, 0.0], R)[:, None]  # One simulation of 2R systems: in the second half messages take no time.
    paid = step._replace(cost_s=[c * pays_K for c in step.cost_s])
    run = simulate(method, paid, np.concatenate([compute_TxRxN] * 2, axis=1))
    step_s, free_step_s = np.split(np.diff(run.start_TxKxN[warm_up:], axis=0), 2, axis=1)
    mean_s, free_s, busy_s = step_s.mean(), free_step_s.mean(), compute_TxRxN[warm_up:].mean() + workload.optimizer_s
    if method.topology is not None:
        busy_s += (step.combine_s + float(step.codec_s)) / method.every
    elif (expected_s := workload.jitter.mean_s(workload.compute_s)) is not None:
        mean_s = free_s = busy_s = expected_s + workload.optimizer_s
    sent_bytes = method.ratio * workload.total_bytes / method.every
    return Prediction(
        float(mean_s),
        dict(zip(QUANTILES, map(float, np.quantile(step_s, QUANTILES)), strict=True)),
        float(busy_s),
        float(free_s - busy_s),
        float(mean_s - free_s),
        sent_bytes * float(np.mean([route.sent_N.mean() for route in step.routes] or 0.0)),
        sent_bytes * float(np.mean([route.nic_M for route in step.routes] or [[0.0]], axis=0).max()),
    )
