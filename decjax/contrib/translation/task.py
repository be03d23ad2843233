"""The task "translation": from one language to another, learned from parallel text.

With x the source, y its translation with its end token, V the model's vocabulary, ε the smoothing, and sums over the tokens y_t of a
worker's batch that are not padding,

    L = Σ_t [(1 − ε) (−ln p(y_t | y_{<t}, x)) + ε · mean_{v ∈ V} −ln p(v | y_{<t}, x)] ÷ Σ_t 1

The metric `loss` is L with ε = 0 over the validation pairs, in nats per token. `bleu`, from 0 to 100, is sacrebleu's corpus BLEU of the
averaged model's beam search on the test set, with one reference and sacrebleu's defaults (case-sensitive, tokenizer 13a; version:
requirements.txt).

References: Vaswani et al. 2017, arXiv 1706.03762, section 5.4 (label smoothing, from Szegedy et al. 2016, arXiv 1512.00567);
Papineni et al. 2002 (BLEU); Post 2018, arXiv 1804.08771 (sacrebleu).
"""

from collections.abc import Callable
import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import registry
from decjax.contrib.translation import beam, parallel
from decjax.contrib.translation.model import EOS, PAD, SPECIAL, Translator
from decjax.contrib.translation.parallel import Pairs
from decjax.errors import optional
from decjax.options import Decay, Range
from decjax.tasks import bpe
from decjax.tasks import partition as partition_lib
from decjax.tasks.sources import expect
from decjax.tasks.task import Data, Task, checksum, spaced
from decjax.typing import PyTree

PART = 64  # sources that are translated at once
SHOWN = 3  # sample translations at the end of a run


