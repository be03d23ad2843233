"""Timing of actions that all workers start together, in rounds, in an order that rotates; and the exchanges among these actions."""

from collections.abc import Callable, Hashable, Mapping, Sequence
import concurrent.futures
import functools
import time
from typing import NamedTuple

import jax
import numpy as np
import optax

from decjax import buckets, mesh
from decjax.costmodel import fit
from decjax.train import engine
from decjax.train.trainer import Trainer
from decjax.typing import PyTree

ROUNDS = (3, 400)  # fewest and most
STEPS = (
    5,
    20,
)  # fewest and most gradients in a round, twice: started together, and in a row; they get about two thirds of the time

Action = Callable[[], PyTree]  # dispatches what is timed, and returns arrays to wait for


class Stopwatch:
    """A stopwatch for actions that all workers start together."""

    def __init__(self, workers: mesh.Workers):
        self._workers = workers
        self._token = workers.build(lambda worker: np.float32(0))
        self._meet = workers.jit(workers.axis.mean, (0,))
        self.meet()  # CPU processes must connect within half a minute, so before one of them compiles for longer.

    def meet(self) -> None:
        """Wait until all workers have called it."""
        jax.block_until_ready(self._meet(self._token))

    def time(self, action: Action, repeats: int = 1, in_a_row: bool = False) -> list[float]:
        """Return the seconds of each repeat in this process, from dispatch to completion.

        All workers start each repeat together, or only the first if `in_a_row`.
        """
        times_s = []
        for index in range(repeats):
            if not (in_a_row and index):
                self.meet()
            begun = time.perf_counter()
            jax.block_until_ready(action())
            times_s.append(time.perf_counter() - begun)
        return times_s

    def gather(self, times_s: Sequence[float]) -> np.ndarray:
        """Return the R times of each process, for every worker: [N, R]. A collective."""
        local = np.asarray(times_s, np.float32)
        return self._workers.fetch(self._workers.build(lambda worker: local)).astype(float)


def take_rounds(
    watch: Stopwatch, actions: Mapping[Hashable, Action], seconds: float, rounds: int | None, note: Callable[[int, int], None]
) -> dict[Hashable, np.ndarray]:
    """Return the seconds of every action, [N, R], timed in R rounds, and of gradients in a row, "in a row", [N, R · steps of a row].

    Args:
        watch: a stopwatch of the workers.
        actions: what is timed; "gradient" is repeated within a round.
        seconds: duration from which R follows.
        rounds: R; None: derived from `seconds`.
        note: called with (rounds done, R) after each round.
    """
    for action in actions.values():
        watch.time(action)  # The first call compiles.
    # All processes must choose the same numbers, so they use the slowest worker's times.
    slowest_s = watch.gather([watch.time(action)[0] for action in actions.values()]).max(axis=0)
    round_s, gradient_s = slowest_s.sum(), slowest_s[list(actions).index("gradient")]
    steps = int(np.clip(round_s / gradient_s - 1, *STEPS))
    rounds = rounds or int(np.clip(seconds / (round_s + (2 * steps - 1) * gradient_s), *ROUNDS))
    times_s = {name: [] for name in (*actions, "in a row")}
    for done in range(rounds):
        names, first = list(actions), done % len(actions)
        for name in names[first:] + names[:first]:
            times_s[name] += watch.time(actions[name], steps if name == "gradient" else 1)
            if name == "gradient":
                times_s["in a row"] += watch.time(actions[name], steps, in_a_row=True)
        note(done + 1, rounds)
    return {name: watch.gather(times) for name, times in times_s.items()}


# -- Exchanges --------------------------------------------------------------------------------------------------------


class TimedExchange(NamedTuple):
    """Which exchange is timed: the fields of its `costmodel.fit.Measurement`."""

    kind: fit.Kind
    num_bytes: int
    scope: fit.Scope
    num_workers: int


