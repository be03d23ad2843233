"""Exchange engines: how the exchange and the gradient of a step are dispatched. Results are the same up to rounding.

    fused    One executable. Where the exchange does not need the gradient (order "awc", stale all-reduce), the compiler of a GPU or
             TPU starts it before the forward pass and waits for it after the backward pass.
    split    Several executables, because CPU devices overlap nothing within one. A second thread dispatches the messages of the
             exchange, part by part. Meanwhile the main thread dispatches the gradient and the part of the update that needs no message,
             and, as each part arrives, its decoding and what it completes. A step returns when its exchange is complete, so that
             collectives of two steps never overlap. The gradient must have no collectives: with stages or several devices per stage,
             processes could order those of the two threads differently, so that case raises an error.

A step is compiled once for each phase of the topology, so that no program contains a conditional over phases; and, for tasks whose
batches have a few shapes, once for each of these.
"""

from collections.abc import Callable
import concurrent.futures
import functools
import itertools
from typing import NamedTuple
import warnings

import jax
import numpy as np

from decjax import mesh, options
from decjax.config.rules import check_engine
from decjax.config.spec import Engine
from decjax.optim.method import Method
from decjax.program import hlo, jaxpr
from decjax.train.state import State
from decjax.train.step import Step
from decjax.typing import Jitted, PyTree

PARTS = 8  # of a split exchange, at most; links are idle while the first is encoded and the last decoded
MOST_WITHIN_WORKER = 16  # permutations between a worker's devices that are in flight at a time


class Program(NamedTuple):
    """A compiled step of one phase."""

    run: Callable  # (state, batch, number) -> (state, loss_N); with stages loss_NxS, whose columns are equal
    sent: dict[
        str, np.ndarray
    ]  # bytes that each worker sends, [N], to other workers ("worker") and, unless simulated, stages ("stage")
    executables: tuple[jax.stages.Compiled, ...]


@options.checked
def choose(engine: Engine, method: Method, workers: mesh.Workers) -> str:
    """Return the engine to use, "fused" or "split".

    "auto" is "split" where a thread has to send (`Workers.needs_sender`) and the exchange can overlap, else "fused".

    Raises:
        ValueError: if the engine is unknown, or "split" is impossible with this method or layout.
    """
    check_engine(engine, method)
    alone = workers.stages == 1 and not workers.divides  # The gradient has no collectives.
    if engine == "auto":
        return "split" if method.exchange and alone and workers.needs_sender else "fused"
    if engine == "split" and not alone and jax.process_count() > 1:
        raise ValueError(
            f"engine 'split' with stages={workers.stages} and tensor={workers.tensor} over {jax.process_count()} processes: "
            "messages of the gradient and of the exchange would be sent by two threads, in an order that differs by "
            "process; use engine 'fused'"
        )
    return engine


def compile_per_phase(step: Step, engine: Engine = "fused") -> Callable[..., Program]:
    """Return `program(phase, state, batch, number) -> Program`, compiled once per phase and shape of the batch; see `choose`.

    The step's state is donated. Bytes are read from the compiled collectives. The declared ones are used where nothing is sent, since
    workers are simulated, and where one program holds the messages of all phases, since the phase is traced.
    """
    workers, method = step.workers, step.method
    compile_phase = _split(step) if choose(engine, method, workers) == "split" else functools.partial(_fused, step)
    compiled: dict[tuple, Program] = {}

    def program(phase, state, batch, number):
        key = phase, *(x.shape for x in jax.tree.leaves(batch))
        if key not in compiled:
            run, executables = compile_phase(phase, state, batch, number)
            sent: dict[str, np.ndarray] = {}
            if workers.mesh is not None:
                counts = [hlo.bytes_by_axis(hlo.text(executable), workers.sizes) for executable in executables]
                sent = {axis: np.sum([count[axis] for count in counts], axis=0) for axis in counts[0]}
            if workers.mesh is None or phase is None:
                sent["worker"] = workers.stages * method.num_bytes(workers.one_device(state.params), phase)
            compiled[key] = Program(run, sent, executables)
        return compiled[key]

    return program


