"""Files: only regular ones of bounded size are read, and writes are atomic."""

import errno
import json
import os
import pathlib
import re
import socket
import stat
from typing import Any, BinaryIO

MAX_JSON_BYTES = 2**26
MAX_JSON_DEPTH = 64  # levels; code that processes a document may be recursive
_NUMBER = re.compile(r"0|[1-9][0-9]*")  # `str.isdigit` accepts "²" as well, which `int` refuses.
_TOO_DEEP = f"it is nested more than {MAX_JSON_DEPTH} levels deep"


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading; reading a pipe or a device might never end.

    Raises:
        OSError: if the file cannot be opened or is not a regular one.
    """
    # O_NONBLOCK: opening a pipe must not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb") if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if file is None:
        os.close(descriptor)
        raise _irregular(path)
    return file


def read_text(path: str | os.PathLike) -> str:
    """Return the text of a regular file; invalid UTF-8 is replaced.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        return file.read().decode(errors="replace")


def numbers_in(folder: pathlib.Path) -> list[int]:
    """Return the sorted numbers among the names in a folder; empty if it does not exist."""
    return sorted(int(entry.name) for entry in folder.iterdir() if _NUMBER.fullmatch(entry.name)) if folder.is_dir() else []


def check_regular(path: str | os.PathLike) -> None:
    """Raise an OSError if a path exists and is not a regular file; does not open it."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise _irregular(path)


def _irregular(path: str | os.PathLike) -> OSError:
    if os.path.isdir(path):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    return OSError(errno.EINVAL, "it is a pipe or a device; copy its content to a regular file", os.fspath(path))


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: if there is none; its text is the reason without the path.
    """
    problem, content = f"it is larger than {MAX_JSON_BYTES >> 20} MB", None
    try:
        with open_regular(path) as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        text, problem = b"", error.strerror
    else:
        if len(text) <= MAX_JSON_BYTES:
            content = parse_json(text)
            problem = f"it holds a {type(content).__name__} instead of a JSON object"
    if not isinstance(content, dict):
        raise ValueError(problem)
    return content


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; a ValueError of one line is raised if it is invalid or nested too deeply."""
    problem, content = "", None
    try:
        content = json.loads(text, object_pairs_hook=_unique_fields)
    except RecursionError:
        problem = _TOO_DEEP
    except ValueError as error:
        problem = " ".join(str(error).split())
    level = [content]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [value for value in level if isinstance(value, dict | list)]
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    if problem or level:
        raise ValueError(problem or _TOO_DEEP)
    return content


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object without duplicate names, of which Python's parser would keep the last value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{duplicate[:60]!r} is given twice; leave one out")
    return fields


def write_whole(path: str | os.PathLike, text: str, shared: bool = False) -> None:
    """Replace a file in one atomic step: readers see the old or the new text, and a failed write leaves no temporary file.

    Args:
        path: of the file. A device or a pipe is written directly, since replacing it would remove it.
        text: new content.
        shared: whether several processes may write the file at the same time.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
        return
    writer = f".{socket.gethostname()}.{os.getpid()}" if shared else ""
    temporary = path.with_name(f"{path.name}{writer}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
