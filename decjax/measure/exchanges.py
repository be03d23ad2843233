"""Timed exchanges: of several sizes alone, and of the whole model while a gradient is computed."""

from collections.abc import Callable, Sequence
import concurrent.futures
import functools
import time
from typing import NamedTuple

import jax
import numpy as np
import optax

from decjax import buckets, mesh
from decjax.measure.rounds import Actions
from decjax.train import engine
from decjax.train.trainer import Trainer
from decjax.typing import PyTree


class TimedExchange(NamedTuple):
    """Which exchange is timed, with the names of `costmodel.fit.Measurement`.

    Attributes:
        kind: "shift", "pair" or "all_reduce".
        num_bytes: of the whole exchange, per worker.
        scope: "inter" between nodes or "intra" inside a node.
        num_workers: how many exchange with each other.
    """

    kind: str
    num_bytes: int
    scope: str
    num_workers: int


def layout(trainer: Trainer) -> buckets.Layout:
    """Return how one worker's parameters are joined to messages."""
    return buckets.layout(shapes(trainer), bucket_bytes=trainer.spec.bucket_bytes)


def shapes(trainer: Trainer) -> optax.Params:
    """Return the shapes and dtypes of one worker's parameters."""
    return jax.eval_shape(trainer.setup.start, jax.random.key(0))


def exchange_actions(trainer: Trainer, sizes: Sequence[int]) -> Actions:
    """Return every kind of exchange between these workers, in each of the sizes (bytes); keys are `TimedExchange`s."""
    workers, model = trainer.workers, layout(trainer)
    n, L, axis = workers.num_workers, workers.local_size, workers.axis

    def on_all(exchange: Callable[[jax.Array], jax.Array]):
        return workers.jit(lambda vectors: [exchange(x_P) for x_P in vectors], (0,))

    programs = {
        (kind, scope, 2): on_all(lambda x_P, pairs=pairs: axis.exchange(x_P, pairs))
        for (kind, scope), pairs in _sends(workers).items()
    }
    programs["all_reduce", "inter" if n > L else "intra", n] = on_all(axis.mean)
    actions = {}
    for wanted in sizes:
        parts = [max(1, round(bucket.size * wanted / model.num_bytes)) for bucket in model.buckets]
        vectors = [workers.build(lambda worker, part=part: np.full(part, worker, np.float32)) for part in parts]
        actions |= {
            TimedExchange(kind, 4 * sum(parts), scope, members): lambda run=run, vectors=vectors: run(vectors)
            for (kind, scope, members), run in programs.items()
        }
    return actions


def _sends(workers: mesh.Workers) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Return the pairs (source, target) of workers that send, by (kind, scope)."""
    n, L = workers.num_workers, workers.local_size
    scopes = {"inter": (n // L, L, [0]), "intra": (L, 1, range(0, n, L))}  # (members, distance between them, first ones of groups)
    return {
        (kind, scope): [(first + source * apart, first + target * apart) for first in firsts for source, target in pairs]
        for scope, (members, apart, firsts) in scopes.items()
        if members > 1
        for kind, pairs in _patterns(members).items()
    }


class OverlappedExchange:
    """An exchange of the model as training sends it, in parts from a separate thread, while a gradient is computed.

    Attributes:
        kind, scope: of the exchange, as in `TimedExchange`.
        exchange_s: seconds that the exchange itself took, one for each call; a call lasts until both are done.
    """

    def __init__(self, trainer: Trainer, gradient: Callable[[], PyTree]):
        workers, sends = trainer.workers, _sends(trainer.workers)
        # Between nodes where there are several, and a shift where more than two take part.
        of = ((kind, scope) for scope in ("inter", "intra") for kind in ("shift", "pair"))
        self.kind, self.scope = next(what for what in of if what in sends)
        pairs = sends[self.kind, self.scope]
        run = workers.jit(lambda vectors: [workers.axis.exchange(x_P, pairs) for x_P in vectors], (0,))
        vectors = [workers.build(lambda worker, size=bucket.size: np.zeros(size, np.float32)) for bucket in layout(trainer).buckets]
        cuts = np.array_split(np.arange(len(vectors)), min(engine.PARTS, len(vectors)))
        self._parts = [functools.partial(run, [vectors[k] for k in cut]) for cut in cuts]
        self._thread, self._gradient, self.exchange_s = concurrent.futures.ThreadPoolExecutor(1), gradient, []

    def _send(self):
        begun = time.perf_counter()
        for part in self._parts:
            jax.block_until_ready(part())
        self.exchange_s.append(time.perf_counter() - begun)

    def __call__(self) -> PyTree:
        sent = self._thread.submit(self._send)
        computed = jax.block_until_ready(self._gradient())
        sent.result()
        return computed


def _patterns(members: int) -> dict[str, list[tuple[int, int]]]:
    pairs = [(i, i ^ 1) for i in range(members - members % 2)]
    return {"pair": pairs} | ({"shift": [(i, (i + 1) % members) for i in range(members)]} if members > 2 else {})
