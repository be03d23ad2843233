"""Quadratics with slow steps, for runs that must outlast what happens to them and leave cores free.

    python -m launch.train --config=experiments/paced.py:workers=2,simulate=false --config.data.wait_s=0.02 --workdir=runs/paced

Shorthand as in configs/quadratics.py. The numbers are those of a run that does not wait.
"""

import pathlib
import time

import ml_collections

from configs import quadratics
from decjax import config as parts
from decjax import registry
from decjax.tasks.task import Data, Task


@registry.register("task", "paced", models=(), evaluated_once=True)
def paced(model: None = None, *, wait_s: float = 0.0, waits_for: str = "") -> Task:
    """The task quadratics, with a pause for each batch.

    Args:
        model: None.
        wait_s: seconds of the pause.
        waits_for: path of a file; without it there is no pause. Empty: there always is.
    """
    task = registry.make("task", "quadratics", dimension=16)

    def load(*args) -> Data:
        data = task.load(*args)

        def batch(worker, step):
            if not waits_for or pathlib.Path(waits_for).exists():
                time.sleep(wait_s)
            return data.batch(worker, step)

        return data._replace(batch=batch)

    return task._replace(load=load)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The config of the quadratics, with the task "paced"."""
    config = quadratics.get_config(arg)
    config.task, config.data = "paced", parts.section("task", "paced")
    return config
