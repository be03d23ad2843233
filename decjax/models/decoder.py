"""A decoder-only language model.

`DecoderLM` is a pre-norm transformer with rotary positions. Every weight matmul is a two-dimensional product of rows,
(B·T)×D @ D×F, because XLA's CPU backend runs the three-dimensional form about 1.8 times slower. Layers are stacked and scanned, so
compile time does not grow with depth.

Training code is given a `Model`: pure functions of plain pytrees of parameters. Its `Parts` are the same functions split up, to
divide the model between devices. Pipeline stages hold whole layers (`cut`, `join`). Within a layer the function `divide` says along
which axis an array is divided between the devices of a tensor-parallel group; without a group it does nothing. As in Megatron, a
half layer (attention or MLP) begins with weights divided by columns (`qkv`, by heads, and `up`) and ends with weights divided by
rows (`out`, `down`), whose products are summed over the group: one sum per half layer, and one of gradients at its beginning. The
function `product` multiplies, and so says how these sums travel. Embedding and output are divided by vocabulary.

Reference: Shoeybi et al. 2019, arXiv 1909.08053 (Megatron), section 3.
"""

from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any, Literal, NamedTuple

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import optax

from decjax import registry
from decjax.options import Count

Dtype = Literal["float32", "bfloat16"]


class Model(NamedTuple):
    """A language model as pure functions, without framework objects.

    Attributes:
        init: `init(key) -> params`.
        nll: `nll(params, tokens_BxT1, key) -> nll_BxT`, negative log-likelihood of tokens 1 … T in nats; `key` may be None without noise.
        logits: `logits(params, tokens_BxT) -> logits_BxTxV`.
        context: T, the longest sequence the model accepts.
        parts: the model split up for pipelines; None if it cannot be divided.
        divided: pairs of the end of a parameter's path, such as "up/kernel", and the axis (negative, counted from the end) along
            which that parameter is divided within a tensor-parallel group. The trait `divisible` of a registered model names the
            options that the size of the group has to divide.
        vocabulary: V; tokens are 0 … V − 1.
        units: which parameters belong to hidden units; see `tasks.Task`.
    """

    init: Callable[[jax.Array], Any]
    nll: Callable[[Any, jax.Array, jax.Array | None], jax.Array]
    logits: Callable[[Any, jax.Array], jax.Array]
    context: int
    parts: "Parts | None" = None
    divided: tuple[tuple[str, int], ...] = ()
    vocabulary: int = 256
    units: tuple[tuple[str, int], ...] = ()


class Pieces(NamedTuple):
    """The parameters of a language model in the order of computation.

    Attributes:
        embedding_VxD: the token embedding.
        blocks: parameters of the L layers, stacked: leaves [L, …].
        norm: parameters of the final norm.
        output_VxD: the output layer's table; the embedding itself where the two are tied.
    """

    embedding_VxD: Any
    blocks: Any
    norm: Any
    output_VxD: Any


class Parts(NamedTuple):
    """A language model split up, to be divided into stages: an embedding, a stack of L equal layers, and an output layer.

    Attributes:
        cut: `cut(params) -> Pieces`.
        join: `join(*pieces) -> params`, the inverse of `cut`.
        embed: `embed(embedding_VxD, tokens_BxT) -> x_BxTxD`.
        blocks: `blocks(blocks, x_BxTxD) -> x_BxTxD`, the pass through any number of stacked layers.
        logits: `logits(norm, output_VxD, x_BxTxD) -> logits_BxTxV`.
        nll: `nll(norm, output_VxD, x_BxTxD, targets_BxT) -> nll_BxT`, in nats.
        activation: `activation(B, T)`, shape and dtype of x_BxTxD.
        depth: L, how many layers.
        tied: whether one table serves as embedding and as output.
    """

    cut: Callable[[Any], Pieces]
    join: Callable[..., Any]
    embed: Callable[[jax.Array, jax.Array], jax.Array]
    blocks: Callable[[Any, jax.Array], jax.Array]
    logits: Callable[[Any, jax.Array, jax.Array], jax.Array]
    nll: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
    activation: Callable[[int, int], jax.ShapeDtypeStruct]
    depth: int
    tied: bool

    def functions(
        self, layers: Sequence[int] = (), between: Callable[[Any, jax.Array, int], jax.Array] = lambda params, x_BxTxD, v: x_BxTxD
    ) -> tuple[Callable, Callable]:
        """(nll, logits) of a whole `Model`, optionally with a function applied to the activations between groups of layers.

        Args:
            layers: sizes of consecutive groups of layers; empty: one group of all.
            between: `between(params, x_BxTxD, v)` is applied to the activations that group v passes to group v + 1.
        """

        def last(params, tokens_BxT):
            pieces, ends = self.cut(params), itertools.accumulate(layers or (self.depth,), initial=0)
            x_BxTxD = self.embed(pieces.embedding_VxD, tokens_BxT)
            for v, (start, end) in enumerate(itertools.pairwise(ends)):
                if v:
                    x_BxTxD = between(params, x_BxTxD, v - 1)
                x_BxTxD = self.blocks(jax.tree.map(lambda leaf: leaf[start:end], pieces.blocks), x_BxTxD)
            return pieces.norm, pieces.output_VxD, x_BxTxD

        def nll(params, tokens_BxT1, key):
            del key  # The model has no dropout.
            return self.nll(*last(params, tokens_BxT1[:, :-1]), tokens_BxT1[:, 1:])

        return nll, lambda params, tokens_BxT: self.logits(*last(params, tokens_BxT))


