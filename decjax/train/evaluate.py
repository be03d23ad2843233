"""Evaluation of the averaged model and of each worker's model; the training state is not changed."""

from collections.abc import Callable, Mapping
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh
from decjax.pipeline.source import Measure
from decjax.typing import PyTree

WEIGHT = "weight of examples"  # an entry next to the task's metrics


class Evaluation(NamedTuple):
    """Metrics on validation data, by name; see `tasks.Task`.

    Attributes:
        averaged: of the averaged model.
        local: of each worker's model, [N]; empty if they were not evaluated.
        coded: of the averaged model with compressed activations between stages; None if they are not compressed.
    """

    averaged: Mapping[str, float]
    local: Mapping[str, np.ndarray]
    coded: Mapping[str, float] | None = None


def _chunks(examples: PyTree, count: int, batch_size: int) -> tuple[PyTree, np.ndarray]:
    """Pad examples [W, …] to (count, C, B, …) with C as small as possible; the mask (count, C, B) is 0 on padding."""
    W = len(jax.tree.leaves(examples)[0])
    C = -(-W // (count * batch_size))
    total = count * C * batch_size
    padded = jax.tree.map(lambda x: np.resize(x, (total, *x.shape[1:])).reshape(count, C, batch_size, *x.shape[1:]), examples)
    return padded, (np.arange(total) < W).astype(np.float32).reshape(count, C, batch_size)


def make_evaluate(
    measure: Measure, workers: mesh.Workers, examples: PyTree, batch_size: int, coded: Measure | None = None, local: bool = True
) -> Callable[[PyTree, PyTree], Evaluation]:
    """Compile the evaluation of the workers' models, and of their average, on fixed examples.

    All workers evaluate the averaged model together, each on a part of the examples, and with `local` each its own on all of them.
    Examples are a pytree of NumPy arrays [W, …]; `coded` is `measure` with compressed messages between stages, if there are any.

    Returns:
        `evaluate(models, average) -> Evaluation`, of (parameters, variables) stacked over workers, and of the averaged model's. A
            collective.
    """

    def summed(model, examples, mask_CxB, measure=measure):
        def add(totals, chunk):
            examples, mask_B = jax.tree.map(lambda x: mesh.spread(x, 0), chunk)
            sums, weight_B = measure(*model, examples)
            return {name: totals[name] + (x * mask_B).sum() for name, x in (sums | {WEIGHT: weight_B}).items()}, None

        names = jax.eval_shape(measure, *model, jax.tree.map(lambda x: x[0], examples))[0]
        return jax.lax.scan(add, dict.fromkeys((*names, WEIGHT), jnp.zeros(())), (examples, mask_CxB))[0]

    build = functools.partial(workers.build, batch_axis=1)
    shares = jax.tree.map(lambda x: build(x.__getitem__), _chunks(examples, workers.num_workers, batch_size))
    whole = jax.tree.map(lambda x: x[0], _chunks(examples, 1, batch_size))
    together = workers.jit(summed, in_axes=(None, 0, 0))
    apart = workers.jit(summed, in_axes=(0, None, None))
    coded_together = workers.jit(lambda *given: summed(*given, measure=coded), in_axes=(None, 0, 0)) if coded else None

    def joint(program, average):
        sums = {name: float(x_N.sum()) for name, x_N in workers.fetch(program(average, *shares)).items()}
        return {name: x / sums[WEIGHT] for name, x in sums.items() if name != WEIGHT}

    def evaluate(models, average):
        sums = workers.fetch(apart(models, *whole)) if local else {}
        own = {name: x_N / sums[WEIGHT] for name, x_N in sums.items() if name != WEIGHT}
        return Evaluation(joint(together, average), own, joint(coded_together, average) if coded else None)

    return evaluate
