"""Layers that models share, and Flax modules as pure functions of plain pytrees of parameters.

Every weight matmul is a two-dimensional product of rows, (B·T)×D @ D×F: XLA's CPU backend runs the three-dimensional form about 1.8×
slower. Layers are stacked and scanned, so compile time does not grow with depth.
"""

from collections.abc import Callable
from typing import Any, Literal

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import optax

from decjax.options import Range, check_range
from decjax.typing import DType, PyTree

Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "full"]  # what a backward pass recomputes; see `rematerialized`
Build = Callable[[nnx.Rngs], nnx.Module]

# (x, axis) -> x, divided along this axis between the devices of a tensor-parallel group; axis None: whole on each of them.
Divide = Callable[[jax.Array, int | None], jax.Array]
whole: Divide = lambda x, axis: x  # for a model on one device
# (x_RxF, kernel_FxG, axis) -> x @ kernel, where a tensor-parallel group divides the kernel along this axis; see `contrib.tensor_sums`.
Product = Callable[[jax.Array, jax.Array, int], jax.Array]
plain: Product = lambda x_RxF, kernel_FxG, axis: x_RxF @ kernel_FxG
SUM = "sum"  # the name of products with divided rows, whose sums are not sent again where a pass is recomputed

# Results of weight matmuls are stored for the backward pass and everything else is recomputed: storing it costs time on CPUs (a seventh
# of a step) and memory on accelerators.
KEPT = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(SUM)
)


def rematerialized(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Return the function with part of its forward pass recomputed in its backward pass.

    Args:
        function: a layer.
        remat: "none": all results are stored; "dots": only those of weight matmuls; "full": only the arguments.
    """
    if remat == "none":
        return function
    return jax.checkpoint(function, prevent_cse=False, policy=KEPT if remat == "dots" else None)


def init(build: Build, key: jax.Array) -> dict[str, Any]:
    """Return the initial parameters of a module."""
    return nnx.to_pure_dict(nnx.state(build(nnx.Rngs(key)), nnx.Param))


def bound(build: Build) -> Callable[..., Any]:
    """Return a function that returns the module with the given parameters, and further state as further arguments."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
    return lambda *states: nnx.merge(graph, *map(nnx.State, states))


class RowLinear(nnx.Module):
    """A linear layer that flattens all leading dimensions into rows; its kernel may be divided along `axis`.

    Weights are drawn with variance scale / inputs, so that activations are of order one at any width (a fixed standard deviation of 0.02
    suits widths near 1,000).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        axis: int,
        scale: float = 1.0,
        bias: bool = False,
        dtype: DType,
        rngs: nnx.Rngs,
        divide: Divide = whole,
        product: Product = plain,
    ):
        draw = nnx.initializers.variance_scaling(scale, "fan_in", "normal")
        self.kernel = nnx.Param(draw(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None
        self.divide, self.product, self.axis, self.dtype = divide, product, axis, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel_DxF = self.divide(self.kernel[...].astype(self.dtype), self.axis)
        rows = self.product(x.reshape(-1, x.shape[-1]).astype(self.dtype), kernel_DxF, self.axis)
        if self.axis == 0:
            rows = checkpoint_name(rows, SUM)
        if self.bias is not None:
            rows += self.divide(self.bias[...].astype(self.dtype), 0 if self.axis == 1 else None)
        # With divided columns the result stays divided; with divided rows it is summed over the group.
        return self.divide(rows.reshape(*x.shape[:-1], -1), -1 if self.axis == 1 else None)


def rotate(x_BxTxHxK: jax.Array, start: jax.Array | int = 0, theta: float = 10_000.0) -> jax.Array:
    """Apply rotary position embedding to queries or keys, K even: channels (k, k + K/2) at position t turn by t · θ^(−2k/K).

    Positions are `start` + (0 … T − 1).

    Reference: Su et al. 2021, arXiv 2104.09864, section 3.
    """
    _, T, _, K = x_BxTxHxK.shape
    frequency_K2 = theta ** (-jnp.arange(0, K, 2) / K)
    angle_1xTx1xK2 = (start + jnp.arange(T))[None, :, None, None] * frequency_K2[None, None, None]
    cos, sin = jnp.cos(angle_1xTx1xK2), jnp.sin(angle_1xTx1xK2)
    low, high = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x_BxTxHxK.dtype)


def check_heads(width: int, heads: int) -> None:
    """Raise a ValueError if a width does not divide into attention heads of an even size."""
    check_range(f"model heads={heads}: width", width, Range(multiple=2 * heads))


def next_token_nll(logits: Callable[[PyTree, jax.Array], jax.Array]) -> Callable[[PyTree, jax.Array, jax.Array | None], jax.Array]:
    """Return `Model.nll` of a model without noise from its `logits`."""

    def nll(params: PyTree, tokens_BxT1: jax.Array, key: jax.Array | None) -> jax.Array:
        del key
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens_BxT1[:, :-1]), tokens_BxT1[:, 1:])

    return nll