def shapes(trainer: Trainer) -> optax.Params:
    """Return the shapes and dtypes of one worker's parameters."""
    return jax.eval_shape(trainer.setup.start, jax.random.key(0))


def layout(trainer: Trainer) -> buckets.Layout:
    """Return how one worker's parameters are joined into messages."""
    return buckets.layout(shapes(trainer), bucket_bytes=trainer.spec.bucket_bytes)


def exchange_actions(trainer: Trainer, sizes: Sequence[int]) -> dict[TimedExchange, Action]:
    """Return every kind of exchange between these workers, in each of the sizes (bytes); keys are `TimedExchange`s."""
    workers, model = trainer.workers, layout(trainer)
    n, axis = workers.num_workers, workers.axis
    programs = {
        (*what, 2): _of_all(workers, functools.partial(axis.exchange, pairs=pairs)) for what, pairs in _sends(workers).items()
    }
    programs["all_reduce", "inter" if n > workers.local_size else "intra", n] = _of_all(workers, axis.mean)
    actions = {}
    for size in sizes:
        parts = [max(1, round(bucket.size * size / model.num_bytes)) for bucket in model.buckets]
        vectors = [workers.build(lambda worker, part=part: np.full(part, worker, np.float32)) for part in parts]
        for (kind, scope, members), run in programs.items():
            actions[TimedExchange(kind, 4 * sum(parts), scope, members)] = functools.partial(run, vectors)
    return actions


def _of_all(workers: mesh.Workers, exchange: Callable[[jax.Array], jax.Array]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return workers.jit(lambda vectors: [exchange(x_P) for x_P in vectors], (0,))


def _sends(workers: mesh.Workers) -> dict[tuple[fit.Kind, fit.Scope], list[tuple[int, int]]]:
    """Return the pairs (source, target) of workers that send, by (kind, scope)."""
    n, L = workers.num_workers, workers.local_size
    sends = {}
    for scope, members, distance, firsts in (("inter", n // L, L, [0]), ("intra", L, 1, range(0, n, L))):
        patterns = {"pair": [(i, i ^ 1) for i in range(members - members % 2)]} if members > 1 else {}
        patterns |= {"shift": [(i, (i + 1) % members) for i in range(members)]} if members > 2 else {}
        for kind, pairs in patterns.items():
            sends[kind, scope] = [
                (first + source * distance, first + target * distance) for first in firsts for source, target in pairs
            ]
    return sends


class OverlappedExchange:
    """An exchange of the model as training sends it, in parts from a separate thread, while a gradient is computed.

    Attributes:
        kind, scope: of the exchange, as in `TimedExchange`.
        exchange_s: seconds that the exchange itself took, one for each call; a call lasts until both are done.
    """

    def __init__(self, trainer: Trainer, gradient: Action):
        workers, sends = trainer.workers, _sends(trainer.workers)
        # Between nodes where there are several, and a shift where more than two take part.
        what = min(sends, key=lambda what: (what[1] != "inter", what[0] != "shift"))
        self.kind, self.scope = what
        run = _of_all(workers, functools.partial(workers.axis.exchange, pairs=sends[what]))
        vectors = [workers.build(lambda worker, size=bucket.size: np.zeros(size, np.float32)) for bucket in layout(trainer).buckets]
        cuts = np.array_split(np.arange(len(vectors)), min(engine.PARTS, len(vectors)))
        self._parts = [functools.partial(run, [vectors[k] for k in cut]) for cut in cuts]
        self._thread, self._gradient, self.exchange_s = concurrent.futures.ThreadPoolExecutor(1), gradient, []

    def _send(self) -> None:
        begun = time.perf_counter()
        for part in self._parts:
            jax.block_until_ready(part())
        self.exchange_s.append(time.perf_counter() - begun)

    def __call__(self) -> PyTree:
        sent = self._thread.submit(self._send)
        computed = jax.block_until_ready(self._gradient())
        sent.result()
        return computed
