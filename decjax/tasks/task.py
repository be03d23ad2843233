"""The interface of a task: all that the trainer and pipelines know of models and data.

    loss, variables = loss(params, variables, batch, key)      weighted mean over one worker's batch, to be differentiated
    sums_B, weight_B = measure(params, variables, examples)    one value per example; a metric is Σ sum ÷ Σ weight

Variables are what a model stores beside its parameters and what no gradient changes, such as batch statistics; () where there are
none. Each worker has its own; for evaluation they are averaged like the parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Metric(NamedTuple):
    """A metric of a model's quality.

    Attributes:
        unit: such as "nats/byte"; empty for a plain number.
    """

    unit: str = ""


class Data(NamedTuple):
    """The loaded data of a task; all random choices are functions of (seed, worker, step).

    Attributes:
        batch: `batch(worker, step) -> examples`, a pytree of NumPy arrays [B, …].
        validation: `validation(limit) -> examples`, evenly spaced ones, [W, …]; limit 0: all.
        fingerprint: identifies the data; a run is continued only on data with the same one.
        facts: `facts()`, numbers about the data by name, for a run's summary.
        more: what the task's own `score` and `show` need besides, such as a tokenizer.
    """

    batch: Callable[[int, int], Any]
    validation: Callable[[int], Any]
    fingerprint: str
    facts: Callable[[], Mapping[str, float]] = dict
    more: Any = None


class Lookups(NamedTuple):
    """The embedding tables of a model, which workers may divide among them, and the model's loss for vectors that were looked up.

    The model's parameters are a dict. Its entry "tables" has the table of feature t, [V_t, D], at `[t]["embedding"]`.

    Attributes:
        sizes: V_t, rows of each table.
        width: D.
        indices: `indices(batch) -> indices_BxT`, the rows that a batch looks up.
        loss: `loss(params, vectors_BxTxD, batch, key)`, the mean over a batch; its parameters are without "tables".
    """

    sizes: tuple[int, ...]
    width: int
    indices: Callable[[Any], Any]
    loss: Callable[[Any, Any, Any, Any], Any]


class Task(NamedTuple):
    """A task: the loss of a model, its data and its metrics, as pure functions of plain pytrees.

    A registered factory takes the built model as `model`. Its trait `models` names the models that it can train; further ones name
    the task in their trait `tasks`. Models of images come as a function that the task calls with the images' shape and classes (see
    `models.ImageModel`). The factory raises a ValueError for an option that is out of range or does not fit the model.

    Attributes:
        init: `init(key) -> params`.
        loss: `loss(params, variables, batch, key) -> (loss, variables)`, the mean over a worker's batch; the key is for dropout.
        weight: `weight(batch)`, positive, the number that `loss` divides by where it depends on the batch's content, such as its
            number of tokens without padding; microbatches count in proportion to it. None: the same for all batches of a size.
        measure: `measure(params, variables, examples) -> (sums, weight_B)`; sums [B] by the name of the metric, which is Σ sum ÷ Σ
            weight.
        metrics: the metrics by name; "loss" is the first.
        examples: `examples(B)`, shapes and dtypes of a batch; of the largest one where batches have a few shapes, or validation
            examples are larger.
        load: `load(num_workers, batch_size, seed) -> Data`, with B examples per worker; reads files.
        items: how many items one example counts as in throughput: T tokens for a sequence.
        item: what these are called, such as "tokens".
        variables: `variables()`, the model's variables before training.
        parts: the model split up for pipelines, a `models.Parts`; None if it cannot be divided.
        divided: which parameters a tensor-parallel group divides; see `models.Model`.
        units: which parameters belong to hidden units, of which a part of the network may be made: pairs of the end of a parameter's
            path and the axis (negative, counted from the end) along which its units lie.
        lookups: the model's embedding tables; None if it has none that could be divided.
        derived: `derived(values, data, limit) -> values by name`, what follows from the metrics of so many validation examples (0: of
            all), such as perplexity.
        score: `score(params, variables, data) -> values by name`, metrics of a trained model that are no means over examples, such as
            BLEU; found at the end, of the averaged model. None: there are none.
        scores: these metrics by name.
        show: `show(params, variables, data, key)`, a text for people that shows what the trained model does; None: nothing to show.
        outputs: `outputs(params, variables, examples)`, what parts of the model put out, by the path of their weights with slashes: [M, J]
            of a linear layer, by that of its `kernel` [I, J] (a sibling called `bias` is added); [M, D], the rows that are read, of a table
            `embedding` [V, D]. For compressing the weights; None: they are not shown.
    """

    init: Callable[[Any], Any]
    loss: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    measure: Callable[[Any, Any, Any], tuple[dict[str, Any], Any]]
    metrics: Mapping[str, Metric]
    examples: Callable[[int], Any]
    load: Callable[[int, int, int], Data]
    weight: Callable[[Any], Any] | None = None
    items: int = 1
    item: str = "examples"
    variables: Callable[[], Any] = lambda: ()
    parts: Any = None
    divided: tuple[tuple[str, int], ...] = ()
    units: tuple[tuple[str, int], ...] = ()
    lookups: Lookups | None = None
    derived: Callable[[Mapping[str, float], Data, int], dict[str, float]] = lambda values, data, limit: {}
    score: Callable[[Any, Any, Data], dict[str, float]] | None = None
    scores: Mapping[str, Metric] = {}
    show: Callable[[Any, Any, Data, Any], str] | None = None
    outputs: Callable[[Any, Any, Any], dict[str, Any]] | None = None


def spaced(count: int, limit: int) -> np.ndarray:
    """Indices of `limit` evenly spaced ones of `count` examples, or of all where `limit` is 0 or larger than `count`."""
    chosen = min(limit, count) if limit else count
    return np.arange(chosen) * count // chosen
