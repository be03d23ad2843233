"""What a run is, in plain values: a `RunSpec`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

AUTO = "auto"  # of `Averaging.stages`: as the cost model needs it
SIMULATED_WORKERS = 8  # on a lone accelerator, and forced CPU devices without one


class Choice(NamedTuple):
    """A part that was chosen, with all its options."""

    name: str
    options: Mapping[str, Any]


class Averaging(NamedTuple):
    """A reducer that was chosen, and what is around it.

    Attributes:
        reducer: the part.
        start: steps of the plain mean before it is used.
        stages: of a pipeline, the first so many compress; empty: all; "auto": as `cluster` needs it.
        cluster: path of a profile; empty: none.
    """

    reducer: Choice
    start: int = 0
    stages: str = ""
    cluster: str = ""


class Layers(NamedTuple):
    """How a worker's model lies on its devices, and when what is computed; see `pipeline.source`.

    Attributes:
        stages: S.
        microbatches: M.
        schedule, chunks: see `schedules.make`.
        layers: of each virtual stage, as "3,4,4,3"; empty: equally many.
        remat: compute a stage's forward pass anew in its backward pass.
        autoencoder: R, the width of what travels between stages; 0: that of the model.
        fused_embedding: average a tied table over all its holders at once.
    """

    stages: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    layers: str = ""
    remat: bool = False
    autoencoder: int = 0
    fused_embedding: bool = False


class Periodic(NamedTuple):
    """Evaluation: every so many steps, on so many examples (0: all; the last evaluation takes all), in batches of so many."""

    every: int
    num_windows: int
    batch_size: int


class Saving(NamedTuple):
    """Checkpoints: every so many steps; the newest so many are kept."""

    every: int
    keep: int


class RunSpec(NamedTuple):
    """A run: everything that a config says, checked.

    Attributes:
        document: the same as a nested dict of plain values, which config.json holds.
        topology: in call form; None where the method has no mixer.
        mixer, averaging, model, optimizer: None where the method or task has none.
        boundary: options of `pipeline.coded`; None: messages between stages are as they are.
    """

    document: dict[str, Any]
    seed: int
    steps: int
    workers: int
    local_size: int
    simulate: bool
    batch_size: int
    tensor: int
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
    log_every: int
    eval: Periodic
    checkpoint: Saving

    @property
    def each(self) -> int:
        """B, examples of a worker's batch."""
        return self.batch_size // self.workers

    @property
    def devices_of_worker(self) -> int:
        """S·T, devices that hold one worker's model."""
        return self.pipeline.stages * self.tensor

    @property
    def devices(self) -> int:
        """Devices that the run takes."""
        return 1 if self.simulate else self.workers * self.devices_of_worker
