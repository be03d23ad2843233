"""Noisy quadratics, a different one on each of 16 simulated workers: how close does their mean get to the optimum of the sum?

    python -m launch.train --config=configs/quadratics.py --workdir=runs/quadratics
    python -m launch.train --config=configs/quadratics.py:method=tracking,topology=ring --workdir=runs/tracking

Shorthand as in configs/lm.py, without pipelines. A run takes seconds; its summary has f(x) − f(x*) and the squared distance from
the optimum, of the mean of all workers and of each of them.
"""

import ml_collections

from configs import base, shorthand

# (learning rate, weight decay): the same for all methods, so that these are compared at equal learning rates.
RATES = dict(sgdm=(0.02, 0.0))


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Return the config of the quadratics, changed by a shorthand such as "workers=8,method=tracking"."""
    given = dict(workers=16, simulate=True) | shorthand.parse(arg)
    smoke = given.get("smoke", False)
    defaults = dict(topology="ring", optimizer="sgdm(momentum=0.0)")
    config = base.get_config(
        given,
        task="quadratics",
        data=dict(dimension=4 if smoke else 16),
        steps=20 if smoke else 500,
        batch=1,
        clip_norm=0.0,
        tuned=base.by_optimizer(RATES, others=(1e-2, 0.0)),
        defaults=defaults,
    )
    config.eval.update(every=10 if smoke else 100, num_windows=0, batch_size=1)
    return config
