"""Measurement of the link of every pair of workers, both ways, in few rounds: in each round a worker has at most one partner.

The pairs of a round are a matching of the complete graph; N − 1 matchings have all pairs (N of them if N is odd). In a round one of
each pair sends and the other receives, and then the other way round. Messages of two sizes give latency and bandwidth of
t = α + b/β, from medians over rounds.
"""

from collections.abc import Sequence

import jax
import numpy as np

from decjax import mesh
from decjax.contrib.placement.links import Links
from decjax.errors import ConfigError
from decjax.measure.timing import Stopwatch

ROUNDS = 5
ATTEMPTS = 4


def matchings(N: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of N in the fewest matchings: one member keeps its seat, the others rotate around it."""
    seats = [*range(N), *([-1] if N % 2 else [])]  # The one opposite to −1 rests.
    matchings = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats))
        matchings.append([(one, other) for one, other in pairs if min(one, other) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return matchings


def measure_links(workers: mesh.Workers, sizes: Sequence[int], rounds: int = ROUNDS, flops: np.ndarray | None = None) -> Links:
    """Measure the links between workers, each of which has a separate process. A collective.

    Args:
        workers: N of them.
        sizes: bytes of the smallest and of the largest message; others in between are not sent.
        rounds: how often each is sent; up to four times as often while a larger message takes no longer than a small one.
        flops: what each worker sustains, if that was measured.

    Raises:
        ConfigError: if workers share a process, which cannot time each of them.
        ValueError: if a larger message does not take longer.
    """
    N = workers.num_workers
    if jax.process_count() != N:
        raise ConfigError(
            f"workers={N} in {jax.process_count()} processes: links are measured between processes of one worker each; start {N}"
        )
    sizes = (min(sizes), max(sizes))
    times_s = _times(workers, sizes, rounds)
    small_s, large_s = np.median(times_s, axis=1)
    for _ in range(ATTEMPTS - 1):  # On busy machines a few rounds may not be enough.
        if not _not_longer(small_s, large_s).size:
            break
        times_s = np.concatenate([times_s, _times(workers, sizes, rounds)], axis=1)
        small_s, large_s = np.median(times_s, axis=1)
    return Links(*line(small_s, large_s, *sizes), flops=flops, source="measured with launch.calibrate")


def _times(workers: mesh.Workers, sizes: Sequence[int], rounds: int) -> np.ndarray:
    """Seconds of each size, round, source and target, [2, R, N, N]. A collective."""
    N, watch = workers.num_workers, Stopwatch(workers)
    times_s = np.zeros((len(sizes), rounds, N, N))
    for pairs in matchings(N):
        for way in (pairs, [(other, one) for one, other in pairs]):
            send = workers.jit(lambda x_P, way=way: workers.axis.exchange(x_P, way), (0,))
            for k, num_bytes in enumerate(sizes):
                vector = workers.build(lambda worker, num_bytes=num_bytes: np.full(max(1, num_bytes // 4), worker, np.float32))
                watch.time(lambda send=send, vector=vector: send(vector))  # It compiles.
                times = [watch.time(lambda send=send, vector=vector: send(vector))[0] for _ in range(rounds)]
                of_worker = watch.gather(times)
                for source, target in way:
                    times_s[k, :, source, target] = np.maximum(of_worker[source], of_worker[target])
    return times_s


def _not_longer(small_s: np.ndarray, large_s: np.ndarray) -> np.ndarray:
    """Indices (i, j) of links on which the larger message took no longer, [_, 2]."""
    return np.argwhere((large_s <= small_s) & ~np.eye(len(small_s), dtype=bool))


def line(small_s: np.ndarray, large_s: np.ndarray, small: int, large: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (α in seconds, β in bytes per second) of t = α + b/β through the times of two messages, [N, N]; diagonals do not count."""
    longer_s = large_s - small_s
    if (wrong := _not_longer(small_s, large_s)).size:
        i, j = wrong[0]
        raise ValueError(f"from worker {i} to {j} {large} bytes take no longer than {small}; give --sizes that are further apart")
    bandwidth_Bps = (large - small) / np.where(longer_s > 0, longer_s, 1.0)
    return np.maximum(small_s - small / bandwidth_Bps, 0.0), bandwidth_Bps
