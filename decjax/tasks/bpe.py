"""Byte-pair encoding of any bytes, trained on the text itself with `tokenizers`.

The tokenizer sees every byte as one character, so encoding is lossless whatever the encoding of the text, and a token's length in bytes
is its number of characters. Merges stay within words with the space before them, runs of white space, and runs of other characters.
Bytes beyond ASCII count as letters, so that words with umlauts, or of other scripts, stay whole.

Reference: Sennrich et al. 2016, arXiv 1508.07909.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from decjax.errors import optional
from decjax.options import Range, check_range

if TYPE_CHECKING:
    import tokenizers

BYTES = 256  # tokens that every vocabulary has
MOST = 2**20  # tokens of the largest vocabulary
_HIGH = "\x80-\xff"  # The characters themselves: the tokenizer's regular expressions split up r"\x80".
_MOST = "{1,1024}"  # characters of a word: training time grows with the square of the longest one's length
_WORDS = rf" ?[\w{_HIGH}]{_MOST}|[^\S{_HIGH}]{_MOST}|[^\s\w{_HIGH}]{_MOST}"
_ENCODING = "latin-1"  # one character for each byte


@dataclasses.dataclass(frozen=True)
class Bpe:
    """A vocabulary of byte strings.

    Attributes:
        tokenizer: the trained tokenizer.
        special: tokens 0 … special − 1 are reserved for the task and stand for no bytes.
    """

    tokenizer: "tokenizers.Tokenizer"
    special: int

    @functools.cached_property
    def bytes_V(self) -> np.ndarray:
        """The number of bytes of each token, [V] int32; 0 for special ones."""
        tokens = sorted((number, text) for text, number in self.tokenizer.get_vocab(with_added_tokens=True).items())
        return np.array([len(text) if number >= self.special else 0 for number, text in tokens], np.int32)

    def bytes_per_token(self, tokens: np.ndarray) -> float:
        """Return the mean number of bytes of these tokens."""
        return float(self.bytes_V[tokens].mean())

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the tokens of every text, int32."""
        encodings = self.tokenizer.encode_batch_fast([text.decode(_ENCODING) for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of tokens; special ones and those outside the vocabulary have none.

        The output layer of a model may be larger than a vocabulary that was trained on little text.
        """
        texts = (self.tokenizer.id_to_token(token) for token in map(int, tokens) if token >= self.special)
        return b"".join(text.encode(_ENCODING) for text in texts if text)


def train(texts: Iterable[bytes], vocabulary: int, special: int = 0) -> Bpe:
    """Train a vocabulary by repeatedly merging the most frequent pair of tokens.

    Args:
        texts: such as lines or sentences.
        vocabulary: V, from 256 + `special` to 2²⁰ tokens; fewer result if the text has fewer pairs to merge.
        special: see `Bpe`.

    Raises:
        ValueError: if V is out of range, or `tokenizers` is not installed.
    """
    check_range("model vocabulary", vocabulary, Range(BYTES + special, MOST))
    tokenizers = optional("tokenizers", "byte-pair encoding")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=[chr(BYTES + number) for number in range(special)],  # characters that stand for no byte
        initial_alphabet=[chr(byte) for byte in range(BYTES)],
    )
    tokenizer.train_from_iterator((text.decode(_ENCODING) for text in texts), trainer)
    return Bpe(tokenizer, special)
