"""Measures on the devices at hand what `decjax.runtime` asks for: a worker's step, exchanges between workers, codecs.

Everything is taken in rounds, one action after the other in an order that rotates, so that whatever else the machines do falls
on all actions alike; what counts is the median over rounds. All workers meet before an action, so that it begins everywhere
at once: those that share cores then share them as in training. An exchange takes as long as on the slowest worker.

Exchanges are those of training, `mesh.exchange` and `mesh.group_mean`. Between nodes one worker of each takes part, so that no
two messages share a NIC; inside nodes all workers do.

    shift       worker i → i + 1 around a ring of nodes, or around each node
    pair        0 ↔ 1, 2 ↔ 3, … the same; with two of them there is no other exchange, and no shift
    all-reduce  the mean over all workers
"""

from collections.abc import Callable, Hashable, Sequence
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from decjax import buckets
from decjax import codecs
from decjax import mesh
from decjax.runtime import Cluster, Workload
from decjax.runtime import calibrate
from decjax.train import assemble
from decjax.train import state as state_lib
from decjax.train.errors import ConfigError

LEAST_BYTES = 2**20  # of the largest message: smaller ones tell latency only
SIZES = 4  # message sizes, each a quarter of the next
ROUNDS = (3, 400)  # fewest and most
STEPS = 20  # most gradients in a round; about half of the time is theirs

Actions = dict[Hashable, Callable[[], Any]]  # what is called -> what dispatches it; its result is waited for


class Exchange(NamedTuple):
    """A timed exchange; the fields are those of `calibrate.Measurement`."""

    kind: str
    num_bytes: int
    scope: str
    num_workers: int


class Measured(NamedTuple):
    """What was measured.

    Attributes:
        cluster: fitted to the exchanges.
        workload: of one worker's step; times vary as they did.
        exchanges: one per kind, size and round.
        times_s: for every action [N, rounds], seconds on each worker.
        rounds: how many.
    """

    cluster: Cluster
    workload: Workload
    exchanges: list[calibrate.Measurement]
    times_s: dict[Hashable, np.ndarray]
    rounds: int


def prepare(config: ml_collections.ConfigDict) -> assemble.Setup:
    """The parts of a config that are measured: model, data, optimizer, workers. Its method does not matter.

    Raises:
        ConfigError: if it describes no possible run, or there are no two devices to measure.
    """
    if config.simulate or config.workers == 1 or jax.device_count() == 1:
        found = "simulate=True" if config.simulate else f"workers={config.workers}, devices={jax.device_count()}"
        raise ConfigError(f"{found}: an exchange is measured between two devices at least; use more, or forced CPU devices "
                          "(JAX_PLATFORMS=cpu)")
    config = config.copy_and_resolve_references()
    config.method, config.stale, config.mixing.codec, config.engine = "local", False, "", "auto"
    return assemble.build(config)


# -- What is timed ----------------------------------------------------------------------------------------------------


def step_actions(setup: assemble.Setup) -> Actions:
    """The parts of a training step, each as a program of its own on all workers."""
    workers, key = setup.workers, jax.random.key(setup.config.seed)
    state = state_lib.init(setup.model.init, setup.method.tx, workers, setup.config.seed)
    batch = workers.build(lambda worker: setup.batch(worker, 0))
    layout = _layout(setup)

    def update(state, grads):
        updates, opt_state = setup.method.tx.update(grads, state.opt_state, state.params)
        return state_lib.State(optax.apply_updates(state.params, updates), opt_state)

    def combine(params, received):
        vectors = [(own + other) / 2 for own, other in zip(layout.pack(params), layout.pack(received))]
        return layout.unpack(vectors, like=params)

    forward = workers.jit(lambda params, batch: setup.model.nll(params, batch, key).mean(), (0, 0))
    gradient = workers.jit(lambda params, batch: setup.gradients(params, batch, key), (0, 0))
    optimizer = workers.jit(update, (0, 0), donate_argnums=(0,))
    join = workers.jit(combine, (0, 0))
    params, grads = jax.tree.map(jnp.copy, state.params), gradient(state.params, batch)[1]

    def take_optimizer():
        nonlocal state
        state = optimizer(state, grads)  # As in training the memory of the old state serves the new one.
        return state

    return {"forward": lambda: forward(params, batch), "gradient": lambda: gradient(params, batch),
            "optimizer": take_optimizer, "combine": lambda: join(params, grads)}


