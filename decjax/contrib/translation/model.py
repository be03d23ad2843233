"""An encoder–decoder transformer for translation.

Blocks are pre-norm. Self-attention has rotary positions and normalized queries and keys, as in `decoder`; cross-attention has no
positions, so no part of the source is nearer than another. One table serves as embedding of both languages and as output layer, so both
share one vocabulary.

References: Vaswani et al. 2017, arXiv 1706.03762, section 3; Xiong et al. 2020, arXiv 2002.04745 (pre-norm).
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from decjax import noise, registry
from decjax.models import layers
from decjax.models.layers import Build, Dtype, Remat
from decjax.options import Count, Decay
from decjax.typing import DType, PyTree

PAD, BOS, EOS = 0, 1, 2  # tokens: padding, the beginning of a target, the end of a sequence
SPECIAL = 3  # tokens that are none of a text

KeysValues = tuple[jax.Array, jax.Array]  # each [B, S, H, K]
Position = jax.Array | int
Drop = Callable[[jax.Array, int], jax.Array]  # (x, site of a layer) -> x with dropout


class Cache(NamedTuple):
    """The keys and values that the decoder reads, for each of L layers; the second axis of all arrays is the batch."""

    source: KeysValues  # of the source, [L, B, S, H, K]
    target: KeysValues  # of the target so far, [L, B, T, H, K]
    real_1xBxS: jax.Array  # where the source is not padding


class MultiHead(nnx.Module):
    """Multi-head attention of one sequence to another, or to itself, with normalized queries and keys."""

    def __init__(self, width: int, heads: int, *, positions: bool, scale: float, dtype: DType, rngs: nnx.Rngs):
        linear = functools.partial(layers.RowLinear, dtype=dtype, rngs=rngs)
        self.heads, self.positions = heads, positions
        self.query, self.key_value = linear(width, width, axis=1), linear(width, 2 * width, axis=1)
        self.out = linear(width, width, axis=0, scale=scale)
        self.query_norm, self.key_norm = (nnx.RMSNorm(width // heads, dtype=dtype, rngs=rngs) for _ in range(2))

    def read(self, y_BxSxD: jax.Array, start: Position = 0) -> KeysValues:
        """Return keys and values of the sequence that is attended to, whose first position is `start`."""
        kv_BxSxHx2xK = self.key_value(y_BxSxD).reshape(*y_BxSxD.shape[:2], self.heads, 2, -1)
        k_BxSxHxK = self.key_norm(kv_BxSxHx2xK[..., 0, :])
        return layers.rotate(k_BxSxHxK, start) if self.positions else k_BxSxHxK, kv_BxSxHx2xK[..., 1, :]

    def __call__(self, x_BxTxD: jax.Array, keys_values: KeysValues, visible_Bx1xTxS: jax.Array, start: Position = 0) -> jax.Array:
        q_BxTxHxK = self.query_norm(self.query(x_BxTxD).reshape(*x_BxTxD.shape[:2], self.heads, -1))
        q_BxTxHxK = layers.rotate(q_BxTxHxK, start) if self.positions else q_BxTxHxK
        mixed_BxTxHxK = jax.nn.dot_product_attention(q_BxTxHxK, *keys_values, mask=visible_Bx1xTxS)
        return self.out(mixed_BxTxHxK.reshape(x_BxTxD.shape))


class Feed(nnx.Module):
    """The multilayer perceptron of a block, with its norm."""

    def __init__(self, width: int, hidden: int, *, scale: float, dtype: DType, rngs: nnx.Rngs):
        linear = functools.partial(layers.RowLinear, dtype=dtype, rngs=rngs)
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.up, self.down = linear(width, hidden, axis=1), linear(hidden, width, axis=0, scale=scale)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(self.norm(x_BxTxD))))


class Layer(nnx.Module):
    """A layer of the encoder: self-attention and an MLP; with `cross` one of the decoder, which also attends to the source."""

    def __init__(self, width: int, hidden: int, heads: int, *, depth: int, cross: bool, dtype: DType, rngs: nnx.Rngs):
        scale = 1 / ((3 if cross else 2) * depth)  # The sum of all branches has the variance of one.
        attention = functools.partial(MultiHead, width, heads, scale=scale, dtype=dtype, rngs=rngs)
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        if cross:
            self.cross_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = attention(positions=True)
        if cross:
            self.cross = attention(positions=False)
        self.feed = Feed(width, hidden, scale=scale, dtype=dtype, rngs=rngs)

    def __call__(
        self, x_BxTxD: jax.Array, visible_Bx1xTxT: jax.Array, drop: Drop, source: tuple[KeysValues, jax.Array] | None = None
    ) -> jax.Array:
        """Return the output for a whole sequence; the decoder's source is (keys and values, visible_Bx1x1xS)."""
        y_BxTxD = self.norm(x_BxTxD)
        x_BxTxD = x_BxTxD + drop(self.attention(y_BxTxD, self.attention.read(y_BxTxD), visible_Bx1xTxT), 0)
        if source:
            x_BxTxD = x_BxTxD + drop(self.cross(self.cross_norm(x_BxTxD), *source), 1)
        return x_BxTxD + drop(self.feed(x_BxTxD), 2 if source else 1)

    def follow(
        self, x_Bx1xD: jax.Array, source: KeysValues, target: KeysValues, visible_Bx1x1xS: jax.Array, position: Position
    ) -> tuple[jax.Array, KeysValues]:
        """Return the output for one position, and the keys and values of the target with those of this position added."""
        y_Bx1xD = self.norm(x_Bx1xD)
        write = lambda all_, x: jax.lax.dynamic_update_slice_in_dim(all_, x, position, 1)
        target = jax.tree.map(write, target, self.attention.read(y_Bx1xD, position))
        past_1x1x1xT = (jnp.arange(target[0].shape[1]) <= position)[None, None, None]
        x_Bx1xD = x_Bx1xD + self.attention(y_Bx1xD, target, past_1x1x1xT, position)
        x_Bx1xD = x_Bx1xD + self.cross(self.cross_norm(x_Bx1xD), source, visible_Bx1x1xS)
        return x_Bx1xD + self.feed(x_Bx1xD), target


