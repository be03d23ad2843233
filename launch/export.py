"""Write a trained model as model.safetensors and config.json, which Hugging Face's transformers loads.

    python -m launch.export --run=runs/llama --out=exported

Averages the workers of the newest checkpoint of a run of configs/llama.py: a Llama, a Qwen2 (with biases of queries, keys and values) or a
GPT-2. Parameters are float32. Nothing is trained, the run is not changed, and its data are not read.
"""

import pathlib

from absl import flags
import jax
import numpy as np

from decjax import train
from decjax.models import huggingface
from launch import command, trained

_RUN = flags.DEFINE_string("run", None, "Work directory of the run.")
_OUT = flags.DEFINE(command.FOLDER, "out", None, "Folder to write.")
flags.mark_flags_as_required(["run", "out"])


def main(argv: list[str]) -> int:
    command.options_only(argv)
    workdir, out = pathlib.Path(_RUN.value or ""), pathlib.Path(_OUT.value or "")
    config = trained.document(workdir)
    model = config.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    exported = ", ".join(map(repr, huggingface.ARCHITECTURES))
    command.check(
        (
            name in huggingface.ARCHITECTURES,
            f"run {str(workdir)!r} trains model {name!r}, and only {exported} can be exported",
            "use configs/llama.py",
        ),
        (
            not (out / huggingface.WEIGHTS).exists(),
            f"--out={str(out)!r} has a {huggingface.WEIGHTS} already",
            "choose another --out",
        ),
    )
    assert isinstance(model, dict)  # It has a name.
    spec = trained.simulated(config | {"model": model | {"pretrained": ""}})
    command.check(
        (
            not spec.pipeline.autoencoder,
            f"run {str(workdir)!r} has autoencoders between stages",
            "train with pipeline.autoencoder=0",
        )
    )
    trainer = train.Trainer(spec.setup)
    step, state = trained.newest(workdir, trainer)
    params, _ = trainer.average(state)
    assert spec.model
    huggingface.write(out, jax.tree.map(np.asarray, params), spec.model.name, spec.model.options)
    command.console().print(f"the averaged model of {workdir} after {step} steps is in {out}", markup=False)
    return 0


if __name__ == "__main__":
    command.run(main, errors=(train.TrainingError, ValueError))
