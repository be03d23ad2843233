"""Byte-pair encoding: lossless, whole words in every script, and impossible vocabularies are refused."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
import pytest

from decjax.tasks import bpe

GERMAN = "Mädchen fährt größte".encode()


@pytest.fixture(scope="module")
def coder():
    return bpe.train([GERMAN, "„Ähre“ und 女".encode(), b"the cat and the dog"] * 5, 400, special=3)


def test_any_bytes_come_back():
    everything = bytes(range(256))
    coder = bpe.train([b"the cat and the dog", everything] * 5, 270, special=3)
    texts = [everything, b"the cat", "Mädchen – 女".encode(), b""]
    coded = coder.encode(texts)
    assert [coder.decode(tokens) for tokens in coded] == texts
    assert all(tokens.min(initial=3) >= 3 for tokens in coded)  # no special tokens
    assert [coder.bytes_V[tokens].sum() for tokens in coded] == [len(text) for text in texts]
    assert len(coder.encode([b"the"])[0]) < 3
    again = bpe.train([b"the cat and the dog", everything] * 5, 270, special=3)
    assert all((a == b).all() for a, b in zip(again.encode(texts), coded, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
@example(bytes(range(128, 256)) * 2)
@example(b"a \x85b\xa0 \xff c\n\xe9 .\x00")
def test_random_bytes_come_back(coder, text):
    (tokens,) = coder.encode([text])
    assert coder.decode(tokens) == text and coder.bytes_V[tokens].sum() == len(text)


def test_words_with_umlauts_are_whole(coder):
    """Each frequent word is one token, so merges span all its letters."""
    (tokens,) = coder.encode([GERMAN])
    assert [coder.decode([token]).decode() for token in tokens] == ["Mädchen", " fährt", " größte"]


def test_numbers_that_the_vocabulary_lacks_stand_for_nothing(coder):
    """A model's output layer has as many tokens as requested."""
    (tokens,) = coder.encode([GERMAN])
    assert len(coder.bytes_V) < 400
    assert coder.decode([0, 399, *tokens, len(coder.bytes_V), 2]) == GERMAN


@pytest.mark.parametrize(
    "vocabulary, message",
    [
        (258, "vocabulary=258 must be at least 259 and at most 1048576"),
        (2_000_000_000, "vocabulary=2000000000 must be at least 259 and at most 1048576"),
    ],
)
def test_impossible_vocabularies_are_refused(vocabulary, message):
    with pytest.raises(ValueError, match=message):
        bpe.train([b"text"], vocabulary, special=3)
