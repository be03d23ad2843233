"""A run as plain values: `RunSpec`."""

from collections.abc import Mapping
import json
from typing import Any, NamedTuple

from decjax import schedules
from decjax.config import sections

CONSENSUS = ("consensus_every", "consensus_first", "consensus_last")
PLAIN = (
    *"seed steps workers local_size simulate batch_size tensor tensor_codec clip_norm engine bucket_bytes log_every".split(),
    *CONSENSUS,
)
CHOICES = ("model", "schedule", "optimizer", "method", "mixer")
GROUPS = ("eval", "checkpoint", "elastic")
AUTO = "auto"  # value of `Averaging.stages` that leaves the number to the cost model
SIMULATED_WORKERS = 8  # how many on a lone accelerator; without one, as many forced CPU devices


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


class Averaging(NamedTuple):
    """A chosen reducer, and when and where it is used.

    Attributes:
        reducer: the reducer and its options.
        start: steps of the exact mean before it is used.
        stages: how many of the first stages of a pipeline compress; empty: all; "auto": decided by the cost model.
        cluster: path of the cluster's profile for "auto"; empty: none.
    """

    reducer: Choice
    start: int = 0
    stages: str = ""
    cluster: str = ""


class Layers(NamedTuple):
    """The section `pipeline`: how a worker's model is divided into stages, and by which schedule they compute.

    Attributes:
        stages: S; 1: no pipeline.
        microbatches: M, parts of a worker's batch.
        schedule: name of the schedule, see `schedules.make`.
        chunks: C, virtual stages per stage.
        layers: how many layers each virtual stage has, such as "3,4,4,3"; empty: equally many.
        remat: recompute a stage's forward pass in its backward pass.
        autoencoder: R, the width of what is sent between stages; 0: that of the model.
        autoencoder_init: which R directions it keeps at the start: "random", or "pca", the principal ones of activations.
        fused_embedding: average a tied embedding over both stages and all workers at once.
        delay: δ; stage s of S applies its gradients δ(S − 1 − s) steps late, as if stages did not wait for each other; 0: it does not.
    """

    stages: int = 1
    microbatches: int = 1
    schedule: schedules.Name = "1f1b"
    chunks: int = 1
    layers: str = ""
    remat: bool = False
    autoencoder: int = 0
    autoencoder_init: str = "random"
    fused_embedding: bool = False
    delay: int = 0

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """The field `layers` as numbers; a ValueError if it cannot be read."""
        try:
            return tuple(int(layers) for layers in self.layers.split(",") if layers)
        except ValueError:
            raise ValueError(
                f"pipeline.layers={self.layers!r} must read like '3,4,4,3', one number for each virtual stage"
            ) from None


class Periodic(NamedTuple):
    """When and how the model is evaluated.

    Attributes:
        every: steps between two evaluations.
        num_windows: how many validation examples; 0: all. The last evaluation takes all.
        batch_size: examples of a forward pass.
        local: whether every worker's own model is evaluated too, N times the work. The last evaluation does it always.
    """

    every: int
    num_windows: int
    batch_size: int
    local: bool = True


class Saving(NamedTuple):
    """When checkpoints are saved.

    Attributes:
        every: steps between two checkpoints.
        keep: how many of the newest are kept.
    """

    every: int
    keep: int


class Elastic(NamedTuple):
    """When a run that is started with `--elastic` goes on without a worker.

    Attributes:
        heartbeat_s: seconds of silence after which a worker is left out; all timeouts follow from it.
        min_workers: the fewest that go on; with fewer the others wait.
        spares: whether a process waits on each host to take a place at once, with everything loaded and compiled; it needs memory for
            the programs, but not for a model.
        encrypt: whether messages between workers are encrypted, for networks on which others can listen. Messages to and from the
            coordinator always are.
    """

    heartbeat_s: float = 5.0
    min_workers: int = 1
    spares: bool = True
    encrypt: bool = False


