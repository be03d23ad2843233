"""Parallel text: pairs of sentences from files of one sentence a line, as tokens in batches of a few lengths.

A folder holds for every split one file for each language: `train.de`, `train.en`, `val.de`, …, plain or gzipped (`train.de.gz`).
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import gzip
import os
import pathlib
from typing import NamedTuple
import zlib

import numpy as np

from decjax.contrib.translation.model import BOS, EOS, PAD
from decjax.files import open_regular
from decjax.tasks import partition as partition_lib
from decjax.tasks.sources import MAX_BYTES, READABLE, check_total, expect, explained, is_text
from decjax.typing import PyTree

Sentences = list[bytes]

MAX_SENTENCE_BYTES = 2**16  # The tokenizer's time and memory grow faster than the length of a sentence.
DIVISORS = (3, 2, 1)  # k: a batch of kB pairs has the length ⌈longest / k⌉
_FORM = "give files of one sentence a line"


class Pairs(NamedTuple):
    """Tokens of pairs of sentences, all of one length L; each sentence is followed by `EOS` and padded with `PAD`."""

    source_BxS: PyTree  # int32, S = L: the sentence and `EOS`
    target_BxT1: PyTree  # int32, T = L: `BOS`, the sentence and `EOS`


def read(path: str, split: str, languages: Sequence[str]) -> list[Sentences]:
    """Return the sentences of a split, a list for each language.

    Raises:
        ValueError: if a file is missing, unreadable or blank, or the files differ in their numbers of lines.
    """
    names = [f"{split}.{language}" for language in languages]
    texts = [_lines(path, name) for name in names]
    for name, text in zip(names, texts, strict=True):
        expect(any(map(bytes.strip, text)), path, f"has no sentence in {name}", _FORM)
    counts = " and ".join(f"{name} has {len(text)}" for name, text in zip(names, texts, strict=True))
    fix = "line k of one file must be the translation of line k of the other"
    expect(len(set(map(len, texts))) == 1, path, f"holds files of different lengths: {counts} lines", fix)
    return texts


def _lines(path: str, name: str) -> Sentences:
    folder = pathlib.Path(os.path.expanduser(path))
    files = [folder / name, folder / f"{name}.gz"]
    # Unlike pathlib's functions, os.path's raise nothing on an invalid path.
    file = next((file for file in files if path and os.path.exists(file)), None)
    expect(file, path, f"has neither {name} nor {name}.gz", "give a folder of parallel files, one sentence a line")
    assert file
    with (
        explained(file, "cannot be read", READABLE, OSError),
        explained(file, "is damaged", "give files as gzip writes them", gzip.BadGzipFile, EOFError, zlib.error),
        open_regular(file) as opened,
    ):
        content = (gzip.GzipFile(fileobj=opened) if file.suffix == ".gz" else opened).read(MAX_BYTES + 1)
    expect(is_text(content), file, "holds no text (it has a zero byte, as UTF-16 and binary data have)", "give text in UTF-8")
    check_total(file, len(content))
    # Only a line feed ends a line: another line break inside a sentence would shift all later pairs.
    lines = [line.removesuffix(b"\r") for line in content.removesuffix(b"\n").split(b"\n")] if content else []
    for number, line in enumerate(lines, 1):
        problem = f"has {len(line)} bytes in line {number}, and a sentence may have {MAX_SENTENCE_BYTES}"
        expect(len(line) <= MAX_SENTENCE_BYTES, file, problem, _FORM)
    return lines


def lay_out(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], length: int) -> Pairs:
    """Return tokens of sentences as arrays; sentences longer than `length`, `EOS` included, are truncated."""
    source_BxS = np.full((len(sources), length), PAD, np.int32)
    target_BxT1 = np.full((len(targets), length + 1), PAD, np.int32)
    target_BxT1[:, 0] = BOS
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        for tokens, out in ((source, source_BxS[row]), (target, target_BxT1[row, 1:])):
            kept = tokens[: length - 1]
            out[: len(kept)], out[len(kept)] = kept, EOS
    return Pairs(source_BxS, target_BxT1)


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
    """Return `batch(worker, step) -> Pairs`: batches of equally many tokens, padding included, in a few lengths.

    A pair goes to the shortest length L that holds both sentences with their `EOS`. At a step all workers have the same L, so the
    program is compiled once for each; a batch has kB pairs for L = ⌈longest ÷ k⌉, so microbatches that divide B divide every batch.
    Longer sentences are truncated to `longest`; see `_numbers` for lengths with fewer pairs than workers. The order of lengths is
    redrawn in every pass through the data. Each length has at least one batch in a pass, so pairs of a length with less than a
    batch of them repeat more often.

    Args:
        sources: tokens of every source sentence.
        targets: tokens of its translation.
        longest: the largest L.
        batch_size: B, how many pairs of the longest length are a batch.
        num_workers: N.
        seed: of the run.
        partition: "iid" or "contiguous"; see `partition.deal`.

    Raises:
        ValueError: if there are fewer pairs than workers.
    """
    lengths = [-(-longest // k) for k in DIVISORS]
    needed_E = np.array([max(len(source), len(target)) + 1 for source, target in zip(sources, targets, strict=True)])
    number_E = _numbers(needed_E, lengths, num_workers)
    dealt, order = {}, []
    for number, (k, length) in enumerate(zip(DIVISORS, lengths, strict=True)):
        members = np.flatnonzero(number_E == number)
        if not len(members):
            continue
        size = k * batch_size
        dealt[number] = length, members, partition_lib.deal(partition, np.zeros(len(members)), num_workers, size, seed + number)
        order += [number] * max(1, round(len(members) / (num_workers * size)))

    return functools.partial(_batch, sources, targets, dealt, tuple(order), seed)


def _batch(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    dealt: Mapping[int, tuple[int, np.ndarray, Callable[[int, int], np.ndarray]]],  # number of a length -> it, its pairs, batches
    order: tuple[int, ...],  # the number of each batch's length, in a pass
    seed: int,
    worker: int,
    step: int,
) -> Pairs:
    epoch, k = divmod(step, len(order))
    drawn = _drawn(order, seed, epoch)
    length, members, indices = dealt[drawn[k]]
    before = np.count_nonzero(drawn[:k] == drawn[k])  # batches of this length earlier in the pass
    chosen = members[indices(worker, epoch * order.count(drawn[k]) + int(before))]
    return lay_out([sources[k] for k in chosen], [targets[k] for k in chosen], length)


@functools.lru_cache(4)
def _drawn(order: tuple[int, ...], seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(order)


def _numbers(needed_E: np.ndarray, lengths: Sequence[int], num_workers: int) -> np.ndarray:
    """The number of each pair's length: the shortest that holds it.

    A length with fewer pairs than there are workers gives its pairs to the next longer length. If the longest one has too few, it
    takes the longest pairs of the next shorter length, or all of them where too few would be left there.
    """
    number_E, last = np.searchsorted(lengths[:-1], needed_E), len(lengths) - 1
    for number in range(last):
        is_member_E = number_E == number
        if is_member_E.sum() < num_workers:
            number_E[is_member_E] = number + 1
    lacking = num_workers - (number_E == last).sum()
    if 0 < lacking < num_workers and (number_E < last).any():
        shorter = np.flatnonzero(number_E == number_E[number_E < last].max())
        falling = shorter[np.argsort(-needed_E[shorter], kind="stable")]
        number_E[falling[:lacking] if len(shorter) - lacking >= num_workers else falling] = last
    return number_E
