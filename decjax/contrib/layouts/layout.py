"""Layouts in three dimensions, workers × stages × tensor: how devices share a model, what they compute, send and keep.

A worker is a pipeline of S stages, a stage K devices of the tensor axis. Devices are numbered through the nodes: the tensor axis
innermost, then stages (`inner="stage"`) or workers.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Annotated, Literal, NamedTuple

import numpy as np

from decjax import schedules
from decjax.contrib.layouts.transformer import Transformer
from decjax.costmodel.methods import GRADIENTS, PARAMETERS, Method
from decjax.costmodel.profile import Rate, Size, check_divides
from decjax.options import Natural, Range, check, checked, checked_class
from decjax.schedules import FORWARD, Schedule

ALWAYS: Literal["always"] = "always"
EPILOGUE: Literal["epilogue"] = "epilogue"
MAX_PASSES = 2**15


@checked_class
@dataclasses.dataclass(frozen=True)
class DeviceLayout:
    """How devices share a model and its batch.

    Args:
        workers: N, pipelines, each with its own part of the batch.
        stages: S, stages of a pipeline.
        tensor: K, devices that split every layer.
        microbatches: M, parts of a worker's batch.
        schedule: "gpipe", "1f1b" or "interleaved".
        chunks: C, virtual stages of a device, for "interleaved".
        layers: number of layers of each of the S·C virtual stages, in the model's order; (): equally many.
        inner: the axis that comes next to the tensor axis on a node: "stage" or "worker".
        remat: what the backward pass recomputes: "none"; all of a layer but its matrix products ("products"); whole layers from
            their inputs ("layers"); or whole virtual stages from theirs ("stages"), where the last one needs no separate forward
            pass. As in `decjax.pipeline`, False stands for "products" and True for "stages".
        split_boundary: whether each of the K devices sends 1/K of a message to another stage, and the receivers gather it; else each
            sends all of it.
        blocking: whether a stage sends and receives between its passes, tick by tick, as `decjax.pipeline` does; else messages travel
            while it computes.
    """

    workers: Size = 1
    stages: Size = 1
    tensor: Size = 1
    microbatches: Size = 1
    schedule: schedules.Name = "1f1b"
    chunks: Size = 1
    layers: tuple[int, ...] = ()
    inner: Literal["stage", "worker"] = "stage"
    remat: Literal["none", "products", "layers", "stages"] | bool = "none"
    split_boundary: bool = True
    blocking: bool = True

    def __post_init__(self):
        if isinstance(self.remat, bool):
            object.__setattr__(self, "remat", "stages" if self.remat else "products")
        check("stages × chunks × microbatches", self.num_virtual * self.microbatches, Annotated[int, Range(1, MAX_PASSES)])
        if self.layers and (len(self.layers) != self.num_virtual or min(self.layers) < 1):
            raise ValueError(
                f"layers={self.layers}: needs a positive number for each of stages={self.stages} × "
                f"chunks={self.chunks}; leave it out to divide evenly"
            )
        _ = self.passes  # Refuses what the schedule does not allow.

    @property
    def name(self) -> str:
        """Workers, stages and tensor devices, as "4×2×8"."""
        return f"{self.workers}×{self.stages}×{self.tensor}"

    @property
    def num_devices(self) -> int:
        """N·S·K, the number of devices."""
        return self.workers * self.stages * self.tensor

    @property
    def num_virtual(self) -> int:
        """S·C, the number of virtual stages."""
        return self.stages * self.chunks

    @functools.cached_property
    def passes(self) -> Schedule:
        """The pipeline schedule."""
        return schedules.make(self.schedule, self.stages, self.microbatches, self.chunks)

    def devices_NxSxK(self) -> np.ndarray:
        """Return the number of the device of each worker, stage and place on the tensor axis, [N, S, K]."""
        if self.inner == "stage":
            return np.arange(self.num_devices).reshape(self.workers, self.stages, self.tensor)
        return np.arange(self.num_devices).reshape(self.stages, self.workers, self.tensor).swapaxes(0, 1)

    def layers_of(self, model: Transformer) -> tuple[int, ...]:
        """Return the number of layers of each virtual stage, after `check`."""
        self.check(model)
        return self.layers or (model.depth // self.num_virtual,) * self.num_virtual

    def microbatch_size(self, model: Transformer) -> int:
        """Return B, the number of sequences in a microbatch, after `check`."""
        self.check(model)
        return model.batch_size // (self.workers * self.microbatches)

    def check(self, model: Transformer) -> None:
        """Refuse a model that does not divide into this layout."""
        if self.layers and sum(self.layers) != model.depth:
            raise ValueError(f"layers={self.layers} are {sum(self.layers)}, the model has {model.depth}; make them add up")
        for name in ("heads", "hidden", "vocabulary"):
            check_divides(name, getattr(model, name), f"tensor={self.tensor}", self.tensor)
        if not self.layers:
            check_divides("depth", model.depth, f"stages={self.stages} × chunks={self.chunks}", self.num_virtual)
        batch_parts = f"workers={self.workers} × microbatches={self.microbatches}"
        check_divides("batch_size", model.batch_size, batch_parts, self.workers * self.microbatches)


@checked_class
@dataclasses.dataclass(frozen=True)
class Boundary:
    """How messages from stage to stage are compressed.

    Args:
        ratio: bytes of a device's message ÷ bytes without compression.
        codec: name of the codec, for clusters with a speed for each codec.
        when: "always"; or "epilogue", only gradients for which the receiving stage can do nothing but wait.
    """

    ratio: Rate = 1.0
    codec: str = ""
    when: Literal["always", "epilogue"] = ALWAYS

    def codes(self, in_epilogue: bool) -> bool:
        """Return whether a message is compressed, given whether it is one of the epilogue."""
        return self.ratio != 1 and (in_epilogue or self.when == ALWAYS)


@checked_class
@dataclasses.dataclass(frozen=True)
class Traffic:
    """What is sent between workers and between stages.

    Args:
        method: what workers send each other; a tied embedding of several stages is sent without its compression.
        compressed_stages: k; the first k stages send messages of the method's ratio, the others uncompressed ones. None: all stages.
        backward: compression of gradients between stages.
        forward: compression of activations between stages.
        fused_embedding: whether the gradient of an embedding that the first and the last stage share is averaged over all 2N
            holders at once, instead of over workers and then over the two.
    """

    method: Method
    compressed_stages: Natural | None = None
    backward: Boundary = Boundary()
    forward: Boundary = Boundary()
    fused_embedding: bool = False

    def __post_init__(self):
        if self.forward.when == EPILOGUE:
            raise ValueError(f"forward: when='{EPILOGUE}' is for gradients, no stage waits for activations alone; use '{ALWAYS}'")
        if self.fused_embedding and self.method.message != GRADIENTS:
            raise ValueError(
                f"fused_embedding needs gradients that are averaged over all workers, got {self.method.name!r}; "
                "use all-reduce, or leave it out"
            )

    def boundary(self, kind: str) -> Boundary:
        """Return how messages of a kind, `FORWARD` or `BACKWARD`, are compressed between stages."""
        return self.forward if kind == FORWARD else self.backward

    def compresses(self, stage: int) -> bool:
        """Return whether a stage sends the method's compressed messages to other workers."""
        return self.compressed_stages is None or stage < self.compressed_stages

    def ratio(self, stage: int) -> float:
        """Return the compression ratio of a stage's messages to other workers; 1: none."""
        return self.method.ratio if self.compresses(stage) else 1.0

    def latencies(self, stage: int) -> float:
        """Return how many latencies of an uncompressed exchange a stage's exchange takes."""
        return self.method.latencies if self.compresses(stage) else 1.0


