"""The largest learning rate with which training settles: what it costs to exchange parameters while the gradient is computed.

Every worker has the gradient h x at its parameters x, one coordinate of a quadratic, without noise. With a stationary second moment of
Adam (h is then the curvature ÷ √V), a period of steps is a linear map of all workers' parameters and moments. It is stable if the
moduli of its eigenvalues are below one, which limits α h, the learning rate times the curvature. Closed forms, β = β1:

                                           Adam                   AccumAdam, s ≥ 2
    all-reduce                             2 (1 + β) / (1 − β)    2 / (1 − β)
    order "atc", complete graph            2 (1 + β) / (1 − β)    2 / (1 − β)
    order "awc", complete graph            (1 + β) / (1 − β)      1 / (1 − β)
    all-reduce, one step stale             1

In order "awc" a worker's newest step is not averaged yet. If it overshoots, that worker alone must correct it, which halves the largest
rate. `experiments.paper --only=stability` makes the table and the figure.
"""

from collections.abc import Sequence
import functools
import math
from typing import NamedTuple

import numpy as np

from decjax import topology
from experiments import script

WORKERS = 8
LOWEST, HIGHEST, POINTS = 1e-2, 1e3, 100  # α h among which a limit is searched
DECAYS = tuple(np.linspace(0.0, 0.975, 118))  # of the figure


class Optimizer(NamedTuple):
    """Adam, or AccumAdam if its window is longer than a step."""

    decay: float  # β1
    window: int = 1  # s

    @property
    def name(self) -> str:
        return f"{'Adam' if self.window == 1 else 'AccumAdam'}, β1 = {self.decay:g}" + f", s = {self.window}" * (self.window > 1)


class Scheme(NamedTuple):
    """A communication scheme."""

    order: str  # "mean": of gradients, "stale": the same one step late; "awc" or "atc": of parameters
    graph: str = "complete"


SCHEMES = {
    "all-reduce": Scheme("mean"),
    "one step stale": Scheme("stale"),
    "atc, complete": Scheme("atc"),
    "atc, one-peer": Scheme("atc", "one_peer_exponential"),
    "awc, complete": Scheme("awc"),
    "awc, one-peer": Scheme("awc", "one_peer_exponential"),
}
OPTIMIZERS = [Optimizer(beta, s) for beta, s in ((0.8, 1), (0.9, 1), (0.974, 1), (0.9, 2), (0.8, 4), (0.9, 4), (0.9, 8))]


def growth(rate: float, optimizer: Optimizer, order: str, matrices: Sequence[np.ndarray]) -> float:
    """Return the largest modulus of an eigenvalue of a period's map, per step; `rate` is α h, `matrices` are W of each phase."""
    beta, s, n = optimizer.decay, optimizer.window, len(matrices[0])
    period, J = math.lcm(len(matrices), s), np.full((n, n), 1 / n)
    x, M, B, before = np.split(np.eye(4 * n), 4)  # parameters, moment, mean of the window, the step before's gradient
    for t in range(period):
        W = matrices[t % len(matrices)]
        g = {"mean": J @ x, "stale": before}.get(order, x)
        before = J @ x
        u = -rate * (beta * M + (1 - beta) * g)
        B = B + g / s
        if (t + 1) % s == 0:
            M, B = beta * M + (1 - beta) * B, 0 * B
        x = {"awc": W @ x + u, "atc": W @ (x + u)}.get(order, x + u)
    return max(abs(np.linalg.eigvals(np.concatenate([x, M, B, before])))) ** (1 / period)


@functools.cache
def limit(optimizer: Optimizer, scheme: Scheme) -> float:
    """Return the largest α h up to which all smaller ones are stable."""
    made = topology.make(scheme.graph, WORKERS)
    matrices = [made.matrix(phase) for phase in range(made.period)]
    is_stable = lambda rate: growth(rate, optimizer, scheme.order, matrices) <= 1 + 1e-9
    least = LOWEST
    for most in np.geomspace(LOWEST, HIGHEST, POINTS):
        if not is_stable(most):
            break
        least = most
    else:
        return math.inf
    while most - least > 1e-6 * most:
        middle = (least + most) / 2
        least, most = (middle, most) if is_stable(middle) else (least, middle)
    return float(least)


def run(smoke: bool) -> dict[str, dict[str, float]]:
    """Return the limits of each optimizer, by scheme."""
    return {
        made.name: {name: limit(made, scheme) for name, scheme in SCHEMES.items()} for made in OPTIMIZERS[: 1 if smoke else None]
    }


def tabulate(found: dict[str, dict[str, float]]) -> script.Table:
    """Return a row for each optimizer."""
    table = script.table("largest α h", *SCHEMES)
    for name, limits in found.items():
        table.add_row(name, *(f"{limits[scheme]:.2f}" for scheme in SCHEMES))
    return table


def draw(path: str, smoke: bool) -> None:
    """Draw the limits against β1, for Adam and for AccumAdam."""
    caption = f"The largest learning rate α for a curvature h, {WORKERS} workers"
    with script.panels(path, 2, (10.0, 4.0), caption) as axes:
        for axis, window in zip(axes, (1, 4)):
            for color, (name, scheme) in zip(("0.8", *script.COLORS), SCHEMES.items()):
                decays = DECAYS[:: 60 if smoke else 1]
                limits = [limit(Optimizer(float(decay), window), scheme) for decay in decays]
                style = "--" if scheme.graph == "complete" else "-"
                axis.semilogy(decays, limits, style, color=color, linewidth=6 if scheme.order == "mean" else 1.6, label=name)
            axis.set(xlabel="β1", title="Adam" if window == 1 else f"AccumAdam, s = {window}")
        axes[0].set(ylabel="largest α h")
        axes[0].legend(frameon=False, fontsize=8)
