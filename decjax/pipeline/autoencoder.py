"""Learned linear autoencoders between virtual stages, which narrow the activations and gradients that are sent from D to R values.

    stage v    z = y E_v            z is sent forward
    stage v+1  x = z D_v            ∂z = ∂x D_vᵀ is sent back; then stage v takes ∂y = ∂z E_vᵀ

E_v (D×R) belongs to the stage that sends and D_v (R×D) to the one that receives. They are parameters of the model: trained by the
same optimizer, and part of evaluation and checkpoints. The gradients are the exact ones of that model, so no error is remembered.
At the start E has orthonormal columns and D = Eᵀ, a projection onto R directions; with R = D it is the identity up to rounding. The
directions are random, or by `fit` the principal ones of a sample of y, from which a projection onto R of them takes least.
"""

from collections.abc import Sequence
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from decjax.principal import principal

INITS = ("random", "pca")  # directions at the start


def init(key: jax.Array, count: int, width: int, narrow: int) -> dict[str, jax.Array]:
    """Initial parameters of the autoencoders of `count` boundaries, of width D = `width` and R = `narrow`: leaves [count, …]."""
    orthogonal = jax.nn.initializers.orthogonal()
    encoder_UxDxR = jax.vmap(lambda key: orthogonal(key, (width, narrow)))(jax.random.split(key, count))
    return {"encoder_DxR": encoder_UxDxR, "decoder_RxD": jnp.swapaxes(encoder_UxDxR, 1, 2)}


def fit(parts: Any, params: Any, layers: Sequence[int], tokens_PxBxT1: jax.Array) -> Any:
    """The parameters of a model from `insert`, with E_v the R principal directions of the activations y_v, and D_v = E_vᵀ.

    y_v is what group v of the layers sends when the encoders before it are in place already. The second moments are not centred, since
    there is no bias that could give a mean back. The published systems fit a trained model; here it is the given one, as a rule the one
    at its start.

    Args:
        parts: the model split up, a `models.Parts`.
        params: of the whole model.
        layers: how many layers each group has.
        tokens_PxBxT1: P batches of token sequences.

    Reference: Yu et al. 2024, arXiv 2405.18146, section 3 (of the outputs of layers).
    """
    pieces, narrow = parts.cut(params), params["autoencoder"]["encoder_DxR"].shape[-1]
    x_PxBxTxD = jax.lax.map(lambda tokens_BxT1: parts.embed(pieces.embedding_VxD, tokens_BxT1[:, :-1]), tokens_PxBxT1)
    encoders = []
    for start, end in itertools.pairwise(itertools.accumulate(layers[:-1], initial=0)):
        group = jax.tree.map(lambda leaf, start=start, end=end: leaf[start:end], pieces.blocks)
        y_PxBxTxD = jax.lax.map(lambda x_BxTxD, group=group: parts.blocks(group, x_BxTxD), x_PxBxTxD)
        encoder_DxR, _ = principal(y_PxBxTxD.reshape(-1, y_PxBxTxD.shape[-1]).astype(jnp.float32), narrow)
        x_PxBxTxD = apply(apply(y_PxBxTxD, encoder_DxR), encoder_DxR.T)
        encoders.append(encoder_DxR)
    encoder_UxDxR = jnp.stack(encoders)
    return params | {"autoencoder": {"encoder_DxR": encoder_UxDxR, "decoder_RxD": jnp.swapaxes(encoder_UxDxR, 1, 2)}}


def apply(x_BxTxD: jax.Array, weights_DxR: jax.Array) -> jax.Array:
    """Multiplies activations by an encoder or a decoder, in the activations' own dtype."""
    rows = x_BxTxD.reshape(-1, x_BxTxD.shape[-1]) @ weights_DxR.astype(x_BxTxD.dtype)
    return rows.reshape(*x_BxTxD.shape[:-1], -1)


def insert(model: Any, layers: Sequence[int], narrow: int) -> Any:
    """A `models.Model` that has parts, with autoencoders of width R = `narrow` between groups of so many of its layers each.

    Its parameters have an additional entry "autoencoder", whose directions are random.
    """
    width = model.parts.activation(1, 1).shape[-1]

    def init_all(key):
        return model.init(key) | {"autoencoder": init(jax.random.fold_in(key, 1), len(layers) - 1, width, narrow)}

    def between(params, x_BxTxD, v):
        encoder_UxDxR, decoder_UxRxD = (params["autoencoder"][name] for name in ("encoder_DxR", "decoder_RxD"))
        return apply(apply(x_BxTxD, encoder_UxDxR[v]), decoder_UxRxD[v])

    nll, logits = model.parts.functions(layers, between)
    return model._replace(init=init_all, nll=nll, logits=logits)
