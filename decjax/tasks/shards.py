"""Text as files of tokens, which `launch.tokenize` writes once and runs map into memory.

A folder holds

    train.bin, valid.bin    tokens as unsigned integers of 16 or 32 bits, little-endian
    index.json              their dtype, numbers and checksums, the vocabulary and the tokenizer
    tokenizer.json          the tokenizer, unless tokens are bytes

Of the text about 1/128 is held out for validation, in documents, or in pieces of about 1 MiB of larger ones. Opening a folder reads the
index and a few tokens, so it takes no longer for larger texts.
"""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import functools
import json
import pathlib
from typing import Any, BinaryIO, NamedTuple
import zlib

import numpy as np

from decjax import files
from decjax.errors import optional
from decjax.tasks import bpe, sources
from decjax.tasks.sources import expect, explained
from decjax.tasks.text import AT_ONCE, VALIDATION_SHARE, Corpus

INDEX, TOKENIZER, FORMAT, VERSION = "index.json", "tokenizer.json", "decjax tokens", 1
PARTS = ("train", "valid")
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
SAMPLED = 2**28  # bytes of text on which byte-pair encoding is trained
MOST_VALID = 2**22  # tokens for validation
_AGAIN = "run launch.tokenize again"


@dataclasses.dataclass(frozen=True)
class Coder:
    """A tokenizer and the length of its tokens.

    Attributes:
        kind: "bytes"; "bpe", trained by `bpe.train`; or "json", the file of a model of Hugging Face.
        tokenizer: of `tokenizers`; None for bytes.
        mean_bytes: of the text ÷ the number of its tokens.
    """

    kind: str
    tokenizer: Any = None
    mean_bytes: float = 1.0

    @functools.cached_property
    def vocabulary(self) -> int:
        """V; tokens are 0 … V − 1."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True) if self.tokenizer else bpe.BYTES

    def encode(self, texts: Sequence[bytes]) -> np.ndarray:
        """Return the tokens of several texts, one after the other."""
        if self.kind == "bytes":
            return np.frombuffer(b"".join(texts), np.uint8)
        if self.kind == "bpe":
            coded = bpe.Bpe(self.tokenizer, 0).encode([line for text in texts for line in text.splitlines(keepends=True)])
        else:
            batch = self.tokenizer.encode_batch_fast([text.decode(errors="replace") for text in texts], add_special_tokens=False)
            coded = [np.array(encoding.ids, np.int64) for encoding in batch]
        return np.concatenate([np.zeros(0, np.int64), *coded])

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of tokens; those outside the vocabulary have none."""
        known = [token for token in map(int, tokens) if token < self.vocabulary]
        if self.kind == "json":
            return self.tokenizer.decode(known, skip_special_tokens=False).encode()
        return bpe.Bpe(self.tokenizer, 0).decode(known) if self.tokenizer else bytes(known)

    def bytes_per_token(self, tokens: np.ndarray) -> float:
        """Return the mean number of bytes of a token, in the whole text for validation."""
        return self.mean_bytes


def _load(kind: str, path: pathlib.Path) -> Coder:
    if kind == "bytes":
        return Coder(kind)
    library = optional("tokenizers", f"tokenizer {str(path)!r}")
    with explained(path, "is not a tokenizer", "give the tokenizer.json of a model", Exception):  # The library raises this type.
        return Coder(kind, library.Tokenizer.from_str(files.read_text(path)))


def _named(tokenizer: str) -> Coder:
    """The tokenizer "bytes", or that at a path."""
    if tokenizer == "bytes":
        return Coder(tokenizer)
    path = pathlib.Path(tokenizer).expanduser()
    path = path / TOKENIZER if path.is_dir() else path
    is_own = (path.parent / INDEX).exists()  # The folder is one of tokens, and its index says what the tokenizer expects.
    return _load(_index(str(path.parent)).kind if is_own else "json", path)


# -- Writing ----------------------------------------------------------------------------------------------------------


