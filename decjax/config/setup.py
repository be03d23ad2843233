"""The parts of a run: made once from a `RunSpec`, without devices, then placed on them."""

from collections.abc import Callable, Sequence
import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import codecs, mesh, optim, pipeline, reduce, registry, tasks
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.config.spec import Averaging, Choice, RunSpec
from decjax.errors import ConfigError, config_errors
from decjax.optim.method import Method
from decjax.pipeline import autoencoder
from decjax.pipeline import source as source_lib
from decjax.registry import of_field
from decjax.typing import DType

SAMPLED = 16  # tokens for each value of an activation, to find principal directions
COPIES = 3  # of its parameters that a worker holds at least: themselves, a gradient, and the state of most optimizers


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of a run.

    Attributes:
        spec: the run as plain values.
        workers: the workers; before `place`, simulated ones.
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

    @classmethod
    def of(cls, spec: RunSpec, axis: mesh.Axis = mesh.MAPPED) -> "Setup":
        """Make the parts, which exchange along `axis`; a ValueError if they do not fit each other."""
        product = {"product": registry.make("product", "coded", codec=spec.tensor_codec)} if spec.tensor_codec else {}
        model = _make("model", spec.model, divide=mesh.divide, **product) if spec.model else None
        division, stages = None, spec.pipeline.stages
        if stages > 1:
            division = pipeline.divide(
                getattr(model, "parts", None),
                stages,
                chunks=spec.pipeline.chunks,
                layers=spec.pipeline.layer_counts,
                autoencoder=spec.pipeline.autoencoder,
                fused_embedding=spec.pipeline.fused_embedding,
            )
        task = _make("task", spec.task, model=division.complete(model) if division and model else model)
        workers = mesh.simulated_workers(spec.workers, local_size=spec.local_size, stages=stages, divided=task.divided)
        source = make_source(spec, task, division, axis=axis)
        learning_rate = _make("schedule", spec.schedule, steps=spec.steps)
        method, topology = _method(spec, axis, source, learning_rate, task.units)
        return cls(spec, workers, task, source, method, learning_rate, topology)

    def place(self, devices: Sequence[Any] | None = None) -> "Setup":
        """Return the setup with its workers on devices (None: `jax.devices()`), unless they are simulated, and its data loaded.

        Raises:
            ConfigError: if there are too few devices, or the data cannot be read or are too few.
        """
        with config_errors():
            spec = self.spec
            workers = mesh.make_workers(
                spec.workers,
                local_size=spec.local_size,
                devices_per_worker=spec.fsdp,
                across_hosts=spec.across_hosts,
                stages=spec.pipeline.stages,
                tensor=spec.tensor,
                simulate=spec.simulate,
                devices=devices,
                divided=self.task.divided,
            )
            data = self.task.load(spec.workers, spec.batch_per_worker, spec.seed)
            setup = dataclasses.replace(self, workers=workers, data=data)
            if workers.divides:  # What the devices of a worker divide is not seen without them.
                setup.trace_start()
            return setup

    def trace_start(self) -> None:
        """Trace the initialization without computing it, so that parts can raise errors about shapes and message sizes."""
        params = jax.eval_shape(lambda: self.stacked(self.start(jax.random.key(0))))
        for init in (self.method.tx.init, self.source.init):
            self.workers.eval_shape(init, (0,), params)
        self.method.num_bytes(self.workers.one_device(params), self.method.phase(self.spec.steps - 1))

    def start(self, key: jax.Array) -> optax.Params:
        """Return the initial parameters of one model; with stages, leaves [S, …]. They depend on the key, the seed and the data."""
        params, division = self.task.init(key), self.source.division
        if self.data is not None and division and self.spec.pipeline.autoencoder_init == "pca":
            params = autoencoder.fit(division.parts, params, division.layers, jnp.asarray(self._sample(self.data)))
        return self.source.split(params)

    def _sample(self, data: tasks.Data) -> np.ndarray:
        """Batches of tokens [P, B, T + 1] with `SAMPLED` times as many tokens as activations have values, from as many workers as
        possible: every process chooses the same."""
        assert self.source.division is not None
        batch, N = self.task.examples(self.spec.batch_per_worker), self.spec.workers
        B, T1 = batch.shape
        width = self.source.division.activation(1, 1).shape[-1]
        P = -(-SAMPLED * width // (B * (T1 - 1)))
        return np.stack([data.batch(k * max(1, N // P) % N, k // N) for k in range(P)])

    def stacked(self, params: optax.Params) -> optax.Params:
        """Return the parameters of all workers, [N, …], from those of one model: a copy for each, or its part. Not jitted."""
        return self.source.stacked(params, self.workers.num_workers)

    def check_memory(self) -> None:
        """Raise a ConfigError if the workers are on CPU devices and the machine's memory cannot hold their state."""
        workers = self.workers
        if not (workers.on_cpu or (workers.simulated and jax.default_backend() == "cpu")):
            return
        per_worker = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(self.start, jax.random.key(0))))
        needed, installed = len(workers.own) * per_worker * COPIES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > installed:
            raise ConfigError(
                f"{len(workers.own)} workers of {per_worker / 4e6:.3g}M parameters need at least {needed / 1e9:.3g} GB "
                f"for parameters, moments and gradients, and this machine has {installed / 1e9:.3g} GB; use fewer workers or a "
                "smaller model"
            )


def _make(kind: str, choice: Choice, **context: Any) -> Any:
    return registry.make(kind, choice.name, **context, **choice.options)


# -- Where gradients come from ----------------------------------------------------------------------------------------


def boundary_codecs(spec: RunSpec) -> dict[str, codecs.Codec]:
    """Return the codecs of messages between stages: "backward" of gradients, "forward" of activations; both, one or none."""
    chosen = {kind: getattr(spec.boundary, kind) for kind in ("backward", "forward")}
    return {kind: registry.make("codec", text) for kind, text in chosen.items() if text}


def boundary_ratios(spec: RunSpec, shape: tuple[int, int], dtype: DType) -> tuple[float, float]:
    """Return the bytes of messages between stages ÷ those of uncompressed ones, of gradients and of activations.

    Args:
        spec: of the run.
        shape: I×J of a message, with I the rows of a microbatch that one device sends.
        dtype: of the activations.
    """
    if narrow := spec.pipeline.autoencoder:
        return narrow / shape[1], narrow / shape[1]
    made = boundary_codecs(spec)
    shapes = dict.fromkeys(made, shape)
    if spec.boundary.reuse_indices:
        message = jax.eval_shape(lambda x: made["forward"].encode(x, (), None), jax.ShapeDtypeStruct(shape, jnp.float32))
        shapes["backward"] = message["where"].shape
    plain_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    ratios = {kind: codec.num_bytes(shapes[kind], jnp.float32) / plain_bytes for kind, codec in made.items()}
    return ratios.get("backward", 1.0), ratios.get("forward", 1.0)


def make_source(
    spec: RunSpec,
    task: tasks.Task,
    division: pipeline.Division | None,
    watch: Callable[[pipeline.Boundary], pipeline.Boundary] = lambda boundary: boundary,
    axis: mesh.Axis = mesh.MAPPED,
) -> source_lib.Source:
    """Return the gradient source of a spec; `watch` is applied to its boundary, such as `contrib.probe.Probed`."""
    B, M = spec.batch_per_worker, spec.pipeline.microbatches
    pipeline.check_microbatches(M, B)
    if spec.source:
        return _make("source", spec.source, task=task, axis=axis, num_workers=spec.workers, batch_size=B, clips=spec.clip_norm > 0)
    if not division:
        source = source_lib.Whole(task.loss, task.variables, M, task.weight)
        return dataclasses.replace(source, around=mesh.one_by_one) if spec.simulate else source
    boundary = (
        watch(pipeline.coded(**{**dataclasses.asdict(spec.boundary), "backward": None, "forward": None, **made}))
        if (made := boundary_codecs(spec))
        else pipeline.Boundary()
    )
    return source_lib.Staged(
        division,
        schedule=spec.pipeline.schedule,
        microbatches=M,
        remat=spec.pipeline.remat,
        batch=task.examples(B),
        boundary=boundary,
    )


# -- What happens to them ---------------------------------------------------------------------------------------------


def _method(
    spec: RunSpec, axis: mesh.Axis, source: source_lib.Source, learning_rate: optax.Schedule, units: Sequence[tuple[str, int]]
) -> tuple[Method, topology_lib.Topology | None]:
    narrow = None if spec.param_dtype == "float32" else spec.param_dtype
    channel = Channel(axis, spec.bucket_bytes, spec.seed, pipeline.tied_tables(source.division), narrow)
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
        context["mixer"] = _make("mixer", spec.mixer, topology=topology, channel=channel)
    if spec.reducer:
        reducer = make_reducer(spec.reducer, spec.averaging, channel, spec.pipeline.stages, source.division)
        context["reducer"] = source.averaging(reducer)
    method = _make("method", spec.method, **context)
    return _WithSource(method, source.num_bytes) if source.num_bytes else method, topology


class _WithSource(Method):
    """A method whose steps also count the bytes that the gradient source sends."""

    method: Method
    source_bytes: float

    init = of_field("method.init")
    update = of_field("method.update")
    phase = of_field("method.phase")
    communicator = of_field("method.communicator")
    tx = of_field("method.tx")

    @property
    def exchange(self):
        return self.method.exchange

    @property
    def view(self):
        return self.method.view

    def num_bytes(self, params, phase):
        return self.method.num_bytes(params, phase) + self.source_bytes


def _late(inner: optax.GradientTransformation, spec: RunSpec, division: pipeline.Division | None) -> optax.GradientTransformation:
    """The optimizer, given the late gradients of a pipeline whose stages do not wait, if the spec says so."""
    delay = spec.pipeline.delay
    if not delay:
        return inner
    if pipeline.tied_tables(division):
        raise ValueError(
            f"pipeline.delay={delay} with a tied table, whose two copies would change in different steps; use model.tied=False"
        )
    return registry.make("wrapper", "late", inner=inner, num_stages=spec.pipeline.stages, delay=delay)


def make_topology(text: str, num_workers: int, local_size: int) -> topology_lib.Topology:
    """Return the topology of a text such as "base_k(k=3)"; graphs with an option for the size of a node get `local_size` by default."""
    name, options = registry.parse("topology", text)
    if local_size > 1:
        for option in {"local_size", "local"} & registry.part("topology", name).options.keys():
            options.setdefault(option, local_size)
    return topology_lib.make(name, num_workers, **options)


def make_reducer(
    chosen: Choice, averaging: Averaging, channel: Channel, num_stages: int = 1, division: pipeline.Division | None = None
) -> reduce.Reducer:
    """Return the chosen reducer, used from step `start` on and in the first `stages` of a pipeline; elsewhere the exact mean is used.

    A tied table, which two stages hold, is averaged separately.
    """
    compressor = lambda channel: _make("reducer", chosen, channel=channel)
    reducer = compressor(channel)
    if averaging.stages:
        reducer = reduce.first_stages(compressor, int(averaging.stages), num_stages, reduce.mean, channel)
    reducer = reduce.start_at(reducer, averaging.start, reduce.mean(channel))
    return pipeline.with_tied_table(reducer, division, channel) if division else reducer
