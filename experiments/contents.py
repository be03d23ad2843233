"""Checksums of data: a run is identified by the contents of its data, not by their path."""

from collections.abc import Iterable
import functools
import gzip
import os
import pathlib
import zlib

from decjax import files

MULTI30K_FILES = tuple(f"{split}.{language}" for split in ("train", "val", "test_2016_flickr") for language in ("de", "en"))
# Files of a folder of data that the task of a config file reads; a text is all files that are neither hidden nor gzipped.
READ = {"configs/translation.py": MULTI30K_FILES, "configs/cifar.py": ("data_batch_*.bin", "test_batch.bin")}


@functools.cache
def checksum(path: str, config: str = "") -> str:
    """A checksum of a file, or of the files of a folder that a config file's task reads, with their names; plain or gzipped is the same.

    What is neither, such as a checksum, is returned as it is.

    Raises:
        OSError: if a file cannot be read or unpacked.
    """
    root = pathlib.Path(os.path.expanduser(path))
    if root.is_file():
        return f"{zlib.crc32(_unpacked(root)):08x}"
    crc = 0
    for file in sorted(_read(root, config)):
        crc = zlib.crc32(_unpacked(file), zlib.crc32(file.name.removesuffix(".gz").encode(), crc))
    return f"{crc:08x}" if crc else path


def _read(root: pathlib.Path, config: str) -> Iterable[pathlib.Path]:
    """The files of a folder that a config file's task reads; a plain one goes before a gzipped one of the same name."""
    if config in READ:
        return [file for name in READ[config] for file in list(root.glob(name)) or root.glob(f"{name}.gz")]
    files = (file for file in root.rglob("*") if file.is_file() and file.suffix != ".gz")
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(root).parts)]


def _unpacked(path: pathlib.Path) -> bytes:
    try:
        with files.open_regular(path) as file:
            return gzip.decompress(file.read()) if path.suffix == ".gz" else file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise OSError(f"{path} cannot be read ({error}); get the file again, or give other data") from error
