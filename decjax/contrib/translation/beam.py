"""Beam search for the most likely translation under a model.

    score(y) = ln p(y | x) / ((5 + |y|) / 6)^α,   |y| including the end token

Reference: Wu et al. 2016, arXiv 1609.08144, section 7 (length penalty, without the coverage term).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax.contrib.translation.model import BOS, EOS, PAD, Cache, Translator
from decjax.typing import PyTree

NEVER = -1e30  # the score of a missing hypothesis; finite, so that differences stay finite


class Beams(NamedTuple):
    """K unfinished and the K best finished hypotheses of each of B sources."""

    alive_BxKxT: jax.Array  # tokens, padded with `PAD`
    alive_BxK: jax.Array  # ln p, in descending order
    done_BxKxT: jax.Array
    done_BxK: jax.Array  # scores, in descending order; `NEVER` where there are fewer than K
    cache: Cache  # of the B·K unfinished ones
    position: jax.Array  # tokens written so far


def penalty(length: jax.Array | int, alpha: float) -> jax.Array | float:
    """Return ((5 + |y|) / 6)^α, by which ln p of a hypothesis of |y| tokens is divided."""
    return ((5 + length) / 6) ** alpha


@functools.partial(jax.jit, static_argnames=("model", "beams", "alpha", "length"))
def search(model: Translator, params: PyTree, source_BxS: jax.Array, *, beams: int, alpha: float, length: int) -> jax.Array:
    """Return the best hypothesis of each source, tokens_BxT, with its `EOS` if it has ended, then `PAD`.

    Args:
        model: a translation model.
        params: its parameters.
        source_BxS: tokens of the sources, padded with `PAD` after their `EOS`.
        beams: K ≥ 1; 1 with α = 0 is greedy search (with a penalty, the search may continue after a hypothesis has ended).
        alpha: α ≥ 0 of the length penalty; larger values prefer longer translations.
        length: T, the maximum length of a translation.
    """
    state = hypotheses(model, params, source_BxS, beams, alpha, length)
    best_BxT, unfinished_BxT = state.done_BxKxT[:, 0], state.alive_BxKxT[:, 0]
    return jnp.where(state.done_BxK[:, :1] > NEVER, best_BxT, unfinished_BxT)


def hypotheses(model: Translator, params: PyTree, source_BxS: jax.Array, beams: int, alpha: float, length: int) -> Beams:
    """Return the hypotheses of `search` once none better than the best finished one of each source can follow."""
    B = len(source_BxS)
    cache = model.begin(params, source_BxS, length)
    none_BxKxT = jnp.full((B, beams, length), PAD, jnp.int32)
    first_BxK = jnp.full((B, beams), NEVER).at[:, 0].set(0.0)  # the beams are equal at first, so only one counts
    start = Beams(
        none_BxKxT,
        first_BxK,
        none_BxKxT,
        jnp.full((B, beams), NEVER),
        jax.tree.map(lambda x: jnp.repeat(x, beams, axis=1), cache),
        jnp.int32(0),
    )

    def continues(state):
        # An upper bound of the score of all unfinished hypotheses, since ln p only falls.
        bound_B = state.alive_BxK[:, 0] / penalty(length, alpha)
        return (state.position < length) & (bound_B > state.done_BxK[:, 0]).any()

    return jax.lax.while_loop(continues, functools.partial(_write, model, params, alpha), start)


def _write(model: Translator, params: PyTree, alpha: float, state: Beams) -> Beams:
    """Write one token of every hypothesis."""
    B, K, _ = state.alive_BxKxT.shape
    before_BxK = state.alive_BxKxT[:, :, state.position - 1]
    last_BxK = jnp.where(state.position == 0, BOS, before_BxK)
    logits_RxV, cache = model.follow(params, state.cache, last_BxK.reshape(-1), state.position)
    banned_V = jnp.zeros(model.vocabulary).at[jnp.array([PAD, BOS])].set(NEVER)
    log_p_BxKxV = jax.nn.log_softmax(logits_RxV).reshape(B, K, -1) + banned_V[None, None]
    # Of 2K candidates at most K end, so K remain that do not.
    total_Bx2K, chosen_Bx2K = jax.lax.top_k((state.alive_BxK[..., None] + log_p_BxKxV).reshape(B, -1), 2 * K)
    beam_Bx2K, token_Bx2K = chosen_Bx2K // model.vocabulary, chosen_Bx2K % model.vocabulary
    tokens_Bx2KxT = jnp.take_along_axis(state.alive_BxKxT, beam_Bx2K[..., None], axis=1).at[:, :, state.position].set(token_Bx2K)
    # A hypothesis that ends counts only among the K best candidates.
    ends_Bx2K = token_Bx2K == EOS
    ended_Bx2K = ends_Bx2K & (jnp.arange(2 * K) < K)[None]

    score_Bx2K = jnp.where(ended_Bx2K, total_Bx2K / penalty(state.position + 1, alpha), NEVER)
    done_BxK, kept_BxK = jax.lax.top_k(jnp.concatenate([state.done_BxK, score_Bx2K], axis=1), K)
    done_BxKxT = _rows(jnp.concatenate([state.done_BxKxT, tokens_Bx2KxT], axis=1), kept_BxK)

    alive_BxK, on_BxK = jax.lax.top_k(jnp.where(ends_Bx2K, NEVER, total_Bx2K), K)
    beam_BxK = jnp.take_along_axis(beam_Bx2K, on_BxK, axis=1)
    row_R = (jnp.arange(B)[:, None] * K + beam_BxK).reshape(-1)
    cache = cache._replace(target=jax.tree.map(lambda x: x[:, row_R], cache.target))
    # Sums with NEVER fall below it; clipped to NEVER, they stay marked as missing.
    done_BxK, alive_BxK = jnp.maximum(done_BxK, NEVER), jnp.maximum(alive_BxK, NEVER)
    return Beams(_rows(tokens_Bx2KxT, on_BxK), alive_BxK, done_BxKxT, done_BxK, cache, state.position + 1)


def _rows(x_BxKxT: jax.Array, chosen_BxK: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BxKxT, chosen_BxK[..., None], axis=1)


def cut(tokens_T: np.ndarray) -> list[int]:
    """Return the tokens of a translation before its end."""
    ends = np.flatnonzero((tokens_T == EOS) | (tokens_T == PAD))
    return tokens_T[: ends[0] if len(ends) else None].tolist()
