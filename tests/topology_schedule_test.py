"""Rounds and their products, and schedules of given matrices."""

import math

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from decjax import topology as tp
from tests.graphs import assert_same_rounds, dense, second_singular_value


def test_volume_counts_messages_per_worker():
    np.testing.assert_array_equal(tp.make("ring", 5).rounds[0].volume(), 2.0)
    np.testing.assert_array_equal(tp.make("star", 5).rounds[0].volume(), [4, 1, 1, 1, 1])
    np.testing.assert_array_equal(tp.make("one_peer_ring", 5).rounds[0].volume(), [1, 1, 1, 1, 0])


def test_static_and_symmetric():
    assert tp.make("ring", 6).is_static and tp.make("ring", 6).is_symmetric
    assert not tp.make("exponential", 6).is_symmetric
    assert not tp.make("one_peer_exponential", 6).is_static


def test_spectral_gap_is_of_singular_values():
    # A directed ring with weights 1/2: singular values |cos(πm/n)|.
    topology = tp.make("directed_ring", 7)
    assert tp.spectral_gap(topology) == pytest.approx(1 - math.cos(math.pi / 7), abs=1e-12)
    for name in ("one_peer_ring", "equitopo_od", "torus", "base_k"):
        topology = tp.make(name, 12)
        assert tp.spectral_gap(topology) == pytest.approx(1 - second_singular_value(topology.product()), abs=1e-12)
        for phase in range(topology.period):
            expected = 1 - second_singular_value(topology.matrix(phase))
            assert tp.spectral_gap(topology, phase) == pytest.approx(expected, abs=1e-12)


def test_products_apply_earlier_rounds_first():
    A, B = np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[0.25, 0.75], [0.0, 1.0]])
    topology = tp.from_matrices([A, B])
    np.testing.assert_array_equal(topology.product(), B @ A)
    np.testing.assert_array_equal(topology.product(start=1, num_rounds=3), B @ A @ B)


def test_is_mixing_needs_more_than_connected_rounds():
    swap = tp.Round((0.0, 0.0), (tp.Shift(((0, 1), (1, 0)), (1.0, 1.0)),))
    assert not tp.is_mixing([swap])  # connected, but two workers only swap values
    assert not tp.is_mixing([tp.Round((1.0, 1.0))])
    assert tp.is_mixing([swap, *tp.make("ring", 2).rounds])


@st.composite
def stochastic_matrices(draw):
    """(W, axis): nonnegative, sums over `axis` are one, often sparse, often with a symmetric pattern."""
    n = draw(st.integers(1, 9))
    elements = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
    W_NxN = draw(hnp.arrays(np.float64, (n, n), elements=elements))
    if draw(st.booleans()):
        W_NxN = W_NxN * ((W_NxN > 0) & (W_NxN.T > 0))
    W_NxN = W_NxN + np.eye(n) * (W_NxN.sum() * draw(st.booleans()) + 0.1)
    axis = draw(st.sampled_from([0, 1]))
    return W_NxN / W_NxN.sum(axis=axis, keepdims=True), axis


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(stochastic_matrices())
def test_from_matrices_round_trip(drawn):
    W_NxN, axis = drawn
    topology = tp.from_matrices(W_NxN)
    (round_,) = topology.rounds
    np.testing.assert_array_equal(topology.matrix(0), W_NxN)
    np.testing.assert_array_equal(dense(round_), W_NxN)
    edges_NxN = (W_NxN > 0) & ~np.eye(len(W_NxN), dtype=bool)
    degree = max(edges_NxN.sum(axis=0).max(), edges_NxN.sum(axis=1).max())
    assert len(round_.shifts) == degree == topology.max_degree
    assert tp.is_row_stochastic(topology) if axis == 1 else tp.is_column_stochastic(topology)


def test_given_matrices_form_a_period():
    ring, complete = tp.make("ring", 5).matrix(0), np.full((5, 5), 0.2)
    topology = tp.from_matrices([ring, complete], name="mine")
    assert (topology.name, topology.period, topology.num_workers) == ("mine", 2, 5)
    assert_same_rounds(topology, [ring, complete])
    assert tp.from_matrices(np.stack([ring, complete]), name="mine") == topology
    assert tp.rounds_to_exact(topology) == 2


@pytest.mark.parametrize(
    "matrices, problem",
    [
        ([], "at least one"),
        ([[0.5, 0.5]], "square"),
        ([[0.5, 0.4], [0.5, 0.5]], "row 0 sums to 0.9"),
        ([[1.5, -0.5], [0.0, 1.0]], r"\[0, 1\] = -0.5"),
        ([[math.nan, 1.0], [0.0, 1.0]], "finite"),
        ([np.eye(2), np.eye(3)], r"matrix 1 has shape \(3, 3\)"),
    ],
)
def test_bad_matrices_are_refused(matrices, problem):
    with pytest.raises(ValueError, match=problem) as error:
        tp.from_matrices(matrices)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: tp.Shift(((0, 1), (0, 2)), (0.0, 0.5, 0.5)),
        lambda: tp.Shift(((0, 1), (2, 1)), (0.0, 0.5, 0.0)),
        lambda: tp.Shift(((1, 1),), (0.0, 0.5)),
        lambda: tp.Shift(((0, 2),), (0.0, 0.5)),
        lambda: tp.Shift(((0, 1),), (0.5, 0.5)),
        lambda: tp.Shift(((0, 1),), (0.0, -0.5)),
        lambda: tp.Round(()),
        lambda: tp.Round((1.0,), group_size=0),
        lambda: tp.Round((0.5, 0.4)),
        lambda: tp.Round((1.0, 1.0, 1.0), (tp.Shift(((0, 1),), (0.0, 0.0)),)),
        lambda: tp.Round((1.5, 1.0), (tp.Shift(((0, 1),), (0.0, 0.5)),)),
        lambda: tp.Topology("none", 2, ()),
        lambda: tp.Topology("mixed", 2, (tp.Round((1.0, 1.0)), tp.Round((1.0,)))),
    ],
)
def test_malformed_rounds_are_refused(build):
    with pytest.raises(ValueError):
        build()


def test_the_first_bad_weight_is_named():
    W_NxN = [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.7, -0.2, 0.5]]
    with pytest.raises(ValueError, match=r"matrix 0 has entry \[2, 1\] = -0.2; weights must be finite and at least 0"):
        tp.from_matrices([W_NxN])
