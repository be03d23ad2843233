"""Measures on the devices at hand what `decjax.runtime` asks for: a worker's step, exchanges between workers, codecs, and what
compressed methods compute.

Everything is taken in rounds, one action after the other in an order that rotates, so that whatever else the machines do falls
on all actions alike; medians over rounds count. All workers meet before an action and begin it at once, so that those that
share cores share them as in training. An exchange takes as long as on the slowest worker.

Exchanges run through `mesh.Axis`, in as many messages as the model has buckets, each scaled to the
size in question; what they cost is that of the whole exchange, and the profile's workload is a single bucket.

    shift       worker i → i + 1, around a ring
    pair        i ↔ i XOR 1; among two workers there is nothing else
    all-reduce  the mean over all workers

Shifts and pairs between nodes are those of one worker of each, so that no two messages share a NIC; inside nodes all workers
take part.

A compressed method is timed without its messages: the exchange or the reduction of its own program, in which a worker hears what
it says. What the messages take follows from their bytes.
"""

from collections.abc import Callable, Hashable, Sequence
import copy
import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from decjax import buckets, codecs, mesh
from decjax.gossip import rounds as rounds_lib
from decjax.runtime import Cluster, Compressed, Link, Workload, calibrate
from decjax.train import assemble, silence
from decjax.train import state as state_lib
from decjax.train.errors import ConfigError

LEAST_BYTES = 2**20  # of the largest message: smaller ones tell latency only
SIZES, RATIO = 3, 4  # message sizes, and each one ÷ the one before; much smaller ones would pass in a switch's buffers
ROUNDS = (3, 400)  # fewest and most
STEPS = 20  # most gradients in a round; about half of the time is theirs

PHASES = 64  # last steps of a compressed method, of which the phases are taken
CODECS = ("bfloat16", "int8")  # Few: every one compiles for seconds.

Actions = dict[Hashable, Callable[[], Any]]  # what is timed -> what dispatches it; its result is waited for


class Exchange(NamedTuple):
    """What is timed, in the words of `calibrate.Measurement`."""

    kind: str
    num_bytes: int
    scope: str
    num_workers: int


class Measured(NamedTuple):
    """What was measured; the same in every process.

    Attributes:
        cluster: fitted to the exchanges and codecs.
        workload: one worker's step; its time varies as workers did against each other.
        lines: α and β of every (kind, scope) of exchange.
        step_s: [N, rounds or more] seconds on each worker of "forward", "gradient", "optimizer" and "combine".
        exchange_s: [rounds] seconds on the slowest worker.
        codec_s: [N, rounds] seconds on each worker, by codec.
        coding_s: [N, rounds] seconds on each worker, by the name of a compressed method.
    """

    cluster: Cluster
    workload: Workload
    lines: dict[tuple[str, str], Link]
    step_s: dict[str, np.ndarray]
    exchange_s: dict[Exchange, np.ndarray]
    codec_s: dict[str, np.ndarray]
    coding_s: dict[str, np.ndarray]


def prepare(config: ml_collections.ConfigDict) -> assemble.Setup:
    """The parts of a config that are measured: model, data, optimizer, workers. Its method does not matter.

    Raises:
        ConfigError: if it describes no possible run, or has no two devices.
    """
    if config.simulate:
        raise ConfigError("simulate=True: workers on one device exchange nothing that could be timed; leave it out")
    if assemble.devices_of_worker(config) > 1:
        raise ConfigError(
            f"stages={config.pipeline.stages}, tensor={config.tensor}: what is measured is a worker on one device; leave them out"
        )
    if config.workers == 1 or jax.device_count() == 1:
        raise ConfigError(
            f"workers={config.workers or 'auto'}, devices={jax.device_count()}: an exchange is timed between at "
            "least two workers, each on a device of its own; JAX_PLATFORMS=cpu makes devices of CPU threads"
        )
    config = copy.deepcopy(config)  # References included, such as a batch that follows the number of workers.
    config.method, config.stale, config.engine = "local", False, "auto"
    config.mixing.mixer, config.mixing.codec, config.reducer.name = "exact", "", "mean"
    return assemble.build(config)


# -- What is timed ----------------------------------------------------------------------------------------------------


def _layout(setup: assemble.Setup) -> buckets.Layout:
    return buckets.layout(jax.eval_shape(setup.model.init, jax.random.key(0)), bucket_bytes=setup.config.bucket_bytes)


