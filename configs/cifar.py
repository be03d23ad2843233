"""CIFAR-10, classified by a ResNet-20 that is trained with gossip.

    python -m launch.train --config=configs/cifar.py --config.data.path=FOLDER --workdir=runs/cifar
    python -m launch.train --config=configs/cifar.py:workers=8,topology=ring --config.data.path=FOLDER --workdir=runs/ring

FOLDER holds the binary version, data_batch_*.bin and test_batch.bin (https://www.cs.toronto.edu/~kriz/cifar.html).

With workers=16,simulate,steps=600 on 10,000 of the training images, the averaged model classifies 41 % of 2,000 test images rightly. That
takes 35 minutes on one CPU core that other programs use, too. The rates are guesses, so more may be possible.

Shorthand as in configs/digits.py.
"""

import ml_collections

from configs import base, digits, shorthand
from decjax import config as parts

KEYS = digits.KEYS
# (learning rate, weight decay): guesses, from those of the digits.
GUESSED = dict(adamw=(1e-2, 1e-4), accum_adamw=(1e-2, 1e-4), sgdm=(0.3, 1e-4))


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The config of CIFAR-10, changed by a shorthand such as "workers=8,norm=group"."""
    given = shorthand.parse(arg, KEYS)
    smoke = given.get("smoke", False)
    config = base.get_config(
        given,
        steps=10 if smoke else 1000,
        batch=8,
        clip_norm=0.0,
        tuned=base.by_optimizer(GUESSED, others=(3e-3, 1e-4)),
        warmup_steps=50,
    )
    config.task = "images"
    config.data = parts.section("task", "images", dataset="cifar10", augment=True)
    config.model = digits.model(given, "resnet", **({} if smoke else dict(depth=20, width=16)))
    config.eval.update(every=5 if smoke else 100, num_windows=64 if smoke else 0, batch_size=64)
    config.checkpoint.every = 5 if smoke else 100
    return config
