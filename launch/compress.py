"""What compressing a trained model costs: loss of the averaged model with eight bits per channel, low rank, or pruned.

    python -m launch.compress --workdir=runs/lm
    python -m launch.compress --workdir=runs/lm '--forms=int8;low_rank(fraction=0.25);prune(fraction=0.9)'
    python -m launch.compress --workdir=runs/clicks '--forms=low_rank(fraction=0.25);principal(fraction=0.25)' --out=found.json

Takes the newest checkpoint of a run, averages its workers, and evaluates the average on all validation data, as it is and in every
form (`decjax.models.compress`). Nothing is trained anew and the run is not changed. All workers are simulated on one device. The form
`principal` looks at what the model's layers put out for training examples, for tasks that show it: clicks.
"""

from collections.abc import Mapping
import functools
import json
import pathlib
from typing import Any

from absl import flags
import jax
import numpy as np

from decjax import config as parts
from decjax import files, train
from decjax.models import compress
from decjax.train import checkpoint
from launch import command

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
_FORMS = flags.DEFINE_string(
    "forms",
    None,
    f"Forms, separated by semicolons; none: {';'.join(compress.EXAMPLES)}, and {compress.OF_OUTPUTS} where the task can.",
)
_OUT = flags.DEFINE(command.FILE, "out", None, "A file for the numbers, as JSON.")
flags.mark_flag_as_required("workdir")

KEPT = "as trained"
SAMPLED = 2**13  # training examples at least, for which layers put something out
Found = dict[str, tuple[float, Mapping[str, float]]]  # (bytes, metrics) by form


def trainer_of(document: dict[str, Any]) -> train.Trainer:
    """The trainer of a run's config, with all workers on one device."""
    spec = parts.resolve(document)  # As the run that it was: no step is taken here, so options that exclude `simulate` may stay.
    return train.Trainer(spec.replace(simulate=True, tensor=1, tensor_codec=""))


def load(workdir: pathlib.Path) -> tuple[train.Trainer, Any, int]:
    """The trainer of a run, its newest state, and the step."""
    try:
        document = files.read_json(workdir / "config.json")
    except ValueError as error:
        command.refuse(f"workdir {str(workdir)!r} holds no run ({error}); give the --workdir of launch.train")
    trainer = trainer_of(document)
    with checkpoint.Checkpoints(workdir, read_only=True) as saved:
        if saved.latest() is None:
            command.refuse(f"workdir {str(workdir)!r} has no complete checkpoint; train until the first one")
        step, (state, _), _ = saved.newest(lambda step: saved.restore(step, like=trainer.abstract))
    return trainer, state, step


def outputs(trainer: train.Trainer, model: tuple[Any, Any]) -> dict[str, np.ndarray] | None:
    """What a model's layers put out for training examples, of all workers in turn; None if the task does not show it."""
    if not (given := trainer.setup.task.outputs):
        return None
    spec, of_batch = trainer.spec, jax.jit(given)
    batches = (trainer.data.batch(k % spec.workers, k // spec.workers) for k in range(-(-SAMPLED // spec.batch_per_worker)))
    found = [jax.tree.map(np.asarray, of_batch(*model, batch)) for batch in batches]
    return {name: np.concatenate([own[name] for own in found]) for name in found[0]}


def measure(trainer: train.Trainer, state: Any, forms: list[str]) -> Found:
    """(bytes, metrics) of the averaged model in each form, and as it is."""
    params, variables = trainer.average(state)
    found = {KEPT: (float(sum(np.asarray(x).nbytes for x in jax.tree.leaves(params))), trainer.measure((params, variables)))}
    seen = functools.cache(lambda: outputs(trainer, (params, variables)))
    for form in forms:
        smaller = compress.make(form)(params, seen() if compress.needs_outputs(form) else None)
        found[form] = float(smaller.num_bytes), trainer.measure((smaller.params, variables))
    return found


def report(found: Found) -> Any:
    """One row a form."""
    whole, metrics = found[KEPT]
    table = command.table("form", "MB", "ratio", *(text for name in metrics for text in (name, "change")))
    for form, (num_bytes, own) in found.items():
        cells = (text for name, value in own.items() for text in (f"{value:.4f}", f"{value - metrics[name]:+.4f}"))
        table.add_row(form, f"{num_bytes / 1e6:.3g}", f"{num_bytes / whole:.3f}", *cells)
    return table


def main(argv: list[str]) -> int:
    command.options_only(argv)
    forms = [form.strip() for form in (_FORMS.value or "").split(";") if form.strip()]
    for form in forms:
        compress.make(form)  # Refused before anything is loaded.
    trainer, state, step = load(pathlib.Path(_WORKDIR.value or ""))
    usual = [*compress.EXAMPLES, *([compress.OF_OUTPUTS] if trainer.setup.task.outputs else [])]
    found = measure(trainer, state, forms or usual)
    if _OUT.value:
        rows = {form: {"bytes": num_bytes, **metrics} for form, (num_bytes, metrics) in found.items()}
        files.write_whole(_OUT.value, json.dumps({"step": step, "forms": rows}, indent=1) + "\n")
    terminal = command.console()
    terminal.print(f"the averaged model of {_WORKDIR.value} after {step} steps", markup=False)
    terminal.print(report(found))
    return 0


if __name__ == "__main__":
    command.run(main, errors=(train.TrainingError, ValueError))
