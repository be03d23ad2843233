"""experiments/dssfn: ADMM matches least squares, gossip averages, and the workers learn what one worker with all examples would."""

import jax
import numpy as np
import pytest

from decjax import topology
from experiments import dssfn
from tests import commands


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def parts(M=4, F=6, E=20, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(M, F, E))
    return features, rng.normal(size=(M, dssfn.CLASSES, F)).mean(axis=0) @ features + 0.1 * rng.normal(size=(M, dssfn.CLASSES, E))


@pytest.mark.parametrize("mean", [dssfn.exact_mean, dssfn.gossip_mean(topology.make("ring", 4), 40)], ids=["exact", "ring"])
def test_admm_finds_the_least_squares_of_all_examples(mean):
    features, targets = parts()
    found = dssfn.solve(features, targets, mean, dssfn.Sizes(iterations=400, mu=0.1))
    every, wanted = np.concatenate(features, axis=1), np.concatenate(targets, axis=1)
    expected = np.linalg.lstsq(every.T, wanted.T, rcond=None)[0].T
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-5, atol=1e-7)


def test_solution_keeps_the_constraint():
    features, targets = parts()
    found = dssfn.solve(features, 1e3 * targets, dssfn.exact_mean, dssfn.Sizes(iterations=50))
    np.testing.assert_allclose(np.linalg.norm(found, axis=(1, 2)), 2 * dssfn.CLASSES)


def test_gossip_over_a_ring_comes_near_to_the_mean():
    x = np.random.default_rng(0).normal(size=(8, 3, 5))
    mixed = dssfn.gossip_mean(topology.make("ring", 8), 30)(x)
    weights = np.linalg.matrix_power(np.eye(8) / 3 + (np.roll(np.eye(8), 1, 0) + np.roll(np.eye(8), -1, 0)) / 3, 30)
    np.testing.assert_allclose(mixed, np.einsum("ij,jkl->ikl", weights, x), atol=1e-12)


def test_workers_learn_what_one_with_all_examples_learns():
    found = dssfn.compare(dssfn.Sizes(workers=8, layers=3, iterations=100), rounds=30, seed=0)
    one, exact, ring = (np.array(learned.accuracy) for learned in found.values())
    assert one[-1] > 0.98 and np.abs(exact - one).max() < 0.005
    assert np.abs(ring - exact).max() < 0.01


def test_command_prints_three_rows():
    done = commands.run("experiments.dssfn", "--layers=1", "--iterations=5", "--random=20", "--workers=4", "--rounds=3")
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines() if "." in line] == [
        "one worker, all examples",
        "exact average",
        "ring, 3 rounds",
    ]
