"""The interface of image classifiers, pure functions made from a Flax module, and a multilayer perceptron."""

from collections.abc import Callable
import math
from typing import NamedTuple

from flax import nnx
import jax

from decjax import registry
from decjax.models import layers
from decjax.options import Count
from decjax.typing import PyTree


class ImageModel(NamedTuple):
    """An image classifier as pure functions, without framework objects.

    A registered factory takes a model's options and returns `build(shape_HWC, classes) -> ImageModel`, which the task calls.

    Attributes:
        init: `init(key) -> (params, variables)`; variables are running batch statistics, () where there are none.
        apply: `apply(params, variables, images_BxHxWxC, train) -> (logits_BxK, variables)`. With `train`, batch norm uses the
            statistics of this batch and updates the variables with them; otherwise it uses the variables and leaves them unchanged.
        units: the parameters of hidden units; see `tasks.Task`.
    """

    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, PyTree, jax.Array, bool], tuple[jax.Array, PyTree]]
    units: tuple[tuple[str, int], ...] = ()


Build = Callable[[tuple[int, int, int], int], ImageModel]  # (shape_HWC, classes) of the task's data


def pure(module: layers.Build, units: tuple[tuple[str, int], ...] = ()) -> ImageModel:
    """Return an `ImageModel` from a function that builds a Flax module, which is called with (images_BxHxWxC, train)."""
    bound = layers.bound(module)

    def split(built):
        params, variables = nnx.state(built, nnx.Param, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(variables) or ()

    def apply(params, variables, images_BxHxWxC, train):
        built = bound(params, variables or {})
        logits_BxK = built(images_BxHxWxC, train)
        return logits_BxK, split(built)[1]

    return ImageModel(lambda key: split(module(nnx.Rngs(key))), apply, units)


class MLP(nnx.Module):
    """A perceptron of flattened images with one hidden layer of ReLU units."""

    def __init__(self, pixels: int, hidden: int, classes: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(pixels, hidden, kernel_init=nnx.initializers.he_normal(), rngs=rngs)
        self.head = nnx.Linear(hidden, classes, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        return self.head(jax.nn.relu(self.up(x_BxHxWxC.reshape(len(x_BxHxWxC), -1))))


@registry.register("model", "mlp")
def mlp(*, hidden: Count = 128) -> Build:
    """A multilayer perceptron with one hidden layer; it compiles faster than a ResNet.

    Args:
        hidden: F, units of the hidden layer.
    """
    units = (("up/kernel", -1), ("up/bias", -1), ("head/kernel", -2))
    return lambda shape, classes: pure(lambda rngs: MLP(math.prod(shape), hidden, classes, rngs), units)
