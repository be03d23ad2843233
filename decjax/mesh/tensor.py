"""The devices of a tensor-parallel group: how arrays are divided between them, and functions that each runs by itself."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from decjax.mesh.axis import TENSOR, Axis
from decjax.typing import PyTree

FSDP = "fsdp"
GROUP = Axis(TENSOR)
"""The axis of the devices of a tensor-parallel group, for functions that run inside `each_device` or `each_part`."""


def tensor_size() -> int:
    """Return K, the number of devices in a tensor-parallel group; 1 where there is none."""
    return jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)


def divide(x: jax.Array, axis: int | None) -> jax.Array:
    """Lay `x` out within its tensor-parallel group: divided along `axis`, or, for None, whole on every device.

    The devices that divide the state of a worker (`fsdp`) gather parameters here, of one or two dimensions, and divide the examples of
    activations, which have more dimensions: otherwise the compiler divides activations as it finds the parameters. Values do not change.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {name: mesh.shape.get(name, 1) for name in (TENSOR, FSDP) if name not in mesh.manual_axes}
    if max(sizes.values(), default=1) == 1:
        return x
    spec: list[str | None] = [None] * x.ndim
    count = sizes.get(FSDP, 1)
    if count > 1 and x.ndim > 2 and x.shape[0] % count == 0:
        spec[0] = FSDP
    if axis is not None and sizes.get(TENSOR, 1) > 1:
        spec[axis] = TENSOR
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*spec))


class EachDevice(NamedTuple):
    """A pytree of which each device of a tensor-parallel group has its own version.

    Attributes:
        of_each_device: the tree, with leaves [K, …], one entry on each device.
    """

    of_each_device: PyTree


def for_each_device(tree: PyTree) -> PyTree:
    """Return the tree in the form that `each_device` takes, equal on all devices of the group; unchanged where there is no group."""
    K = tensor_size()
    return tree if K == 1 else EachDevice(jax.tree.map(lambda x: divide(jnp.broadcast_to(x, (K, *jnp.shape(x))), 0), tree))


def each_device(fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], own: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
    """Return the results of a function that each device of a tensor-parallel group runs by itself, on the values that it holds.

    Args:
        fn: `fn(own, shared) -> (own, shared)` of one device. It may use `own_rows`, `all_rows` and `own_key`, and `Axis.exchange` along
            the other axes; the `shared` that it returns must be the same on all devices of the group.
        own: from `for_each_device`, or returned by an earlier call, which has the same form.
        shared: arrays that all devices of the group see whole.
    """
    if tensor_size() == 1:
        return fn(own, shared)

    def on_device(own, shared):
        own, shared = fn(jax.tree.map(lambda x: x[0], own.of_each_device), shared)
        return EachDevice(jax.tree.map(lambda x: x[None], own)), shared

    specs = jax.sharding.PartitionSpec(TENSOR), jax.sharding.PartitionSpec()
    return jax.shard_map(on_device, in_specs=specs, out_specs=specs, axis_names={TENSOR}, check_vma=False)(own, shared)


def each_part(fn: Callable[..., jax.Array], arrays: Sequence[jax.Array], axes: Sequence[int]) -> jax.Array:
    """Return the result of a function that each device of a tensor-parallel group runs by itself, on the parts of arrays that it holds.

    Args:
        fn: of one device's part of each array; it may communicate along `GROUP`, and so must not be differentiated. Its result must be
            the same on all devices of the group.
        arrays: whole, as functions see them.
        axes: for each array the axis along which the group divides it.
    """
    specs = tuple(jax.sharding.PartitionSpec(*[None] * axis, TENSOR) for axis in axes)
    whole = jax.sharding.PartitionSpec()
    return jax.shard_map(fn, in_specs=specs, out_specs=whole, axis_names={TENSOR}, check_vma=False)(*arrays)


def own_rows(x: jax.Array) -> jax.Array:
    """Inside `each_device`: the k-th of K equal parts of the first axis, on the k-th device; K divides the axis."""
    size = len(x) // tensor_size()
    return x if size == len(x) else jax.lax.dynamic_slice_in_dim(x, GROUP.index * size, size)


def all_rows(x: jax.Array) -> jax.Array:
    """Inside `each_device`: the array whose parts, as of `own_rows`, the devices of the group hold."""
    return x if tensor_size() == 1 else GROUP.all_gather(x).reshape(-1, *x.shape[1:])


def own_key(key: jax.Array | None) -> jax.Array | None:
    """Inside `each_device`: a random key that differs between the devices of the group."""
    return key if key is None or tensor_size() == 1 else jax.random.fold_in(key, GROUP.index)