def step_actions(setup: assemble.Setup) -> Actions:
    """The parts of a training step, each a program of its own on all workers."""
    workers, layout, key = setup.workers, _layout(setup), jax.random.key(setup.config.seed)
    state = state_lib.init(*setup.beginning)
    batch = workers.build(lambda worker: setup.batch(worker, 0))

    def combine(params, received):
        return layout.unpack([(own + other) / 2 for own, other in zip(layout.pack(params), received)], like=params)

    forward = workers.jit(lambda params, batch: setup.model.nll(params, batch, key).mean(), (0, 0))
    gradient = workers.jit(lambda params, batch: setup.source.gradient(params, (), batch, key)[:2], (0, 0))
    optimize = workers.jit(_silent_update(setup), (0, 0), donate_argnums=(0,))
    join = workers.jit(combine, (0, 0))
    params, received = jax.tree.map(jnp.copy, state.params), workers.jit(layout.pack, (0,))(state.params)
    _, grads = gradient(params, batch)

    def optimizer():
        nonlocal state
        state = optimize(state, grads)  # As in training, the new state takes the memory of the old one.
        return state

    return {
        "forward": lambda: forward(params, batch),
        "gradient": lambda: gradient(params, batch),
        "optimizer": optimizer,
        "combine": lambda: join(params, received),
    }


