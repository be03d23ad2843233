"""Builds the parts of a run from a `RunSpec`: for the checks of `resolve` without devices, and for `build` on devices."""

from collections.abc import Callable, Sequence
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import codecs, mesh, optim, pipeline, reduce, registry, tasks
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.config.spec import Averaging, Choice, RunSpec
from decjax.errors import ConfigError
from decjax.optim.method import Method
from decjax.pipeline import autoencoder, sums
from decjax.pipeline import source as source_lib

SAMPLED = 16  # tokens for each value of an activation, to find principal directions


class Setup(NamedTuple):
    """The parts of a run.

    Attributes:
        spec: the run as plain values.
        workers: the workers and their devices.
        task: the model's loss, data and metrics.
        source: how a worker's gradient is computed.
        method: what is done with gradients and parameters.
        learning_rate: by step.
        topology: the graph of gossip; None for methods without one.
        data: the loaded data; None before it is loaded.
    """

    spec: RunSpec
    workers: mesh.Workers
    task: tasks.Task
    source: source_lib.Source
    method: Method
    learning_rate: optax.Schedule
    topology: topology_lib.Topology | None
    data: tasks.Data | None = None

    def start(self, key: jax.Array) -> Any:
        """The initial parameters of one model; with stages, leaves [S, …]. They are a function of the key, the seed and the data."""
        params, division = self.task.init(key), self.source.division
        if self.data is not None and division and self.spec.pipeline.autoencoder_init == "pca":
            params = autoencoder.fit(division.parts, params, division.layers, jnp.asarray(self._sample(self.data)))
        return self.source.split(params)

    def _sample(self, data: tasks.Data) -> np.ndarray:
        """Batches of tokens [P, B, T + 1] in which there are `SAMPLED` times as many tokens as activations have values, from as many
        workers as possible: every process chooses the same."""
        assert self.source.division is not None
        batch, N = self.task.examples(self.spec.each), self.spec.workers
        B, T1 = batch.shape
        width = self.source.division.activation(1, 1).shape[-1]
        P = -(-SAMPLED * width // (B * (T1 - 1)))
        return np.stack([data.batch(k * max(1, N // P) % N, k // N) for k in range(P)])

    def stacked(self, params: Any) -> Any:
        """The parameters of all workers, [N, …], from those of one model: a copy for each, or its part. Not jitted."""
        if self.source.deal:
            return self.source.deal(params)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.workers.num_workers, *jnp.shape(x))), params)


def build(spec: RunSpec, devices: Sequence[jax.Device] | None = None) -> Setup:  # pyright: ignore[reportInvalidTypeForm]
    """The parts of a run, with its workers placed on devices and its data loaded.

    Args:
        spec: of the run, from `resolve`.
        devices: for the workers, unless they are simulated; None: `jax.devices()`.

    Raises:
        ConfigError: if there are too few devices, or the data cannot be read or are too few.
    """
    try:
        setup = assemble(spec, functools.partial(mesh.make_workers, simulate=spec.simulate, devices=devices))
        trace_start(setup)
        return setup._replace(data=setup.task.load(spec.workers, spec.each, spec.seed))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def assemble(spec: RunSpec, make_workers: Callable[..., mesh.Workers]) -> Setup:
    """The parts of a run, without its data; `make_workers` is `mesh.make_workers` or like it, called with the layout's sizes."""
    product = {"product": sums.product(sums.coded(registry.make("codec", spec.tensor_codec)))} if spec.tensor_codec else {}
    model = _make("model", spec.model, divide=mesh.divide, **product) if spec.model else None
    division, given = None, spec.pipeline
    if given.stages > 1:
        division = pipeline.divide(
            getattr(model, "parts", None),
            given.stages,
            chunks=given.chunks,
            layers=given.layer_counts,
            autoencoder=given.autoencoder,
            fused_embedding=given.fused_embedding,
        )
    task = _make("task", spec.task, model=division.complete(model) if division else model)
    workers = make_workers(spec.workers, local_size=spec.local_size, stages=given.stages, tensor=spec.tensor, divided=task.divided)
    source = make_source(spec, task, division, axis=workers.axis)
    learning_rate = _make("schedule", spec.schedule, steps=spec.steps)
    method, topology = _method(spec, workers, source, learning_rate, task.units)
    return Setup(spec, workers, task, source, method, learning_rate, topology)


def on_paper(spec: RunSpec) -> Setup:
    """The parts of a run without its data, with simulated workers, so that no devices are needed."""
    return assemble(spec if spec.simulate else spec._replace(tensor=1), mesh.simulated_workers)


def _make(kind: str, choice: Choice, **context: Any) -> Any:
    return registry.make(kind, choice.name, **context, **choice.options)


# -- Where gradients come from ----------------------------------------------------------------------------------------


def boundary_codecs(spec: RunSpec) -> dict[str, codecs.Codec]:
    """The codecs of messages between stages: "backward" of gradients, "forward" of activations; both, one or none."""
    given = spec.boundary or {}
    return {kind: registry.make("codec", given[kind]) for kind in ("backward", "forward") if given.get(kind)}


def make_source(
    spec: RunSpec,
    task: tasks.Task,
    division: pipeline.Division | None,
    watch: Callable[[pipeline.Boundary], pipeline.Boundary] = lambda boundary: boundary,
    axis: mesh.Axis = mesh.WORKERS,
) -> source_lib.Source:
    """The gradient source of a spec; `watch` is applied to its boundary, as `pipeline.probed` is; `axis` is that of the workers."""
    source_lib.check_microbatches(spec.pipeline.microbatches, spec.each)
    if spec.tables is not None:
        return pipeline.of_tables(task.lookups, axis, spec.workers, spec.each, **spec.tables)
    if not division:
        source = source_lib.whole(task.loss, task.variables, spec.pipeline.microbatches, task.weight)
        return source._replace(gradient=mesh.one_by_one(source.gradient)) if spec.simulate else source
    made = boundary_codecs(spec)
    boundary = watch(pipeline.coded(**{**(spec.boundary or {}), **made})) if made else None
    return source_lib.of_division(
        division,
        schedule=spec.pipeline.schedule,
        microbatches=spec.pipeline.microbatches,
        remat=spec.pipeline.remat,
        batch=task.examples(spec.each),
        boundary=boundary,
    )


# -- What happens to them ---------------------------------------------------------------------------------------------


def _method(
    spec: RunSpec,
    workers: mesh.Workers,
    source: source_lib.Source,
    learning_rate: optax.Schedule,
    units: Sequence[tuple[str, int]] = (),
) -> tuple[Method, topology_lib.Topology | None]:
    channel = Channel(workers.axis, spec.bucket_bytes, spec.seed, pipeline.tied_tables(source.division))
    peak = spec.schedule.options.get("learning_rate", 1.0)
    clip = optim.clip_by_global_norm(spec.clip_norm, source.norm) if spec.clip_norm else optax.identity()
    context: dict[str, Any] = dict(
        num_workers=spec.workers,
        learning_rate=learning_rate,
        clip=clip,
        share=lambda step: learning_rate(step) / peak,
        norm=source.norm,
        channel=channel,
        units=units,
    )
    if spec.optimizer:
        optimizer = _make("optimizer", spec.optimizer, learning_rate=learning_rate)
        context["inner"] = _late(optax.chain(clip, optimizer) if spec.clip_norm else optimizer, spec, source.division)
    topology = None
    if spec.mixer:
        assert spec.topology is not None
        topology = make_topology(spec.topology, spec.workers, spec.local_size)
        mixer = _make("mixer", spec.mixer, topology=topology, channel=channel)
        context["mixer"] = mixer._replace(name=spec.mixer.name)
    if spec.averaging:
        reducer = make_reducer(spec.averaging, channel, spec.pipeline.stages, source.division)
        context["reducer"] = reducer if spec.tables is None else pipeline.with_own_tables(reducer)
    method = _make("method", spec.method, **context)
    return _with_bytes(method, source.num_bytes + (norm_bytes(spec) if spec.tables is not None else 0)), topology


def norm_bytes(spec: RunSpec) -> float:
    """Bytes that a worker sends to find the norm of a gradient of which it holds a part of the tables, where that is clipped."""
    return mesh.mean_bytes(1, jnp.float32, spec.workers) if spec.clip_norm else 0.0


def _with_bytes(method: Method, more: float) -> Method:
    """The method with what the gradient source sends counted besides."""
    own = method.num_bytes
    return method._replace(num_bytes=lambda params, phase: own(params, phase) + more) if more else method


def _late(inner: optax.GradientTransformation, spec: RunSpec, division: pipeline.Division | None) -> optax.GradientTransformation:
    """The optimizer, given the late gradients of a pipeline whose stages do not wait, if the spec says so."""
    given = spec.pipeline
    if not given.delay:
        return inner
    if pipeline.tied_tables(division):
        raise ValueError(
            f"pipeline.delay={given.delay} with a tied table, whose two copies would change in different steps; use model.tied=False"
        )
    return optim.late_gradients(inner, given.stages, given.delay)


def make_topology(text: str, num_workers: int, local_size: int) -> topology_lib.Topology:
    """The topology of a text such as "base_k(k=3)"; graphs with an option for the size of a node get `local_size` by default."""
    name, options = registry.parse("topology", text)
    if local_size > 1:
        for option in {"local_size", "local"} & registry.part("topology", name).options.keys():
            options.setdefault(option, local_size)
    return topology_lib.make(name, num_workers, **options)


def make_reducer(
    given: Averaging, channel: Channel, num_stages: int = 1, division: pipeline.Division | None = None
) -> reduce.Reducer:
    """The reducer of a spec: the chosen one from step `start` on and in the first `stages` of a pipeline, elsewhere the exact mean.

    A tied table, which two stages hold, is averaged separately.
    """

    def compressor(channel):
        return _make("reducer", given.reducer, channel=channel)

    reducer = compressor(channel)
    if given.stages:
        reducer = reduce.first_stages(compressor, int(given.stages), num_stages, reduce.mean, channel)
    reducer = reduce.start_at(reducer, given.start, reduce.mean(channel))
    return pipeline.with_tied_table(reducer, division, channel) if division else reducer


# -- Before the first step --------------------------------------------------------------------------------------------


def trace_start(setup: Setup) -> None:
    """Traces the initialization of a run without computing it, so that parts can raise errors about shapes and message sizes."""
    workers, method = setup.workers, setup.method
    params = jax.eval_shape(lambda: setup.stacked(setup.start(jax.random.key(0))))
    for init in (method.tx.init, setup.source.init):
        workers.eval_shape(init, (0,), params)
    method.num_bytes(workers.one_device(params), method.phase(setup.spec.steps - 1))


def check_memory(setup: Setup) -> None:
    """Raises a ConfigError if the workers are on CPU devices and the machine's memory cannot hold their state."""
    workers = setup.workers
    if not (workers.on_cpu or (workers.simulated and jax.default_backend() == "cpu")):
        return
    per_worker = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(setup.start, jax.random.key(0))))
    needed, there = len(workers.own) * per_worker * COPIES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ConfigError(
            f"{len(workers.own)} workers of {per_worker / 4e6:.3g}M parameters need at least {needed / 1e9:.3g} GB "
            f"for parameters, moments and gradients, and this machine has {there / 1e9:.3g} GB; use "
            "fewer workers or a smaller model"
        )


COPIES = 3  # of the parameters that a worker holds at least: themselves, a gradient, and the state of most optimizers