# (x, axis) -> x, divided along this axis between the devices of a tensor-parallel group; axis None: whole on each of them.
Divide = Callable[[jax.Array, int | None], jax.Array]
whole: Divide = lambda x, axis: x  # for a model on one device
# (x_RxF, kernel_FxG, axis) -> x @ kernel, where a tensor-parallel group divides the kernel along this axis; see `contrib.tensor_sums`.
Product = Callable[[jax.Array, jax.Array, int], jax.Array]
plain: Product = lambda x_RxF, kernel_FxG, axis: x_RxF @ kernel_FxG
SUM = "sum"  # the name of products with divided rows, whose sums are not sent again where a pass is computed anew


class RowLinear(nnx.Linear):
    """`nnx.Linear` without bias, which flattens all leading dimensions into rows; its kernel may be divided along `axis`.

    Weights are drawn with variance scale / inputs, so that activations are of order one at any width (a fixed standard deviation of
    0.02 suits widths near 1,000).
    """

    def __init__(
        self, *sizes: int, divide: Divide, product: Product = plain, axis: int, scale: float = 1.0, dtype: Any, rngs: nnx.Rngs
    ):
        kernel_init = nnx.initializers.variance_scaling(scale, "fan_in", "normal")
        super().__init__(*sizes, use_bias=False, dtype=dtype, kernel_init=kernel_init, rngs=rngs)
        self.divide, self.product, self.axis = divide, product, axis

    def __call__(self, x):
        kernel_DxF = self.divide(self.kernel[...], self.axis).astype(self.dtype)
        rows = self.product(x.reshape(-1, self.in_features).astype(self.dtype), kernel_DxF, self.axis)
        if self.axis == 0:
            rows = checkpoint_name(rows, SUM)
        # With divided columns the result stays divided; with divided rows it is summed over the group.
        return self.divide(rows.reshape(*x.shape[:-1], self.out_features), -1 if self.axis == 1 else None)


def rotate(x_BxTxHxK: jax.Array, start: jax.Array | int = 0) -> jax.Array:
    """Rotary position embedding of queries or keys, K even: rotates channels (k, k + K/2) at position t by t · 10000^(−2k/K).

    Positions are `start` + (0 … T − 1).

    Reference: Su et al. 2021, arXiv 2104.09864, section 3.
    """
    _, T, _, K = x_BxTxHxK.shape
    frequency_K2 = 10_000.0 ** (-jnp.arange(0, K, 2) / K)
    angle_1xTx1xK2 = (start + jnp.arange(T))[None, :, None, None] * frequency_K2[None, None, None]
    cos, sin = jnp.cos(angle_1xTx1xK2), jnp.sin(angle_1xTx1xK2)
    low, high = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x_BxTxHxK.dtype)


