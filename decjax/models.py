"""Flax models that know nothing of decentralization.

`DecoderLM` is a pre-norm, decoder-only transformer with rotary positions. One design choice is for CPUs: every weight
matmul is a two-dimensional product of rows, (B·T)xD @ DxF, because XLA's CPU backend runs the three-dimensional form
about 1.8 times slower. Layers are stacked and scanned, so compile time does not grow with depth.

A model enters training as a `Model`: pure functions of plain pytrees of parameters.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import optax

DTYPES = ("float32", "bfloat16")


class Model(NamedTuple):
    """A trainable function, free of framework objects.

    Attributes:
        init: `init(key) -> params`.
        nll: `nll(params, tokens_BxT1, key) -> nll_BxT`, negative log-likelihood of tokens 1 … T in nats.
        logits: `logits(params, tokens_BxT) -> logits_BxTxV`.
        context: T, the longest sequence the model accepts.
    """

    init: Callable[[jax.Array], Any]
    nll: Callable[[Any, jax.Array, jax.Array], jax.Array]
    logits: Callable[[Any, jax.Array], jax.Array]
    context: int


def fan_in(scale: float = 1.0) -> nnx.Initializer:
    """Weights of variance scale / inputs, so that activations are of order one at any width.

    The fixed deviation of 0.02 that suits widths near 1,000 is five times too small for a width of 100.
    """
    return nnx.initializers.variance_scaling(scale, "fan_in", "normal")


class RowLinear(nnx.Linear):
    """`nnx.Linear` that flattens all leading dimensions into rows."""

    def __call__(self, x):
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], self.out_features)


def rotate(x_BxTxHxK: jax.Array) -> jax.Array:
    """Rotary position embedding: rotates channel pairs (k, k + K/2) by the angle t · 10000^(−2k/K).

    Args:
        x_BxTxHxK: queries or keys; K even.

    Returns:
        The rotated array, same shape and dtype.

    Reference:
        Su et al. 2021, arXiv 2104.09864, section 3.
    """
    _, T, _, K = x_BxTxHxK.shape
    frequency_K2 = 10_000.0 ** (-jnp.arange(0, K, 2) / K)
    angle_Tx1xK2 = jnp.arange(T)[:, None, None] * frequency_K2
    cos, sin = jnp.cos(angle_Tx1xK2), jnp.sin(angle_Tx1xK2)
    low, high = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x_BxTxHxK.dtype)


class Attention(nnx.Module):
    """Causal multi-head self-attention with normalized queries and keys, which bears larger learning rates.

    Reference:
        Henry et al. 2020, arXiv 2010.04245 (normalized queries and keys).
    """

    def __init__(self, width: int, heads: int, *, depth: int, dtype, rngs: nnx.Rngs):
        self.heads = heads
        self.query_norm = nnx.RMSNorm(width // heads, dtype=dtype, rngs=rngs)
        self.key_norm = nnx.RMSNorm(width // heads, dtype=dtype, rngs=rngs)
        self.qkv = RowLinear(width, 3 * width, use_bias=False, dtype=dtype, kernel_init=fan_in(), rngs=rngs)
        # 2 · depth branches add up to the variance of one.
        self.out = RowLinear(width, width, use_bias=False, dtype=dtype, kernel_init=fan_in(0.5 / depth), rngs=rngs)

    def __call__(self, x_BxTxD):
        B, T, D = x_BxTxD.shape
        q, k, v = jnp.split(self.qkv(x_BxTxD).reshape(B, T, 3 * self.heads, D // self.heads), 3, axis=2)
        q, k = rotate(self.query_norm(q)), rotate(self.key_norm(k))
        mixed_BxTxHxK = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed_BxTxHxK.reshape(B, T, D))


class Block(nnx.Module):
    """One pre-norm transformer layer: x + Attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, hidden: int, heads: int, *, depth: int, dtype, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = Attention(width, heads, depth=depth, dtype=dtype, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.up = RowLinear(width, hidden, use_bias=False, dtype=dtype, kernel_init=fan_in(), rngs=rngs)
        self.down = RowLinear(hidden, width, use_bias=False, dtype=dtype, kernel_init=fan_in(0.5 / depth), rngs=rngs)

    def __call__(self, x_BxTxD):
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        return x_BxTxD + self.down(jax.nn.gelu(self.up(self.mlp_norm(x_BxTxD))))


class DecoderLM(nnx.Module):
    """Token embedding, L scanned blocks, norm, linear head."""

    def __init__(self, vocabulary: int, width: int, hidden: int, heads: int, depth: int, *, dtype, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(
            vocabulary, width, dtype=dtype, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)

        @nnx.split_rngs(splits=depth)
        @nnx.vmap
        def stack(rngs):
            return Block(width, hidden, heads, depth=depth, dtype=dtype, rngs=rngs)

        self.blocks = stack(rngs)
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.head = RowLinear(
            width, vocabulary, use_bias=False, dtype=dtype, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, tokens_BxT):
        # Weight products are kept for the backward pass and the rest is computed anew: on CPUs writing and reading it
        # costs more (a seventh of a step), on accelerators it costs memory.
        @functools.partial(nnx.remat, prevent_cse=False, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        def through_block(x_BxTxD, block):
            return block(x_BxTxD)

        @nnx.scan
        def through_blocks(x_BxTxD, block):
            return through_block(x_BxTxD, block), None

        x_BxTxD, _ = through_blocks(self.embedding(tokens_BxT), self.blocks)
        return self.head(self.norm(x_BxTxD)).astype(jnp.float32)


def decoder_lm(*, vocabulary: int, context: int, width: int, hidden: int, heads: int, depth: int,
               dtype: str = "float32") -> Model:
    """A decoder-only language model; predicts token t + 1 from tokens 0 … t.

    Parameters are float32; `dtype` is the compute dtype of the blocks. The loss and the logits are float32.

    Args:
        vocabulary: V.
        context: T; a training sequence holds T + 1 tokens, inputs and shifted targets.
        width: D, divisible by 2 · heads.
        hidden: F.
        heads: H.
        depth: L.
        dtype: compute dtype, "float32" or "bfloat16".

    Returns:
        The `Model`.

    Raises:
        ValueError: if a size is not positive, the width does not divide into heads of even size, or the dtype is another.
    """
    sizes = dict(vocabulary=vocabulary, context=context, width=width, hidden=hidden, heads=heads, depth=depth)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"model {name}={size}: must be at least 1")
    if dtype not in DTYPES:
        raise ValueError(f"model dtype={dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    if width % (2 * heads):
        raise ValueError(
            f"model width={width} with heads={heads}: heads must have an even size; use a width divisible by {2 * heads}")

    def create(key):
        return DecoderLM(vocabulary, width, hidden, heads, depth, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(key))

    graph = nnx.graphdef(nnx.eval_shape(lambda: create(jax.random.key(0))))

    def init(key):
        return nnx.to_pure_dict(nnx.state(create(key)))

    def logits(params, tokens_BxT):
        model = nnx.merge(graph, nnx.State(params))
        return model(tokens_BxT)

    def nll(params, tokens_BxT1, key):
        del key  # No dropout.
        logits_BxTxV = logits(params, tokens_BxT1[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxT1[:, 1:])

    return Model(init, nll, logits, context)


def sample(model: Model, params: Any, prompt: bytes, num_tokens: int, key: jax.Array, temperature: float = 0.8) -> bytes:
    """Continues a prompt of bytes, token by token, in a sliding window of the model's context.

    Args:
        model: a byte-level model.
        params: its parameters.
        prompt: at least one byte; the last T of them are read.
        num_tokens: bytes to append.
        key: PRNG key.
        temperature: logits are divided by it; towards 0 the most likely byte is taken.

    Returns:
        The continuation, without the prompt.
    """
    T = model.context
    start = jnp.frombuffer(prompt[-T:], jnp.uint8).astype(jnp.int32)
    window_T = jnp.zeros(T, jnp.int32).at[:start.size].set(start)

    def step(carry, key):
        window_T, length = carry
        logits_V = model.logits(params, window_T[None])[0, length - 1]
        token = jax.random.categorical(key, logits_V / temperature)
        full = length == T
        window_T = jnp.where(full, jnp.roll(window_T, -1), window_T)
        window_T = window_T.at[jnp.where(full, T - 1, length)].set(token)
        return (window_T, jnp.minimum(length + 1, T)), token

    _, tokens = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))(
        (window_T, jnp.int32(start.size)), jax.random.split(key, num_tokens))
    return bytes(tokens.astype(jnp.uint8).tolist())
