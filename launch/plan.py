"""Which method for which cluster? Predicts the time per iteration of all-reduce and gossip, before anything is rented.

    python -m launch.plan --cluster=configs/clusters/box_200mbit.json
    python -m launch.plan --cluster=configs/clusters/a40_ethernet.json --model=params=65e6,tokens=1600,buckets=8 --workers=32
    python -m launch.plan --cluster=configs/clusters/box_200mbit.json --model=configs/lm.py:workers=8 --compute_s=0.09 --plot=plan.png

The cluster is a profile (`decjax.costmodel.profile` describes the fields): measured by launch.calibrate, or written by hand from
datasheets. The model is one of

    nothing                    the workload that was measured with the profile
    WORKLOAD.json              forward_s, backward_s and num_bytes of each bucket, optimizer_s, combine_s, jitter
    configs/lm.py:workers=8    a config: its parameters and batch; the time of a step is --compute_s, or follows from flops
    params=65e6,…              forward_s=, backward_s= (or tokens=, of one worker's step, with the profile's flops), buckets=1,
                               bytes=4 (per parameter), optimizer_s=0, combine_s=0

From flops, a step takes 6 · params · tokens / flops, a third of it forward.

The profiles of GPUs in configs/clusters have the links of the datasheets, and the efficiency and flops that
`experiments.paper_runtime` finds in the paper's measurements.

With --devices=N, or a model of depth=52,width=1920,heads=24,vocabulary=51200,context=1024,batch=512 (and hidden=4·width,
tied=0, bytes=4 of what is computed and sent), or a config and --devices, all divisions of so many devices into workers × stages
× tensor are ranked, each with all-reduce, with one part of Optimus-CC after the other, and with gossip between pipelines
(--topologies, --orders). Layouts that do not divide the model or need more than the profile's memory_bytes are left out, with
the reason. Times follow from flops and links; nothing of it is measured.

    python -m launch.plan --cluster=configs/clusters/optimus_a100.json --microbatch=8 --remat=layers \\
        --model=depth=52,width=1920,heads=24,vocabulary=51200,context=1024,batch=512,tied=1,bytes=2

Columns there: seconds per iteration; speed-up over the fastest layout with plain all-reduce; ms that a pass of the busiest stage
computes (all microbatches), that stages wait for each other, and that messages of the tensor axis, between stages, between
workers and of a tied embedding add to that; GB on the fullest device.

Columns of data parallelism: ms per iteration, mean and 95 % quantile; speed-up over synchronous all-reduce; of the mean, how
long a worker waits for slower ones and what messages add; MB a worker sends, and MB that leave the busiest node, per step; the
spectral gap of a period of rounds (1: exact averaging). Compressed methods that launch.calibrate has measured are among the
rows, but the verdict is on messages as they are. --plot draws in which regions of bandwidth and variation of compute time each method is
to be preferred (of those within 3 % of the fastest the one that averages best), and one iteration of each worker. --table prints the
same regions as a decision table, by how long a message takes beside computing.

With --links=FILE instead of --cluster it answers which device does what, where links differ: launch.plan_placement describes it.

    python -m launch.plan --links=configs/links/worldwide.json --stages=8 --placement=placement.json \\
        --model=depth=24,width=2048,heads=16,vocabulary=50257,context=2048,batch=64,bytes=2

What cannot be answered raises a ValueError, which names the flag, the key of --model or the field.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from absl import flags
from rich import console

from decjax import costmodel
from decjax import topology as topology_lib
from decjax.costmodel import plan
from decjax.costmodel import plan_layouts as layouts
from launch import command, config_file, plan_model, plan_report

FLAGS = flags.FLAGS

_DATA_PARALLEL_FLAGS = ("workers", "compute_s", "variation", "ratio", "codec", "every", "plot", "table")
_PLACEMENT_FLAGS = ("stages", "placement", "search_s")
_LAYOUT_FLAGS = ("microbatch", "schedule", "chunks", "inner", "remat", "flops", "top")
MAX_WORKERS = topology_lib.MAX_WORKERS  # also of devices, of which all may be workers


# -- What is asked ----------------------------------------------------------------------------------------------------


def of_config(find: Callable[[Any], Any], text: str) -> Any:
    """What a function of `decjax.config` finds of a config such as configs/lm.py:workers=8."""
    try:
        return find(config_file.get_config(text))
    except _parts().ConfigError as error:
        raise ValueError(f"--model={text}: {error}") from error


def is_config(text: str) -> bool:
    """Whether a --model is a config, as configs/lm.py:workers=8."""
    return text.partition(":")[0].endswith(".py")


def measured_workload(measured: costmodel.Workload | None) -> costmodel.Workload:
    """The workload of the profile or of a JSON file, with its own times."""
    if not FLAGS.model and measured is None:
        raise ValueError(f"{FLAGS.cluster} has no workload; give --model=params=…,forward_s=…,backward_s=… or a config")
    if FLAGS.compute_s is not None:
        raise ValueError(
            f"--compute_s={FLAGS.compute_s:g}: the workload of {FLAGS.model or FLAGS.cluster} has its own times; "
            "leave it out, or give --model=params=… or a config"
        )
    return measured if measured is not None and not FLAGS.model else costmodel.load_workload(FLAGS.model)


def ask() -> tuple[costmodel.Cluster, costmodel.Workload]:
    """The cluster at its size, and the workload, from the flags."""
    cluster, measured = costmodel.load(FLAGS.cluster)
    text, workers = FLAGS.model or "", FLAGS.workers
    if not text or text.endswith(".json"):
        workload = measured_workload(measured)
    elif is_config(text):
        size = of_config(_parts().size, text)
        workers = workers or size.workers
        workload = plan_model.make_workload(dict(params=size.params, tokens=size.tokens), cluster, FLAGS.compute_s)
    else:
        workload = plan_model.make_workload(plan_model.parse_pairs(text), cluster, FLAGS.compute_s)
    if FLAGS.variation is not None:
        jitter = costmodel.Jitter("lognormal", scale_s=FLAGS.variation * workload.compute_s)
        workload = dataclasses.replace(workload, jitter=jitter)
    return sized(cluster, "workers", workers), workload


def sized(cluster: costmodel.Cluster, flag: str, number: int | None) -> costmodel.Cluster:
    """The cluster with as many workers as a flag says, if it does; refused if they are too many to compare."""
    asked, named = cluster.num_workers if number is None else number, f"--{flag}" if FLAGS[flag].present else flag
    if asked > MAX_WORKERS:
        raise ValueError(
            f"{named}={asked}: their graphs cannot be compared in reasonable time; use --{flag}={MAX_WORKERS}, or fewer"
        )
    try:
        return cluster if number is None else cluster.resize(number)
    except ValueError as error:
        raise ValueError(named.removesuffix(flag) + str(error).replace("workers", flag)) from error


def asks_for_layouts() -> bool:
    """Whether devices are to be divided into workers × stages × tensor."""
    return FLAGS.devices is not None or any(
        part.strip().startswith(("depth=", "layers=")) for part in (FLAGS.model or "").split(",")
    )


def refuse_flags(names: tuple[str, ...], reason: str) -> None:
    """Refuses flags that would be without effect."""
    for name in names:
        if FLAGS[name].present:
            value = FLAGS[name].value
            raise ValueError(f"--{name}={','.join(value) if isinstance(value, list) else value} {reason}")


def ask_layouts() -> tuple[costmodel.Cluster, costmodel.Transformer]:
    """The cluster at its size, and the model, from the flags."""
    refuse_flags(_DATA_PARALLEL_FLAGS, "is for workers of one device each; leave it out, or --devices and depth=")
    cluster, _ = costmodel.load(FLAGS.cluster)
    cluster = sized(cluster, "devices", FLAGS.devices)
    if FLAGS.flops is not None:
        cluster = dataclasses.replace(cluster, flops=FLAGS.flops)
    if cluster.flops is None:
        raise ValueError(
            f"{FLAGS.cluster} has no flops, from which the time of a pass follows; give --flops, as 1e13, or enter it there"
        )
    if FLAGS.chunks > 1 and FLAGS.schedule != "interleaved":
        raise ValueError(
            f"--chunks={FLAGS.chunks} is for --schedule=interleaved; leave it out, or give that instead of {FLAGS.schedule}"
        )
    text = FLAGS.model or ""
    if is_config(text):
        parts = _parts()
        return cluster, of_config(lambda config: parts.transformer(parts.resolve(config)), text)
    return cluster, plan_model.make_transformer(plan_model.parse_pairs(text, plan_model.SIZES))


def _parts():
    """`decjax.config`, imported when it is needed: it brings JAX, which takes seconds, and needs no device for this."""
    from decjax import config

    return config


def message_options() -> dict[str, Any]:
    """`ratio` and `codec` of messages, from the flags."""
    if not FLAGS.codec:
        return dict(ratio=1.0 if FLAGS.ratio is None else FLAGS.ratio)
    if FLAGS.ratio is not None:
        raise ValueError(f"--codec={FLAGS.codec} has its own ratio; leave out --ratio={FLAGS.ratio:g}")
    return dict(ratio=_parts().message_ratio(FLAGS.codec), codec=FLAGS.codec)


# -- What is answered -------------------------------------------------------------------------------------------------


def plan_layouts(terminal: console.Console) -> None:
    """Ranks all layouts of the devices and prints the best, and why others were left out."""
    cluster, model = ask_layouts()
    found, refused = layouts.layouts(
        model,
        cluster.num_workers,
        microbatch_size=FLAGS.microbatch,
        schedule=FLAGS.schedule,
        chunks=FLAGS.chunks,
        inner=FLAGS.inner,
        remat=FLAGS.remat,
    )
    ranked, too_large = layouts.rank_layouts(
        cluster, model, found, topologies=FLAGS.topologies or ("one_peer_exponential",), orders=FLAGS.orders
    )
    reasons: dict[str, list[str]] = {}
    for name, reason in (refused | too_large).items():
        reasons.setdefault(reason, []).append(name)
    if not ranked:
        reason, names = next(reversed(reasons.items()))
        raise ValueError(f"no layout of {cluster.num_workers} devices fits; {', '.join(names)}: {reason}")
    terminal.print(plan_report.report_layouts(cluster, model, ranked[: FLAGS.top], terminal.width))
    if len(ranked) > FLAGS.top:
        terminal.print(f"{len(ranked) - FLAGS.top} more; --top={len(ranked)} shows them", style="dim")
    for reason, names in reasons.items():
        terminal.print(f"left out: {', '.join(names)}: {reason}", markup=False, style="dim", soft_wrap=True)


def placed_model(workers: int) -> Any:
    """The `plan_placement.Model` of --model, for so many workers."""
    from launch import plan_placement

    text = FLAGS.model or ""
    if not text or text.endswith(".json"):
        raise ValueError(f"--model={text}: what is placed is a config, params=… or depth=…,width=…; give one of them")
    if is_config(text):
        parts = _parts()
        if FLAGS.stages > 1:
            return plan_placement.of_transformer(of_config(lambda config: parts.transformer(parts.resolve(config)), text))
        size = of_config(parts.size, text)
        return plan_placement.of_numbers(plan_model.NUMBERS | dict(params=size.params, tokens=size.tokens), workers)
    if "depth=" in text or "layers=" in text:
        return plan_placement.of_transformer(plan_model.make_transformer(plan_model.parse_pairs(text, plan_model.SIZES)))
    values = plan_model.parse_pairs(text)
    plan_model.check_parameters(values)
    return plan_placement.of_numbers(values, workers)


def plan_links() -> None:
    """Answers --links."""
    from launch import plan_placement  # It brings SciPy, which takes a second that other questions need not wait.

    others = {*_DATA_PARALLEL_FLAGS, *_LAYOUT_FLAGS, "cluster", "orders"} - {"plot"}
    refuse_flags(tuple(sorted(others)), "is without effect on a placement; leave it out, or --links")
    plan_placement.run(placed_model)


def main(argv: list[str]) -> int:
    command.options_only(argv)
    if FLAGS.links:
        plan_links()
        return 0
    if not FLAGS.cluster:
        raise ValueError("--cluster is missing: the cluster's profile, such as one of configs/clusters; or give --links")
    refuse_flags(_PLACEMENT_FLAGS, "is for a network of --links; give one, or leave it out")
    if asks_for_layouts():
        plan_layouts(command.console())
        return 0
    refuse_flags(_LAYOUT_FLAGS, "is for layouts of workers × stages × tensor; leave it out, or give --devices or depth=")
    if not FLAGS.orders:
        raise ValueError(
            "--orders is empty; give awc (overlaps with the gradient), atc (after the update) or both, or leave it out"
        )
    cluster, workload = ask()
    names = topology_lib.names() if FLAGS.topologies == ["all"] else FLAGS.topologies or plan.TOPOLOGIES
    methods, refused = plan.candidates(
        cluster, names, FLAGS.orders, bucketed=len(workload.num_bytes) > 1, every=FLAGS.every, **message_options()
    )
    for form in workload.compressed:
        if form.num_workers == cluster.num_workers:
            methods.append(costmodel.compressed(form))
        else:
            refused[form.name] = f"{form.name!r} was measured among {form.num_workers} workers, not {cluster.num_workers}"
    ranked = plan.rank(cluster, workload, methods)
    terminal = command.console()
    terminal.print(plan_report.report(cluster, workload, ranked, terminal.width))
    compressed = {form.name for form in workload.compressed}
    terminal.print(plan.verdict(cluster, workload, [r for r in ranked if r.method.name not in compressed]), markup=False)
    for reason in refused.values():
        terminal.print("left out: " + reason, markup=False, style="dim")
    if FLAGS.table:
        terminal.print(plan_report.decide(cluster, workload, [r.method for r in ranked if r.method.name not in compressed]))
    if FLAGS.plot:
        plan_report.plot(FLAGS.plot, cluster, workload, ranked)
        terminal.print(f"wrote {FLAGS.plot}", markup=False)
    return 0


if __name__ == "__main__":  # Other commands have a --workers as well, and one process may import several.
    flags.DEFINE_string("cluster", None, "The cluster's profile, a JSON file; configs/clusters has some.")
    flags.DEFINE_string("links", None, "Instead of --cluster: links of devices that differ, a JSON file; configs/links has some.")
    flags.DEFINE_integer("stages", 1, "Pipeline stages that a model is divided into, with --links.", lower_bound=1)
    flags.DEFINE(
        command.FILE, "placement", None, "Where to write the order of devices that is found, for launch.train --placement."
    )
    flags.DEFINE_float("search_s", 20.0, "Seconds of each search of a placement.", lower_bound=0.0)
    flags.DEFINE_string("model", None, "A config, a workload in JSON, or params=…,forward_s=…,backward_s=…; none: the profile's.")
    flags.DEFINE_integer("workers", None, "Number of workers; none: the config's, or all of the profile.", lower_bound=1)
    flags.DEFINE_float("compute_s", None, "Seconds that a worker computes for one step.", lower_bound=0.0)
    flags.DEFINE_float(
        "variation", None, "Standard deviation ÷ mean of compute times, log-normal; none: the workload's.", lower_bound=0.0
    )
    flags.DEFINE_list("topologies", [], "Graphs to consider, or 'all'; none: a choice of good ones.")
    flags.DEFINE_list("orders", ["awc", "atc"], "awc (overlaps with the gradient), atc (after the update), or both.")
    flags.DEFINE_float("ratio", None, "Bytes of a message ÷ bytes of the parameters: 0.5 for 16 bits; none: 1.")
    flags.DEFINE_string("codec", None, "Codec of gossip's messages, such as int8: its ratio, and its time if it was measured.")
    flags.DEFINE_integer("every", 1, "Communicate in every p-th step.")
    flags.DEFINE(command.FIGURE, "plot", None, "Where to write the figure, such as plan.png.")
    flags.DEFINE_bool("table", False, "Print which method to prefer at which bandwidth and variation of compute times.")
    flags.DEFINE_integer(
        "devices",
        None,
        "Devices to divide into workers × stages × tensor; none: all, if --model has a depth.",
        lower_bound=1,
        upper_bound=MAX_WORKERS,
    )
    flags.DEFINE_integer("microbatch", 1, "Sequences in a microbatch.", lower_bound=1)
    flags.DEFINE_enum("schedule", "1f1b", ["gpipe", "1f1b", "interleaved"], "Of the pipeline.")
    flags.DEFINE_integer("chunks", 1, "Virtual stages of a stage, for --schedule=interleaved.", lower_bound=1)
    flags.DEFINE_enum("inner", "stage", ["stage", "worker"], "Which axis comes next to the tensor axis on a node.")
    flags.DEFINE_enum(
        "remat",
        "products",
        ["none", "products", "layers", "stages"],
        "What is computed anew: nothing, all of a layer but its matrix products, whole layers, or whole stages.",
    )
    flags.DEFINE_alias("rematerialize", "remat")
    flags.DEFINE_float("flops", None, "Operations per second that a device sustains; none: the profile's.", lower_bound=0.0)
    flags.DEFINE_integer("top", 20, "How many layouts to show.", lower_bound=1)
    command.run(main, errors=(ValueError, config_file.ConfigFileError))
