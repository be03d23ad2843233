"""Rankings of layouts, workers × stages × tensor, of a model on a cluster's devices, and what to compress in each."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

from decjax.contrib.layouts.iteration import LayoutPrediction, choose_compressed_stages, predict_layout
from decjax.contrib.layouts.layout import EPILOGUE, Boundary, DeviceLayout, Footprint, Traffic, Work, memory, work
from decjax.contrib.layouts.transformer import Transformer, low_rank_ratio
from decjax.costmodel.methods import Order, all_reduce, gossip, graphs, no_communication
from decjax.costmodel.profile import Cluster, Rate, check_divides, check_number

BOUNDARY_RANK, WORKERS_RANK = 16, 128  # as in the experiments of Optimus-CC, arXiv 2301.09830


class RankedLayout(NamedTuple):
    """A layout with its predicted time and memory on a cluster.

    Names of what is sent are "all-reduce" or a topology, with "CB" (compressed backpropagation), "FE" (fused embedding
    synchronization) and "SC k" (the first k stages send low-rank gradients; "PowerSGD" where there is one stage only).
    """

    layout: DeviceLayout
    name: str  # of what is sent, see above
    prediction: LayoutPrediction
    memory: Footprint  # of the fullest device
    speedup: float  # time of the fastest layout with plain all-reduce ÷ time of this one


def layouts(
    model: Transformer, num_devices: int, *, microbatch_size: int = 1, **options: Any
) -> tuple[list[DeviceLayout], dict[str, str]]:
    """Return all divisions of devices into workers × stages × tensor that the model allows, and why it does not allow the others.

    Args:
        model: what is divided.
        num_devices: workers × stages × tensor.
        microbatch_size: sequences in a microbatch.
        **options: further fields of `DeviceLayout`; layouts of one stage ignore schedule and chunks.
    """
    fitting, refused = [], {}
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    for workers, stages in ((n, s) for n in divisors for s in divisors if num_devices % (n * s) == 0):
        tensor = num_devices // (workers * stages)
        chosen = {name: value for name, value in options.items() if stages > 1 or name not in ("schedule", "chunks")}
        sequences = workers * microbatch_size  # of one microbatch on all workers
        try:
            check_divides("batch_size", model.batch_size, f"workers={workers} × microbatches of {microbatch_size}", sequences)
            layout = DeviceLayout(workers, stages, tensor, model.batch_size // sequences, **chosen)
            layout.check(model)
        except ValueError as error:
            refused[f"{workers}×{stages}×{tensor}"] = str(error)
        else:
            fitting.append(layout)
    return fitting, refused


def compressions(
    cluster: Cluster,
    model: Transformer,
    load: Work,
    layout: DeviceLayout,
    *,
    boundary_rank: int = BOUNDARY_RANK,
    workers_rank: int = WORKERS_RANK,
) -> dict[str, Traffic]:
    """Return, by name, plain all-reduce, and all-reduce with more and more parts of Optimus-CC that the layout has a use for.

    CB sends those gradients for which stages wait as low-rank matrices; FE averages a tied embedding over all its holders at once;
    SC sends low-rank gradients between workers in the first k stages, with k from `choose_compressed_stages`. On clusters with a
    speed for each codec, these are "low_rank" and "powersgd".
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
    cluster: Cluster, layout: DeviceLayout, topologies: Sequence[str], orders: Sequence[Order], boundaries: dict[str, Boundary]
) -> dict[str, Traffic]:
    """Return, by name, gossip between pipelines over each topology that exists for them, with each compression of `boundaries`."""
    local_size = max(1, cluster.workers_per_node // (layout.tensor * (layout.stages if layout.inner == "stage" else 1)))
    existing, _ = graphs(topologies if layout.workers > 1 else (), layout.workers, local_size)
    return {
        f"{name} {order}{suffix}": Traffic(gossip(topology, order=order), backward=boundary)
        for name, topology in existing.items()
        for order in orders
        for suffix, boundary in boundaries.items()
    }


def rank_layouts(
    cluster: Cluster,
    model: Transformer,
    candidates: Sequence[DeviceLayout],
    *,
    topologies: Sequence[str] = ("one_peer_exponential",),
    orders: Sequence[Order] = ("awc",),
    boundary_rank: int = BOUNDARY_RANK,
    workers_rank: int = WORKERS_RANK,
) -> tuple[list[RankedLayout], dict[str, str]]:
    """Return all layouts, with every way to compress or to mix, by their predicted time, fastest first.

    Args:
        cluster: of as many workers as the layouts have devices, with `flops`; layouts that need more than `memory_bytes` are left out.
        model: what is trained.
        candidates: layouts, such as those of `layouts`.
        topologies: names of topologies for gossip between pipelines; (): all-reduce only.
        orders: "awc", "atc" or both, for gossip.
        boundary_rank: rank of gradients between stages.
        workers_rank: rank of gradients between workers.

    Returns:
        The ranking; and for layouts (or "layout with what is sent") that do not fit into memory, the bytes that they need.
    """
    flops = check_number("the cluster's flops", cluster.flops, Rate)
    rows: list[tuple[DeviceLayout, str, LayoutPrediction, Footprint]] = []
    refused = {}
    for layout in candidates:
        if reason := _excess(cluster, memory(model, layout, Traffic(no_communication()))):
            refused[layout.name] = reason
            continue
        load = work(model, layout, flops)
        ways = compressions(cluster, model, load, layout, boundary_rank=boundary_rank, workers_rank=workers_rank)
        boundaries = {"": Boundary()} | ({" CB": ways["all-reduce CB"].backward} if "all-reduce CB" in ways else {})
        for name, traffic in (ways | gossips(cluster, layout, topologies, orders, boundaries)).items():
            held = memory(model, layout, traffic)
            if reason := _excess(cluster, held):
                refused[f"{layout.name} with {name}"] = reason
            else:
                rows.append((layout, name, predict_layout(cluster, load, layout, traffic), held))
    plain_s = min((prediction.time_s for _, name, prediction, _ in rows if name == "all-reduce"), default=math.nan)
    ranked = [RankedLayout(*row, plain_s / row[2].time_s) for row in rows]
    return sorted(ranked, key=lambda r: r.prediction.time_s), refused


def _excess(cluster: Cluster, held: Footprint) -> str:
    """Return the reason why a layout does not fit into a device's memory; empty if it fits."""
    if cluster.memory_bytes is None or held.total <= cluster.memory_bytes:
        return ""
    parts = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in held._asdict().items() if name != "stage" and value)
    return (
        f"a device of stage {held.stage} needs {held.total / 1e9:.3g} GB ({parts}) and has {cluster.memory_bytes / 1e9:.3g}; "
        "use more stages or tensor devices, smaller microbatches, or more remat"
    )
