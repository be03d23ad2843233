"""Codecs on trees of arrays: many small ones become few messages."""

import jax
import numpy as np
import pytest

from decjax import codecs

pytestmark = pytest.mark.usefixtures("quick_compilation")


def model_tree(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {"w": (20, 30), "v": (20, 30), "b": (30,), "scale": (), "empty": (0, 3), "thin": (100, 2)}
    tree = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return tree | {"half": rng.normal(size=9).astype(np.float16), "count": np.int32(7)}


@pytest.mark.parametrize(
    "name, options, arrays",
    [
        ("int8", {}, 2),
        ("topk", {}, 4),
        ("int4", {"rounding": "stochastic"}, 2),
        ("low_rank", {"rank": 3}, 2),
        ("dct", {}, 4),
        ("identity", {}, 2),
    ],
)
def test_many_small_tensors_become_few_messages(name, options, arrays):
    codec, tree = codecs.make(name, **options), model_tree()
    on_tree = codecs.on_tree(codec, tree, join_bytes=200)
    state = on_tree.init()
    message = jax.jit(on_tree.encode)(tree, state, jax.random.key(1))
    assert codecs.message_bytes(message) == on_tree.num_bytes and len(message) <= arrays
    back = jax.jit(on_tree.decode)(message, tree)
    assert jax.tree.map(lambda x, y: (np.shape(x), x.dtype) == (np.shape(y), y.dtype), tree, back) == jax.tree.map(
        lambda x: True, tree
    )
    assert back["count"] == 7
    if name in ("identity", "int8"):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=0.02), tree, back)
    after = on_tree.advance(state, message)
    if name == "low_rank":  # Matrices by themselves, as without a tree; what is thin or a vector arrives as it is.
        alone = codec.decode(codec.encode(tree["w"], codec.init((20, 30), np.float32), None), (20, 30), np.float32)
        np.testing.assert_allclose(back["w"], alone, atol=1e-5)
        np.testing.assert_array_equal(back["b"], tree["b"])
        np.testing.assert_array_equal(back["half"], tree["half"])
        assert any(np.abs(new - old).max() > 0.1 for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state)))
    else:
        assert jax.tree.leaves(after) == []
