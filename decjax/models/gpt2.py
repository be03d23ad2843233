"""GPT-2: a decoder with learned positions, LayerNorm, biases and a tied table.

The input of the first layer is E[token] + P[position]; a layer is x ← x + A(norm(x)), x ← x + MLP(norm(x)) with the tanh form of GELU.
There is no dropout.

Reference: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

import functools

from flax import nnx
import jax
import jax.numpy as jnp

from decjax import registry
from decjax.models import decoder, huggingface, layers
from decjax.models.decoder import Model, Parts
from decjax.models.layers import Build, Dtype, Remat
from decjax.options import Count, Positive
from decjax.typing import PyTree


class GPT2(decoder.DecoderLM):
    """The parameters of GPT-2."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, block: Build, *, rngs: nnx.Rngs):
        super().__init__(vocabulary, width, depth, block, tied=True, rngs=rngs)
        self.positions = nnx.Embed(context, width, embedding_init=nnx.initializers.normal(width**-0.5), rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)


@registry.register("model", "gpt2", tasks=("lm",))
def gpt2(
    *,
    vocabulary: Count = 50257,
    context: Count = 1024,
    width: Count = 768,
    hidden: Count = 3072,
    heads: Count = 12,
    depth: Count = 12,
    epsilon: Positive = 1e-5,
    dtype: Dtype = "float32",
    remat: Remat = "dots",
    pretrained: str = "",
) -> Model:
    """GPT-2: a transformer with learned positions, LayerNorm, biases and a tied table.

    Parameters, loss and logits are float32. It cannot be divided into stages or tensor-parallel groups.

    Args:
        vocabulary: V; tokens are 0 … V − 1.
        context: T, the longest sequence and the number of positions; a training sequence holds T + 1 tokens, inputs and shifted targets.
        width: D, width of the activations between layers, divisible by 2 · heads.
        hidden: F, width of the hidden layer of an MLP.
        heads: H, attention heads, each D / H wide.
        depth: L, layers of attention and an MLP.
        epsilon: added to the variance in norms.
        dtype: the dtype in which layers compute, "float32" or "bfloat16".
        remat: what the backward pass of a layer recomputes: "none", all but weight matmuls ("dots"), or all ("full").
        pretrained: a folder of Hugging Face with the initial parameters, as of `llama`. Of its positions the first T are read.

    Raises:
        ValueError: if the width is not divisible by 2 · heads, or the pretrained model is another one or cannot be read.
    """
    layers.check_heads(width, heads)
    compute = jnp.dtype(dtype)
    attention = functools.partial(decoder.Attention, width, heads, normalized=False, bias=True, out_bias=True, theta=0.0)
    norm = functools.partial(nnx.LayerNorm, epsilon=epsilon)
    block = lambda rngs: decoder.Block(width, hidden, attention, norm=norm, bias=True, depth=depth, dtype=compute, rngs=rngs)
    parts = Parts(width, depth, block, True, compute, layers.whole, norm=nnx.LayerNorm, epsilon=epsilon, remat=remat)
    logits = functools.partial(_logits, parts)
    init = functools.partial(layers.init, lambda rngs: GPT2(vocabulary, context, width, depth, block, rngs=rngs))
    model = Model(init, layers.next_token_nll(logits), logits, context, vocabulary=vocabulary, units=UNITS)
    given = dict(vocabulary=vocabulary, context=context, width=width, hidden=hidden, heads=heads, depth=depth, epsilon=epsilon)
    return huggingface.started_from(pretrained, model, "gpt2", given) if pretrained else model


def _logits(parts: Parts, params: PyTree, tokens_BxT: jax.Array) -> jax.Array:
    pieces, positions_TxD = parts.cut(params), params["positions"]["embedding"][: tokens_BxT.shape[1]]
    x_BxTxD = parts.embed(pieces.embedding_VxD, tokens_BxT) + positions_TxD.astype(parts.dtype)
    return parts.logits(pieces.norm, pieces.output_VxD, parts.blocks(pieces.blocks, x_BxTxD))


UNITS = (*decoder.UNITS, ("up/bias", -1))
