"""The memory that a layout of workers × stages × tensor takes on a device."""

from typing import NamedTuple

from decjax.costmodel.layout import DeviceLayout, Traffic, by_stage
from decjax.costmodel.methods import PARAMETERS
from decjax.costmodel.transformer import Transformer


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
