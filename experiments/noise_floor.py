"""The 1/N noise floor: with N workers the distance from the optimum at which noise holds the mean model falls as 1/N.

Quadratics with a known optimum (configs/quadratics.py), gossip over the one-peer exponential graph with a constant small rate, an
exchange in every step and in every fourth (p = 4, as in adaptive serverless learning). The floor is the squared distance of the
averaged model from the optimum, a mean over the second half of a run and over seeds.
"""

import pathlib
import statistics

import numpy as np

from experiments import script, trials
from experiments.trials import Trial

WORKERS = (4, 8, 16, 32, 64)
EVERY = {"an exchange every step": 1, "every 4 steps": 4}
OPTIMIZERS = {"SGD": ("sgdm(momentum=0.0)", 0.01), "AdamW": ("adamw(b2=0.999)", 2e-3)}
SEEDS = 3


def trial(out: pathlib.Path, optimizer: str, every: int, workers: int, seed: int, steps: int) -> Trial:
    """One training."""
    name, rate = OPTIMIZERS[optimizer]
    shorthand = f"workers={workers},topology=one_peer_exponential,every={every},steps={steps},optimizer={name}"
    fields = {
        "schedule.learning_rate": rate,
        "schedule.final_fraction": 1.0,
        "data.heterogeneity": 0.5,
        "data.noise": 4.0,
        "data.condition": 4.0,
        "seed": seed,
        "eval.every": max(1, steps // 200),
        "log_every": steps,
        "checkpoint.every": steps,
    }
    return Trial(
        out / "noise_floor" / trials.name_of(f"{optimizer} {every} {workers} {seed}"),
        f"configs/quadratics.py:{shorthand}",
        tuple(fields.items()),
    )


def floor(made: Trial) -> float:
    """The squared distance of the averaged model from the optimum, a mean over the second half of a run."""
    rows = made.rows("eval")
    return statistics.fmean(row["distance"] for row in rows[len(rows) // 2 :])


def exponent(floors: dict[int, float]) -> float:
    """The slope of ln floor against ln N, by least squares."""
    return float(np.polyfit(np.log(list(floors)), np.log(list(floors.values())), 1)[0])


def run(out: pathlib.Path, smoke: bool) -> dict[str, dict[int, float]]:
    """The floor by row and number of workers, a mean over seeds."""
    steps, seeds, counts = (20, 1, WORKERS[:2]) if smoke else (4000, SEEDS, WORKERS)
    optimizers = list(OPTIMIZERS)[: 1 if smoke else None]
    of = {
        (f"{optimizer}, {what}", workers): [trial(out, optimizer, every, workers, seed, steps) for seed in range(seeds)]
        for optimizer in optimizers
        for what, every in EVERY.items()
        for workers in counts
    }
    trials.train_all(each for made in of.values() for each in made)
    found: dict[str, dict[int, float]] = {}
    for (name, workers), made in of.items():
        found.setdefault(name, {})[workers] = statistics.fmean(map(floor, made))
    return found


def tabulate(found: dict[str, dict[int, float]]):
    """Floors and their exponents."""
    counts = next(iter(found.values()))
    table = script.table("", *(f"N = {workers}" for workers in counts), "exponent")
    for name, floors in found.items():
        table.add_row(name, *(f"{value:.2e}" for value in floors.values()), f"{exponent(floors):.3f}")
    return table


def draw(path: str, found: dict[str, dict[int, float]]) -> None:
    """Floor against workers, on logarithmic axes."""
    with script.panels(path, 1, (6.5, 4.0)) as (figure, (axis,)):
        for color, (name, floors) in zip(script.COLORS, found.items()):
            axis.loglog(list(floors), list(floors.values()), "o-", color=color, label=f"{name}: {exponent(floors):.2f}")
        axis.set(xlabel="workers N", ylabel="squared distance of the mean from the optimum")
        axis.set_xticks(list(floors), [str(workers) for workers in floors])
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=8, title="fitted exponent", title_fontsize=8)
        script.dress(figure, "Noise floor of gossip on the one-peer exponential graph")
