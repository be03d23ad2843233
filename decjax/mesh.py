"""Where workers live: axis names, the device mesh, and the only collectives on worker axes.

A per-worker function is written once, with an axis name, and runs in two ways:

    devices      one worker per device, under `jax.shard_map`; the worker axis is the pair (node, local)
    simulated    all workers on one device, under `jax.vmap`; the worker axis is called "worker"

Both give the same trajectory. Stacked state carries a leading worker axis, `[N, ...]`; inside a mapped function that axis
is gone. Worker i is local worker i mod L of node i div L, so that blocks of L consecutive workers share a node.

The mesh has the axes (node, local, stage, tensor); any may be 1. With S pipeline stages a worker is S·T devices, and its state
is `[N, S, ...]`: a function is written for one stage of one worker, sees neither axis, and talks to other workers' devices of its
own stage along the worker axes, and to the worker's other stages along `STAGE`. The tensor axis is the compiler's: functions
see whole arrays, and `divide` says how they lie on the group.

This module holds every axis-name literal. `shard_map` runs with `check_vma=False`: grouped collectives need it, and a
user's model may scan over constants. The price is a rule: no collective inside a loss that is differentiated.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NODE, LOCAL, STAGE, TENSOR = "node", "local", "stage", "tensor"
WORKER = (NODE, LOCAL)
SIMULATED = "worker"

AxisName = str | tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------------------
# Collectives, called from inside a per-worker function
# ---------------------------------------------------------------------------------------------------------------------


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
        raise ValueError(f"worker axis {axis_name!r} is not there: call this from a function mapped over workers, as "
                         "workers.jit(tx.init, in_axes=(0,))(workers.stack(params))") from error


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
    """
    if not _is_simulated(axis_name):
        swaps = between_cpu_processes() and all(
            source != target and (target, source) in pairs for source, target in pairs)
        if not swaps and x.dtype.itemsize >= 4:
            return jax.lax.ppermute(x, axis_name, pairs)
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        if swaps:
            paired = {worker for pair in pairs for worker in pair}
            alone = [[worker] for worker in range(jax.lax.axis_size(axis_name)) if worker not in paired]
            groups = [[source, target] for source, target in pairs if source < target] + alone
            arrived = jax.lax.psum(bits, axis_name, axis_index_groups=groups) - bits
        else:
            arrived = jax.lax.ppermute(bits, axis_name, pairs)
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
    which carries the scope `stages=…` in the compiled program, for those who count bytes.
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


def divide(x: jax.Array, axis: int | None) -> jax.Array:
    """Lays `x` out within its tensor-parallel group: divided along `axis`, or whole on every device of it.

    Only says where values lie, never changes them; does nothing where there is no such group.
    """
    around = jax.sharding.get_abstract_mesh()
    if around.shape.get(TENSOR, 1) == 1 or TENSOR in around.manual_axes:
        return x
    spec: list[str | None] = [None] * x.ndim
    if axis is not None:
        spec[axis] = TENSOR
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*spec))


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
    return values(all_gather(bits(own_S), axis_name)).ravel()[:x_P.size]


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
    """
    if group_size == 1:
        return x_P
    if _is_simulated(axis_name):
        return _simulated_block_means(x_P, group_size, axis_name)
    return jax.lax.psum_scatter(
        x_P, axis_name, axis_index_groups=_blocks(group_size, axis_name), tiled=True) / group_size


def own_share(x_P: jax.Array, group_size: int, axis_name: AxisName) -> jax.Array:
    """The part of a flat array that `scatter_mean` leaves with this worker, cut out of its own values; sends nothing."""
    if group_size == 1 or _is_simulated(axis_name):
        return x_P
    size = x_P.size // group_size
    return jax.lax.dynamic_slice(x_P, (worker_index(axis_name) % group_size * size,), (size,))


def gather(share: jax.Array, group_size: int, axis_name: AxisName) -> jax.Array:
    """Joins the shares of a block of `group_size` consecutive workers; the inverse of `scatter_mean`'s split."""
    if group_size == 1 or _is_simulated(axis_name):
        return share
    return jax.lax.all_gather(share, axis_name, axis_index_groups=_blocks(group_size, axis_name), tiled=True)


