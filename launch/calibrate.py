"""Measures the devices at hand and writes a cluster profile for launch.plan.

    python -m launch.calibrate --config=configs/lm.py --out=here.json
    python -m launch.cluster run --hosts=4 --rate=200mbit --module=launch.calibrate -- --config=configs/lm.py --out=box.json
    python -m launch.plan --cluster=here.json
"""

import pathlib

from absl import flags
import jax
from ml_collections import config_flags
import numpy as np
from rich import box, console, table

from decjax import runtime
from decjax import train
from decjax.train import measure
from launch import command
from launch import join

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with an optional shorthand after a colon: configs/lm.py:workers=4. Its method does not matter.")
_OUT = flags.DEFINE_string("out", None, "The profile to write, a JSON file.")
_NAME = flags.DEFINE_string("name", None, "What the profile calls the cluster; none: number and kind of devices.")
_SIZES = flags.DEFINE_list("sizes", [], "Bytes of messages, as 1e5,1e6,1e7; none: up to the model's.")
_SECONDS = flags.DEFINE_float("seconds", 60.0, "About how long to measure.", lower_bound=0.0)
_ROUNDS = flags.DEFINE_integer("rounds", None, "Rounds; none: as many as fit.", lower_bound=1)
flags.mark_flags_as_required(["config", "out"])


def main(argv):
    with join.leaving_at_once((train.TrainingError, ValueError), "run the same command again"):
        config = _CONFIG.value
        join.set_up_devices(config.workers)
        setup = measure.prepare(config)
        measured = measure.measure(setup, name=_NAME.value or "here", sizes=[int(float(s)) for s in _SIZES.value],
                                   seconds=_SECONDS.value, rounds=_ROUNDS.value)
    if jax.process_index() == 0:
        runtime.save(_OUT.value, measured.cluster, measured.workload)
        for key, times in measured.times_s.items():
            slow = times.max(axis=0) if isinstance(key, measure.Exchange) else times
            q = np.quantile(slow, [0.05, 0.25, 0.5, 0.75, 0.95]) * 1e3
            print(key, slow.shape, q.round(2))
        print(measured.cluster)
        print(measured.rounds)
    return 0


if __name__ == "__main__":
    command.run(main, errors=(train.TrainingError, ValueError, OSError))