class RunSpec(NamedTuple):
    """A run as plain values: all that a config says, checked.

    Attributes:
        seed: of all random numbers.
        steps: length of the run.
        workers: N.
        local_size: L, workers per node.
        simulate: whether all workers are simulated on one device.
        batch_size: examples per step, over all workers.
        tensor: devices of a tensor-parallel group.
        tensor_codec: form in which the sums of a tensor-parallel group travel, a codec's name; empty: uncoded. See `pipeline.sums`.
        task: the task and its options (the section `data`).
        model: None if the task has no choice of models.
        schedule: of the learning rate.
        clip_norm: largest norm of each worker's gradient; 0: no clipping.
        optimizer: None if the method is an optimizer itself.
        method: the training method.
        topology: of gossip, as a text such as "base_k(k=3)"; None if the method has none.
        mixer: None if the method has none.
        averaging: the reducer, and when and where it is used; None if the method has none.
        pipeline: stages and microbatches.
        boundary: options of `pipeline.coded`; None: messages between stages are not compressed.
        engine: how the exchange is dispatched: "auto", "fused" or "split"; see `train.engine`.
        bucket_bytes: arrays are joined to messages of up to this size; 0: each array by itself.
        consensus_every: replace all replicas by their average every so many steps; 0: never.
        consensus_first: and after each of the first so many steps.
        consensus_last: and after each of the last so many steps.
        log_every: steps between two rows of metrics.
        eval: when and how the model is evaluated.
        checkpoint: when checkpoints are saved.
        elastic: when an elastic run goes on without a worker.
        tables: options of `pipeline.of_tables`, where the workers divide the model's embedding tables among them; None: each has all.
    """

    seed: int
    steps: int
    workers: int
    local_size: int
    simulate: bool
    batch_size: int
    tensor: int
    tensor_codec: str
    task: Choice
    model: Choice | None
    schedule: Choice
    clip_norm: float
    optimizer: Choice | None
    method: Choice
    topology: str | None
    mixer: Choice | None
    averaging: Averaging | None
    pipeline: Layers
    boundary: Mapping[str, Any] | None
    engine: str
    bucket_bytes: int
    consensus_every: int
    consensus_first: int
    consensus_last: int
    log_every: int
    eval: Periodic
    checkpoint: Saving
    elastic: Elastic = Elastic()
    tables: Mapping[str, Any] | None = None

    def reaches_consensus(self, steps: int) -> bool:
        """Whether all replicas are replaced by their average after so many steps."""
        periodic = self.consensus_every and steps % self.consensus_every == 0
        return bool(periodic) or steps <= self.consensus_first or steps > self.steps - self.consensus_last

    @property
    def document(self) -> dict[str, Any]:
        """The run as a nested dict of plain values, the contents of config.json."""
        document = {name: getattr(self, name) for name in PLAIN} | {"task": self.task.name, "data": dict(self.task.options)}
        document |= {kind: choice.section for kind in CHOICES if (choice := getattr(self, kind))}
        if self.topology:
            document["topology"] = self.topology
        if averaging := self.averaging:
            around = sections.around("reducer", averaging.reducer.name, self.pipeline.stages)
            document["reducer"] = averaging.reducer.section | {name: getattr(averaging, name) for name in around}
        shown = Layers._fields if self.pipeline.stages > 1 else ("stages", "microbatches")
        document["pipeline"] = {name: getattr(self.pipeline, name) for name in shown}
        if self.boundary:
            document["boundary"] = dict(self.boundary)
        if self.tables is not None:
            document["tables"] = dict(self.tables)
        return json.loads(json.dumps(document | {name: getattr(self, name)._asdict() for name in GROUPS}))

    @property
    def each(self) -> int:
        """B, examples in a worker's batch."""
        return self.batch_size // self.workers

    @property
    def devices_of_worker(self) -> int:
        """S·T, devices that hold one worker's model."""
        return self.pipeline.stages * self.tensor

    @property
    def devices(self) -> int:
        """How many devices the run needs."""
        return 1 if self.simulate else self.workers * self.devices_of_worker
