"""An axis of the mesh, and the collectives along it."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from decjax.program import hlo
from decjax.typing import DType, PyTree

NODE, LOCAL, STAGE, WORKER, TENSOR = "node", "local", "stage", "worker", "tensor"


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis that a function is mapped over, and the collectives by which it exchanges arrays along it.

    Attributes:
        name: as in `jax.shard_map` or `jax.vmap`; several names form one axis, of which the last varies fastest. None: the worker
            axis over which `Workers.map` maps the function that uses it, `WORKERS` or `SIMULATED`.
        senders: pipeline stages that send; None: all. See `sent_by`.
    """

    name: str | tuple[str, ...] | None = None
    senders: tuple[int, ...] | None = None

    @property
    def index(self) -> jax.Array:
        """This worker's index, 0 … N − 1, as a traced int32 scalar."""
        return jax.lax.axis_index(self.mapped)

    def indexed(self, fn: Callable) -> Callable:
        """Return `fn(*args)` as a function of (index, *args), for callers that trace it here and run it elsewhere.

        An axis whose index is an argument of the program takes it from there.
        """
        return lambda index, *args: fn(*args)

    @property
    def size(self) -> int:
        """N, the number of workers on the axis, as a static int; ValueError outside a function that is mapped over it."""
        return jax.lax.axis_size(self.mapped)

    @property
    def known_size(self) -> int | None:
        """`size`; None outside a function that is mapped over the axis."""
        with contextlib.suppress(ValueError):
            return self.size
        return None

    @property
    def mapped(self) -> str | tuple[str, ...]:
        """The name that collectives take; ValueError outside a function that is mapped over it."""
        for name in ((NODE, LOCAL), WORKER) if self.name is None else (self.name,):
            with contextlib.suppress(NameError):
                jax.lax.axis_size(name)
                return name
        raise ValueError(
            f"worker axis{'' if self.name is None else f' {self.name!r}'} is not mapped here: call this in a function "
            "mapped over workers, such as workers.jit(tx.init, in_axes=(0,))(workers.stack(params)); a "
            "channel needs axis=workers.axis or the default"
        )

    def sent_by(self, stages: Sequence[int]) -> "Axis":
        """This axis with only the given pipeline stages sending; on the other stages means and gathers return arbitrary values.

        Only the collective is conditional, not what is computed for it: the compiler may divide that between the devices of a
        tensor-parallel group, and some of its messages wait for all devices. All workers of a stage take the same branch, so their
        collective is complete. It is traced within `hlo.counted`, from which bytes are counted.
        `exchange`, `sum`, `scatter_mean` and `gather` are not conditional, and raise a RuntimeError on such an axis.
        """
        return dataclasses.replace(self, senders=tuple(stages))

    @property
    def _simulated(self) -> bool:
        names = (self.mapped,) if isinstance(self.mapped, str) else self.mapped
        return not set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)

    def exchange(self, x: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """Return the array that arrives along a partial permutation: worker `target` gets the `x` of worker `source`, bit for bit.

        A worker that is no target gets zeros. Values of fewer than 32 bits travel as unsigned integers, because the CPU backend would
        widen floats of 16 bits to 32. Between CPU processes a swap is a sum over the pair minus the worker's own value, exact in
        integers modulo 2^k: gloo sends the two directions of a permutation one after the other, but those of a sum at once.

        Args:
            x: this worker's array, of the same shape on every worker.
            pairs: (source, target) worker indices; each source once, each target once. Other workers send nothing.
        """
        self._check_all_send("exchange")
        if self._simulated:
            return self._read(x, pairs)
        swaps = [pair for pair in pairs if pair[0] != pair[1] and pair[::-1] in pairs] if between_cpu_processes() else []
        others = [pair for pair in pairs if pair not in swaps]
        if not swaps and x.dtype.itemsize >= 4:
            return jax.lax.ppermute(x, self.mapped, pairs)
        bits = _bits(x)
        arrived: PyTree = jax.lax.ppermute(bits, self.mapped, others) if others or not swaps else None
        if swaps:
            # One after the other, in the same order on all workers. No worker takes part in both; one that is in neither gets zeros.
            bits, arrived = jax.lax.optimization_barrier((bits, arrived))
            swapped = self._swap(bits, swaps)
            arrived = swapped if arrived is None else arrived + swapped
        return jax.lax.bitcast_convert_type(arrived, x.dtype)

    def exchange_tree(self, tree: PyTree, pairs: Sequence[tuple[int, int]]) -> PyTree:
        """Exchange every array of a pytree.

        Between CPU processes they travel as the bytes of one array, since each message takes milliseconds, longer than a copy;
        elsewhere the compiler joins messages along one route.
        """
        leaves, structure = jax.tree.flatten(tree)
        if len(leaves) < 2 or not between_cpu_processes():
            return jax.tree.map(lambda x: self.exchange(x, pairs), tree)
        sent = [jax.lax.bitcast_convert_type(x, jnp.uint8) for x in leaves]  # With one more axis if values have several bytes.
        arrived = self.exchange(jnp.concatenate([x.ravel() for x in sent]), pairs)
        parts = jnp.split(arrived, np.cumsum([x.size for x in sent[:-1]]))
        return structure.unflatten(
            jax.lax.bitcast_convert_type(part.reshape(bits.shape), x.dtype)
            for part, bits, x in zip(parts, sent, leaves, strict=True)
        )

    def _read(self, x: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """Exchange between simulated workers: vmap has no partial permutations, so each reads its source's row, or zeros."""
        source_of, receives = np.arange(self.size), np.zeros(self.size, bool)
        for source, target in pairs:
            source_of[target], receives[target] = source, True
        arrived = jax.lax.all_gather(x, self.mapped)[jnp.asarray(source_of)[self.index]]
        return arrived if receives.all() else jnp.where(jnp.asarray(receives)[self.index], arrived, jnp.zeros_like(x))

    def _swap(self, bits: jax.Array, swaps: Sequence[tuple[int, int]]) -> jax.Array:
        """Return the values of the other worker of the pair; zeros on a worker in no pair."""
        alone = [[worker] for worker in range(self.size) if not any(worker in pair for pair in swaps)]
        groups = [[source, target] for source, target in swaps if source < target] + alone
        return jax.lax.psum(bits, self.mapped, axis_index_groups=groups) - bits

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sum of `x` over all workers, the same on each."""
        self._check_all_send("sum")
        return jax.lax.psum(x, self.mapped)

    def mean(self, x: jax.Array, wire_dtype: DType | None = None) -> jax.Array:
        """Return the mean of `x` over all workers, in its shape and dtype, with the same bits on each worker.

        Values of 16 bits are summed in float32, or in the dtype of `x` if it is wider. A ring would round their sum at every step, and
        the CPU backend would widen them; so they are scattered by all-to-all, summed, rounded once and gathered, which sends as many
        bytes as a ring. Arrays that a tensor-parallel group divides travel in float32 instead.

        Args:
            x: this worker's array.
            wire_dtype: floating-point type in which values travel; None: that of `x`.
        """
        return self._mean(x, self.size, x.dtype if wire_dtype is None else jnp.dtype(wire_dtype))

    def group_mean(self, x: jax.Array, group_size: int) -> jax.Array:
        """Return the mean of `x`, as `mean` does, over the `group_size` consecutive workers to which this one belongs."""
        return self._mean(x, group_size, x.dtype)

    def _mean(self, x: jax.Array, group_size: int, wire: jnp.dtype) -> jax.Array:
        if group_size == 1:
            return x
        if self._simulated and wire == x.dtype:
            return self._simulated_block_means(x, group_size)
        if _is_narrow(wire) and x.ndim > 1 and _in_tensor_group():  # Which a vector of its values would be gathered in.
            wide = jnp.promote_types(x.dtype, jnp.float32)
            return self._mean(x.astype(wide), group_size, wide).astype(x.dtype)
        groups = self._blocks(group_size)
        if wire == x.dtype and not _is_narrow(wire):
            return self._sent(lambda x: jax.lax.psum(x, self.mapped, axis_index_groups=groups), lambda x: x, x) / group_size
        share = self._share_of_mean(jnp.pad(x.ravel(), (0, -x.size % group_size)), group_size, wire)
        return self._gathered(share.astype(wire), groups).astype(x.dtype).ravel()[: x.size].reshape(x.shape)

    def _share_of_mean(self, x_P: jax.Array, group_size: int, wire: jnp.dtype) -> jax.Array:
        """Return this worker's share of the mean of vectors that travel as `wire`, in float32 or wider."""
        groups = self._blocks(group_size)
        scatter = lambda bits: jax.lax.all_to_all(bits, self.mapped, 0, 0, axis_index_groups=groups)
        bits_LxS = self._sent(scatter, lambda bits: bits, _bits(x_P.astype(wire)).reshape(group_size, -1))
        wide = jnp.promote_types(x_P.dtype, jnp.float32)
        return jax.lax.bitcast_convert_type(bits_LxS, wire).astype(wide).mean(axis=0)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Return the arrays of all workers, stacked as [N, ...]; values of fewer than 32 bits travel as unsigned integers."""
        return self._gathered(x, None)

    def _gathered(self, x: jax.Array, groups: list[list[int]] | None, tiled: bool = False) -> jax.Array:
        count, sent = len(groups[0]) if groups else self.size, _bits(x) if x.dtype.itemsize < 4 else x
        gather = lambda x: jax.lax.all_gather(x, self.mapped, axis_index_groups=groups, tiled=tiled)
        arrived = self._sent(gather, lambda x: jnp.zeros((count, *x.shape), x.dtype), sent)
        return arrived if sent is x else jax.lax.bitcast_convert_type(arrived, x.dtype)

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """Return the rows that all workers have for this one, [N, ...], if row i of each worker's `x`, [N, ...], is for worker i."""
        return self._sent(lambda x: jax.lax.all_to_all(x, self.mapped, 0, 0), lambda x: x, x)

    def scatter_mean(self, x_P: jax.Array, group_size: int) -> jax.Array:
        """Return this worker's share, P/L values, of the mean of a vector over a block of L workers; `gather` joins the shares.

        Between the two, members of a block may exchange their shares with other blocks: a whole array then leaves a node
        once, not once per member. Simulated workers keep the whole mean, P values, since nothing is sent.

        Args:
            x_P: this worker's vector; L divides P.
            group_size: L, the number of consecutive workers in a block.
        """
        self._check_all_send("scatter_mean")
        if group_size == 1:
            return x_P
        if self._simulated:
            return self._simulated_block_means(x_P, group_size)
        if _is_narrow(x_P.dtype):
            return self._share_of_mean(x_P, group_size, x_P.dtype).astype(x_P.dtype)
        groups = self._blocks(group_size)
        return jax.lax.psum_scatter(x_P, self.mapped, axis_index_groups=groups, tiled=True) / group_size

    def own_share(self, x_P: jax.Array, group_size: int) -> jax.Array:
        """Return the part of this worker's own vector at the place of its share in `scatter_mean`; sends nothing."""
        if group_size == 1 or self._simulated:
            return x_P
        size = x_P.size // group_size
        return jax.lax.dynamic_slice(x_P, (self.index % group_size * size,), (size,))

    def gather(self, share: jax.Array, group_size: int) -> jax.Array:
        """Return the vector of P values whose shares, as `scatter_mean` makes them, the `group_size` workers of a block hold."""
        self._check_all_send("gather")
        if group_size == 1 or self._simulated:
            return share
        return self._gathered(share, self._blocks(group_size), tiled=True)

    def _blocks(self, group_size: int) -> list[list[int]] | None:
        return None if group_size == self.size else np.arange(self.size).reshape(-1, group_size).tolist()

    def _simulated_block_means(self, x: jax.Array, group_size: int) -> jax.Array:
        x_NxP = jax.lax.all_gather(x, self.mapped)  # Not batched by vmap: one copy for all workers.
        blocks = x_NxP.reshape(-1, group_size, *x.shape).mean(axis=1)
        # A single block is not batched either: what follows is computed once for all workers.
        return blocks[0] if len(blocks) == 1 else blocks[self.index // group_size]

    def _sent(self, collective: Callable[[jax.Array], jax.Array], anything: Callable[[jax.Array], jax.Array], x: jax.Array):
        """Return the result of a collective on the stages that send; on others that of `anything`, which has its shape."""
        stages = self.senders
        if stages is None or len(stages) == STAGES.size:
            return collective(x)
        scoped = hlo.counted(stages=stages)(collective)
        return jax.lax.cond((STAGES.index == np.array(stages)).any(), scoped, anything, x)

    def _check_all_send(self, what: str) -> None:
        if self.senders is not None:
            raise RuntimeError(
                f"Axis.{what} needs all stages, but only stages {', '.join(map(str, self.senders))} send on this axis; use an axis "
                "without `sent_by`, or mean, group_mean, all_gather or all_to_all"
            )


WORKERS = Axis((NODE, LOCAL))
"""The worker axis where each worker has its own devices."""
SIMULATED = Axis(WORKER)
"""The worker axis where all workers are simulated on one device."""
MAPPED = Axis()
"""The one of these two axes over which the calling function is mapped."""
STAGES = Axis(STAGE)
"""The axis of the pipeline stages of one worker."""


def mean_bytes(size: int, dtype: DType, num_workers: int, wire_dtype: DType | None = None) -> float:
    """Return the bytes that each of N workers sends in an `Axis.mean` of `size` values: 2(N−1)/N times theirs in the type that travels."""
    if wire_dtype is not None or _is_narrow(dtype):
        size, dtype = size + -size % num_workers, dtype if wire_dtype is None else wire_dtype
    return 2 * (num_workers - 1) / num_workers * size * jnp.dtype(dtype).itemsize


def between_cpu_processes() -> bool:
    """Return whether collectives run between processes on CPUs, where gloo carries them."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def _in_tensor_group() -> bool:
    """Return whether the compiler divides arrays between the devices of a tensor-parallel group here."""
    mesh = jax.sharding.get_abstract_mesh()
    return TENSOR not in mesh.manual_axes and mesh.shape.get(TENSOR, 1) > 1


def _is_narrow(dtype: DType) -> bool:
    return jnp.dtype(dtype).itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