@dataclasses.dataclass(frozen=True)
class Work:
    """What the devices of a layout compute and send; counted by `work`, or measured. There are U = S·C virtual stages, in order.

    Args:
        forward_s: [U] seconds of the forward pass of one microbatch, without messages.
        backward_s: [U] seconds of its backward pass.
        boundary_bytes: bytes of one microbatch's activations between two stages.
        tensor_bytes: bytes of one all-reduce over the tensor axis.
        forward_reductions: [U] number of these all-reduces in a forward pass.
        backward_reductions: [U] number of them in a backward pass.
        gradient_bytes: [S] bytes of a device's gradients, without a tied embedding of several stages.
        embedding_bytes: bytes of such an embedding's gradient on one device; 0: there is none.
        optimizer_s: seconds of the optimizer.
        combine_s: seconds to combine parameters that have arrived with a worker's own.
        beside_s: seconds that an exchange between workers takes longer while the gradient is computed.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    boundary_bytes: float
    tensor_bytes: float
    forward_reductions: tuple[float, ...]
    backward_reductions: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    embedding_bytes: float = 0.0
    optimizer_s: float = 0.0
    combine_s: float = 0.0
    beside_s: float = 0.0


@checked
def work(model: Transformer, layout: DeviceLayout, flops: Rate) -> Work:
    """Count what the devices of a layout compute and send.

    Args:
        model: what is trained; ValueError if the layout does not divide it.
        layout: how devices share it.
        flops: floating-point operations per second that a device sustains.
    """
    layout.check(model)
    B, K, S = layout.microbatch_size(model), layout.tensor, layout.stages
    layers_U = layout.layers_of(model)
    first, last = np.eye(1, len(layers_U))[0], np.eye(1, len(layers_U), len(layers_U) - 1)[0]
    layer_s, head_s = model.layer_flops(B) / (K * flops), model.head_flops(B) / (K * flops)
    recomputes = layout.remat in ("layers", "stages")
    skipped_U = 1 - last if layout.remat == "stages" else 1
    # The head and the loss belong to the backward pass, which follows at once.
    forward_U = np.array(layers_U) * layer_s * skipped_U
    backward_U = np.array(layers_U) * layer_s * (3 if recomputes else 2) + last * 3 * head_s
    # Each device has 1/K of the vocabulary: the embedding's output is summed over devices, and so is the gradient of the head's input.
    reductions_U = 2 * np.array(layers_U)
    tied_apart = model.tied and S > 1
    embedding = model.embedding_parameters / K
    parameters_S = np.array(by_stage(layout, layers_U)) * model.layer_parameters_on(K)
    parameters_S[-1] += model.width
    if not tied_apart:
        parameters_S[0] += embedding
        parameters_S[-1] += 0 if model.tied else embedding
    return Work(
        tuple(forward_U),
        tuple(backward_U),
        model.boundary_bytes(B),
        model.boundary_bytes(B),
        tuple(reductions_U * skipped_U + first),
        tuple(reductions_U * (2 if recomputes else 1) + last),
        tuple(parameters_S * model.gradient_bytes),
        embedding * model.gradient_bytes if tied_apart else 0.0,
    )


def by_stage(layout: DeviceLayout, of_chunk_U: Sequence[float] | np.ndarray) -> list[float]:
    """Return the sum over each stage's virtual stages: values [U] to values [S]."""
    return [sum(of_chunk_U[s :: layout.stages]) for s in range(layout.stages)]


