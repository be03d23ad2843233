"""Files that are written as a whole or not at all."""

import os
import pathlib
import socket


def write_whole(path: str | os.PathLike, text: str, shared: bool = False) -> None:
    """Replace a file in one atomic step. Readers see the old text or the new one, and a failure leaves nothing behind.

    Args:
        path: of the file. A device or a pipe is written directly: replacing it would remove it.
        text: of the file.
        shared: whether several processes may write the file at the same time.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
        return
    writer = f".{socket.gethostname()}.{os.getpid()}" if shared else ""
    temporary = path.with_name(f"{path.name}{writer}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
