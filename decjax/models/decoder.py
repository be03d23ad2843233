"""A decoder-only language model: a pre-norm transformer with rotary positions.

Training code uses a `Model`: pure functions of plain pytrees of parameters. Its `Parts` are the same functions split up, to divide the
model between devices. Pipeline stages hold whole layers (`cut`, `join`). Within a layer, the function `divide` declares along which axis
an array is divided between the devices of a tensor-parallel group; without a group it is the identity. As in Megatron, a half layer
(attention or MLP) begins with weights divided by columns (`qkv`, by heads, and `up`) and ends with weights divided by rows (`out`, `down`),
whose products are summed over the group: one sum per half layer, and one of gradients at its beginning. The function `product` multiplies,
and so determines how these sums are sent. Embedding and output are divided by vocabulary.

Reference: Shoeybi et al. 2019, arXiv 1909.08053 (Megatron), section 3.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from decjax import registry
from decjax.models import layers
from decjax.models.layers import Build, Divide, Dtype, Product, Remat
from decjax.options import Count
from decjax.typing import DType, PyTree


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
            options that the size of the group must divide.
        vocabulary: V; tokens are 0 … V − 1.
        units: the parameters of hidden units; see `tasks.Task`.
    """

    init: Callable[[jax.Array], PyTree]
    nll: Callable[[PyTree, jax.Array, jax.Array | None], jax.Array]
    logits: Callable[[PyTree, jax.Array], jax.Array]
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
        output_VxD: the table of the output layer; the embedding itself if they are tied.
    """

    embedding_VxD: jax.Array
    blocks: PyTree
    norm: PyTree
    output_VxD: jax.Array


@dataclasses.dataclass(frozen=True)
class Parts:
    """A language model split up, to be divided into stages: an embedding, a stack of L equal layers, and an output layer.

    Attributes:
        width: D, of the activations between layers.
        depth: L, how many layers.
        block: builds a layer.
        tied: whether one table serves as embedding and as output.
        dtype: the dtype in which layers compute.
        divide: how a tensor-parallel group divides arrays.
        scale: what embeddings are multiplied by.
        norm: class of the final norm; `epsilon` is its option.
        remat: what the backward pass of a layer recomputes; see `layers.rematerialized`.
    """

    width: int
    depth: int
    block: Build
    tied: bool
    dtype: DType
    divide: Divide
    scale: float = 1.0
    norm: Callable[..., nnx.Module] = nnx.RMSNorm
    epsilon: float = 1e-6
    remat: Remat = "dots"

    def cut(self, params: PyTree) -> Pieces:
        """Return the pieces of a model's parameters."""
        embedding_VxD = params["embedding"]["embedding"]
        output_VxD = embedding_VxD if self.tied else params["head"]["kernel"].T
        return Pieces(embedding_VxD, params["blocks"], params["norm"], output_VxD)

    def join(self, embedding_VxD: jax.Array, blocks: PyTree, norm: PyTree, output_VxD: jax.Array) -> PyTree:
        """Return a model's parameters from its pieces, the inverse of `cut`."""
        params = {"embedding": {"embedding": embedding_VxD}, "blocks": blocks, "norm": norm}
        return params if self.tied else params | {"head": {"kernel": output_VxD.T}}

    def embed(self, embedding_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
        """Return the input of the first layer, x_BxTxD."""
        x_BxTxD = jnp.take(self.divide(embedding_VxD, 0), tokens_BxT, axis=0).astype(self.dtype)
        return self.divide(x_BxTxD if self.scale == 1 else x_BxTxD * self.scale, None)

    def blocks(self, blocks: PyTree, x_BxTxD: jax.Array) -> jax.Array:
        """Return the output of any number of stacked layers."""
        return jax.lax.scan(lambda x_BxTxD, block: (self._through_block(x_BxTxD, block), None), x_BxTxD, blocks)[0]

    @functools.cached_property
    def _through_block(self) -> Callable[[jax.Array, PyTree], jax.Array]:
        bound = layers.bound(self.block)
        return layers.rematerialized(lambda x_BxTxD, block: bound(block)(x_BxTxD), self.remat)

    def logits(self, norm: PyTree, output_VxD: jax.Array, x_BxTxD: jax.Array) -> jax.Array:
        """Return logits_BxTxV, float32, from the output of the last layer."""
        rows = self._norm(norm)(x_BxTxD).reshape(-1, self.width)
        logits_RxV = rows @ self.divide(output_VxD.astype(self.dtype), 0).T
        return self.divide(logits_RxV.reshape(*x_BxTxD.shape[:-1], -1), -1).astype(jnp.float32)

    @functools.cached_property
    def _norm(self) -> Callable[[PyTree], Callable[[jax.Array], jax.Array]]:
        return layers.bound(lambda rngs: self.norm(self.width, epsilon=self.epsilon, dtype=self.dtype, rngs=rngs))

    def nll(self, norm: PyTree, output_VxD: jax.Array, x_BxTxD: jax.Array, targets_BxT: jax.Array) -> jax.Array:
        """Return nll_BxT of the targets in nats, from the output of the last layer."""
        return optax.softmax_cross_entropy_with_integer_labels(self.logits(norm, output_VxD, x_BxTxD), targets_BxT)

    def activation(self, batch_size: int, length: int) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of x_BxTxD."""
        return jax.ShapeDtypeStruct((batch_size, length, self.width), self.dtype)

    def functions(
        self,
        groups: Sequence[int] = (),
        between: Callable[[PyTree, jax.Array, int], jax.Array] = lambda params, x_BxTxD, v: x_BxTxD,
    ) -> tuple[Callable, Callable]:
        """Return (nll, logits) of a whole `Model`, optionally with a function applied to the activations between groups of layers.

        Args:
            groups: sizes of consecutive groups of layers; empty: one group of all.
            between: `between(params, x_BxTxD, v)` is applied to the activations that group v passes to group v + 1.
        """

        def logits(params, tokens_BxT):
            pieces, ends = self.cut(params), itertools.accumulate(groups or (self.depth,), initial=0)
            x_BxTxD = self.embed(pieces.embedding_VxD, tokens_BxT)
            for v, (start, end) in enumerate(itertools.pairwise(ends)):
                if v:
                    x_BxTxD = between(params, x_BxTxD, v - 1)
                x_BxTxD = self.blocks(jax.tree.map(lambda leaf: leaf[start:end], pieces.blocks), x_BxTxD)
            return self.logits(pieces.norm, pieces.output_VxD, x_BxTxD)

        return layers.next_token_nll(logits), logits


class Attention(nnx.Module):
    """Causal self-attention of H heads, by default with rotary positions.

    Heads are in G groups, by default of one head each; the heads of a group share their keys and values.

    Args:
        width: D.
        heads: H.
        groups: G, a divisor of H; 0: H.
        normalized: whether queries and keys are normalized.
        bias: whether queries, keys and values have a bias.
        out_bias: whether the output has a bias.
        theta: base of the rotary frequencies; 0: queries and keys have no positions.
        depth: L, by which weights are scaled.
        dtype: in which the layer computes.
        rngs: of the weights.
        divide: how a tensor-parallel group divides arrays; `product` is how it adds up products.

    Reference: Ainslie et al. 2023, arXiv 2305.13245 (groups).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        groups: int = 0,
        normalized: bool = True,
        bias: bool = False,
        out_bias: bool = False,
        theta: float = 10_000.0,
        depth: int,
        dtype: DType,
        rngs: nnx.Rngs,
        divide: Divide = layers.whole,
        product: Product = layers.plain,
    ):
        self.groups, self.shared, self.size = groups or heads, heads // (groups or heads), width // heads
        self.divide, self.theta = divide, theta
        norm = functools.partial(nnx.RMSNorm, self.size, dtype=dtype, rngs=rngs)
        self.query_norm, self.key_norm = (norm() if normalized else None for _ in range(2))
        linear = functools.partial(layers.RowLinear, divide=divide, product=product, dtype=dtype, rngs=rngs)
        self.qkv = linear(width, self.groups * (self.shared + 2) * self.size, axis=1, bias=bias)
        # Scaled so that the sum of all 2 · depth branches has the variance of one.
        self.out = linear(width, width, axis=0, scale=0.5 / depth, bias=out_bias)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        B, T, D = x_BxTxD.shape
        # Columns are ordered by groups, so that each device of a tensor-parallel group holds whole groups.
        qkv_BxTxGxRxK = self.divide(self.qkv(x_BxTxD).reshape(B, T, self.groups, self.shared + 2, self.size), 2)
        q = qkv_BxTxGxRxK[..., : self.shared, :].reshape(B, T, -1, self.size)
        k, v = (qkv_BxTxGxRxK[..., self.shared + i, :] for i in range(2))
        if self.query_norm and self.key_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.theta:
            q, k = (layers.rotate(x, theta=self.theta) for x in (q, k))
        mixed_BxTxHxK = self.divide(jax.nn.dot_product_attention(q, k, v, is_causal=True), 2)
        return self.out(mixed_BxTxHxK.reshape(B, T, D))


