"""Averaging gradients over all workers.

A `Reducer` owns its collectives: `reduce(grads, state) -> (averaged, state)`. The plain mean is ring all-reduce of the
gradient in a few flat buckets.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from decjax import buckets
from decjax import mesh


class Reducer(NamedTuple):
    """How gradients become one.

    Attributes:
        init: `init(params) -> state`.
        reduce: `reduce(grads, state) -> (averaged, state)`; the same on every worker.
        num_bytes: `num_bytes(params, num_workers) -> (N,)` bytes that each worker sends, the declared formula.
    """

    init: Callable[[Any], Any]
    reduce: Callable[[Any, Any], tuple[Any, Any]]
    num_bytes: Callable[[Any, int], np.ndarray]


def mean(*, axis_name: mesh.AxisName = mesh.WORKER, bucket_bytes: int = buckets.BUCKET_BYTES) -> Reducer:
    """All-reduce: g_i <- (1/N) Σ_j g_j. A worker sends 2(N−1)/N of the gradient's bytes.

    Args:
        axis_name: the worker axis.
        bucket_bytes: size of the flat messages in bytes; 0 reduces every array by itself.

    Returns:
        The `Reducer`.
    """
    def reduce(grads, state):
        layout = buckets.layout(grads, bucket_bytes=bucket_bytes)
        num_workers = jax.lax.axis_size(axis_name)
        means = [mesh.group_mean(x_P, num_workers, axis_name) for x_P in layout.pack(grads)]
        return layout.unpack(means, like=grads), state

    def num_bytes(params, num_workers):
        layout = buckets.layout(params, bucket_bytes=bucket_bytes)
        return np.full(num_workers, 2 * (num_workers - 1) / num_workers * layout.num_bytes)

    return Reducer(lambda params: (), reduce, num_bytes)
