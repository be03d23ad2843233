"""Rank the divisions of a cluster's devices into workers × stages × tensor by predicted step time.

    python -m launch.plan_layouts --cluster=configs/clusters/optimus_a100.json --microbatch=8 --remat=layers \\
        --model=depth=52,width=1920,heads=24,vocabulary=51200,context=1024,batch=512,tied=1,bytes=2
    python -m launch.plan_layouts --cluster=configs/clusters/box_200mbit.json --devices=4 --model=configs/lm.py:workers=8 --flops=1e10

Each layout is ranked with all-reduce, with the parts of Optimus-CC, and with gossip between pipelines. Layouts that do not divide
the model or exceed the profile's memory_bytes are listed with the reason. Times follow from flops and links. --model is the config
of a transformer, or its sizes, with hidden=4·width, tied=0 and bytes=4 by default. docs/reference/commands.md describes the columns.
"""

import dataclasses

from absl import flags
from rich import console

from decjax import costmodel, topology
from decjax.contrib import layouts
from decjax.errors import ConfigError
from launch import command, config_file, plan_model, plan_report

FLAGS = flags.FLAGS


def read_flags() -> tuple[costmodel.Cluster, layouts.Transformer]:
    """Return the resized cluster and the model."""
    cluster, _ = costmodel.load(FLAGS.cluster)
    cluster = plan_model.resized(cluster, "devices", FLAGS.devices)
    if FLAGS.flops is not None:
        cluster = dataclasses.replace(cluster, flops=FLAGS.flops)
    if cluster.flops is None:
        command.refuse(
            f"{FLAGS.cluster} has no flops, which determine compute times", "give --flops=1e13, or add it to the profile"
        )
    return cluster, plan_model.transformer(FLAGS.model)


def report(cluster: costmodel.Cluster, model: layouts.Transformer, ranked: list[layouts.RankedLayout], width: int) -> console.Group:
    """Return the ranking; terminals of less than 110 columns get fewer columns."""
    title = (
        f"{cluster.name}: {cluster.num_nodes} × {cluster.workers_per_node} devices; {model.parameters / 1e6:.4g} million "
        f"parameters, {model.batch_size} sequences of {model.context}"
    )
    parts = {
        "compute\nms": "compute_s",
        "bubble\nms": "bubble_s",
        "tensor\nms": "tensor_s",
        "stages\nms": "boundary_s",
        "workers\nms": "workers_s",
        "embed.\nms": "embedding_s",
    }
    columns = {
        "layout": lambda r: r.layout.name,
        "method": lambda r: r.name,
        "s": lambda r: f"{r.prediction.time_s:.4g}",
        "speed-\nup": lambda r: f"{r.speedup:.2f}",
        **{
            header: lambda r, part=part: plan_report.ms(getattr(r.prediction, part))
            for header, part in parts.items()
            if width >= 110
        },
        "GB": lambda r: f"{r.memory.total / 1e9:.3g}",
    }
    rows = command.table(*columns, words=2, caption="predicted; a layout is workers × stages × tensor")
    for r in ranked:
        rows.add_row(*(cell(r) for cell in columns.values()))
    return plan_report.below(title, rows)


def main(argv: list[str]) -> int:
    command.options_only(argv)
    cluster, model = read_flags()
    names = ("schedule", "chunks", "inner", "remat")
    options = {name: FLAGS[name].value for name in names}
    divisions, refused = layouts.layouts(model, cluster.num_workers, microbatch_size=FLAGS.microbatch, **options)
    ranked, too_large = layouts.rank_layouts(cluster, model, divisions, topologies=FLAGS.topologies, orders=FLAGS.orders)
    reasons: dict[str, list[str]] = {}
    for name, reason in (refused | too_large).items():
        reasons.setdefault(reason, []).append(name)
    if not ranked:
        reason, names = next(reversed(reasons.items()))
        command.refuse(f"no layout of {cluster.num_workers} devices fits; {', '.join(names)}: {reason}")
    terminal = command.console()
    terminal.print(report(cluster, model, ranked[: FLAGS.top], terminal.width))
    if len(ranked) > FLAGS.top:
        terminal.print(f"{len(ranked) - FLAGS.top} more; --top={len(ranked)} shows them", style="dim")
    for reason, names in reasons.items():
        terminal.print(f"left out: {', '.join(names)}: {reason}", markup=False, style="dim", soft_wrap=True)
    return 0


if __name__ == "__main__":  # Other commands define flags of the same names, and one process may import several.
    flags.DEFINE_string("cluster", None, "Profile of the cluster, a JSON file.", required=True)
    flags.DEFINE_string("model", None, "Config of a transformer, or depth=52,width=1920,…", required=True)
    flags.DEFINE_integer("devices", None, "Number of devices; default: all.", lower_bound=1, upper_bound=topology.MAX_WORKERS)
    flags.DEFINE_list("topologies", ["one_peer_exponential"], "Graphs between pipelines.")
    flags.DEFINE_list("orders", ["awc", "atc"], "awc (overlaps with the gradient), atc (after the update), or both.")
    flags.DEFINE_integer("microbatch", 1, "Sequences in a microbatch.", lower_bound=1)
    flags.DEFINE_enum("schedule", "1f1b", ["gpipe", "1f1b", "interleaved"], "Schedule of the pipeline.")
    flags.DEFINE_integer("chunks", 1, "Virtual stages per stage, with --schedule=interleaved.", lower_bound=1)
    flags.DEFINE_enum("inner", "stage", ["stage", "worker"], "Axis next to the tensor axis on a node.")
    flags.DEFINE_enum("remat", "products", ["none", "products", "layers", "stages"], "What the backward pass recomputes.")
    flags.DEFINE_float("flops", None, "Sustained flop/s of a device; default: the profile's.", lower_bound=0.0)
    flags.DEFINE_integer("top", 20, "Layouts to print.", lower_bound=1)
    flags.register_multi_flags_validator(
        ["chunks", "schedule"],
        lambda values: values["chunks"] == 1 or values["schedule"] == "interleaved",
        "--chunks needs --schedule=interleaved; leave it out, or give both",
    )
    command.run(main, errors=(ValueError, ConfigError, config_file.ConfigFileError))
