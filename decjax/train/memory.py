"""The memory that a device needs for the step of a run, from its config alone.

The state and its layout are exact: they are traced on a mesh without devices. What the gradient and the update need in addition is
estimated from their jaxprs (`program.liveness`).
"""

from collections.abc import Callable
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from decjax import config, mesh
from decjax.program import jaxpr, liveness
from decjax.train.state import State
from decjax.train.step import Step
from decjax.typing import PyTree

STEPS = 256  # in which the phases of a run are looked for


class DeviceMemory(NamedTuple):
    """Bytes of a device.

    Attributes:
        parameters: of the model.
        optimizer: state of the optimizer, such as moments; with methods that wrap none, all state of the method.
        method: all other state, such as residuals, estimates of neighbors' parameters, and batch statistics.
        gradients: of all parameters.
        messages: received while the gradient is computed, by methods whose exchange overlaps with it.
        activations: all else that both passes need at a time, such as gathered parameters of a layer.
        update: needed by the update besides the gradients, such as messages. It reuses the memory of `messages` and `activations`.
    """

    parameters: float
    optimizer: float
    method: float
    gradients: float
    messages: float
    activations: float
    update: float

    @property
    def state(self) -> float:
        """The bytes of the training state."""
        return self.parameters + self.optimizer + self.method

    def held(self) -> dict[str, float]:
        """The parts that are in use when most memory is: in both passes, or in the update."""
        passes = {"messages": self.messages, "activations": self.activations}
        most = {"update": self.update} if self.update > sum(passes.values()) else passes
        parts = {name: getattr(self, name) for name in ("parameters", "optimizer", "method", "gradients")} | most
        return {name: num_bytes for name, num_bytes in parts.items() if num_bytes}

    @property
    def total(self) -> float:
        """The most bytes in use at a time."""
        return sum(self.held().values())


def predict_memory(spec: config.RunSpec) -> DeviceMemory:
    """Return the memory of a device in a step that sends most, with all workers on devices of their own.

    Activations and messages of tensor-parallel groups count as if each device held them whole.
    """
    setup = spec.replace(simulate=False).setup
    method, source = setup.method, setup.source
    layout = functools.partial(mesh.described_workers, spec.workers, local_size=spec.local_size, stages=spec.pipeline.stages)
    params = jax.eval_shape(lambda: setup.stacked(setup.start(jax.random.key(0))))
    state_on = lambda workers: State(params, *(workers.eval_shape(init, (0,), params) for init in (method.tx.init, source.init)))
    divided = layout(devices_per_worker=spec.fsdp, tensor=spec.tensor, divided=setup.task.divided)
    on_device, held = functools.partial(_bytes_on_device, divided), state_on(divided)
    parameters, optimizer = on_device(params), on_device(getattr(held.opt_state, "inner", held.opt_state))

    one, phases = divided.one_device(params), dict.fromkeys(method.phase(step) for step in range(min(spec.steps, STEPS)))
    phase = max(phases, key=lambda phase: method.num_bytes(one, phase).max())
    workers = layout()  # Programs are traced with one device per stage, which has its share of the batch.
    step, state = Step.of(setup, workers), state_on(workers)
    sizes = (spec.workers, spec.pipeline.stages)[: workers.num_axes]
    examples = setup.task.examples(spec.batch_per_worker // spec.fsdp)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*sizes, *x.shape), x.dtype), examples)
    gradient = _traced(workers, functools.partial(step.take_gradient, number=jnp.int32(0)), params, state.source, batch)
    update = _traced(workers, functools.partial(step.update, phase=phase), state, params)
    shapes = {x.shape[workers.num_axes :] for x in jax.tree.leaves(params)}
    divisor = lambda variable: _share(divided, shape) if (shape := jaxpr.shape(variable).shape) in shapes else 1
    needed = liveness.peak_bytes(gradient.program, lambda variable: jaxpr.num_bytes(variable) / divisor(variable))
    messages = 0.0
    exchange: Callable | None = method.exchange
    if exchange:
        sent = _traced(workers, functools.partial(exchange, phase=phase), params, state.opt_state)
        messages = jaxpr.received_bytes(sent.program)
    return DeviceMemory(
        parameters,
        optimizer,
        on_device(held) - parameters - optimizer,
        parameters,
        messages / spec.fsdp,
        max(0.0, needed - parameters) + _bytes(examples),
        liveness.peak_bytes(update.program, num_results=0) / spec.fsdp,
    )


def _traced(workers: mesh.Workers, fn: Callable, *stacked: PyTree) -> jaxpr.Traced:
    """Trace a function of one worker."""
    traced = []
    workers.eval_shape(lambda *args: traced.append(jaxpr.trace(fn, *args)), (0,) * len(stacked), *stacked)
    return traced[0]


def _bytes(tree: PyTree) -> float:
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _bytes_on_device(workers: mesh.Workers, stacked: PyTree) -> float:
    """Return the bytes of stacked state on each device."""
    leaves, shardings = jax.tree.leaves(stacked), jax.tree.leaves(workers.shardings(stacked))
    return float(sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in zip(leaves, shardings, strict=True)))


def _share(workers: mesh.Workers, shape: tuple[int, ...]) -> int:
    """Return the number of devices of a worker that divide an array of its state."""
    if 0 in shape:
        return 1
    stored = jax.ShapeDtypeStruct((*workers.sizes[: workers.num_axes], *shape), jnp.float32)
    return math.prod(shape) // math.prod(workers.shardings(stored).shard_shape(stored.shape))
