"""A Llama-shaped language model; with biases of queries, keys and values it is Qwen2.

A layer is x ← x + A(norm(x)), x ← x + W_d(silu(W_g y) ⊙ W_u y) with y = norm(x): grouped-query attention A and a SwiGLU MLP, with RMSNorm.
It is divided between devices as `decoder` is: `gate` and `up` by columns.

References: Touvron et al. 2023, arXiv 2302.13971 (Llama); Shazeer 2020, arXiv 2002.05202 (SwiGLU); Yang et al. 2024, arXiv 2407.10671
(Qwen2).
"""

from collections.abc import Callable
import functools

from flax import nnx
import jax
import jax.numpy as jnp

from decjax import registry
from decjax.models import decoder, huggingface, layers
from decjax.models.decoder import Model, Parts
from decjax.models.layers import Divide, Dtype, Product, Remat
from decjax.options import Count, Positive, Range, check_range
from decjax.typing import DType


class LlamaBlock(nnx.Module):
    """A layer: x + Attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(
        self,
        width: int,
        hidden: int,
        attention: Callable[..., decoder.Attention],
        *,
        epsilon: float,
        depth: int,
        dtype: DType,
        rngs: nnx.Rngs,
        divide: Divide,
        product: Product,
    ):
        norm = functools.partial(nnx.RMSNorm, width, epsilon=epsilon, dtype=dtype, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = attention(depth=depth, dtype=dtype, rngs=rngs, divide=divide, product=product)
        linear = functools.partial(layers.RowLinear, divide=divide, product=product, dtype=dtype, rngs=rngs)
        self.gate, self.up = (linear(width, hidden, axis=1) for _ in range(2))
        self.down = linear(hidden, width, axis=0, scale=0.5 / depth)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        y_BxTxD = self.mlp_norm(x_BxTxD)
        return x_BxTxD + self.down(jax.nn.silu(self.gate(y_BxTxD)) * self.up(y_BxTxD))


@registry.register("model", "llama", tasks=("lm",), divisible=("kv_heads", "hidden", "vocabulary"))
def llama(
    *,
    vocabulary: Count = 256,
    context: Count = 256,
    width: Count = 320,
    hidden: Count = 864,
    heads: Count = 5,
    kv_heads: Count = 5,
    depth: Count = 8,
    tied: bool = False,
    qkv_bias: bool = False,
    theta: Positive = 10_000.0,
    epsilon: Positive = 1e-5,
    dtype: Dtype = "float32",
    remat: Remat = "dots",
    pretrained: str = "",
    divide: Divide = layers.whole,
    product: Product = layers.plain,
) -> Model:
    """A Llama-shaped language model: RMSNorm, rotary positions, grouped-query attention and SwiGLU.

    Parameters, loss and logits are float32.

    Args:
        vocabulary: V; tokens are 0 … V − 1.
        context: T, the longest sequence; a training sequence holds T + 1 tokens, inputs and shifted targets.
        width: D, width of the activations between layers, divisible by 2 · heads.
        hidden: F, width of the hidden layer of an MLP.
        heads: H, attention heads, each D / H wide.
        kv_heads: G, a divisor of H; H / G heads share their keys and values.
        depth: L, layers of attention and an MLP.
        tied: use one table as embedding and as output layer.
        qkv_bias: add a bias to queries, keys and values, as Qwen2 does.
        theta: base of the rotary frequencies.
        epsilon: added to the mean square in norms.
        dtype: the dtype in which layers compute, "float32" or "bfloat16".
        remat: what the backward pass of a layer recomputes: "none", all but weight matmuls ("dots"), or all ("full").
        pretrained: a folder of Hugging Face with the initial parameters; see `models.pretrained`. Empty: random ones.
        divide: how a tensor-parallel group divides arrays; `product` is how it adds up products (functions, not config fields).

    Raises:
        ValueError: if the width is not divisible by 2 · heads, or the heads are not divisible by kv_heads, or the pretrained model is
            another one or cannot be read.
    """
    layers.check_heads(width, heads)
    check_range(f"model kv_heads={kv_heads}: heads", heads, Range(multiple=kv_heads))
    compute = jnp.dtype(dtype)
    attention = functools.partial(decoder.Attention, width, heads, groups=kv_heads, normalized=False, bias=qkv_bias, theta=theta)
    block = lambda rngs: LlamaBlock(
        width, hidden, attention, epsilon=epsilon, depth=depth, dtype=compute, rngs=rngs, divide=divide, product=product
    )
    parts = Parts(width, depth, block, tied, compute, divide, epsilon=epsilon, remat=remat)
    init = functools.partial(layers.init, lambda rngs: decoder.DecoderLM(vocabulary, width, depth, block, tied=tied, rngs=rngs))
    model = Model(init, *parts.functions(), context, parts, DIVIDED, vocabulary, UNITS)
    sizes = dict(vocabulary=vocabulary, context=context, width=width, hidden=hidden, heads=heads, kv_heads=kv_heads, depth=depth)
    given = sizes | dict(tied=tied, qkv_bias=qkv_bias, theta=theta, epsilon=epsilon)
    return huggingface.started_from(pretrained, model, "llama", given) if pretrained else model


DIVIDED = (*decoder.DIVIDED, ("gate/kernel", -1), ("qkv/bias", -1))  # `Model.divided`
UNITS = (*decoder.UNITS, ("gate/kernel", -1))
