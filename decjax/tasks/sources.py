"""Where text comes from: files, folders, JSON lines, Parquet, a Grain source of the user's own, or the standard library.

path              read as
""                the sources of the running Python's standard library
file, folder      each file whole; hidden, gzipped and binary ones (with a zero byte) are left out
*.jsonl           JSON lines: the values of one field that are not null, joined by line breaks
*.parquet         the values of one column that are not null, joined by line breaks
module:NAME       documents of a Grain source (or any sequence) of str or bytes, which is imported
"""

from collections.abc import Callable, Iterable
import importlib
import json
import os
import pathlib
import re
import sysconfig
from typing import Any

MAX_BYTES = 2**32  # of a corpus, which is held in memory
_GZIP = b"\x1f\x8b"  # the first bytes of a gzipped file
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def read(path: str, field: str = "text") -> tuple[str, dict[str, bytes]]:
    """(the path as errors show it, all texts by their names: relative paths, or numbers of documents).

    Args:
        path: one of the module's list.
        field: the field of JSON lines, or the column of Parquet files, that holds the text.

    Raises:
        ValueError: if the path does not exist, cannot be read, or holds no text.
    """
    if _IMPORTED.fullmatch(path) and not os.path.exists(path):
        shown, texts = repr(path), _imported(path)
    else:
        root, files = _files(path)
        shown = repr(path or str(root))
        try:
            texts = _texts(shown, root, files, field)
        except OSError as error:
            raise ValueError(
                f"data path {shown} cannot be read: {error.strerror or error}: {error.filename!r}; give text that you may read"
            ) from error
    if not texts and path.endswith(".gz"):
        raise ValueError(f"data path {shown} is compressed; unpack it, as with gunzip")
    if not texts:
        raise ValueError(f"data path {shown} holds no text; give a non-empty text file or a folder with some")
    return shown, texts


def _files(path: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """(folder that paths are relative to, files) of a text file, a folder, or the standard library."""
    if not path:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        return root, sorted(p for p in root.rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts))
    root = pathlib.Path(os.path.expanduser(path))
    if not os.path.exists(root):  # Unlike pathlib's functions, os.path's raise nothing on an invalid path.
        raise ValueError(
            f"data path {path!r} does not exist; give a text file or a folder, or leave it empty for the embedded corpus"
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
    # Files of size 0 are not opened: some of those in /proc never end.
    texts = {
        file.relative_to(root).as_posix(): _FORMATS.get(file.suffix, lambda file, field: file.read_bytes())(file, field)
        for file, size in sizes.items()
        if size
    }
    return {name: text for name, text in texts.items() if text and b"\0" not in text and not text.startswith(_GZIP)}


def _check_size(shown: str, total: int) -> None:
    if total > MAX_BYTES:
        raise ValueError(
            f"data path {shown} holds {total / 2**30:.1f} GiB, and at most {MAX_BYTES / 2**30:.0f} GiB fit; "
            "give a smaller file or folder"
        )


def _json_lines(file: pathlib.Path, field: str) -> bytes:
    texts = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and field in found and found[field] is None:
            continue
        if not isinstance(found, dict) or not isinstance(found.get(field), str):
            raise ValueError(
                f"data path {str(file)!r}: line {number} is no JSON object with a text {field!r}; give JSON lines, or another field"
            )
        texts.append(found[field])
    return _joined(texts)


def _parquet(file: pathlib.Path, field: str) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"data path {str(file)!r} needs the package pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(file) as opened:
            known = opened.schema_arrow.names.count(field) == 1
            column = opened.read(columns=[field]).column(field).to_pylist() if known else []
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise
        raise ValueError(
            f"data path {str(file)!r} is no Parquet file, or a damaged one: {_said(error)}; give another file"
        ) from error
    if not known:
        raise ValueError(f"data path {str(file)!r} has no column {field!r}, or several; give another field")
    if wrong := [text for text in column if not isinstance(text, str | bytes | None)]:
        raise ValueError(
            f"data path {str(file)!r}: column {field!r} holds {type(wrong[0]).__name__}, and text is needed; give another field"
        )
    return _joined(text for text in column if text)


_FORMATS: dict[str, Callable[[pathlib.Path, str], bytes]] = {".jsonl": _json_lines, ".parquet": _parquet}


def _joined(texts: Iterable[str | bytes]) -> bytes:
    # Lone halves of surrogate pairs, which JSON may hold, have no other encoding.
    return b"\n".join(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass") for text in texts)


def _imported(path: str) -> dict[str, bytes]:
    """The documents of a sequence that is imported, by their numbers."""
    module, _, name = path.partition(":")
    try:
        source: Any = importlib.import_module(module)
        for part in name.split("."):
            source = getattr(source, part)
    except (Exception, SystemExit) as error:  # Whatever the module does wrong.
        raise ValueError(f"data path {path!r} cannot be imported: {_said(error)}; give module:NAME of a source of text") from error
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise ValueError(
            f"data path {path!r} is of type {type(source).__name__}, which has no length or no items by number; "
            "give a sequence or a Grain MapDataset"
        )
    texts, total = {}, 0
    for number in range(_of(path, "length", lambda: len(source))):
        text = _of(path, f"item {number}", lambda: source[number])
        if not isinstance(text, str | bytes):
            raise ValueError(
                f"data path {path!r}: item {number} is of type {type(text).__name__}; give a source whose items are str or bytes"
            )
        texts[str(number)] = _joined([text])
        _check_size(repr(path), total := total + len(texts[str(number)]))
    return {number: text for number, text in texts.items() if text}


def _of(path: str, what: str, get: Callable[[], Any]) -> Any:
    """What a source of the user's own returns; a ValueError that names the source for whatever it raises."""
    try:
        return get()
    except (Exception, SystemExit) as error:
        raise ValueError(f"data path {path!r}: its {what} cannot be read: {_said(error)}; mend the source") from error


def _said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
