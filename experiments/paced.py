"""Quadratics with slow steps, for runs that must outlast faults and leave cores idle.

    python -m launch.train --config=experiments/paced.py:workers=2,simulate=false --config.data.wait_s=0.02 --workdir=runs/paced

Shorthand as in configs/quadratics.py. Results equal those of a run without pauses.
"""

import pathlib
import time

import ml_collections

from configs import quadratics
from decjax import config as parts
from decjax.contrib.quadratics import Examples, Quadratics
from decjax.options import Count, NonNegative
from decjax.tasks.task import Data


class Paced(Quadratics, name="paced"):
    """The task quadratics, with a pause for each batch.

    Attributes:
        wait_s: seconds of the pause.
        waits_for: path of a file; there are pauses only while it exists. Empty: always.
    """

    dimension: Count = 16
    wait_s: NonNegative = 0.0
    waits_for: str = ""

    def load(self, num_workers: int, batch_size: int, seed: int) -> Data:
        data = super().load(num_workers, batch_size, seed)

        def batch(worker: int, step: int) -> Examples:
            if not self.waits_for or pathlib.Path(self.waits_for).exists():
                time.sleep(self.wait_s)
            return data.batch(worker, step)

        return data._replace(batch=batch)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Return the config of the quadratics with the task "paced"."""
    config = quadratics.get_config(arg)
    config.task, config.data = "paced", parts.section("task", "paced")
    return config
