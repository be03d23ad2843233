"""What builders of named topologies share: their registration, rounds from permutations, pairs and edges, and checks of options.

A builder is called with two or more workers (for one worker every topology is the identity) and raises a ValueError of one line when
the size or an option does not fit. Its keyword arguments are the options of `make`. Their defaults work for every size that the graph
exists for; None means "derived from the size". Traits:

    needs       the numbers of workers it exists for; left out: any
    directed    whether a worker may send to one that does not send back
    static      whether every round is the same
    exact       whether a period of rounds averages exactly, at every size

Where a graph looks the same from all workers (ring, torus, exponential, …), its rounds are whole permutations, one per neighbour.
Random graphs depend on (size, options, seed) alone, and are redrawn until repeating their rounds brings all workers to agreement.
"""

from collections.abc import Callable, Iterable, Mapping
import functools
import inspect
import math
import operator
from typing import Any

import numpy as np

from decjax import registry
from decjax.topology import schedule

Rounds = list[schedule.Round]

MAX_WORKERS = 4096  # matrices of more would take too long to analyze, and gigabytes
MAX_DRAWS = 1000
MAX_ROUNDS = 1024  # in a period that is drawn at random
ANY_SIZE = "'base_k' works for any number"


class OptionError(ValueError):
    """A value that an option cannot have, told from the option's name on; `register` puts the topology's before it."""


def register(name: str, **traits) -> Callable[[Callable[..., Rounds]], Callable[..., Rounds]]:
    """A decorator that registers a builder of rounds as a factory of topologies."""

    def enter(builder):
        @functools.wraps(builder)
        def factory(num_workers, **options):
            try:
                n = integer("num_workers", num_workers, 1, MAX_WORKERS)
                return schedule.Topology(name, n, tuple(builder(n, **options)) if n > 1 else (schedule.Round((1.0,)),))
            except OptionError as error:
                raise ValueError(f"topology {name!r} {error}") from error

        signature = inspect.signature(builder)
        size, *options = signature.parameters.values()
        factory.__signature__ = signature.replace(  # pyright: ignore[reportAttributeAccessIssue]
            parameters=[size.replace(name="num_workers"), *options], return_annotation=schedule.Topology
        )
        registry.register("topology", name, **traits)(factory)
        return builder

    return enter


# Rounds ----------------------------------------------------------------------------------------------------


def rotation(n: int, hop: int) -> np.ndarray:
    return (np.arange(n) + hop) % n


def swap(n: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    targets = list(range(n))
    for i, j in pairs:
        targets[i], targets[j] = j, i
    return targets


def equal_weights(n: int, permutations: Iterable[Iterable[int]]) -> schedule.Round:
    """The round that gives self and all permutations the same weight."""
    moves = [range(n), *permutations]
    return schedule.round_from_moves([(targets, 1.0 / len(moves)) for targets in moves])


def pairwise(n: int, pairs: Iterable[tuple[int, int]], group_size: int = 1) -> schedule.Round:
    """The round in which each pair averages and all others are idle."""
    return schedule.round_from_moves([(range(n), 0.5), (swap(n, pairs), 0.5)], group_size)


def from_edges(n: int, edges: Mapping[tuple[int, int], float]) -> schedule.Round:
    """The round with the given weights off the diagonal, and what is left of each row on it."""
    W_NxN = np.zeros((n, n))
    for edge, weight in edges.items():
        W_NxN[edge] = weight
    # Rounding must not make a weight negative where nothing is left.
    np.fill_diagonal(W_NxN, np.maximum(1.0 - W_NxN.sum(axis=1), 0.0))
    return schedule.round_from_matrix(W_NxN)


def metropolis(n: int, pairs: Iterable[tuple[int, int]]) -> schedule.Round:
    """W_ij = 1 / (1 + max(deg i, deg j)) on the edges: symmetric for any degrees."""
    pairs = list(pairs)
    degrees = np.bincount(np.array(pairs, int).ravel(), minlength=n)
    weights = {(i, j): 1.0 / (1.0 + max(degrees[i], degrees[j])) for i, j in pairs}
    return from_edges(n, weights | {(j, i): weight for (i, j), weight in weights.items()})


def grid(name: str, n: int, shape: tuple[int, int] | None, step: int) -> np.ndarray:
    """Workers on an R x C grid whose sides are >= 2 and multiples of `step`, near-square by default."""
    sides = "sides that are even" if step == 2 else "two sides of at least 2"
    if shape is None:
        fits = [r for r in range(2, math.isqrt(n) + 1) if n % r == 0 and r % step == 0 and n // r % step == 0]
        if not fits:
            raise ValueError(f"topology {name!r} needs a grid with {sides}, got {n} workers; {ANY_SIZE}")
        shape = (fits[-1], n // fits[-1])
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise OptionError(f"'shape' has to be (rows, columns), got {shape!r}")
    rows, columns = (integer("shape", side, 2) for side in shape)
    if rows * columns != n or rows % step or columns % step:
        raise ValueError(
            f"topology {name!r} needs a grid of {n} workers with {sides}, got shape={rows}x{columns}; leave shape out for a "
            f"near-square grid, and if there is none, {ANY_SIZE}"
        )
    return np.arange(n).reshape(rows, columns)


def first_mixing(draw: Callable[[], Rounds], problem: str) -> Rounds:
    """The first random schedule that brings all workers to agreement; a ValueError says `problem` if none of `MAX_DRAWS` does."""
    for _ in range(MAX_DRAWS):
        if (rounds := draw()) and schedule.is_mixing(rounds):
            return rounds
    raise ValueError(problem)


def log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


def num_rounds(n: int, rounds: int | None) -> int:
    return 2 * log2_ceil(n) if rounds is None else integer("rounds", rounds, 1, MAX_ROUNDS)


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(integer("seed", seed, 0, 2**63 - 1))


def integer(option: str, value: Any, low: int, high: int | None = None) -> int:
    """The value of an option as an int from `low` on; an OptionError for any other."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        interval = f">= {low}" if high is None else f"from {low} to {high}"
        raise OptionError(f"{option!r} has to be an integer {interval}, got {value!r}")
    return number


def real(option: str, value: Any, high: float) -> float:
    """The value of an option as a float in (0, high]; an OptionError for any other."""
    number = value  # numpy's types take a scalar for text and bytes as well.
    if isinstance(value, (bool, str)) or not np.isscalar(value) or not 0.0 < number <= high:
        raise OptionError(f"{option!r} has to be a number in (0, {high:g}], got {value!r}")
    return float(number)