# ---------------------------------------------------------------------------------------------------------------------
# Mapping a per-worker function over workers
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Workers:
    """N workers of S stages, and how a function of one stage of one worker is mapped over them.

    Attributes:
        num_workers: N.
        local_size: L, consecutive workers that share a node.
        mesh: the device mesh, or None when workers are simulated on one device.
        stages: S; state is stacked [N, ...], or [N, S, ...] if S > 1.
        divided: pairs of the end of an array's path, and its axis, counted from the end, that a tensor-parallel group divides.
    """

    num_workers: int
    local_size: int
    mesh: jax.sharding.Mesh | None
    stages: int = 1
    divided: tuple[tuple[str, int], ...] = ()

    @property
    def simulated(self) -> bool:
        return self.mesh is None

    @property
    def platform(self) -> str | None:
        """Platform of the devices, as "cpu", "gpu" or "tpu"; None where workers are simulated."""
        return None if self.simulated else self.mesh.devices.flat[0].platform

    @property
    def on_cpu(self) -> bool:
        """Whether the workers are CPU devices (not simulated ones)."""
        return self.platform == "cpu"

    @property
    def tensor(self) -> int:
        """Devices of a tensor-parallel group."""
        return 1 if self.simulated else self.mesh.shape[TENSOR]

    @property
    def axis_name(self) -> AxisName:
        """The axis name that a per-worker function passes to collectives."""
        return SIMULATED if self.simulated else WORKER

    @property
    def whole(self) -> "Workers":
        """The same workers for state [N, ...] that is not divided into stages: all of a worker's stages hold and do the same."""
        return dataclasses.replace(self, stages=1)

    @property
    def num_axes(self) -> int:
        """Leading axes of stacked state: 1, or 2 with stages."""
        return 2 if self.stages > 1 else 1

    @property
    def _spec(self) -> jax.sharding.PartitionSpec:
        return jax.sharding.PartitionSpec(*(WORKER, STAGE)[:self.num_axes])

    @property
    def stacked(self) -> jax.sharding.Sharding:
        """Sharding of an array with a leading worker axis (and stage axis), whole within tensor-parallel groups."""
        if self.simulated:
            return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.sharding.NamedSharding(self.mesh, self._spec)

    def shardings(self, tree: Any) -> Any:
        """For each array of stacked state its sharding, from its path."""
        if self.tensor == 1:
            return jax.tree.map(lambda x: self.stacked, tree)

        def sharding(path, x):
            spec = [*self._spec, *[None] * (x.ndim - self.num_axes)]
            if (axis := self._divided_axis(path, x.shape[self.num_axes:])) is not None:
                spec[axis] = TENSOR
            return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*spec))
        return jax.tree_util.tree_map_with_path(sharding, tree)

    def _divided_axis(self, path, shape) -> int | None:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axis = next((axis for end, axis in self.divided if name.endswith(end)), None)
        return axis if axis is not None and len(shape) >= -axis and shape[axis] % self.tensor == 0 else None

    @property
    def replicated(self) -> jax.sharding.Sharding:
        """Sharding of an array that every device holds whole."""
        if self.simulated:
            return self.stacked
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

    def map(self, fn: Callable, in_axes: Sequence[int | None]) -> Callable:
        """Maps a per-worker function over stacked arguments.

        Args:
            fn: function of per-worker pytrees (of one stage, with stages), which may use `axis_name` and `STAGE`.
            in_axes: for each argument, 0 if it is stacked, None if all workers see the same.

        Returns:
            A function of stacked and shared pytrees, whose outputs are all stacked. Not jitted.
        """
        if self.simulated:
            if self.stages > 1:
                fn = jax.vmap(fn, in_axes=tuple(in_axes), axis_name=STAGE, axis_size=self.stages)
            return jax.vmap(fn, in_axes=tuple(in_axes), axis_name=SIMULATED, axis_size=self.num_workers)

        first = (0,) * self.num_axes

        def on_device(*args):
            own = [arg if axis is None else jax.tree.map(lambda x: x[first], arg) for arg, axis in zip(args, in_axes)]
            return jax.tree_util.tree_map_with_path(lay_out, fn(*own))

        def lay_out(path, x):
            x = divide(x, self._divided_axis(path, x.shape)) if self.tensor > 1 else x
            return x[(None,) * self.num_axes]

        shared = jax.sharding.PartitionSpec()
        # Axes of one device are manual as well: host callbacks, jax.debug.print among them, refuse to run beside others.
        manual = {name for name, size in self.mesh.shape.items() if name != TENSOR or size == 1}
        return jax.shard_map(
            on_device, mesh=self.mesh, in_specs=tuple(shared if axis is None else self._spec for axis in in_axes),
            out_specs=self._spec, axis_names=manual, check_vma=False)

    def jit(self, fn: Callable, in_axes: Sequence[int | None], donate_argnums: Sequence[int] = ()) -> Callable:
        """`map`, jitted. Outputs are laid out as `shardings` says, so that feeding them back compiles nothing anew."""
        # With a tensor axis the layout depends on the array, and `map` has fixed it already.
        out_shardings = {} if self.tensor > 1 else {"out_shardings": self.stacked}
        return jax.jit(self.map(fn, in_axes), donate_argnums=tuple(donate_argnums), **out_shardings)

    def stack(self, tree: Any) -> Any:
        """Gives every worker the same copy of `tree`, whose leaves are [...], or [S, ...] with stages."""
        def copy(tree):
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_workers, *jnp.shape(x))), tree)
        return jax.jit(copy, out_shardings=self.shardings(jax.eval_shape(copy, tree)))(tree)

    def build(self, values: Callable[[int], np.ndarray]) -> jax.Array:
        """Builds a stacked array from `values(worker)`, the same for all its stages; called for this process's own workers only."""
        rows = {worker: np.asarray(values(worker)) for worker in self.own}
        ones = (1,) * (self.num_axes - 1)
        shape = next(iter(rows.values())).shape
        if self.simulated:
            stacked = np.stack([rows[worker].reshape((*ones, *shape)) for worker in self.own])
            return jax.device_put(np.broadcast_to(stacked, (*self._sizes, *shape)), self.stacked)
        return jax.make_array_from_callback(
            (*self._sizes, *shape), self.stacked, lambda index: rows[index[0].start or 0].reshape((1, *ones, *shape)))

    def place(self, tree: Any) -> Any:
        """Puts stacked NumPy arrays, which every process has, on the devices where they belong."""
        return jax.tree.map(lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, x.__getitem__),
                            tree, self.shardings(tree))

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (self.num_workers, self.stages)[:self.num_axes]

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """Indices of the workers of which this process holds state."""
        if self.simulated:
            return tuple(range(self.num_workers))
        index_map = self.whole.stacked.addressable_devices_indices_map((self.num_workers,))
        return tuple(sorted({index[0].start or 0 for index in index_map.values()}))

    def fetch(self, tree: Any) -> Any:
        """Copies stacked or replicated arrays to NumPy in every process. A collective: call it everywhere or nowhere."""
        return jax.tree.map(np.asarray, self._replicate(tree))

    def fetch_first(self, x: jax.Array) -> np.ndarray:
        """`fetch` of what is the same on all stages of a worker: [N, ...]."""
        fetched = self.fetch(x)
        return fetched[:, 0] if self.stages > 1 else fetched

    @functools.cached_property
    def _replicate(self) -> Callable:
        return jax.jit(lambda tree: tree, out_shardings=self.replicated)  # Kept: a new one each time would compile anew.


