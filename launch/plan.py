"""Rank all-reduce and gossip by predicted step time on a cluster.

    python -m launch.plan --cluster=configs/clusters/box_200mbit.json
    python -m launch.plan --cluster=configs/clusters/a40_ethernet.json --model=params=65e6,tokens=1600,buckets=8 --workers=32
    python -m launch.plan --cluster=configs/clusters/box_200mbit.json --model=configs/lm.py:workers=8 --compute_s=0.09 --plot=plan.png

launch.calibrate measures the cluster's profile; configs/clusters has some. --model is a config, a workload in JSON, or numbers:
params, tokens or forward_s and backward_s, buckets=1, bytes=4 (per parameter), optimizer_s=0, combine_s=0.
docs/reference/commands.md describes the columns.
"""

import dataclasses

from absl import flags

from decjax import costmodel
from decjax import topology as topology_lib
from decjax.costmodel import plan
from decjax.errors import ConfigError
from launch import command, config_file, plan_model, plan_report

FLAGS = flags.FLAGS


def read_flags() -> tuple[costmodel.Cluster, costmodel.Workload]:
    """Return the resized cluster and the workload."""
    cluster, measured = costmodel.load(FLAGS.cluster)
    text, workers = FLAGS.model or "", FLAGS.workers
    size = plan_model.size(text, FLAGS.fsdp) if plan_model.is_config(text) else None
    cluster = costmodel.grouped(cluster, size.fsdp if size else FLAGS.fsdp or 1)
    if size:
        workers = workers or size.workers
        workload = plan_model.Numbers(size.params, size.tokens).workload(cluster, FLAGS.compute_s)
    elif not text or text.endswith(".json"):
        if FLAGS.compute_s is not None:
            problem = f"--compute_s={FLAGS.compute_s:g}: the workload of {text or FLAGS.cluster} has its own times"
            command.refuse(problem, "leave it out, or give --model=params=… or a config")
        workload = costmodel.load_workload(text) if text else measured
        if workload is None:
            command.refuse(f"{FLAGS.cluster} has no workload", "give --model=params=…,forward_s=…,backward_s=… or a config")
    else:
        workload = plan_model.parse(text, plan_model.Numbers).workload(cluster, FLAGS.compute_s)
    if FLAGS.variation is not None:
        jitter = costmodel.Jitter("lognormal", scale_s=FLAGS.variation * workload.compute_s)
        workload = dataclasses.replace(workload, jitter=jitter)
    cluster = plan_model.resized(cluster, "workers", workers)
    return cluster, costmodel.divided(workload, cluster)


def message_ratio() -> float:
    """Return the bytes of a message ÷ those of the parameters."""
    if not FLAGS.codec:
        return 1.0 if FLAGS.ratio is None else FLAGS.ratio
    from decjax import config

    return config.message_ratio(FLAGS.codec)


def main(argv: list[str]) -> int:
    command.options_only(argv)
    cluster, workload = read_flags()
    names = topology_lib.names() if FLAGS.topologies == ["all"] else FLAGS.topologies or plan.TOPOLOGIES
    methods, refused = plan.candidates(
        cluster,
        names,
        FLAGS.orders,
        bucketed=len(workload.num_bytes) > 1,
        ratio=message_ratio(),
        codec=FLAGS.codec or "",
        every=FLAGS.every,
    )
    for form in workload.compressed:
        if form.num_workers == cluster.num_workers:
            methods.append(costmodel.compressed(form))
        else:
            refused[form.name] = f"{form.name!r} was measured with {form.num_workers} workers, not {cluster.num_workers}"
    ranked = plan.rank(cluster, workload, methods)
    terminal = command.console()
    terminal.print(plan_report.report(cluster, workload, ranked, terminal.width))
    compressed = {form.name for form in workload.compressed}
    uncompressed = [r for r in ranked if r.method.name not in compressed]
    terminal.print(plan.verdict(cluster, workload, uncompressed), markup=False)
    if plan_model.is_config(FLAGS.model or ""):
        terminal.print(plan_report.memory(plan_model.memory(FLAGS.model, FLAGS.fsdp), cluster), markup=False)
    for reason in refused.values():
        terminal.print("left out: " + reason, markup=False, style="dim")
    if FLAGS.table:
        terminal.print(plan_report.decide(cluster, workload, [r.method for r in uncompressed]))
    if FLAGS.plot:
        plan_report.plot(FLAGS.plot, cluster, workload, ranked)
        terminal.print(f"wrote {FLAGS.plot}", markup=False)
    return 0


if __name__ == "__main__":  # Other commands define flags of the same names, and one process may import several.
    flags.DEFINE_string("cluster", None, "Profile of the cluster, a JSON file.", required=True)
    flags.DEFINE_string("model", None, "Config, workload in JSON, or params=…,tokens=…; default: the profile's workload.")
    flags.DEFINE_integer("workers", None, "Number of workers; default: the config's or the profile's.", lower_bound=1)
    flags.DEFINE_integer("fsdp", None, "Devices per worker, on one node; default: the config's, or 1.", lower_bound=1)
    flags.DEFINE_float("compute_s", None, "Compute time of a step, seconds.", lower_bound=0.0)
    flags.DEFINE_float("variation", None, "Standard deviation ÷ mean of compute times, log-normal.", lower_bound=0.0)
    flags.DEFINE_list("topologies", [], "Graphs to consider, or 'all'; default: a selection.")
    flags.DEFINE_list("orders", ["awc", "atc"], "awc (overlaps with the gradient), atc (after the update), or both.")
    flags.DEFINE_float("ratio", None, "Bytes of a message ÷ those of the parameters: 0.5 for fp16.")
    flags.DEFINE_string("codec", None, "Codec of gossip's messages, such as int8.")
    flags.DEFINE_integer("every", 1, "Communicate in every p-th step.")
    flags.DEFINE(command.FIGURE, "plot", None, "Figure to write, such as plan.png.")
    flags.DEFINE_bool("table", False, "Print which method to prefer by bandwidth and variation of compute times.")
    flags.mark_flags_as_mutual_exclusive(["codec", "ratio"])
    flags.register_validator("orders", bool, "give awc, atc or both, or leave it out")
    command.run(main, errors=(ValueError, ConfigError, config_file.ConfigFileError))
