"""An encoder–decoder transformer for translation.

Blocks are pre-norm. Self-attention has rotary positions and normalized queries and keys, as in `decoder`; attention of the target to
the source has no positions, so no part of the source is nearer than another. One table serves as embedding of both languages and as output
layer, so both share one vocabulary. Every weight matmul is a two-dimensional product of rows, and layers are stacked and scanned.

Reference: Vaswani et al. 2017, arXiv 1706.03762, section 3; Xiong et al. 2020, arXiv 2002.04745 (pre-norm).
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from decjax import noise, registry
from decjax.models import decoder as decoder_lib
from decjax.options import Count, Decay

PAD, BOS, EOS = 0, 1, 2  # tokens: fills a sequence up, begins a target, ends a sequence
SPECIAL = 3  # how many of these


class Translator(NamedTuple):
    """A translation model as pure functions, without framework objects.

    Attributes:
        init: `init(key) -> params`.
        logits: `logits(params, source_BxS, target_BxT, key) -> logits_BxTxV`, of the token that follows each of the target; the key is
            for dropout, None: without.
        begin: `begin(params, source_BxS, length) -> cache`, what `follow` needs to write up to `length` tokens.
        follow: `follow(params, cache, tokens_B, position) -> (logits_BxV, cache)`: writes the token at a position of the target, and
            returns the logits of the next one. `logits` does the same for a whole target.
        vocabulary: V, including `PAD`, `BOS` and `EOS`.
    """

    init: Callable[[jax.Array], Any]
    logits: Callable[[Any, jax.Array, jax.Array, jax.Array | None], jax.Array]
    begin: Callable[[Any, jax.Array, int], "Cache"]
    follow: Callable[[Any, "Cache", jax.Array, jax.Array], tuple[jax.Array, "Cache"]]
    vocabulary: int


class Cache(NamedTuple):
    """What the decoder reads while it writes, for each of L layers; the second axis of all arrays is the batch."""

    source: tuple[jax.Array, jax.Array]  # keys and values of the source, [L, B, S, H, K]
    target: tuple[jax.Array, jax.Array]  # of the target so far, [L, B, T, H, K]
    real_1xBxS: jax.Array  # where the source is not padding


class MultiHead(nnx.Module):
    """Multi-head attention of one sequence to another one, or to itself, with normalized queries and keys."""

    def __init__(self, width: int, heads: int, *, positions: bool, scale: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        linear = functools.partial(decoder_lib.RowLinear, divide=decoder_lib.whole, dtype=dtype, rngs=rngs)
        self.heads, self.positions = heads, positions
        self.query, self.key_value = linear(width, width, axis=1), linear(width, 2 * width, axis=1)
        self.out = linear(width, width, axis=0, scale=scale)
        self.query_norm = nnx.RMSNorm(width // heads, dtype=dtype, rngs=rngs)
        self.key_norm = nnx.RMSNorm(width // heads, dtype=dtype, rngs=rngs)

    def read(self, y_BxSxD, start=0):
        """Keys and values of what is attended to, each [B, S, H, K], whose first position is `start`."""
        kv_BxSxHx2xK = self.key_value(y_BxSxD).reshape(*y_BxSxD.shape[:2], self.heads, 2, -1)
        k_BxSxHxK = self.key_norm(kv_BxSxHx2xK[..., 0, :])
        return decoder_lib.rotate(k_BxSxHxK, start) if self.positions else k_BxSxHxK, kv_BxSxHx2xK[..., 1, :]

    def __call__(self, x_BxTxD, keys_values, visible_Bx1xTxS, start=0):
        q_BxTxHxK = self.query_norm(self.query(x_BxTxD).reshape(*x_BxTxD.shape[:2], self.heads, -1))
        q_BxTxHxK = decoder_lib.rotate(q_BxTxHxK, start) if self.positions else q_BxTxHxK
        mixed_BxTxHxK = jax.nn.dot_product_attention(q_BxTxHxK, *keys_values, mask=visible_Bx1xTxS)
        return self.out(mixed_BxTxHxK.reshape(x_BxTxD.shape))


class Feed(nnx.Module):
    """The multilayer perceptron of a block, with its norm."""

    def __init__(self, width: int, hidden: int, *, scale: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        linear = functools.partial(decoder_lib.RowLinear, divide=decoder_lib.whole, dtype=dtype, rngs=rngs)
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.up, self.down = linear(width, hidden, axis=1), linear(hidden, width, axis=0, scale=scale)

    def __call__(self, x_BxTxD):
        return self.down(jax.nn.gelu(self.up(self.norm(x_BxTxD))))


class EncoderLayer(nnx.Module):
    """A layer of the encoder: x + Attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width, hidden, heads, *, depth, dtype, rngs):
        common: dict[str, Any] = dict(scale=0.5 / depth, dtype=dtype, rngs=rngs)  # The sum of all branches has the variance of one.
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = MultiHead(width, heads, positions=True, **common)
        self.feed = Feed(width, hidden, **common)

    def __call__(self, x_BxSxD, visible_Bx1x1xS, drop):
        y_BxSxD = self.norm(x_BxSxD)
        x_BxSxD = x_BxSxD + drop(self.attention(y_BxSxD, self.attention.read(y_BxSxD), visible_Bx1x1xS), 0)
        return x_BxSxD + drop(self.feed(x_BxSxD), 1)


