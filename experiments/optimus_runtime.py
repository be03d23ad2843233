"""Predicted speed-up of compression on every axis on Optimus-CC's cluster; nothing is measured.

    python -m experiments.optimus_runtime
    python -m experiments.optimus_runtime --nic=0.25 --blocking

GPT-2.5B and 8.3B as in arXiv 2301.09830: 8 devices a tensor group, 4 stages, sequences of 1024, microbatches of 8, batch 512, so
with 16 microbatches 4 workers on 16 nodes of 8 A100. Half-precision messages, 1F1B, activations recomputed from each layer's
input. Messages between stages overlap with the passes, as in the published system; with --blocking they are sent between the passes, as
in `decjax.pipeline`. The cluster (configs/clusters/optimus_a100.json) follows the datasheets: links at their full rate, or the fraction
--nic of it between nodes, and passes at 45 % of the peak. Codecs take no time, so speed-ups are upper bounds for these links.

CB: rank-16 gradients between stages in the cool-down; FE: one average of the tied embedding; SC k: rank-128 gradients between
workers from the first k stages, k as the model chooses it. Parts of the time as in `layouts.LayoutPrediction`.
"""

import dataclasses

from absl import flags

from decjax import costmodel
from decjax.contrib import layouts
from experiments import script
from launch import command

FLAGS = flags.FLAGS

CLUSTER = "configs/clusters/optimus_a100.json"
MODELS = {
    size: layouts.Transformer(layers, width, 24, 51200, 1024, 512, tied=True, value_bytes=2, gradient_bytes=2, parameter_bytes=6)
    for size, layers, width in (("2.5b", 52, 1920), ("8.3b", 72, 3072))
}
LAYOUT = layouts.DeviceLayout(workers=4, stages=4, tensor=8, microbatches=16, inner="worker", remat="layers")
PARTS = ("compute_s", "bubble_s", "tensor_s", "boundary_s", "workers_s", "embedding_s")


def predict(size: str, *, nic: float = 1.0, blocking: bool = False) -> dict[str, layouts.LayoutPrediction]:
    """Return predictions for "baseline", "CB", "CB+FE" and "CB+FE+SC k" of a model size, with NICs that reach a fraction of their rate."""
    cluster, _ = costmodel.load(CLUSTER)
    inter = dataclasses.replace(cluster.inter, bandwidth_Bps=nic * cluster.inter.bandwidth_Bps)
    cluster, layout = dataclasses.replace(cluster, inter=inter), dataclasses.replace(LAYOUT, blocking=blocking)
    assert cluster.flops is not None
    load = layouts.work(MODELS[size], layout, cluster.flops)
    ways = layouts.compressions(cluster, MODELS[size], load, layout)
    return {_label(name): layouts.predict_layout(cluster, load, layout, traffic) for name, traffic in ways.items()}


def _label(method: str) -> str:
    return method.removeprefix("all-reduce").strip().replace(" ", "+").replace("SC+", "SC ") or "baseline"


def main() -> None:
    if not 0 < FLAGS.nic <= 1:
        command.fail(f"--nic={FLAGS.nic:g} must be above 0 and at most 1; 0.5 is half of the datasheet's rate")
    title = f"predicted; messages between stages travel {'between the passes' if FLAGS.blocking else 'beside the passes'}"
    parts = (part.removesuffix("_s") for part in PARTS)
    rows = script.table("model", "sent", "s per iteration", "speed-up", *parts, left=2, title=title)
    for size in MODELS:
        predictions = predict(size, nic=FLAGS.nic, blocking=FLAGS.blocking)
        baseline_s = predictions["baseline"].time_s
        for name, prediction in predictions.items():
            seconds = (f"{max(getattr(prediction, part), 0):.3f}" for part in PARTS)
            rows.add_row(size, name, f"{prediction.time_s:.3f}", f"{baseline_s / prediction.time_s:.3f}", *seconds)
    script.show(rows)


if __name__ == "__main__":
    flags.DEFINE_float("nic", 1.0, "Fraction of the datasheet's rate that messages between nodes reach.")
    flags.DEFINE_bool("blocking", False, "Stages send and receive between their passes instead of during them.")
    script.run(main, errors=(ValueError, OSError))
