"""The config of `experiments.endurance`: quadratics at 50 steps a second at most, so that runs outlast the events and leave cores free."""

import time

import ml_collections

from configs import quadratics
from decjax import config as parts
from decjax import registry
from decjax.tasks.task import Data, Task

PAUSE_S = 0.02  # per batch


@registry.register("task", "paced", models=(), evaluated_once=True)
def paced(model: None = None) -> Task:
    """The task quadratics, with a pause for each batch."""
    task = registry.make("task", "quadratics", dimension=16)

    def load(*args) -> Data:
        data = task.load(*args)

        def batch(worker, step):
            time.sleep(PAUSE_S)
            return data.batch(worker, step)

        return data._replace(batch=batch)

    return task._replace(load=load)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The config of the quadratics with the same shorthand."""
    config = quadratics.get_config(arg)
    config.task = "paced"
    config.data = parts.section("task", "paced")
    return config
