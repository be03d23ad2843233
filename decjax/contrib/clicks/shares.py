"""Which worker owns which embedding table, and where: tables as they lie in a whole model, in a worker's array, and in messages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TABLES = "tables"  # their place in the parameters


@dataclasses.dataclass(frozen=True)
class Shares:
    """Which worker owns which table, and where: table t is slot t div N of worker t mod N.

    Attributes:
        sizes: V_t, rows of each table.
        num_workers: N.
    """

    sizes: tuple[int, ...]
    num_workers: int

    @property
    def slots(self) -> int:
        """P, tables of the worker with the most."""
        return -(-len(self.sizes) // self.num_workers)

    @property
    def first_NxP(self) -> np.ndarray:
        """The first row of each slot in its owner's array; past its last row for a slot without a table."""
        padded = np.array([*self.sizes, *[0] * (self.slots * self.num_workers - len(self.sizes))])
        rows_NxP = padded.reshape(self.slots, self.num_workers).T
        return (np.cumsum(rows_NxP, axis=1) - rows_NxP).astype(np.int32)

    @property
    def held_NxP(self) -> np.ndarray:
        """Whether a slot has a table."""
        return (np.arange(self.slots * self.num_workers) < len(self.sizes)).reshape(self.slots, self.num_workers).T

    @property
    def rows(self) -> int:
        """R, rows of the longest array."""
        return max(sum(self.sizes[owner :: self.num_workers]) for owner in range(self.num_workers))

    def by_owner(self, x_T: Any, axis: int = 0) -> Any:
        """Values by table, along an axis, as values [N, P, …] by owner and slot; zeros for slots without a table."""
        x_T = jnp.moveaxis(jnp.asarray(x_T), axis, 0)
        padded = jnp.pad(x_T, [(0, self.slots * self.num_workers - len(x_T)), *[(0, 0)] * (x_T.ndim - 1)])
        return padded.reshape(self.slots, self.num_workers, *x_T.shape[1:]).swapaxes(0, 1)

    def by_table(self, x_NxP: jax.Array) -> jax.Array:
        """The inverse: [T, …]."""
        return x_NxP.swapaxes(0, 1).reshape(-1, *x_NxP.shape[2:])[: len(self.sizes)]

    def deal(self, params: Any) -> Any:
        """A whole model's parameters as those of all workers, [N, …]: own tables in one array, a copy of all else."""
        N, tables = self.num_workers, [params[TABLES][t]["embedding"] for t in range(len(self.sizes))]
        own = [jnp.concatenate(tables[n::N] or [tables[0][:0]]) for n in range(N)]
        rows_NxRxD = jnp.stack([jnp.pad(x, ((0, self.rows - len(x)), (0, 0))) for x in own])
        rest = {name: part for name, part in params.items() if name != TABLES}
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (N, *x.shape)), rest) | {TABLES: rows_NxRxD}

    def gather(self, params: Any) -> Any:
        """The parameters of all workers, [N, …], as N whole models, each with all tables."""
        N, rows_NxRxD = self.num_workers, params[TABLES]
        tables = {}
        for t, size in enumerate(self.sizes):
            first = int(self.first_NxP[t % N, t // N])
            table_VxD = rows_NxRxD[t % N, first : first + size]
            tables[t] = {"embedding": jnp.broadcast_to(table_VxD, (N, *table_VxD.shape))}
        return params | {TABLES: tables}
