"""What `experiments.related` measures of divided embedding tables, whose lookups and gradients are sent within bounds."""

import pathlib
import statistics
import tempfile

import jax
import numpy as np

from configs import clicks
from decjax import config, train
from experiments import trials

BOUNDED = "bound=0.02,gradient_bound=0.01,start=4"  # Falls to these within half of the steps.
SEEDS = 3


def worst(smoke: bool) -> float:
    """The largest |v − v̂| ÷ bound of any vector or gradient that any worker sends in any step, while the bounds shrink."""
    steps = 20 if smoke else 200
    spec = config.resolve(clicks.get_config(f"simulate,workers=8,{BOUNDED},steps={steps},within={steps // 2}"))
    trainer = train.Trainer(spec)
    state, found = trainer.init(), 0.0
    for step in range(steps):
        state, _ = trainer.step(state, trainer.batch(step), step)
        found = max(found, float(np.max(jax.device_get(state.source.worst_2xP))))
    return found


def losses(shorthand: str, steps: int) -> list[float]:
    """Log-loss on held-out examples after training, by seed."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="decjax-related-"))
    usual = {"eval.every": steps, "eval.local": False, "log_every": steps, "checkpoint.every": 10**6}
    made = [
        trials.trial(folder, str(seed), f"configs/clicks.py:workers=8,{shorthand},steps={steps}", usual | {"seed": seed})
        for seed in range(SEEDS)
    ]
    if not all(trials.Pool().make(made)):
        raise ValueError(f"a run in {folder} diverged")
    return [each.summary()["eval_loss"] for each in made]


def beyond_noise(smoke: bool) -> float:
    """How far the mean log-loss with bounds is from that without, either way, in standard deviations of the seeds' losses without."""
    steps = 40 if smoke else 600
    bounded, plain = losses(f"{BOUNDED},within={steps // 2}", steps), losses("divided", steps)
    return abs(statistics.mean(bounded) - statistics.mean(plain)) / statistics.stdev(plain)
