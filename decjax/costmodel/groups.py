"""Workers of L devices each, which divide parameters, optimizer state and batch (fully sharded data parallelism, FSDP).

The devices of a worker are in one node. They compute, encode and send in parallel: a worker of L devices has L times the speed of one
device, and L times the bandwidth inside the node. Its message leaves in L shards, which share the NIC as one message does. Within the
worker, a step adds

    forward pass     all-gather of the parameters
    backward pass    all-gather of the parameters, reduce-scatter of the gradients

Each of them takes (L−1) α + (L−1)/L · b β⁻¹ for a bucket of b bytes, with the link of a device inside the node, and is not overlapped
with computation.
"""

import dataclasses

from decjax.costmodel.profile import Cluster, Size, Workload
from decjax.options import check

FORWARD, BACKWARD = 1, 2  # collectives of the parameters' bytes in a pass


def grouped(cluster: Cluster, devices: int) -> Cluster:
    """Return the cluster whose workers are groups of `devices` workers of a node.

    Raises:
        ValueError: if the groups do not fill a node.
    """
    check("fsdp", devices, Size)
    if cluster.workers_per_node % devices:
        fits = [size for size in range(1, cluster.workers_per_node + 1) if cluster.workers_per_node % size == 0]
        raise ValueError(
            f"fsdp={devices} does not divide the {cluster.workers_per_node} devices of a node of {cluster.name!r}, and a worker must "
            f"be within a node; use one of {fits}"
        )
    times = lambda rate: rate and devices * rate
    rates = cluster.codec_Bps
    return dataclasses.replace(
        cluster,
        workers_per_node=cluster.workers_per_node // devices,
        devices_per_worker=devices * cluster.devices_per_worker,
        intra=dataclasses.replace(cluster.intra, bandwidth_Bps=devices * cluster.intra.bandwidth_Bps),
        codec_Bps={name: times(rate) for name, rate in rates.items()} if isinstance(rates, dict) else times(rates),
        flops=times(cluster.flops),
        memory_bytes=times(cluster.memory_bytes),
    )


def divided(workload: Workload, cluster: Cluster) -> Workload:
    """Return the step of a worker of a `grouped` cluster.

    Args:
        workload: forward and backward passes of all devices in parallel; everything else as on one device that holds whole arrays.
        cluster: with the devices of a worker.
    """
    L, link = cluster.devices_per_worker, cluster.intra
    # The link of a worker has L times a device's bandwidth.
    per_byte_s = (L - 1) / link.bandwidth_Bps / cluster.all_reduce_efficiency
    move_s = [(L - 1) * link.latency_s + num_bytes * per_byte_s for num_bytes in workload.num_bytes]
    return dataclasses.replace(
        workload,
        forward_s=workload.forward_s + FORWARD * sum(move_s),
        backward_s=tuple(own_s + BACKWARD * moved_s for own_s, moved_s in zip(workload.backward_s, move_s)),
        optimizer_s=workload.optimizer_s / L,
        combine_s=workload.combine_s / L,
        beside_s=workload.beside_s / L,
        compressed=tuple(dataclasses.replace(form, coding_s=form.coding_s / L) for form in workload.compressed),
    )
