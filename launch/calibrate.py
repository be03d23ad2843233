"""Measure the devices and write a cluster profile, which launch.plan reads.

    python -m launch.calibrate --config=configs/lm.py --out=profile.json
    python -m launch.cluster run --hosts=4 --rate=200mbit --module=launch.calibrate -- --config=configs/lm.py --out=profile.json
    srun -N4 -n4 python -m launch.calibrate --config=configs/lm.py --out=profile.json --links=links.json
    python -m launch.calibrate --config=configs/lm.py --compressed=method=allreduce,reducer=powersgd --out=profile.json

The config gives model, batch, optimizer and workers per node (`local_size`); its method is ignored. Without accelerators each worker
is a CPU device. The machines should be idle: other load on them would end up in the profile. Methods of --compressed are timed without
their messages. --links also measures the link of every pair of workers, for launch.place. docs/reference/commands.md describes the table.
"""

import contextlib
import pathlib
from typing import TYPE_CHECKING

from absl import flags
import jax
import ml_collections
from ml_collections import config_flags
import numpy as np
from rich import markup, table

from decjax import config as parts
from decjax import costmodel, measure, train
from launch import command, config_file, join

if TYPE_CHECKING:  # It imports SciPy, which takes a second.
    from decjax.contrib.placement import Links


class Sizes(flags.ArgumentParser):
    """The parser of a flag with bytes of exchanges."""

    def parse(self, argument: str) -> list[int]:
        try:
            sizes = sorted({int(float(text)) for text in argument.split(",")})
        except (ValueError, OverflowError):
            command.refuse("must be numbers of bytes", "write them as 1e5,1e6,1e7")
        is_enough = len(sizes) > 1 and sizes[0] >= 4
        command.check((is_enough, "must be two or more different numbers of at least 4", "write them as 1e5,1e6"))
        return sizes


with command.defining_config():
    _CONFIG = config_flags.DEFINE_config_file(
        "config", None, "Config file, with an optional shorthand after a colon: configs/lm.py:workers=4."
    )
_OUT = flags.DEFINE_string("out", None, "Profile to write, such as profile.json.")
_NAME = flags.DEFINE_string("name", None, "Name of the cluster; default: its workers and devices.")
_SIZES = flags.DEFINE(Sizes(), "sizes", None, "Bytes of exchanges, such as 1e5,1e6,1e7; default: up to the model's.")
_COMPRESSED = flags.DEFINE_multi_string("compressed", [], "Compressed method in shorthand; may be repeated.")
_LINKS = flags.DEFINE_string("links", None, "File of links to write, one for every pair of workers.")
_SECONDS = flags.DEFINE_float("seconds", 60.0, "Approximate measuring time after compilation.", lower_bound=0.0)
_ROUNDS = flags.DEFINE_integer("rounds", None, "Number of measurements; default: as --seconds allows.", lower_bound=1)
flags.mark_flags_as_required(["config", "out"])
flags.adopt_module_key_flags(join)  # --help shows them.

STEP = {
    "forward": "forward",
    "gradient": "forward and backward",
    "in a row": "the same in a row, not waiting",
    "optimizer": "optimizer",
}
KINDS = {"shift": "shift", "pair": "pair", "all_reduce": "all-reduce"}
METHOD = ("method", "topology", "mixer", "reducer", "optimizer", "schedule", "clip_norm")  # fields of a config that make a method
SCOPES = {"inter": "between nodes", "intra": "inside nodes"}


def forms(config: ml_collections.ConfigDict, texts: list[str]) -> list[measure.Form]:
    """Return compressed methods: shorthands of the config's file, with the model, data and workers of the config."""
    file = config_flags.get_config_filename(flags.FLAGS["config"])
    kept = {field: value for field, value in _resolved(config).document.items() if field not in METHOD}

    def form(text):
        compressed = _resolved(config_file.get_config(f"{file}{',' if ':' in file else ':'}{text}")).document
        return measure.form(text, _resolved(kept | {field: compressed[field] for field in METHOD if field in compressed}))

    return [form(text) for text in texts]


def _resolved(config: ml_collections.ConfigDict | dict[str, object]) -> parts.RunSpec:
    return parts.resolve(config, jax.device_count(), jax.default_backend())


def spread(times_s: np.ndarray) -> list[str]:
    """Format the median and the range in ms."""
    low, middle, high = 1e3 * np.quantile(times_s, (0.05, 0.5, 0.95))
    return [f"{middle:.3g}", f"{low:.3g} – {high:.3g}"]


