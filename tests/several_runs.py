"""Several runs, one after the other in the same processes: to start them takes longer than a tiny run.

    python -m launch.local --num_processes=2 --module=tests.several_runs -- --text=TEXT --into=FOLDER ARGUMENT ARGUMENT …
    python -m tests.several_runs --text=TEXT --into=FOLDER ARGUMENT ARGUMENT …

An argument is a shorthand of `configs/lm.py`, or "digits:SHORTHAND", which is compiled sooner; the i-th run is in FOLDER/i.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from absl import flags
import jax
import numpy as np

from configs import digits, lm
from decjax import config as parts
from decjax import train
from launch import command, join
from tests import garbage  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parent.parent
NUM_DEVICES, STEPS = 4, 5
TIMEOUT_S = 600
Rows = list[dict[str, Any]]


def take(arguments: list[str], text: str, into: pathlib.Path) -> None:
    """Train all of them for a few steps."""
    for index, argument in enumerate(arguments):
        file, _, shorthand = argument.rpartition(":")
        config = (digits if file else lm).get_config(f"smoke,steps={STEPS},{shorthand}")
        fields = {"log_every": 1, "eval.every": 100, "checkpoint.every": 100, "schedule.warmup_steps": 0}
        if file:
            fields |= {"schedule.learning_rate": 1e-3}  # rounding errors grow at larger rates
        else:
            fields |= {
                "data.path": text,
                "data.sample_bytes": 1,
                "model.width": 8,
                "model.hidden": 8,
                "model.context": 8,
                "model.heads": config.tensor,
                "model.depth": config.pipeline.stages,
                "eval.num_windows": 2,
            }
        config.update_from_flattened_dict(fields)
        train.Run(train.Trainer(parts.resolve(config, jax.device_count())), into / str(index)).train()


def rows(arguments: list[str], folder: pathlib.Path, num_processes: int) -> dict[str, tuple[Rows, Rows]]:
    """Return the metrics of each run, by its argument: of four devices in so many processes, and of four devices in this process."""
    text = folder / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 101, 4000, dtype=np.uint8).tobytes())
    start = [sys.executable, "-m", "launch.local", f"--num_processes={num_processes}", "--module=tests.several_runs", "--"]
    # The cache would be empty: all compile at once.
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [*start, f"--text={text}", f"--into={folder / 'together'}", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    take(arguments, str(text), folder / "alone")
    read = lambda path: [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    of = lambda index: (read(folder / "together" / str(index)), read(folder / "alone" / str(index)))
    return {argument: of(index) for index, argument in enumerate(arguments)}


def assert_same(together: Rows, alone: Rows, distance_rtol: float = 1e-4) -> None:
    """Return losses, bytes and everything else that does not depend on the clock; check that the run has learned something."""
    assert len(together) == STEPS + 1  # including the evaluation
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"time_s", "tokens_per_s", "images_per_s", "kind"}:
            rtol = distance_rtol if key == "consensus_distance" else 1e-4
            np.testing.assert_allclose(ours[key], theirs[key], rtol=rtol, atol=1e-6, err_msg=key)
    assert together[-1]["loss"] < together[0]["loss"]


def main(argv: list[str]) -> int:
    with join.leaving_at_once((train.TrainingError,), "run the test again"):
        join.set_up_devices(NUM_DEVICES)
        take(argv, flags.FLAGS.text, pathlib.Path(flags.FLAGS.into))
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("text", None, "The corpus.", required=True)
    flags.DEFINE_string("into", None, "Where the runs go.", required=True)
    command.run(main)
