"""The task "lm": next-byte prediction on any text."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decjax import models, registry
from decjax.tasks import partition as partition_lib
from decjax.tasks import text
from decjax.tasks.task import Data, Metric, Task

MAX_SAMPLE_BYTES = 100_000
PROMPT_BYTES = 32


@registry.register("task", "lm", models=("decoder",))
def lm(model: models.Model, *, path: str = "", partition: str = "iid", sample_bytes: int = 400) -> Task:
    """Byte-level language modelling: predicts the next byte of a text; the metric is the loss in nats per byte.

    Args:
        model: a language model with a vocabulary of at least 256.
        path: a text file or a folder of them; empty: the sources of the running Python's standard library.
        partition: which windows of text each worker has: "iid", "contiguous" or "dirichlet(alpha=0.1)", by file; see
            `tasks.partition`.
        sample_bytes: how many bytes of text the trained model writes at the end; 0: none.

    Raises:
        ValueError: if an option is none of these; from `load`, if the path holds no or too little text.
    """
    partition_lib.parse(partition)
    if not 0 <= sample_bytes <= MAX_SAMPLE_BYTES:
        raise ValueError(f"task sample_bytes={sample_bytes} must lie between 0 and {MAX_SAMPLE_BYTES}")
    if model.vocabulary < 256:
        raise ValueError(f"model vocabulary={model.vocabulary} is less than 256, the number of bytes; use 256")
    form = _NextByte(model, path, partition, sample_bytes)
    return Task(
        init=model.init,
        loss=form.loss,
        measure=form.measure,
        metrics={"loss": Metric("nats/byte")},
        examples=lambda batch_size: jax.ShapeDtypeStruct((batch_size, model.context + 1), jnp.int32),
        load=form.load,
        items=model.context,
        item="tokens",
        parts=model.parts,
        divided=model.divided,
        show=form.show if sample_bytes else None,
    )


@dataclasses.dataclass(frozen=True)
class _NextByte:
    """The task's functions."""

    model: models.Model
    path: str
    partition: str
    sample_bytes: int

    def loss(self, params, variables, tokens_BxT1, key):
        return self.model.nll(params, tokens_BxT1, key).mean(), variables

    def measure(self, params, variables, tokens_BxT1):
        nll_BxT = self.model.nll(params, tokens_BxT1, jax.random.key(0))
        return {"loss": nll_BxT.sum(axis=1)}, jnp.full(len(nll_BxT), float(self.model.context))

    def load(self, num_workers, batch_size, seed):
        T = self.model.context
        corpus = text.load_corpus(self.path, min_bytes=T + 1)
        return Data(
            batch=text.batches(
                corpus, context=T, batch_size=batch_size, num_workers=num_workers, seed=seed, partition=self.partition
            ),
            validation=lambda limit: text.validation_windows(corpus.valid, context=T, limit=limit),
            fingerprint=corpus.fingerprint,
            facts=lambda: {"corpus_order1_entropy": text.order1_entropy(corpus.train)},
        )

    def show(self, params: Any, variables: Any, data: Data, key: jax.Array) -> str:
        prompt = bytes(data.validation(1)[0, :PROMPT_BYTES].astype(np.uint8))
        written = models.sample(self.model, params, prompt, self.sample_bytes, key)
        return (prompt + written).decode("utf-8", errors="replace")
