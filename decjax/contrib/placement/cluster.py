"""Clusters of devices, each of which holds the whole model: arXiv 2401.01728 (Ravnest), section 3.

A cluster is a pipeline; clusters average their parameters periodically. More clusters process more examples at a time, and near devices
wait less for each other. So clusters are as small as their memory allows, with fast links inside. Devices divide the model by their
memory. The paper's search is genetic; here clusters grow one after the other.
"""

import itertools
from typing import Annotated, NamedTuple

import numpy as np

from decjax.contrib.placement.cost import MAX_STAGES, shortest_path
from decjax.contrib.placement.links import Links
from decjax.options import Range, check


class DeviceCluster(NamedTuple):
    """A pipeline of devices."""

    devices: list[int]  # in the order of the pipeline
    shares: np.ndarray  # of the model's bytes that each holds, in the same order; they sum up to 1
    slowest_Bps: float  # the least bandwidth between neighbors, in the slower direction; inf of a single device


def clusters(links: Links, model_bytes: float) -> list[DeviceCluster]:
    """Return disjoint clusters of all devices, each with memory for `model_bytes`.

    The next cluster begins with the device that is least near to those that are left, and takes in the one with the fastest links to
    it until its memory suffices. Devices that are left over at the end join the cluster that is nearest to each.

    Raises:
        ValueError: if the devices' memory is unknown or too small, or if a cluster would have more than 16 devices, the most of a
            pipeline.
    """
    memory_bytes = links.memory_bytes
    if memory_bytes is None:
        raise ValueError("memory_bytes is missing, and clusters are made by memory; give that of each device")
    check(
        "model_bytes", model_bytes, Annotated[float, Range(0, float(memory_bytes.sum()), above=True)]
    )  # the memory of all devices
    speed_Bps = np.minimum(links.bandwidth_Bps, links.bandwidth_Bps.T)  # A pipeline sends both ways.
    left, groups = set(range(links.num_devices)), []
    while memory_bytes[sorted(left)].sum() >= model_bytes:
        rest = sorted(left)
        lonely = speed_Bps[np.ix_(rest, rest)].sum(axis=1).argmin()
        group = [rest[lonely]]
        while memory_bytes[group].sum() < model_bytes:
            others = [device for device in rest if device not in group]
            group.append(max(others, key=lambda device: (speed_Bps[group, device].max(), memory_bytes[device])))
        groups.append(group)
        left -= set(group)
    for device in sorted(left):
        max(groups, key=lambda group: speed_Bps[group, device].max()).append(device)
    return [_pipeline(links, memory_bytes, speed_Bps, group) for group in groups]


def _pipeline(links: Links, memory_bytes: np.ndarray, speed_Bps: np.ndarray, group: list[int]) -> DeviceCluster:
    """Return the cluster of a group, in the order whose messages of one megabyte take least, there and back."""
    check("the number of devices in a cluster", len(group), Annotated[int, Range(1, MAX_STAGES)])
    hop_s = links.seconds(1e6)[np.ix_(group, group)]
    order = [group[i] for i in shortest_path(hop_s + hop_s.T)[1]] if len(group) > 1 else group
    slowest = min((speed_Bps[one, other] for one, other in itertools.pairwise(order)), default=np.inf)
    return DeviceCluster(order, memory_bytes[order] / memory_bytes[order].sum(), float(slowest))
