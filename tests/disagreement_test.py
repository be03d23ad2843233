"""experiments.disagreement: its calculation against closed forms and a simulation."""

import numpy as np
import pytest

from decjax import topology
from experiments import disagreement


@pytest.mark.parametrize("order, expected", [("awc", 11 / 8), ("atc", 4 / 8)])
def test_plain_noise_on_the_one_peer_graph(order, expected):
    """With β1 = 0 an update's disagreement is 7/8; each round halves the number of directions in which workers differ: 7, 3 and 1
    of 8.
    """
    assert disagreement.variance(topology.make("one_peer_exponential", 8), order, 0.0) == pytest.approx(expected, rel=1e-3)


def test_the_complete_graph_leaves_the_newest_update_only():
    graph = topology.make("complete", 4)
    assert disagreement.variance(graph, "atc", 0.9) == pytest.approx(0, abs=1e-9)
    assert disagreement.variance(graph, "awc", 0.9) == pytest.approx(3 / 4 * 0.1 / 1.9, rel=1e-3)


@pytest.mark.parametrize("window", [1, 3])
def test_it_is_what_workers_do(window):
    """20,000 steps on a ring of four workers, each with its own noise."""
    graph, b1, rng, steps = topology.make("ring", 4), 0.8, np.random.default_rng(0), 20_000
    x, m, total, found = np.zeros((64, 4)), np.zeros((64, 4)), np.zeros((64, 4)), []
    for t in range(steps):
        noise = rng.normal(size=(64, 4))
        now = b1 * m + (1 - b1) * noise
        x = x @ graph.matrix(t).T - now * window**0.5
        total = total + noise / window
        if (t + 1) % window == 0:
            m, total = b1 * m + (1 - b1) * total, np.zeros((64, 4))
        if t > 200:
            found.append(((x - x.mean(axis=1, keepdims=True)) ** 2).mean())
    assert disagreement.variance(graph, "awc", b1, window) == pytest.approx(np.mean(found), rel=0.02)
