"""A language model of LSTM layers, as papers on communication train it beside a convolutional network.

Each layer reads the sequence x_t that the layer below has written. With σ the logistic function, and ⊙ element by element,

    i, f, o = σ(W x_t + U h + b), each its own rows      g = tanh(W x_t + U h + b)
    c ← f ⊙ c + i ⊙ g                                    h ← o ⊙ tanh(c)

and x_t + h is written; c and h begin at zero with every sequence. Without adding x_t, two layers take hundreds of steps before they see
more than how frequent each byte is. Layers are equally wide, stacked and scanned, as those of the decoder.

Reference: Hochreiter and Schmidhuber 1997, Neural Computation 9(8); Gers et al. 2000, Neural Computation 12(10), for f; Wu et al. 2016,
arXiv 1609.08144, for x_t + h.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from decjax import registry
from decjax.models.decoder import Dtype, Model
from decjax.options import Count


class LSTM(nnx.Module):
    """The parameters: token embedding, L stacked cells, and a linear output layer, which starts at zero."""

    def __init__(self, vocabulary: int, width: int, depth: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(vocabulary, width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.layers = nnx.split_rngs(splits=depth)(nnx.vmap(lambda rngs: cell(width, dtype, rngs)))(rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=rngs)


def cell(width: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.OptimizedLSTMCell:
    """One layer; its memory c and its output h stay float32."""
    return nnx.OptimizedLSTMCell(width, width, dtype=dtype, rngs=rngs)


@registry.register("model", "lstm", tasks=("lm",))
def lstm(*, vocabulary: Count = 256, context: Count = 128, width: Count = 128, depth: Count = 2, dtype: Dtype = "float32") -> Model:
    """A recurrent language model of LSTM layers; predicts token t + 1 from tokens 0 … t.

    Parameters, loss and logits are float32. It has no parts, so it cannot be divided into stages or tensor-parallel groups.

    Args:
        vocabulary: V, how many tokens there are: 0 … V − 1.
        context: T, the longest sequence; a training sequence holds T + 1 tokens, inputs and shifted targets.
        width: D, values in the memory and in the output of a layer, and in the embedding of a token.
        depth: L, how many layers.
        dtype: the dtype in which weights are multiplied, "float32" or "bfloat16".
    """
    compute = jnp.dtype(dtype)
    graph = nnx.graphdef(nnx.eval_shape(lambda: cell(width, compute, nnx.Rngs(0))))

    def through_layer(x_TxBxD, layer):
        start_BxD = jnp.zeros(x_TxBxD.shape[1:])
        _, h_TxBxD = jax.lax.scan(nnx.merge(graph, nnx.State(layer)), (start_BxD, start_BxD), x_TxBxD)
        return x_TxBxD + h_TxBxD, None

    def logits(params, tokens_BxT):
        x_TxBxD = jnp.take(params["embedding"]["embedding"], tokens_BxT.T, axis=0)
        x_TxBxD, _ = jax.lax.scan(through_layer, x_TxBxD, params["layers"])
        rows = x_TxBxD.swapaxes(0, 1).reshape(-1, width).astype(compute) @ params["head"]["kernel"].astype(compute)
        return rows.reshape(*tokens_BxT.shape, vocabulary).astype(jnp.float32)

    def nll(params, tokens_BxT1, key):
        del key  # The model has no dropout.
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens_BxT1[:, :-1]), tokens_BxT1[:, 1:])

    def init(key):
        return nnx.to_pure_dict(nnx.state(LSTM(vocabulary, width, depth, dtype=compute, rngs=nnx.Rngs(key)), nnx.Param))

    return Model(init, nll, logits, context, vocabulary=vocabulary)
