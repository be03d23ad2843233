"""Compile a training step of your own loop, once for each phase of a mixer or reducer."""

from collections.abc import Callable, Sequence
import functools
import operator

import jax

from decjax import gossip, mesh, options, phases, reduce
from decjax.channel import check_num_workers
from decjax.optim.memories import check_outermost
from decjax.optim.method import Method
from decjax.typing import PyTree

Schedule = gossip.Mixer | reduce.Reducer | Method


@options.checked
def make_step(
    fn: Callable[..., PyTree], workers: mesh.Workers, schedule: Schedule, *, donate_argnums: Sequence[int] = (0, 1)
) -> Callable[..., PyTree]:
    """Turn one worker's training step into a step of all workers, mapped over them and compiled once per phase.

    Every call waits for its result: several steps in flight at once can deadlock forced CPU devices.

    Args:
        fn: one worker's step, `fn(*own, phase=phase)`, such as `fn(params, state, batch, phase=0) -> (params, state)`.
        workers: the workers and their devices; see `make_workers`.
        schedule: the mixer or reducer of the transformation, whose `phase(step)` says which messages are due.
        donate_argnums: positions of the arguments whose memory the results may reuse; those arrays cannot be used afterwards.

    Returns:
        `step(number, *stacked)`: takes the step's number and arguments stacked over workers, [N, …], and returns what `fn` returns,
            stacked likewise.

    Raises:
        ValueError: if the mixer is for another number of workers; from `step`, if the transformation has another schedule, or if
            another transformation is around it, such as `optax.MultiSteps`.

    Example:
        >>> workers = decjax.make_workers(4, simulate=True)
        >>> mixer = decjax.gossip.exact(decjax.topology.make("ring", 4))
        >>> tx = decjax.decentralize(optax.sgd(0.1), mixer)
        >>> def fn(params, state, batch, *, phase):
        ...     updates, state = tx.update(params - batch, state, params, phase=phase)
        ...     return optax.apply_updates(params, updates), state
        >>> step = decjax.make_step(fn, workers, mixer)
        >>> params = workers.stack(jnp.zeros(3))
        >>> params, state = step(0, params, workers.jit(tx.init, (0,))(params), jnp.ones((4, 3)))
    """
    check_num_workers(getattr(schedule, "num_workers", None), workers.num_workers)
    program = functools.cache(functools.partial(_program, fn, workers, schedule, tuple(donate_argnums)))
    return functools.partial(_step, program, schedule)


def _step(program: Callable[[int | None, int], Callable], schedule: Schedule, number: int, *stacked: PyTree) -> PyTree:
    return jax.block_until_ready(program(schedule.phase(operator.index(number)), len(stacked))(*stacked))


def _program(
    fn: Callable, workers: mesh.Workers, schedule: Schedule, donated: tuple[int, ...], phase: int | None, count: int
) -> Callable:
    """Return the compiled step of all workers in a phase; a method of a config chooses the phases of its mixer itself."""
    one_worker = functools.partial(_one_worker, fn, phase, None if isinstance(schedule, Method) else schedule)
    return workers.jit(one_worker, (0,) * count, donated)


def _one_worker(fn: Callable, phase: int | None, schedule: phases.Phased | None, *own: PyTree) -> PyTree:
    """Wrap one worker's step so that its arguments are checked when it is traced."""
    check_outermost(own)
    with phases.compiling(schedule):
        return fn(*own, phase=phase)