def make_workers(num_workers: int, *, local_size: int = 1, stages: int = 1, tensor: int = 1, simulate: bool = False,
                 devices: Sequence[jax.Device] | None = None, divided: Sequence[tuple[str, int]] = ()) -> Workers:
    """Places N workers of S·T devices each on the devices of all processes, or simulates them on one device.

    Args:
        num_workers: N ≥ 1.
        local_size: L, workers that share a node; divides N.
        stages: S, pipeline stages of a worker.
        tensor: T, devices that divide the arrays of a stage.
        simulate: run all workers and stages on one device by `vmap`.
        devices: where to place them; None: `jax.devices()`. Programs can be compiled, but not run, for devices that are only
            described (`jax.experimental.topologies`).
        divided: how a model divides its parameters; see `Workers`.

    Returns:
        The `Workers`.

    Raises:
        ValueError: if L does not divide N, if there are fewer devices than N·S·T, or if several processes, or tensor-parallel
            groups, are asked to simulate.
    """
    for what, value in (("workers", num_workers), ("stages", stages), ("tensor", tensor)):
        if value < 1:
            raise ValueError(f"{what}={value}: at least one {'worker' if what == 'workers' else 'device'} is needed")
    if local_size < 1 or num_workers % local_size:
        raise ValueError(f"local_size={local_size} does not divide workers={num_workers}; "
                         f"use one of {[d for d in range(1, num_workers + 1) if num_workers % d == 0]}")
    if simulate:
        if jax.process_count() > 1:
            raise ValueError(f"simulate runs all workers on one device, but there are {jax.process_count()} processes; "
                             "start a single one")
        if tensor > 1:
            raise ValueError(f"tensor={tensor} with simulate: a lone device divides no arrays; use tensor=1, whose trajectory "
                             "is the same")
        return Workers(num_workers, local_size, None, stages)
    devices = jax.devices() if devices is None else devices
    size = stages * tensor
    needed, each = num_workers * size, f" of stages={stages} x tensor={tensor}" if size > 1 else ""
    if len(devices) < needed:
        fits = f"use workers={len(devices) // size}" if len(devices) >= size else f"use stages x tensor <= {len(devices)}"
        raise ValueError(f"workers={num_workers}{each} but there are {len(devices)} devices; "
                         f"{fits} or simulate the workers on one device")
    if jax.process_count() > 1 and len(devices) != needed:
        raise ValueError(f"workers={num_workers}{each} but {jax.process_count()} processes hold {len(devices)} devices; "
                         "with several processes every device belongs to a worker")
    mesh = jax.make_mesh(
        (num_workers // local_size, local_size, stages, tensor), (NODE, LOCAL, STAGE, TENSOR),
        axis_types=(jax.sharding.AxisType.Auto,) * 4, devices=devices[:needed])
    return Workers(num_workers, local_size, mesh, stages, tuple(divided))
