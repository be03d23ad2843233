"""What a task is: all that the trainer, a pipeline and the loop know of models and data.

    loss, variables = loss(params, variables, batch, key)      one worker's mean over its batch, to be differentiated
    sums_B, weight_B = measure(params, variables, examples)    of single examples; a metric is Σ sum ÷ Σ weight

Variables are what a model keeps beside its parameters and no gradient moves, such as batch statistics; () where there are none.
They stay with their worker, and are averaged where parameters are: for evaluation.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Metric(NamedTuple):
    """A number that tells how good a model is.

    Attributes:
        unit: as "nats/byte"; empty for a plain number.
        higher_is_better: else lower is.
    """

    unit: str = ""
    higher_is_better: bool = False


class Data(NamedTuple):
    """The data of a task; its random choices are functions of (seed, worker, step).

    Attributes:
        batch: `batch(worker, step) -> examples`, a pytree of NumPy arrays [B, …].
        validation: `validation(limit) -> examples`, [W, …], evenly spaced ones; 0: all.
        fingerprint: a run continues on the data it began with.
        facts: `facts()` by name, what a run's summary tells of the data.
    """

    batch: Callable[[int, int], Any]
    validation: Callable[[int], Any]
    fingerprint: str
    facts: Callable[[], Mapping[str, float]] = dict


class Task(NamedTuple):
    """What is learned, of which data and model; pure functions of plain pytrees.

    A registered factory takes the built model as `model`, and names those that it can train in the trait `models`; of a model of
    images it builds the rest, as it knows their shape and classes (see `models.ImageModel`).

    Attributes:
        init: `init(key) -> params`.
        loss: `loss(params, variables, batch, key) -> (loss, variables)`; the key is for dropout and the like.
        measure: `measure(params, variables, examples) -> (sums, weight_B)`, sums [B] by the name of the metric.
        metrics: by name; "loss" is the first.
        examples: `examples(B)` -> shapes and dtypes of a batch.
        load: `load(num_workers, batch_size, seed) -> Data`, with B examples in a worker's batch; reads files.
        items: of an example, which throughput counts: T tokens of a sequence.
        item: what they are called, as "tokens".
        variables: `variables() -> variables` of a model that has seen nothing.
        parts: the model in pieces, a `models.Parts`, for pipelines; None if it does not come apart.
        divided: see `models.Model`.
        show: `show(params, variables, data, key) -> str`, what a finished model can do, for people; None: nothing to show.
    """

    init: Callable[[Any], Any]
    loss: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    measure: Callable[[Any, Any, Any], tuple[dict[str, Any], Any]]
    metrics: Mapping[str, Metric]
    examples: Callable[[int], Any]
    load: Callable[[int, int, int], Data]
    items: int = 1
    item: str = "examples"
    variables: Callable[[], Any] = lambda: ()
    parts: Any = None
    divided: tuple[tuple[str, int], ...] = ()
    show: Callable[[Any, Any, Data, Any], str] | None = None


def spaced(count: int, limit: int) -> np.ndarray:
    """Indices of `limit` evenly spaced ones of `count`; all for 0."""
    chosen = min(limit, count) if limit else count
    return np.arange(chosen) * count // chosen
