"""The task "images": classification of small images.

With K classes, label y of image x, and smoothing ε,

    L = mean_b −Σ_k q_k ln p(k | x),    q_k = (1 − ε) [k = y] + ε/K

The metric `loss` is L with ε = 0 over the validation images, in nats per image; `accuracy` is the share of them whose most probable
class is y. Images are standardized by channel, with the mean and deviation of the training images.

References: Szegedy et al. 2016, arXiv 1512.00567, section 7 (label smoothing); He et al. 2016, arXiv 1512.03385, section 4.2 (shifts
and mirroring); Krizhevsky 2009 (CIFAR-10).
"""

from collections.abc import Callable
import functools
import os
import pathlib
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax.contrib.images.model import Build, ImageModel
from decjax.files import open_regular
from decjax.options import Decay
from decjax.tasks import partition as partition_lib
from decjax.tasks.sources import READABLE, expect, explained
from decjax.tasks.task import Data, HeldOut, Task, checksum, spaced
from decjax.typing import PyTree

DEFAULT_SHARE = 0.2  # for validation, of a data set without a test set


class Images(NamedTuple):
    """Labeled images, those of the test set last."""

    images_ExHxWxC: np.ndarray  # uint8
    labels_E: np.ndarray  # int32
    tested: int = 0  # size of the test set; 0: there is none


class Dataset(NamedTuple):
    """A data set of images.

    Attributes:
        shape: of an image, (H, W, C).
        classes: K.
        read: `read(path) -> Images`; raises a ValueError if the path does not hold the data set.
        mirrored: whether the mirror image of an image is of the same class.
    """

    shape: tuple[int, int, int]
    classes: int
    read: Callable[[str], Images]
    mirrored: bool = False


def _digits(path: str) -> Images:
    from sklearn import datasets  # It takes a second, and other data sets do not need it.

    expect(not path, path, "is not read with dataset='digits', which is built in", "leave it empty")
    images_ExHxW, labels_E = datasets.load_digits(return_X_y=True)
    return Images(images_ExHxW.reshape(-1, 8, 8, 1).astype(np.uint8), labels_E.astype(np.int32))


_CIFAR_SHAPE = (32, 32, 3)
_CIFAR_BYTES = 1 + 32 * 32 * 3  # of a record: its label, and its red, green and blue values, each row by row
_CIFAR_FILES = "give CIFAR-10's own files"


def _cifar10(path: str) -> Images:
    folder = pathlib.Path(os.path.expanduser(path))
    files, test = sorted(folder.glob("data_batch_*.bin")) if path else [], folder / "test_batch.bin"
    fix = "give the folder of CIFAR-10's binary version (https://www.cs.toronto.edu/~kriz/cifar.html)"
    expect(files and test.is_file(), path, "holds no data_batch_*.bin and test_batch.bin", fix)
    records = [_records(file) for file in (*files, test)]
    whole = np.concatenate(records)
    images_ExHxWxC = whole[:, 1:].reshape(-1, *np.roll(_CIFAR_SHAPE, 1)).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(images_ExHxWxC), whole[:, 0].astype(np.int32), len(records[-1]))


def _records(file: pathlib.Path) -> np.ndarray:
    with explained(file, "cannot be read", READABLE, OSError), open_regular(file) as opened:
        values = np.fromfile(opened, np.uint8)
    is_whole = len(values) and len(values) % _CIFAR_BYTES == 0
    expect(is_whole, file, f"has {len(values)} bytes, which are not records of {_CIFAR_BYTES}", _CIFAR_FILES)
    records = values.reshape(-1, _CIFAR_BYTES)
    expect(records[:, 0].max() < 10, file, f"has the label {records[:, 0].max()}, and CIFAR-10's are 0 to 9", _CIFAR_FILES)
    return records


DATASETS = {"digits": Dataset((8, 8, 1), 10, _digits), "cifar10": Dataset(_CIFAR_SHAPE, 10, _cifar10, mirrored=True)}


class Examples(NamedTuple):
    """A batch of images, standardized by channel, and their classes."""

    images_BxHxWxC: PyTree
    labels_B: PyTree


