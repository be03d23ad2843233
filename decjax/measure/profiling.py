"""Measurement of the inputs of `decjax.costmodel`: a worker's step, exchanges between workers, codecs, and compressed methods.

Actions are timed in rounds, one after the other in an order that rotates, so that other load on the machines affects all of them
alike; results are medians over rounds. All workers wait for each other before an action and start it together, so that those that
share cores do so as in training. The time of an exchange is that of the slowest worker. The time of other actions lies between the
mean over workers and the slowest one's; `fit.own_share` places it, from gradients that are also timed in a row, without waiting.

Exchanges run through `mesh.Axis`, in as many messages as the model has buckets, scaled to the total size in question. Their time is
that of the whole exchange, so the workload of the profile has a single bucket.

    shift       worker i → i + 1, around a ring
    pair        i ↔ i XOR 1; with two workers the only kind
    all-reduce  the mean over all workers

Between nodes, shifts and pairs use one worker per node, so that no two messages share a NIC; inside a node they use all workers.

Where training sends from a separate thread, the exchange of the model is also timed while a gradient is computed, in the parts in which
training sends it: both need the same cores, so it takes longer.

Gossip and compressed methods are timed without their messages (`program.jaxpr.silent`): everything that training does after the
gradient, by its engine. The time beyond the optimizer's is combining and coding. The time of the messages follows from their bytes.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs, reduce, registry
from decjax import config as config_lib
from decjax.costmodel import Cluster, Compressed, Link, Workload, fit
from decjax.errors import ConfigError
from decjax.gossip import rounds as rounds_lib
from decjax.measure import timing
from decjax.measure.timing import Action, TimedExchange
from decjax.program import jaxpr
from decjax.train import engine
from decjax.train.trainer import Trainer

LEAST_BYTES = 2**20  # of the largest message: the time of smaller ones is mostly latency
SIZES, RATIO = 3, 4  # number of message sizes, and each one ÷ the one before; much smaller ones would fit in a switch's buffers

BATCHES = 16  # that take turns: those of translation differ in shape, and so in time
PHASES = 64  # how many of the last steps of a compressed method are searched for phases
GOSSIP = {"method": "decentralized", "mixer": "exact"}
CODECS = ("bfloat16", "int8")  # few, since each takes seconds to compile


class Measured(NamedTuple):
    """Measurements, times in seconds; the same in every process.

    Attributes:
        cluster: fitted to the exchanges and codecs.
        workload: one worker's step; its jitter is how the workers' times varied against each other.
        lines: latency and bandwidth of every (kind, scope) of exchange.
        step_s: times of "forward", "gradient" and "optimizer" on each worker, [N, rounds or more]; of "in a row", gradients without
            waiting in between, [N, rounds · length of a row].
        exchange_s: times of the exchanges on the slowest worker, [rounds].
        codec_s: times of encoding and decoding on each worker, [N, rounds], by codec.
        coding_s: times of updates of "gossip" and compressed methods without messages, on each worker, [N, rounds], by name.
        beside_s: times of an exchange of the model while a gradient is computed, on the slowest worker, [rounds]; empty without a thread.
    """

    cluster: Cluster
    workload: Workload
    lines: dict[tuple[str, str], Link]
    step_s: dict[str, np.ndarray]
    exchange_s: dict[TimedExchange, np.ndarray]
    codec_s: dict[str, np.ndarray]
    coding_s: dict[str, np.ndarray]
    beside_s: np.ndarray


def check(spec: config_lib.RunSpec) -> None:
    """Raise a ConfigError unless a run has at least two workers of one device each, with the whole model; `workers` may be 0."""
    if spec.simulate:
        raise ConfigError(
            "simulate=True: simulated workers send nothing that could be timed; leave it out, and use two or more devices"
        )
    if spec.devices_of_worker > 1:
        raise ConfigError(
            f"stages={spec.pipeline.stages}, tensor={spec.tensor}, fsdp={spec.fsdp}: only workers of one device can be measured; "
            "leave them out"
        )
    if spec.trait("source", "divided"):
        raise ConfigError("divided tables: only workers that each hold the whole model can be measured; leave config.source out")
    if spec.workers == 1 or jax.device_count() == 1:
        raise ConfigError(
            f"workers={spec.workers or 'auto'}, devices={jax.device_count()}: an exchange is timed between at "
            "least two workers, each on a device of its own; JAX_PLATFORMS=cpu makes devices of CPU threads"
        )


def prepare(spec: config_lib.RunSpec) -> Trainer:
    """Return a trainer with the model, data, optimizer and workers of a run, to be measured; the run's method does not matter.

    Raises:
        ConfigError: if the run has nothing to time, or there are too few devices, or too little memory or data.
    """
    check(spec)
    optimizer = spec.optimizer or config_lib.Choice("adamw", spec.method.options)  # A method may be one itself.
    local = config_lib.Choice("local", {})
    return Trainer(spec.replace(method=local, optimizer=optimizer, mixer=None, topology=None, reducer=None, engine="auto"))


# -- Timed actions ----------------------------------------------------------------------------------------------------


def step_actions(trainer: Trainer) -> dict[str, Action]:
    """Return the parts of a training step, "forward", "gradient" and "optimizer", each a separate program on all workers."""
    workers, key = trainer.workers, jax.random.key(trainer.spec.seed)
    state, batches = trainer.init(), [trainer.batch(step) for step in range(BATCHES)]

    task, source = trainer.setup.task, trainer.step_parts
    forward = workers.jit(lambda params, variables, batch: task.loss(params, variables, batch, key)[0], (0, 0, 0))
    gradient = workers.jit(lambda params, variables, batch: source.gradient(params, variables, batch, key)[:2], (0, 0, 0))
    optimize = workers.jit(_silent_update(trainer), (0, 0), donate_argnums=(0,))
    params = jax.tree.map(jnp.copy, state.params)
    variables = jax.tree.map(jnp.copy, state.source)
    shapes = {tuple(x.shape for x in jax.tree.leaves(batch)): batch for batch in batches}
    for batch in shapes.values():  # Each is compiled here, so that no round compiles.
        forward(params, variables, batch)
    grads = [gradient(params, variables, batch)[1] for batch in shapes.values()][-1]
    turns = itertools.cycle(batches)

    def optimizer():
        nonlocal state
        state = optimize(state, grads)  # As in training, the new state reuses the memory of the old one.
        return state

    return {
        "forward": lambda: forward(params, variables, next(turns)),
        "gradient": lambda: gradient(params, variables, next(turns)),
        "optimizer": optimizer,
    }


def codec_actions(trainer: Trainer) -> dict[str, Action]:
    """Return the encoding and decoding of the model's buckets, by the codec's name."""
    workers = trainer.workers
    vectors = [
        workers.build(lambda worker, size=bucket.size: np.linspace(-1, 1, size, dtype=np.float32))
        for bucket in timing.layout(trainer).buckets
    ]

    def code(codec, x_P):
        key = jax.random.key(0) if codec.random else None
        message = codec.encode(x_P, codec.init(x_P.shape, x_P.dtype), key)
        message = jax.lax.optimization_barrier(message)  # As if sent and received: the compiler must not simplify across it.
        return codec.decode(message, x_P.shape, x_P.dtype)

    programs = {
        name: workers.jit(lambda vectors, codec=codecs.make(name): [code(codec, x_P) for x_P in vectors], (0,)) for name in CODECS
    }
    return {name: lambda run=run: run(vectors) for name, run in programs.items()}


# -- Compressed methods -----------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """A compressed method to be measured.

    Attributes:
        name: its name in the profile.
        trainer: a trainer with this method.
        phases: those of its last steps, when it compresses.
        ratio: bytes sent ÷ those of the uncompressed method; see `costmodel.Compressed`.
        latencies: latency of its collectives ÷ that of one all-reduce; see `costmodel.Compressed`.
    """

    name: str
    trainer: Trainer
    phases: tuple[int, ...]
    ratio: float
    latencies: float


def form(name: str, spec: config_lib.RunSpec) -> Form:
    """Return a compressed method to be measured, with its message sizes from the bytes that it declares and the collectives of its update.

    Args:
        name: its name in the profile.
        spec: a run of gossip in order "awc", or of all-reduce.

    Raises:
        ConfigError: if the spec describes no possible run, or a method of another kind.
    """
    trainer = Trainer(spec)
    method, workers, topology, last = trainer.method, trainer.workers, trainer.setup.topology, spec.steps
    of_steps = {method.phase(step) for step in range(max(last // 2, last - PHASES), last)}
    phases = tuple(sorted(phase for phase in of_steps if phase is not None))
    is_averaging = spec.reducer is not None and reduce.SILENT not in of_steps
    if None in of_steps or not (topology or is_averaging) or bool(method.exchange) != bool(topology):
        raise ConfigError(
            f"{name!r} cannot be measured as a compressed method: it must be gossip in order 'awc', or an all-reduce "
            "that is not stale, with phases that do not depend on data"
        )
    params, layout, n = timing.shapes(trainer), timing.layout(trainer), workers.num_workers
    sent = np.mean([method.num_bytes(params, phase).mean() for phase in phases])
    if topology:
        exact = np.mean([rounds_lib.sent_bytes(round_, layout).mean() for round_ in topology.rounds])
        return Form(name, trainer, phases, float(sent / exact), 1.0)
    sums, like = [], trainer.abstract
    workers.eval_shape(_silent_update(trainer, phases[0], sums), (0, 0), like, like.params)
    return Form(name, trainer, phases, float(sent / (2 * (n - 1) / n * layout.num_bytes)), sum(sums))


def _silent(trainer: Trainer, fn: Callable, sums: list[float] | None = None) -> Callable:
    """Return a function of one worker without its messages; see `jaxpr.silent`."""
    return jaxpr.silent(fn, lambda: trainer.workers.axis.index, sums)


def _silent_update(trainer: Trainer, phase: int | None = None, sums: list[float] | None = None) -> Callable:
    """Return all that a worker computes after its gradient, without its messages."""
    return _silent(trainer, functools.partial(trainer.step_parts.update, phase=phase), sums)


def gossip(trainer: Trainer) -> Form:
    """Return uncompressed gossip, in order "awc" over one neighbor, with the model, data and optimizer of the run."""
    method, mixer = (config_lib.Choice(name, registry.complete(kind, name, {})) for kind, name in GOSSIP.items())
    spec = trainer.spec.replace(method=method, mixer=mixer, topology="one_peer_exponential")
    return Form("gossip", Trainer(spec), (0,), 1.0, 1.0)


def coding_actions(forms: Sequence[Form]) -> dict[tuple[str, int], Action]:
    """Return the updates of methods without their messages, as training runs them, by (name, phase)."""
    actions = {}
    for name, trainer, phases, *_ in forms:
        state = [trainer.init()]
        grads = jax.tree.map(lambda x: 1e-3 * x, state[0].params)
        messages = functools.partial(_silent, trainer)
        for phase in phases:
            run = engine.compile_update(trainer.step_parts, trainer.spec.engine, phase, state[0], grads, messages)

            def update(run=run, state=state, grads=grads):
                state[0] = run(state[0], grads)
                return state[0]

            actions[name, phase] = update
    return actions


# -- Results ----------------------------------------------------------------------------------------------------------


def sizes_up_to_model(trainer: Trainer) -> tuple[int, ...]:
    """Return the sizes of exchanges to time, in bytes, ascending; the largest is the model's, or 1 MiB for a smaller model."""
    largest = max(timing.layout(trainer).num_bytes, LEAST_BYTES)
    return tuple(largest // RATIO**k for k in reversed(range(SIZES)))


def measure(
    trainer: Trainer,
    *,
    name: str,
    sizes: Sequence[int] = (),
    forms: Sequence[Form] = (),
    seconds: float = 60.0,
    rounds: int | None = None,
    note: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """Measure a worker's step, exchanges and codecs, and fit a profile to them. A collective.

    Args:
        trainer: from `prepare`.
        name: of the cluster, for the profile.
        sizes: of exchanges, in bytes; empty: up to the model's size.
        forms: compressed methods, from `form`.
        seconds: about how long to measure, without compilation.
        rounds: how many rounds; None: as many as fit in `seconds`.
        note: called with (rounds done, rounds to do) after each round.

    Raises:
        ValueError: if larger exchanges do not take longer, so that no bandwidth can be fitted.
    """
    workers, watch = trainer.workers, timing.Stopwatch(trainer.workers)
    steps, codings = step_actions(trainer), codec_actions(trainer)
    exchanged, forms = timing.exchange_actions(trainer, sizes or sizes_up_to_model(trainer)), [gossip(trainer), *forms]
    # Elsewhere a compiler overlaps both, and devices of one process could occupy all threads with waiting.
    overlapped = timing.OverlappedExchange(trainer, steps["gradient"]) if workers.needs_sender else None
    actions = {**steps, **exchanged, **codings, **coding_actions(forms), **({"overlapped": overlapped} if overlapped else {})}
    times_s = timing.take_rounds(watch, actions, seconds, rounds, note)
    step_s, codec_s = {part: times_s[part] for part in (*steps, "in a row")}, {codec: times_s[codec] for codec in codings}
    share = _own_share(step_s, times_s["optimizer"].shape[1])
    coding_s = {form.name: np.mean([times_s[form.name, phase] for phase in form.phases], axis=0) for form in forms}
    exchange_s = {what: times_s[what].max(axis=0) for what in exchanged}
    total_bytes = timing.layout(trainer).num_bytes
    measurements = [
        fit.Measurement(what.kind, what.num_bytes, float(np.median(slowest_s)), what.scope, what.num_workers)
        for what, slowest_s in exchange_s.items()
    ]
    lines = {(m.kind, m.scope): line for m in measurements if (line := fit.line_of(measurements, m.kind, m.scope)) is not None}
    measurements += [
        fit.Measurement("codec", total_bytes, _typical_s(both_s, share), codec=codec) for codec, both_s in codec_s.items()
    ]
    num_nodes = workers.num_workers // workers.local_size
    cluster = fit.fit_cluster(measurements, name=name, num_nodes=num_nodes, workers_per_node=workers.local_size)
    beside_s = watch.gather(overlapped.exchange_s[-len(times_s["overlapped"][0]) :]).max(axis=0) if overlapped else np.zeros(0)
    workload = _workload(step_s, total_bytes, share, _typical_s(coding_s[forms[0].name], share))
    if overlapped:
        line = lines[overlapped.kind, overlapped.scope]
        more_s = float(np.median(beside_s)) - line.latency_s - total_bytes / line.bandwidth_Bps
        workload = dataclasses.replace(workload, beside_s=max(0.0, more_s))
    compressed = tuple(_compressed(form, _typical_s(coding_s[form.name], share), workload) for form in forms[1:])
    workload = dataclasses.replace(workload, compressed=compressed)
    return Measured(cluster, workload, lines, step_s, exchange_s, codec_s, coding_s, beside_s)


def _own_share(step_s: dict[str, np.ndarray], rounds: int) -> float:
    """κ of `fit.own_share` from gradients that started together, and from as many in a row in each round."""
    rows_NxRxK = step_s["in a row"].reshape(len(step_s["in a row"]), rounds, -1)
    pace_s = np.mean([fit.pace(rows_NxRxK[:, r]) for r in range(rounds)])
    return fit.own_share(step_s["gradient"], float(pace_s))


def _typical_s(times_NxR: np.ndarray, share: float) -> float:
    """Return the median over steps of the times of workers that keep only a `share` of their lead over the slowest."""
    return float(np.median(fit.shared(times_NxR, share).mean(axis=0)))


def _workload(step_s: dict[str, np.ndarray], total_bytes: int, share: float, gossip_s: float) -> Workload:
    """Return the workload of a step; combining is the part of gossip's `gossip_s` seconds beyond the optimizer."""
    forward_s, gradient_s, optimizer_s = (_typical_s(step_s[part], share) for part in ("forward", "gradient", "optimizer"))
    combine_s = max(0.0, gossip_s - optimizer_s)
    backward_s, jitter = max(0.0, gradient_s - forward_s), fit.fit_jitter(fit.shared(step_s["gradient"], share))
    return Workload(forward_s, (backward_s,), (float(total_bytes),), optimizer_s, combine_s, jitter)


def _compressed(form: Form, update_s: float, workload: Workload) -> Compressed:
    """Return a compressed method for the profile; the cost model adds the time of the optimizer and of combining."""
    topology, num_workers = form.trainer.setup.topology, form.trainer.workers.num_workers
    coding_s = max(0.0, update_s - workload.optimizer_s - (workload.combine_s if topology else 0.0))
    return Compressed(form.name, num_workers, topology.name if topology else "", form.ratio, coding_s, form.latencies)
