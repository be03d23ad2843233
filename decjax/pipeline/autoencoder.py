"""Learned linear autoencoders between virtual stages, which narrow the activations and gradients that are sent from D to R values.

    stage v    z = y E_v            z is sent forward
    stage v+1  x = z D_v            ∂z = ∂x D_vᵀ is sent back; then stage v takes ∂y = ∂z E_vᵀ

E_v (D×R) belongs to the stage that sends and D_v (R×D) to the one that receives. They are parameters of the model: trained by the
same optimizer, and part of evaluation and checkpoints. Gradients are exact, so no compression error is remembered. Initially E has
orthonormal columns and D = Eᵀ, a projection onto R directions; with R = D it is the identity up to rounding. The directions are random,
or by `fit` the principal ones of a sample of y, which minimize the projection error.

Reference: Yu et al. 2024, arXiv 2405.18146, section 3 (principal directions of the outputs of layers, there of a trained model).
"""

from collections.abc import Callable, Sequence
import itertools
from typing import Protocol

import jax
import jax.numpy as jnp

from decjax.principal import principal
from decjax.typing import PyTree


class Divisible(Protocol):
    """A language model split up, to be divided into stages; `models.Parts` is one and describes the members."""

    @property
    def width(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    def cut(self, params: PyTree) -> PyTree: ...
    def join(self, embedding_VxD: jax.Array, blocks: PyTree, norm: PyTree, output_VxD: jax.Array) -> PyTree: ...
    def embed(self, embedding_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array: ...
    def blocks(self, blocks: PyTree, x_BxTxD: jax.Array) -> jax.Array: ...
    def nll(self, norm: PyTree, output_VxD: jax.Array, x_BxTxD: jax.Array, targets_BxT: jax.Array) -> jax.Array: ...
    def activation(self, batch_size: int, length: int) -> jax.ShapeDtypeStruct: ...
    def functions(self, groups: Sequence[int], between: Callable[..., jax.Array]) -> tuple[Callable, Callable]: ...


def init(key: jax.Array, count: int, width: int, narrow: int) -> dict[str, jax.Array]:
    """Return initial parameters of the autoencoders of `count` boundaries, with D = `width` and R = `narrow`: leaves [count, …]."""
    orthogonal = jax.nn.initializers.orthogonal()
    encoder_UxDxR = jax.vmap(lambda key: orthogonal(key, (width, narrow)))(jax.random.split(key, count))
    return {"encoder_DxR": encoder_UxDxR, "decoder_RxD": jnp.swapaxes(encoder_UxDxR, 1, 2)}


def fit(parts: Divisible, params: PyTree, layers: Sequence[int], tokens_PxBxT1: jax.Array) -> PyTree:
    """Return the parameters of a model from `insert`, with E_v the R principal directions of the activations y_v, and D_v = E_vᵀ.

    y_v is the output of group v of the layers, with the encoders before it already in place. The second moments are not centered, since
    there is no bias that could restore a mean.

    Args:
        parts: the model split up.
        params: of the whole model.
        layers: number of layers of each group.
        tokens_PxBxT1: P batches of token sequences.
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
    """Multiply activations by an encoder or a decoder, in the activations' dtype."""
    rows = x_BxTxD.reshape(-1, x_BxTxD.shape[-1]) @ weights_DxR.astype(x_BxTxD.dtype)
    return rows.reshape(*x_BxTxD.shape[:-1], -1)


def insert(model: PyTree, layers: Sequence[int], narrow: int) -> PyTree:
    """Return a `models.Model` with parts, with autoencoders of width R = `narrow` between groups of its layers, of these sizes.

    Its parameters have an additional entry "autoencoder", whose directions are random.
    """
    width = model.parts.width

    def init_all(key):
        return model.init(key) | {"autoencoder": init(jax.random.fold_in(key, 1), len(layers) - 1, width, narrow)}

    def between(params, x_BxTxD, v):
        encoder_UxDxR, decoder_UxRxD = (params["autoencoder"][name] for name in ("encoder_DxR", "decoder_RxD"))
        return apply(apply(x_BxTxD, encoder_UxDxR[v]), decoder_UxRxD[v])

    nll, logits = model.parts.functions(layers, between)
    return model._replace(init=init_all, nll=nll, logits=logits)
