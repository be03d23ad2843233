"""Byte-pair encoding of any bytes, trained on the text itself with `tokenizers`.

The tokenizer sees every byte as one character, so that nothing is lost whatever the encoding of the text, and a token's length in
bytes is the number of its characters. Merges stay within words with the space before them, runs of white space, and runs of other
characters. Bytes beyond ASCII count as letters, so that words with umlauts, or of other scripts, are whole.

Reference: Sennrich et al. 2016, arXiv 1508.07909.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

BYTES = 256  # tokens that every vocabulary has
MOST = 2**20  # tokens of the largest vocabulary
_HIGH = "\x80-\xff"  # The characters themselves: the tokenizer's regular expressions take r"\x80" for a part of one.
_MOST = "{1,1024}"  # characters of a word: time to train grows with the square of the longest one's length
_WORDS = rf" ?[\w{_HIGH}]{_MOST}|[^\S{_HIGH}]{_MOST}|[^\s\w{_HIGH}]{_MOST}"
_ENCODING = "latin-1"  # one character for each byte


@dataclasses.dataclass(frozen=True)
class Bpe:
    """A vocabulary of byte strings; the tokens below `special` stand for no bytes.

    Attributes:
        tokenizer: the `tokenizers.Tokenizer`.
        special: how many tokens, from 0 on, are kept free for the task.
    """

    tokenizer: Any
    special: int

    @functools.cached_property
    def bytes_V(self) -> np.ndarray:
        """How many bytes each token stands for, [V] int32; 0 for special ones."""
        tokens = sorted((number, text) for text, number in self.tokenizer.get_vocab(with_added_tokens=True).items())
        return np.array([len(text) if number >= self.special else 0 for number, text in tokens], np.int32)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The tokens of every text, int32."""
        found = self.tokenizer.encode_batch_fast([text.decode(_ENCODING) for text in texts], add_special_tokens=False)
        return [np.array(text.ids, np.int32) for text in found]

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The bytes that tokens stand for: none for special ones, nor for numbers that the vocabulary lacks.

        A model's output layer may be larger than a vocabulary that was trained on little text.
        """
        texts = (self.tokenizer.id_to_token(token) for token in map(int, tokens) if token >= self.special)
        return b"".join(text.encode(_ENCODING) for text in texts if text)


def train(texts: Sequence[bytes], vocabulary: int, special: int = 0) -> Bpe:
    """The vocabulary of the most frequent pairs of `texts`, merged one after the other.

    Args:
        texts: such as lines or sentences.
        vocabulary: V ≤ 2²⁰, tokens in all; fewer if the text has fewer pairs to merge.
        special: tokens 0 … special − 1 stand for no bytes.

    Raises:
        ValueError: if `tokenizers` is not installed, or the vocabulary is too small for all bytes, or too large.
    """
    if vocabulary < BYTES + special:
        raise ValueError(
            f"model vocabulary={vocabulary} is less than {BYTES + special}, the bytes and {special} special tokens; use 4000"
        )
    if vocabulary > MOST:
        raise ValueError(f"model vocabulary={vocabulary} is more than {MOST}, the most tokens of byte-pair encoding; use 4000")
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError("byte-pair encoding needs the package tokenizers: pip install tokenizers") from error
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=[chr(BYTES + number) for number in range(special)],  # Characters that no byte is.
        initial_alphabet=[chr(byte) for byte in range(BYTES)],
    )
    made.train_from_iterator((text.decode(_ENCODING) for text in texts), trainer)
    return Bpe(made, special)
