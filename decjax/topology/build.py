"""Named topologies: `make`, the registration of builders, and functions that builders share.

A builder is called with two or more workers (for one worker every topology is the identity) and returns the rounds of a period. Its
keyword arguments are the options of `make`; defaults work for every size that the graph exists for, and None means "derived from the
size". Traits:

    needs       the numbers of workers it exists for; left out: any
    directed    whether a worker may send to one that does not send back
    static      whether every round is the same
    exact       whether a period of rounds averages exactly, at every size

Where a graph looks the same from all workers (ring, torus, exponential, …), its rounds are whole permutations, one per neighbor.
"""

from collections.abc import Callable, Iterable, Mapping
import functools
import inspect
from typing import Annotated

import numpy as np

from decjax import registry
from decjax.options import Count, Range, checked
from decjax.topology import schedule

Rounds = list[schedule.Round]
Shape = Annotated[tuple[int, int], "(rows, columns); None: as near to a square as n allows"]

MAX_WORKERS = 4096  # matrices of more would take too long to analyze, and gigabytes
MAX_ROUNDS = 1024  # in a period that is drawn at random
ANY_SIZE = "'base_k' works for any number"

Workers = Annotated[int, Range(1, MAX_WORKERS)]
Period = Annotated[int, Range(1, MAX_ROUNDS), "number of rounds until the schedule repeats; None: 2⌈log2 n⌉"]
NodeSize = Annotated[Count, "L, workers of a node"]


class Unfit(ValueError):
    """A size or option for which a graph does not exist; the message continues "topology NAME"."""


def require(holds: bool, problem: str) -> None:
    """Raise `Unfit` with the problem unless a condition holds."""
    if not holds:
        raise Unfit(problem)


def register(name: str, **traits: str | bool) -> Callable[[Callable[..., Rounds]], Callable[..., Rounds]]:
    """Register a builder of rounds as a topology; a decorator that returns the builder."""

    def enter(builder):
        def built(num_workers: int, **options: object) -> schedule.Topology:
            try:
                rounds = builder(num_workers, **options) if num_workers > 1 else [schedule.Round((1.0,))]
            except Unfit as error:
                raise ValueError(f"topology {name!r} {error}") from error
            return schedule.Topology(name, int(num_workers), tuple(rounds))

        size, *options = inspect.signature(builder).parameters.values()
        factory = functools.update_wrapper(built, builder)
        vars(factory)["__signature__"] = inspect.Signature([size.replace(name="num_workers"), *options])
        registry.register("topology", name, **traits)(factory)
        return builder

    return enter


def names() -> tuple[str, ...]:
    """Return the names of all topologies that `make` builds."""
    return registry.names("topology")


def options(name: str) -> dict[str, object]:
    """Return the options of a named topology with their defaults; raise a ValueError for an unknown name."""
    return {option: entry.default for option, entry in registry.part("topology", name).options.items()}


@functools.partial(checked, called="topology.make")
def make(name: str, num_workers: int, /, **options: object) -> schedule.Topology:
    """Return the topology of a name for N workers.

    Args:
      name: one of `names()`, or a call form such as "base_k(k=2)".
      num_workers: N >= 1; for one worker every topology is the identity.
      **options: those of that topology, see `options(name)`. Equal options give equal topologies; random ones take a `seed`.

    Raises:
      ValueError: for an unknown name or option, a size that the graph does not exist for, or a bad option value.

    Examples:
      >>> make("hierarchical", 16, local_size=4, outer="base_k(k=3)").matrix(0).shape
      (16, 16)
    """
    return registry.make("topology", name, num_workers, **options)


# -- Rounds -----------------------------------------------------------------------------------------------------------


def rotation(n: int, hop: int) -> np.ndarray:
    return (np.arange(n) + hop) % n


def swap(n: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    targets = list(range(n))
    for i, j in pairs:
        targets[i], targets[j] = j, i
    return targets


def equal_weights(n: int, permutations: Iterable[Iterable[int]]) -> schedule.Round:
    """Return the round that gives self and all permutations the same weight."""
    moves = [range(n), *permutations]
    return schedule.round_from_moves([(targets, 1.0 / len(moves)) for targets in moves])


def pairwise(n: int, pairs: Iterable[tuple[int, int]], group_size: int = 1) -> schedule.Round:
    """Return the round in which each pair averages and all others are idle."""
    return schedule.round_from_moves([(range(n), 0.5), (swap(n, pairs), 0.5)], group_size)


def from_edges(n: int, edges: Mapping[tuple[int, int], float]) -> schedule.Round:
    """Return the round with these weights off the diagonal, and the rest of each row on it."""
    W_NxN = np.zeros((n, n))
    for edge, weight in edges.items():
        W_NxN[edge] = weight
    # Rounding must not make a weight negative where nothing is left.
    np.fill_diagonal(W_NxN, np.maximum(1.0 - W_NxN.sum(axis=1), 0.0))
    return schedule.round_from_matrix(W_NxN)


def metropolis(n: int, pairs: Iterable[tuple[int, int]]) -> schedule.Round:
    """Return the round with W_ij = 1 / (1 + max(deg i, deg j)) on the edges: symmetric for any degrees."""
    pairs = list(pairs)
    degrees = np.bincount(np.array(pairs, int).ravel(), minlength=n)
    weights = {(i, j): 1.0 / (1.0 + max(degrees[i], degrees[j])) for i, j in pairs}
    return from_edges(n, weights | {(j, i): weight for (i, j), weight in weights.items()})


def grid(n: int, shape: Shape | None, step: int) -> np.ndarray:
    """Return workers on an R x C grid whose sides are >= 2 and multiples of `step`, near-square by default."""
    fits = [(r, n // r) for r in range(2, n // 2 + 1) if n % r == 0 and r % step == 0 and n // r % step == 0]
    near_square = [sides for sides in fits if sides[0] <= sides[1]][-1:]
    chosen = near_square if shape is None else [sides for sides in fits if sides == tuple(shape)]
    got = f"{n} workers" if shape is None else f"{n} workers with shape={shape}, which must be (rows, columns)"
    require(
        bool(chosen),
        f"needs a grid with {'sides that are even' if step == 2 else 'two sides of at least 2'}, got {got}; {ANY_SIZE}",
    )
    return np.arange(n).reshape(chosen[0])


def log2_ceil(n: int) -> int:
    return (n - 1).bit_length()
