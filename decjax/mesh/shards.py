"""The devices among which a worker's arrays are divided (fully sharded data parallelism), and functions that each runs on its shard.

A function of one worker sees whole arrays. The compiler divides them among the L devices of the worker, and gathers parameters where
the model needs them. What is exchanged with other workers must not be gathered: each device sends its own shard to the device at the
same place in the other worker. So `by_shard` maps the methods of mixers and reducers once more, over the devices of a worker.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from decjax.mesh.axis import Axis
from decjax.mesh.tensor import FSDP, EachDevice
from decjax.typing import PyTree

LEAST = 2**12  # values; smaller arrays are whole on each device of a worker, since gathering them takes only time
PLACES = Axis(FSDP)


def num_shards() -> int:
    """Return L, the number of devices among which the compiler divides arrays here; 1 where a function sees what one device holds."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if FSDP in mesh.manual_axes else mesh.shape.get(FSDP, 1)


def longest_axis(shape: Sequence[int], count: int) -> int | None:
    """Return the longest axis that `count` divides, the first of equal ones; None if there is none."""
    return max((axis for axis, size in enumerate(shape) if size and size % count == 0), key=lambda axis: shape[axis], default=None)


def stored_axis(shape: Sequence[int], count: int) -> int | None:
    """Return the axis along which the state of a worker is divided among its devices; None: each holds it whole."""
    return longest_axis(shape, count) if math.prod(shape) >= LEAST else None


def spread(x: jax.Array, axis: int) -> jax.Array:
    """Divide an axis, such as the examples of a batch, among the devices of a worker, if their number divides it."""
    if num_shards() == 1 or x.shape[axis] % num_shards():
        return x
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*[None] * axis, FSDP))


def own_shard_key(key: jax.Array) -> jax.Array:
    """Return a random key that differs between the devices of a worker, in functions of a shard; elsewhere the key itself."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.random.fold_in(key, PLACES.index) if FSDP in mesh.manual_axes and mesh.shape[FSDP] > 1 else key


def by_shard(returns: Literal["tree", "state", "both"]) -> Callable[[Callable], Callable]:
    """Return a decorator of a part's method, `method(part, tree, *args)`, which each device of a worker then runs on its shard of the tree.

    Every value belongs to one device: arrays are divided along their longest axis that L divides, others as vectors padded with zeros.
    Of a state, which the method may also take among `args`, each device has its own version, an `EachDevice`. Without such devices, and
    in a function of a shard, the method is called directly.

    Args:
        returns: what the method returns: a tree of the same structure and shapes, a state, or the pair of both.

    Raises:
        ValueError: from the method, if its part is not `sharded`.
    """

    def decorate(method):
        @functools.wraps(method)
        def mapped(part: Any, tree: PyTree, *args: Any, **options: Any) -> Any:
            if num_shards() == 1:
                return method(part, tree, *args, **options)
            if not part.sharded:
                raise ValueError(
                    f"{part} needs whole arrays, and the {num_shards()} devices of a worker divide them; use one device per worker "
                    "(fsdp=1), or a part whose trait `sharded` is true"
                )
            moved, state = _on_each_device(functools.partial(method, part, **options), returns, tree, args)
            return moved if returns == "tree" else state if returns == "state" else (moved, state)

        return mapped

    return decorate


def map_by_shard(cls: type, **returns: Literal["tree", "state", "both"]) -> None:
    """Decorate those of the named methods that a class defines itself with `by_shard`."""
    for name in returns.keys() & vars(cls).keys():
        setattr(cls, name, by_shard(returns[name])(vars(cls)[name]))


def _on_each_device(fn: Callable, returns: str, tree: PyTree, args: Sequence[Any]) -> tuple[PyTree, PyTree]:
    leaves, treedef = jax.tree.flatten(tree)
    divided = [_divided(x, num_shards()) for x in leaves]
    specs = [spec for _, spec in divided]
    states = {i: arg for i, arg in enumerate(args) if isinstance(arg, EachDevice)}
    shared = {i: arg for i, arg in enumerate(args) if isinstance(arg, jax.Array)}

    def on_device(shards, states, shared):
        traced = {i: jax.tree.map(lambda x: x[0], state.of_each_device) for i, state in states.items()} | shared
        result = fn(treedef.unflatten(shards), *(traced.get(i, arg) for i, arg in enumerate(args)))
        moved, state = result if returns == "both" else (result, ()) if returns == "tree" else ((), result)
        return jax.tree.leaves(moved), _of_each_device(state)

    each = jax.sharding.PartitionSpec(FSDP)
    moved, state = jax.shard_map(
        on_device,
        in_specs=(specs, each, jax.sharding.PartitionSpec()),
        out_specs=([] if returns == "state" else specs, each),
        axis_names={FSDP},
        check_vma=False,
    )([x for x, _ in divided], states, shared)
    whole = [x if x.shape == like.shape else x[: like.size].reshape(like.shape) for x, like in zip(moved, leaves)]
    return () if returns == "state" else treedef.unflatten(whole), state


def _divided(x: jax.Array, count: int) -> tuple[jax.Array, jax.sharding.PartitionSpec]:
    """Return (an array in a shape that `count` devices divide, how they do); counters stay whole, since no part sends them."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x, jax.sharding.PartitionSpec()
    axis = longest_axis(x.shape, count)
    if axis is None:
        return jnp.pad(x.ravel(), (0, -x.size % count)), jax.sharding.PartitionSpec(FSDP)
    return x, jax.sharding.PartitionSpec(*[None] * axis, FSDP)


def _of_each_device(state: PyTree) -> PyTree:
    return EachDevice(jax.tree.map(lambda x: jnp.asarray(x)[None], state)) if jax.tree.leaves(state) else state
