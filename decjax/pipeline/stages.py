"""A model divided into pipeline stages: which layers and tables each stage holds.

The layers are cut into S·C consecutive groups, the virtual stages; stage s holds groups s, S + s, 2S + s, …, its C chunks. All
stages run one program, so they hold arrays of the same shapes:

    blocks       leaves [C, K, …], K the size of the largest group; smaller ones are padded with zeros
    table_VxD    the embedding on the first stage, the output on the last, zeros between; tied, both hold the same table
    norm         on the last stage, zeros elsewhere
    autoencoder  if there is one: leaves [C, …], decoders of the chunks' inputs and encoders of their outputs, zeros at the ends

Stacked over stages they are [S, …]; `Division.split` makes them from a whole model's parameters, and `join` is its inverse.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh
from decjax.pipeline import autoencoder as autoencoder_lib


@dataclasses.dataclass(frozen=True)
class Division:
    """A model divided into pipeline stages.

    Attributes:
        parts: the model split up, a `models.Parts`.
        num_stages: S.
        num_chunks: C, groups of layers on each stage.
        layers: how many layers each of the S·C groups has.
        autoencoder: R, the width of what is sent between stages; 0: that of the model. See `pipeline.autoencoder`.
        fused_embedding: do not add up the two gradients of a tied table here; the average over workers does (`pipeline.embedding`).
    """

    parts: Any
    num_stages: int
    num_chunks: int
    layers: tuple[int, ...]
    autoencoder: int = 0
    fused_embedding: bool = False

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray, ...]:
        """Stage, chunk and position of each layer."""
        places = [(v % self.num_stages, v // self.num_stages, k) for v, run in enumerate(self.layers) for k in range(run)]
        return tuple(np.array(places).T)

    def _at_boundaries(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(stages, chunks) that hold each boundary's encoder, or its decoder, by `name`."""
        v = np.arange(len(self.layers) - 1) + (name == "decoder_RxD")
        return v % self.num_stages, v // self.num_stages

    def split(self, params: Any) -> dict[str, Any]:
        """The stages' parameters, leaves [S, …], from a whole model's."""
        pieces, last = self.parts.cut(params), self.num_stages - 1
        S, C, K = self.num_stages, self.num_chunks, max(self.layers)

        def placed(rows, at, *sizes):
            """Zeros of these sizes, with the rows put at these places."""
            return jnp.zeros_like(rows, shape=(*sizes, *rows.shape[1:])).at[at].set(rows)

        def zeros(x):
            return jnp.zeros_like(x, shape=(S, *x.shape))

        stacked = {
            "blocks": jax.tree.map(lambda x: placed(x, self._places, S, C, K), pieces.blocks),
            "norm": jax.tree.map(lambda x: zeros(x).at[last].set(x), pieces.norm),
            "table_VxD": zeros(pieces.embedding_VxD).at[0].set(pieces.embedding_VxD).at[last].set(pieces.output_VxD),
        }
        if self.autoencoder:
            codes = params["autoencoder"].items()
            stacked["autoencoder"] = {name: placed(x, self._at_boundaries(name), S, C) for name, x in codes}
        return stacked

    def join(self, stacked: dict[str, Any]) -> Any:
        """A whole model's parameters, from the stages', leaves [S, …]."""
        last, table_SxVxD = self.num_stages - 1, stacked["table_VxD"]
        blocks = jax.tree.map(lambda x: x[self._places], stacked["blocks"])
        params = self.parts.join(table_SxVxD[0], blocks, jax.tree.map(lambda x: x[last], stacked["norm"]), table_SxVxD[last])
        if self.autoencoder:
            params["autoencoder"] = {name: x[self._at_boundaries(name)] for name, x in stacked["autoencoder"].items()}
        return params

    def complete(self, model: Any) -> Any:
        """The whole `models.Model` that corresponds to this division: with autoencoders inserted if it has them."""
        return autoencoder_lib.insert(model, self.layers, self.autoencoder) if self.autoencoder else model

    def activation(self, batch_size: int, length: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a stage's activations, [B, T, D]."""
        return self.parts.activation(batch_size, length)

    def narrow(self, x_BxTxD: jax.Array) -> jax.Array:
        """The part of a stage's output that is sent: with autoencoders its first R columns (the others are zeros), else all."""
        return x_BxTxD[..., : self.autoencoder] if self.autoencoder else x_BxTxD

    def widen(self, x_BxTxR: jax.Array, width: int) -> jax.Array:
        """What was sent by `narrow`, padded with zeros to the model's width, so that all messages in a buffer have one shape."""
        if not self.autoencoder:
            return x_BxTxR
        return jnp.pad(x_BxTxR, [*[(0, 0)] * (x_BxTxR.ndim - 1), (0, width - x_BxTxR.shape[-1])])

    def run(self, chunk: dict[str, Any], x_BxTxD: jax.Array, stage: jax.Array, number: jax.Array) -> jax.Array:
        """The output of chunk `number` of a stage; an autoencoder decodes its input and encodes its output."""
        layers = jnp.asarray(np.reshape(self.layers, (self.num_chunks, self.num_stages)).T)[stage, number]
        if not self.autoencoder:
            return self._through(chunk["blocks"], x_BxTxD, layers)
        # Whole on every device of a tensor-parallel group: cutting off columns that are divided would add a collective to a branch.
        codes, x_BxTxD = jax.tree.map(lambda x: mesh.divide(x, None), (chunk["autoencoder"], x_BxTxD))
        virtual = number * self.num_stages + stage
        decoded_BxTxD = mesh.divide(autoencoder_lib.apply(self.narrow(x_BxTxD), codes["decoder_RxD"]), None)
        y_BxTxD = self._through(chunk["blocks"], jnp.where(virtual == 0, x_BxTxD, decoded_BxTxD), layers)
        encoded_BxTxR = mesh.divide(autoencoder_lib.apply(mesh.divide(y_BxTxD, None), codes["encoder_DxR"]), None)
        encoded_BxTxD = self.widen(encoded_BxTxR, y_BxTxD.shape[-1])
        return jnp.where(virtual == len(self.layers) - 1, y_BxTxD, encoded_BxTxD)

    def _through(self, blocks: Any, x_BxTxD: jax.Array, layers: jax.Array) -> jax.Array:
        """The output of the first `layers` of a chunk's layers."""
        if len(set(self.layers)) == 1:
            return self.parts.blocks(blocks, x_BxTxD)

        def step(x, inputs):
            block, k = inputs
            through = lambda x: self.parts.blocks(jax.tree.map(lambda leaf: leaf[None], block), x)
            return jax.lax.cond(k < layers, through, lambda x: x, x), None

        return jax.lax.scan(step, x_BxTxD, (blocks, jnp.arange(max(self.layers))))[0]

    def global_norm(self, tree: dict[str, Any]) -> jax.Array:
        """The ℓ2 norm of a whole tree like the parameters, from one stage's part of it; a tied table counts once. A collective."""
        table_VxD = tree["table_VxD"]
        if self.parts.tied:
            table_VxD = jnp.where(mesh.STAGES.index == 0, table_VxD, jnp.zeros_like(table_VxD))
        own: Any = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree | {"table_VxD": table_VxD}))
        return jnp.sqrt(mesh.STAGES.sum(own))

    def sum_tied(self, grads: dict[str, Any]) -> dict[str, Any]:
        """The gradients, with a tied table's summed over its two stages unless `fused_embedding` leaves that to the average."""
        if not self.parts.tied or self.fused_embedding:
            return grads
        return grads | {"table_VxD": grads["table_VxD"] + self.swap(grads["table_VxD"])}

    @property
    def ends(self) -> tuple[int, int]:
        """Indices of the stages that hold a table: of the first (the embedding) and the last (the output)."""
        return 0, self.num_stages - 1

    @property
    def permutations(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Pairs (source, target) of the exchange between the two stages of a tied table; empty if nothing is tied."""
        first, last = self.ends
        return (((first, last), (last, first)),) if self.parts.tied else ()

    def swap(self, x: jax.Array) -> jax.Array:
        """The value of `x` at the other of the two stages of a tied table; zeros on stages between them. A collective."""
        return mesh.STAGES.exchange(x, self.permutations[0])


def divide(
    parts: Any, stages: int, chunks: int = 1, layers: Sequence[int] = (), *, autoencoder: int = 0, fused_embedding: bool = False
) -> Division:
    """Divides a model into pipeline stages.

    Args:
        parts: the model split up, a `models.Parts`; None stands for a model that cannot be divided.
        stages: S ≥ 2.
        chunks: C ≥ 1.
        layers: how many layers each of the S·C virtual stages has, in the order of computation; empty: equally many.
        autoencoder: see `Division`; at most the width of the model.
        fused_embedding: see `Division`; only for a model with a tied embedding.

    Raises:
        ValueError: if the model cannot be divided, or not in this way.
    """
    if parts is None:
        raise ValueError(f"pipeline.stages={stages}: this model cannot be divided into stages; use stages=1, or model 'decoder'")
    count, depth = stages * chunks, parts.depth
    what = f"stages={stages}" + (f" x chunks={chunks}" if chunks > 1 else "")
    if stages < 2:
        raise ValueError(f"stages={stages}: a pipeline has at least 2")
    if not layers and depth % count:
        fits = sorted({max(1, depth // count) * count, (depth // count + 1) * count})
        raise ValueError(
            f"depth={depth} layers do not divide evenly into {what}; use depth={' or '.join(map(str, fits))}, or "
            f"give the layers of each of {count} virtual stages"
        )
    layers = tuple(layers) or (depth // count,) * count
    if len(layers) != count or sum(layers) != depth or min(layers) < 1:
        raise ValueError(
            f"layers={','.join(map(str, layers))}: must be {count} numbers, one for each virtual stage of {what}, at "
            f"least 1 each, which add up to depth={depth}"
        )
    if fused_embedding and not parts.tied:
        raise ValueError(
            "fused_embedding: an embedding and a head that are not tied have nothing to add up; leave it out, or tie them"
        )
    width = parts.activation(1, 1).shape[-1]
    if not 0 <= autoencoder <= width:
        raise ValueError(f"autoencoder={autoencoder}: must be at most the model's width of {width}, or 0 for none")
    return Division(parts, stages, chunks, layers, autoencoder, fused_embedding)
