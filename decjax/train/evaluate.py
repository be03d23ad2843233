"""Evaluation of the averaged model and of every local model, without disturbing training."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh


class Evaluation(NamedTuple):
    """Losses on validation data, nats per token."""

    averaged: float  # of the averaged model
    local_N: np.ndarray  # of each worker's own model
    coded: float | None = None  # of the averaged model, with its messages between stages compressed


def _chunks(windows_WxT1: np.ndarray, count: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pads windows to (count, C, B, T+1) with C as small as possible; the mask (count, C, B) is 0 on padding."""
    C = -(-len(windows_WxT1) // (count * batch_size))
    total = count * C * batch_size
    padded = np.resize(windows_WxT1, (total, windows_WxT1.shape[1]))
    mask = (np.arange(total) < len(windows_WxT1)).astype(np.float32)
    return padded.reshape(count, C, batch_size, -1), mask.reshape(count, C, batch_size)


def make_evaluate(
    nll: Callable, workers: mesh.Workers, windows_WxT1: np.ndarray, batch_size: int, coded_nll: Callable | None = None
) -> Callable[[Any, Any], Evaluation]:
    """Compiles the evaluation of stacked parameters on fixed windows.

    The averaged model is evaluated by all workers together, each on its share of the
    windows. Every local model is evaluated on all windows.

    Args:
        nll: `nll(params, tokens_BxT1, key) -> nll_BxT` in nats.
        workers: where the workers live.
        windows_WxT1: validation windows.
        batch_size: windows per forward pass of a worker.
        coded_nll: the same of a model between whose stages messages are compressed; None: there are none.

    Returns:
        `evaluate(params, average) -> Evaluation`, of stacked parameters and the averaged model. A collective: every process calls it.
    """
    tokens = windows_WxT1.shape[0] * (windows_WxT1.shape[1] - 1)
    key = jax.random.key(0)

    def summed(params, tokens_CxBxT1, mask_CxB, nll=nll):
        def add(total, chunk):
            tokens_BxT1, mask_B = chunk
            return total + (nll(params, tokens_BxT1, key) * mask_B[:, None]).sum(), None

        return jax.lax.scan(add, jnp.zeros(()), (tokens_CxBxT1, mask_CxB))[0]

    shares, share_masks = _chunks(windows_WxT1, workers.num_workers, batch_size)
    shares, share_masks = workers.build(shares.__getitem__), workers.build(share_masks.__getitem__)
    whole, whole_mask = (part[0] for part in _chunks(windows_WxT1, 1, batch_size))
    together = workers.jit(summed, in_axes=(None, 0, 0))
    coded = workers.jit(functools.partial(summed, nll=coded_nll), in_axes=(None, 0, 0)) if coded_nll else None
    apart = workers.jit(summed, in_axes=(0, None, None))

    def evaluate(params, average):
        joint_N, local_N = workers.fetch((together(average, shares, share_masks), apart(params, whole, whole_mask)))
        coded_loss = float(workers.fetch(coded(average, shares, share_masks)).sum() / tokens) if coded else None
        return Evaluation(float(joint_N.sum() / tokens), local_N / tokens, coded_loss)

    return evaluate