def exchange_actions(workers: mesh.Workers, sizes: Sequence[int]) -> Actions:
    """Every kind of exchange there is between these workers, in every size (bytes)."""
    n, L = workers.num_workers, workers.local_size
    patterns = {}
    if n > L:
        patterns |= {(kind, "inter"): [(source * L, target * L) for source, target in pairs]
                     for kind, pairs in _patterns(n // L).items()}
    if L > 1:
        patterns |= {(kind, "intra"): [(first + source, first + target) for first in range(0, n, L) for source, target in pairs]
                     for kind, pairs in _patterns(L).items()}
    programs = {(kind, scope, 2): workers.jit(lambda x, pairs=pairs: mesh.exchange(x, pairs, workers.axis_name), (0,))
                for (kind, scope), pairs in patterns.items()}
    programs["all_reduce", "inter" if n > L else "intra", n] = workers.jit(
        lambda x: mesh.group_mean(x, n, workers.axis_name), (0,))
    actions = {}
    for num_bytes in sizes:
        x = workers.build(lambda worker, values=num_bytes // 4: np.full(values, worker, np.float32))
        actions |= {Exchange(kind, num_bytes, scope, members): lambda run=run, x=x: run(x)
                    for (kind, scope, members), run in programs.items()}
    return actions


def _patterns(members: int) -> dict[str, list[tuple[int, int]]]:
    pairs = [(i, i ^ 1) for i in range(members - members % 2)]
    return {"pair": pairs} | ({"shift": [(i, (i + 1) % members) for i in range(members)]} if members > 2 else {})


def codec_actions(setup: assemble.Setup) -> Actions:
    """Encoding and decoding the model's parameters, by codec."""
    layout = _layout(setup)
    vectors = [setup.workers.build(lambda worker, size=bucket.size: np.linspace(-1, 1, size, dtype=bucket.dtype))
               for bucket in layout.buckets]

    def both(codec):
        return lambda vectors: [codec.decode(codec.encode(x_P), x_P.size, x_P.dtype) for x_P in vectors]

    programs = {name: setup.workers.jit(both(codecs.make(name)), (0,)) for name in codecs.names()}
    return {name: lambda run=run: run(vectors) for name, run in programs.items()}


def _layout(setup: assemble.Setup) -> buckets.Layout:
    return buckets.layout(jax.eval_shape(setup.model.init, jax.random.key(0)), bucket_bytes=setup.config.bucket_bytes)


# -- Timing -----------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Times actions that all workers take together."""

    def __init__(self, workers: mesh.Workers):
        self._workers = workers
        self._token = workers.build(lambda worker: np.float32(0))
        self._meet = workers.jit(lambda x: mesh.group_mean(x, workers.num_workers, workers.axis_name), (0,))

    def time(self, action: Callable[[], Any], repeats: int = 1) -> list[float]:
        """Seconds in this process, each from dispatch to completion; all workers begin the first at once."""
        jax.block_until_ready(self._meet(self._token))
        times_s = []
        for _ in range(repeats):
            begun = time.perf_counter()
            jax.block_until_ready(action())
            times_s.append(time.perf_counter() - begun)
        return times_s

    def gather(self, times_s: Sequence[float]) -> np.ndarray:
        """[N, R] from the R seconds of each process. A collective."""
        own = np.asarray(times_s, np.float32)
        return self._workers.fetch(self._workers.build(lambda worker: own))


def take_rounds(workers: mesh.Workers, actions: Actions, seconds: float, rounds: int | None,
                note: Callable[[int, int], None]) -> dict[Hashable, np.ndarray]:
    """Times all actions over and over.

    Args:
        workers: who takes them.
        actions: "gradient" is taken several times in a round, so that it gets about half of the time.
        seconds: about how long, without the warm-up.
        rounds: how many; None: as many as fit.
        note: told (rounds done, rounds to do).

    Returns:
        For every action [N, R] seconds.
    """
    watch = Stopwatch(workers)
    for action in actions.values():
        watch.time(action)  # Compiles.
    # Every process has to come to the same numbers, so the slowest worker's count.
    first_s = dict(zip(actions, watch.gather([watch.time(action)[0] for action in actions.values()]).max(axis=0).tolist()))
    once_s, gradient_s = sum(first_s.values()), first_s["gradient"]
    steps = int(np.clip((once_s - gradient_s) / gradient_s, 1, STEPS))
    rounds = rounds or int(np.clip(seconds / (once_s + (steps - 1) * gradient_s), *ROUNDS))
    times_s = {name: [] for name in actions}
    for done in range(rounds):
        names = list(actions)
        for name in names[done % len(names):] + names[:done % len(names)]:  # Nobody always goes first.
            times_s[name] += watch.time(actions[name], steps if name == "gradient" else 1)
        note(done + 1, rounds)
    return {name: watch.gather(own) for name, own in times_s.items()}


# -- What it comes to -------------------------------------------------------------------------------------------------


def sizes_of(setup: assemble.Setup) -> tuple[int, ...]:
    """Bytes of messages up to the model's, ascending."""
    largest = max(_layout(setup).num_bytes, LEAST_BYTES)
    return tuple(4 * (largest // 4 ** (k + 1)) for k in reversed(range(SIZES)))


def measure(setup: assemble.Setup, *, name: str, sizes: Sequence[int] = (), seconds: float = 60.0, rounds: int | None = None,
            note: Callable[[int, int], None] = lambda done, total: None) -> Measured:
    """Measures a worker's step, exchanges and codecs, and fits a profile to them. Every process calls it.

    Args:
        setup: from `prepare`.
        name: of the cluster.
        sizes: of messages in bytes, multiples of 4; none: up to the model's.
        seconds: about how long, without compiling.
        rounds: how many; None: as many as fit.
        note: told (rounds done, rounds to do).

    Returns:
        What was `Measured`, the same in every process.

    Raises:
        ValueError: if larger messages do not take longer.
    """
    actions = {**step_actions(setup), **exchange_actions(setup.workers, sizes or sizes_of(setup)), **codec_actions(setup)}
    times_s = take_rounds(setup.workers, actions, seconds, rounds, note)
    exchanges = [calibrate.Measurement(key.kind, key.num_bytes, time_s, key.scope, key.num_workers)
                 for key, times_NxR in times_s.items() if isinstance(key, Exchange)
                 for time_s in times_NxR.max(axis=0).tolist()]
    return Measured(*fit(setup, name, times_s, exchanges), exchanges, times_s, times_s["forward"].shape[1])


def fit(setup: assemble.Setup, name: str, times_s: dict[Hashable, np.ndarray],
        exchanges: Sequence[calibrate.Measurement]) -> tuple[Cluster, Workload]:
    """The profile of what was measured; the backward pass is shared out to buckets by their bytes."""
    median_s = {key: float(np.median(times_NxR)) for key, times_NxR in times_s.items()}
    num_bytes = [bucket.num_bytes for bucket in _layout(setup).buckets]
    backward_s = max(0.0, median_s["gradient"] - median_s["forward"])
    workload = Workload(
        median_s["forward"], tuple(backward_s * part / sum(num_bytes) for part in num_bytes), tuple(map(float, num_bytes)),
        median_s["optimizer"], median_s["combine"], calibrate.fit_jitter(times_s["gradient"].ravel()))
    n, L = setup.workers.num_workers, setup.workers.local_size
    codec = [calibrate.Measurement("codec", sum(num_bytes), median_s[each]) for each in codecs.names()]
    return calibrate.fit_cluster([*exchanges, *codec], name=name, num_nodes=n // L, workers_per_node=L), workload
