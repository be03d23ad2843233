"""Sources of text: files, folders, JSON lines, Parquet, an importable Grain source, or the standard library.

path              read as
""                the sources of the running Python's standard library
file, folder      each file as one text; hidden, gzipped and binary files (those with a zero byte) are skipped
*.jsonl           JSON lines: the values of one field that are not null, joined by line breaks
*.parquet         the values of one column that are neither null nor empty, joined by line breaks
module:NAME       documents of an imported Grain source (or any sequence) of str or bytes; a missing final line break is added

`expect` and `explained` word the errors of everything that reads data: the path, the problem and the fix, on one line.
"""

from collections.abc import Callable, Iterator
import contextlib
import importlib
import itertools
import operator
import os
import pathlib
import re
import sysconfig
from typing import Any

from decjax.errors import optional
from decjax.files import open_regular, parse_json

MAX_BYTES = 2**32  # of a corpus, which is held in memory: of its files, and of the text in them
FIELD = "text"  # of JSON lines and Parquet, unless another is given
ROWS = 64  # of a Parquet file that are decoded at once: the size of the file does not bound theirs
PIECE = 2**20  # bytes of plain text
READABLE = "give data that you may read"
_OTHER_FIELD = "give another --config.data.field"
_MEND = "fix the source"
_GZIP = b"\x1f\x8b"  # the first bytes of a gzipped file
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

Path = str | os.PathLike[str]


def expect(fits: object, path: Path, problem: str, fix: str) -> None:
    """Raise a ValueError about a data path, with the problem and the fix, unless it `fits`."""
    if not fits:
        raise ValueError(f"data path {os.fspath(path)!r} {problem}; {fix}")


@contextlib.contextmanager
def explained(path: Path, problem: str, fix: str, *errors: type[BaseException]) -> Iterator[None]:
    """Turn errors of these types into a ValueError about a data path."""
    try:
        yield
    except errors as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            is_other = error.filename and os.fspath(error.filename) != os.fspath(path)
            text = error.strerror + (f": {error.filename!r}" if is_other else "")
        raise ValueError(f"data path {os.fspath(path)!r} {problem}: {' '.join(text.split())}; {fix}") from error


def read(path: str, field: str = FIELD) -> tuple[str, dict[str, bytes]]:
    """Return (the path that is read, all texts by name: a relative path, or the number of a document).

    Args:
        path: see the table above.
        field: the field of JSON lines, or the column of Parquet files, that holds the text.

    Raises:
        ValueError: if the path does not exist, cannot be read, or holds no text.
    """
    if _IMPORTED.fullmatch(path) and not os.path.exists(path):
        place, texts, has_fields = path, _imported(path), False
    else:
        root, files = _files(path)
        place, has_fields = path or str(root), any(file.suffix in _FORMATS for file in files)
        with explained(place, "cannot be read", READABLE, OSError):
            texts = _texts(place, root, files, field)
    if field != FIELD and not has_fields:
        raise ValueError(
            f"data.field={field!r} has no effect: data path {place!r} has neither JSON lines nor Parquet; leave it out"
        )
    expect(texts or not path.endswith(".gz"), place, "is compressed", "unpack it, as with gunzip")
    expect(texts, place, "holds no text (a file with a zero byte counts as binary)", "give a text file or a folder of text files")
    return place, texts


def pieces(path: str, field: str = FIELD) -> Iterator[tuple[str, bytes]]:
    """Yield (name, text) of documents, one at a time; plain text in pieces of about 1 MiB that end with a line.

    Unlike `read`, it does not limit the size of all texts.

    Args:
        path: see the table above.
        field: the field of JSON lines, or the column of Parquet files, that holds the text.

    Raises:
        ValueError: as `read`.
    """
    if _IMPORTED.fullmatch(path) and not os.path.exists(path):
        yield from _imported(path).items()
        return
    root, files = _files(path)
    is_empty = True
    with explained(path, "cannot be read", READABLE, OSError):
        for file in (file for file in files if file.stat().st_size):
            name, texts = file.relative_to(root).as_posix(), _FORMATS.get(file.suffix, _plain)(file, field)
            for number, text in enumerate(texts):
                yield (
                    f"{name}#{number}" if number else name,
                    _encoded(text) if file.suffix not in _FORMATS else _encoded(text) + b"\n",
                )
                is_empty = False
    expect(not is_empty, path, "holds no text", "give a text file or a folder of text files")


def _plain(file: pathlib.Path, field: str) -> Iterator[bytes]:
    with open_regular(file) as opened:
        while text := b"".join(opened.readlines(PIECE)):
            if not is_text(text):
                return
            yield text


def _files(path: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """(folder that paths are relative to, files) of a text file, a folder, or the standard library."""
    if not path:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        found = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in _NOT_LIBRARY]  # Listing installed packages takes half a second.
            found += [pathlib.Path(folder, name) for name in names if name.endswith(".py") and name not in _NOT_LIBRARY]
        return root, sorted(found)
    root = pathlib.Path(os.path.expanduser(path))
    expect(
        os.path.exists(root),  # Unlike pathlib's functions, os.path's raise nothing on an invalid path.
        path,
        "does not exist",
        "give a file or folder of text, JSON lines or Parquet, or module:NAME of a source, or leave it empty for the sources of "
        "Python's standard library",
    )
    is_private = os.path.realpath(root) in (os.path.realpath(os.path.expanduser("~")), "/")
    expect(not is_private, path, "is a whole home or root folder", "give a folder that holds only the text")
    if root.is_file():
        return root, [root]
    visible = (p for p in root.rglob("*") if not any(part.startswith(".") for part in p.relative_to(root).parts))
    return root, sorted(p for p in visible if p.is_file())


