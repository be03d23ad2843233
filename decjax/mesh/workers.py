"""The mesh of workers, and functions of one worker (or one stage of it) mapped over them."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools

import jax
from jax import core
from jax.experimental import mesh_utils, multihost_utils
import jax.numpy as jnp
import numpy as np

from decjax import options
from decjax.mesh.axis import LOCAL, NODE, SIMULATED, STAGE, WORKERS, Axis, between_cpu_processes
from decjax.mesh.shards import FSDP, stored_axis
from decjax.mesh.tensor import TENSOR, EachDevice
from decjax.options import Count
from decjax.program import order
from decjax.typing import Device, Jitted, PyTree


@dataclasses.dataclass(frozen=True)
class Workers:
    """N workers of S pipeline stages, and how functions are mapped over them; made by `make_workers`.

    Attributes:
        num_workers: N, the number of workers.
        local_size: L, consecutive workers that share a node.
        mesh: the device mesh, abstract for `described_workers`; None if all workers are simulated on one device.
        stages: S; stacked state is [N, ...], or [N, S, ...] if S > 1.
        divided: arrays that a tensor-parallel group divides, as pairs (suffix of the array's path, axis counted from the last).
    """

    num_workers: int
    local_size: int
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None
    stages: int = 1
    divided: tuple[tuple[str, int], ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether all workers run on one device."""
        return self.mesh is None

    @property
    def platform(self) -> str | None:
        """Platform of the devices: "cpu", "gpu" or "tpu"; None without devices."""
        return self.mesh.devices.flat[0].platform if isinstance(self.mesh, jax.sharding.Mesh) else None

    @property
    def devices(self) -> list[Device]:
        """The devices of the mesh, or the one that simulates all workers."""
        return [*self.mesh.devices.flat] if isinstance(self.mesh, jax.sharding.Mesh) else jax.local_devices()[:1]

    @property
    def on_cpu(self) -> bool:
        """Whether the workers are CPU devices (not simulated ones)."""
        return self.platform == "cpu"

    @property
    def needs_sender(self) -> bool:
        """Whether an exchange overlaps with computing only if a thread of its own sends it: between CPU processes, and in elastic runs."""
        return between_cpu_processes()

    @property
    def tensor(self) -> int:
        """T, the number of devices in a tensor-parallel group."""
        return 1 if self.mesh is None else self.mesh.shape[TENSOR]

    @property
    def fsdp(self) -> int:
        """L, the number of devices among which a worker's arrays and batch are divided."""
        return 1 if self.mesh is None else self.mesh.shape.get(FSDP, 1)

    @property
    def divides(self) -> bool:
        """Whether the compiler divides the arrays of a stage among several devices."""
        return self.tensor * self.fsdp > 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of workers, of stages of a worker, and of devices of a stage, as the mesh has them."""
        stages = self.stages if self.mesh is None else self.mesh.shape[STAGE]
        return self.num_workers, stages, self.tensor * self.fsdp

    @property
    def axis(self) -> Axis:
        """The axis along which a mapped function exchanges arrays with other workers."""
        return SIMULATED if self.simulated else WORKERS

    @property
    def whole(self) -> "Workers":
        """The same workers for state [N, ...] without a stage axis: all stages of a worker hold and compute the same."""
        return dataclasses.replace(self, stages=1)

    @property
    def aside(self) -> "Workers":
        """The same workers for programs that run in a second thread; their messages are kept apart from those of other programs."""
        return self

    @property
    def num_axes(self) -> int:
        """The number of leading axes of stacked state: 1, or 2 with stages."""
        return 2 if self.stages > 1 else 1

    @property
    def _spec(self) -> jax.sharding.PartitionSpec:
        return jax.sharding.PartitionSpec(*(WORKERS.name, STAGE)[: self.num_axes])

    def _sharding(self, spec: jax.sharding.PartitionSpec) -> jax.sharding.Sharding:
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.sharding.NamedSharding(self.mesh, spec)

    @property
    def stacked(self) -> jax.sharding.Sharding:
        """The sharding of an array with a leading worker axis (and stage axis) that is whole on all devices of a stage."""
        return self._sharding(self._spec)

    @property
    def replicated(self) -> jax.sharding.Sharding:
        """The sharding of an array that every device holds whole."""
        return self._sharding(jax.sharding.PartitionSpec())

    def shardings(self, tree: PyTree) -> PyTree:
        """Return the sharding of each array of stacked state.

        Which axis the devices of a stage divide follows from the array's path for tensor-parallel groups, and from its shape for `fsdp`.
        """
        if not self.divides:
            return jax.tree.map(lambda x: self.stacked, tree)

        def sharding(path, x):
            return self._sharding(jax.sharding.PartitionSpec(*self._spec, *self._inner_spec(path, x.shape[self.num_axes :])))

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def shared(self, tree: PyTree) -> PyTree:
        """Return the sharding of each array of one model that all workers hold; the devices of each divide it as they divide state."""
        return jax.tree_util.tree_map_with_path(lambda path, x: self._sharding(self._inner_spec(path, x.shape)), tree)

    def scattered(self, tree: PyTree) -> PyTree:
        """Return a sharding for each array [n, …] of any number n of workers: all devices divide a later axis, if their number allows."""

        def sharding(x):
            if self.mesh is None or (axis := stored_axis(x.shape[1:], self.mesh.size)) is None:
                return self.replicated
            return self._sharding(jax.sharding.PartitionSpec(*[None] * (1 + axis), self.mesh.axis_names))

        return jax.tree.map(sharding, tree)

    def _inner_spec(self, path, shape) -> jax.sharding.PartitionSpec:
        """Return how the devices of a stage divide an array of one stage."""
        spec: list[str | None] = [None] * len(shape)
        if (axis := self._divided_axis(path, shape)) is not None:
            spec[axis] = FSDP if self.fsdp > 1 else TENSOR
        return jax.sharding.PartitionSpec(*spec)

    def _divided_axis(self, path, shape) -> int | None:
        """Return the axis that the devices of a stage divide; None: none."""
        if jax.tree_util.GetAttrKey(EachDevice._fields[0]) in path:
            return 0
        if self.fsdp > 1:
            return stored_axis(shape, self.fsdp)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axis = next((axis for end, axis in self.divided if name.endswith(end)), None)
        return axis if axis is not None and len(shape) >= -axis and shape[axis] % self.tensor == 0 else None

    def map(self, fn: Callable, in_axes: Sequence[int | None]) -> Callable:
        """Return a function of one worker as a function of all: of stacked arguments, with stacked results. Not jitted.

        Args:
            fn: function of one worker's (or stage's) pytrees, which may use collectives along `axis` and `STAGES`.
            in_axes: for each argument 0 if it is stacked, None if all workers get the same.
        """

        def one_worker(*args):  # `fn` may return Python numbers.
            return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), fn(*args))

        mapped = self._mapped(one_worker, in_axes)

        @functools.wraps(fn)
        def checked(*args):
            self._check_stacked([arg for arg, axis in zip(args, in_axes) if axis is not None])
            return mapped(*args)

        return checked

    def _check_stacked(self, args: Sequence[PyTree]) -> None:
        sizes = (self.num_workers, self.stages)[: self.num_axes]
        for path, x in jax.tree.leaves_with_path(args):
            if jnp.shape(x)[: self.num_axes] != sizes:
                raise ValueError(
                    f"stacked argument {jax.tree_util.keystr(path)} has shape {jnp.shape(x)}, which must begin with {sizes}, the number "
                    "of workers; use workers.stack(tree) for a copy on each, or None in in_axes for what is the same for all"
                )

    def _mapped(self, fn: Callable, in_axes: Sequence[int | None]) -> Callable:
        if self.mesh is None:
            if self.stages > 1:
                fn = jax.vmap(fn, in_axes=tuple(in_axes), axis_name=STAGE, axis_size=self.stages)
            return jax.vmap(fn, in_axes=tuple(in_axes), axis_name=SIMULATED.name, axis_size=self.num_workers)

        first = (0,) * self.num_axes
        fn = order.in_order(fn) if self.on_cpu and not self.divides else fn

        def on_device(*args):
            local = [arg if axis is None else jax.tree.map(lambda x: x[first], arg) for arg, axis in zip(args, in_axes)]
            return jax.tree_util.tree_map_with_path(lay_out, fn(*local))

        def lay_out(path, x):
            x = jax.lax.with_sharding_constraint(x, self._inner_spec(path, x.shape)) if self.divides else x
            return x[(None,) * self.num_axes]

        shared = jax.sharding.PartitionSpec()
        # Axes of one device are manual as well: host callbacks such as jax.debug.print need all axes to be manual.
        manual = {name for name, size in self.mesh.shape.items() if name not in (TENSOR, FSDP) or size == 1}
        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(shared if axis is None else self._spec for axis in in_axes),
            out_specs=self._spec,
            axis_names=manual,
            check_vma=False,
        )

    def eval_shape(self, fn: Callable, in_axes: Sequence[int | None], *args: PyTree) -> PyTree:
        """Return shapes and dtypes of the results of `map`, for arrays or shapes of its arguments."""
        return jax.eval_shape(self.map(fn, in_axes), *args)

    def jit(self, fn: Callable, in_axes: Sequence[int | None], donate_argnums: Sequence[int] = ()) -> Jitted:
        """Jit `map`; results have the layout of `shardings`, so that passing them in again compiles nothing new."""
        # Where devices divide arrays the layout depends on the array, and `map` has fixed it already.
        jit = jax.jit if self.divides else functools.partial(jax.jit, out_shardings=self.stacked)
        return jit(self.map(fn, in_axes), donate_argnums=tuple(donate_argnums))

    def stack(self, tree: PyTree) -> PyTree:
        """Return stacked state in which every worker has a copy of `tree`, whose leaves are [...], or [S, ...] with stages.

        With several processes it is the tree of the first one, so that all workers start from the same values. A collective: all
        processes must call it, with trees of the same shapes.
        """

        def copy(tree):
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_workers, *jnp.shape(x))), tree)

        is_traced = any(isinstance(x, core.Tracer) for x in jax.tree.leaves(tree))
        if not is_traced:  # Traced values are the same in all processes and on no device yet.
            # Those of arrays on devices of several processes are the same as well.
            if jax.process_count() > 1 and all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(tree)):
                bare, with_keys = _without_keys(tree)
                tree = with_keys(multihost_utils.broadcast_one_to_all(bare))
            tree = jax.tree.map(self._moved, tree)
        return jax.jit(copy, out_shardings=self.shardings(jax.eval_shape(copy, tree)))(tree)

    def _moved(self, x: PyTree) -> PyTree:
        """Move an array that was put on other devices to those of the workers."""
        elsewhere = getattr(x, "committed", False) and x.sharding.device_set != self.replicated.device_set
        return jax.device_put(x, self.replicated) if elsewhere else x

    def shard(self, tree: PyTree) -> PyTree:
        """Lay out stacked arrays, [N, …], over the workers and the devices of each."""
        return jax.device_put(tree, self.shardings(tree))

    def one_device(self, tree: PyTree) -> PyTree:
        """Return shapes and dtypes of one worker's, or one stage's, part of stacked state."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[self.num_axes :], x.dtype), tree)

    def build(self, values: Callable[[int], PyTree], batch_axis: int = 0) -> PyTree:
        """Return stacked arrays made of a pytree `values(worker)` for each worker of this process, the same for all its stages.

        The devices of a worker divide `batch_axis` of its arrays, where their number divides it.
        """
        bare, with_keys = zip(*(_without_keys(values(worker)) for worker in self.own))
        rows = [jax.tree.map(np.asarray, tree) for tree in bare]
        _check_alike(dict(zip(self.own, rows)))
        return with_keys[0](jax.tree.map(lambda *own: self._stacked_rows(dict(zip(self.own, own)), batch_axis), *rows))

    def _stacked_rows(self, rows: dict[int, np.ndarray], batch_axis: int) -> jax.Array:
        rows = {worker: row.reshape((1,) * (self.num_axes - 1) + row.shape) for worker, row in rows.items()}
        shape = (self.num_workers, self.stages)[: self.num_axes] + next(iter(rows.values())).shape[self.num_axes - 1 :]
        if self.simulated:
            return jax.device_put(np.broadcast_to(np.stack(list(rows.values())), shape), self.stacked)
        inner = (slice(None),) * (self.num_axes - 1)
        return jax.make_array_from_callback(
            shape,
            self._batch(shape, batch_axis),
            lambda index: rows[_worker(index)][(*inner, *(index or ())[self.num_axes :])][None],
        )

    def _batch(self, shape: Sequence[int], axis: int) -> jax.sharding.Sharding:
        """Return the sharding of stacked arrays whose examples the devices of a worker divide, where their number divides them."""
        axis += self.num_axes
        if self.fsdp == 1 or axis >= len(shape) or shape[axis] % self.fsdp:
            return self.stacked
        return self._sharding(jax.sharding.PartitionSpec(*self._spec, *[None] * (axis - self.num_axes), FSDP))

    def place(self, tree: PyTree) -> PyTree:
        """Put stacked NumPy arrays, which every process has whole, on the workers' devices."""
        return jax.tree.map(
            lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), tree, self.shardings(tree)
        )

    @property
    def own(self) -> tuple[int, ...]:
        """Indices of the workers whose state this process holds."""
        if self.simulated:
            return tuple(range(self.num_workers))
        index_map = self.whole.stacked.addressable_devices_indices_map((self.num_workers,))
        return tuple(sorted(set(map(_worker, index_map.values()))))

    def fetch(self, tree: PyTree) -> PyTree:
        """Return stacked or replicated arrays as NumPy arrays, whole in every process; random keys stay keys.

        A collective: all processes must call it.
        """
        bare, with_keys = _without_keys(tree)
        return with_keys(jax.tree.map(self.as_numpy, bare))

    def as_numpy(self, x: jax.Array) -> np.ndarray:
        """Return an array on any of the devices as a NumPy array, whole in every process. A collective."""
        # JAX on CPUs computes shards of empty arrays with the shape of the whole.
        is_here = getattr(x, "is_fully_addressable", True) and np.size(x)
        return np.asarray(x if is_here else self._replicate(x))

    def fetch_first(self, x: jax.Array) -> np.ndarray:
        """Fetch an array that is the same on all stages of a worker, without its stage axis: [N, ...]."""
        return self.fetch(x)[:, 0] if self.stages > 1 else self.fetch(x)

    @functools.cached_property
    def _replicate(self) -> Callable:
        return jax.jit(lambda tree: tree, out_shardings=self.replicated)  # Cached, since a new function would be compiled again.