class EncoderDecoder(nnx.Module):
    """The parameters: one table, stacked layers of encoder and decoder, and a norm at the end of each."""

    def __init__(self, vocabulary: int, width: int, stacks: tuple[tuple[int, Build], ...], rngs: nnx.Rngs):
        # Small values, so that logits are of order one; embeddings are multiplied by √D.
        self.embedding = nnx.Embed(vocabulary, width, embedding_init=nnx.initializers.normal(width**-0.5), rngs=rngs)
        self.encoder, self.decoder = (nnx.split_rngs(splits=depth)(nnx.vmap(build))(rngs) for depth, build in stacks)
        self.encoder_norm, self.decoder_norm = (nnx.RMSNorm(width, rngs=rngs) for _ in range(2))


class Translator(registry.Part, kind="model", name="translator"):
    """An encoder–decoder transformer, which predicts the next token of a translation from the source and the tokens before.

    Attributes:
        vocabulary: V ≥ 259, tokens that both languages share, including `PAD`, `BOS` and `EOS`.
        width: D, width of the activations between layers, divisible by 2 · heads.
        hidden: F, width of the hidden layer of an MLP.
        heads: H, attention heads, each D / H wide.
        encoder: layers of the encoder.
        decoder: layers of the decoder.
        dropout: probability of setting a value to zero in training, in embeddings and in the output of each branch of a layer.
        dtype: the dtype in which layers compute, "float32" or "bfloat16".
        remat: what the backward pass of a layer recomputes: "none", all but weight matmuls ("dots"), or all ("full").
    """

    vocabulary: Count = 4000
    width: Count = 128
    hidden: Count = 256
    heads: Count = 4
    encoder: Count = 2
    decoder: Count = 2
    dropout: Decay = 0.1
    dtype: Dtype = "float32"
    remat: Remat = "dots"

    def __post_init__(self):
        layers.check_heads(self.width, self.heads)

    def init(self, key: jax.Array) -> PyTree:
        """Return the initial parameters."""
        return layers.init(lambda rngs: EncoderDecoder(self.vocabulary, self.width, self._stacks, rngs), key)

    def logits(self, params: PyTree, source_BxS: jax.Array, target_BxT: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return logits_BxTxV of the token that follows each of the target; the key is for dropout, None: without."""
        y_BxSxD, visible_Bx1x1xS = self._encode(params, source_BxS, key)
        x_BxTxD = self._embed(params, target_BxT, self._drop(key, 0), 1)

        past_1x1xTxT = jnp.tril(jnp.ones((1, 1, target_BxT.shape[1], target_BxT.shape[1]), bool))

        def call(layer, x_BxTxD, drop):
            return layer(x_BxTxD, past_1x1xTxT, drop, (layer.cross.read(y_BxSxD), visible_Bx1x1xS))

        return self._output(params, self._through(1, params["decoder"], x_BxTxD, key, call))

    def begin(self, params: PyTree, source_BxS: jax.Array, length: int) -> Cache:
        """Return what `follow` needs to write up to `length` tokens."""
        y_BxSxD, visible_Bx1x1xS = self._encode(params, source_BxS, None)
        source = jax.lax.map(lambda layer: self._bound[1](layer).cross.read(y_BxSxD), params["decoder"])
        shape = self.decoder, len(source_BxS), length, self.heads, self.width // self.heads
        target = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        return Cache(source, target, visible_Bx1x1xS[None, :, 0, 0])

    def follow(self, params: PyTree, cache: Cache, tokens_B: jax.Array, position: Position) -> tuple[jax.Array, Cache]:
        """Write the token at a position of the target; return logits_BxV of the next one, as `logits` does, and the cache."""
        visible_Bx1x1xS = cache.real_1xBxS[0][:, None, None]

        def through_layer(x_Bx1xD, inputs):
            layer, source, target = inputs
            return self._bound[1](layer).follow(x_Bx1xD, source, target, visible_Bx1x1xS, position)

        x_Bx1xD = self._embed(params, tokens_B[:, None], self._drop(None, 0), 0)
        x_Bx1xD, target = jax.lax.scan(through_layer, x_Bx1xD, (params["decoder"], cache.source, cache.target))
        return self._output(params, x_Bx1xD)[:, 0], cache._replace(target=target)

    @functools.cached_property
    def _stacks(self) -> tuple[tuple[int, Build], ...]:
        """(number of layers, their constructor) of encoder and decoder."""

        def stack(depth, cross):
            sizes, dtype = (self.width, self.hidden, self.heads), jnp.dtype(self.dtype)
            return depth, lambda rngs: Layer(*sizes, depth=depth, cross=cross, dtype=dtype, rngs=rngs)

        return stack(self.encoder, False), stack(self.decoder, True)

    @functools.cached_property
    def _bound(self) -> list[Callable[[PyTree], Layer]]:
        """For encoder and decoder, a function that returns the layer with given parameters."""
        return [layers.bound(build) for _, build in self._stacks]

    @functools.cached_property
    def _bound_norm(self) -> Callable[[PyTree], nnx.RMSNorm]:
        return layers.bound(lambda rngs: nnx.RMSNorm(self.width, dtype=jnp.dtype(self.dtype), rngs=rngs))

    def _drop(self, key: jax.Array | None, layer: int | jax.Array) -> Drop:
        """Dropout at the sites of a layer, the identity without a key."""
        if key is None or not self.dropout:
            return lambda x, site: x
        first, second = noise.words(key)

        def drop(x, site):
            k = jnp.uint32(8 * layer + site)
            # Both words differ: masks whose seeds differ in one word are correlated.
            seed = noise.mix(first + k, second), noise.mix(second + k, first)
            return jnp.where(noise.uniform(x.shape, seed) < self.dropout, 0, x / (1 - self.dropout)).astype(x.dtype)

        return drop

    def _embed(self, params: PyTree, tokens: jax.Array, drop: Drop, site: int) -> jax.Array:
        table_VxD = params["embedding"]["embedding"]
        return drop((jnp.take(table_VxD, tokens, axis=0) * self.width**0.5).astype(self.dtype), site)

    def _through(
        self, which: int, params: PyTree, x: jax.Array, key: jax.Array | None, call: Callable[..., jax.Array]
    ) -> jax.Array:
        """Scan the layers of the encoder (0) or decoder (1); `call(layer, x, drop)`."""
        bound, before = self._bound[which], 1 + self.encoder * which

        @functools.partial(layers.rematerialized, remat=self.remat)
        def through_layer(x, inputs):
            layer, number = inputs
            return call(bound(layer), x, self._drop(key, before + number)), None

        return jax.lax.scan(through_layer, x, (params, jnp.arange(self._stacks[which][0], dtype=jnp.uint32)))[0]

    def _encode(self, params: PyTree, source_BxS: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """(output of the encoder y_BxSxD, visible_Bx1x1xS: where the source is not padding)."""
        visible_Bx1x1xS = (source_BxS != PAD)[:, None, None]
        x_BxSxD = self._embed(params, source_BxS, self._drop(key, 0), 0)
        x_BxSxD = self._through(0, params["encoder"], x_BxSxD, key, lambda layer, x, drop: layer(x, visible_Bx1x1xS, drop))
        return self._bound_norm(params["encoder_norm"])(x_BxSxD), visible_Bx1x1xS

    def _output(self, params: PyTree, x_BxTxD: jax.Array) -> jax.Array:
        rows = self._bound_norm(params["decoder_norm"])(x_BxTxD).reshape(-1, self.width)
        logits_RxV = rows @ params["embedding"]["embedding"].astype(self.dtype).T
        return logits_RxV.reshape(*x_BxTxD.shape[:-1], -1).astype(jnp.float32)
