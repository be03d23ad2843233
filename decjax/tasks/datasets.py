"""Data sets of labelled images: the embedded digits, and CIFAR-10 from its binary files."""

from collections.abc import Callable
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from decjax.files import open_regular


class Images(NamedTuple):
    """Labelled images, those of the data set's own test set last."""

    images_ExHxWxC: np.ndarray  # uint8
    labels_E: np.ndarray  # int32
    tested: int = 0  # how many the test set has; 0: there is none


class Dataset(NamedTuple):
    """A data set of images, and how to read it.

    Attributes:
        shape: of an image, (H, W, C).
        classes: K, how many.
        read: `read(path) -> Images`; raises a ValueError if the path does not hold the data set.
        mirrored: whether the mirror image of an image is of the same class.
    """

    shape: tuple[int, int, int]
    classes: int
    read: Callable[[str], Images]
    mirrored: bool = False


def _digits(path: str) -> Images:
    from sklearn import datasets  # Imported here because it takes a second, and only this function needs it.

    if path:
        raise ValueError(f"data path {path!r} is not read with dataset='digits', which is embedded; leave it empty")
    digits: Any = datasets.load_digits()
    return Images(digits.images[..., None].astype(np.uint8), digits.target.astype(np.int32))


_CIFAR_SHAPE = (32, 32, 3)
_CIFAR_BYTES = 1 + 32 * 32 * 3  # of a record: its label, and its red, green and blue values, each row by row


def _cifar10(path: str) -> Images:
    folder = pathlib.Path(os.path.expanduser(path))
    files = sorted(folder.glob("data_batch_*.bin")) if path else []
    if not files or not (folder / "test_batch.bin").is_file():
        raise ValueError(
            f"data path {path!r} holds no data_batch_*.bin and test_batch.bin; give the folder of CIFAR-10's binary version "
            "(https://www.cs.toronto.edu/~kriz/cifar.html)"
        )
    records = [_records(file) for file in (*files, folder / "test_batch.bin")]
    whole = np.concatenate(records)
    images_ExHxWxC = whole[:, 1:].reshape(-1, *np.roll(_CIFAR_SHAPE, 1)).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(images_ExHxWxC), whole[:, 0].astype(np.int32), len(records[-1]))


def _records(file: pathlib.Path) -> np.ndarray:
    try:
        with open_regular(file) as opened:
            values = np.fromfile(opened, np.uint8)
    except OSError as error:
        raise ValueError(f"data path {str(file)!r} cannot be read: {error.strerror}; give files that you may read") from error
    if not len(values) or len(values) % _CIFAR_BYTES:
        raise ValueError(
            f"data path {str(file)!r} has {len(values)} bytes, which are no records of {_CIFAR_BYTES}; give CIFAR-10's own files"
        )
    records = values.reshape(-1, _CIFAR_BYTES)
    if (most := records[:, 0].max()) >= 10:
        raise ValueError(f"data path {str(file)!r} has the label {most}, and CIFAR-10's are 0 to 9; give CIFAR-10's own files")
    return records


DATASETS = {"digits": Dataset((8, 8, 1), 10, _digits), "cifar10": Dataset(_CIFAR_SHAPE, 10, _cifar10, mirrored=True)}
