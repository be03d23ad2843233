"""Tables and figures of launch.plan."""

from typing import TYPE_CHECKING

import numpy as np
from rich import console, table, text

from decjax import costmodel
from decjax.costmodel import plan
from launch import command

if TYPE_CHECKING:
    from decjax import train

COLORS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7", "#999999", "#7A5195", "#8C564B", "#BCBD22")
TIMELINE_WORKERS = 16  # that are legible
SHARES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # message time ÷ compute time, of a decision table
VARIATIONS = (0.0, 0.2, 0.5)
LEAST = 1e-3  # share of the memory of a part that is printed
_LEGEND = dict(loc="outside lower center", frameon=False, fontsize=8.5)


def report(cluster: costmodel.Cluster, workload: costmodel.Workload, ranked: list[plan.Ranked], width: int) -> console.Group:
    """Return the ranking; terminals of less than 100 columns get fewer columns."""
    devices = cluster.devices_per_worker
    sender, of = ("device", f" of {devices} devices") if devices > 1 else ("worker", "")
    title = (
        f"{cluster.name}: {cluster.num_nodes} × {cluster.workers_per_node} workers{of}; a step computes for "
        f"{1e3 * workload.compute_s:.4g} ms and has {workload.total_bytes / 1e6:.4g} MB of parameters"
    )
    columns = {
        "method": lambda r: r.method.name,
        "ms": lambda r: ms(r.prediction.mean_s),
        "95 %\nms": lambda r: ms(r.prediction.quantiles_s[0.95]),
        "speed-\nup": lambda r: f"{r.speedup:.2f}",
        "waits\nms": lambda r: ms(r.prediction.waiting_s),
        "adds\nms": lambda r: ms(r.prediction.exposed_s),
        f"MB per\n{sender}": lambda r: f"{r.prediction.bytes_per_worker / devices / 1e6:.3g}",
        "MB per\nNIC": lambda r: f"{r.prediction.bytes_per_nic / 1e6:.3g}",
        "gap": _gap,
    }
    if width < 100:
        del columns["95 %\nms"], columns[f"MB per\n{sender}"]
    rows = command.table(*columns, caption="gap of a period / rounds in it; 1: exact averaging")
    for r in ranked:
        rows.add_row(*(cell(r) for cell in columns.values()), style=None if r.method.topology else "dim")
    return below(title, rows)


def below(title: str, rows: table.Table) -> console.Group:
    """Return a table below its title, which the table itself would wrap."""
    return console.Group(text.Text(title, style="table.title"), rows)


def _gap(r: plan.Ranked) -> str:
    return "–" if r.method.topology is None else f"{r.gap:.2f}" + (f" / {r.period}" if r.period > 1 else "")


def ms(time_s: float) -> str:
    """Format a time in ms, with three digits."""
    ms = 1e3 * max(time_s, 0.0)
    return "0" if ms < 5e-4 else f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}"


def memory(needed: "train.DeviceMemory", cluster: costmodel.Cluster) -> str:
    """Return how much memory a device needs, and whether it has that much if the cluster says so."""
    parts = {name: held for name, held in needed.held().items() if held > LEAST * needed.total}
    lines = f"Memory per device: {_size(needed.total)} = " + " + ".join(f"{name} {_size(held)}" for name, held in parts.items())
    device_bytes = cluster.memory_bytes and cluster.memory_bytes / cluster.devices_per_worker
    if device_bytes and needed.total > device_bytes:
        lines += (
            f"\nA device has {_size(device_bytes)}, {needed.total / device_bytes:.3g} times too little: use a larger --fsdp, "
            "smaller batches, more microbatches or model.remat=full"
        )
    return lines


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def decide(cluster: costmodel.Cluster, workload: costmodel.Workload, methods: list[costmodel.Method]) -> console.Group:
    """Return the decision table: the preferred method by bandwidth and variation of compute times, with its speed-up."""
    bandwidths_Bps = [workload.total_bytes / (share * workload.compute_s) for share in SHARES]
    regions = plan.regions(cluster, workload, methods, bandwidths_Bps, VARIATIONS)
    names = [method.name for method in regions.methods]
    reference_s = regions.time_s[names.index("all-reduce")]
    rows = command.table("message ÷\ncomputing", "\nlinks", *(f"\nvariation {v:g}" for v in VARIATIONS), words=5)
    for column in rows.columns:
        column.overflow, column.no_wrap = "fold", False
    for b, (share, bandwidth_Bps) in enumerate(zip(SHARES, bandwidths_Bps)):
        best = [regions.winner[v, b] for v in range(len(VARIATIONS))]
        cells = (f"{reference_s[v, b] / regions.time_s[m, v, b]:.1f} × {names[m].replace('_', ' ')}" for v, m in enumerate(best))
        rows.add_row(f"{share:g}", plan.shown_rate(bandwidth_Bps).replace(" ", "\u00a0"), *cells)
    title = (
        "Preferred method, with its speed-up over all-reduce. Rows: time in which a link carries the parameters once ÷ "
        "compute time of a step. Columns: standard deviation ÷ mean of compute times."
    )
    return below(title, rows)


