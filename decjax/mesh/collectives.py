"""Axis names, and what a function of one stage of one worker may say to others: the only collectives on these axes."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NODE, LOCAL, STAGE, TENSOR = "node", "local", "stage", "tensor"
WORKER = (NODE, LOCAL)
SIMULATED = "worker"

AxisName = str | tuple[str, ...]


def worker_index(axis_name: AxisName) -> jax.Array:
    """This worker's index, 0 … N − 1, as a traced int32 scalar."""
    return jax.lax.axis_index(axis_name)


def num_workers(axis_name: AxisName) -> int:
    """N, as a static int.

    Raises:
        ValueError: outside of a function that is mapped over workers.
    """
    try:
        return jax.lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"worker axis {axis_name!r} is not there: call this from a function mapped over workers, as "
            "workers.jit(tx.init, in_axes=(0,))(workers.stack(params))"
        ) from error


def _is_simulated(axis_name: AxisName) -> bool:
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    return not set(axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def exchange(x: jax.Array, pairs: Sequence[tuple[int, int]], axis_name: AxisName) -> jax.Array:
    """Sends `x` along a partial permutation: worker `target` gets worker `source`'s array, bit for bit.

    Narrow values travel as unsigned integers, because the CPU backend would widen floats of 16 bits to 32. Between CPU
    processes a swap is a sum over the pair minus the own value, exact in integers modulo 2^k: gloo sends a permutation's two
    directions one after the other, but those of a sum at once.

    Args:
        x: this worker's array, the same shape on every worker.
        pairs: (source, target) worker indices; each source once, each target once. Pairs that are absent send nothing.
        axis_name: the worker axis.

    Returns:
        What arrives; zeros on a worker that is nobody's target.

    Raises:
        RuntimeError: within `sent_by`.
    """
    _check_all_send("exchange")
    if not _is_simulated(axis_name):
        swaps = [pair for pair in pairs if pair[0] != pair[1] and pair[::-1] in pairs] if between_cpu_processes() else []
        others = [pair for pair in pairs if pair not in swaps]
        if not swaps and x.dtype.itemsize >= 4:
            return jax.lax.ppermute(x, axis_name, pairs)
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        arrived = jax.lax.ppermute(bits, axis_name, others) if others or not swaps else None
        if swaps:
            # One after the other, in the same order everywhere; nobody takes part in both, and whoever takes none gets zeros.
            bits, arrived = jax.lax.optimization_barrier((bits, arrived))
            swapped = _swap(bits, swaps, axis_name)
            arrived = swapped if arrived is None else arrived + swapped
        return jax.lax.bitcast_convert_type(arrived, x.dtype)
    # vmap has no partial permutations: read the source's row, and blank those who receive nothing.
    n = jax.lax.axis_size(axis_name)
    source_of = np.arange(n)
    receives = np.zeros(n, bool)
    for source, target in pairs:
        source_of[target], receives[target] = source, True
    index = worker_index(axis_name)
    arrived = jax.lax.all_gather(x, axis_name)[jnp.asarray(source_of)[index]]
    return arrived if receives.all() else jnp.where(jnp.asarray(receives)[index], arrived, jnp.zeros_like(x))


def _swap(bits: jax.Array, swaps: Sequence[tuple[int, int]], axis_name: AxisName) -> jax.Array:
    """What the partner holds; zeros on a worker that has none."""
    alone = [[worker] for worker in range(jax.lax.axis_size(axis_name)) if not any(worker in pair for pair in swaps)]
    groups = [[source, target] for source, target in swaps if source < target] + alone
    return jax.lax.psum(bits, axis_name, axis_index_groups=groups) - bits


def stage_index() -> jax.Array:
    """This device's stage, 0 … S − 1, as a traced int32 scalar."""
    return jax.lax.axis_index(STAGE)


def sum_over_stages(x: jax.Array) -> jax.Array:
    """The sum of `x` over the stages of a worker, the same on all of them."""
    return jax.lax.psum(x, STAGE)


_senders: contextvars.ContextVar[tuple[int, ...] | None] = contextvars.ContextVar("senders", default=None)


@contextlib.contextmanager
def sent_by(stages: Sequence[int]) -> Iterator[None]:
    """While this is traced, means and gathers over workers are of these stages only; on others they return anything of that shape.

    Nothing else is conditional: the compiler may divide what is computed between the devices of a tensor-parallel group, and
    some of its messages wait for all devices. All workers of a stage take the same branch, and so meet in their collective,
    which carries the scope `stages=…` in the compiled program, for those who count bytes. Other collectives are refused: they
    would be of all stages.
    """
    token = _senders.set(tuple(stages))
    try:
        yield
    finally:
        _senders.reset(token)


def _sent(collective: Callable[[jax.Array], jax.Array], anything: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    stages = _senders.get()
    if stages is None or len(stages) == jax.lax.axis_size(STAGE):
        return collective(x)
    scoped = jax.named_scope(f"stages={','.join(map(str, stages))}")(collective)
    return jax.lax.cond((stage_index() == np.array(stages)).any(), scoped, anything, x)


def _check_all_send(what: str) -> None:
    if (stages := _senders.get()) is not None:
        raise RuntimeError(
            f"mesh.{what} is of all stages, and only stages {', '.join(map(str, stages))} send here; take it out of "
            "`sent_by`, or use group_mean, all_gather or all_to_all"
        )


def tensor_size() -> int:
    """K, devices of a tensor-parallel group; 1 where there is none."""
    return jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)


def divide(x: jax.Array, axis: int | None) -> jax.Array:
    """Lays `x` out within its tensor-parallel group: divided along `axis`, or whole on every device of it.

    Only says where values lie, never changes them; does nothing where there is no such group.
    """
    if tensor_size() == 1 or TENSOR in jax.sharding.get_abstract_mesh().manual_axes:
        return x
    spec: list[str | None] = [None] * x.ndim
    if axis is not None:
        spec[axis] = TENSOR
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*spec))


