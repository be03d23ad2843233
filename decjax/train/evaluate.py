"""Evaluation of the averaged model and of every worker's own model; the training state is not changed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh

Measure = Callable[[Any, Any, Any], tuple[dict[str, jax.Array], jax.Array]]


class Evaluation(NamedTuple):
    """Metrics on validation data, by name; see `tasks.Task`.

    Attributes:
        averaged: of the averaged model.
        local: of each worker's own model, [N]; empty where these were left out.
        coded: of the averaged model with its activations between stages compressed; None where they are not.
    """

    averaged: Mapping[str, float]
    local: Mapping[str, np.ndarray]
    coded: Mapping[str, float] | None = None


def _chunks(examples: Any, count: int, batch_size: int) -> tuple[Any, np.ndarray]:
    """Pads examples [W, …] to (count, C, B, …) with C as small as possible; the mask (count, C, B) is 0 on padding."""
    W = len(jax.tree.leaves(examples)[0])
    C = -(-W // (count * batch_size))
    total = count * C * batch_size
    padded = jax.tree.map(lambda x: np.resize(x, (total, *x.shape[1:])).reshape(count, C, batch_size, *x.shape[1:]), examples)
    return padded, (np.arange(total) < W).astype(np.float32).reshape(count, C, batch_size)


def make_evaluate(
    measure: Measure, workers: mesh.Workers, examples: Any, batch_size: int, coded: Measure | None = None, local: bool = True
) -> Callable[[Any, Any], Evaluation]:
    """Compiles the evaluation of the workers' models, and of their average, on fixed examples.

    The averaged model is evaluated by all workers together, each on a part of the examples; every local model on all of them.
    Examples are a pytree of NumPy arrays [W, …]; `coded` is `measure` with compressed messages between stages, if there are any.
    Without `local` the averaged model alone is evaluated.

    Returns:
        `evaluate(models, average) -> Evaluation`, of (parameters, variables) stacked over workers, and of the averaged model's. A
            collective.
    """

    def summed(model, examples, mask_CxB, measure=measure):
        def add(totals, chunk):
            examples, mask_B = chunk
            sums, weight_B = measure(*model, examples)
            return {name: totals[name] + (x * mask_B).sum() for name, x in (sums | {WEIGHT: weight_B}).items()}, None

        names = jax.eval_shape(measure, *model, jax.tree.map(lambda x: x[0], examples))[0]
        return jax.lax.scan(add, dict.fromkeys((*names, WEIGHT), jnp.zeros(())), (examples, mask_CxB))[0]

    shares = jax.tree.map(lambda x: workers.build(x.__getitem__), _chunks(examples, workers.num_workers, batch_size))
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


WEIGHT = "weight of examples"  # an entry beside the task's metrics
