"""Corpora of bytes or tokens, and batches of windows of them for every worker.

A corpus consists of bytes, or of tokens if it is encoded by `bpe`, for training and for validation. Text is cut into windows of T + 1 bytes
or tokens that overlap by one, so that all but the first are predicted once. A batch depends only on (seed, worker, step), so resuming
needs no iterator state.
"""

from collections.abc import Callable, Sequence
import itertools
from typing import NamedTuple
import zlib

import numpy as np

from decjax.tasks import bpe, sources
from decjax.tasks import partition as partition_lib
from decjax.tasks.sources import expect
from decjax.tasks.task import checksum, spaced

VALIDATION_SHARE = 1 / 128  # of the files of a folder, or of the bytes of a single file
AT_ONCE = 2**20  # bytes that are encoded at once; the tokenizer needs about sixty times as much memory


class Corpus(NamedTuple):
    """Text as bytes or as tokens, for training and for validation."""

    train: np.ndarray  # vector, uint8 or int32
    valid: np.ndarray  # the same, from other files than `train` where there are several
    starts: np.ndarray  # where each file begins in `train`
    valid_starts: np.ndarray | Sequence[int] = (0,)  # where each file, or the end of one, begins in `valid`

    @property
    def fingerprint(self) -> str:
        """Lengths and checksum of both parts; see `Data.fingerprint`."""
        return f"{len(self.train)}+{len(self.valid)} {unit(self.train)}, {checksum((self.train, self.valid))}"


def load_corpus(path: str = "", *, min_bytes: int = 1, field: str = "text") -> Corpus:
    """Read text, and divide it into training and validation.

    Files are read in the order of their names and assigned to training or validation by a hash of their relative path, so the split
    does not depend on the machine. The end of a single file is for validation.

    Args:
        path: a file or folder, or another source of text; see `sources`.
        min_bytes: the smallest size of each part, one window of the model. If one of them is smaller, the end of the whole text is
            used for validation instead.
        field: the field of JSON lines or Parquet that holds the text.

    Raises:
        ValueError: if the path does not exist, cannot be read, or holds no or too little text.
    """
    place, texts = sources.read(path, field)
    # File names need not be valid UTF-8.
    held_out = {name: zlib.crc32(name.encode("utf-8", "surrogateescape")) < VALIDATION_SHARE * 2**32 for name in texts}
    train, valid = ([text for name, text in texts.items() if held_out[name] == out] for out in (False, True))
    starts = np.cumsum([0, *map(len, train + valid)])[:-1]
    cut = sum(map(len, train))
    whole = np.frombuffer(b"".join(train + valid), np.uint8)
    if len(texts) == 1 or cut < min_bytes or len(whole) - cut < min_bytes:
        cut = len(whole) - max(int(len(whole) * VALIDATION_SHARE), min_bytes)
        problem = f"holds {len(whole)} bytes, but training and validation take at least {min_bytes} each"
        expect(cut >= min_bytes, place, problem, "use more text or a shorter context")
    return Corpus(whole[:cut], whole[cut:], starts[starts < cut], np.append(0, starts[starts > cut] - cut))


def encoded(corpus: Corpus, coder: bpe.Bpe) -> Corpus:
    """Return the same text as tokens, int32. Lines are encoded one by one, so no token spans two files."""
    train, starts = _tokens(corpus.train, corpus.starts, coder)
    valid, valid_starts = _tokens(corpus.valid, corpus.valid_starts, coder)
    return Corpus(train, valid, starts, valid_starts)


def _tokens(text: np.ndarray, starts: np.ndarray | Sequence[int], coder: bpe.Bpe) -> tuple[np.ndarray, np.ndarray]:
    """(the tokens of a text, where each file begins among them)."""
    all_lines = lines(text, starts)
    begins = np.cumsum([0, *map(len, all_lines)])  # where each line begins in `text`, and where the last one ends
    cuts = np.union1d(np.searchsorted(begins, np.arange(0, len(text), AT_ONCE)), len(all_lines))
    parts, counts = [], [0]
    for begin, end in itertools.pairwise(cuts):
        coded = coder.encode(all_lines[begin:end])
        parts.append(np.concatenate(coded))
        counts += map(len, coded)
    return np.concatenate(parts), np.cumsum(counts)[np.searchsorted(begins, starts)]


