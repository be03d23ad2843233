"""Synthetic data in the form and a fraction of the size of real ones, for smoke runs and tests."""

import pathlib

import numpy as np

WORDS = "das die der ein Mädchen Junge Hund läuft sitzt grün groß alt".split()
PAIRS = {"train": 200, "val": 16, "test_2016_flickr": 6}  # of each split


def sentences(count: int, seed: int, shortest: int = 12) -> list[str]:
    """Return sentences of `shortest` to twelve words. With twelve and `data.length=24` all batches have that length, the longest."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(shortest, 12, endpoint=True))) for _ in range(count)]


def multi30k(folder: pathlib.Path, shortest: int = 12) -> pathlib.Path:
    """Write a folder of parallel files like Multi30k's; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(PAIRS.items()):
        for language in ("de", "en"):
            (folder / f"{split}.{language}").write_text("\n".join(sentences(count, seed, shortest)) + "\n")
    return folder


def cifar10(folder: pathlib.Path, images: int = 400) -> pathlib.Path:
    """Write a folder like that of CIFAR-10's binary version, with so many images in each of its two files; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name in ("data_batch_1", "test_batch"):
        records = rng.integers(0, 256, (images, 3073), np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def text(path: pathlib.Path, lines: int = 2000) -> pathlib.Path:
    """Write a text of so many lines; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(sentences(lines, 0)) + "\n")
    return path