def plot(path: str, cluster: costmodel.Cluster, workload: costmodel.Workload, ranked: list[plan.Ranked]) -> None:
    """Draw regions of bandwidth and variation on the left, and one iteration of each worker on the right."""
    from matplotlib import figure

    drawn = figure.Figure(figsize=(13, 6), layout="constrained")
    left, right = np.asarray(drawn.subfigures(1, 2, width_ratios=(1, 1.15)))
    _draw_regions(left, cluster, workload, [r.method for r in ranked])
    gossip = [r.method for r in ranked if r.is_gossip][:1]
    exact = [r.method for r in ranked if r.method.message == "gradients" and not r.method.bucketed][::-1][:2]
    _draw_timelines(right, [(method.name, plan.timeline(cluster, workload, method)) for method in exact + gossip])
    drawn.savefig(path, dpi=140)


def _draw_regions(figure, cluster: costmodel.Cluster, workload: costmodel.Workload, methods: list[costmodel.Method]) -> None:
    """Draw the preferred method at each bandwidth and variation."""
    from matplotlib import colors, patches

    link = cluster.bottleneck
    bandwidths = link.bandwidth_Bps * np.geomspace(1 / 30, 30, 33)
    variations = np.linspace(0.0, 0.8, 25)
    regions = plan.regions(cluster, workload, methods, bandwidths, variations)
    winners = np.unique(regions.winner)
    axis = figure.subplots()
    axis.pcolormesh(
        8e-9 * bandwidths,
        variations,
        np.searchsorted(winners, regions.winner),
        shading="nearest",
        vmin=-0.5,
        vmax=len(COLORS) - 0.5,
        cmap=colors.ListedColormap(COLORS),
        rasterized=True,
    )
    times_s = workload.jitter.sample(np.random.default_rng(0), workload.compute_s, (1000, 1, cluster.num_workers))
    axis.plot(
        8e-9 * link.bandwidth_Bps,
        min(times_s.std() / times_s.mean(), variations[-1]),
        "o",
        color="black",
        markersize=9,
        markeredgecolor="white",
        clip_on=False,
        zorder=5,
    )
    axis.set(
        xscale="log",
        xlabel=f"bandwidth {'between nodes' if cluster.num_nodes > 1 else 'inside the node'}, Gbit/s",
        ylabel="variation of compute times (standard deviation ÷ mean)",
    )
    axis.set_title("preferred method (dot: this cluster)", fontsize=10)
    figure.legend(
        [patches.Patch(color=COLORS[k % len(COLORS)]) for k in range(len(winners))],
        [regions.methods[m].name for m in winners],
        ncols=2,
        **_LEGEND,
    )


def _draw_timelines(figure, lines: list[tuple[str, plan.Timeline]]) -> None:
    """Draw one iteration of each worker, for several methods."""
    from matplotlib import patches

    axes = figure.subplots(len(lines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, line) in zip(axes, lines, strict=True):
        _draw_timeline(axis, line, name)
    axes[-1].set_xlabel("ms from when the first worker starts the iteration")
    figure.legend(
        [patches.Patch(color="#0072B2"), patches.Patch(facecolor="0.9"), patches.Patch(color="#D55E00")],
        ["compute", "wait, update", "message"],
        ncols=3,
        **_LEGEND,
    )


def _draw_timeline(axis, line: plan.Timeline, name: str) -> None:
    workers = min(TIMELINE_WORKERS, len(line.start_N))
    y = np.arange(workers)
    start, computed, end, launched, arrived = (1e3 * times_N[:workers] for times_N in line)
    axis.barh(y, end - start, left=start, height=0.8, color="0.9")
    axis.barh(y + 0.12, computed - start, left=start, height=0.5, color="#0072B2")
    axis.barh(y - 0.28, arrived - launched, left=launched, height=0.2, color="#D55E00")
    axis.set_title(name + (f" (the first {workers} workers)" if workers < len(line.start_N) else ""), fontsize=10)
    axis.set(ylabel="worker", yticks=y if workers <= 8 else y[::5])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
