"""Workers as axes of a device mesh, functions mapped over them, and the collectives along each axis.

A function of one worker is written once, with an axis, and runs in two ways:

    devices      one worker per device, under `jax.shard_map`; its axis is `WORKERS`, the pair (node, local)
    simulated    all workers on one device, under `jax.vmap`; its axis is `SIMULATED`

Both give the same trajectory. Stacked state has a leading worker axis, `[N, ...]`, which functions of one worker do not see. Worker i
is local worker i mod L of node i div L: each L consecutive workers share a node.

The mesh has the axes (node, local, stage, tensor); any may be 1. With S pipeline stages a worker is S·T devices, and stacked state is
`[N, S, ...]`. A function is then written for one stage of one worker and sees neither axis; it sends to the same stage of other
workers along the worker axis, and to other stages of its worker along `STAGES`. The tensor axis is left to the compiler: functions
see whole arrays, and `divide` says how these are laid out on the group. Inside `each_device`, however, a function sees what one device
holds, so that each device can send its own part of a message between stages; inside `each_part` it sees the device's parts of some
arrays, and sends to the other devices of the group along `GROUP`.

A worker may also be L devices that divide its arrays and its batch (`fsdp`); the mesh then has that axis, too, which is left to the
compiler as the tensor axis is. Functions see whole arrays. What mixers and reducers do runs within `by_shard`, where a function sees
what one device holds, so that each sends its own shard.

    axis       `Axis`: exchanges, means, gathers
    tensor     arrays divided between the devices of a tensor-parallel group
    shards     arrays divided among the devices of a worker
    workers    the mesh, and mapping functions over it

Axis names are written in this package only. `shard_map` runs with `check_vma=False`: grouped collectives need it, and a user's model
may scan over constants. Therefore no collective may be inside a loss that is differentiated.
"""

from decjax.mesh.axis import MAPPED, SIMULATED, STAGES, WORKERS, Axis, between_cpu_processes, mean_bytes
from decjax.mesh.shards import by_shard, map_by_shard, num_shards, own_shard_key, spread
from decjax.mesh.tensor import (
    GROUP,
    EachDevice,
    all_rows,
    divide,
    each_device,
    each_part,
    for_each_device,
    own_key,
    own_rows,
    tensor_size,
)
from decjax.mesh.workers import Workers, described_workers, make_workers, one_by_one, simulated_workers

__all__ = [
    "Axis",
    "EachDevice",
    "GROUP",
    "MAPPED",
    "SIMULATED",
    "STAGES",
    "WORKERS",
    "Workers",
    "all_rows",
    "between_cpu_processes",
    "by_shard",
    "described_workers",
    "divide",
    "each_device",
    "each_part",
    "for_each_device",
    "make_workers",
    "map_by_shard",
    "mean_bytes",
    "num_shards",
    "one_by_one",
    "own_key",
    "own_rows",
    "own_shard_key",
    "simulated_workers",
    "spread",
    "tensor_size",
]
