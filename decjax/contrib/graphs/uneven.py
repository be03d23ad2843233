"""Local steps of which some workers take fewer than others, as if an average were due after a fixed time and they were slower."""

import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax.channel import Channel
from decjax.mesh.axis import Axis
from decjax.optim.local_updates import LocalUpdates
from decjax.optim.memories import increment
from decjax.options import Count, Natural, Range, Share, check
from decjax.tasks.partition import choose
from decjax.typing import PyTree


class UnevenState(NamedTuple):
    """State of `uneven_steps`.

    Attributes:
        step: steps of the run so far, the same on all workers, an int32 scalar.
        inner: state of the optimizer after the steps that the worker took.
    """

    step: jax.Array
    inner: PyTree


def uneven_steps(
    inner: optax.GradientTransformation, taken: tuple[int, ...], every: int, axis: Axis
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that worker i takes the first h_i of every H steps; see `TMA`.

    Args:
        inner: any optax optimizer, clipping included.
        taken: h_i by worker.
        every: H.
        axis: of the workers, over which the update is mapped.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        return UnevenState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates, state, params=None, **extra):
        updates, after = inner.update(updates, state.inner, params, **extra)
        # A selection instead of a conditional: the optimizer may communicate between stages, and all workers run the same program.
        takes = state.step % every < jnp.asarray(taken)[axis.index]
        after = jax.tree.map(lambda new, old: jnp.where(takes, new, old), after, state.inner)
        updates = jax.tree.map(lambda update: jnp.where(takes, update, jnp.zeros_like(update)), updates)
        return updates, UnevenState(increment(state.step), after)

    return optax.GradientTransformationExtraArgs(init, update)


class TMA(LocalUpdates, name="tma"):
    """Time-based model aggregation: local steps, of which slow workers take fewer, then the mean of all parameters.

        x_i ← x_i − α d_i(∇F_i(x_i))      in the first h_i of the H steps of a round; in the others x_i and d_i's state do not change
        x_i ← (1/N) Σ_j x_j               at the end of the round

    With h_i = H for all workers it is local SGD, `local_updates` with an outer step of SGD and rate 1, and the same program. Otherwise a
    worker's changes count for more the more steps it has taken, so the mean leans towards the data of fast workers.

    This is a simulation: all workers compute H gradients, and slow ones discard those that they would not have reached. It reproduces
    the effect of uneven steps on the result, not the time that is saved by not waiting. A schedule of the learning rate counts a worker's
    own steps.

    Attributes:
        channel: the axis of the workers.
        every: H, steps of a round, which the fastest workers take.
        pace: how many each worker takes. "even": H. Numbers such as "10,7,5": of the first, second, … worker, and then from the first
            again. "spread(slowest=0.5,seed=0)": evenly spaced from H/2 to H, the order of workers drawn with that seed.

    Reference: Zhu et al. 2023, arXiv 2305.09887.
    """

    messages = "changes, every H steps"
    memory = "1 copy"
    data = "any"

    channel: Channel
    every: Count = 10
    pace: str = "spread(slowest=0.5)"

    def __post_init__(self):
        self.taken  # noqa: B018  Refuses a pace that cannot be read.

    @functools.cached_property
    def taken(self) -> tuple[int, ...]:
        """h_i by worker."""
        return steps_of_round(self.pace, self.every, self.num_workers)

    @functools.cached_property
    def optimizer(self):
        if set(self.taken) == {self.every}:
            return optax.with_extra_args_support(self.inner)
        return uneven_steps(self.inner, self.taken, self.every, self.channel.axis)

    @property
    def outer(self):
        return optax.sgd(1.0)


def steps_of_round(pace: str, every: int, num_workers: int) -> tuple[int, ...]:
    """Return h_i, how many steps of a round each worker takes; see `TMA`.

    Example:
        >>> steps_of_round("10,7,5", 10, 4)
        (10, 7, 5, 10)
    """
    numbers = [number.strip() for number in pace.split(",")]
    if not all(number.isdecimal() for number in numbers):
        try:
            name, options = choose("pace", pace, {"even": _even, "spread": _spread})
        except ValueError as error:
            raise ValueError(f"method 'tma': {error}; or numbers, as pace='10,7,5'") from error
        return {"even": _even, "spread": _spread}[name](every, num_workers, **options)
    check(f"method 'tma': the number of entries of pace {pace!r}", len(numbers), Annotated[int, Range(1, num_workers)])
    for number in numbers:
        check(f"method 'tma': an entry of pace {pace!r}", int(number), Annotated[int, Range(1, every)])
    return tuple(int(numbers[i % len(numbers)]) for i in range(num_workers))


def _even(every: int, num_workers: int) -> tuple[int, ...]:
    return (every,) * num_workers


def _spread(every: int, num_workers: int, slowest: Share = 0.5, seed: Natural = 0) -> tuple[int, ...]:
    share_N = np.random.default_rng(seed).permutation(np.linspace(1, slowest, num_workers))
    return tuple(max(1, round(float(share * every))) for share in share_N)