def compile_update(
    step: Step, engine: Engine, phase: int | None, state: State, grads: PyTree, messages: Callable[[Callable], Callable]
) -> Callable[[State, PyTree], State]:
    """Compile a step without its gradient for one phase: `(state, grads) -> state`; it may reuse the state's memory.

    `messages(fn) -> fn` is applied to the functions that send, so that a step can be timed without its messages.
    """
    workers, method = step.workers, step.method
    if choose(engine, method, workers) == "fused":
        return workers.jit(messages(functools.partial(step.update, phase=phase)), (0, 0), donate_argnums=(0,))
    thread, gradient = concurrent.futures.ThreadPoolExecutor(1), lambda params, source, grads, number: (None, grads, source)
    split = _Split(gradient, *_compiled_exchange(step, phase, state, grads, messages))
    return lambda state, grads: split.run(workers, thread, state, grads, None)[0]


def whole_step(step: Step, phase: int | None) -> Jitted:
    """Return the jitted step that engine "fused" compiles for a phase: `(state, batch, number) -> (state, loss_N)`."""
    return step.workers.jit(functools.partial(step.train_step, phase=phase), (0, 0, None), donate_argnums=(0,))


def early_exchange(platform: str | None, routes: list[tuple[str, str]]) -> dict[str, bool | int]:
    """Return compiler options for an exchange that does not need the gradient: start it as early and end it as late as possible.

    By default the compilers of GPUs and TPUs assume fast links and start late, and they allow only one message in flight (GPU) or
    five (TPU), so that the others are sent after the backward pass.
    """
    if platform == "tpu":
        # Devices of a worker have permutations of their own in flight.
        in_flight = len(routes) + MOST_WITHIN_WORKER
        return {"xla_tpu_use_aggressive_scheduling": True, "xla_max_concurrent_async_collective_permutes": in_flight}
    if platform == "gpu":
        # Messages along one route are combined, since each message in flight needs a stream of its own.
        return {
            "xla_gpu_experimental_collective_start_as_early_as_possible": True,
            "xla_gpu_collective_permute_combine_threshold_bytes": 2**62,
            "xla_gpu_all_reduce_combine_threshold_bytes": 2**62,
            "xla_gpu_experimental_parallel_collective_overlap_limit": 1 + len(set(routes)),
        }
    return {}


def _fused(step, phase, state, batch, number):
    lowered = whole_step(step, phase).lower(state, batch, number)
    executable = lowered.compile(
        early_exchange(step.workers.platform, hlo.routes(lowered.as_text())) if step.method.exchange else {}
    )
    return executable, (executable,)


class _Part(NamedTuple):
    """The programs of a part of the exchange; `inputs` are (params, opt_state)."""

    encode: jax.stages.Compiled  # inputs -> encoded
    travel: jax.stages.Compiled  # (inputs, encoded) -> arrived
    decode: jax.stages.Compiled  # (inputs, encoded, arrived) -> received


class _Split(NamedTuple):
    """The programs of a split step."""

    take_gradient: Callable  # (params, source, batch, number) -> (loss, grads, source)
    parts: list[_Part]
    prepare: jax.stages.Compiled  # known, which is (state, grads) -> for each part the values that need no message
    joins: list[jax.stages.Compiled]  # (known, prepared, *received) -> the leaves of the next state that a part completes

    def run(self, workers, thread, state, batch, number):
        inputs, encoded, arriving = (state.params, state.opt_state), [], []
        for part in self.parts:
            encoded.append(part.encode(inputs))
            if workers.on_cpu and not arriving:
                jax.block_until_ready(encoded)  # During the gradient it would take several times as long.
            arriving.append(thread.submit(lambda sent, part=part: jax.block_until_ready(part.travel(inputs, sent)), encoded[-1]))
        if workers.on_cpu and not workers.needs_sender:
            concurrent.futures.wait(arriving)  # Devices of one process share threads, which waiting collectives could all occupy.
        try:
            return self._completed(state, inputs, encoded, arriving, batch, number)
        except BaseException:
            for message in arriving:  # A later step must not receive those that have not begun.
                message.cancel()
            raise

    def _completed(self, state, inputs, encoded, arriving, batch, number):
        loss_N, grads, source = self.take_gradient(state.params, state.source, batch, number)
        known, leaves, received = (state._replace(source=source), grads), {}, []
        for part, arrived, sent, prepared, join in zip(self.parts, arriving, encoded, self.prepare(known), self.joins, strict=True):
            received.append(part.decode(inputs, sent, arrived.result()))
            leaves |= join(known, prepared, *received)
        tree = jax.tree.structure(state)
        return tree.unflatten([leaves[leaf] for leaf in range(tree.num_leaves)]), loss_N


