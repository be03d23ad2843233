"""Which devices of a network take part, the placement of a job on them, its file, and clusters that each hold the whole model."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import json
import os
from typing import Annotated, NamedTuple

import numpy as np

from decjax.contrib.placement.cost import MAX_STAGES, Job, Network, both_ways, shortest_path
from decjax.contrib.placement.links import Links
from decjax.contrib.placement.search import Placed
from decjax.costmodel.json_files import read_object
from decjax.costmodel.profile import exactly
from decjax.files import write_whole
from decjax.options import Range, check, shown

MAX_PAIRS = 2**28  # of devices, in all choices together: half a minute


class Placement(NamedTuple):
    """Where a job runs."""

    layout: np.ndarray  # devices of the links, [S, W]: row s computes stage s, column w is worker w
    compute_s: float  # of the slowest device; 0: unknown
    messages_s: float  # of an iteration
    tried: int  # layouts

    @property
    def seconds(self) -> float:
        """Seconds of an iteration that computes and then sends; a bound for one in which these overlap."""
        return self.compute_s + self.messages_s


class Candidates(NamedTuple):
    """Devices that could take part."""

    devices: list[int]
    compute_s: float  # of the slowest


def choices(links: Links, job: Job, stage_flop: float = 0.0, stage_bytes: float = 0.0) -> list[Candidates]:
    """Return sets of as many devices as the job needs, the fastest first.

    A device can take part if its memory holds a stage. All devices wait for the slowest, so leaving out slow ones may be faster. For
    each speed the devices that are at least as fast are a candidate; if they are too many, the farthest are left out.

    Args:
        links: of all devices.
        job: what they send.
        stage_flop: floating-point operations of a stage in an iteration of one worker; compute_s = stage_flop / the least flops.
        stage_bytes: memory that a stage needs.

    Raises:
        ValueError: if too few devices have the memory, or there are too few.
    """
    count, memory_bytes = job.num_devices, links.memory_bytes
    able = [i for i in range(links.num_devices) if memory_bytes is None or memory_bytes[i] >= stage_bytes]
    if len(able) < count:
        raise ValueError(
            f"workers={job.workers} × stages={job.stages} need {count} devices with {stage_bytes / 1e9:.3g} GB of memory, and {len(able)} "
            f"of {links.num_devices} have it; choose fewer workers, or another number of stages"
        )
    far_s = functools.cache(lambda: both_ways(links.seconds(job.gradient_bytes / job.workers)))
    among = lambda devices: devices if len(devices) == count else nearest(far_s(), devices, count)
    flops = links.flops
    if flops is None or not stage_flop:
        return [Candidates(among(able), 0.0)]
    sizes = {speed: size for speed in np.unique(flops[able])[::-1] if (size := int((flops[able] >= speed).sum())) >= count}
    pairs = sum(size**2 for size in sizes.values())  # Rounded flops make fewer candidates.
    check(f"flops: links in the candidates of {len(sizes)} speeds", pairs, Annotated[int, Range(0, MAX_PAIRS)])
    groups = [among([i for i in able if flops[i] >= speed]) for speed in sizes]
    return [Candidates(devices, stage_flop / float(flops[devices].min())) for devices in groups]


def nearest(far_s: np.ndarray, devices: Sequence[int], count: int) -> list[int]:
    """Return `count` of the devices; the one whose messages to the others take longest is left out, repeatedly."""
    left = np.array(devices)
    taken_s = far_s[np.ix_(left, left)]
    sums_s, kept = taken_s.sum(axis=1), np.ones(len(left), bool)
    for _ in range(len(left) - count):
        farthest = np.where(kept, sums_s, -np.inf).argmax()
        kept[farthest] = False
        sums_s -= taken_s[:, farthest]
    return left[kept].tolist()


def place(
    links: Links, job: Job, search: Callable[[Network], Placed], stage_flop: float = 0.0, stage_bytes: float = 0.0
) -> Placement:
    """Return the best placement that a search finds on any of the `choices`, whose arguments these are.

    The job's topology is that of its workers; a search is `genetic`, `anneal` or `best_of_all`.
    """
    among = choices(links, job, stage_flop, stage_bytes)
    return place_among(lambda devices: Network(links.take(devices), job), search, among)


def place_among(
    network_of: Callable[[list[int]], Network], search: Callable[[Network], Placed], among: Sequence[Candidates]
) -> Placement:
    """Return the best placement that a search finds on any of the candidates, whose networks `network_of` makes."""
    placements = []
    for choice in among:
        placed = search(network_of(choice.devices))
        layout = np.array(choice.devices)[placed.layout]
        placements.append(Placement(layout, choice.compute_s, placed.seconds, placed.tried))
    best = min(placements, key=lambda placement: placement.seconds)
    return best._replace(tried=sum(placement.tried for placement in placements))


# -- Clusters that hold the whole model -------------------------------------------------------------------------------


class DeviceCluster(NamedTuple):
    """A pipeline of devices."""

    devices: list[int]  # in the order of the pipeline
    shares: np.ndarray  # of the model's bytes that each holds, in the same order; they sum up to 1
    slowest_Bps: float  # the least bandwidth between neighbors, in the slower direction; inf of a single device


def clusters(links: Links, model_bytes: float) -> list[DeviceCluster]:
    """Return disjoint clusters of all devices, each with memory for `model_bytes`; see Ravnest, arXiv 2401.01728, section 3.

    A cluster is a pipeline; clusters average their parameters periodically. More clusters process more examples at a time, and near
    devices wait less for each other. So clusters are as small as their memory allows, with fast links inside. Devices divide the model
    by their memory.

    The paper's search is genetic; here clusters grow one after the other. The next one begins with the device that is least near to
    those that are left, and takes in the one with the fastest links to it until its memory suffices. Devices that are left over at the
    end join the cluster that is nearest to each.

    Raises:
        ValueError: if the devices' memory is unknown or too small, or if a cluster would have more than 16 devices, the most of a
            pipeline.
    """
    memory_bytes = links.memory_bytes
    if memory_bytes is None:
        raise ValueError("memory_bytes is missing, and clusters are made by memory; give that of each device")
    check("model_bytes", model_bytes, Annotated[float, Range(0, float(memory_bytes.sum()), above=True)])
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


# -- Files ------------------------------------------------------------------------------------------------------------


def save(path: str | os.PathLike, links: Links, placement: Placement, /, **further: object) -> None:
    """Write a placement as JSON, for processes that run on its devices in the order of the links; `further` are other fields."""
    among_these = np.searchsorted(np.sort(placement.layout, axis=None), placement.layout)
    names = [[links.names[device] for device in row] for row in placement.layout]
    numbers = {field: getattr(placement, field) for field in ("compute_s", "messages_s")}
    content = {**further, **numbers, "devices": names, "layout": among_these.tolist()}
    write_whole(path, json.dumps(content, indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class DeviceOrder:
    """The order of devices in a mesh.

    Args:
        layout: devices, [S, W], each from 0 to S·W − 1.
    """

    layout: np.ndarray

    def of(self, workers: int, stages: int, tensor: int = 1) -> list[int]:
        """Return the devices in the order of the mesh's axes, worker by worker, stage by stage; a placed device is a tensor-parallel group.

        Raises:
            ValueError: if the placement is for another number of workers or stages.
        """
        S, W = self.layout.shape
        check("the run's workers", workers, exactly(W))
        check("the run's stages", stages, exactly(S))
        return [int(device) * tensor + t for column in self.layout.T for device in column for t in range(tensor)]


def load_device_order(path: str | os.PathLike) -> DeviceOrder:
    """Return the order of devices in a placement's file.

    Raises:
        ValueError: of one line, for a file that cannot be read or is no placement of all devices.
    """
    content, layout = read_object(path), np.zeros(0)
    try:
        layout = np.array(content.get("layout"))
        has_all = layout.ndim == 2 and layout.size > 0 and sorted(layout.ravel().tolist()) == [*range(layout.size)]
    except (ValueError, TypeError):  # Rows of different lengths, or no numbers.
        has_all = False
    if not has_all or not np.issubdtype(layout.dtype, np.integer):
        raise ValueError(
            f"{path}: layout={shown(content.get('layout'))} must be a row of devices for each stage, with each device from 0 on once; "
            "rerun the placement"
        )
    return DeviceOrder(layout)
