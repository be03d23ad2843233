"""Several runs, one after the other in the same processes: to start them takes longer than a tiny run.

    python -m launch.local --num_processes=4 --module=tests.several_runs -- --text=TEXT --into=FOLDER ARGUMENT ARGUMENT …

An argument is the shorthand of `configs/lm.py`; the i-th run is in FOLDER/i.
"""

import pathlib

from absl import flags

from configs import lm
from decjax import train
from launch import command, join

NUM_DEVICES = 4


def take(arguments: list[str], text: str, into: pathlib.Path) -> None:
    """Trains all of them for a few steps."""
    for index, argument in enumerate(arguments):
        config = lm.get_config(f"smoke,steps=5,{argument}")
        config.update_from_flattened_dict(
            {
                "data.path": text,
                "model.width": 8,
                "model.hidden": 8,
                "model.context": 8,
                "model.heads": 1,
                "model.depth": config.pipeline.stages,
                "log_every": 1,
                "eval.num_windows": 2,
                "eval.every": 100,
                "checkpoint.every": 100,
                "data.sample_bytes": 1,
                "schedule.warmup_steps": 0,
            }
        )
        train.Run(train.Trainer(join.resolved(config)), into / str(index)).train()


def main(argv: list[str]) -> int:
    with join.leaving_at_once((train.TrainingError,), "run the test again"):
        join.set_up_devices(NUM_DEVICES)
        take(argv, flags.FLAGS.text, pathlib.Path(flags.FLAGS.into))
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("text", None, "The corpus.", required=True)
    flags.DEFINE_string("into", None, "Where the runs go.", required=True)
    command.run(main)
