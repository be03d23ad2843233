"""Node classification on a graph of four communities by 8 workers, each on a part of the graph (RandomTMA, SuperTMA).

    python -m launch.train --config=configs/nodes.py --workdir=runs/nodes
    python -m launch.train --config=configs/nodes.py:partition=super --workdir=runs/super
    python -m launch.train --config=configs/nodes.py:graph=karate,workers=2 --workdir=runs/karate
    python -m launch.train --config="configs/nodes.py:partition=min_cut,method=tma(pace='10,7,5')" --workdir=runs/min_cut

Shorthand as in configs/lm.py, without pipelines, and graph, partition: see `launch.parts task nodes`. A run takes less than a minute on
two CPU cores, mostly compilation. The averaged model's accuracy on the 100 held-out nodes is 0.93 to 1.00 with random parts, and 0.96
to 0.98 with partition=super (three seeds each).
"""

import ml_collections

from configs import base, shorthand
from decjax import config as parts

GUESSED = dict(sgdm=(0.1, 5e-4))  # (learning rate, weight decay)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Return the config of the nodes, changed by a shorthand such as "workers=4,partition=min_cut"."""
    given = shorthand.parse(arg)
    smoke = given.get("smoke", False)
    steps = 20 if smoke else 300
    config = base.get_config(
        given,
        task="nodes",
        model=parts.section("model", "gcn"),
        steps=steps,
        batch=1,
        clip_norm=0.0,
        tuned=base.by_optimizer(GUESSED, others=(1e-2, 5e-4)),
        defaults=dict(method="tma"),
    )
    config.schedule.final_fraction = 1.0  # A constant rate: slow workers count fewer steps of a schedule.
    config.eval.update(every=10 if smoke else 100, num_windows=0, batch_size=1)
    config.checkpoint.every = 10 if smoke else 100
    return config
