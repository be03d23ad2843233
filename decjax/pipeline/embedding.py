"""The gradient average of a tied embedding (one table for embedding and output), which the first and the last stage both hold.

The two stages of each of N workers have a part of its gradient each; both need the sum over the two stages of the mean over
workers. For a table of V bytes each holder sends

    apart    the sum of the two stages, V; the mean over workers, 2(N−1)/N·V                                  V(3N−2)/N
    fused    the other's half of the columns, V/2; the mean of its own half, 2(N−1)/N·V/2; that half, V/2     V(2N−1)/N

"Fused" sends as much as one ring over all 2N holders would, without a group over both mesh axes. Columns are halved, not rows,
because rows are divided between the devices of a tensor-parallel group. Stages between the two send nothing. The table's gradient
is never compressed, so that both copies stay equal even if the two stages compress all else differently.

Reference: arXiv 2301.09830 (Optimus-CC), fused embedding synchronization.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh, reduce
from decjax.channel import Channel
from decjax.pipeline import stages
from decjax.typing import PyTree

TABLE = "table_VxD"


def tied_tables(division: stages.Division | None) -> tuple[str, ...]:
    """Names of the parameters that two stages share; each is compressed by itself, so that both copies get equal messages."""
    return (TABLE,) if division and division.parts.tied else ()


def with_tied_table(reducer: reduce.Reducer, division: stages.Division, channel: Channel = Channel()) -> reduce.Reducer:
    """A reducer for a divided model that averages a tied table separately, uncompressed; `reducer` itself if nothing is tied.

    The bytes that it declares are a mean over stages, of what they send to other workers.

    Args:
        reducer: averages everything else.
        division: of the model; its `fused_embedding` says which of the two ways above is used.
        channel: the worker axis and the message format of the table.
    """
    if not division.parts.tied:
        return reducer

    return _WithTable(channel, reducer=reducer, division=division)


class _WithTable(reduce.WrappedReducer):
    _: dataclasses.KW_ONLY
    division: stages.Division

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
