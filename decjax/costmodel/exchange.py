"""The cost of a round on a cluster: who waits for whom, and the time c = α + b·β⁻¹ of b bytes, for every worker.

A round is means over groups of workers and messages between groups. Messages that leave a node at the same time share its network
card (NIC); reductions run as rings, or inside nodes first. Arrays hold all workers at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from decjax.costmodel.profile import Cluster
from decjax.topology import Round


class Exchange(NamedTuple):
    """A round on a cluster: who waits for whom and how long messages take."""

    group_size: int  # g, workers of a group; they wait for each other
    sources: tuple[np.ndarray, ...]  # for each shift, the group that each group receives from, [N/g]; itself if none
    latency_N: np.ndarray  # α of everything a worker takes part in, seconds
    per_byte_N: np.ndarray  # seconds per byte of the parameters
    sent_N: np.ndarray  # parameter-sized messages that each worker sends
    nic_M: np.ndarray  # parameter-sized messages that leave each of M nodes

    def arrival(self, ready_KxN: np.ndarray) -> np.ndarray:
        """Return when the messages that each worker needs are ready, max_{j∈D(i)} ready_j over those it waits for, [K, N]."""
        g = self.group_size
        ready_KxG = ready_KxN if g == 1 else ready_KxN.reshape(len(ready_KxN), -1, g).max(axis=2)
        latest = ready_KxG
        for source_G in self.sources:
            latest = np.maximum(latest, ready_KxG[:, source_G])
        return latest if g == 1 else np.repeat(latest, g, axis=1)


def mean_cost(cluster: Cluster, members_GxM: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the cost of means over G groups of M workers at the same time: (latency_G, per_byte_G, sent_G, nic_M), as in `Exchange`.

    Ring: 2(M−1) steps of 1/M of the bytes each, and the slowest hop sets the pace,

        α = 2(M−1) α_hop,     β⁻¹ = 2(M−1)/M · max_hops(1/bandwidth) / efficiency.

    Hierarchical (l workers on each of m nodes, M = l·m): shards are reduced inside nodes, then by l rings between nodes that
    share the NIC, and gathered; chunks pass through both levels in a pipeline, so the slower level sets the pace,

        α = 2(m−1) α_inter + 2(l−1) α_intra,     β⁻¹ = max(2(m−1)/m / NIC, 2(l−1)/l / intra) / efficiency.
    """
    groups, M = members_GxM.shape
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
        per_byte_G = np.maximum(
            inter_G * sharing_GxM.max(axis=1) / cluster.inter.bandwidth_Bps, intra_G / cluster.intra.bandwidth_Bps
        )
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


def _mean_cost_of_devices(
    cluster: Cluster, devices_NxK: np.ndarray, members_GxM: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return `mean_cost` of groups of workers of K devices each: the costs of the slowest device of a group, and `nic_M`."""
    *of_KG, nic_M = mean_cost(cluster, np.moveaxis(devices_NxK[members_GxM], -1, 0).reshape(-1, members_GxM.shape[1]))
    return [of.reshape(devices_NxK.shape[1], -1).max(axis=0) for of in of_KG], nic_M


def messages_cost(cluster: Cluster, shifts: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the cost of simultaneous point-to-point messages: (latency_N, per_byte_N, nic_M), as in `Exchange`.

    Each shift is an array [2, E] of workers, sources and targets. A NIC is shared by all messages that leave (or enter) its node;
    inside a node, a worker's link by those of that worker.
    """
    num_workers = cluster.num_workers
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
    worker = np.maximum(load(source_E, ~leaves_E, num_workers)[source_E], load(target_E, ~leaves_E, num_workers)[target_E])
    np.maximum.at(per_byte_N, target_E, np.where(leaves_E, nic / cluster.inter.bandwidth_Bps, worker / cluster.intra.bandwidth_Bps))
    np.add.at(latency_N, target_E, np.where(leaves_E, cluster.inter.latency_s, cluster.intra.latency_s))
    return latency_N, per_byte_N, np.bincount(from_E[leaves_E], minlength=cluster.num_nodes).astype(float)


def exchange_cost(cluster: Cluster, round_: Round, joint_ring: bool = False, devices_NxK: np.ndarray | None = None) -> Exchange:
    """Return the cost of a round on a cluster.

    A group mean of g workers is a reduce-scatter and an all-gather, 2(g−1)/g of the bytes; with messages between groups,
    each member sends its share of 1/g in between, so that a joint mean of two nodes takes P bytes out of a node.

    Args:
        cluster: nodes and links.
        round_: who mixes with whom.
        joint_ring: see `Method`; only for rounds in which groups exchange in pairs.
        devices_NxK: the K devices of each worker, numbered through the nodes. Each exchanges its own message with the devices of the
            same number in other workers; times are those of the slowest device, bytes those of one. None: a worker is one device.

    Raises:
        ValueError: if the round is for another number of workers, or `joint_ring` does not fit.
    """
    N, g = round_.num_workers, round_.group_size
    if devices_NxK is None:
        if cluster.num_workers != N:
            raise ValueError(
                f"the method is for {N} workers, cluster {cluster.name!r} has {cluster.num_workers}; use cluster.resize({N})"
            )
        devices_NxK = np.arange(N)[:, None]
    workers_GxM = np.arange(N).reshape(-1, g)
    pairs = [np.array(shift.pairs).T for shift in round_.shifts]
    sources = tuple(np.arange(round_.num_nodes) for _ in pairs)
    for source_G, (source, target) in zip(sources, pairs):
        source_G[target] = source

    of_mean, mean_nic_M = _mean_cost_of_devices(cluster, devices_NxK, workers_GxM)
    latency_N, per_byte_N, sent_N = (np.repeat(of_group_G, g) for of_group_G in of_mean)
    if joint_ring and g > 1 and pairs:
        (source, target), *others = pairs
        if others or not np.isin(source * N + target, target * N + source).all():
            raise ValueError(
                "joint_ring=True needs rounds in which nodes meet in pairs, as in 'alternating_exponential_ring'; leave it out"
            )
        # Both groups are busy with one ring of 2g workers instead of their own.
        first = source < target
        joint_GxM = np.concatenate([workers_GxM[source[first]], workers_GxM[target[first]]], axis=1)
        joint, nic_M = _mean_cost_of_devices(cluster, devices_NxK, joint_GxM)
        for of_all_N, of_joint_G in zip((latency_N, per_byte_N, sent_N), joint, strict=True):
            of_all_N[joint_GxM] = of_joint_G[:, None]
        return Exchange(g, sources, latency_N, per_byte_N, sent_N, nic_M)
    for source, _ in pairs:
        sent_N[workers_GxM[source]] += 1 / g
    shifts = [
        devices_NxK[np.stack([workers_GxM[source].ravel(), workers_GxM[target].ravel()])].reshape(2, -1) for source, target in pairs
    ]
    latency, per_byte, nic_M = messages_cost(cluster, shifts)
    latency_N, per_byte_N = latency_N + latency[devices_NxK].max(axis=1), per_byte_N + per_byte[devices_NxK].max(axis=1) / g
    return Exchange(g, sources, latency_N, per_byte_N, sent_N, mean_nic_M + nic_M / g)
