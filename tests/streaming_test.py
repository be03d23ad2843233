"""Streaming DiLoCo against a dense NumPy reference written as in the paper, its limit, its bytes and its schedule, in float64."""

import jax
import numpy as np
import optax
import pytest

from decjax import optim, reduce
from decjax.contrib.outer import StreamingDiLoCo
from decjax.contrib.outer import streaming as streaming_lib
from tests import outer
from tests.outer import LR, START, STEPS, X0, Adam, N, adam, diloco, gradients, trajectory
from tests.stand_ins import dense_top, top

H = 6
pytestmark = pytest.mark.usefixtures("quick_compilation")
# A row of the [2, 2] matrix, and half of the vector.
FRAGMENTS = {1: [np.arange(8)], 2: [np.r_[0:2, 4:6], np.r_[2:4, 6:8]]}


def streaming(mean=reduce.mean, **options):
    return lambda channel: StreamingDiLoCo(adam(LR), mean(channel), N, every=H, **options)


def dense(fragments, delay, merge, code=None):
    """Fragment p is captured before step s ≡ pH/P, and merged after step s + τ − 1; with τ = 0 before step s."""
    direction, x, anchor, m, path, traveling = Adam(), START, X0.copy(), np.zeros_like(X0), [START], []
    error = np.zeros((N, len(X0)))
    for s in range(STEPS + 1):
        for p, own in enumerate(FRAGMENTS[fragments]):
            if s and s % H == p * H // fragments:
                change = anchor[own] - x[:, own]
                if code:
                    # Each τ-th of a fragment is a message: here half of the row, and half of the vector's part.
                    for piece in own.reshape(-1, delay).T:
                        sent = np.stack([code(row) for row in anchor[piece] - x[:, piece] + error[:, piece]])
                        error[:, piece] += anchor[piece] - x[:, piece] - sent
                        change[:, np.isin(own, piece)] = sent
                traveling.append((s + delay, own, change.mean(axis=0)))
        if s and not delay:
            path[-1] = x = merged(traveling, s, x, anchor, m, merge)
        if s == STEPS:
            return np.stack(path)
        x = x - LR * direction(gradients(x, s))
        x = merged(traveling, s + 1, x, anchor, m, merge) if delay else x
        path.append(x)


def merged(traveling, now, x, anchor, m, merge):
    x = x.copy()
    for due, own, delta in traveling:
        if due == now:
            m[own] = 0.9 * m[own] + delta
            anchor[own] -= 0.7 * (delta + 0.9 * m[own])
            x[:, own] = (1 - merge) * anchor[own] + merge * x[:, own]
    return x


@pytest.mark.parametrize(
    "fragments, delay, merge, mode",
    [(2, 0, 0.5, "simulated"), (2, 1, 0.5, "devices"), (1, 1, 0.0, "simulated"), (2, 1, 1.0, "simulated")],
)
def test_it_is_the_dense_reference(fragments, delay, merge, mode):
    path, state, _ = trajectory(streaming(fragments=fragments, delay=delay, merge=merge), mode)
    np.testing.assert_allclose(path, dense(fragments, delay, merge), rtol=0, atol=1e-6)
    assert all(np.ptp(x, axis=0).max() == 0 for x in jax.tree.leaves((state.anchor, state.outer)))


@pytest.mark.parametrize("mode", ["devices", "simulated"])
def test_a_fragment_travels_in_pieces_that_are_compressed_with_error_feedback(mode):
    """The exchange may also be a separate program, as with engine "split"."""
    coded = lambda channel: reduce.coded(channel, codec=top(0.5), form="gather")
    path, _, _ = trajectory(streaming(coded, fragments=2, delay=2), mode, received=mode == "devices")
    np.testing.assert_allclose(path, dense(2, 2, 0.5, dense_top(0.5)), rtol=0, atol=1e-6)


def test_one_fragment_without_delay_that_replaces_the_parameters_is_diloco_bit_for_bit():
    path, _, _ = trajectory(streaming(fragments=1, delay=0, merge=0.0))
    expected, _, _ = trajectory(lambda channel: optim.DiLoCo(adam(LR), reduce.mean(channel), N, every=H))
    np.testing.assert_array_equal(path, expected)
    np.testing.assert_allclose(path, diloco(H, 0.7, 0.9), rtol=0, atol=1e-6)


@pytest.mark.parametrize("delay, share", [(0, 2), (1, 2), (2, 4)])
def test_a_step_sends_its_share_of_what_diloco_sends_at_once(delay, share):
    one = outer.tree(X0)
    whole = optim.DiLoCo(optax.sgd(LR), reduce.mean(), N, every=H)
    method = StreamingDiLoCo(optax.sgd(LR), reduce.mean(), N, every=H, fragments=2, delay=delay)
    peak = max(whole.num_bytes(one, whole.phase(t))[0] for t in range(H))
    sent = [method.num_bytes(one, method.phase(t))[0] for t in range(H, 2 * H)]
    assert max(sent) == peak / share and sum(sent) == peak


def test_fragments_of_stacked_layers_are_layers():
    layers = {"up": jax.ShapeDtypeStruct((4, 3, 5), np.float32), "count": jax.ShapeDtypeStruct((), np.int32)}
    assert [[x.shape for x in streaming_lib.take(layers, part)] for part in streaming_lib.indices(layers, 2)] == [[(2, 3, 5)]] * 2
    shapes = {"a": jax.ShapeDtypeStruct((2, 7), np.float32), "b": jax.ShapeDtypeStruct((2,), np.float32)}
    found = [[x.shape for x in streaming_lib.take(shapes, part)] for part in streaming_lib.indices(shapes, 3)]
    assert found == [[(2, 2)], [(2, 2), (2,)], [(2, 3)]]
    values = {"a": np.arange(14.0).reshape(2, 7), "b": np.ones(2)}
    part = streaming_lib.indices(values, 3)[1]
    changed = streaming_lib.put(jax.tree.map(jax.numpy.asarray, values), part, [x + 1 for x in streaming_lib.take(values, part)])
    assert float(sum(x.sum() for x in jax.tree.leaves(changed))) == sum(x.sum() for x in values.values()) + 4 + 2


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(fragments=7), "at most every=6 fragments, got fragments '7'"),
        (dict(fragments=2, delay=4), "a delay of at most every/fragments=3, got delay '4'"),
        (dict(merge=1.5), "merge=1.5 must be at least 0 and at most 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        streaming()(None) if not options else streaming(lambda channel: reduce.mean(), **options)(None)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="some would be empty; use fewer fragments"):
        streaming_lib.indices({"a": np.ones(2)}, 3)
