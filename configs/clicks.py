"""Clicks on generated examples, predicted by a small DLRM that 8 workers train with all-reduce.

    python -m launch.train --config=configs/clicks.py --workdir=runs/clicks

Shorthand as in configs/lm.py, without pipelines.
"""

import ml_collections

from configs import base, shorthand
from decjax import config as parts

KEYS = base.KEYS
# (learning rate, weight decay)
TUNED = dict(adamw=(1e-2, 0.0), sgdm=(0.5, 0.0))


def tuned(method: str, order: str, optimizer: str) -> dict[str, float]:
    """Learning rate and weight decay for an optimizer on this task."""
    learning_rate, weight_decay = TUNED.get(optimizer, (3e-3, 0.0))
    return dict(learning_rate=learning_rate, weight_decay=weight_decay)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The config of the clicks, changed by a shorthand such as "workers=4,optimizer=sgdm"."""
    given = shorthand.parse(arg, KEYS)
    smoke = given.get("smoke", False)
    defaults = dict(method="allreduce", topology="exponential")
    config = base.get_config(
        given, steps=20 if smoke else 1000, batch=32, clip_norm=0.0, tuned=tuned, warmup_steps=20, defaults=defaults
    )
    config.task = "clicks"
    sizes = dict(tables="50,20,10,5", features=4, validation=256) if smoke else {}
    config.data = parts.section("task", "clicks", **sizes)
    config.model = parts.section("model", "dlrm", **(dict(width=4, hidden=8) if smoke else {}))
    config.eval.update(every=10 if smoke else 250, num_windows=0, batch_size=256, local=False)
    config.checkpoint.every = 10 if smoke else 500
    return config
