"""CIFAR-10, classified by a ResNet-20 that is trained with gossip.

    python -m launch.train --config=configs/cifar.py --config.data.path=FOLDER --workdir=runs/cifar
    python -m launch.train --config=configs/cifar.py:workers=8,topology=ring --config.data.path=FOLDER --workdir=runs/ring

FOLDER holds the binary version, data_batch_*.bin and test_batch.bin (https://www.cs.toronto.edu/~kriz/cifar.html).

With method=allreduce,workers=16,simulate,steps=600 on 10,000 of the training images, the averaged model classifies 56 % of 2,000 test
images rightly, and with workers=16,local_size=4,topology=alternating_exponential_ring,simulate,steps=600 47 %. Either takes 11 minutes
on one CPU core.

Shorthand as in configs/digits.py.
"""

import ml_collections

from configs import base, digits, lm, shorthand
from decjax import config as parts

KEYS = digits.KEYS
# (learning rate, weight decay): Adam's rates are those of `experiments.paper --only=cifar`, tuned with 16 workers, 200 steps and
# AccumAdamW's windows of 8; the rate of SGD is a guess.
TUNED = dict(adamw=(6.4e-2, 1e-4), accum_adamw=(1.6e-2, 1e-4), sgdm=(0.3, 1e-4))
TUNED_ALLREDUCE = TUNED | dict(adamw=(3.2e-2, 1e-4))


def tuned(method: str, order: str, optimizer: str) -> dict[str, float]:
    """Learning rate and weight decay."""
    table = TUNED_ALLREDUCE if method in lm.AVERAGED else TUNED
    return base.by_optimizer(table, others=(3e-3, 1e-4))(method, order, optimizer)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The config of CIFAR-10, changed by a shorthand such as "workers=8,norm=group"."""
    given = shorthand.parse(arg, KEYS)
    smoke = given.get("smoke", False)
    config = base.get_config(given, steps=10 if smoke else 1000, batch=8, clip_norm=0.0, tuned=tuned, warmup_steps=50)
    config.task = "images"
    config.data = parts.section("task", "images", dataset="cifar10", augment=True)
    config.model = digits.model(given, "resnet", **({} if smoke else dict(depth=20, width=16)))
    config.eval.update(every=5 if smoke else 100, num_windows=64 if smoke else 0, batch_size=64)
    config.checkpoint.every = 5 if smoke else 100
    return config
