"""Measure the loss of a trained model after compression: int8 per channel, low rank, or pruned.

    python -m launch.compress --workdir=runs/lm
    python -m launch.compress --workdir=runs/lm '--forms=int8;low_rank(fraction=0.25);prune(fraction=0.9)'
    python -m launch.compress --workdir=runs/clicks '--forms=low_rank(fraction=0.25);principal(fraction=0.25)' --out=losses.json

Averages the workers of the newest checkpoint and evaluates the average on all validation data, uncompressed and in every form
(`decjax.contrib.compress`). Nothing is trained, and the run is not changed. The form `principal` needs the outputs of layers for
training examples, which the task clicks has.
"""

from collections.abc import Mapping
import functools
import json
import pathlib

from absl import flags
import jax
import numpy as np
import rich.table

from decjax import files, train
from decjax.contrib import compress
from launch import command, trained

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
_FORMS = flags.DEFINE_string(
    "forms",
    None,
    f"Forms, separated by semicolons; default: {';'.join(compress.EXAMPLES)}, and {compress.OF_OUTPUTS} if the task has them.",
)
_OUT = flags.DEFINE(command.FILE, "out", None, "JSON file to write.")
flags.mark_flag_as_required("workdir")

UNCOMPRESSED = "as trained"
SAMPLED = 2**13  # minimum of training examples for which outputs are computed
Results = dict[str, tuple[float, Mapping[str, float]]]  # (bytes, metrics) by form


def outputs(trainer: train.Trainer, model: tuple[Mapping, Mapping]) -> dict[str, np.ndarray] | None:
    """Return the outputs of layers for training examples of all workers; None if the task has none."""
    if not isinstance(trainer.setup.task, compress.HasOutputs):
        return None
    spec, of_batch = trainer.spec, jax.jit(trainer.setup.task.outputs)
    batches = (trainer.data.batch(k % spec.workers, k // spec.workers) for k in range(-(-SAMPLED // spec.batch_per_worker)))
    outputs_of = [jax.tree.map(np.asarray, of_batch(*model, batch)) for batch in batches]
    return {name: np.concatenate([values[name] for values in outputs_of]) for name in outputs_of[0]}


def measure(trainer: train.Trainer, state: train.State, forms: list[str]) -> Results:
    """Return (bytes, metrics) of the averaged model, uncompressed and in each form."""
    params, variables = trainer.average(state)
    results = {
        UNCOMPRESSED: (float(sum(np.asarray(x).nbytes for x in jax.tree.leaves(params))), trainer.measure((params, variables)))
    }
    cached_outputs = functools.cache(lambda: outputs(trainer, (params, variables)))
    for form in forms:
        smaller = compress.make(form)(params, cached_outputs() if compress.needs_outputs(form) else None)
        results[form] = float(smaller.num_bytes), trainer.measure((smaller.params, variables))
    return results


def report(results: Results) -> rich.table.Table:
    """Return a table with one row per form."""
    total, metrics = results[UNCOMPRESSED]
    table = command.table("form", "MB", "ratio", *(text for name in metrics for text in (name, "change")))
    for form, (num_bytes, values) in results.items():
        cells = (text for name, value in values.items() for text in (f"{value:.4f}", f"{value - metrics[name]:+.4f}"))
        table.add_row(form, f"{num_bytes / 1e6:.3g}", f"{num_bytes / total:.3f}", *cells)
    return table


def main(argv: list[str]) -> int:
    command.options_only(argv)
    forms = [form.strip() for form in (_FORMS.value or "").split(";") if form.strip()]
    for form in forms:
        compress.make(form)  # Refused before anything is loaded.
    workdir = pathlib.Path(_WORKDIR.value or "")
    trainer = train.Trainer(trained.simulated(trained.document(workdir)))
    step, state = trained.newest(workdir, trainer)
    defaults = [*compress.EXAMPLES, *([compress.OF_OUTPUTS] if isinstance(trainer.setup.task, compress.HasOutputs) else [])]
    results = measure(trainer, state, forms or defaults)
    if _OUT.value:
        rows = {form: {"bytes": num_bytes, **metrics} for form, (num_bytes, metrics) in results.items()}
        files.write_whole(_OUT.value, json.dumps({"step": step, "forms": rows}, indent=1) + "\n")
    terminal = command.console()
    terminal.print(f"the averaged model of {_WORKDIR.value} after {step} steps", markup=False)
    terminal.print(report(results))
    return 0


if __name__ == "__main__":
    command.run(main, errors=(train.TrainingError, ValueError))