class DecoderLayer(nnx.Module):
    """A layer of the decoder: attention to the target so far, to the source, and an MLP."""

    def __init__(self, width, hidden, heads, *, depth, dtype, rngs):
        common: dict[str, Any] = dict(scale=1 / (3 * depth), dtype=dtype, rngs=rngs)
        self.norm, self.cross_norm = (nnx.RMSNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = MultiHead(width, heads, positions=True, **common)
        self.cross = MultiHead(width, heads, positions=False, **common)
        self.feed = Feed(width, hidden, **common)

    def __call__(self, x_BxTxD, source, visible_Bx1x1xS, drop):
        """The pass through a whole target, which sees the past only."""
        T, y_BxTxD = x_BxTxD.shape[1], self.norm(x_BxTxD)
        past_1x1xTxT = jnp.tril(jnp.ones((1, 1, T, T), bool))
        x_BxTxD = x_BxTxD + drop(self.attention(y_BxTxD, self.attention.read(y_BxTxD), past_1x1xTxT), 0)
        x_BxTxD = x_BxTxD + drop(self.cross(self.cross_norm(x_BxTxD), source, visible_Bx1x1xS), 1)
        return x_BxTxD + drop(self.feed(x_BxTxD), 2)

    def follow(self, x_Bx1xD, source, target, visible_Bx1x1xS, position):
        """The pass of one position; returns it with the keys and values of the target, to which its own are added."""
        y_Bx1xD = self.norm(x_Bx1xD)
        own = self.attention.read(y_Bx1xD, position)
        target = tuple(jax.lax.dynamic_update_slice_in_dim(all_, x, position, 1) for all_, x in zip(target, own, strict=True))
        past_1x1x1xT = (jnp.arange(target[0].shape[1]) <= position)[None, None, None]
        x_Bx1xD = x_Bx1xD + self.attention(y_Bx1xD, target, past_1x1x1xT, position)
        x_Bx1xD = x_Bx1xD + self.cross(self.cross_norm(x_Bx1xD), source, visible_Bx1x1xS)
        return x_Bx1xD + self.feed(x_Bx1xD), target


class EncoderDecoder(nnx.Module):
    """The parameters: one table, stacked layers of encoder and decoder, and a norm at the end of each."""

    def __init__(self, vocabulary, width, layers, rngs):
        # Small values, so that logits are of order one; embeddings are multiplied by √D.
        self.embedding = nnx.Embed(vocabulary, width, embedding_init=nnx.initializers.normal(width**-0.5), rngs=rngs)
        self.encoder, self.decoder = (nnx.split_rngs(splits=depth)(nnx.vmap(build))(rngs) for depth, build in layers)
        self.encoder_norm, self.decoder_norm = (nnx.RMSNorm(width, rngs=rngs) for _ in range(2))


@dataclasses.dataclass(frozen=True)
class _Functions:
    """The functions of a `Translator`."""

    vocabulary: int
    width: int
    heads: int
    layers: tuple[tuple[int, Callable[[nnx.Rngs], nnx.Module]], ...]  # (depth, layer) of encoder and decoder
    dropout: float
    dtype: jnp.dtype

    def init(self, key):
        return nnx.to_pure_dict(nnx.state(EncoderDecoder(self.vocabulary, self.width, self.layers, nnx.Rngs(key))))

    def _module(self, which, params):
        return nnx.merge(_graph(self.layers[which][1]), nnx.State(params))

    def _drop(self, key, layer):
        """`drop(x, site)`: dropout at a place of a layer, the identity without a key."""
        if key is None or not self.dropout:
            return lambda x, site: x
        first, second = noise.words(key)

        def drop(x, site):
            k = jnp.uint32(8 * layer + site)
            # Both words differ: masks whose seeds differ in one word are correlated.
            seed = noise.mix(first + k, second), noise.mix(second + k, first)
            return jnp.where(noise.uniform(x.shape, seed) < self.dropout, 0, x / (1 - self.dropout)).astype(x.dtype)

        return drop

    def _embed(self, params, tokens, drop, site):
        table_VxD = params["embedding"]["embedding"]
        return drop((jnp.take(table_VxD, tokens, axis=0) * self.width**0.5).astype(self.dtype), site)

    def _norm(self, params, x):
        graph = _graph(lambda rngs: nnx.RMSNorm(self.width, dtype=self.dtype, rngs=rngs))
        return nnx.merge(graph, nnx.State(params))(x)

    def _through(self, which, params, x, key, call):
        """Scans the layers of the encoder or decoder; `call(layer, x, drop)`."""
        depth = self.layers[which][0]

        # As in `decoder`: results of weight matmuls are kept for the backward pass, all else is recomputed.
        @functools.partial(jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        def layer(x, given):
            own, number = given
            return call(self._module(which, own), x, self._drop(key, 1 + number + self.layers[0][0] * which)), None

        return jax.lax.scan(layer, x, (params, jnp.arange(depth, dtype=jnp.uint32)))[0]

    def encode(self, params, source_BxS, key):
        visible_Bx1x1xS = (source_BxS != PAD)[:, None, None]
        x_BxSxD = self._embed(params, source_BxS, self._drop(key, 0), 0)
        x_BxSxD = self._through(0, params["encoder"], x_BxSxD, key, lambda layer, x, drop: layer(x, visible_Bx1x1xS, drop))
        return self._norm(params["encoder_norm"], x_BxSxD), visible_Bx1x1xS

    def _output(self, params, x_BxTxD):
        rows = self._norm(params["decoder_norm"], x_BxTxD).reshape(-1, self.width)
        logits_RxV = rows @ params["embedding"]["embedding"].astype(self.dtype).T
        return logits_RxV.reshape(*x_BxTxD.shape[:-1], -1).astype(jnp.float32)

    def logits(self, params, source_BxS, target_BxT, key):
        y_BxSxD, visible_Bx1x1xS = self.encode(params, source_BxS, key)
        x_BxTxD = self._embed(params, target_BxT, self._drop(key, 0), 1)

        def call(layer, x_BxTxD, drop):
            return layer(x_BxTxD, layer.cross.read(y_BxSxD), visible_Bx1x1xS, drop)

        return self._output(params, self._through(1, params["decoder"], x_BxTxD, key, call))

    def begin(self, params, source_BxS, length):
        y_BxSxD, visible_Bx1x1xS = self.encode(params, source_BxS, None)
        source = jax.lax.map(lambda own: self._module(1, own).cross.read(y_BxSxD), params["decoder"])
        shape = self.layers[1][0], len(source_BxS), length, self.heads, self.width // self.heads
        target = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        return Cache(source, target, visible_Bx1x1xS[None, :, 0, 0])

    def follow(self, params, cache, tokens_B, position):
        visible_Bx1x1xS = cache.real_1xBxS[0][:, None, None]

        def layer(x_Bx1xD, given):
            own, source, target = given
            return self._module(1, own).follow(x_Bx1xD, source, target, visible_Bx1x1xS, position)

        x_Bx1xD = self._embed(params, tokens_B[:, None], self._drop(None, 0), 0)
        x_Bx1xD, target = jax.lax.scan(layer, x_Bx1xD, (params["decoder"], cache.source, cache.target))
        return self._output(params, x_Bx1xD)[:, 0], cache._replace(target=target)


def _graph(build: Callable[[nnx.Rngs], nnx.Module]) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0))))


