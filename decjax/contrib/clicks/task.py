"""The task "clicks": click-through prediction of generated examples, whose least possible log-loss is known.

A hidden model, `impressions.Hidden`, says how likely each example is to be clicked. It is the same in all runs with the same options,
and so are the examples for validation; batches are functions of (seed, worker, step). No model's expected log-loss is below the hidden
model's own, the *floor*.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax.contrib.clicks.impressions import Hidden, Impressions
from decjax.contrib.clicks.model import Build, ClickModel
from decjax.options import Range
from decjax.tasks.task import Data, Task, spaced
from decjax.typing import PyTree

LARGEST = 10**7  # rows of all tables together


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(f"task tables={text!r} must read like '1000,50', the number of categories of each feature") from None
    if min(sizes) < 1 or sum(sizes) > LARGEST:
        raise ValueError(f"task tables={text!r}: a feature has at least 1 category, and all together at most {LARGEST}")
    return sizes


def auc(scores_W: np.ndarray, clicks_W: np.ndarray) -> float:
    """The area under the ROC curve: how often a clicked example has a higher score than one that is not; NaN if all are alike."""
    clicked = float(clicks_W.sum())
    others = len(clicks_W) - clicked
    if not clicked or not others:
        return float("nan")
    from scipy import stats  # Half a second, which every command that reads a config would take.

    ranks_W = stats.rankdata(scores_W)
    return float((ranks_W[clicks_W > 0.5].sum() - clicked * (clicked + 1) / 2) / (clicked * others))


class Clicks(Task, name="clicks"):
    """Whether an example is clicked, from generated data; metrics are log-loss, accuracy, its excess over the floor, and AUC.

    Attributes:
        model: `build(features, sizes) -> ClickModel`.
        features: F, numbers of an example.
        tables: V_t, how many categories each categorical feature has, such as "1000,50".
        skew: exponent of Zipf's law, by which categories are frequent; 0: all alike.
        signal: s, standard deviation of the hidden model's logits.
        bias: b, their mean.
        validation: how many examples are for validation.
    """

    models = ("dlrm",)

    model: Build
    features: Annotated[int, Range(1, 10**4)] = 8
    tables: str = "1000,500,200,100,50,30,20,10"
    skew: Annotated[float, Range(0, 10)] = 1.1
    signal: Annotated[float, Range(0, 100)] = 2.0
    bias: Annotated[float, Range(-100, 100)] = -1.0
    validation: Annotated[int, Range(1, 10**7)] = 4096

    def __post_init__(self):
        self.sizes  # noqa: B018  Refuses a text that cannot be read.

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """V_t, rows of each table."""
        return _sizes(self.tables)

    @functools.cached_property
    def network(self) -> ClickModel:
        """The model for these features and tables."""
        return self.model(self.features, self.sizes)

    @property
    def width(self) -> int:
        """D, width of the tables' vectors."""
        return self.network.width

    def indices(self, batch: Impressions) -> jax.Array:
        """Return the rows that a batch looks up, indices_BxT."""
        return batch.indices_BxT

    @property
    def metrics(self) -> dict[str, str]:
        return {"loss": "nats", "accuracy": ""}

    @property
    def scores(self) -> dict[str, str]:
        return {"auc": ""}

    def init(self, key: jax.Array) -> PyTree:
        return self.network.init(key)

    def logits(self, params: PyTree, examples: Impressions) -> jax.Array:
        """Return the logit of each example."""
        vectors_BxTxD = self.network.lookup(params["tables"], examples.indices_BxT)
        return self.network.logits(params["dense"], examples.numbers_BxF, vectors_BxTxD)

    def loss(self, params: PyTree, variables: PyTree, batch: Impressions, key: jax.Array | None) -> tuple[jax.Array, PyTree]:
        vectors_BxTxD = self.network.lookup(params["tables"], batch.indices_BxT)
        return self.loss_of(params, vectors_BxTxD, batch, key), variables

    def loss_of(self, params: PyTree, vectors_BxTxD: jax.Array, batch: Impressions, key: jax.Array | None) -> jax.Array:
        """Return the loss for vectors that were looked up; the parameters need no tables."""
        logits_B = self.network.logits(params["dense"], batch.numbers_BxF, vectors_BxTxD)
        return optax.sigmoid_binary_cross_entropy(logits_B, batch.clicks_B).mean()

    def measure(self, params: PyTree, variables: PyTree, examples: Impressions) -> tuple[dict[str, jax.Array], jax.Array]:
        logits_B = self.logits(params, examples)
        nll_B = optax.sigmoid_binary_cross_entropy(logits_B, examples.clicks_B)
        return {"loss": nll_B, "accuracy": ((logits_B > 0) == (examples.clicks_B > 0.5)) * 1.0}, jnp.ones_like(nll_B)

    def outputs(self, params: PyTree, variables: PyTree, examples: Impressions) -> dict[str, jax.Array]:
        """Return what the layers put out and what is read of the tables, as `contrib.compress.HasOutputs` says."""
        return self.network.outputs(params, examples.numbers_BxF, examples.indices_BxT)

    def examples(self, batch_size: int) -> Impressions:
        shapes = {"numbers_BxF": (self.features,), "indices_BxT": (len(self.sizes),), "clicks_B": ()}
        dtypes = {"indices_BxT": jnp.int32}
        return Impressions(**{k: jax.ShapeDtypeStruct((batch_size, *v), dtypes.get(k, jnp.float32)) for k, v in shapes.items()})

    def derived(self, values: Mapping[str, float], data: Data, limit: int) -> dict[str, float]:
        return {"excess": values["loss"] - data.more(limit)}

    def score(self, params: PyTree, variables: PyTree, data: Data) -> dict[str, float]:
        valid = data.validation(0)
        return {"auc": auc(np.asarray(jax.jit(self.logits)(params, valid)), valid.clicks_B)}

    def load(self, num_workers: int, batch_size: int, seed: int) -> Data:
        hidden = Hidden(self.features, self.sizes, self.skew, self.signal, self.bias)
        valid, logits_W = hidden.draw(np.random.default_rng((1, 0)), self.validation)
        own_W = np.logaddexp(0, logits_W) - logits_W * valid.clicks_B  # the hidden model's log-loss

        def floor(limit):
            return float(own_W[spaced(self.validation, limit)].mean())

        return Data(
            batch=lambda worker, step: hidden.draw(np.random.default_rng((2, seed, worker, step)), batch_size)[0],
            validation=lambda limit: jax.tree.map(lambda x: x[spaced(self.validation, limit)], valid),
            fingerprint=f"clicks({dataclasses.asdict(hidden)}, validation={self.validation}), {seed=}",
            facts=lambda: {"floor": floor(0)},
            more=floor,
        )


clicks = Clicks
