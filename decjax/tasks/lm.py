"""The task "lm": next-byte prediction on any text."""

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
    T = model.context

    def loss(params, variables, tokens_BxT1, key):
        return model.nll(params, tokens_BxT1, key).mean(), variables

    def measure(params, variables, tokens_BxT1):
        nll_BxT = model.nll(params, tokens_BxT1, jax.random.key(0))
        return {"loss": nll_BxT.sum(axis=1)}, jnp.full(len(nll_BxT), float(T))

    def load(num_workers, batch_size, seed):
        corpus = text.load_corpus(path, min_bytes=T + 1)
        return Data(
            batch=text.batches(corpus, context=T, batch_size=batch_size, num_workers=num_workers, seed=seed, partition=partition),
            validation=lambda limit: text.validation_windows(corpus.valid, context=T, limit=limit),
            fingerprint=corpus.fingerprint,
            facts=lambda: {"corpus_order1_entropy": text.order1_entropy(corpus.train)},
        )

    def show(params: Any, variables: Any, data: Data, key: jax.Array) -> str:
        prompt = bytes(data.validation(1)[0, :PROMPT_BYTES].astype(np.uint8))
        return (prompt + models.sample(model, params, prompt, sample_bytes, key)).decode("utf-8", errors="replace")

    return Task(
        init=model.init,
        loss=loss,
        measure=measure,
        metrics={"loss": Metric("nats/byte")},
        examples=lambda batch_size: jax.ShapeDtypeStruct((batch_size, T + 1), jnp.int32),
        load=load,
        items=T,
        item="tokens",
        parts=model.parts,
        divided=model.divided,
        show=show if sample_bytes else None,
    )
