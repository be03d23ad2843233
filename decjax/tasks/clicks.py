"""The task "clicks": click-through prediction of generated examples, whose least possible log-loss is known.

A hidden model, `impressions.Hidden`, says how likely each example is to be clicked. It is the same in all runs with the same options,
and so are the examples for validation; batches are functions of (seed, worker, step). No model's expected log-loss is below the hidden
model's own, the *floor*.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import models, registry
from decjax.models.clicks import Build
from decjax.tasks.impressions import Hidden, Impressions
from decjax.tasks.task import Data, Lookups, Metric, Task, spaced

LARGEST = 10**7  # rows of all tables together


@registry.register("task", "clicks", models=("dlrm",))
def clicks(
    model: Build,
    *,
    features: int = 8,
    tables: str = "1000,500,200,100,50,30,20,10",
    skew: float = 1.1,
    signal: float = 2.0,
    bias: float = -1.0,
    validation: int = 4096,
) -> Task:
    """Whether an example is clicked, from generated data; metrics are log-loss, accuracy, its excess over the floor, and AUC.

    Args:
        model: `build(features, sizes) -> ClickModel`.
        features: F ≥ 1, numbers of an example.
        tables: V_t, how many categories each categorical feature has, such as "1000,50".
        skew: exponent of Zipf's law, by which categories are frequent, at least 0; 0: all alike.
        signal: s ≥ 0, standard deviation of the hidden model's logits.
        bias: b, their mean.
        validation: how many examples are for validation, at least 1.

    Raises:
        ValueError: if an option lies outside its range, or `tables` cannot be read.
    """
    for name, value, least, most in (
        ("features", features, 1, 10**4),
        ("skew", skew, 0, 10),
        ("signal", signal, 0, 100),
        ("bias", bias, -100, 100),
        ("validation", validation, 1, 10**7),
    ):
        if not least <= value <= most:
            raise ValueError(f"task {name}={value} must lie between {least} and {most}")
    form = _Clicks(model(features, _sizes(tables)), features, skew, signal, bias, validation)
    return Task(
        init=form.model.init,
        loss=form.loss,
        measure=form.measure,
        metrics={"loss": Metric("nats"), "accuracy": Metric()},
        examples=form.examples,
        load=form.load,
        lookups=Lookups(form.model.sizes, form.model.width, lambda batch: batch.indices_BxT, form.loss_of),
        derived=form.derived,
        score=form.score,
        outputs=form.outputs if form.model.outputs else None,
        scores={"auc": Metric()},
    )


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(f"task tables={text!r} must read like '1000,50', the number of categories of each feature") from None
    if min(sizes) < 1 or sum(sizes) > LARGEST:
        raise ValueError(f"task tables={text!r}: a feature has at least 1 category, and all together at most {LARGEST}")
    return sizes


@dataclasses.dataclass(frozen=True)
class _Clicks:
    """The task's functions."""

    model: models.ClickModel
    features: int
    skew: float
    signal: float
    bias: float
    validation: int

    def logits(self, params, examples):
        vectors_BxTxD = self.model.lookup(params["tables"], examples.indices_BxT)
        return self.model.logits(params["dense"], examples.numbers_BxF, vectors_BxTxD)

    def loss(self, params, variables, batch, key):
        vectors_BxTxD = self.model.lookup(params["tables"], batch.indices_BxT)
        return self.loss_of(params, vectors_BxTxD, batch, key), variables

    def loss_of(self, params, vectors_BxTxD, batch, key):
        """The loss for vectors that were looked up; the parameters need no tables."""
        del key
        logits_B = self.model.logits(params["dense"], batch.numbers_BxF, vectors_BxTxD)
        return optax.sigmoid_binary_cross_entropy(logits_B, batch.clicks_B).mean()

    def measure(self, params, variables, examples):
        del variables
        logits_B = self.logits(params, examples)
        nll_B = optax.sigmoid_binary_cross_entropy(logits_B, examples.clicks_B)
        return {"loss": nll_B, "accuracy": ((logits_B > 0) == (examples.clicks_B > 0.5)) * 1.0}, jnp.ones_like(nll_B)

    def outputs(self, params, variables, examples):
        del variables
        assert self.model.outputs
        return self.model.outputs(params, examples.numbers_BxF, examples.indices_BxT)

    def examples(self, batch_size):
        shapes = {"numbers_BxF": (self.features,), "indices_BxT": (len(self.model.sizes),), "clicks_B": ()}
        dtypes = {"indices_BxT": jnp.int32}
        return Impressions(**{k: jax.ShapeDtypeStruct((batch_size, *v), dtypes.get(k, jnp.float32)) for k, v in shapes.items()})

    def derived(self, values, data, limit):
        return {"excess": values["loss"] - data.more(limit)}

    def score(self, params, variables, data):
        del variables
        valid = data.validation(0)
        return {"auc": auc(np.asarray(jax.jit(self.logits)(params, valid)), valid.clicks_B)}

    def load(self, num_workers, batch_size, seed):
        del num_workers
        hidden = Hidden(self.features, self.model.sizes, self.skew, self.signal, self.bias)
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


def auc(scores_W: np.ndarray, clicks_W: np.ndarray) -> float:
    """The area under the ROC curve: how often a clicked example has a higher score than one that is not; NaN if all are alike."""
    clicked = float(clicks_W.sum())
    others = len(clicks_W) - clicked
    if not clicked or not others:
        return float("nan")
    from scipy import stats  # Half a second, which every command that reads a config would take.

    ranks_W = stats.rankdata(scores_W)
    return float((ranks_W[clicks_W > 0.5].sum() - clicked * (clicked + 1) / 2) / (clicked * others))
