"""The 1/N noise floor: with N workers the distance from the optimum at which noise holds the mean model falls as 1/N.

Quadratics with a known optimum (configs/quadratics.py), gossip over the one-peer exponential graph with a constant small rate, an
exchange in every step and in every fourth (p = 4, as in adaptive serverless learning). The floor is the squared distance of the
averaged model from the optimum, a mean over the second half of a run, for each seed.
"""

from collections.abc import Mapping
import itertools
import math
import pathlib
import statistics

import numpy as np

from experiments import script, seeds, trials
from experiments.results_log import ResultsLog
from experiments.trials import Trial

WORKERS = (4, 8, 16, 32, 64)
EVERY = {"an exchange every step": 1, "every 4 steps": 4}
# The noise of a coordinate has a standard deviation of 1, so that equal rates make steps of about equal size.
OPTIMIZERS = {"SGD": ("sgdm(momentum=0.0)", 0.01), "AdamW": ("adamw(b2=0.999)", 0.01)}
SEEDS = 3


def trial(out: pathlib.Path, optimizer: str, every: int, workers: int, seed: int, steps: int) -> Trial:
    """Return a run."""
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
    return trials.trial(out / "noise_floor", f"{optimizer} {every} {workers} {seed}", f"configs/quadratics.py:{shorthand}", fields)


def floor(made: Trial) -> dict[str, float]:
    """Return the noise floor of a run."""
    rows = made.rows("eval")
    return {"floor": statistics.fmean(row["distance"] for row in rows[len(rows) // 2 :])}


def exponent(floors: Mapping[int, float]) -> float:
    """Return the slope of ln floor against ln N, by least squares; nan if a run diverged."""
    if any(map(math.isnan, floors.values())):
        return math.nan
    return float(np.polyfit(np.log(list(floors)), np.log(list(floors.values())), 1)[0])


Floors = dict[int, list[float]]  # number of workers -> the floor with each seed


def exponents(floors: Floors) -> seeds.Spread:
    """Return the spread of the seeds' exponents."""
    return seeds.spread([exponent(dict(zip(floors, of_seed))) for of_seed in zip(*floors.values(), strict=True)])


def run(out: pathlib.Path, log: ResultsLog, smoke: bool) -> dict[str, Floors]:
    """Return the floors of every row; nan for a run that diverged."""
    steps, num_seeds, counts = (20, 1, WORKERS[:2]) if smoke else (4000, SEEDS, WORKERS)
    optimizers = list(OPTIMIZERS)[: 1 if smoke else None]
    keys = list(itertools.product(optimizers, EVERY, counts, range(num_seeds)))
    measured = log.pool.map(lambda key: log.result(trial(out, key[0], EVERY[key[1]], key[2], key[3], steps), floor), keys)
    found: dict[str, Floors] = {}
    for (optimizer, what, workers, _), numbers in zip(keys, measured, strict=True):
        row = found.setdefault(f"{optimizer}, {what}", {})
        row.setdefault(workers, []).append(numbers["floor"] if numbers else math.nan)
    return found


def tabulate(found: Mapping[str, Floors]) -> script.Table:
    """Return floors, as mean ± 2σ over the seeds, and their exponents."""
    counts = next(iter(found.values()))
    table = script.table("", *(f"N = {workers}" for workers in counts), "exponent")
    for name, floors in found.items():
        spreads = map(seeds.spread, floors.values())
        cells = [f"{each.mean:.2e}" + (f" ± {2 * each.sigma:.0e}" if each.size > 1 else "") for each in spreads]
        table.add_row(name, *cells, exponents(floors).text(3))
    return table


def draw(path: str, found: Mapping[str, Floors]) -> None:
    """Draw floor against workers, on logarithmic axes, with ± 2σ of one seed, and a line of slope −1."""
    with script.panels(path, 1, (6.5, 4.0), "Noise floor of gossip on the one-peer exponential graph") as (axis,):
        counts = list(next(iter(found.values())))
        spreads = {name: [seeds.spread(values) for values in floors.values()] for name, floors in found.items()}
        middle = statistics.geometric_mean(each.mean * N for own in spreads.values() for N, each in zip(counts, own))
        axis.loglog(counts, [middle / N for N in counts], color="0.6", label="1/N")
        for k, (color, (name, own)) in enumerate(zip(script.COLORS, spreads.items())):
            beside = [N * 1.05 ** (k - (len(found) - 1) / 2) for N in counts]
            label = f"{name}: {exponents(found[name]).text(2)}"
            errors = [2 * each.sigma if each.size > 1 else 0.0 for each in own]
            axis.errorbar(beside, [each.mean for each in own], errors, fmt="o", color=color, markersize=4, linewidth=1, label=label)
        axis.set(xlabel="workers N", ylabel="squared distance of the mean from the optimum")
        axis.set_xticks(counts, [str(workers) for workers in counts])
        axis.set_yticks(ticks := [3e-3, 1e-2, 3e-2], [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=8, title="fitted exponent", title_fontsize=8)
