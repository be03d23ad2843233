"""Parallel text: pairs of sentences from files of one sentence a line, as tokens in batches of a few lengths.

A folder holds for every split one file for each language: `train.de`, `train.en`, `val.de`, …, plain or gzipped (`train.de.gz`).
"""

from collections.abc import Callable, Sequence
import functools
import gzip
import itertools
import os
import pathlib
from typing import Any, NamedTuple
import zlib

import numpy as np

from decjax.files import open_regular
from decjax.models.translator import BOS, EOS, PAD
from decjax.tasks import partition as partition_lib
from decjax.tasks.sources import MAX_BYTES, is_text

Sentences = list[bytes]

MAX_SENTENCE_BYTES = 2**16  # The tokenizer's time and memory grow faster than the length of a sentence.
DIVISORS = (3, 2, 1)  # k: a batch of kB pairs has the length ⌈longest / k⌉


class Pairs(NamedTuple):
    """Tokens of pairs of sentences, of one length L; behind its `EOS` a sentence is filled up with `PAD`."""

    source_BxS: Any  # int32, S = L: the sentence and `EOS`
    target_BxT1: Any  # int32, T = L: `BOS`, the sentence and `EOS`


def read(path: str, split: str, languages: Sequence[str]) -> list[Sentences]:
    """The sentences of a split, a list for each language.

    Raises:
        ValueError: if a file is missing, cannot be read, is empty or blank, or they differ in their numbers of lines.
    """
    texts = [_lines(path, f"{split}.{language}") for language in languages]
    counts = [len(text) for text in texts]
    if not any(counts):
        files = " and ".join(f"{split}.{language}" for language in languages)
        raise ValueError(f"data path {path!r}: {files} are empty; give files of one sentence a line")
    for language, text in zip(languages, texts, strict=True):
        if not any(map(bytes.strip, text)):
            raise ValueError(f"data path {path!r}: all lines of {split}.{language} are blank; give files of one sentence a line")
    if len(set(counts)) > 1:
        files = " and ".join(f"{split}.{language} has {count}" for language, count in zip(languages, counts, strict=True))
        raise ValueError(f"data path {path!r}: {files} lines; line k of one file must be the translation of line k of the other")
    return texts


def _lines(path: str, name: str) -> Sentences:
    for file, unpacked in ((name, lambda opened: opened), (name + ".gz", gzip.open)):
        place = pathlib.Path(os.path.expanduser(path)) / file
        if not path or not os.path.exists(place):  # Unlike pathlib's functions, os.path's raise nothing on an invalid path.
            continue
        try:
            with open_regular(place) as opened:
                return _sentences(str(place), unpacked(opened).read(MAX_BYTES + 1))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"data path {str(place)!r} is damaged: {error}; give files as gzip writes them") from error
        except OSError as error:
            raise ValueError(f"data path {str(place)!r} cannot be read: {error.strerror}; give a file that you may read") from error
    raise ValueError(f"data path {path!r} has neither {name} nor {name}.gz; give a folder of parallel files, one sentence a line")


def _sentences(shown: str, content: bytes) -> Sentences:
    """The lines of a file. Only a line feed ends one: another line break inside a sentence would shift all later pairs."""
    if not is_text(content):
        raise ValueError(
            f"data path {shown!r} holds no text (it has a zero byte, as UTF-16 and binary data have); give text in UTF-8"
        )
    if len(content) > MAX_BYTES:
        raise ValueError(f"data path {shown!r} holds more than {MAX_BYTES / 2**30:.0f} GiB of text; give a smaller file")
    lines = [line.removesuffix(b"\r") for line in content.removesuffix(b"\n").split(b"\n")] if content else []
    longest = max(map(len, lines), default=0)
    if longest > MAX_SENTENCE_BYTES:
        number = next(number for number, line in enumerate(lines, 1) if len(line) == longest)
        raise ValueError(
            f"data path {shown!r}: line {number} has {longest} bytes, and a sentence may have {MAX_SENTENCE_BYTES}; give a sentence a line"
        )
    return lines


def fingerprint(texts: Sequence[Sentences], tokens: Sequence[Sequence[np.ndarray]]) -> str:
    """The number of sentences of the first text, and a CRC-32 of all texts and of tokens of sentences."""
    crc = 0
    for text in texts:
        crc = zlib.crc32(b"\n".join(text), crc)
    for sentence in itertools.chain(*tokens):
        crc = zlib.crc32(np.append(sentence, EOS).astype(np.int32).tobytes(), crc)
    return f"{len(texts[0])} pairs, crc {crc:08x}"


