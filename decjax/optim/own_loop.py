"""Compiles a training step that you wrote yourself, once for each phase of a mixer or reducer."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax

from decjax import gossip, mesh, reduce


def make_step(
    fn: Callable[..., Any],
    workers: mesh.Workers,
    schedule: gossip.Mixer | reduce.Reducer,
    *,
    donate_argnums: Sequence[int] = (0, 1),
) -> Callable[..., Any]:
    """Turns one worker's training step into a step of all workers: mapped over them, and compiled once per phase.

    Every call waits for its result: several steps in flight at once can deadlock forced CPU devices.

    Args:
        fn: one worker's step, `fn(*own, phase=phase)`, such as `fn(params, state, batch, phase=0) -> (params, state)`.
        workers: the workers and their devices; see `make_workers`.
        schedule: the mixer or reducer, whose `phase(step)` says which messages are due.
        donate_argnums: positions of the arguments whose memory the results may reuse; those arrays cannot be used afterwards.

    Returns:
        `step(number, *stacked)`: takes the step's number and arguments stacked over workers, [N, …], and returns what `fn` returns,
            stacked likewise.

    Example:
        >>> workers = decjax.make_workers(4, simulate=True)
        >>> mixer = decjax.gossip.exact(decjax.topology.make("ring", 4), decjax.Channel(workers.axis))
        >>> tx = decjax.decentralize(optax.sgd(0.1), mixer)
        >>> def fn(params, state, batch, *, phase):
        ...     updates, state = tx.update(params - batch, state, params, phase=phase)
        ...     return optax.apply_updates(params, updates), state
        >>> step = decjax.make_step(fn, workers, mixer)
        >>> params = workers.stack(jnp.zeros(3))
        >>> params, state = step(0, params, workers.jit(tx.init, (0,))(params), jnp.ones((4, 3)))
    """
    donated = tuple(donate_argnums)
    program = functools.cache(lambda phase, count: workers.jit(functools.partial(fn, phase=phase), (0,) * count, donated))

    def step(number, *stacked):
        return jax.block_until_ready(program(schedule.phase(number), len(stacked))(*stacked))

    return step