@registry.register("model", "translator")
def translator(
    *,
    vocabulary: Count = 4000,
    width: Count = 128,
    hidden: Count = 256,
    heads: Count = 4,
    encoder: Count = 2,
    decoder: Count = 2,
    dropout: Decay = 0.1,
    dtype: decoder_lib.Dtype = "float32",
) -> Translator:
    """An encoder–decoder transformer, which predicts the next token of a translation from the source and the tokens before.

    Args:
        vocabulary: V ≥ 259, tokens that both languages share, among them the three that pad, begin and end a sequence.
        width: D, width of the activations between layers, divisible by 2 · heads.
        hidden: F, width of the hidden layer of an MLP.
        heads: H, attention heads, each D / H wide.
        encoder: layers of the encoder.
        decoder: layers of the decoder.
        dropout: share of the values that are set to zero while training, of embeddings and of what each branch of a layer adds.
        dtype: the dtype in which layers compute, "float32" or "bfloat16".

    Raises:
        ValueError: if the width is not divisible by 2 · heads.
    """
    decoder_lib.check_heads(width, heads)
    compute, depths = jnp.dtype(dtype), (encoder, decoder)

    def layer(kind, depth):
        return lambda rngs: kind(width, hidden, heads, depth=depth, dtype=compute, rngs=rngs)

    layers = tuple((depth, layer(kind, depth)) for kind, depth in zip((EncoderLayer, DecoderLayer), depths, strict=True))
    form = _Functions(vocabulary, width, heads, layers, dropout, compute)
    return Translator(form.init, form.logits, form.begin, form.follow, vocabulary)
