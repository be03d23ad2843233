"""A residual network for small images: 3 stages of n blocks, 6n + 2 layers.

Shortcuts have no parameters: where a stage halves the image and doubles the width, they take every other pixel and pad the new
channels with zeros. The scale of a block's last norm is initially zero, so a block is initially equal to its shortcut.

References: He et al. 2015, arXiv 1512.03385, section 4.2; Goyal et al. 2017, arXiv 1706.02677 (zero scale).
"""

from typing import Annotated, Literal

from flax import nnx
import jax
import jax.numpy as jnp

from decjax import registry
from decjax.contrib.images import model
from decjax.options import Count, Range, check_range

GROUP = 8  # channels that are normalized together


class Norm(nnx.Module):
    """Batch norm, whose running statistics are variables of the model, or group norm, which has none."""

    def __init__(self, kind: str, width: int, rngs: nnx.Rngs, initial: nnx.Initializer = nnx.initializers.ones):
        if kind == "batch":
            self.norm = nnx.BatchNorm(width, momentum=0.9, scale_init=initial, rngs=rngs)
        else:
            self.norm = nnx.GroupNorm(width, num_groups=None, group_size=min(GROUP, width), scale_init=initial, rngs=rngs)

    def __call__(self, x_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        if isinstance(self.norm, nnx.BatchNorm):
            return self.norm(x_BxHxWxC, use_running_average=not train)
        return self.norm(x_BxHxWxC)


class Convolution(nnx.Module):
    """A 3 × 3 convolution without bias, whose kernel is stored as a matrix 9C×F: from a pixel's 9C inputs to F outputs."""

    def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs):
        self.stride = stride
        limit = (6 / (9 * inputs)) ** 0.5  # Initialization of He et al., uniform.
        # Drawn as a vector: random arrays of rank 4 take much longer to compile.
        values = jax.random.uniform(rngs.params(), (9 * inputs * width,), minval=-limit, maxval=limit)
        self.kernel = nnx.Param(values.reshape(9 * inputs, width))

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x_BxHxWxC, self.kernel[...], cpu=self._by_products, default=self._by_operation)

    def _by_products(self, x_BxHxWxC, kernel_9CxF):
        """Three matrix products, one for each row of the kernel. With a kernel per worker, the convolutions of XLA's CPU backend are
        slower, especially their derivatives."""
        B, H, W, C = x_BxHxWxC.shape
        padded = jnp.pad(x_BxHxWxC, ((0, 0), (1, 1), (1, 1), (0, 0)))
        columns_BxHxWx3C = jnp.concatenate([padded[:, :, j : j + W : self.stride] for j in range(3)], axis=-1)
        kernel_3x3CxF = kernel_9CxF.reshape(3, 3 * C, -1)
        first, second, third = (
            columns_BxHxWx3C[:, i : i + H : self.stride].reshape(-1, 3 * C) @ kernel_3x3CxF[i] for i in range(3)
        )
        return (first + second + third).reshape(B, -(-H // self.stride), -(-W // self.stride), kernel_9CxF.shape[1])

    def _by_operation(self, x_BxHxWxC, kernel_9CxF):
        kernel_3x3xCxF = kernel_9CxF.reshape(3, 3, x_BxHxWxC.shape[-1], -1)
        strides, padding = (self.stride, self.stride), ((1, 1), (1, 1))
        return jax.lax.conv_general_dilated(x_BxHxWxC, kernel_3x3xCxF, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


class Block(nnx.Module):
    """A residual block: relu(x + norm(conv(relu(norm(conv(x))))))."""

    def __init__(self, inputs: int, width: int, norm: str, rngs: nnx.Rngs):
        self.stride, self.more = width // inputs, width - inputs
        self.first, self.first_norm = Convolution(inputs, width, self.stride, rngs), Norm(norm, width, rngs)
        self.second = Convolution(width, width, 1, rngs)
        self.second_norm = Norm(norm, width, rngs, nnx.initializers.zeros)

    def __call__(self, x_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        y_BxHxWxC = jax.nn.relu(self.first_norm(self.first(x_BxHxWxC), train))
        y_BxHxWxC = self.second_norm(self.second(y_BxHxWxC), train)
        shortcut = jnp.pad(x_BxHxWxC[:, :: self.stride, :: self.stride], [(0, 0)] * 3 + [(0, self.more)])
        return jax.nn.relu(shortcut + y_BxHxWxC)


class ResNet(nnx.Module):
    """A convolution, 3 stages of blocks of width w, 2w and 4w, the mean over pixels, and a linear layer of classes."""

    def __init__(self, channels: int, classes: int, blocks: int, width: int, norm: str, rngs: nnx.Rngs):
        self.stem, self.stem_norm = Convolution(channels, width, 1, rngs), Norm(norm, width, rngs)
        widths = [width * 2**stage for stage in range(3) for _ in range(blocks)]
        self.blocks = nnx.List(Block(inputs, out, norm, rngs) for inputs, out in zip([width, *widths], widths))
        self.head = nnx.Linear(widths[-1], classes, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        x_BxHxWxC = jax.nn.relu(self.stem_norm(self.stem(x_BxHxWxC), train))
        for block in self.blocks:
            x_BxHxWxC = block(x_BxHxWxC, train)
        return self.head(x_BxHxWxC.mean(axis=(1, 2)))


@registry.register("model", "resnet")
def resnet(*, depth: Annotated[int, Range(8)] = 8, width: Count = 8, norm: Literal["batch", "group"] = "batch") -> model.Build:
    """A residual network for small images.

    Args:
        depth: layers, 6n + 2 for n ≥ 1 blocks in each of three stages, such as 8, 14 or 20.
        width: channels of the first stage; the others have twice and four times as many. With norm="group", at most 8 or a multiple
            of 8.
        norm: "batch", whose running statistics are local to each worker, or "group", over 8 channels of one image, without any.
    """
    blocks, others = divmod(depth - 2, 6)
    if others:
        raise ValueError(f"model depth={depth} is not 6n + 2, n blocks in each of three stages; use {max(8, 6 * blocks + 2)}")
    if norm == "group" and width > GROUP:
        check_range("model norm='group': width", width, Range(multiple=GROUP))
    return lambda shape, classes: model.pure(lambda rngs: ResNet(shape[-1], classes, blocks, width, norm, rngs))