class _Writer:
    """Appends the tokens of one part of the text to a file."""

    def __init__(self, path: pathlib.Path, coder: Coder, dtype: str):
        self.path, self.coder, self.dtype = path, coder, dtype
        self.file: BinaryIO = path.open("wb")
        self.waiting: list[bytes] = []
        self.held = 0  # bytes of them
        self.bytes = self.tokens = self.crc = 0

    def add(self, text: bytes) -> None:
        self.waiting.append(text)
        self.held += len(text)
        if self.held >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        self.write(self.coder.encode(self.waiting), self.held)
        self.waiting, self.held = [], 0

    def write(self, tokens: np.ndarray, num_bytes: int) -> None:
        content = tokens.astype(DTYPES[self.dtype]).tobytes()
        self.file.write(content)
        self.bytes, self.tokens, self.crc = self.bytes + num_bytes, self.tokens + len(tokens), zlib.crc32(content, self.crc)

    def close(self) -> dict[str, Any]:
        self.flush()
        self.file.close()
        return {"tokens": self.tokens, "bytes": self.bytes, "checksum": f"{self.crc:08x}"}


def write(
    path: str, out: pathlib.Path, *, tokenizer: str = "bytes", vocabulary: int = 0, field: str = sources.FIELD
) -> dict[str, Any]:
    """Tokenize a text, and return the content of the index.

    Args:
        path: see `sources`.
        out: the folder to write.
        tokenizer: "bytes"; "bpe", which is trained on the first 256 MiB of the text; or the path of a tokenizer.json or its folder.
        vocabulary: of byte-pair encoding.
        field: the field of JSON lines or Parquet that holds the text.

    Raises:
        ValueError: if the text or the tokenizer cannot be read, or there is too little text.
        OSError: if a file cannot be written.
    """
    coder = Coder("bpe", bpe.train(_sample(path, field), vocabulary).tokenizer) if tokenizer == "bpe" else _named(tokenizer)
    dtype = "uint16" if coder.vocabulary <= 2**16 else "uint32"
    out.mkdir(parents=True, exist_ok=True)
    train, valid = (_Writer(out / f"{part}.bin", coder, dtype) for part in PARTS)
    for name, piece in sources.pieces(path, field):
        held_out = zlib.crc32(name.encode("utf-8", "surrogateescape")) < VALIDATION_SHARE * 2**32
        (valid if held_out and valid.tokens < MOST_VALID else train).add(piece)
    counts: dict[str, dict[str, Any]] = dict(zip(PARTS, (train.close(), valid.close())))
    if not counts["valid"]["tokens"]:
        counts = _divided(out, coder, dtype, counts["train"])
    text = coder.tokenizer.to_str() if coder.tokenizer else ""
    if text:
        (out / TOKENIZER).write_text(text)
    described = {"kind": coder.kind, "checksum": f"{zlib.crc32(text.encode()):08x}"}
    index = {"format": FORMAT, "version": VERSION, "dtype": dtype, "vocabulary": coder.vocabulary, "tokenizer": described, **counts}
    files.write_whole(out / INDEX, json.dumps(index, indent=1) + "\n")
    return index


def _sample(path: str, field: str) -> Iterator[bytes]:
    """The lines on which byte-pair encoding is trained."""
    left = SAMPLED
    for _, piece in sources.pieces(path, field):
        yield from piece.splitlines(keepends=True)
        left -= len(piece)
        if left <= 0:
            return


