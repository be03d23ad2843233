"""Learned linear autoencoders between virtual stages, which narrow the activations and gradients that are sent from D to R values.

    stage v    z = y E_v            z is sent forward
    stage v+1  x = z D_v            ∂z = ∂x D_vᵀ is sent back; then stage v takes ∂y = ∂z E_vᵀ

E_v (D×R) belongs to the stage that sends and D_v (R×D) to the one that receives. They are parameters of the model: trained by the
same optimizer, and part of evaluation and checkpoints. The gradients are the exact ones of that model, so no error is remembered.
At the start E has orthonormal columns and D = Eᵀ, a projection onto R random directions; with R = D it is the identity up to
rounding.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def init(key: jax.Array, count: int, width: int, narrow: int) -> dict[str, jax.Array]:
    """Initial parameters of the autoencoders of `count` boundaries, of width D = `width` and R = `narrow`: leaves [count, …]."""
    orthogonal = jax.nn.initializers.orthogonal()
    encoder_UxDxR = jax.vmap(lambda key: orthogonal(key, (width, narrow)))(jax.random.split(key, count))
    return {"encoder_DxR": encoder_UxDxR, "decoder_RxD": jnp.swapaxes(encoder_UxDxR, 1, 2)}


def apply(x_BxTxD: jax.Array, weights_DxR: jax.Array) -> jax.Array:
    """Multiplies activations by an encoder or a decoder, in the activations' own dtype."""
    rows = x_BxTxD.reshape(-1, x_BxTxD.shape[-1]) @ weights_DxR.astype(x_BxTxD.dtype)
    return rows.reshape(*x_BxTxD.shape[:-1], -1)


def insert(model: Any, layers: Sequence[int], narrow: int) -> Any:
    """A `models.Model` that has parts, with autoencoders of width R = `narrow` between groups of so many of its layers each.

    Its parameters have an additional entry "autoencoder".
    """
    width = model.parts.activation(1, 1).shape[-1]

    def init_all(key):
        return model.init(key) | {"autoencoder": init(jax.random.fold_in(key, 1), len(layers) - 1, width, narrow)}

    def between(params, x_BxTxD, v):
        encoder_UxDxR, decoder_UxRxD = (params["autoencoder"][name] for name in ("encoder_DxR", "decoder_RxD"))
        return apply(apply(x_BxTxD, encoder_UxDxR[v]), decoder_UxRxD[v])

    nll, logits = model.parts.functions(layers, between)
    return model._replace(init=init_all, nll=nll, logits=logits)
