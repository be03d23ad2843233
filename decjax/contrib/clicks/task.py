"""The task "clicks": click-through prediction of generated examples, whose least possible log-loss is known."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax.contrib.clicks.model import ClickModel
from decjax.options import Count, Range, check
from decjax.tasks.task import Data, Task, spaced
from decjax.typing import PyTree

LARGEST = 10**7  # rows of all tables together
RANK = 4  # of the hidden model's interactions


class Impressions(NamedTuple):
    """Examples: F numbers of each, the category of each of T features, and whether it was clicked, 0 or 1."""

    numbers_BxF: PyTree
    indices_BxT: PyTree
    clicks_B: PyTree


@dataclasses.dataclass(frozen=True)
class Hidden:
    """The model that generates examples; it is the same in all runs with the same options.

        x ~ N(0, I),   P(c_t = k) ∝ (k + 1)^−skew,   P(click) = σ(b + s·z(x, c)),
        z = wᵀx + Σ_t a_t[c_t] + Σ_{s<t} ⟨u_s[c_s], u_t[c_t]⟩,  shifted and scaled to mean 0 and variance 1

    A few categories of each feature are frequent and most are rare, as in logs of clicks.
    """

    features: int
    sizes: tuple[int, ...]
    skew: float
    signal: float
    bias: float

    @functools.cached_property
    def _weights(self) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """w, and (a_t, u_t) of each table."""
        rng = np.random.default_rng((0, *self.sizes))
        weight_F = rng.normal(size=self.features) / self.features**0.5
        return weight_F, [(rng.normal(size=size), rng.normal(size=(size, RANK)) / RANK**0.5) for size in self.sizes]

    @functools.cached_property
    def _cumulative(self) -> list[np.ndarray]:
        """Cumulative frequencies of each table's categories."""
        sums = [np.cumsum(np.arange(1.0, size + 1) ** -self.skew) for size in self.sizes]
        return [sums_V / sums_V[-1] for sums_V in sums]

    @functools.cached_property
    def _moments(self) -> tuple[float, float]:
        raw_W = self._raw(*self._inputs(np.random.default_rng((0, 1)), 2**14))
        return float(raw_W.mean()), float(raw_W.std())

    def _inputs(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        numbers_BxF = rng.normal(size=(count, self.features))
        drawn = [np.searchsorted(cumulative_V, rng.random(count), side="right") for cumulative_V in self._cumulative]
        return numbers_BxF, np.stack(drawn, axis=1)

    def _raw(self, numbers_BxF: np.ndarray, indices_BxT: np.ndarray) -> np.ndarray:
        """z before it is shifted and scaled."""
        weight_F, tables = self._weights
        z_B, sum_BxR, squares_B = numbers_BxF @ weight_F, np.zeros((len(numbers_BxF), RANK)), np.zeros(len(numbers_BxF))
        for (a_V, u_VxR), index_B in zip(tables, indices_BxT.T):
            z_B = z_B + a_V[index_B]
            sum_BxR += u_VxR[index_B]
            squares_B += (u_VxR[index_B] ** 2).sum(axis=1)
        return z_B + ((sum_BxR**2).sum(axis=1) - squares_B) / 2  # Products of all pairs.

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Impressions, np.ndarray]:
        """Return (examples, the hidden model's logits)."""
        numbers_BxF, indices_BxT = self._inputs(rng, count)
        mean, deviation = self._moments
        logits_B = self.bias + self.signal * (self._raw(numbers_BxF, indices_BxT) - mean) / deviation
        clicks_B = rng.random(count) < 1 / (1 + np.exp(-logits_B))
        return Impressions(np.float32(numbers_BxF), np.int32(indices_BxT), np.float32(clicks_B)), logits_B


def auc(scores_W: np.ndarray, clicks_W: np.ndarray) -> float:
    """Return the area under the ROC curve: how often a clicked example has a higher score than one that is not; NaN if all are alike."""
    clicked = float(clicks_W.sum())
    others = len(clicks_W) - clicked
    if not clicked or not others:
        return float("nan")
    from scipy import stats  # Half a second, which every command that reads a config would take.

    ranks_W = stats.rankdata(scores_W)
    return float((ranks_W[clicks_W > 0.5].sum() - clicked * (clicked + 1) / 2) / (clicked * others))


class Clicks(Task, name="clicks"):
    """Whether an example is clicked, from generated data; metrics are log-loss, accuracy, its excess over the floor, and AUC.

    The *floor* is the expected log-loss of the hidden model that generates the examples, the least that any model has. Validation
    examples are the same in all runs with the same options; batches are functions of (seed, worker, step).

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

    model: Callable[[int, tuple[int, ...]], ClickModel]
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
        what = f"task tables={self.tables!r}"
        try:
            sizes = tuple(int(size) for size in self.tables.split(","))
        except ValueError:
            raise ValueError(f"{what} must read like '1000,50', the number of categories of each feature") from None
        check(f"{what}: the fewest categories of a feature", min(sizes), Count)
        check(f"{what}: all categories together", sum(sizes), Annotated[int, Range(1, LARGEST)])
        return sizes

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
        vectors_BxTxD = self.network.lookup(params["tables"], self.indices(examples))
        return self.network.logits(params["dense"], examples.numbers_BxF, vectors_BxTxD)

    def loss(self, params: PyTree, variables: PyTree, batch: Impressions, key: jax.Array | None) -> tuple[jax.Array, PyTree]:
        return self.loss_of(params, self.network.lookup(params["tables"], self.indices(batch)), batch, key), variables

    def loss_of(self, params: PyTree, vectors_BxTxD: jax.Array, batch: Impressions, key: jax.Array | None) -> jax.Array:
        """Return the loss for vectors that were looked up; the parameters need no tables."""
        logits_B = self.network.logits(params["dense"], batch.numbers_BxF, vectors_BxTxD)
        return optax.sigmoid_binary_cross_entropy(logits_B, batch.clicks_B).mean()

    def measure(self, params: PyTree, variables: PyTree, examples: Impressions) -> tuple[dict[str, jax.Array], jax.Array]:
        logits_B = self.logits(params, examples)
        nll_B = optax.sigmoid_binary_cross_entropy(logits_B, examples.clicks_B)
        return {"loss": nll_B, "accuracy": ((logits_B > 0) == (examples.clicks_B > 0.5)) * 1.0}, jnp.ones_like(nll_B)

    def outputs(self, params: PyTree, variables: PyTree, examples: Impressions) -> dict[str, jax.Array]:
        """Return the outputs of the layers and the rows that are read of the tables, as `contrib.compress.HasOutputs` says."""
        return self.network.outputs(params, examples.numbers_BxF, self.indices(examples))

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
