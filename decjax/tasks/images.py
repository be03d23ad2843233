"""The task "images": classification of small images.

With K classes, label y of image x, and smoothing ε,

    L = mean_b −Σ_k q_k ln p(k | x),    q_k = (1 − ε) [k = y] + ε/K

The metric `loss` is L with ε = 0 over the images for validation, in nats per image. `accuracy` is the share of them whose likeliest
class is y. Images are standardized by channel, with the mean and deviation of the training images.

References: Szegedy et al. 2016, arXiv 1512.00567, section 7 (label smoothing); He et al. 2016, arXiv 1512.03385, section 4.2 (shifts
and mirroring); Krizhevsky 2009 (CIFAR-10).
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax.models.images import Build, ImageModel
from decjax.options import Decay, check_choice
from decjax.tasks import partition as partition_lib
from decjax.tasks.datasets import DATASETS, Dataset, Images
from decjax.tasks.task import Data, HeldOut, Task, spaced
from decjax.typing import PyTree

USUAL_SHARE = 0.2  # for validation, of a data set without a test set


class Examples(NamedTuple):
    """A batch of images, standardized by channel, and their classes."""

    images_BxHxWxC: Any
    labels_B: Any


class ImageTask(Task, name="images"):
    """Classification of small images; metrics are the loss and the top-1 accuracy.

    Attributes:
        model: `build(shape_HWC, classes) -> ImageModel`.
        dataset: "digits": scikit-learn's 1797 handwritten digits of 8 × 8 pixels; "cifar10": photographs of 32 × 32 pixels.
        path: for "cifar10", the folder of its binary version; empty for "digits", which are embedded.
        partition: which images each worker has: "iid", "contiguous" or "dirichlet(alpha=0.1)", by class; see `tasks.partition`.
        validation: share of the training images that is held out, between 0 and 1; they are the same in all runs. None: the data
            set's own test set, or a fifth of the images where there is none.
        augment: shift training images at random by up to an eighth of their height, and mirror them if that keeps their class.
        smoothing: share ε of the target distribution that is spread over all classes while training; see `optax.smooth_labels`.
    """

    models = ("resnet", "mlp")
    item = "images"

    model: Build
    dataset: str = "digits"
    path: str = ""
    partition: str = "iid"
    validation: HeldOut | None = None
    augment: bool = False
    smoothing: Decay = 0.0

    def __post_init__(self):
        check_choice("task dataset", self.dataset, tuple(DATASETS))
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
        change = _augmented(seed, self.source.mirrored) if self.augment else None
        return _load(self.source.read(self.path), self.validation, self.partition, num_workers, batch_size, seed, change)


def _divided(count: int, tested: int, validation: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the images for training and for validation; see `images`."""
    if validation is None and tested:
        return np.arange(count - tested), np.arange(count - tested, count)
    order = np.random.default_rng(0).permutation(count - tested)
    held_out = max(1, round((USUAL_SHARE if validation is None else validation) * len(order)))
    return order[held_out:], order[:held_out]


def _load(read: Images, validation, partition, num_workers, batch_size, seed, change) -> Data:
    images_ExHxWxC, labels_E, tested = read
    train, valid = _divided(len(labels_E), tested, validation)
    indices = partition_lib.deal(partition, labels_E[train], num_workers, batch_size, seed)
    # Mean and deviation by channel, summed in float64: sums of squares of values 0 … 255 lose digits in float32.
    mean_C = images_ExHxWxC[train].mean(axis=(0, 1, 2), dtype=np.float64).astype(np.float32)
    deviation_C = images_ExHxWxC[train].std(axis=(0, 1, 2), dtype=np.float64).astype(np.float32)
    if constant := [channel for channel, deviation in enumerate(deviation_C) if deviation == 0]:
        raise ValueError(
            f"channel {constant[0]} of all {len(train)} training images is {mean_C[constant[0]]:g}; give images that differ"
        )

    def examples(chosen, change=lambda images_BxHxWxC: images_BxHxWxC):
        return Examples((change(images_ExHxWxC[chosen]) - mean_C) / deviation_C, labels_E[chosen])

    def batch(worker, step):
        chosen = train[indices(worker, step)]
        return examples(chosen, lambda images_BxHxWxC: change(images_BxHxWxC, worker, step)) if change else examples(chosen)

    crc = zlib.crc32(labels_E.tobytes(), zlib.crc32(images_ExHxWxC.tobytes()))
    return Data(
        batch=batch,
        validation=lambda limit: examples(valid[spaced(len(valid), limit)]),
        fingerprint=f"{len(train)}+{len(valid)} images, crc {crc:08x}",
    )


def _augmented(seed: int, mirrored: bool) -> Callable[[np.ndarray, int, int], np.ndarray]:
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


images = ImageTask
