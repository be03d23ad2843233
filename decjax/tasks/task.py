"""The interface of a task: everything that the trainer and pipelines use of models and data.

    loss, variables = loss(params, variables, batch, key)      weighted mean over one worker's batch, to be differentiated
    sums_B, weight_B = measure(params, variables, examples)    one value per example; a metric is Σ sum ÷ Σ weight

Variables are model state that is not trained by gradients, such as batch statistics; () where there are none. Each worker has its own;
for evaluation they are averaged like the parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar
import zlib

import jax
import numpy as np

from decjax import registry
from decjax.options import Range
from decjax.typing import PyTree

if TYPE_CHECKING:  # Importing Flax takes half a second, and most commands need no model.
    from decjax.models import Parts

T = TypeVar("T")
HeldOut = Annotated[float, Range(0, 1, above=True, below=True)]  # share of examples that are for validation


class Data(NamedTuple):
    """The loaded data of a task; all random choices are functions of (seed, worker, step).

    Attributes:
        batch: `batch(worker, step) -> examples`, a pytree of NumPy arrays [B, …].
        validation: `validation(limit) -> examples`, evenly spaced ones, [W, …]; limit 0: all.
        fingerprint: identifies the data; a run is continued only on data with the same fingerprint.
        facts: `facts()`, statistics of the data by name, for the summary of a run.
        more: what `Task.derived`, `score` and `show` also need, such as a tokenizer.
    """

    batch: Callable[[int, int], PyTree]
    validation: Callable[[int], PyTree]
    fingerprint: str
    facts: Callable[[], Mapping[str, float]] = dict
    more: Any = None


class Task(registry.Part, kind="task"):
    """The loss of a model, its data and its metrics, as pure functions of plain pytrees.

    A task implements `init`, `loss`, `measure`, `metrics`, `examples` and `load`; everything else has a default. The built model is the
    field `model`; image models are functions that the task calls with the images' shape and classes (see `contrib.images.ImageModel`).

    Attributes:
        models: the registered models that it can train; () for a task with a built-in model. A model may name further tasks in its
            trait `tasks`.
        item: what `items` counts, such as "tokens".
    """

    models: ClassVar[tuple[str, ...]] = ()
    item: ClassVar[str] = "examples"

    @property
    def metrics(self) -> dict[str, str]:
        """The unit of each metric by name, such as "nats/byte", or empty; "loss" is the first."""
        raise NotImplementedError

    @property
    def scores(self) -> dict[str, str]:
        """The same for the metrics that `score` returns."""
        return {}

    def init(self, key: jax.Array) -> PyTree:
        """Return the initial parameters."""
        raise NotImplementedError

    def loss(self, params: PyTree, variables: PyTree, batch: PyTree, key: jax.Array | None) -> tuple[jax.Array, PyTree]:
        """Return (mean loss over a worker's batch, variables); the key is for dropout."""
        raise NotImplementedError

    def measure(self, params: PyTree, variables: PyTree, examples: PyTree) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return (sums [B] by name of the metric, weights [B])."""
        raise NotImplementedError

    def examples(self, batch_size: int) -> PyTree:
        """Return shapes and dtypes of a batch; of the largest one if batches differ in shape or validation examples are larger."""
        raise NotImplementedError

    def load(self, num_workers: int, batch_size: int, seed: int) -> Data:
        """Return the data, with B examples per worker; the only method that reads files."""
        raise NotImplementedError

    def weight(self, batch: PyTree) -> jax.Array | None:
        """Return the positive number that `loss` divides by if it depends on the batch, such as its tokens without padding.

        Microbatches are weighted by it. None: it depends on the batch size only.
        """
        return None

    def variables(self) -> PyTree:
        """Return the model's variables before training."""
        return ()

    def derived(self, values: Mapping[str, float], data: Data, limit: int) -> dict[str, float]:
        """Return metrics that follow from those of `limit` validation examples (0: of all), such as perplexity."""
        return {}

    def score(self, params: PyTree, variables: PyTree, data: Data) -> dict[str, float]:
        """Return metrics of the trained, averaged model that are not means over examples, such as BLEU."""
        return {}

    def show(self, params: PyTree, variables: PyTree, data: Data, key: jax.Array) -> str:
        """Return sample output of the trained model as text, or an empty string."""
        return ""

    @property
    def items(self) -> int:
        """The items of an example in throughput figures: T tokens for a sequence."""
        return 1

    @property
    def parts(self) -> "Parts | None":
        """The model split up for pipelines; None if it cannot be divided."""
        return self._of_model("parts", None)

    @property
    def divided(self) -> tuple[tuple[str, int], ...]:
        """Which parameters a tensor-parallel group divides; see `models.Model`."""
        return self._of_model("divided", ())

    @property
    def units(self) -> tuple[tuple[str, int], ...]:
        """The parameters of hidden units, of which methods such as independent subnets train a subset.

        Pairs of the end of a parameter's path and the axis (negative, counted from the end) of its units.
        """
        return self._of_model("units", ())

    def _of_model(self, name: str, default: T) -> T:
        return getattr(getattr(self, "model", None), name, default)


def spaced(count: int, limit: int) -> np.ndarray:
    """Return the indices of `limit` evenly spaced ones of `count` examples, or of all where `limit` is 0 or larger than `count`."""
    chosen = min(limit, count) if limit else count
    return np.arange(chosen) * count // chosen


def checksum(parts: Iterable[bytes | np.ndarray]) -> str:
    """Return the CRC-32 of data, for fingerprints."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part if isinstance(part, bytes) else part.data, crc)
    return f"crc {crc:08x}"
