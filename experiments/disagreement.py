"""Calculation of how far workers drift apart with gossip: the variance of disagreement for graphs, orders and Adam's β1.

    python -m experiments.disagreement
    python -m experiments.disagreement --workers=16 --topologies=one_peer_exponential,alternating_exponential_ring

With small local batches Adam's updates are mostly noise. Let every worker's gradient be independent noise ξ of variance 1, without a
restoring force. Then parameters x, first moments m and, for AccumAdam, sums B follow a linear system:

    AdamW        m ← β1 m + (1 − β1) ξ          u = m                                  √v = 1
    AccumAdamW   m ← β1 m + (1 − β1) B each window of s   u = √s (β1 m + (1 − β1) ξ)   √v = 1/√s, since B is a mean of s gradients
    order awc    x ← W x − α u                  order atc    x ← W (x − α u)

The figure is Ξ² ÷ (α² P), the squared consensus distance of P parameters in units of the squared learning rate: the mean over workers of
the stationary variance of x − x̄, over a period. It is the distance between x, where gradients are taken, and x̄.
"""

import math

from absl import flags
import numpy as np

from decjax import topology as topologies
from experiments import script

FLAGS = flags.FLAGS
ORDERS = ("awc", "atc")
OPTIMIZERS = {
    "AdamW, β1 = 0.9": (0.9, 1),
    "AdamW, β1 = 0.95": (0.95, 1),
    "AdamW, β1 = 0.974": (0.974, 1),
    "AdamW, β1 = 0.985": (0.985, 1),
    "AccumAdamW, s = 4, β1 = 0.8": (0.8, 4),
    "AccumAdamW, s = 4, β1 = 0.9": (0.9, 4),
    "AccumAdamW, s = 4, β1 = 0.95": (0.95, 4),
}
SETTLED = 1e-4  # relative change between two periods


def step(W_NxN: np.ndarray, order: str, b1: float, window: int, commits: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (A, G) of the step z ← A z + G ξ, where z holds x, m and B of all workers; α = 1."""
    one, none, scale = np.eye(len(W_NxN)), np.zeros_like(W_NxN), math.sqrt(window)
    mixed = W_NxN if order == "atc" else one
    moved = [W_NxN, -mixed * scale * b1, none], -mixed * scale * (1 - b1)
    if commits:
        moment, total = ([none, b1 * one, (1 - b1) * one], (1 - b1) / window * one), ([none, none, none], none)
    else:
        moment, total = ([none, one, none], none), ([none, none, one], one / window)
    return np.block([row for row, _ in (moved, moment, total)]), np.vstack([noise for _, noise in (moved, moment, total)])


def variance(topology: topologies.Topology, order: str, b1: float, window: int = 1, most: int = 10_000) -> float:
    """Return the stationary Ξ² ÷ (α² P) of a topology, order and optimizer; `window` is AccumAdam's s, 1: AdamW."""
    N, period = topology.num_workers, math.lcm(topology.period, window)
    steps = [step(topology.matrix(t), order, b1, window, (t + 1) % window == 0) for t in range(period)]
    apart = np.eye(N) - 1 / N
    project = np.kron(np.eye(3), apart)
    P, found = np.zeros((3 * N, 3 * N)), 0.0
    for _ in range(most):
        before, total = found, 0.0
        for A, G in steps:
            P = project @ (A @ P @ A.T + G @ G.T) @ project.T
            total += np.trace(P[:N, :N]) / N
        found = total / period
        if abs(found - before) <= SETTLED * found:
            break
    return found


def tabulate(workers: int, names: list[str]) -> script.Table:
    """Return a row for each optimizer, a column for each graph and order."""
    graphs = {name: topologies.make(name, workers) for name in names}
    table = script.table("", *(f"{name}, {order}" for name in graphs for order in ORDERS))
    for name, (b1, window) in OPTIMIZERS.items():
        table.add_row(name, *(f"{variance(graph, order, b1, window):.3f}" for graph in graphs.values() for order in ORDERS))
    return table


def main() -> None:
    script.show(tabulate(FLAGS.workers, FLAGS.topologies))


if __name__ == "__main__":
    flags.DEFINE_integer("workers", 8, "Number of workers.", lower_bound=2)
    flags.DEFINE_list("topologies", ["one_peer_exponential", "exponential", "ring"], "Graphs.")
    script.run(main, (ValueError,))