def _divided(out: pathlib.Path, coder: Coder, dtype: str, count: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Hold out the end of a text of which no piece was held out."""
    tokens = np.fromfile(out / "train.bin", DTYPES[dtype])
    cut = len(tokens) - max(int(len(tokens) * VALIDATION_SHARE), min(2**12, len(tokens) // 2))
    counts = {}
    for part, of_part in zip(PARTS, (tokens[:cut], tokens[cut:])):
        writer = _Writer(out / f"{part}.bin", coder, dtype)
        writer.write(of_part, round(count["bytes"] * len(of_part) / max(1, len(tokens))))
        counts[part] = writer.close()
    return counts


# -- Reading ----------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A corpus and its tokenizer.

    Attributes:
        corpus: the tokens; of a folder, mapped into memory.
        coder: the tokenizer; None: the text is bytes.
        fingerprint: identifies the data.
    """

    corpus: Corpus
    coder: Coder | bpe.Bpe | None
    fingerprint: str


def load(path: str, vocabulary: int) -> Stored:
    """Open a folder of tokens.

    Args:
        path: that `write` wrote.
        vocabulary: of the model.

    Raises:
        ValueError: if the folder or its files are damaged, or its vocabulary is larger than that of the model.
    """
    folder = pathlib.Path(path).expanduser()
    index = _index(path)
    fix = f"use --config.model.vocabulary={index.vocabulary}, or a model of this vocabulary"
    problem = f"has a vocabulary of {index.vocabulary} tokens, and model.vocabulary={vocabulary}"
    expect(index.vocabulary <= vocabulary, path, problem, fix)
    train, valid = (_mapped(path, folder / f"{part}.bin", index, index.counts[part]) for part in PARTS)
    coder = dataclasses.replace(_load(index.kind, folder / TOKENIZER), mean_bytes=index.mean_bytes)
    return Stored(Corpus(train, valid, np.zeros(1, np.int64)), coder, index.text)


class _Index(NamedTuple):
    dtype: str
    vocabulary: int
    kind: str
    counts: dict[str, int]
    mean_bytes: float
    text: str


def _index(path: str) -> _Index:
    content, reason = {}, ""
    try:
        content = files.read_json(pathlib.Path(path).expanduser() / INDEX)
    except ValueError as error:
        reason = str(error)
    expect(not reason, path, f"has no readable {INDEX} ({reason})", "give a folder that launch.tokenize wrote")
    known = (content.get("format"), content.get("version")) == (FORMAT, VERSION)
    expect(known, path, f"has an {INDEX} of another format or version", _AGAIN)
    with explained(path, f"has a damaged {INDEX}", _AGAIN, KeyError, TypeError, ValueError):
        counts = {part: int(content[part]["tokens"]) for part in PARTS}
        mean_bytes = float(content["valid"]["bytes"]) / max(1, counts["valid"])
        described = str(content["dtype"]), int(content["vocabulary"]), str(content["tokenizer"]["kind"])
    index = _Index(*described, counts, mean_bytes, json.dumps(content, sort_keys=True))
    expect(index.dtype in DTYPES, path, f"has tokens of dtype {index.dtype!r}", f"use one of {', '.join(DTYPES)}")
    fits = index.vocabulary <= 2 ** (8 * np.dtype(index.dtype).itemsize)
    expect(fits, path, f"has a vocabulary of {index.vocabulary} in tokens of dtype {index.dtype}", _AGAIN)
    return index


def _mapped(path: str, file: pathlib.Path, index: _Index, count: int) -> np.ndarray:
    """The tokens in a file, mapped into memory."""
    with explained(path, f"has no readable {file.name}", _AGAIN, OSError):
        files.check_regular(file)
        num_bytes = file.stat().st_size
    expected = count * np.dtype(index.dtype).itemsize
    problem = f"has {num_bytes} bytes in {file.name}, and {INDEX} says {expected}: it is truncated, or of another dtype"
    expect(num_bytes == expected, path, problem, _AGAIN)
    expect(count, path, f"has no tokens in {file.name}", "use more text")
    tokens = np.asarray(np.memmap(file, DTYPES[index.dtype], mode="r"))
    highest = max(int(tokens[:4096].max()), int(tokens[-4096:].max()))
    expect(highest < index.vocabulary, path, f"has token {highest} in {file.name}, of a vocabulary of {index.vocabulary}", _AGAIN)
    return tokens