class Block(nnx.Module):
    """A pre-norm transformer layer: x + Attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(
        self,
        width: int,
        hidden: int,
        attention: Callable[..., Attention],
        *,
        norm: Callable[..., nnx.Module] = nnx.RMSNorm,
        bias: bool = False,
        depth: int,
        dtype: DType,
        rngs: nnx.Rngs,
        divide: Divide = layers.whole,
        product: Product = layers.plain,
    ):
        # The order of construction determines which random numbers each parameter is drawn from.
        self.attention_norm = norm(width, dtype=dtype, rngs=rngs)
        self.attention = attention(depth=depth, dtype=dtype, rngs=rngs, divide=divide, product=product)
        self.mlp_norm = norm(width, dtype=dtype, rngs=rngs)
        linear = functools.partial(layers.RowLinear, bias=bias, divide=divide, product=product, dtype=dtype, rngs=rngs)
        self.up, self.down = linear(width, hidden, axis=1), linear(hidden, width, axis=0, scale=0.5 / depth)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        return x_BxTxD + self.down(jax.nn.gelu(self.up(self.mlp_norm(x_BxTxD))))


class DecoderLM(nnx.Module):
    """The parameters of a decoder: token embedding, L stacked layers, final norm, and a linear output layer unless it is tied."""

    def __init__(self, vocabulary: int, width: int, depth: int, block: Build, *, tied: bool, rngs: nnx.Rngs):
        # A tied table has small values, so that logits are of order one; `Parts.embed` multiplies them by √D.
        deviation = width**-0.5 if tied else 1.0
        self.embedding = nnx.Embed(vocabulary, width, embedding_init=nnx.initializers.normal(deviation), rngs=rngs)
        self.blocks = nnx.split_rngs(splits=depth)(nnx.vmap(block))(rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        if not tied:
            self.head = nnx.Linear(width, vocabulary, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=rngs)


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
    remat: Remat = "dots",
    divide: Divide = layers.whole,
    product: Product = layers.plain,
) -> Model:
    """A decoder-only transformer language model; predicts token t + 1 from tokens 0 … t.

    Parameters, loss and logits are float32.

    Args:
        vocabulary: V; tokens are 0 … V − 1.
        context: T, the longest sequence; a training sequence holds T + 1 tokens, inputs and shifted targets.
        width: D, width of the activations between layers, divisible by 2 · heads.
        hidden: F, width of the hidden layer of an MLP.
        heads: H, attention heads, each D / H wide.
        depth: L, layers of attention and an MLP.
        tied: use one table as embedding and as output layer.
        dtype: the dtype in which layers compute, "float32" or "bfloat16".
        remat: what the backward pass of a layer recomputes: "none", all but weight matmuls ("dots"), or all ("full").
        divide: how a tensor-parallel group divides arrays; `product` is how it adds up products (functions, not config fields).

    Raises:
        ValueError: if the width is not divisible by 2 · heads.
    """
    layers.check_heads(width, heads)
    compute = jnp.dtype(dtype)
    attention = functools.partial(Attention, width, heads)
    block = lambda rngs: Block(width, hidden, attention, depth=depth, dtype=compute, rngs=rngs, divide=divide, product=product)
    parts = Parts(width, depth, block, tied, compute, divide, scale=width**0.5 if tied else 1.0, remat=remat)
    init = functools.partial(layers.init, lambda rngs: DecoderLM(vocabulary, width, depth, block, tied=tied, rngs=rngs))
    return Model(init, *parts.functions(), context, parts, DIVIDED, vocabulary, UNITS)


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
UNITS = (("up/kernel", -1), ("down/kernel", -2))  # of the MLPs


def sample(
    model: Model, params: PyTree, prompt: Sequence[int], num_tokens: int, key: jax.Array, temperature: float = 0.8
) -> list[int]:
    """Sample a continuation of a prompt token by token, in a sliding window of the model's context.

    Args:
        model: a language model.
        params: its parameters.
        prompt: at least one token; the last T are read. It is not part of the result.
        num_tokens: length of the continuation.
        key: PRNG key.
        temperature: > 0, divides the logits; towards 0 the most likely token is always taken.
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