class ImageTask(Task, name="images"):
    """Classification of small images; metrics are the loss and the top-1 accuracy.

    Attributes:
        model: `build(shape_HWC, classes) -> ImageModel`.
        dataset: "digits": scikit-learn's 1797 handwritten digits of 8 × 8 pixels; "cifar10": photographs of 32 × 32 pixels.
        path: for "cifar10", the folder of its binary version; empty for "digits", which are built in.
        partition: which images each worker has: "iid", "contiguous" or "dirichlet(alpha=0.1)", by class; see `tasks.partition`.
        validation: share of the training images that is held out, the same images in all runs. None: the test set of the data set,
            or a fifth of the images where there is none.
        augment: shift training images at random by up to an eighth of their height, and mirror them if that preserves their class.
        smoothing: share ε of the target distribution that is spread over all classes while training; see `optax.smooth_labels`.
    """

    models = ("resnet", "mlp")
    item = "images"

    model: Build
    dataset: Literal["digits", "cifar10"] = "digits"
    path: str = ""
    partition: str = "iid"
    validation: HeldOut | None = None
    augment: bool = False
    smoothing: Decay = 0.0

    def __post_init__(self):
        partition_lib.parse(self.partition)

    @property
    def source(self) -> Dataset:
        """The data set."""
        return DATASETS[self.dataset]

    @functools.cached_property
    def network(self) -> ImageModel:
        """The model for this data set's images and classes."""
        return self.model(self.source.shape, self.source.classes)

    @property
    def units(self) -> tuple[tuple[str, int], ...]:
        return self.network.units

    @property
    def metrics(self) -> dict[str, str]:
        return {"loss": "nats", "accuracy": ""}

    def init(self, key: jax.Array) -> PyTree:
        return self.network.init(key)[0]

    def variables(self) -> PyTree:
        return self.network.init(jax.random.key(0))[1]

    def loss(self, params: PyTree, variables: PyTree, batch: PyTree, key: jax.Array | None) -> tuple[jax.Array, PyTree]:
        logits_BxK, variables = self.network.apply(params, variables, batch.images_BxHxWxC, True)
        if not self.smoothing:
            return optax.softmax_cross_entropy_with_integer_labels(logits_BxK, batch.labels_B).mean(), variables
        labels_BxK = optax.smooth_labels(jax.nn.one_hot(batch.labels_B, logits_BxK.shape[-1]), self.smoothing)
        return optax.softmax_cross_entropy(logits_BxK, labels_BxK).mean(), variables

    def measure(self, params: PyTree, variables: PyTree, examples: PyTree) -> tuple[dict[str, jax.Array], jax.Array]:
        logits_BxK, _ = self.network.apply(params, variables, examples.images_BxHxWxC, False)
        nll_B = optax.softmax_cross_entropy_with_integer_labels(logits_BxK, examples.labels_B)
        return {"loss": nll_B, "accuracy": (logits_BxK.argmax(axis=-1) == examples.labels_B) * 1.0}, jnp.ones_like(nll_B)

    def examples(self, batch_size: int) -> Examples:
        images_BxHxWxC = jax.ShapeDtypeStruct((batch_size, *self.source.shape), jnp.float32)
        return Examples(images_BxHxWxC, jax.ShapeDtypeStruct((batch_size,), jnp.int32))

    def load(self, num_workers: int, batch_size: int, seed: int) -> Data:
        images_ExHxWxC, labels_E, tested = self.source.read(self.path)
        train, valid = self._divided(len(labels_E), tested)
        indices = partition_lib.deal(self.partition, labels_E[train], num_workers, batch_size, seed)
        # Mean and deviation by channel, summed in float64: sums of squares of values 0 … 255 lose digits in float32.
        mean_C = images_ExHxWxC[train].mean(axis=(0, 1, 2), dtype=np.float64).astype(np.float32)
        deviation_C = images_ExHxWxC[train].std(axis=(0, 1, 2), dtype=np.float64).astype(np.float32)
        expect(deviation_C.all(), self.path, "has training images with a channel of one value only", "give images that differ")
        change = _augmented(seed, self.source.mirrored) if self.augment else lambda images_BxHxWxC, worker, step: images_BxHxWxC

        def standardized(images_BxHxWxC, labels_B):
            return Examples((images_BxHxWxC - mean_C) / deviation_C, labels_B)

        def batch(worker, step):
            chosen = train[indices(worker, step)]
            return standardized(change(images_ExHxWxC[chosen], worker, step), labels_E[chosen])

        def validation(limit):
            chosen = valid[spaced(len(valid), limit)]
            return standardized(images_ExHxWxC[chosen], labels_E[chosen])

        fingerprint = f"{len(train)}+{len(valid)} images, {checksum((images_ExHxWxC, labels_E))}"
        return Data(batch, validation, fingerprint)

    def _divided(self, count: int, tested: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the images for training and for validation."""
        if self.validation is None and tested:
            return np.arange(count - tested), np.arange(count - tested, count)
        order = np.random.default_rng(0).permutation(count - tested)
        held_out = max(1, round((self.validation or DEFAULT_SHARE) * len(order)))
        return order[held_out:], order[:held_out]


def _augmented(seed: int, mirrored: bool) -> Callable[[np.ndarray, int, int], np.ndarray]:
    """The function that shifts, and perhaps mirrors, the images of a batch at random."""

    def change(images_BxHxWxC, worker, step):
        rng = np.random.default_rng((seed, worker, step))
        B, H, W, _ = images_BxHxWxC.shape
        most = max(1, H // 8)
        padded = np.pad(images_BxHxWxC, ((0, 0), (most, most), (most, most), (0, 0)))
        row_Bx1x1, column_Bx1x1 = rng.integers(0, 2 * most + 1, (2, B, 1, 1))
        columns_Bx1xW = np.broadcast_to(np.arange(W), (B, 1, W))
        if mirrored:
            columns_Bx1xW = np.where(rng.integers(0, 2, (B, 1, 1)), columns_Bx1xW[..., ::-1], columns_Bx1xW)
        return padded[np.arange(B)[:, None, None], row_Bx1x1 + np.arange(H)[:, None], column_Bx1x1 + columns_Bx1xW]

    return change