class EachDevice(NamedTuple):
    """What the devices of a tensor-parallel group have for themselves: leaves [K, …], one entry on each."""

    of_each_device: Any


def for_each_device(tree: Any) -> Any:
    """The same for every device of a tensor-parallel group, as `each_device` takes it; the tree itself where there is none."""
    K = tensor_size()
    return tree if K == 1 else EachDevice(jax.tree.map(lambda x: divide(jnp.broadcast_to(x, (K, *jnp.shape(x))), 0), tree))


def each_device(fn: Callable[[Any, Any], tuple[Any, Any]], own: Any, shared: Any) -> tuple[Any, Any]:
    """Calls a function on each device of a tensor-parallel group by itself, where the compiler divides nothing.

    Args:
        fn: `fn(own, shared) -> (own, shared)` of one device, which may use `own_rows`, `all_rows` and `own_key`, and `exchange`
            along the other axes, and what it returns second is the same on all of them.
        own: from `for_each_device`, or from this function.
        shared: arrays that all devices of the group see whole.

    Returns:
        What it returns, `own` as it was given.
    """
    if tensor_size() == 1:
        return fn(own, shared)

    def on_device(own, shared):
        own, shared = fn(jax.tree.map(lambda x: x[0], own.of_each_device), shared)
        return EachDevice(jax.tree.map(lambda x: x[None], own)), shared

    specs = jax.sharding.PartitionSpec(TENSOR), jax.sharding.PartitionSpec()
    return jax.shard_map(on_device, in_specs=specs, out_specs=specs, axis_names={TENSOR}, check_vma=False)(own, shared)


def own_rows(x: jax.Array) -> jax.Array:
    """Inside of `each_device`: of the first axis, which K divides, the k-th part on the k-th device."""
    size = len(x) // tensor_size()
    return x if size == len(x) else jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * size, size)


def all_rows(x: jax.Array) -> jax.Array:
    """The inverse of `own_rows`: the parts of all devices of the group, one behind the other."""
    return x if tensor_size() == 1 else all_gather(x, TENSOR).reshape(-1, *x.shape[1:])


def own_key(key: jax.Array | None) -> jax.Array | None:
    """Inside of `each_device`: another key on each device."""
    return key if key is None or tensor_size() == 1 else jax.random.fold_in(key, jax.lax.axis_index(TENSOR))


