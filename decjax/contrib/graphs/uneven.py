"""Local steps of which some workers take fewer than others, as if an average were due after a fixed time and they were slower.

    x_i ← x_i − α d_i(∇F_i(x_i))      in the first h_i of the H steps of a round; in the others x_i and d_i's state stay as they are
    x_i ← (1/N) Σ_j x_j               at the end of the round

With h_i = H for all workers it is local SGD, `local_updates` with an outer step of SGD and rate 1, and the same program. Otherwise a
worker's changes count for more the more steps it has taken, so the mean leans towards the data of fast workers.

This is a simulation: all workers compute H gradients, and slow ones leave out what they would not have come to. So it shows what uneven
steps do to the result, and not the time that is saved where nobody waits. A schedule of the learning rate counts a worker's own steps.

Reference: Zhu et al. 2023, arXiv 2305.09887 (time-based model aggregation, TMA).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import reduce, registry
from decjax.channel import Channel
from decjax.mesh.axis import Axis
from decjax.optim.local_updates import local_updates
from decjax.optim.memories import increment
from decjax.optim.method import OldMethod, averaging


class UnevenState(NamedTuple):
    """State of `uneven_steps`.

    Attributes:
        step: steps of the run so far, the same on all workers, an int32 scalar.
        inner: state of the optimizer after the steps that the worker took.
    """

    step: jax.Array
    inner: Any


def uneven_steps(
    inner: optax.GradientTransformation, taken: tuple[int, ...], every: int, axis: Axis
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with which worker i takes the first h_i of every H steps; see `decjax.contrib.graphs.uneven`.

    Args:
        inner: any optax optimizer, clipping included.
        taken: h_i by worker.
        every: H.
        axis: of the workers, over which the update is mapped.
    """
    form = _Uneven(optax.with_extra_args_support(inner), taken, every, axis)
    return optax.GradientTransformationExtraArgs(form.init, form.update)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class _Uneven:
    """The functions of `uneven_steps`."""

    inner: optax.GradientTransformationExtraArgs
    taken: tuple[int, ...]
    every: int
    axis: Axis

    def init(self, params):
        return UnevenState(jnp.zeros((), jnp.int32), self.inner.init(params))

    def update(self, grads, state, params=None, **extra):
        updates, inner = self.inner.update(grads, state.inner, params, **extra)
        # A selection and no conditional: the optimizer may communicate between stages, and all workers run the same program.
        takes = state.step % self.every < jnp.asarray(self.taken)[self.axis.index]
        inner = jax.tree.map(lambda new, old: jnp.where(takes, new, old), inner, state.inner)
        updates = jax.tree.map(lambda update: jnp.where(takes, update, jnp.zeros_like(update)), updates)
        step = increment(state.step)
        return updates, UnevenState(step, inner)


@registry.register(
    "method",
    "tma",
    chooses=("reducer", "optimizer"),
    step="x_i ← x_i − α d_i(∇F_i(x_i)) in h_i of H steps, then the mean",
    messages="changes, every H steps",
    memory="1 copy",
    data="any",
    source="arXiv 2305.09887",
)
def tma(
    inner: optax.GradientTransformation,
    reducer: reduce.Reducer,
    num_workers: int,
    channel: Channel,
    *,
    every: int = 10,
    pace: str = "spread(slowest=0.5)",
) -> OldMethod:
    """Time-based model aggregation: local steps, of which slow workers take fewer, then the mean of all parameters.

    Equations, and that slowness is simulated: `decjax.contrib.graphs.uneven`.

    Args:
        every: H, steps of a round, which the fastest workers take.
        pace: how many each worker takes. "even": H. Numbers such as "10,7,5": of the first, second, … worker, and then from the front
            again. "spread(slowest=0.5,seed=0)": evenly spaced from H/2 to H, the order of workers drawn with that seed.

    Raises:
        ValueError: if the pace reads otherwise, has more numbers than there are workers, or one that is not from 1 to H.

    Reference: Zhu et al. 2023, arXiv 2305.09887.
    """
    taken = steps_of_round(pace, every, num_workers)
    own = inner if set(taken) == {every} else uneven_steps(inner, taken, every, channel.axis)
    reducer = reduce.every(reducer, every)
    return averaging(local_updates(own, reducer, optax.sgd(1.0)), reducer, num_workers)._replace(every=every)


def steps_of_round(pace: str, every: int, num_workers: int) -> tuple[int, ...]:
    """h_i, how many steps of a round each worker takes; see `tma`.

    Example:
        >>> steps_of_round("10,7,5", 10, 4)
        (10, 7, 5, 10)
    """
    given = f"method 'tma' pace={registry.shown(pace)}"
    numbers = pace.split(",")
    if all(number.strip().isdecimal() for number in numbers):
        steps = [int(number) for number in numbers]
        if len(steps) > num_workers:
            raise ValueError(f"{given}: {len(steps)} numbers for {num_workers} workers; give at most {num_workers}")
        if wrong := [h for h in steps if not 1 <= h <= every]:
            raise ValueError(f"{given}: {wrong[0]} steps of a round of every={every}; use 1 to {every}")
        return tuple(steps[i % len(steps)] for i in range(num_workers))
    try:
        name, options = registry.parse("method 'tma' pace", pace)
    except ValueError:
        name, options = "", {}
    if name == "even" and not options:
        return (every,) * num_workers
    if name != "spread" or options.keys() - {"slowest", "seed"}:
        raise ValueError(f"{given} is unknown; use even, numbers such as 10,7,5, or spread(slowest=0.5,seed=0)")
    known = {"slowest": registry.Option(0.5, float, False), "seed": registry.Option(0, int, False)}
    options = registry.fill(f"{given} option ", options, known)
    if not 0 < options["slowest"] <= 1 or options["seed"] < 0:
        raise ValueError(
            f"{given}: slowest is a share of H, more than 0 and at most 1, and seed at least 0; use spread(slowest=0.5)"
        )
    share_N = np.random.default_rng(options["seed"]).permutation(np.linspace(1, options["slowest"], num_workers))
    return tuple(max(1, round(float(share * every))) for share in share_N)
