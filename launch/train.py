"""Trains a config: python -m launch.train --config=configs/lm.py --workdir=runs/lm"""

import os
import shlex
import sys

from absl import flags
import jax
from ml_collections import config_flags

from decjax import train
from decjax.train import metrics
from launch import command, join

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with an optional shorthand after a colon: configs/lm.py:workers=4,smoke."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: config, metrics, checkpoints, summary.")
_RESUME_FROM = flags.DEFINE_string(
    "resume_from", None, "Start from the newest checkpoint of another run, with any number of workers."
)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> int:
    if argv:
        command.fail(f"unexpected argument {argv[0]!r}; options start with --")
    with join.leaving_at_once((train.TrainingError,), "run the same command to continue from the last checkpoint"):
        config, workdir = _CONFIG.value, command.folder("workdir", _WORKDIR.value)
        join.set_up_devices(config.workers, config.simulate, train.devices_of_worker(config))
        outcome = train.Run(train.build(config), workdir, _RESUME_FROM.value).train()
    if jax.process_index() == 0:
        report(outcome)
    return 128 + outcome.signal if outcome.signal else 0


def report(outcome: train.Outcome) -> None:
    """Prints how the run ended."""
    if outcome.summary and outcome.sample is None:
        print(f"the run in {_WORKDIR.value} is finished already, after {outcome.step} steps; another --workdir starts a new run")
    if outcome.signal:
        print(f"interrupted by {outcome.signal.name}; saved step {outcome.step} in {_WORKDIR.value}")
        if command.LAUNCHER not in os.environ:  # Otherwise the launcher knows the command that continues.
            print(f"To continue:\n  {shlex.join(['python', '-m', 'launch.train', *sys.argv[1:]])}")
        return
    summary = outcome.summary
    print(
        f"averaged model after {summary['steps']} steps and {summary['time_s']:.0f} s: "
        f"{summary['eval_loss']:.4f} {metrics.UNIT} on validation text "
        f"(a bigram model's limit: {summary['corpus_order1_entropy']:.2f}); "
        f"single workers {summary['local_eval_loss_min']:.4f} to {summary['local_eval_loss_max']:.4f}; "
        f"{_size(summary['bytes_per_step_per_worker'])} sent per worker and step"
    )
    if outcome.sample is not None:
        print(f"--- text by the averaged model, after 32 bytes of validation text ---\n{outcome.sample}\n---")


def _size(num_bytes: float) -> str:
    """In kB what is little beside a MB: compressed messages often are."""
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.2f} kB"


if __name__ == "__main__":
    command.run(main, errors=(train.TrainingError, OSError))
