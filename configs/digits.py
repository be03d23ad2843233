"""Handwritten digits (scikit-learn's 1,797 images of 8 × 8), classified by a small ResNet that 8 workers train with gossip.

    python -m launch.train --config=configs/digits.py --workdir=runs/digits
    python -m launch.train --config=configs/digits.py --workdir=runs/skewed --config.data.partition='dirichlet(alpha=0.1)'
    python -m launch.train --config=configs/digits.py:norm=group,topology=ring --workdir=runs/group

Shorthand as in configs/lm.py, without pipelines, and model=resnet|mlp, norm=batch|group. Batch statistics stay with their worker, and
are averaged for evaluation. Two CPU cores take less than a minute, most of it to compile; expect an accuracy of 0.97 to 0.98 of
the averaged model on the 359 images held out.
"""

import ml_collections

from configs import base, shorthand
from decjax import config as parts

KEYS = base.KEYS | dict(model=("resnet", "mlp"), norm=("batch", "group"))
# (learning rate, weight decay): Adam's and SGD's were tried, others are guesses.
TUNED = dict(adamw=(2e-2, 1e-4), accum_adamw=(1e-2, 1e-4), sgdm=(0.3, 1e-4), sign=(1e-3, 1e-4))


def tuned(method: str, order: str, optimizer: str) -> dict[str, float]:
    """Learning rate and weight decay."""
    learning_rate, weight_decay = TUNED.get(optimizer, (3e-3, 1e-4))
    return dict(learning_rate=learning_rate, weight_decay=weight_decay)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The config; `arg` is the shorthand."""
    given = shorthand.parse(arg, KEYS)
    smoke = given.get("smoke", False)
    # A static graph: a program for each phase would be compiled, and compiling takes longer than training.
    config = base.get_config(
        given,
        steps=20 if smoke else 150,
        batch=16,
        clip_norm=0.0,
        tuned=tuned,
        warmup_steps=15,
        defaults=dict(topology="exponential"),
    )
    config.task = "images"
    config.data = parts.section("task", "images")
    name = given.get("model", "mlp" if smoke else "resnet")
    if name != "resnet" and "norm" in given:
        raise ValueError(
            f"config argument norm={given['norm']} changes nothing with model={name}; leave it out, or use model=resnet"
        )
    config.model = parts.section("model", name, **({"norm": given["norm"]} if "norm" in given else {}))
    config.eval.update(every=10 if smoke else 50, num_windows=0, batch_size=16)
    config.checkpoint.every = 10 if smoke else 50
    return config