def _without_keys(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return (the tree with random keys replaced by their data, a function that turns such data back into keys)."""
    leaves, structure = jax.tree.flatten(tree)
    is_key = [jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key) for x in leaves]

    def with_keys(bare):
        data = structure.flatten_up_to(bare)
        return structure.unflatten(
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf)) if key else x for x, leaf, key in zip(data, leaves, is_key)
        )

    return structure.unflatten(jax.random.key_data(x) if key else x for x, key in zip(leaves, is_key)), with_keys


def _worker(index: Sequence[slice] | None) -> int:
    """Return the first worker of a part of a stacked array."""
    return index[0].start or 0 if index else 0


@options.checked
def make_workers(
    num_workers: Count,
    *,
    local_size: Count = 1,
    devices_per_worker: Count = 1,
    across_hosts: bool = False,
    stages: Count = 1,
    tensor: Count = 1,
    simulate: bool = False,
    devices: Sequence[Device] | None = None,
    divided: Sequence[tuple[str, int]] = (),
) -> Workers:
    """Return N workers, placed on the devices of all processes, or simulated on one device.

    Args:
        num_workers: N.
        local_size: L, workers that share a node; divides N.
        devices_per_worker: L, devices that divide a worker's arrays and batch (`fsdp`), next to each other in a fast network: a host,
            or a TPU slice. Simulated workers ignore it.
        across_hosts: allow the devices of a worker to be in more fast networks than necessary, and so to gather parameters slowly.
        stages: S, pipeline stages of a worker; instead of L, S·T devices hold a worker.
        tensor: T, devices that divide the arrays of a stage.
        simulate: whether to run all workers and stages on one device by `vmap`.
        devices: where to place them, worker by worker and stage by stage; None: `jax.devices()`, in the order that JAX finds best.
            For devices that are only described (`jax.experimental.topologies`), programs can be compiled but not run.
        divided: which parameters tensor-parallel groups divide; see `Workers`.

    Raises:
        ValueError: if `local_size` does not divide N, if there are too few devices, if a worker's devices would be in more fast networks
            than necessary without `across_hosts`, or for simulated workers if there are several processes or T > 1.
    """
    if simulate:
        _refuse(_not_simulated(tensor))
        return simulated_workers(num_workers, local_size=local_size, stages=stages, divided=divided)
    ordered, devices = devices is not None, jax.devices() if devices is None else devices
    needed = num_workers * stages * tensor * devices_per_worker
    _refuse(_not_divisible(num_workers, local_size))
    _refuse(_not_placed(num_workers, stages, tensor, devices_per_worker, len(devices)))
    axes, shape = zip(*_axes(num_workers, local_size, stages, tensor, devices_per_worker))
    if devices_per_worker > 1:
        devices, ordered = devices[:needed] if ordered else _by_network(devices, devices_per_worker)[:needed], True
        if not across_hosts:
            _refuse(_not_together(devices, devices_per_worker))
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    if ordered:
        mesh = jax.sharding.Mesh(np.array(devices[:needed]).reshape(shape), axes, axis_types=types)
    else:
        mesh = jax.make_mesh(shape, axes, axis_types=types, devices=devices[:needed])
    workers = Workers(num_workers, local_size, mesh, stages, tuple(divided))
    if workers.on_cpu and workers.divides:  # See `program.order`: from here on, this process must not cache compiled programs.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    return workers


@options.checked
def simulated_workers(
    num_workers: Count, *, local_size: Count = 1, stages: Count = 1, divided: Sequence[tuple[str, int]] = ()
) -> Workers:
    """Return workers as `make_workers` does with `simulate`, without starting JAX's devices, so that shapes can be traced before."""
    _refuse(_not_divisible(num_workers, local_size))
    return Workers(num_workers, local_size, None, stages, tuple(divided))


def described_workers(
    num_workers: int,
    *,
    local_size: int = 1,
    devices_per_worker: int = 1,
    stages: int = 1,
    tensor: int = 1,
    divided: Sequence[tuple[str, int]] = (),
) -> Workers:
    """Return workers as `make_workers` does, on devices that need not exist: functions can be traced, but not compiled."""
    axes, shape = zip(*_axes(num_workers, local_size, stages, tensor, devices_per_worker))
    described = jax.sharding.AbstractMesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    return Workers(num_workers, local_size, described, stages, tuple(divided))


def _axes(num_workers: int, local_size: int, stages: int, tensor: int, fsdp: int) -> list[tuple[str, int]]:
    """Return names and sizes of the axes of a mesh."""
    sizes = {NODE: num_workers // local_size, LOCAL: local_size, STAGE: stages, TENSOR: tensor, FSDP: fsdp}
    return [(name, size) for name, size in sizes.items() if name != FSDP or size > 1]


def _refuse(problems: Iterator[str]) -> None:
    """Raise a ValueError for the first problem."""
    for problem in problems:
        raise ValueError(problem)


def _not_divisible(num_workers: int, local_size: int) -> Iterator[str]:
    if num_workers % local_size:
        fits = [size for size in range(1, num_workers + 1) if num_workers % size == 0]
        yield f"local_size={local_size} does not divide workers={num_workers}; use one of {fits}"


def _not_placed(num_workers: int, stages: int, tensor: int, fsdp: int, num_devices: int) -> Iterator[str]:
    size, processes = stages * tensor * fsdp, jax.process_count()
    if stages * tensor > 1 and fsdp > 1:
        yield f"{fsdp} devices per worker (fsdp) with stages={stages} and tensor={tensor}: use either fsdp or stages and tensor"
    of = f" of {fsdp} devices" if fsdp > 1 else f" of stages={stages} x tensor={tensor}" if size > 1 else ""
    needed, called = num_workers * size, f"workers={num_workers}{of}"
    if num_devices < needed and num_devices < size and fsdp > 1:
        yield f"{called} but there are {num_devices} devices; use fsdp={num_devices} at most, or simulate the workers on one device"
    if num_devices < needed:
        fits = f"use workers={num_devices // size}" if num_devices >= size else f"use stages x tensor <= {num_devices}"
        yield f"{called} but there are {num_devices} devices; {fits} or simulate the workers on one device"
    if processes > 1 and num_devices != needed:
        yield f"{called} but {processes} processes hold {num_devices} devices; with several processes every device belongs to a worker"


def _network(device: Device) -> int:
    """Return which fast network a device is in: its TPU slice, or host of GPUs, else its process."""
    number = getattr(device, "slice_index", None)
    return device.process_index if number is None or device.platform == "cpu" else number


def _by_network(devices: Sequence[Device], size: int) -> list[Device]:
    """Return the devices by fast network; within one, groups of `size` are next to each other, if they divide it."""
    networks: dict[int, list[Device]] = {}
    for device in devices:
        networks.setdefault(_network(device), []).append(device)
    if any(len(own) % size for own in networks.values()):
        return [device for own in networks.values() for device in own]
    return [device for own in networks.values() for device in mesh_utils.create_device_mesh((len(own) // size, size), own).flat]


def _not_together(devices: Sequence[Device], size: int) -> Iterator[str]:
    """Yield why the devices of a worker, each `size` consecutive ones, are in more fast networks than necessary."""
    places = [_network(device) for device in devices]
    largest = max(map(places.count, places))
    fewest = -(-size // largest)
    for worker in range(len(places) // size):
        spanned = len(set(places[worker * size : (worker + 1) * size]))
        if spanned > fewest:
            yield (
                f"{size} devices per worker (fsdp): those of worker {worker} would be on {spanned} hosts or slices, and {fewest} of "
                f"{largest} devices can hold them; use a number that divides {largest}, order the devices by host, or set "
                "across_hosts to gather parameters over the slow network"
            )


def _not_simulated(tensor: int) -> Iterator[str]:
    if jax.process_count() > 1:
        yield f"simulate runs all workers on one device, but there are {jax.process_count()} processes; start a single one"
    if tensor > 1:
        yield f"tensor={tensor} with simulate: one device cannot divide arrays; use tensor=1, whose trajectory is the same"


def one_by_one(fn: Callable) -> Callable:
    """Return a function of one worker without collectives, which simulated workers on a CPU compute one after the other.

    On a CPU the caches hold what one worker computes, but not what all do, and operations that are batched over weights are slow. On
    other platforms, and where workers are devices of their own, it is the function itself.
    """
    in_turn = jax.custom_batching.sequential_vmap(fn)

    @functools.wraps(fn)
    def mapped(*args):
        return (in_turn if jax.default_backend() == "cpu" else fn)(*args)

    return mapped


def _check_alike(rows: dict[int, PyTree]) -> None:
    """Raise a ValueError that names the worker whose values have other shapes or types than those of the first one."""
    kinds = [(jax.tree.structure(row), [(x.shape, x.dtype) for x in jax.tree.leaves(row)]) for row in rows.values()]
    if all(kind == kinds[0] for kind in kinds):  # Every batch passes here; names are made for errors only.
        return
    first, *others = (
        (worker, {jax.tree_util.keystr(path): (x.shape, str(x.dtype)) for path, x in jax.tree.leaves_with_path(row)})
        for worker, row in rows.items()
    )
    for worker, row in others:
        if row != first[1]:
            name = next(name for name in first[1] | row if first[1].get(name) != row.get(name))
            here, there = (" of ".join(map(str, shape)) if (shape := own.get(name)) else "missing" for own in (row, first[1]))
            raise ValueError(
                f"worker {worker}: array{' ' * bool(name)}{name} is {here}, and {there} on worker {first[0]}; give all workers arrays "
                "of the same shapes and types"
            )