def lay_out(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], length: int) -> Pairs:
    """Tokens of sentences as arrays; sentences longer than `length`, with `EOS`, are cut."""
    source_BxS = np.full((len(sources), length), PAD, np.int32)
    target_BxT1 = np.full((len(targets), length + 1), PAD, np.int32)
    target_BxT1[:, 0] = BOS
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        for tokens, out in ((source, source_BxS[row]), (target, target_BxT1[row, 1:])):
            kept = tokens[: length - 1]
            out[: len(kept)], out[len(kept)] = kept, EOS
    return Pairs(source_BxS, target_BxT1)


def lengths(longest: int) -> list[int]:
    """The few lengths that batches have: ⌈longest / k⌉ for k = 3, 2, 1."""
    return [-(-longest // k) for k in DIVISORS]


def batches(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    *,
    longest: int,
    batch_size: int,
    num_workers: int,
    seed: int,
    partition: str = "iid",
) -> Callable[[int, int], Pairs]:
    """`batch(worker, step) -> Pairs`: batches of equally many tokens, padding included, in a few lengths.

    A pair goes to the shortest length L that holds both sentences with their `EOS`; at a step all workers have the same L, so that
    each is compiled once, and kB pairs for L = ⌈longest ÷ k⌉, so that microbatches which divide B divide every batch. Longer
    sentences are cut to `longest`. Where a length would have fewer pairs than there are workers, see `_numbers`. The order of lengths
    is drawn anew in every pass through the data. A length that has pairs has at least one batch in it, so that pairs of a length with
    less than a batch of them come more often than others.

    Args:
        sources: tokens of every source sentence.
        targets: tokens of its translation.
        longest: of `lengths`.
        batch_size: B, how many pairs of the longest length are a batch.
        num_workers: N.
        seed: of the run.
        partition: "iid" or "contiguous"; see `partition.deal`.

    Raises:
        ValueError: if there are fewer pairs than workers.
    """
    needed_E = np.array([max(len(source), len(target)) + 1 for source, target in zip(sources, targets, strict=True)])
    number_E = _numbers(needed_E, lengths(longest), num_workers)
    dealt, order = {}, []
    for number, (k, length) in enumerate(zip(DIVISORS, lengths(longest), strict=True)):
        own = np.flatnonzero(number_E == number)
        if not len(own):
            continue
        size = k * batch_size
        dealt[number] = length, own, partition_lib.deal(partition, np.zeros(len(own)), num_workers, size, seed + number)
        order += [number] * max(1, round(len(own) / (num_workers * size)))
    return functools.partial(_batch, sources, targets, dealt, tuple(order), seed)


def _numbers(needed_E: np.ndarray, lengths: Sequence[int], num_workers: int) -> np.ndarray:
    """Which of the lengths each pair has: the shortest that holds it.

    A length with fewer pairs than there are workers gives its pairs to the next longer length. If the longest one has too few, it
    takes the longest pairs of the next shorter length, or all of them where too few would be left there.
    """
    number_E, last = np.searchsorted(lengths[:-1], needed_E), len(lengths) - 1
    for number in range(last):
        own_E = number_E == number
        if own_E.sum() < num_workers:
            number_E[own_E] = number + 1
    lacking = num_workers - (number_E == last).sum()
    if 0 < lacking < num_workers and (number_E < last).any():
        shorter = np.flatnonzero(number_E == number_E[number_E < last].max())
        falling = shorter[np.argsort(-needed_E[shorter], kind="stable")]
        number_E[falling[:lacking] if len(shorter) - lacking >= num_workers else falling] = last
    return number_E


def _batch(sources, targets, dealt, order, seed, worker: int, step: int) -> Pairs:
    epoch, k = divmod(step, len(order))
    numbers, before = _places(order, seed, epoch)
    length, own, indices = dealt[numbers[k]]
    chosen = own[indices(worker, epoch * order.count(numbers[k]) + int(before[k]))]
    return lay_out([sources[k] for k in chosen], [targets[k] for k in chosen], length)


@functools.lru_cache(4)
def _places(order: tuple[int, ...], seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(order of the lengths in a pass, how often each was there before)."""
    drawn = np.random.default_rng((seed, epoch)).permutation(order)
    before = np.zeros(len(drawn), int)
    for number in np.unique(drawn):
        before[drawn == number] = np.arange((drawn == number).sum())
    return drawn, before