class Translation(Task, name="translation"):
    """Translation between two languages; metrics are the loss in nats per token, and BLEU of the averaged model at the end.

    An example counts as `length` tokens in throughput, since padding is computed as well.

    Attributes:
        model: a translation model.
        path: a folder of parallel files, one sentence a line: train.de, train.en, val.de, val.en and those of `test`; plain or .gz.
        source: the language to translate from, the suffix of its files.
        target: the language to translate to.
        test: name of the split that BLEU is measured on.
        length: tokens of the longest sentence with its end token; longer ones are truncated.
        partition: which pairs each worker has: "iid" or "contiguous".
        smoothing: share ε of the target distribution that is spread over all tokens while training; see `optax.smooth_labels`.
        beams: width of the beam search; 1 with alpha=0: greedy search.
        alpha: exponent of the length penalty; see `beam`.
    """

    models = ("translator",)
    item = "tokens"
    requires = (
        registry.Requirement(
            "partition",
            "a partition without classes, since sentences have none",
            lambda text: partition_lib.parse(text)[0] != "dirichlet",
            "use iid or contiguous",
        ),
    )

    model: Translator
    path: str = ""
    source: str = "de"
    target: str = "en"
    test: str = "test_2016_flickr"
    length: Annotated[int, Range(6, 1024)] = 40
    partition: str = "iid"
    smoothing: Decay = 0.1
    beams: Annotated[int, Range(1, 64)] = 4
    alpha: Annotated[float, Range(0, 10)] = 0.6

    def __post_init__(self):
        if self.source == self.target:
            raise ValueError(
                f"task source={self.source!r} and target={self.target!r} are the same language; use two, such as de and en"
            )

    @property
    def items(self) -> int:
        return self.length

    @property
    def metrics(self) -> dict[str, str]:
        return {"loss": "nats/token"}

    @property
    def scores(self) -> dict[str, str]:
        return {"bleu": ""}

    def init(self, key: jax.Array) -> PyTree:
        return self.model.init(key)

    def weight(self, batch: Pairs) -> jax.Array:
        return _real(batch).sum()

    def _nll(self, params: PyTree, pairs: Pairs, key: jax.Array | None, smoothing: float) -> tuple[jax.Array, jax.Array]:
        """(nll_BxT in nats, real_BxT: 1 where there is a token to predict)."""
        logits_BxTxV = self.model.logits(params, pairs.source_BxS, pairs.target_BxT1[:, :-1], key)
        labels_BxT = pairs.target_BxT1[:, 1:]
        nll_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, labels_BxT)
        if smoothing:  # (1 − ε) of it, and ε of the mean over all tokens.
            uniform_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1) - logits_BxTxV.mean(axis=-1)
            nll_BxT = (1 - smoothing) * nll_BxT + smoothing * uniform_BxT
        return nll_BxT, _real(pairs)

    def loss(self, params: PyTree, variables: PyTree, batch: Pairs, key: jax.Array | None) -> tuple[jax.Array, PyTree]:
        nll_BxT, real_BxT = self._nll(params, batch, key, self.smoothing)
        return (nll_BxT * real_BxT).sum() / real_BxT.sum(), variables

    def measure(self, params: PyTree, variables: PyTree, examples: Pairs) -> tuple[dict[str, jax.Array], jax.Array]:
        nll_BxT, real_BxT = self._nll(params, examples, None, 0.0)
        return {"loss": (nll_BxT * real_BxT).sum(axis=1)}, real_BxT.sum(axis=1)

    def examples(self, batch_size: int) -> Pairs:
        shape = lambda length: jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
        return Pairs(shape(self.length), shape(self.length + 1))

    def load(self, num_workers: int, batch_size: int, seed: int) -> Data:
        _bleu()  # Fail early if sacrebleu is missing.
        train, valid, test = (parallel.read(self.path, split, (self.source, self.target)) for split in ("train", "val", self.test))
        problem = f"has {len(train[0])} pairs of sentences for {num_workers} workers"
        expect(len(train[0]) >= num_workers, self.path, problem, "use more data or fewer workers")
        coder = bpe.train([*train[0], *train[1]], self.model.vocabulary, SPECIAL)
        held_out = parallel.lay_out(coder.encode(valid[0]), coder.encode(valid[1]), self.length)
        sources, targets = map(coder.encode, train)
        texts = [b"\n".join(text) for text in (*train, *valid, *test)]
        tokens = (np.append(sentence, EOS).astype(np.int32) for sentence in (*sources, *targets))
        return Data(
            batch=parallel.batches(
                sources,
                targets,
                longest=self.length,
                batch_size=batch_size,
                num_workers=num_workers,
                seed=seed,
                partition=self.partition,
            ),
            validation=lambda limit: jax.tree.map(lambda x: x[spaced(len(x), limit)], held_out),
            fingerprint=f"{len(train[0])} pairs, {checksum((*texts, *tokens))}",
            more=_Test(coder, *test),
        )

    def translate(self, params: PyTree, data: Data, texts: list[bytes]) -> list[str]:
        """Return the model's translations."""
        test = data.more
        source_BxS = parallel.lay_out(test.coder.encode(texts), [np.zeros(0, np.int32)] * len(texts), self.length).source_BxS
        best_BxT = beam.search(self.model, params, source_BxS, beams=self.beams, alpha=self.alpha, length=self.length)
        return [test.coder.decode(beam.cut(tokens_T)).decode(errors="replace") for tokens_T in np.asarray(best_BxT)]

    def score(self, params: PyTree, variables: PyTree, data: Data) -> dict[str, float]:
        # Sources of similar length are translated together, in parts of one shape.
        test = data.more
        order = np.argsort([len(text) for text in test.sources], kind="stable")
        parts = [order[k : k + PART] for k in range(0, len(order), PART)]
        written = {}
        for part in parts:
            texts = [test.sources[k] for k in np.resize(part, PART)]
            written |= dict(zip(part.tolist(), self.translate(params, data, texts), strict=False))
        references = [text.decode(errors="replace") for text in test.targets]
        return {"bleu": _bleu()([written[k] for k in range(len(references))], [references]).score}

    def show(self, params: PyTree, variables: PyTree, data: Data, key: jax.Array) -> str:
        texts = [data.more.sources[k] for k in spaced(len(data.more.sources), SHOWN)]
        pairs = zip(texts, self.translate(params, data, texts), strict=True)
        return "\n".join(f"{text.decode(errors='replace')}\n  → {written}" for text, written in pairs)


def _real(pairs: Pairs) -> jax.Array:
    """real_BxT: 1 where there is a token to predict, 0 for padding."""
    return (pairs.target_BxT1[:, 1:] != PAD).astype(jnp.float32)


def _bleu() -> Callable[..., Any]:
    return optional("sacrebleu", "BLEU").corpus_bleu


@dataclasses.dataclass(frozen=True)
class _Test:
    """The test set and the vocabulary."""

    coder: bpe.Bpe
    sources: list[bytes]
    targets: list[bytes]
