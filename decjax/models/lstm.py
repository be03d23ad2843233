"""A language model of LSTM layers, a common benchmark of papers on compressed communication.

Each layer reads the output x_t of the layer below. With σ the logistic function and ⊙ the elementwise product,

    i, f, o = σ(W x_t + U h + b), each its own rows      g = tanh(W x_t + U h + b)
    c ← f ⊙ c + i ⊙ g                                    h ← o ⊙ tanh(c)

and the output is x_t + h; c and h are zero at the start of every sequence. Without the residual x_t, two layers take hundreds of steps
to learn more than the frequency of each byte. All layers have the same width.

Reference: Hochreiter and Schmidhuber 1997, Neural Computation 9(8); Gers et al. 2000, Neural Computation 12(10), for f; Wu et al. 2016,
arXiv 1609.08144, for x_t + h.
"""

import functools

from flax import nnx
import jax
import jax.numpy as jnp

from decjax import registry
from decjax.models import layers
from decjax.models.decoder import Model
from decjax.models.layers import Dtype, Remat
from decjax.options import Count
from decjax.typing import DType


class LSTM(nnx.Module):
    """The parameters: token embedding, L stacked cells, and a linear output layer, initially zero."""

    def __init__(self, vocabulary: int, width: int, depth: int, *, dtype: DType, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(vocabulary, width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.layers = nnx.split_rngs(splits=depth)(nnx.vmap(functools.partial(cell, width, dtype)))(rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=rngs)


def cell(width: int, dtype: DType, rngs: nnx.Rngs) -> nnx.OptimizedLSTMCell:
    """Return a layer; its memory c and its output h stay float32."""
    return nnx.OptimizedLSTMCell(width, width, dtype=dtype, rngs=rngs)


@registry.register("model", "lstm", tasks=("lm",))
def lstm(
    *,
    vocabulary: Count = 256,
    context: Count = 128,
    width: Count = 128,
    depth: Count = 2,
    dtype: Dtype = "float32",
    remat: Remat = "none",
) -> Model:
    """A recurrent language model of LSTM layers; predicts token t + 1 from tokens 0 … t.

    Parameters, loss and logits are float32. It has no parts, so it cannot be divided into stages or tensor-parallel groups.

    Args:
        vocabulary: V; tokens are 0 … V − 1.
        context: T, the longest sequence; a training sequence holds T + 1 tokens, inputs and shifted targets.
        width: D, of the memory and the output of a layer, and of token embeddings.
        depth: L, layers.
        dtype: the dtype in which weights are multiplied, "float32" or "bfloat16".
        remat: what the backward pass of a layer recomputes: "none", all but weight matmuls ("dots"), or all ("full").
    """
    compute = jnp.dtype(dtype)
    bound = layers.bound(functools.partial(cell, width, compute))

    def through_layer(x_TxBxD, layer):
        start_BxD = jnp.zeros(x_TxBxD.shape[1:])
        _, h_TxBxD = jax.lax.scan(bound(layer), (start_BxD, start_BxD), x_TxBxD)
        return x_TxBxD + h_TxBxD, None

    def logits(params, tokens_BxT):
        x_TxBxD = jnp.take(params["embedding"]["embedding"], tokens_BxT.T, axis=0)
        x_TxBxD, _ = jax.lax.scan(layers.rematerialized(through_layer, remat), x_TxBxD, params["layers"])
        rows = x_TxBxD.swapaxes(0, 1).reshape(-1, width).astype(compute) @ params["head"]["kernel"].astype(compute)
        return rows.reshape(*tokens_BxT.shape, vocabulary).astype(jnp.float32)

    init = functools.partial(layers.init, lambda rngs: LSTM(vocabulary, width, depth, dtype=compute, rngs=rngs))
    return Model(init, layers.next_token_nll(logits), logits, context, vocabulary=vocabulary)
