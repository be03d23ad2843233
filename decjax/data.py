"""Byte corpora and per-worker batches.

A corpus is two strings of bytes, training and validation. Text is cut into windows of T + 1 bytes which overlap by one, so
that every byte is predicted once. A batch depends on (seed, worker, step) only: Grain's random-access shuffle makes it so,
and resuming needs no iterator state.
"""

from collections.abc import Callable
import os
import pathlib
import sysconfig
from typing import NamedTuple
import zlib

import grain
import numpy as np

PARTITIONS = ("iid", "contiguous")
VALIDATION_SHARE = 1 / 128  # of the files of a folder, or of the bytes of a single file
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Corpus(NamedTuple):
    """A byte-level text corpus.

    Attributes:
        train: uint8 vector.
        valid: uint8 vector, from other files than `train` where there are several.
        source: where it came from, for people.
    """

    train: np.ndarray
    valid: np.ndarray
    source: str

    @property
    def fingerprint(self) -> str:
        """Lengths and CRC-32 of both parts: a run continues on the text it began with."""
        return f"{len(self.train)}+{len(self.valid)} bytes, crc {zlib.crc32(self.valid, zlib.crc32(self.train)):08x}"


def load_corpus(path: str = "", *, min_bytes: int = 1) -> Corpus:
    """Reads a text file, a folder of text files, or the running Python's own standard-library sources.

    Files are taken in the order of their names and split by a hash of their relative path, so the split does not depend on
    the machine. Hidden and binary files (with a zero byte) are passed over. A single file gives its tail to validation.

    Args:
        path: a file or folder; empty for the embedded corpus.
        min_bytes: what each part must have at least, a window of the model. Where the files chosen for validation fall
            short of it, the tail of all text takes their place.

    Returns:
        The `Corpus`.

    Raises:
        ValueError: if the path does not exist, cannot be read, or holds no or too little text.
    """
    if path:
        root = pathlib.Path(os.path.expanduser(path))
        if not os.path.exists(root):  # Unlike pathlib's, neither this nor expanduser raises on an odd path.
            raise ValueError(
                f"data path {path!r} does not exist; give a text file or a folder, or leave it empty for the embedded corpus"
            )
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file() and not _hidden(p, root))
    else:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        files = sorted(p for p in root.rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts))
    try:
        texts = {p.relative_to(root).as_posix(): text for p in files if b"\0" not in (text := p.read_bytes())}
    except OSError as error:
        raise ValueError(f"data path {path!r} cannot be read: {error.strerror}: {error.filename!r}") from error
    if not any(texts.values()):
        raise ValueError(f"data path {str(path or root)!r} holds no text; give a non-empty text file or a folder with some")
    threshold = VALIDATION_SHARE * 2**32
    train = b"".join(text for name, text in texts.items() if zlib.crc32(name.encode()) >= threshold)
    valid = b"".join(text for name, text in texts.items() if zlib.crc32(name.encode()) < threshold)
    if len(texts) == 1 or len(train) < min_bytes or len(valid) < min_bytes:
        whole = train + valid
        cut = len(whole) - max(int(len(whole) * VALIDATION_SHARE), min_bytes)
        if cut < min_bytes:
            raise ValueError(
                f"data path {str(path or root)!r} holds {len(whole)} bytes, but training and validation take at "
                f"least {min_bytes} each; use more text or a shorter context"
            )
        train, valid = whole[:cut], whole[cut:]
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(valid, np.uint8), path or f"Python standard library ({root})")


def _hidden(path: pathlib.Path, root: pathlib.Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def order1_entropy(text: np.ndarray) -> float:
    """H(x_{t+1} | x_t) = −Σ p(a, b) ln p(b | a) in nats per byte: the limit of a bigram model fitted to `text` itself."""
    pairs = np.bincount(text[:-1].astype(np.int64) * 256 + text[1:], minlength=65536).reshape(256, 256)
    a, b = np.nonzero(pairs)
    p_ab = pairs[a, b] / pairs.sum()
    p_a = pairs.sum(axis=1)[a] / pairs.sum()
    return float((p_ab * np.log(p_a / p_ab)).sum())


class Windows:
    """Random access to the windows of a text: window i is bytes iT … iT + T, as int32."""

    def __init__(self, text: np.ndarray, context: int):
        if len(text) < context + 1:
            raise ValueError(
                f"the text has {len(text)} bytes, but one window takes context + 1 = {context + 1}; "
                "use more text or a shorter context"
            )
        self._text = text
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, i: int) -> np.ndarray:
        start = i * self._context
        return self._text[start : start + self._context + 1].astype(np.int32)

    def __repr__(self) -> str:
        return f"Windows({len(self)} of {self._context} + 1)"


def batches(
    text: np.ndarray, *, context: int, batch_size: int, num_workers: int, seed: int, partition: str = "iid"
) -> Callable[[int, int], np.ndarray]:
    """Per-worker training batches as a pure function of (worker, step).

    Args:
        text: the training bytes.
        context: T.
        batch_size: B, windows per worker and step.
        num_workers: N.
        seed: of the shuffle; every epoch is shuffled anew.
        partition: "iid" deals the shuffled windows out to workers; "contiguous" gives each worker its own N-th of the text,
            which makes the workers' data differ.

    Returns:
        `batch(worker, step) -> tokens_BxT1`, int32 of shape (B, T + 1).

    Raises:
        ValueError: if the partition is unknown or leaves a worker without a window.
    """
    windows = Windows(text, context)
    if len(windows) < num_workers:
        raise ValueError(
            f"the text has {len(windows)} windows of {context} bytes for {num_workers} workers; use more text or fewer workers"
        )
    if partition == "iid":
        dealt = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
        shards = [dealt[worker::num_workers] for worker in range(num_workers)]
    elif partition == "contiguous":
        whole = grain.MapDataset.source(windows)
        cuts = [worker * len(windows) // num_workers for worker in range(num_workers + 1)]
        shards = [whole[cuts[worker] : cuts[worker + 1]].seed(seed + worker).shuffle().repeat() for worker in range(num_workers)]
    else:
        raise ValueError(f"data partition {partition!r} is unknown; use one of {', '.join(PARTITIONS)}")
    shards = [shard.batch(batch_size) for shard in shards]
    return lambda worker, step: shards[worker][step]


def validation_windows(text: np.ndarray, *, context: int, limit: int = 0) -> np.ndarray:
    """The validation windows, all of them or `limit` evenly spaced ones.

    Args:
        text: the validation bytes.
        context: T.
        limit: at most this many windows; 0 for all.

    Returns:
        tokens_WxT1, int32 of shape (windows, T + 1).
    """
    windows = Windows(text, context)
    count = min(limit, len(windows)) if limit else len(windows)
    chosen = np.arange(count) * len(windows) // count
    return np.stack([windows[i] for i in chosen])