def lines(text: np.ndarray, starts: np.ndarray | Sequence[int] = (0,)) -> list[bytes]:
    """Return the lines of a text with their line breaks. Each file, which begins at one of `starts`, begins a line."""
    files = itertools.pairwise([*starts, len(text)])
    return [line for begin, end in files for line in text[begin:end].tobytes().splitlines(keepends=True)]


def order1_entropy(text: np.ndarray) -> float:
    """Return H(x_{t+1} | x_t) = −Σ p(a, b) ln p(b | a) in nats per byte, the smallest loss that a bigram model of `text` can reach."""
    pairs_axb = np.zeros(65536, np.int64)
    for begin in range(0, len(text) - 1, 2**22):  # in parts, since every byte becomes an int64
        part = text[begin : begin + 2**22 + 1].astype(np.int64)
        pairs_axb += np.bincount(part[:-1] * 256 + part[1:], minlength=65536)
    pairs_axb = pairs_axb.reshape(256, 256)
    a, b = np.nonzero(pairs_axb)
    p_ab = pairs_axb[a, b] / pairs_axb.sum()
    p_a = pairs_axb.sum(axis=1)[a] / pairs_axb.sum()
    return float((p_ab * np.log(p_a / p_ab)).sum())


def unit(text: np.ndarray) -> str:
    """Return what a text consists of: "bytes" or "tokens"."""
    return "bytes" if text.dtype == np.uint8 else "tokens"


def num_windows(text: np.ndarray, context: int, path: str = "", part: str = "the text") -> int:
    """Return the number of windows of T + 1 bytes or tokens in a text, with T = `context`; a ValueError if it is too short for one."""
    problem = f"has {len(text)} {unit(text)} in {part}, but a window takes context + 1 = {context + 1}"
    expect(len(text) > context, path, problem, "use more text or a shorter context")
    return (len(text) - 1) // context


def windows(text: np.ndarray, context: int, indices_W: np.ndarray) -> np.ndarray:
    """Return the windows of these indices, tokens_WxT1, int32; window i is bytes iT … iT + T of the text, with T = `context`."""
    return text[indices_W[:, None] * context + np.arange(context + 1)].astype(np.int32)


def batches(
    corpus: Corpus, *, context: int, batch_size: int, num_workers: int, seed: int, partition: str = "iid"
) -> Callable[[int, int], np.ndarray]:
    """Return `batch(worker, step) -> tokens_BxT1`, int32: training batches of B windows of T + 1 bytes, with T = `context`.

    Partition "dirichlet" divides by file; for partitions and errors see `partition.deal`.
    """
    count = num_windows(corpus.train, context)
    # A corpus may have more windows than fit in memory, so only the partition that needs their files gets them.
    by_file = partition_lib.parse(partition)[0] == "dirichlet"
    files_W = np.searchsorted(corpus.starts, np.arange(count) * context, side="right") if by_file else range(count)
    indices = partition_lib.deal(partition, files_W, num_workers, batch_size, seed)
    return lambda worker, step: windows(corpus.train, context, indices(worker, step))


def predicted(text: np.ndarray, context: int) -> np.ndarray:
    """Return the tokens that all windows of a text predict."""
    return text[1 : 1 + num_windows(text, context) * context]


def validation_windows(text: np.ndarray, *, context: int, limit: int = 0) -> np.ndarray:
    """Return windows for validation, tokens_WxT1, int32: `limit` evenly spaced ones of a text; 0: all."""
    return windows(text, context, spaced(num_windows(text, context), limit))
