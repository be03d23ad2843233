"""Buckets: unpack inverts pack, and sizes are as declared."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import buckets

leaves = st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(["float32", "bfloat16", "int32"])), max_size=6)


def make_tree(specs):
    rng = np.random.default_rng(0)
    return {f"leaf{i}": jnp.asarray(rng.integers(-9, 9, shape), dtype) for i, (shape, dtype) in enumerate(specs)}


@settings(max_examples=40, deadline=None)
@given(leaves, st.sampled_from([0, 24, 10**6]), st.integers(1, 5))
def test_unpack_inverts_pack(specs, bucket_bytes, multiple_of):
    tree = make_tree(specs)
    layout = buckets.layout(tree, bucket_bytes=bucket_bytes, multiple_of=multiple_of)
    vectors = layout.pack(tree)
    assert [v.nbytes for v in vectors] == [bucket.num_bytes for bucket in layout.buckets]
    assert all(v.size % multiple_of == 0 for v in vectors)
    blank = {name: x if x.dtype == jnp.int32 else jnp.zeros_like(x) for name, x in tree.items()}
    for name, x in layout.unpack(vectors, like=blank).items():
        assert x.dtype == tree[name].dtype and x.shape == tree[name].shape
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(tree[name], np.float32))


@pytest.mark.parametrize("bucket_bytes, expected", [(0, [4, 4, 40, 4]), (8, [8, 40, 4]), (10**6, [52])])
def test_small_leaves_share_a_bucket(bucket_bytes, expected):
    tree = [jnp.zeros(1), jnp.zeros(1), jnp.zeros(10), jnp.zeros(1)]
    assert [b.num_bytes for b in buckets.layout(tree, bucket_bytes=bucket_bytes).buckets] == expected


def test_some_leaves_have_a_bucket_each():
    tree = {"a": jnp.zeros(1), "b": {"table": jnp.zeros(2)}, "c": {"table": jnp.zeros(3)}, "d": jnp.zeros(1), "e": jnp.zeros(1)}
    layout = buckets.layout(tree, bucket_bytes=10**6, alone=("table",))
    assert [bucket.leaves for bucket in layout.buckets] == [(0,), (1,), (2,), (3, 4)]


@settings(max_examples=40, deadline=None)
@given(leaves, st.sampled_from([0, 24, 10**6]), st.integers(0, 5))
def test_matrices_come_first_and_shards_are_padded_rows(specs, bucket_bytes, num_shards):
    tree = make_tree(specs)
    layout = buckets.layout(
        tree, bucket_bytes=bucket_bytes, matrix=lambda x: x.shape if x.ndim == 2 else None, num_shards=num_shards
    )
    arrays = layout.pack(tree, wide=True)
    shapes = [x.shape[1:] if num_shards else x.shape for x in arrays]
    assert [x.shape for x in layout.parts()] == shapes and {x.dtype for x in arrays} <= {np.dtype(np.float32)}
    matrices = [x for x in tree.values() if x.dtype != jnp.int32 and x.ndim == 2 and x.size]
    assert [len(shape) for shape in shapes] == sorted((len(shape) for shape in shapes), reverse=True)
    for x, array in zip(matrices, arrays):
        np.testing.assert_array_equal(array.reshape(-1, x.shape[1])[: len(x)], np.asarray(x, np.float32))
    blank = {name: x if x.dtype == jnp.int32 else jnp.zeros_like(x) for name, x in tree.items()}
    for name, x in layout.unpack(arrays, like=blank).items():
        assert x.dtype == tree[name].dtype and x.shape == tree[name].shape
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(tree[name], np.float32))
