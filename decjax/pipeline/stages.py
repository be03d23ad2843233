"""A model divided into pipeline stages: the layers and tables of each stage, and the average of a tied table, which two stages hold.

The layers are cut into S·C consecutive groups, the virtual stages; stage s holds groups s, S + s, 2S + s, …, its C chunks. All
stages run one program, so they hold arrays of the same shapes:

    blocks       leaves [C, K, …], K the size of the largest group; smaller ones are padded with zeros
    table_VxD    the embedding on the first stage, the output on the last, zeros between; if they are tied, both hold the same table
    norm         on the last stage, zeros elsewhere
    autoencoder  if there is one: leaves [C, …], decoders of the chunks' inputs and encoders of their outputs, zeros at the ends

Stacked over stages they are [S, …]; `Division.split` makes them from a whole model's parameters, and `join` is its inverse.

If a table is tied, the first and the last stage of each of N workers have a part of its gradient each; both need the sum over the two
stages of the mean over workers. For a table of V bytes each of these stages sends

    apart    the sum of the two stages, V; the mean over workers, 2(N−1)/N·V                                  V(3N−2)/N
    fused    the other's half of the columns, V/2; the mean of its own half, 2(N−1)/N·V/2; that half, V/2     V(2N−1)/N

"Fused" sends as much as one ring over all 2N stages would, without a group over both mesh axes. Columns are halved, not rows, because
rows are divided between the devices of a tensor-parallel group. The table's gradient is never compressed, so that both copies stay
equal even if the two stages compress everything else differently.

Reference: Song et al. 2023, arXiv 2301.09830 (Optimus-CC), for fused embedding synchronization.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh, reduce
from decjax.channel import Channel
from decjax.options import Range, check_range
from decjax.pipeline import autoencoder as autoencoder_lib
from decjax.pipeline.autoencoder import Divisible
from decjax.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Division:
    """A model divided into pipeline stages.

    Attributes:
        parts: the model split up.
        num_stages: S.
        num_chunks: C, groups of layers on each stage.
        layers: number of layers of each of the S·C groups.
        autoencoder: R, the width of messages between stages; 0: that of the model. See `pipeline.autoencoder`.
        fused_embedding: average a tied table in the form "fused" above, not "apart".
    """

    parts: Divisible
    num_stages: int
    num_chunks: int
    layers: tuple[int, ...]
    autoencoder: int = 0
    fused_embedding: bool = False

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray, ...]:
        """Stage, chunk and position of each layer."""
        places = [(v % self.num_stages, v // self.num_stages, k) for v, count in enumerate(self.layers) for k in range(count)]
        return tuple(np.array(places).T)

    def _at_boundaries(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(stages, chunks) that hold each boundary's encoder, or its decoder, by `name`."""
        v = np.arange(len(self.layers) - 1) + (name == "decoder_RxD")
        return v % self.num_stages, v // self.num_stages

    def split(self, params: PyTree) -> dict[str, PyTree]:
        """Return the stages' parameters, leaves [S, …], from those of a whole model."""
        pieces, last = self.parts.cut(params), self.num_stages - 1
        S, C, K = self.num_stages, self.num_chunks, max(self.layers)

        def placed(rows, at, *sizes):
            """Zeros of these sizes, with the rows at these places."""
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

    def join(self, stacked: dict[str, PyTree]) -> PyTree:
        """Return the parameters of a whole model, the inverse of `split`."""
        last, table_SxVxD = self.num_stages - 1, stacked["table_VxD"]
        blocks = jax.tree.map(lambda x: x[self._places], stacked["blocks"])
        params = self.parts.join(table_SxVxD[0], blocks, jax.tree.map(lambda x: x[last], stacked["norm"]), table_SxVxD[last])
        if self.autoencoder:
            params["autoencoder"] = {name: x[self._at_boundaries(name)] for name, x in stacked["autoencoder"].items()}
        return params

    def complete(self, model: PyTree) -> PyTree:
        """Return the whole `models.Model` that corresponds to this division: with autoencoders inserted if it has them."""
        return autoencoder_lib.insert(model, self.layers, self.autoencoder) if self.autoencoder else model

    def activation(self, batch_size: int, length: int) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of a stage's activations, [B, T, D]."""
        return self.parts.activation(batch_size, length)

    def narrow(self, x_BxTxD: jax.Array) -> jax.Array:
        """Return the part of a stage's output that is sent: with autoencoders its first R columns (the others are zeros), else all."""
        return x_BxTxD[..., : self.autoencoder] if self.autoencoder else x_BxTxD

    def widen(self, x_BxTxR: jax.Array, width: int) -> jax.Array:
        """Return a narrowed message padded with zeros to the model's width, so that all messages in a buffer have one shape."""
        if not self.autoencoder:
            return x_BxTxR
        return jnp.pad(x_BxTxR, [*[(0, 0)] * (x_BxTxR.ndim - 1), (0, width - x_BxTxR.shape[-1])])

    def run(self, chunk: dict[str, PyTree], x_BxTxD: jax.Array, stage: jax.Array, number: jax.Array) -> jax.Array:
        """Return the output of chunk `number` of a stage; an autoencoder decodes its input and encodes its output."""
        layers = jnp.asarray(np.reshape(self.layers, (self.num_chunks, self.num_stages)).T)[stage, number]
        if not self.autoencoder:
            return self._through(chunk["blocks"], x_BxTxD, layers)
        # Whole on every device of a tensor-parallel group: slicing divided columns would add a collective to a branch.
        codes, x_BxTxD = jax.tree.map(lambda x: mesh.divide(x, None), (chunk["autoencoder"], x_BxTxD))
        virtual = number * self.num_stages + stage
        decoded_BxTxD = mesh.divide(autoencoder_lib.apply(self.narrow(x_BxTxD), codes["decoder_RxD"]), None)
        y_BxTxD = self._through(chunk["blocks"], jnp.where(virtual == 0, x_BxTxD, decoded_BxTxD), layers)
        encoded_BxTxR = mesh.divide(autoencoder_lib.apply(mesh.divide(y_BxTxD, None), codes["encoder_DxR"]), None)
        encoded_BxTxD = self.widen(encoded_BxTxR, y_BxTxD.shape[-1])
        return jnp.where(virtual == len(self.layers) - 1, y_BxTxD, encoded_BxTxD)

    def _through(self, blocks: PyTree, x_BxTxD: jax.Array, layers: jax.Array) -> jax.Array:
        """The output of the first `layers` of a chunk's layers."""
        if len(set(self.layers)) == 1:
            return self.parts.blocks(blocks, x_BxTxD)

        def step(x, inputs):
            block, k = inputs
            through = lambda x: self.parts.blocks(jax.tree.map(lambda leaf: leaf[None], block), x)
            return jax.lax.cond(k < layers, through, lambda x: x, x), None

        return jax.lax.scan(step, x_BxTxD, (blocks, jnp.arange(max(self.layers))))[0]

    def global_norm(self, tree: dict[str, PyTree]) -> jax.Array:
        """Return the ℓ2 norm of a whole tree like the parameters from one stage's part; a tied table counts once. A collective."""
        table_VxD = tree["table_VxD"]
        if self.parts.tied:
            table_VxD = jnp.where(mesh.STAGES.index == 0, table_VxD, jnp.zeros_like(table_VxD))
        squares = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree | {"table_VxD": table_VxD}))
        return jnp.sqrt(mesh.STAGES.sum(jnp.asarray(squares)))

    def sum_tied(self, grads: dict[str, PyTree]) -> dict[str, PyTree]:
        """Return the gradients, with that of a tied table summed over its two stages unless `fused_embedding`: then the average does."""
        if not self.parts.tied or self.fused_embedding:
            return grads
        return grads | {"table_VxD": grads["table_VxD"] + self.swap(grads["table_VxD"])}

    @property
    def ends(self) -> tuple[int, int]:
        """Indices of the stages that hold a table: the first (the embedding) and the last (the output)."""
        return 0, self.num_stages - 1

    @property
    def permutations(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Pairs (source, target) of the exchange between the two stages of a tied table; empty if nothing is tied."""
        first, last = self.ends
        return (((first, last), (last, first)),) if self.parts.tied else ()

    def swap(self, x: jax.Array) -> jax.Array:
        """Return `x` of the other of the two stages of a tied table; zeros on stages between them. A collective."""
        return mesh.STAGES.exchange(x, self.permutations[0])


def divide(
    parts: Divisible | None,
    stages: int,
    chunks: int = 1,
    layers: Sequence[int] = (),
    *,
    autoencoder: int = 0,
    fused_embedding: bool = False,
) -> Division:
    """Divide a model into pipeline stages.

    Args:
        parts: the model split up; None stands for a model that cannot be divided.
        stages: S ≥ 2.
        chunks: C ≥ 1.
        layers: number of layers of each of the S·C virtual stages, in the order of computation; empty: equally many.
        autoencoder: see `Division`; at most the width of the model.
        fused_embedding: see `Division`; only for a model with a tied embedding.

    Raises:
        ValueError: if the model cannot be divided, or not in this way.
    """
    if parts is None:
        raise ValueError(f"pipeline.stages={stages}: this model cannot be divided into stages; use stages=1, or model 'decoder'")
    check_range("stages", stages, Range(2))
    check_range(f"model width={parts.width}: autoencoder", autoencoder, Range(0, parts.width))
    count, depth = stages * chunks, parts.depth
    what = f"stages={stages}" + (f" x chunks={chunks}" if chunks > 1 else "")
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
        raise ValueError("fused_embedding=True needs a tied embedding; leave it out, or use model.tied=True")
    return Division(parts, stages, chunks, layers, autoencoder, fused_embedding)


# -- The average of a tied table --------------------------------------------------------------------------------------

TABLE = "table_VxD"


def tied_tables(division: Division | None) -> tuple[str, ...]:
    """Return the names of parameters that two stages share; each is compressed separately, so that both copies get equal messages."""
    return (TABLE,) if division and division.parts.tied else ()


def with_tied_table(reducer: reduce.Reducer, division: Division, channel: Channel = Channel()) -> reduce.Reducer:
    """Return a reducer for a divided model that averages a tied table separately, uncompressed; `reducer` itself if nothing is tied.

    Its number of bytes is a mean over stages of the bytes that they send to other workers.

    Args:
        reducer: averages everything else.
        division: of the model.
        channel: the worker axis and the message format of the table.
    """
    return _WithTable(channel, reducer=reducer, division=division) if division.parts.tied else reducer


class _WithTable(reduce.WrappedReducer):
    _: dataclasses.KW_ONLY
    division: Division

    def _average(self, table_VxD: jax.Array) -> jax.Array:
        division, average = self.division, self.channel.axis.sent_by(self.division.ends).mean  # Elsewhere the gradient is zero.
        if not division.fused_embedding:
            return average(table_VxD)
        is_first = mesh.STAGES.index == division.ends[0]
        left, right = jnp.split(table_VxD, 2, axis=1)
        own = average(jnp.where(is_first, left, right) + division.swap(jnp.where(is_first, right, left)))
        other = division.swap(own)
        return jnp.concatenate([jnp.where(is_first, own, other), jnp.where(is_first, other, own)], axis=1)

    def init(self, params):
        return super().init(_without(params, TABLE))

    def reduce(self, grads, state, phase=None):
        table_VxD = self._average(grads[TABLE])
        averaged, state = super().reduce(_without(grads, TABLE), state, phase)
        return averaged | {TABLE: table_VxD}, state

    def num_bytes(self, params, num_workers, phase=None):
        division, table = self.division, params[TABLE]
        share = (0.5 if division.fused_embedding else 1.0) * len(division.ends) / division.num_stages
        own = share * mesh.mean_bytes(table.size, table.dtype, num_workers)
        return super().num_bytes(_without(params, TABLE), num_workers, phase) + np.full(num_workers, own)


def _without(tree: PyTree, name: str) -> PyTree:
    return {key: part for key, part in tree.items() if key != name}
