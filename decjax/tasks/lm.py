"""The task "lm": next-byte or next-token prediction on any text.

With B windows of T + 1 bytes or tokens, x_0 … x_T,

    L = mean over windows and t of −ln p(x_{t+1} | x_0 … x_t),    t = 0 … T − 1

The metric `loss` is the same mean over the validation windows, in nats per byte or per token. Perplexity is e^loss. `loss_per_byte`
is the loss per token divided by the mean number of bytes in a predicted token.

References: Bengio et al. 2003, JMLR 3 (neural language models and their perplexity); Sennrich et al. 2016, arXiv 1508.07909 (BPE).
"""

from collections.abc import Mapping
import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from decjax.models import Model, decoder
from decjax.options import Range, check_range
from decjax.tasks import bpe, shards, text
from decjax.tasks import partition as partition_lib
from decjax.tasks.task import Data, Task
from decjax.typing import PyTree

PROMPT = 32  # bytes, or tokens


class Lm(Task, name="lm"):
    """Language modeling: predicts the next byte or token of a text; metrics are the loss and the perplexity.

    Attributes:
        model: a language model with a vocabulary of at least 256.
        path: a text file or a folder of them, JSON lines, Parquet, or module:NAME of a source of text; see `tasks.sources`. Empty:
            the sources of the running Python's standard library.
        field: the field of JSON lines or Parquet that holds the text.
        tokenizer: "bytes"; "bpe": byte-pair encoding, trained on the text, with the vocabulary size of the model; or "shards": `path` is
            a folder of tokens that `launch.tokenize` wrote; see `tasks.shards`.
        partition: which windows of text each worker has: "iid", "contiguous" or "dirichlet(alpha=0.1)", by file; see
            `tasks.partition`.
        sample_bytes: bytes or tokens of sample text that the trained model generates at the end; 0: none.
    """

    models = ("decoder",)
    item = "tokens"

    model: Model
    path: str = ""
    field: str = "text"
    tokenizer: Literal["bytes", "bpe", "shards"] = "bytes"
    partition: str = "iid"
    sample_bytes: Annotated[int, Range(0, 100_000)] = 400

    def __post_init__(self):
        partition_lib.parse(self.partition)
        check_range("model vocabulary", self.model.vocabulary, Range(bpe.BYTES))

    @property
    def metrics(self) -> dict[str, str]:
        return {"loss": "nats/byte" if self.tokenizer == "bytes" else "nats/token"}

    @property
    def items(self) -> int:
        return self.model.context

    def init(self, key: jax.Array) -> PyTree:
        return self.model.init(key)

    def examples(self, batch_size: int) -> PyTree:
        return jax.ShapeDtypeStruct((batch_size, self.model.context + 1), jnp.int32)

    def loss(self, params: PyTree, variables: PyTree, batch: PyTree, key: jax.Array | None) -> tuple[jax.Array, PyTree]:
        return self.model.nll(params, batch, key).mean(), variables

    def measure(self, params: PyTree, variables: PyTree, examples: PyTree) -> tuple[dict[str, jax.Array], jax.Array]:
        nll_BxT = self.model.nll(params, examples, jax.random.key(0))
        return {"loss": nll_BxT.sum(axis=1)}, jnp.full(len(nll_BxT), float(self.model.context))

    def load(self, num_workers: int, batch_size: int, seed: int) -> Data:
        T = self.model.context
        corpus, coder, fingerprint = self._text()
        for name, part in (("training", corpus.train), ("validation", corpus.valid)):
            text.num_windows(part, T, self.path, f"the text for {name}")

        def facts():
            if coder:
                return {"bytes_per_token": coder.bytes_per_token(text.predicted(corpus.valid, T))}
            return {"corpus_order1_entropy": text.order1_entropy(corpus.train)}

        return Data(
            batch=text.batches(
                corpus, context=T, batch_size=batch_size, num_workers=num_workers, seed=seed, partition=self.partition
            ),
            validation=lambda limit: text.validation_windows(corpus.valid, context=T, limit=limit),
            fingerprint=fingerprint,
            facts=facts,
            more=coder,
        )

    def _text(self) -> shards.Stored:
        """The corpus, its tokenizer (None for bytes) and its fingerprint."""
        if self.tokenizer == "shards":
            return shards.load(self.path, self.model.vocabulary)
        corpus, coder = text.load_corpus(self.path, min_bytes=self.model.context + 1, field=self.field), None
        if self.tokenizer == "bpe":
            coder = bpe.train(text.lines(corpus.train, corpus.starts), self.model.vocabulary)
            corpus = text.encoded(corpus, coder)
        return shards.Stored(corpus, coder, corpus.fingerprint)

    def derived(self, values: Mapping[str, float], data: Data, limit: int) -> dict[str, float]:
        metrics = {"perplexity": math.exp(min(values["loss"], 700.0))}
        if data.more is None:
            return metrics
        return metrics | {"loss_per_byte": values["loss"] / data.more.bytes_per_token(data.validation(limit)[:, 1:])}

    def show(self, params: PyTree, variables: PyTree, data: Data, key: jax.Array) -> str:
        if not self.sample_bytes:
            return ""
        prompt = data.validation(1)[0, :PROMPT].tolist()
        tokens = [*prompt, *decoder.sample(self.model, params, prompt, self.sample_bytes, key)]
        # A vocabulary may have tokens that are no bytes; 255 is in no UTF-8 text.
        return (data.more.decode(tokens) if data.more else bytes(min(token, 255) for token in tokens)).decode(errors="replace")
