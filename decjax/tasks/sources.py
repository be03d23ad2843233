"""Where text comes from: files, folders, JSON lines, Parquet, a Grain source of the user's own, or the standard library.

path              read as
""                the sources of the running Python's standard library
file, folder      each file whole; hidden, gzipped and binary ones (with a zero byte) are left out
*.jsonl           JSON lines: the values of one field that are not null, joined by line breaks
*.parquet         the values of one column that are not null, joined by line breaks
module:NAME       documents of a Grain source (or any sequence) of str or bytes, which is imported; each ends with a line break,
                  which is added if it is missing
"""

from collections.abc import Callable, Iterable, Iterator
import importlib
import itertools
import os
import pathlib
import re
import sysconfig
from typing import Any

from decjax.files import open_regular, parse_json

MAX_BYTES = 2**32  # of a corpus, which is held in memory: of its files, and of the text in them
FIELD = "text"  # of JSON lines and Parquet, unless another is given
ROWS = 64  # of a Parquet file that are decoded at once
_GZIP = b"\x1f\x8b"  # the first bytes of a gzipped file
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def read(path: str, field: str = FIELD) -> tuple[str, dict[str, bytes]]:
    """(the path as errors show it, all texts by their names: relative paths, or numbers of documents).

    Args:
        path: one of the module's list.
        field: the field of JSON lines, or the column of Parquet files, that holds the text.

    Raises:
        ValueError: if the path does not exist, cannot be read, or holds no text.
    """
    if _IMPORTED.fullmatch(path) and not os.path.exists(path):
        shown, texts, has_fields = repr(path), _imported(path), False
    else:
        root, files = _files(path)
        shown = repr(path or str(root))
        has_fields = any(file.suffix in _FORMATS for file in files)
        try:
            texts = _texts(shown, root, files, field)
        except OSError as error:
            raise ValueError(
                f"data path {shown} cannot be read: {error.strerror or error}: {error.filename!r}; give text that you may read"
            ) from error
    if field != FIELD and not has_fields:
        raise ValueError(
            f"data.field={field!r} changes nothing: data path {shown} has neither JSON lines nor Parquet; leave it out"
        )
    if not texts and path.endswith(".gz"):
        raise ValueError(f"data path {shown} is compressed; unpack it, as with gunzip")
    if not texts:
        raise ValueError(
            f"data path {shown} holds no text (a file with a zero byte is taken for binary); give a text file or a folder with some"
        )
    return shown, texts


def _files(path: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """(folder that paths are relative to, files) of a text file, a folder, or the standard library."""
    if not path:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        return root, sorted(p for p in root.rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts))
    root = pathlib.Path(os.path.expanduser(path))
    if not os.path.exists(root):  # Unlike pathlib's functions, os.path's raise nothing on an invalid path.
        raise ValueError(
            f"data path {path!r} does not exist; give a file or folder of text, JSON lines or Parquet, or module:NAME of a source, "
            "or leave it empty for the sources of Python's standard library"
        )
    if os.path.realpath(root) in (os.path.realpath(os.path.expanduser("~")), "/"):
        raise ValueError(f"data path {path!r} is a whole home or root folder; give a folder that holds the text and nothing else")
    if root.is_file():
        return root, [root]
    shown = (p for p in root.rglob("*") if not any(part.startswith(".") for part in p.relative_to(root).parts))
    return root, sorted(p for p in shown if p.is_file())


def _texts(shown: str, root: pathlib.Path, files: list[pathlib.Path], field: str) -> dict[str, bytes]:
    """The content of all files that hold text, by their relative paths."""
    sizes = {file: file.stat().st_size for file in files}
    _check_size(shown, sum(sizes.values()))
    texts, total = {}, 0
    for file in (file for file, size in sizes.items() if size):  # Some files of size 0 in /proc never end.
        text = _joined(_FORMATS.get(file.suffix, _whole)(file, field), shown, total)
        if text and (file.suffix in _FORMATS or is_text(text)):
            texts[file.relative_to(root).as_posix()] = text
            total += len(text)
    return texts


def is_text(content: bytes) -> bool:
    """Whether a file's content is text; a zero byte, as in UTF-16, is taken for a sign of other data."""
    return not (b"\0" in content or content.startswith(_GZIP))


def _check_size(shown: str, total: int, *, so_far: bool = False) -> None:
    """Raises a ValueError if a path holds too many bytes: `total` in all, or `so_far`."""
    if total > MAX_BYTES:
        most = f"{MAX_BYTES / 2**30:.0f} GiB"
        size = f"more than {most} of text" if so_far else f"{total / 2**30:.1f} GiB"
        raise ValueError(f"data path {shown} holds {size}, and at most {most} fit; give a smaller file, folder or source")


