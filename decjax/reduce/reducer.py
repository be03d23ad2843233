"""What a reducer is, and the plain mean.

A reducer owns its collectives, since some compress between two of them:

    averaged, state = reduce(grads, state, phase)

The average is the same on every worker, bit for bit. A gradient that is not finite, of any worker, makes the average not
finite on all of them, as it does the plain mean's, and leaves the state as it was.
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
        reduce: `reduce(grads, state, phase) -> (averaged, state)`; the same on every worker. `phase` is static, so that no
            program holds a conditional around a collective; left out, it is the last.
        num_bytes: `num_bytes(params, num_workers, phase) -> (N,)` bytes that each worker sends, the declared formula.
        phase: `phase(step) -> phase`, for an int; None where the state decides.
        phases: all values that `phase` takes.
        usage: `usage(state) -> [phases]` steps so far in each phase, where the state decides on it; else None.
    """

    init: Callable[[Any], Any]
    reduce: Callable[..., tuple[Any, Any]]
    num_bytes: Callable[..., np.ndarray]
    phase: Callable[[int], int | None] = lambda step: 0
    phases: range = range(1)
    usage: Callable[[Any], jax.Array] | None = None


def due_phase(reducer: Reducer, phase: int | None) -> int | None:
    """The reducer's phase: the only one it has, else the given one; None where its state decides.

    Raises:
        ValueError: if it has several and none is given.
    """
    if len(reducer.phases) == 1:
        return reducer.phases[0]
    if phase is None and not reducer.usage:
        raise ValueError(f"this reducer has {len(reducer.phases)} phases: give update(…, phase=reducer.phase(step)), a static int")
    return phase


def mean(*, axis_name: mesh.AxisName = mesh.WORKER, bucket_bytes: int = buckets.BUCKET_BYTES) -> Reducer:
    """All-reduce: g_i <- (1/N) Σ_j g_j. A worker sends 2(N−1)/N of the gradient's bytes.

    Args:
        axis_name: the worker axis.
        bucket_bytes: size of the flat messages in bytes; 0 reduces every array by itself.

    Returns:
        The `Reducer`.
    """
    def reduce(grads, state, phase=0):
        del phase
        layout = buckets.layout(grads, bucket_bytes=bucket_bytes)
        num_workers = jax.lax.axis_size(axis_name)
        means = [mesh.group_mean(x_P, num_workers, axis_name) for x_P in layout.pack(grads)]
        return layout.unpack(means, like=grads), state

    def num_bytes(params, num_workers, phase=0):
        del phase
        layout = buckets.layout(params, bucket_bytes=bucket_bytes)
        return np.full(num_workers, 2 * (num_workers - 1) / num_workers * layout.num_bytes)

    return Reducer(lambda params: (), reduce, num_bytes)