class Attention(nnx.Module):
    """Causal multi-head self-attention with normalized queries and keys, which stays stable at larger learning rates.

    Reference: Henry et al. 2020, arXiv 2010.04245 (normalized queries and keys).
    """

    def __init__(
        self, width: int, heads: int, *, depth: int, dtype, rngs: nnx.Rngs, divide: Divide = whole, product: Product = plain
    ):
        self.heads, self.divide = heads, divide
        self.query_norm = nnx.RMSNorm(width // heads, dtype=dtype, rngs=rngs)
        self.key_norm = nnx.RMSNorm(width // heads, dtype=dtype, rngs=rngs)
        linear = functools.partial(RowLinear, divide=divide, product=product, dtype=dtype, rngs=rngs)
        self.qkv = linear(width, 3 * width, axis=1)
        # Scaled so that the sum of all 2 · depth branches has the variance of one.
        self.out = linear(width, width, axis=0, scale=0.5 / depth)

    def __call__(self, x_BxTxD):
        B, T, D = x_BxTxD.shape
        # Columns are ordered by heads, so that each device of a tensor-parallel group holds whole heads.
        qkv_BxTxHx3xK = self.divide(self.qkv(x_BxTxD).reshape(B, T, self.heads, 3, D // self.heads), 2)
        q, k, v = (qkv_BxTxHx3xK[..., i, :] for i in range(3))
        q, k = rotate(self.query_norm(q)), rotate(self.key_norm(k))
        mixed_BxTxHxK = self.divide(jax.nn.dot_product_attention(q, k, v, is_causal=True), 2)
        return self.out(mixed_BxTxHxK.reshape(B, T, D))


class Block(nnx.Module):
    """One pre-norm transformer layer: x + Attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(
        self,
        width: int,
        hidden: int,
        heads: int,
        *,
        depth: int,
        dtype,
        rngs: nnx.Rngs,
        divide: Divide = whole,
        product: Product = plain,
    ):
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = Attention(width, heads, depth=depth, dtype=dtype, rngs=rngs, divide=divide, product=product)
        self.mlp_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        linear = functools.partial(RowLinear, divide=divide, product=product, dtype=dtype, rngs=rngs)
        self.up = linear(width, hidden, axis=1)
        self.down = linear(hidden, width, axis=0, scale=0.5 / depth)

    def __call__(self, x_BxTxD):
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        return x_BxTxD + self.down(jax.nn.gelu(self.up(self.mlp_norm(x_BxTxD))))


class DecoderLM(nnx.Module):
    """The parameters of a decoder: token embedding, L stacked layers, final norm, and a linear output layer unless it is tied."""

    def __init__(self, vocabulary: int, width: int, depth: int, block: Callable[[nnx.Rngs], Block], *, tied: bool, rngs: nnx.Rngs):
        # A tied table has small values, so that logits are of order one; `embed` multiplies what it reads by √D.
        deviation = width**-0.5 if tied else 1.0
        self.embedding = nnx.Embed(vocabulary, width, embedding_init=nnx.initializers.normal(deviation), rngs=rngs)
        self.blocks = nnx.split_rngs(splits=depth)(nnx.vmap(block))(rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        if not tied:
            self.head = nnx.Linear(width, vocabulary, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=rngs)


KEPT = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(SUM)
)


def _decoder_parts(
    width: int, depth: int, block: Callable[[nnx.Rngs], Block], *, tied: bool, dtype: jnp.dtype, divide: Divide
) -> Parts:
    def graph(module):
        return nnx.graphdef(nnx.eval_shape(lambda: module(nnx.Rngs(0))))

    block_graph, norm_graph = graph(block), graph(lambda rngs: nnx.RMSNorm(width, dtype=dtype, rngs=rngs))

    def cut(params):
        embedding_VxD = params["embedding"]["embedding"]
        output_VxD = embedding_VxD if tied else params["head"]["kernel"].T
        return Pieces(embedding_VxD, params["blocks"], params["norm"], output_VxD)

    def join(embedding_VxD, blocks, norm, output_VxD):
        params = {"embedding": {"embedding": embedding_VxD}, "blocks": blocks, "norm": norm}
        return params if tied else params | {"head": {"kernel": output_VxD.T}}

    def embed(embedding_VxD, tokens_BxT):
        x_BxTxD = jnp.take(divide(embedding_VxD, 0), tokens_BxT, axis=0).astype(dtype)
        return divide(x_BxTxD * width**0.5 if tied else x_BxTxD, None)

    # Results of weight matmuls are kept for the backward pass and all else is recomputed: storing it costs time on CPUs (a
    # seventh of a step) and memory on accelerators.
    @functools.partial(jax.checkpoint, prevent_cse=False, policy=KEPT)
    def through_block(x_BxTxD, params):
        return nnx.merge(block_graph, nnx.State(params))(x_BxTxD)

    def blocks(params, x_BxTxD):
        return jax.lax.scan(lambda x, layer: (through_block(x, layer), None), x_BxTxD, params)[0]

    def logits(norm, output_VxD, x_BxTxD):
        rows = nnx.merge(norm_graph, nnx.State(norm))(x_BxTxD).reshape(-1, width)
        logits_RxV = divide(rows @ divide(output_VxD, 0).astype(dtype).T, 1)
        return logits_RxV.reshape(*x_BxTxD.shape[:-1], -1).astype(jnp.float32)

    def nll(norm, output_VxD, x_BxTxD, targets_BxT):
        return optax.softmax_cross_entropy_with_integer_labels(logits(norm, output_VxD, x_BxTxD), targets_BxT)

    activation = lambda batch_size, length: jax.ShapeDtypeStruct((batch_size, length, width), dtype)
    return Parts(cut, join, embed, blocks, logits, nll, activation, depth, tied)


@registry.register("model", "decoder", divisible=("heads", "hidden", "vocabulary"))
def decoder_lm(
    *,
    vocabulary: Count = 256,
    context: Count = 128,
    width: Count = 64,
    hidden: Count = 256,
    heads: Count = 2,
    depth: Count = 2,
    tied: bool = False,
    dtype: Dtype = "float32",
    divide: Divide = whole,
    product: Product = plain,
) -> Model:
    """A decoder-only transformer language model; predicts token t + 1 from tokens 0 … t.

    Parameters, loss and logits are float32.

    Args:
        vocabulary: V, how many tokens there are: 0 … V − 1.
        context: T, the longest sequence; a training sequence holds T + 1 tokens, inputs and shifted targets.
        width: D, width of the activations between layers, divisible by 2 · heads.
        hidden: F, width of the hidden layer of an MLP.
        heads: H, attention heads, each D / H wide.
        depth: L, how many layers, each attention and an MLP.
        tied: use one table as embedding and as output layer.
        dtype: the dtype in which layers compute, "float32" or "bfloat16".
        divide: how a tensor-parallel group divides arrays; `product` is how it adds up products (functions, not config fields).

    Raises:
        ValueError: if the width is not divisible by 2 · heads.
    """
    check_heads(width, heads)
    compute = jnp.dtype(dtype)
    block = lambda rngs: Block(width, hidden, heads, depth=depth, dtype=compute, rngs=rngs, divide=divide, product=product)
    parts = _decoder_parts(width, depth, block, tied=tied, dtype=compute, divide=divide)

    def init(key):
        return nnx.to_pure_dict(nnx.state(DecoderLM(vocabulary, width, depth, block, tied=tied, rngs=nnx.Rngs(key))))

    return Model(init, *parts.functions(), context, parts, DIVIDED, vocabulary, UNITS)


def check_heads(width: int, heads: int) -> None:
    """Raise a ValueError if heads of an even size cannot divide a width."""
    if width % (2 * heads):
        raise ValueError(
            f"model width={width} with heads={heads}: heads must have an even size; use a width divisible by {2 * heads}"
        )


# Ends of the paths of divided parameters (`Model.divided`); the last one is the table of a pipeline stage.
DIVIDED = (
    ("qkv/kernel", -1),
    ("up/kernel", -1),
    ("out/kernel", -2),
    ("down/kernel", -2),
    ("embedding/embedding", -2),
    ("head/kernel", -1),
    ("table_VxD", -2),
)
UNITS = (("up/kernel", -1), ("down/kernel", -2))  # Those of the MLPs (`Model.units`).


def sample(
    model: Model, params: Any, prompt: Sequence[int], num_tokens: int, key: jax.Array, temperature: float = 0.8
) -> list[int]:
    """The tokens with which a model continues a prompt, drawn one by one in a sliding window of the model's context.

    Args:
        model: a language model.
        params: its parameters.
        prompt: at least one token; the last T of them are read. It is not part of the result.
        num_tokens: how many to draw.
        key: PRNG key of the draws.
        temperature: > 0, logits are divided by it; towards 0 the most likely token is always taken.
    """
    T = model.context
    start = jnp.array(list(prompt[-T:]), jnp.int32)
    window_T = jnp.zeros(T, jnp.int32).at[: start.size].set(start)

    def step(carry, key):
        window_T, length = carry
        logits_V = model.logits(params, window_T[None])[0, length - 1]
        token = jax.random.categorical(key, logits_V / temperature)
        full = length == T
        window_T = jnp.where(full, jnp.roll(window_T, -1), window_T)
        window_T = window_T.at[jnp.where(full, T - 1, length)].set(token)
        return (window_T, jnp.minimum(length + 1, T)), token

    _, tokens = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))(
        (window_T, jnp.int32(start.size)), jax.random.split(key, num_tokens)
    )
    return tokens.tolist()
