"""Noisy quadratics whose steps wait while a file is there, so that a test has the time for whatever it does to a run.

    python -m launch.train --config=tests/paced.py:workers=2,simulate=false --config.data.waits_for=FILE --workdir=…

Shorthand as in configs/quadratics.py. The numbers are those of a run that never waits.
"""

import pathlib
import time

import ml_collections

from configs import quadratics
from decjax import config as parts
from decjax import registry

KEYS = quadratics.KEYS


@registry.register("task", "paced", models=())
def paced(model=None, *, dimension: int = 16, waits_for: str = "", wait_s: float = 0.1):
    """The task "quadratics", of which each batch takes `wait_s` seconds while the file `waits_for` exists."""
    plain = registry.part("task", "quadratics").factory(dimension=dimension)

    def load(*given):
        data = plain.load(*given)

        def batch(worker, step):
            if waits_for and pathlib.Path(waits_for).exists():
                time.sleep(wait_s)
            return data.batch(worker, step)

        return data._replace(batch=batch)

    return plain._replace(load=load)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The config of the quadratics, with the task "paced"."""
    config = quadratics.get_config(arg)
    config.task, config.data = "paced", parts.section("task", "paced")
    return config