def _whole(file: pathlib.Path, field: str) -> Iterator[bytes]:
    """The content of a plain file."""
    del field  # It has none.
    with open_regular(file) as opened:
        yield opened.read()


def _json_lines(file: pathlib.Path, field: str) -> Iterator[str]:
    """The values of a field that are not null."""
    with open_regular(file) as opened:
        for number, line in enumerate(itertools.chain.from_iterable(map(bytes.splitlines, opened)), 1):
            if not line.strip():
                continue
            try:
                found = parse_json(line)
            except ValueError:
                found = None
            if isinstance(found, dict) and field in found and found[field] is None:
                continue
            if not isinstance(found, dict) or not isinstance(found.get(field), str):
                raise ValueError(
                    f"data path {str(file)!r}: line {number} is no JSON object with a text {field!r}; "
                    "give JSON lines, or another --config.data.field"
                )
            yield found[field]


def _parquet(file: pathlib.Path, field: str) -> Iterator[str | bytes]:
    """The values of a column that are neither null nor empty."""
    for value in _column(file, field):
        if not isinstance(value, str | bytes | None):
            raise ValueError(
                f"data path {str(file)!r}: column {field!r} holds {type(value).__name__}, and text is needed; give another field"
            )
        if value:
            yield value


def _column(file: pathlib.Path, field: str) -> Iterator[Any]:
    """All values of a column of a Parquet file. A few rows are decoded at once, since the file's size does not bound theirs."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"data path {str(file)!r} needs the package pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            known = names.count(field) == 1
            for rows in opened.iter_batches(ROWS, columns=[field]) if known else ():
                yield from rows.column(field).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise
        raise ValueError(
            f"data path {str(file)!r} is no Parquet file, or a damaged one: {_said(error)}; give another file"
        ) from error
    if not known:
        raise ValueError(
            f"data path {str(file)!r} has no column {field!r}, or several; its columns: {', '.join(names)}; "
            "give another --config.data.field"
        )


_FORMATS: dict[str, Callable[[pathlib.Path, str], Iterator[str | bytes]]] = {".jsonl": _json_lines, ".parquet": _parquet}


def _joined(texts: Iterable[str | bytes], shown: str, before: int) -> bytes:
    """Texts joined by line breaks; a ValueError as soon as they are too large together with the `before` bytes of other files."""
    parts, total = [], before
    for text in texts:
        parts.append(_bytes(text))
        total += len(parts[-1]) + (len(parts) > 1)
        _check_size(shown, total, so_far=True)
    return b"\n".join(parts)


def _bytes(text: str | bytes) -> bytes:
    # Lone halves of surrogate pairs, which JSON may hold, have no other encoding.
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _imported(path: str) -> dict[str, bytes]:
    """The documents of a sequence that is imported, by their numbers."""
    module, _, name = path.partition(":")
    try:
        source: Any = importlib.import_module(module)
        for part in name.split("."):
            source = getattr(source, part)
    except (Exception, SystemExit) as error:  # Whatever the module does wrong.
        raise ValueError(f"data path {path!r} cannot be imported: {_said(error)}; give module:NAME of a source of text") from error
    if isinstance(source, str | bytes):
        raise ValueError(f"data path {path!r} is a single text, and its items would be letters; give a list of texts")
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise ValueError(
            f"data path {path!r} is of type {type(source).__name__}, which has no length or no items by number; "
            "give a sequence, a Grain MapDataset, or a list of the items"
        )
    texts, total = {}, 0
    length = _of(path, "length", lambda: len(source))
    if length > MAX_BYTES:  # Each item has a byte at least.
        raise ValueError(
            f"data path {path!r} has {length} items, and at most {MAX_BYTES} fit; leave out repeat(), or give a smaller source"
        )
    for number in range(length):
        text = _of(path, f"item {number}", lambda: source[number])
        if not isinstance(text, str | bytes):
            raise ValueError(
                f"data path {path!r}: item {number} is of type {type(text).__name__}; give a source whose items are str or bytes"
            )
        if text:
            whole = _bytes(text)
            texts[str(number)] = whole if whole.endswith(b"\n") else whole + b"\n"  # So that it and the next are two lines.
            total += len(texts[str(number)])
            _check_size(repr(path), total, so_far=True)
    return texts


def _of(path: str, what: str, get: Callable[[], Any]) -> Any:
    """What a source of the user's own returns; a ValueError that names the source for whatever it raises."""
    try:
        return get()
    except (Exception, SystemExit) as error:
        raise ValueError(f"data path {path!r}: its {what} cannot be read: {_said(error)}; mend the source") from error


def _said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
