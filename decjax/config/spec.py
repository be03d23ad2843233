"""A run as plain values: `RunSpec` and its sections, which declare every field of a config once.

A field is one line: its name, type, range (`decjax.options`) and default. From it follow the config's section, the check, the key of
the shorthand (the field's own name, or `ShorthandKey`), the list of `launch.parts config` and the contents of config.json.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import inspect
import json
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from decjax import buckets, registry, schedules
from decjax.options import Count, Natural, NonNegative, Range, Seed

if TYPE_CHECKING:
    from decjax.config.setup import Setup

VERSION = 1  # of config.json; raised when a field changes its meaning
SIMULATED_WORKERS = 8  # on a lone accelerator; without one, the number of forced CPU devices
Engine = Literal["auto", "fused", "split"]  # how the exchange of a step is dispatched, see `train.engine`
CHOICES = ("model", "schedule", "optimizer", "method", "mixer", "source")  # sections with a part's name and options


class ShorthandKey(NamedTuple):
    """The shorthand key of a field whose own name is taken or too long; empty: it has none."""

    name: str


class Choice(NamedTuple):
    """A chosen part.

    Attributes:
        name: of the part.
        options: all of them, by name.
    """

    name: str
    options: Mapping[str, Any]

    @property
    def section(self) -> dict[str, Any]:
        """The part's section of a config: its name and options."""
        return {"name": self.name, **self.options}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaging:
    """Further fields of the section `reducer`, for reducers that compress: when and where they are used.

    Attributes:
        start: steps of the exact mean before the reducer is used.
        stages: how many of the first stages of a pipeline compress; empty: all; "auto": see `decjax.contrib.selective`.
        cluster: path of the cluster's profile for "auto"; empty: none.
    """

    start: Natural = 0
    stages: Annotated[str, ShorthandKey("compressed")] = ""
    cluster: Annotated[str, ShorthandKey("")] = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """The section `pipeline`: how a worker's model is divided into stages, and the schedule by which they compute.

    Attributes:
        stages: S; 1: no pipeline.
        microbatches: M, parts of a worker's batch.
        schedule: which stage computes what when; see `schedules.make`.
        chunks: C, virtual stages per stage.
        layers: layers of each virtual stage, such as "3,4,4,3"; empty: equally many.
        remat: recompute a stage's forward pass in its backward pass.
        autoencoder: R, the width of messages between stages; 0: that of the model.
        autoencoder_init: which R directions it keeps at the start: random ones, or the principal ones of activations.
        fused_embedding: average a tied embedding over both stages and all workers at once.
        delay: δ; stage s of S applies its gradients δ(S − 1 − s) steps late, as if stages did not wait for each other; 0: no delay.
    """

    stages: Annotated[int, Range(1, 2**10)] = 1
    microbatches: Annotated[int, Range(1, 2**12)] = 1
    schedule: schedules.Name = "1f1b"
    chunks: Annotated[int, Range(1, 2**8)] = 1
    layers: Annotated[str, ShorthandKey("")] = ""
    remat: bool = False
    autoencoder: Annotated[int, Range(0, 2**20)] = 0
    autoencoder_init: Literal["random", "pca"] = "random"
    fused_embedding: Annotated[bool, ShorthandKey("fused")] = False
    delay: Annotated[int, Range(0, 2**10)] = 0

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """The field `layers` as numbers; a ValueError if it cannot be read."""
        try:
            return tuple(int(layers) for layers in self.layers.split(",") if layers)
        except ValueError:
            raise ValueError(
                f"pipeline.layers={self.layers!r} must read like '3,4,4,3', one number for each virtual stage"
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMessages:
    """The section `boundary`: compressed messages between pipeline stages; see `pipeline.boundary`.

    Attributes:
        backward: codec of the gradients; empty: uncompressed.
        when: which gradients are compressed: those that a stage waits for in its cool-down, or all.
        error: what is done with the compression error of gradients.
        forward: codec of the activations; empty: uncompressed.
        forward_error: what is done with the compression error of activations.
        slots: samples that "samples" stores.
        reuse_indices: send gradients only at the positions that top-k chose for the activations.
    """

    backward: str = ""
    when: Annotated[Literal["epilogue", "always"], ShorthandKey("")] = "epilogue"
    error: Annotated[Literal["carry", "flush", "reset", "ef21", "none"], ShorthandKey("")] = "carry"
    forward: str = ""
    forward_error: Annotated[Literal["none", "carry", "reset", "ef21", "samples"], ShorthandKey("")] = "none"
    slots: Annotated[int, Range(0, 2**20), ShorthandKey("")] = 0
    reuse_indices: Annotated[bool, ShorthandKey("")] = False

    def __bool__(self) -> bool:
        return bool(self.backward or self.forward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSection:
    """The section `eval`: when and how the model is evaluated.

    Attributes:
        every: steps between two evaluations.
        num_windows: validation examples; 0: all. The last evaluation uses all.
        batch_size: examples of a forward pass.
        local: also evaluate each worker's own model, N times the work. The last evaluation always does.
    """

    every: Count = 500
    num_windows: Natural = 128
    batch_size: Annotated[int, Range(1, 2**20)] = 8
    local: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The section `checkpoint`: when checkpoints are saved.

    Attributes:
        every: steps between two checkpoints.
        keep: how many of the newest are kept.
    """

    every: Count = 500
    keep: Count = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elastic:
    """The section `elastic`: when a run that is started with `--elastic` continues without a worker.

    Attributes:
        heartbeat_s: seconds of silence after which a worker is removed; all timeouts follow from it.
        min_workers: the fewest that continue; with fewer the others wait.
        spares: keep one process per host waiting to take a place at once, with everything loaded and compiled; it needs memory for
            the programs, but not for a model.
        encrypt: encrypt messages between workers, for networks on which others can listen. Messages to and from the coordinator
            always are.
    """

    heartbeat_s: Annotated[float, Range(0.2, 86400)] = 5.0
    min_workers: Annotated[int, Range(1, 2**16)] = 1
    spares: bool = True
    encrypt: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run as plain values: all that a config says, checked.

    Attributes:
        seed: PRNG seed.
        steps: length of the run.
        workers: N; 0: one per device.
        local_size: L, workers per node.
        simulate: simulate all workers on one device.
        batch_size: examples per step, over all workers.
        fsdp: L, devices of a worker, which divide its parameters, state and batch; ignored by simulated workers.
        across_hosts: allow the devices of a worker to be on more hosts or slices than necessary.
        tensor: devices of a tensor-parallel group.
        tensor_codec: codec of the sums of a tensor-parallel group; empty: uncompressed. See `decjax.contrib.tensor_sums`.
        param_dtype: dtype of the parameters with which the model computes, and of plain messages; with "bfloat16" they are the rounding of
            a float32 master copy, which updates change; see `train.step`.
        clip_norm: largest norm of each worker's gradient; 0: no clipping.
        engine: how the exchange is dispatched; see `train.engine`.
        bucket_bytes: arrays are joined to messages of up to this size; 0: each array is sent by itself.
        log_every: steps between two rows of metrics.
        consensus_every: replace all replicas by their average every so many steps; 0: never.
        consensus_first: and after each of the first so many steps.
        consensus_last: and after each of the last so many steps.
        task: the task and its options (the section `data`).
        model: None if the task has no choice of models.
        schedule: of the learning rate.
        optimizer: None if the method is an optimizer itself.
        method: the training method.
        topology: of gossip, in call form such as "base_k(k=3)"; None if the method has none.
        mixer: None if the method has none.
        reducer: None if the method has none.
        averaging: when and where the reducer is used.
        source: a gradient source of `decjax.contrib`; None: the whole model, or its stages.
        pipeline: stages and microbatches.
        boundary: compressed messages between stages.
        eval: when and how the model is evaluated.
        checkpoint: when checkpoints are saved.
        elastic: when an elastic run continues without a worker.
    """

    seed: Seed = 0
    steps: Count
    workers: Annotated[int, Range(0, 2**16)] = 0
    local_size: Annotated[int, Range(1, 2**16)] = 1
    simulate: bool = False
    batch_size: Annotated[int, Range(0, 2**26)]
    fsdp: Annotated[int, Range(1, 2**16)] = 1
    across_hosts: Annotated[bool, ShorthandKey("")] = False
    tensor: Annotated[int, Range(1, 2**12)] = 1
    tensor_codec: str = ""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    clip_norm: NonNegative = 0.0
    engine: Engine = "auto"
    bucket_bytes: Annotated[int, Range(0, 2**40)] = buckets.BUCKET_BYTES
    log_every: Count = 10
    consensus_every: Natural = 0
    consensus_first: Natural = 0
    consensus_last: Natural = 0
    task: Choice
    model: Choice | None
    schedule: Choice
    optimizer: Choice | None
    method: Choice
    topology: str | None
    mixer: Choice | None
    reducer: Choice | None
    averaging: Averaging = Averaging()
    source: Choice | None = None
    pipeline: Layers = Layers()
    boundary: StageMessages = StageMessages()
    eval: EvalSection = EvalSection()
    checkpoint: Checkpointing = Checkpointing()
    elastic: Elastic = Elastic()

    def replace(self, **changes: Any) -> "RunSpec":
        """Return the spec with other values of some fields, which are not checked again."""
        return dataclasses.replace(self, **changes)

    def trait(self, kind: str, name: str) -> Any:
        """Return a trait of the chosen part of a kind; None if no part is chosen or it lacks the trait."""
        choice: Choice | None = getattr(self, kind)
        return choice and registry.part(kind, choice.name).traits.get(name)

    def reaches_consensus(self, steps: int) -> bool:
        """Whether all replicas are replaced by their average after so many steps."""
        periodic = self.consensus_every and steps % self.consensus_every == 0
        return bool(periodic) or steps <= self.consensus_first or steps > self.steps - self.consensus_last

    @property
    def document(self) -> dict[str, Any]:
        """The run as a nested dict of plain values, the contents of config.json."""
        document: dict[str, Any] = {"version": VERSION} | {name: getattr(self, name) for name in plain_fields(RunSpec)}
        document |= {"task": self.task.name, "data": dict(self.task.options)}
        document |= {kind: choice.section for kind in CHOICES if (choice := getattr(self, kind))}
        if self.topology:
            document["topology"] = self.topology
        if self.reducer:
            document["reducer"] = self.reducer.section | {name: getattr(self.averaging, name) for name in around(self.reducer.name)}
        return json.loads(json.dumps(document | {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}))

    @property
    def batch_per_worker(self) -> int:
        """B, examples in a worker's batch."""
        return self.batch_size // self.workers

    @property
    def devices_of_worker(self) -> int:
        """L·S·T, devices that hold one worker's model."""
        return self.fsdp * self.pipeline.stages * self.tensor

    @property
    def devices(self) -> int:
        """How many devices the run needs."""
        return 1 if self.simulate else self.workers * self.devices_of_worker

    @functools.cached_property
    def setup(self) -> "Setup":
        """The parts of the run, made on first use and without devices; a ValueError if they do not fit each other."""
        from decjax.config.setup import Setup  # Which imports this module.

        return Setup.of(self)


# Sections with plain fields only, by name.
SECTIONS: dict[str, type[Any]] = {
    name: kind
    for name, kind in typing.get_type_hints(RunSpec).items()
    if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and name != "averaging"
}


@functools.cache
def plain_fields(section: type[Any]) -> dict[str, registry.Option]:
    """The plain fields of a section, or of `RunSpec`, by name."""
    found = registry.options_of(section)
    return {name: option for name, option in found.items() if name != "topology"}


def around(reducer: str) -> tuple[str, ...]:
    """The fields of `Averaging` that the section of a reducer has."""
    traits = registry.part("reducer", reducer).traits
    return () if traits.get("exact") else ("start",) if traits.get("adaptive") else ("start", "stages", "cluster")


def shorthand_keys() -> Iterator[tuple[str, str, str, registry.Option]]:
    """(shorthand key, section, field, option) of each plain field that a shorthand may set; section "" is the top level."""
    for section, declared in {"": RunSpec, "pipeline": Layers, "boundary": StageMessages, "reducer": Averaging}.items():
        hints = typing.get_type_hints(declared, include_extras=True)
        for name, option in plain_fields(declared).items():
            key = next((data.name for data in getattr(hints[name], "__metadata__", ()) if isinstance(data, ShorthandKey)), name)
            if key:
                yield key, section, name, option
