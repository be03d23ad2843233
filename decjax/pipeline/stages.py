"""A model divided into stages: which layers, and which of its ends, live where.

Layers are cut into S·C consecutive runs, the virtual stages; stage s holds runs s, S + s, 2S + s, …, its C chunks. All stages
run one program, so they hold arrays of the same shapes:

    blocks       leaves [C, K, …], K the longest run; zeros behind shorter ones
    table_VxD    the embedding on the first stage, the output on the last, zeros between; both hold the same table if they are tied
    norm         on the last stage, zeros elsewhere

Stacked over stages they are [S, …], and `split` and `join` carry a whole model's parameters there and back.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh


@dataclasses.dataclass(frozen=True)
class Division:
    """A model divided into stages.

    Attributes:
        parts: the model in pieces, a `models.Parts`.
        num_stages: S.
        num_chunks: C, runs of layers on each stage.
        layers: layers in each of the S·C runs.
    """

    parts: Any
    num_stages: int
    num_chunks: int
    layers: tuple[int, ...]

    @property
    def longest(self) -> int:
        """K, layers of the longest run."""
        return max(self.layers)

    @property
    def is_even(self) -> bool:
        return len(set(self.layers)) == 1

    @property
    def layers_SxC(self) -> np.ndarray:
        """Layers of each chunk of each stage."""
        return np.reshape(self.layers, (self.num_chunks, self.num_stages)).T

    @functools.cached_property
    def _places(self) -> np.ndarray:
        """[L, 3]: stage, chunk and position of each layer."""
        return np.array([(v % self.num_stages, v // self.num_stages, k) for v, run in enumerate(self.layers) for k in range(run)])

    def split(self, params: Any) -> dict[str, Any]:
        """From a whole model's parameters to stages', leaves [S, …]."""
        pieces, last = self.parts.cut(params), self.num_stages - 1
        stage, chunk, position = self._places.T
        empty = self.num_stages, self.num_chunks, self.longest
        embedding_VxD = pieces.embedding_VxD
        zeros = functools.partial(jnp.zeros, dtype=embedding_VxD.dtype)
        return {
            "blocks": jax.tree.map(lambda x: jnp.zeros((*empty, *x.shape[1:]), x.dtype).at[stage, chunk, position].set(x),
                                   pieces.blocks),
            "norm": jax.tree.map(lambda x: jnp.zeros((self.num_stages, *x.shape), x.dtype).at[last].set(x), pieces.norm),
            "table_VxD": zeros((self.num_stages, *embedding_VxD.shape)).at[0].set(embedding_VxD).at[last].set(pieces.output_VxD)}

    def join(self, stacked: dict[str, Any]) -> Any:
        """From stages' parameters, leaves [S, …], to a whole model's."""
        last = self.num_stages - 1
        table_SxVxD = stacked["table_VxD"]
        return self.parts.join(
            table_SxVxD[0], jax.tree.map(lambda x: x[tuple(self._places.T)], stacked["blocks"]),
            jax.tree.map(lambda x: x[last], stacked["norm"]), table_SxVxD[last])

    def activation(self, batch_size: int, length: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of what travels between stages, [B, T, D]."""
        return self.parts.activation(batch_size, length)

    def run(self, blocks: Any, x_BxTxD: jax.Array, layers: jax.Array) -> jax.Array:
        """Through one chunk, leaves [K, …], of which the first `layers` count."""
        if self.is_even:
            return self.parts.blocks(blocks, x_BxTxD)

        def step(x, inputs):
            block, k = inputs
            through = lambda x: self.parts.blocks(jax.tree.map(lambda leaf: leaf[None], block), x)
            return jax.lax.cond(k < layers, through, lambda x: x, x), None

        return jax.lax.scan(step, x_BxTxD, (blocks, jnp.arange(self.longest)))[0]

    def global_norm(self, tree: dict[str, Any]) -> jax.Array:
        """The ℓ2 norm, over all stages, of one stage's share of a tree like the parameters; a tied table counts once."""
        tables = tree["table_VxD"]
        if self.parts.tied:
            tables = jnp.where(mesh.stage_index() == 0, tables, jnp.zeros_like(tables))
        counted = tree | {"table_VxD": tables}
        return jnp.sqrt(mesh.sum_over_stages(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(counted))))

    def sum_tied(self, grads: dict[str, Any]) -> dict[str, Any]:
        """Adds up a tied table's gradients, those of reading it on the first stage and those of the output on the last."""
        if not self.parts.tied:
            return grads
        last = self.num_stages - 1
        arrived_VxD = mesh.exchange(grads["table_VxD"], [(0, last), (last, 0)], mesh.STAGE)
        return grads | {"table_VxD": grads["table_VxD"] + arrived_VxD}


def divide(parts: Any, num_stages: int, num_chunks: int = 1, layers: Sequence[int] = ()) -> Division:
    """Divides a model into stages.

    Args:
        parts: the model in pieces, a `models.Parts`.
        num_stages: S ≥ 2.
        num_chunks: C ≥ 1.
        layers: layers of each virtual stage in the order of computation; empty: equally many.

    Returns:
        The `Division`.

    Raises:
        ValueError: if layers do not divide, or the given ones are not those of the model.
    """
    count, depth = num_stages * num_chunks, parts.depth
    what = f"stages={num_stages}" + (f" x chunks={num_chunks}" if num_chunks > 1 else "")
    if num_stages < 2:
        raise ValueError(f"stages={num_stages}: a pipeline has at least 2")
    if not layers and depth % count:
        fits = sorted({max(1, depth // count) * count, (depth // count + 1) * count})
        raise ValueError(f"depth={depth} layers do not divide evenly into {what}; use depth={' or '.join(map(str, fits))}, or "
                         f"give the layers of each of {count} virtual stages")
    layers = tuple(layers) or (depth // count,) * count
    if len(layers) != count or sum(layers) != depth or min(layers) < 1:
        raise ValueError(f"layers={','.join(map(str, layers))}: must be {count} numbers, one for each virtual stage of {what}, at "
                         f"least 1 each, which add up to depth={depth}")
    return Division(parts, num_stages, num_chunks, layers)