def report(measured: measure.Measured) -> table.Table:
    """Return the table of measurements."""
    rows = command.table("", "MB", "ms", "5 – 95 %", "α, ms", "β, Mbit/s", title=markup.escape(measured.cluster.name))
    rows.caption = f"all-reduce reaches {measured.cluster.all_reduce_efficiency:.0%} of the links' bandwidth"
    model_mb = f"{measured.workload.total_bytes / 1e6:.3g}"
    for part, title in STEP.items():
        rows.add_row(title, model_mb, *spread(measured.step_s[part]))
    for (kind, scope), line in measured.lines.items():
        title, fit = f"{KINDS[kind]} {SCOPES[scope]}", [f"{1e3 * line.latency_s:.3g}", f"{8e-6 * line.bandwidth_Bps:.4g}"]
        for what, slowest_s in measured.exchange_s.items():
            if (what.kind, what.scope) == (kind, scope):
                rows.add_row(title, f"{what.num_bytes / 1e6:.3g}", *spread(slowest_s), *fit)
                title, fit = "", []  # Only in the first row.
    if len(measured.beside_s):
        rows.add_row("during a gradient", model_mb, *spread(measured.beside_s))
    for codec, both_s in measured.codec_s.items():
        rate_Bps = measured.cluster.codec_rate(codec)
        assert rate_Bps is not None
        rows.add_row(f"{codec}, both ways", model_mb, *spread(both_s), "", f"{8e-6 * rate_Bps:.4g}")
    for name, update_s in measured.coding_s.items():
        rows.add_row(f"update by {name}, unsent", model_mb, *spread(update_s))
    return rows


def links_between(trainer: train.Trainer, sizes: list[int], measured: measure.Measured) -> "Links":
    """Measure the links between workers, and each worker's flop/s: 6 · parameters · items of a batch ÷ time of a gradient."""
    from decjax.contrib.placement.measured import measure_links

    spec, task = trainer.spec, trainer.setup.task
    params = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(trainer.setup.start, jax.random.key(0))))
    gradient_s = np.median(measured.step_s["gradient"], axis=1)
    return measure_links(
        trainer.workers,
        sizes or measure.sizes_up_to_model(trainer),
        flops=6 * params * spec.batch_per_worker * task.items / gradient_s,
    )


def report_links(links: "Links") -> table.Table:
    """Return the table of Mbit/s from row to column."""
    rows = command.table("from, to: Mbit/s", *links.names, "ms", "Gflop/s")
    rows.caption = "ms: the largest latency to another worker"
    assert links.flops is not None  # They were measured.
    for i, name in enumerate(links.names):
        rates = ("–" if i == j else f"{8e-6 * links.bandwidth_Bps[i, j]:.3g}" for j in range(links.num_devices))
        rows.add_row(name, *rates, f"{1e3 * links.latency_s[i].max():.3g}", f"{1e-9 * links.flops[i]:.3g}")
    return rows


def main(argv: list[str]) -> int:
    command.options_only(argv)
    both = _ROUNDS.value is not None and flags.FLAGS["seconds"].present
    no_effect = f"--seconds={_SECONDS.value:g} has no effect with --rounds={_ROUNDS.value}"
    command.check((not both, no_effect, "leave out one of them"))
    assert _OUT.value is not None  # It is required.
    sizes, path, config = _SIZES.value or [], pathlib.Path(_OUT.value), _CONFIG.value
    terminal = command.console()
    with join.leaving_at_once((train.TrainingError, ValueError), "run the same command again"):
        join.set_up_devices(config.workers)
        first = jax.process_index() == 0
        if first:
            command.output("out", _OUT.value)
            if _LINKS.value:
                command.output("links", _LINKS.value)
        measure.check(parts.read(config))
        trainer = measure.prepare(_resolved(config))
        each = trainer.workers.local_size
        nodes = trainer.workers.num_workers // each
        default_name = f"{nodes} {'nodes' if nodes > 1 else 'node'} × {each} workers, {jax.devices()[0].device_kind}"
        with terminal.status("compiling …") if first else contextlib.nullcontext() as shown:
            measured = measure.measure(
                trainer,
                name=_NAME.value or default_name,
                sizes=sizes,
                forms=forms(config, _COMPRESSED.value),
                seconds=_SECONDS.value,
                rounds=_ROUNDS.value,
                note=lambda done, total: shown and shown.update(f"round {done} of {total}"),
            )
            links = links_between(trainer, sizes, measured) if _LINKS.value else None
    if first:
        terminal.print(report(measured))
        if links and _LINKS.value:
            links.save(_LINKS.value)
            terminal.print(report_links(links))
            terminal.print(f"wrote {_LINKS.value}; see launch.place --links={_LINKS.value}", soft_wrap=True)
        costmodel.save(path, measured.cluster, measured.workload)
        terminal.print(f"wrote {path}; python -m launch.plan --cluster={path} ranks the methods", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    command.run(main, errors=(train.TrainingError, ValueError, config_file.ConfigFileError))