def _texts(place: str, root: pathlib.Path, files: list[pathlib.Path], field: str) -> dict[str, bytes]:
    """The content of all files that hold text, by relative path."""
    sizes = {file: file.stat().st_size for file in files}
    size, most = sum(sizes.values()), f"{MAX_BYTES / 2**30:.0f} GiB"
    expect(size <= MAX_BYTES, place, f"holds {size / 2**30:.1f} GiB, and at most {most} fit", "give a smaller file or folder")
    texts, total = {}, 0
    for file in (file for file, size in sizes.items() if size):  # Some files of size 0 in /proc never end.
        parts, reached = [], total - 1
        for text in _FORMATS.get(file.suffix, _whole)(file, field):
            parts.append(_encoded(text))
            reached += len(parts[-1]) + 1
            check_total(place, reached)
        text = b"\n".join(parts)
        if text and (file.suffix in _FORMATS or is_text(text)):
            texts[file.relative_to(root).as_posix()] = text
            total += len(text)
    return texts


def check_total(path: Path, total: int) -> None:
    """Raise a ValueError if a path holds more text than fits in memory; `total` may be the bytes that were read so far."""
    most = f"{MAX_BYTES / 2**30:.0f} GiB"
    expect(
        total <= MAX_BYTES, path, f"holds more than {most} of text, and at most {most} fit", "give a smaller file, folder or source"
    )


def is_text(content: bytes) -> bool:
    """Return whether the content of a file is text: neither gzipped nor with a zero byte, as UTF-16 and binary data have."""
    return not (b"\0" in content or content.startswith(_GZIP))


def _whole(file: pathlib.Path, field: str) -> Iterator[bytes]:
    with open_regular(file) as opened:
        yield opened.read()


def _json_lines(file: pathlib.Path, field: str) -> Iterator[str]:
    with open_regular(file) as opened:
        for number, line in enumerate(itertools.chain.from_iterable(map(bytes.splitlines, opened)), 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            value: Any = row.get(field, row) if isinstance(row, dict) else row
            if isinstance(row, dict) and value is None:
                continue
            problem = f"has in line {number} no JSON object with a string {field!r}"
            expect(isinstance(row, dict) and isinstance(value, str), file, problem, _OTHER_FIELD)
            yield value


def _parquet(file: pathlib.Path, field: str) -> Iterator[str | bytes]:
    for value in _column(file, field):
        kind = type(value).__name__
        expect(isinstance(value, str | bytes | None), file, f"holds {kind} instead of text in column {field!r}", _OTHER_FIELD)
        if value:
            yield value


def _column(file: pathlib.Path, field: str) -> Iterator[Any]:
    parquet = optional("pyarrow.parquet", f"data path {str(file)!r}")
    errors = optional("pyarrow", "Parquet").ArrowException, OSError, ValueError
    with (
        open_regular(file) as opened,
        explained(file, "is not a Parquet file, or is damaged", "give another file", *errors),
        parquet.ParquetFile(opened) as table,
    ):
        names = table.schema_arrow.names
        is_column = names.count(field) == 1
        for rows in table.iter_batches(ROWS, columns=[field]) if is_column else ():
            yield from rows.column(field).to_pylist()
    expect(is_column, file, f"must have one column {field!r}, and its columns are {', '.join(names)}", _OTHER_FIELD)


_FORMATS: dict[str, Callable[[pathlib.Path, str], Iterator[str | bytes]]] = {".jsonl": _json_lines, ".parquet": _parquet}


def _encoded(text: str | bytes) -> bytes:
    # Lone halves of surrogate pairs, which JSON may hold, have no other encoding.
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _imported(path: str) -> dict[str, bytes]:
    """The documents of an imported sequence, by number."""
    module, _, name = path.partition(":")
    anything = Exception, SystemExit  # Whatever code of the user raises.
    with explained(path, "cannot be imported", "give module:NAME of a source of text", *anything):
        source = operator.attrgetter(name)(importlib.import_module(module))
    expect(not isinstance(source, str | bytes), path, "is a single text, and its items would be letters", "give a list of texts")
    expect(
        hasattr(source, "__getitem__") and hasattr(source, "__len__"),
        path,
        f"is of type {type(source).__name__}, which has no length or no items by number",
        "give a sequence, a Grain MapDataset, or a list of the items",
    )
    with explained(path, "has a length that cannot be read", _MEND, *anything):
        length = len(source)
    problem = f"has {length} items, and at most {MAX_BYTES} fit"  # Each item has a byte at least.
    expect(length <= MAX_BYTES, path, problem, "leave out repeat(), or give a smaller source")
    texts, total = {}, 0
    for number in range(length):
        with explained(path, f"has an item {number} that cannot be read", _MEND, *anything):
            text = source[number]
        problem = f"has an item {number} of type {type(text).__name__}"
        expect(isinstance(text, str | bytes), path, problem, "give a source whose items are str or bytes")
        if text:
            texts[str(number)] = _encoded(text).removesuffix(b"\n") + b"\n"  # So that it and the next are two lines.
            total += len(texts[str(number)])
            check_total(path, total)
    return texts