# -- Memory -----------------------------------------------------------------------------------------------------------


class Footprint(NamedTuple):
    """Bytes in use on the device that needs the most memory.

    Attributes:
        stage: the pipeline stage of that device.
        parameters: bytes of the parameters of its part of the model.
        gradients: bytes of their gradients.
        moments: bytes that the optimizer keeps for them.
        activations: bytes of activations of microbatches that wait for their backward pass, of those that are recomputed, and of the
            logits.
        errors: bytes of the float32 error memory of compression, and of messages on their way.
    """

    stage: int
    parameters: float
    gradients: float
    moments: float
    activations: float
    errors: float

    @property
    def total(self) -> float:
        """The sum of all bytes."""
        return sum(self[1:])


def memory(model: Transformer, layout: DeviceLayout, traffic: Traffic) -> Footprint:
    """Return the memory that a layout takes on the device that needs the most.

    Compression keeps the error of what it sends in float32, and factors or indices no larger than the message: between stages for a
    device's own part of one message, between workers for all gradients of a stage, whole on each device of the tensor axis, as
    in `decjax.reduce`. Gossip keeps a copy of the received parameters.

    Args:
        model: what is trained; ValueError if the layout does not divide it.
        layout: how devices share it.
        traffic: what is compressed.
    """
    layout.check(model)
    return max((_stage_memory(model, layout, traffic, stage) for stage in range(layout.stages)), key=lambda m: m.total)


def _stage_memory(model: Transformer, layout: DeviceLayout, traffic: Traffic, stage: int) -> Footprint:
    S, K, B, method = layout.stages, layout.tensor, layout.microbatch_size(model), traffic.method
    is_last = stage == S - 1

    def of_layers(devices: int) -> float:
        return by_stage(layout, layout.layers_of(model))[stage] * model.layer_parameters_on(devices) + model.width * is_last

    tables = (stage == 0) + (is_last and not (model.tied and S == 1))
    parameters = of_layers(K) + tables * model.embedding_parameters / K
    layers, live, boundary = max(layout.layers_of(model)[stage::S]), layout.passes.live[stage], model.boundary_bytes(B)
    if layout.remat == "stages":
        activations = live * boundary + layers * model.activation_bytes(B, K, "products")
    else:
        assert isinstance(layout.remat, str)
        activations = live * layers * model.activation_bytes(B, K, layout.remat)
    if layout.remat != "none":
        activations += model.activation_bytes(B, K)
    if is_last:  # Logits in float32, of the one microbatch whose loss is computed.
        activations += 4 * B * model.context * model.vocabulary / K
    sent_bytes = boundary / (K if layout.split_boundary else 1)
    errors = sum(
        sent_bytes * (4 / model.value_bytes + coded.ratio)
        for coded, sends in ((traffic.backward, stage > 0), (traffic.forward, not is_last))
        if coded.ratio != 1 and sends
    )
    if traffic.ratio(stage) != 1:
        errors += 4 * of_layers(1) + traffic.ratio(stage) * model.gradient_bytes * of_layers(K)
    if method.topology is not None and method.message == PARAMETERS:
        errors += parameters * model.gradient_bytes * method.ratio
    each_bytes = model.parameter_bytes, model.gradient_bytes, model.moment_bytes
    kept, gradients, moments = (parameters * num_bytes for num_bytes in each_bytes)
    return Footprint(stage, kept, gradients, moments, activations, errors)