def exchange_actions(setup: assemble.Setup, sizes: Sequence[int]) -> Actions:
    """Every kind of exchange between these workers, in every size (bytes)."""
    workers, layout = setup.workers, _layout(setup)
    n, L, axis = workers.num_workers, workers.local_size, workers.axis
    sends = {}
    if n > L:
        sends |= {
            (kind, "inter", 2): [(source * L, target * L) for source, target in pairs] for kind, pairs in _patterns(n // L).items()
        }
    if L > 1:
        sends |= {
            (kind, "intra", 2): [(first + source, first + target) for first in range(0, n, L) for source, target in pairs]
            for kind, pairs in _patterns(L).items()
        }

    def on_all(talk):
        return workers.jit(lambda vectors: [talk(x_P) for x_P in vectors], (0,))

    programs = {what: on_all(lambda x_P, pairs=pairs: axis.exchange(x_P, pairs)) for what, pairs in sends.items()}
    programs["all_reduce", "inter" if n > L else "intra", n] = on_all(axis.mean)
    actions = {}
    for wanted in sizes:
        parts = [max(1, round(bucket.size * wanted / layout.num_bytes)) for bucket in layout.buckets]
        vectors = [workers.build(lambda worker, part=part: np.full(part, worker, np.float32)) for part in parts]
        actions |= {
            Exchange(kind, 4 * sum(parts), scope, members): lambda run=run, vectors=vectors: run(vectors)
            for (kind, scope, members), run in programs.items()
        }
    return actions


def _patterns(members: int) -> dict[str, list[tuple[int, int]]]:
    pairs = [(i, i ^ 1) for i in range(members - members % 2)]
    return {"pair": pairs} | ({"shift": [(i, (i + 1) % members) for i in range(members)]} if members > 2 else {})


def codec_actions(setup: assemble.Setup) -> Actions:
    """Encoding and decoding the model's buckets, by the codec's name."""
    workers = setup.workers
    vectors = [
        workers.build(lambda worker, size=bucket.size: np.linspace(-1, 1, size, dtype=np.float32))
        for bucket in _layout(setup).buckets
    ]

    def code(codec, x_P):
        key = jax.random.key(0) if codec.traits.random else None
        message = codec.encode(x_P, codec.init(x_P.shape, x_P.dtype), key)
        message = jax.lax.optimization_barrier(message)  # Sent and received: nothing is known of it.
        return codec.decode(message, x_P.shape, x_P.dtype)

    programs = {
        name: workers.jit(lambda vectors, codec=codecs.make(name): [code(codec, x_P) for x_P in vectors], (0,)) for name in CODECS
    }
    return {name: lambda run=run: run(vectors) for name, run in programs.items()}


# -- Compressed methods -----------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """A compressed method that is measured.

    Attributes:
        name: what the profile calls it.
        setup: its parts.
        phases: those of its last steps, when it does what it is meant to.
        ratio, latencies: see `runtime.Compressed`.
    """

    name: str
    setup: assemble.Setup
    phases: tuple[int, ...]
    ratio: float
    latencies: float


def form(name: str, config: ml_collections.ConfigDict) -> Form:
    """What a compressed method's messages come to, from the bytes that it declares and the collectives of its update.

    Args:
        name: what to call it.
        config: as `configs/lm.py` describes; gossip in order "awc", or all-reduce.

    Raises:
        ConfigError: if it describes no possible run, or a method of another kind.
    """
    setup = assemble.build(config)
    method, workers, topology, last = setup.method, setup.workers, setup.topology, setup.config.steps
    phases = {method.phase(step) for step in range(max(last // 2, last - PHASES), last)}
    if None in phases or setup.config.method not in ("allreduce", "decentralized") or bool(method.exchange) != bool(topology):
        raise ConfigError(
            f"{name!r} cannot be measured as a compressed method: it must be gossip in order 'awc', or an all-reduce "
            "that is not stale, with phases that are known beforehand"
        )
    params = jax.eval_shape(setup.model.init, jax.random.key(0))
    sent = np.mean([method.num_bytes(params, phase).mean() for phase in phases])
    whole, n = _layout(setup).num_bytes, workers.num_workers
    if topology:
        exact = np.mean([rounds_lib.sent_bytes(round_, _layout(setup)).mean() for round_ in topology.rounds])
        return Form(name, setup, tuple(sorted(phases)), float(sent / exact), 1.0)
    sums, like = [], state_lib.abstract(*setup.beginning)
    jax.eval_shape(workers.map(_silent_update(setup, min(phases), sums), (0, 0)), like, like.params)
    return Form(name, setup, tuple(sorted(phases)), float(sent / (2 * (n - 1) / n * whole)), sum(sums))


def _silent_update(setup: assemble.Setup, phase: int | None = None, sums: list[float] | None = None) -> Callable[..., Any]:
    """All that a worker computes once it has its gradient."""

    def update(state, grads):
        updates, opt_state = setup.method.tx.update(grads, state.opt_state, state.params, phase=phase)
        return state_lib.State(optax.apply_updates(state.params, updates), opt_state)

    return silence.silent(update, setup.workers.axis, sums)


def coding_actions(forms: Sequence[Form]) -> Actions:
    """The updates of compressed methods without their messages, by name and phase."""
    actions = {}
    for name, setup, phases, *_ in forms:
        state = [state_lib.init(*setup.beginning)]
        grads = jax.tree.map(lambda x: 1e-3 * x, state[0].params)
        for phase in phases:
            run = setup.workers.jit(_silent_update(setup, phase), (0, 0), donate_argnums=(0,))

            def update(run=run, state=state, grads=grads):
                state[0] = run(state[0], grads)
                return state[0]

            actions[name, phase] = update
    return actions


# -- Timing -----------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Times actions that all workers take together."""

    def __init__(self, workers: mesh.Workers):
        self._workers = workers
        self._token = workers.build(lambda worker: np.float32(0))
        self._meet = workers.jit(workers.axis.mean, (0,))
        self.meet()  # Connections between CPU processes are made within half a minute: before anybody compiles for longer.

    def meet(self) -> None:
        """Returns when all workers have come."""
        jax.block_until_ready(self._meet(self._token))

    def time(self, action: Callable[[], Any], repeats: int = 1) -> list[float]:
        """Seconds in this process, each from dispatch to completion; all workers begin the first at once."""
        self.meet()
        times_s = []
        for _ in range(repeats):
            begun = time.perf_counter()
            jax.block_until_ready(action())
            times_s.append(time.perf_counter() - begun)
        return times_s

    def gather(self, times_s: Sequence[float]) -> np.ndarray:
        """[N, R] from the R seconds of each process. A collective."""
        own = np.asarray(times_s, np.float32)
        return self._workers.fetch(self._workers.build(lambda worker: own)).astype(float)


def take_rounds(
    watch: Stopwatch, actions: Actions, seconds: float, rounds: int | None, note: Callable[[int, int], None]
) -> dict[Hashable, np.ndarray]:
    """Times all actions over and over.

    Args:
        watch: of the workers that take them.
        actions: "gradient" is taken several times in a round, so that it gets about half of the time.
        seconds: about how long, without the warm-up.
        rounds: how many; None: as many as fit.
        note: told (rounds done, rounds to do).

    Returns:
        For every action [N, R] seconds.
    """
    for action in actions.values():
        watch.time(action)  # Compiles.
    # All processes have to come to the same numbers, so the slowest worker's count.
    slowest_s = watch.gather([watch.time(action)[0] for action in actions.values()]).max(axis=0)
    round_s, gradient_s = slowest_s.sum(), slowest_s[list(actions).index("gradient")]
    steps = int(np.clip(round_s / gradient_s - 1, 1, STEPS))
    rounds = rounds or int(np.clip(seconds / (round_s + (steps - 1) * gradient_s), *ROUNDS))
    times_s = {name: [] for name in actions}
    for done in range(rounds):
        names = list(actions)
        for name in names[done % len(names) :] + names[: done % len(names)]:  # Nobody always goes first.
            times_s[name] += watch.time(actions[name], steps if name == "gradient" else 1)
        note(done + 1, rounds)
    return {name: watch.gather(own) for name, own in times_s.items()}


# -- What it comes to -------------------------------------------------------------------------------------------------


def sizes_up_to_model(setup: assemble.Setup) -> tuple[int, ...]:
    """Bytes of exchanges, ascending."""
    largest = max(_layout(setup).num_bytes, LEAST_BYTES)
    return tuple(largest // RATIO**k for k in reversed(range(SIZES)))


def measure(
    setup: assemble.Setup,
    *,
    name: str,
    sizes: Sequence[int] = (),
    forms: Sequence[Form] = (),
    seconds: float = 60.0,
    rounds: int | None = None,
    note: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """Measures a worker's step, exchanges and codecs, and fits a profile to them. Every process calls it.

    Args:
        setup: from `prepare`.
        name: of the cluster.
        sizes: of exchanges in bytes; none: up to the model's.
        forms: compressed methods.
        seconds: about how long, without compiling.
        rounds: how many; None: as many as fit.
        note: told (rounds done, rounds to do).

    Returns:
        What was `Measured`, the same in every process.

    Raises:
        ValueError: if larger exchanges do not take longer.
    """
    watch = Stopwatch(setup.workers)
    steps, codings = step_actions(setup), codec_actions(setup)
    exchanges = exchange_actions(setup, sizes or sizes_up_to_model(setup))
    times_s = take_rounds(watch, steps | exchanges | codings | coding_actions(forms), seconds, rounds, note)
    step_s, codec_s = {part: times_s[part] for part in steps}, {codec: times_s[codec] for codec in codings}
    coding_s = {form.name: np.mean([times_s[form.name, phase] for phase in form.phases], axis=0) for form in forms}
    exchange_s = {what: times_s[what].max(axis=0) for what in exchanges}
    total_bytes = _layout(setup).num_bytes
    measurements = [
        calibrate.Measurement(what.kind, what.num_bytes, float(np.median(slowest_s)), what.scope, what.num_workers)
        for what, slowest_s in exchange_s.items()
    ]
    lines = {(m.kind, m.scope): calibrate.line_of(measurements, m.kind, m.scope) for m in measurements}
    measurements += [
        calibrate.Measurement("codec", total_bytes, float(np.median(both_s)), codec=codec) for codec, both_s in codec_s.items()
    ]
    n, L = setup.workers.num_workers, setup.workers.local_size
    cluster = calibrate.fit_cluster(measurements, name=name, num_nodes=n // L, workers_per_node=L)
    workload = _workload(step_s, total_bytes)
    return Measured(
        cluster,
        dataclasses.replace(workload, compressed=_compressed(forms, coding_s, workload)),
        lines,
        step_s,
        exchange_s,
        codec_s,
        coding_s,
    )


def _workload(step_s: dict[str, np.ndarray], total_bytes: int) -> Workload:
    forward_s, gradient_s, optimizer_s, combine_s = (
        float(np.median(step_s[part])) for part in ("forward", "gradient", "optimizer", "combine")
    )
    return Workload(
        forward_s,
        (max(0.0, gradient_s - forward_s),),
        (float(total_bytes),),
        optimizer_s,
        combine_s,
        calibrate.fit_jitter(calibrate.own_variation(step_s["gradient"])),
    )


def _compressed(forms: Sequence[Form], coding_s: dict[str, np.ndarray], workload: Workload) -> tuple[Compressed, ...]:
    """What a compressed method's update takes beyond the optimizer, and the combining of exact messages, which the model adds."""
    found = []
    for form in forms:
        topology = form.setup.topology
        known_s = workload.optimizer_s + (workload.combine_s if topology else 0.0)
        found.append(
            Compressed(
                form.name,
                form.setup.workers.num_workers,
                topology.name if topology else "",
                form.ratio,
                max(0.0, float(np.median(coding_s[form.name])) - known_s),
                form.latencies,
            )
        )
    return tuple(found)
