"""Codecs: what comes back, and how many bytes travelled."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import codecs

VALUES = hnp.arrays(np.float32, st.integers(1, 700), elements=st.floats(-1e6, 1e6, width=32))


def error_bound(name, x_P):
    """What the docstrings promise, element by element."""
    if name == "bfloat16":
        return np.abs(x_P) * 2.0**-8
    blocks = np.pad(x_P, (0, -len(x_P) % 256)).reshape(-1, 256)
    return np.repeat(np.abs(blocks).max(axis=1) / 254, 256)[:len(x_P)]


@pytest.mark.parametrize("name", codecs.names())
@hypothesis.given(x_P=VALUES)
@hypothesis.settings(max_examples=40, deadline=None)
def test_errors_stay_within_the_bound_and_bytes_are_those_declared(name, x_P):
    codec = codecs.make(name)
    message = codec.encode(jnp.asarray(x_P), (), None)
    back = np.asarray(codec.decode(message, x_P.shape, jnp.float32))
    assert back.dtype == np.float32 and back.shape == x_P.shape
    assert (np.abs(back - x_P) <= error_bound(name, x_P) * (1 + 1e-5) + 1e-37).all()
    assert codecs.message_bytes(message) == codec.num_bytes(x_P.shape, jnp.float32)


@pytest.mark.parametrize("name", codecs.names())
def test_zeros_stay_zeros(name):
    codec = codecs.make(name)
    np.testing.assert_array_equal(codec.decode(codec.encode(jnp.zeros(5), (), None), (5,), jnp.float32), np.zeros(5))


def test_unknown_codec_lists_the_known_ones():
    with pytest.raises(ValueError, match="codec 'zip' is unknown; use one of bfloat16, int8"):
        codecs.make("zip")
