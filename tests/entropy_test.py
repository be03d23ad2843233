"""decjax.contrib.codecs.entropy: the estimate equals the entropy of a matching Gaussian, and exceeds it otherwise."""

import numpy as np
import pytest

from decjax import codecs
from decjax.contrib.codecs import entropy


@pytest.mark.parametrize("step", [0.05, 0.3, 1.0, 2.0])
def test_estimate_is_the_entropy_of_matched_gaussians(step):
    levels = np.rint(np.random.default_rng(0).normal(0.7, 1.3, 200_000) / step)
    found = entropy.gaussian_bits(levels, step, mean=0.7, scale=1.3).mean()
    assert found == pytest.approx(entropy.empirical_bits(levels), rel=0.02)
    assert entropy.gaussian_bits(levels, step, mean=0.7, scale=2.6).mean() > 1.02 * found  # with a scale that does not match


def test_each_value_has_its_own_mean_and_scale():
    rng = np.random.default_rng(1)
    mean, scale = rng.normal(0, 5, 100_000), np.exp(rng.normal(0, 1, 100_000))
    levels = np.rint(rng.normal(mean, scale) / 0.5)
    known = entropy.gaussian_bits(levels, 0.5, mean, scale).mean()
    assert known < 0.85 * entropy.empirical_bits(
        levels
    )  # a coder that has the scales needs fewer bits than one that has frequencies


def test_probabilities_of_all_levels_sum_up_to_one():
    bits = entropy.gaussian_bits(np.arange(-50, 51), 0.25, mean=0.1, scale=0.8)
    assert (2.0**-bits).sum() == pytest.approx(1, abs=1e-6)
    assert entropy.gaussian_bits(np.array([1e6]), 1.0)[0] == 32


def test_estimate_of_a_message_is_below_its_width():
    x = np.random.default_rng(2).normal(size=4096).astype(np.float32)
    codec = codecs.make("int8")
    message = codec.encode(x, codec.init(x.shape, x.dtype), None)
    levels = np.asarray(message["codes"]).astype(int).reshape(-1, 256) - 127
    scales = np.asarray(message["scales"])[:, None]
    found = entropy.gaussian_bits(levels, 1.0, scale=1 / scales).mean()
    assert 5 < found < 8


@pytest.mark.parametrize("options", [dict(step=0.0), dict(step=1.0, scale=0.0), dict(step=1.0, scale=np.array([1.0, -1.0]))])
def test_impossible_scales_are_refused(options):
    with pytest.raises(ValueError, match="must be more than 0"):
        entropy.gaussian_bits(np.zeros(2), **options)


def test_lossless_bits_are_those_of_the_bytes():
    """Zero bits for equal values, all 32 for random bits; for Gaussians 16 bits and 7 of noise, and a nearly constant exponent."""
    rng = np.random.default_rng(3)
    assert entropy.lossless_bits(np.full(1000, 1.5, np.float32)) == 0
    assert entropy.lossless_bits(rng.integers(0, 2**32, 400_000, np.uint32).view(np.float32)) == pytest.approx(32, abs=0.01)
    assert 25 < entropy.lossless_bits(rng.normal(size=400_000).astype(np.float32)) < 28
    assert entropy.lossless_bits(rng.integers(0, 2, (300, 300)).astype(np.float32)) == pytest.approx(2, abs=0.01)
