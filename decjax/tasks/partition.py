"""Partitions of the training examples over N workers:

    iid           all examples are reshuffled and distributed over the workers in every epoch
    contiguous    worker i has the i-th of N consecutive parts of the data
    dirichlet     each worker draws its class proportions from Dirichlet(α): similar ones for large α, few classes for small α

A partition depends only on (its name and options, the labels, N, the seed). The workers' numbers of examples differ by at most one.

Reference: Hsu et al. 2019, arXiv 1909.06335. Here every example is used: workers whose class is exhausted take examples of others.
"""

from collections.abc import Callable, Mapping, Sequence
import itertools
import math
from typing import Any

import grain
import numpy as np

from decjax import registry
from decjax.options import Positive, check_choice


def parse(partition: str) -> tuple[str, float]:
    """Return (name, α) of a partition such as "dirichlet(alpha=0.1)"; α is ∞ for the others."""
    name, options = choose("partition", partition, PARTITIONS)
    return name, options.get("alpha", math.inf)


def choose(kind: str, text: str, known: Mapping[str, Callable]) -> tuple[str, dict[str, Any]]:
    """Return the name of a function in a table and all of its options, from a call form; a ValueError if one is unknown."""
    name, given = registry.parse(kind, text)
    check_choice(kind, name, tuple(known))
    options = {key: option for key, option in registry.options_of(known[name]).items() if not option.is_required}
    if unknown := given.keys() - options.keys():
        fix = f"use {', '.join(options)}" if options else "leave it out, it has no options"
        raise ValueError(f"{kind} {registry.shown(text)} has no option {min(unknown)!r}; {fix}")
    words = {"true": True, "false": False}
    return name, registry.fill(f"{kind} {name!r}: ", {key: words.get(str(x), x) for key, x in given.items()}, options)


def _everywhere() -> None:
    """Reshuffle every epoch, or divide by position."""


def _by_class(alpha: Positive = 0.1) -> None:
    """Distribute by class."""


PARTITIONS = {"iid": _everywhere, "contiguous": _everywhere, "dirichlet": _by_class}


def deal(
    partition: str, labels: Sequence[int] | np.ndarray, num_workers: int, batch_size: int, seed: int
) -> Callable[[int, int], np.ndarray]:
    """Return `indices(worker, step)`: the positions of the B examples of a worker's batch; every epoch has a different order.

    Args:
        partition: "iid", "contiguous", or "dirichlet(alpha=0.1)".
        labels: the class of every example, or the file that a window of text is from; only "dirichlet" reads more than their number.
        num_workers: N.
        batch_size: B, examples in a worker's batch.
        seed: of the run.

    Raises:
        ValueError: if the partition is unknown, there are fewer examples than workers, or "dirichlet" has a single class.

    Example:
        >>> indices = deal("dirichlet(alpha=0.1)", np.arange(40) % 4, num_workers=8, batch_size=5, seed=0)
        >>> len(np.unique([indices(worker, 0) for worker in range(8)]))
        40
    """
    name, alpha = parse(partition)
    if len(labels) < num_workers:
        raise ValueError(f"{len(labels)} training examples for {num_workers} workers; use more data or fewer workers")
    if name == "iid":
        dealt = grain.MapDataset.range(len(labels)).seed(seed).shuffle().repeat()
        shards = [dealt[worker::num_workers].batch(batch_size) for worker in range(num_workers)]
        return lambda worker, step: np.asarray(shards[worker][step])
    if name == "contiguous":  # Its positions need no arrays, which may be too large for the memory.
        cuts = [worker * len(labels) // num_workers for worker in range(num_workers + 1)]
        sizes, place = [end - begin for begin, end in itertools.pairwise(cuts)], lambda worker, where_B: cuts[worker] + where_B
    else:
        parts = split(alpha, np.asarray(labels), num_workers, seed)
        sizes, place = [len(part) for part in parts], lambda worker, where_B: parts[worker][where_B]
    shards = [
        grain.MapDataset.range(size).seed(seed + worker).shuffle().repeat().batch(batch_size) for worker, size in enumerate(sizes)
    ]
    return lambda worker, step: place(worker, np.asarray(shards[worker][step]))


def split(alpha: float, labels: np.ndarray, num_workers: int, seed: int) -> list[np.ndarray]:
    """Return the positions of each worker's examples, with class proportions from Dirichlet(α); consecutive parts for α = ∞."""
    cuts = np.arange(num_workers + 1) * len(labels) // num_workers
    if alpha == math.inf:
        return [np.arange(begin, end) for begin, end in itertools.pairwise(cuts)]
    sizes_N = np.diff(cuts)
    classes, labels, stock_K = np.unique(labels, return_inverse=True, return_counts=True)
    if len(classes) == 1:
        raise ValueError("partition 'dirichlet' divides data by class, but all data is of one; use iid or contiguous")
    rng = np.random.default_rng(seed)
    taken_NxK = _allot(_log_gamma(rng, alpha, (len(sizes_N), len(classes))), sizes_N, stock_K)
    of_class = np.split(np.argsort(labels, kind="stable"), stock_K.cumsum()[:-1])
    pieces = [np.split(rng.permutation(members), taken_N.cumsum()) for members, taken_N in zip(of_class, taken_NxK.T, strict=True)]
    # For each class N pieces and a remainder; transposed, one list for each worker and one of the remainders.
    *parts, left = zip(*pieces, strict=True)
    more = np.split(rng.permutation(np.concatenate(left)), (sizes_N - taken_NxK.sum(axis=1)).cumsum()[:-1])
    return [np.sort(np.concatenate([*part, rest])) for part, rest in zip(parts, more, strict=True)]


def _log_gamma(rng: np.random.Generator, alpha: float, shape: tuple[int, ...]) -> np.ndarray:
    """ln g with g ~ Gamma(α), as ln(Gamma(α + 1) · U^(1/α)): for small α, g itself would be 0 in floating point."""
    return np.log(rng.gamma(alpha + 1, size=shape)) + np.log(rng.uniform(np.finfo(float).tiny, 1, size=shape)) / alpha


def _allot(log_weight_NxK: np.ndarray, sizes_N: np.ndarray, stock_K: np.ndarray) -> np.ndarray:
    """[N, K]: how many examples of each class each worker takes, in proportion to its weights among the classes not used up."""
    need_N, stock_K, taken_NxK = sizes_N.copy(), stock_K.copy(), np.zeros(log_weight_NxK.shape, int)
    while True:
        weight_NxK = np.where(stock_K > 0, log_weight_NxK, -np.inf)
        weight_NxK = np.exp(weight_NxK - weight_NxK.max(axis=1, keepdims=True, initial=-1e300))
        wanted_NxK = need_N[:, None] * weight_NxK / np.maximum(weight_NxK.sum(axis=1, keepdims=True), 1e-300)
        given_NxK = np.floor(wanted_NxK * np.minimum(1, stock_K / np.maximum(wanted_NxK.sum(axis=0), 1e-300)) + 1e-9).astype(int)
        if not given_NxK.any():
            return taken_NxK  # Every share is below one example: the caller distributes the rest at random.
        taken_NxK, need_N, stock_K = taken_NxK + given_NxK, need_N - given_NxK.sum(axis=1), stock_K - given_NxK.sum(axis=0)