def between_cpu_processes() -> bool:
    """Whether collectives cross processes over gloo, the CPU backend's transport."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def _blocks(group_size: int, axis_name: AxisName) -> list[list[int]] | None:
    n = jax.lax.axis_size(axis_name)
    if group_size == n:
        return None
    return np.arange(n).reshape(-1, group_size).tolist()


def _simulated_block_means(x: jax.Array, group_size: int, axis_name: AxisName) -> jax.Array:
    x_NxP = jax.lax.all_gather(x, axis_name)  # Not batched by vmap: one copy for all workers.
    blocks = x_NxP.reshape(-1, group_size, *x.shape).mean(axis=1)
    if len(blocks) == 1:
        return blocks[0]  # Not batched either: what follows is computed once for all workers.
    return blocks[worker_index(axis_name) // group_size]


def group_mean(x: jax.Array, group_size: int, axis_name: AxisName) -> jax.Array:
    """The mean of `x` over each block of `group_size` consecutive workers (all of them, if `group_size` is N)."""
    if group_size == 1:
        return x
    if _is_simulated(axis_name):
        return _simulated_block_means(x, group_size, axis_name)
    groups = _blocks(group_size, axis_name)
    return _sent(lambda x: jax.lax.psum(x, axis_name, axis_index_groups=groups), lambda x: x, x) / group_size


def mean(x_P: jax.Array, axis_name: AxisName, wire_dtype: Any = None) -> jax.Array:
    """The mean of a flat array over all workers, of which values may travel in a narrower type.

    Sums of narrow values would round at every step of a ring, and the CPU backend would widen them on the wire. So they are
    scattered by all-to-all, summed in the array's own type, rounded once and gathered: bytes as those of a ring. All workers
    get the same bits.

    Args:
        x_P: this worker's values.
        axis_name: the worker axis.
        wire_dtype: floating-point type of the values on the wire; None: as they are.

    Returns:
        The mean, of the shape and dtype of `x_P`.
    """
    n = jax.lax.axis_size(axis_name)
    if wire_dtype is None or jnp.dtype(wire_dtype) == x_P.dtype or n == 1:
        return group_mean(x_P, n, axis_name)
    unsigned = f"uint{8 * jnp.dtype(wire_dtype).itemsize}"

    def bits(x):
        return jax.lax.bitcast_convert_type(x.astype(wire_dtype), unsigned)

    def values(x):
        return jax.lax.bitcast_convert_type(x, wire_dtype).astype(x_P.dtype)

    shares_NxS = jnp.pad(x_P, (0, -x_P.size % n)).reshape(n, -1)
    own_S = values(all_to_all(bits(shares_NxS), axis_name)).mean(axis=0)
    return values(all_gather(bits(own_S), axis_name)).ravel()[: x_P.size]


def mean_bytes(size: int, dtype: Any, num_workers: int, wire_dtype: Any = None) -> float:
    """Bytes that each worker sends in `mean` of `size` values."""
    if wire_dtype is not None and num_workers > 1:
        size, dtype = size + -size % num_workers, wire_dtype
    return 2 * (num_workers - 1) / num_workers * size * jnp.dtype(dtype).itemsize


def all_gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The arrays of all workers, stacked: [N, ...]. Narrow values travel as unsigned integers, as in `exchange`."""

    def gather(x):
        n = jax.lax.axis_size(axis_name)
        return _sent(lambda x: jax.lax.all_gather(x, axis_name), lambda x: jnp.zeros((n, *x.shape), x.dtype), x)

    if x.dtype.itemsize >= 4:
        return gather(x)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(gather(bits), x.dtype)


def all_to_all(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Row i of what every worker gives goes to worker i: [N, ...] of a row for each to [N, ...] of a row from each."""
    return _sent(lambda x: jax.lax.all_to_all(x, axis_name, 0, 0), lambda x: x, x)


def scatter_mean(x_P: jax.Array, group_size: int, axis_name: AxisName) -> jax.Array:
    """The block mean of a flat array, of which each member keeps its own share; `gather` is the inverse.

    Between the two, members of a block may exchange their shares with other blocks: a whole array then leaves a node
    once, not once per member. Simulated workers keep the whole mean, since nothing is sent.

    Args:
        x_P: flat array; P divisible by `group_size`.
        group_size: L, the number of consecutive workers in a block.
        axis_name: the worker axis.

    Returns:
        The share, P/L values (P when simulated).

    Raises:
        RuntimeError: within `sent_by`.
    """
    _check_all_send("scatter_mean")
    if group_size == 1:
        return x_P
    if _is_simulated(axis_name):
        return _simulated_block_means(x_P, group_size, axis_name)
    return jax.lax.psum_scatter(x_P, axis_name, axis_index_groups=_blocks(group_size, axis_name), tiled=True) / group_size


def own_share(x_P: jax.Array, group_size: int, axis_name: AxisName) -> jax.Array:
    """The part of a flat array that `scatter_mean` leaves with this worker, cut out of its own values; sends nothing."""
    if group_size == 1 or _is_simulated(axis_name):
        return x_P
    size = x_P.size // group_size
    return jax.lax.dynamic_slice(x_P, (worker_index(axis_name) % group_size * size,), (size,))


def gather(share: jax.Array, group_size: int, axis_name: AxisName) -> jax.Array:
    """Joins the shares of a block of `group_size` consecutive workers; the inverse of `scatter_mean`'s split.

    Raises:
        RuntimeError: within `sent_by`.
    """
    _check_all_send("gather")
    if group_size == 1 or _is_simulated(axis_name):
        return share
    return jax.lax.all_gather(share, axis_name, axis_index_groups=_blocks(group_size, axis_name), tiled=True)
