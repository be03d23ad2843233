"""CIFAR-10, classified by a ResNet-20 that is trained with gossip.

    python -m launch.train --config=configs/cifar.py:method=allreduce,workers=16,simulate,steps=600 \\
        --config.data.path=FOLDER --workdir=runs/allreduce
    python -m launch.train \\
        --config=configs/cifar.py:workers=16,local_size=4,topology=alternating_exponential_ring,simulate,steps=600 \\
        --config.data.path=FOLDER --workdir=runs/gossip

FOLDER holds the binary version, data_batch_*.bin and test_batch.bin (https://www.cs.toronto.edu/~kriz/cifar.html).

On a fifth of the data set (10,000 training and 2,000 test images) the averaged model reaches 56 % accuracy with the first command and
47 % with the second, each in 11 minutes on one CPU core. The full data set was not measured.

Shorthand as in configs/digits.py.
"""

import ml_collections

from configs import base, digits, lm, shorthand

# (learning rate, weight decay): Adam's rates are those of `experiments.paper --only=cifar`, tuned with 16 workers and 200 steps, and
# AccumAdamW's with windows of 8, not with the default; the rate of SGD is a guess.
TUNED = dict(adamw=(6.4e-2, 1e-4), accum_adamw=(1.6e-2, 1e-4), sgdm=(0.3, 1e-4))
TUNED_ALLREDUCE = TUNED | dict(adamw=(3.2e-2, 1e-4))


def tuned(method: str, order: str, optimizer: str) -> dict[str, float]:
    """Return the learning rate and weight decay."""
    table = TUNED_ALLREDUCE if method in lm.AVERAGED else TUNED
    return base.by_optimizer(table, others=(3e-3, 1e-4))(method, order, optimizer)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Return the config of CIFAR-10, changed by a shorthand such as "workers=8,norm=group"."""
    given = shorthand.parse(arg, digits.OWN)
    smoke = given.get("smoke", False)
    config = base.get_config(
        given,
        task="images",
        data=dict(dataset="cifar10", augment=True),
        model=digits.model(given, "resnet", **({} if smoke else dict(depth=20, width=16))),
        own=tuple(digits.OWN),
        steps=10 if smoke else 1000,
        batch=8,
        clip_norm=0.0,
        tuned=tuned,
        tuned_workers=16,
        warmup_steps=50,
    )
    config.eval.update(every=5 if smoke else 100, num_windows=64 if smoke else 0, batch_size=64)
    config.checkpoint.every = 5 if smoke else 100
    return config