def _split(step):
    # One thread, so that all processes dispatch their exchanges in the same order.
    thread = concurrent.futures.ThreadPoolExecutor(1)
    workers = step.workers
    gradients, exchanges = {}, {}  # The gradient's program is shared by all phases, and the exchange's by all shapes of a batch.

    def compile_phase(phase, state, batch, number):
        shapes = tuple(x.shape for x in jax.tree.leaves(batch))
        if shapes not in gradients:
            gradient = workers.jit(step.take_gradient, (0, 0, 0, None))
            gradients[shapes] = gradient.lower(state.params, state.source, batch, number).compile()
        if phase not in exchanges:
            exchanges[phase] = _compiled_exchange(step, phase, state, gradients[shapes].out_info[1])
        split = _Split(gradients[shapes], *exchanges[phase])
        run = functools.partial(split.run, workers, thread)
        return run, (gradients[shapes], *itertools.chain(*split.parts), split.prepare, *split.joins)

    return compile_phase


def _compiled_exchange(step, phase, state, grads, messages=lambda fn: fn):
    """Return (parts, prepare, joins) of a phase; see `_Split`, and `compile_update` for `messages`."""
    workers, known = step.workers, (state, grads)
    exchange = _traced(workers, functools.partial(step.method.exchange, phase=phase), (state.params, state.opt_state))
    cut = jaxpr.parts(exchange, most=PARTS)

    def combine(known, received):
        return step.update(*known, received=received, phase=phase)

    update = _traced(workers, combine, (known,), exchange.result)
    prepare, completions = jaxpr.divide(update, 1 + len(jax.tree.leaves(known)), cut)
    parts = [_compiled_part(workers, jaxpr.only(exchange, part), (state.params, state.opt_state), messages) for part in cut]
    ready = _compiled(workers, prepare, known)
    joins = []
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # About donated scalars that no result can reuse.
        for k, (prepared, completion) in enumerate(zip(ready.out_info, completions, strict=True)):
            arrived = (part.decode.out_info for part in parts[: k + 1])
            joins.append(_compiled(workers, completion, known, prepared, *arrived, donated=(1,)))
    return parts, ready, joins


def _traced(workers, fn, stacked, *further) -> jaxpr.Traced:
    """Trace a function of one worker, for stacked arrays and further shapes, with the worker's index as the first input."""
    traced = []

    def trace(*args):
        traced.append(jaxpr.trace(workers.axis.indexed(fn), workers.axis.index, *args, *further))

    workers.eval_shape(trace, (0,) * len(stacked), *stacked)  # Axis names are defined inside only.
    return traced[0]


def _compiled(workers, fn, known, *args, donated=()):
    """Compile `fn((index, known), *args)`, a function of one worker, for stacked arrays."""

    def with_index(known, *args):
        return fn((workers.axis.index, known), *args)

    return workers.jit(with_index, (0,) * (1 + len(args)), donate_argnums=donated).lower(known, *args).compile()


def _compiled_part(workers, exchange, inputs, messages) -> _Part:
    pieces = jaxpr.cut_at_messages(exchange)
    encode = _compiled(workers, pieces.encode, inputs)
    travel = _compiled(workers.aside, messages(pieces.travel), inputs, encode.out_info)  # `_Split.run` runs it in a second thread.
    return _Part(encode, travel, _compiled(workers, pieces.decode, inputs, encode.out_info, travel.out_info))
