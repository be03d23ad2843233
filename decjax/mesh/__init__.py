"""Where workers live: axis names, the device mesh, and the only collectives on worker axes.

A per-worker function is written once, with an axis name, and runs in two ways:

    devices      one worker per device, under `jax.shard_map`; the worker axis is the pair (node, local)
    simulated    all workers on one device, under `jax.vmap`; the worker axis is called "worker"

Both give the same trajectory. Stacked state carries a leading worker axis, `[N, ...]`; inside a mapped function that axis
is gone. Worker i is local worker i mod L of node i div L, so that blocks of L consecutive workers share a node.

The mesh has the axes (node, local, stage, tensor); any may be 1. With S pipeline stages a worker is S·T devices, and its state
is `[N, S, ...]`: a function is written for one stage of one worker, sees neither axis, and talks to other workers' devices of its
own stage along the worker axes, and to the worker's other stages along `STAGE`. The tensor axis is the compiler's: functions
see whole arrays, and `divide` says how they lie on the group. Only inside of `each_device` they see what one device has: there each
sends its own part of what goes to other stages.

    collectives  axis names, exchanges, means, gathers
    workers      the mesh, and mapping over it

This package holds every axis-name literal. `shard_map` runs with `check_vma=False`: grouped collectives need it, and a
user's model may scan over constants. The price is a rule: no collective inside a loss that is differentiated.
"""

from decjax.mesh.collectives import (
    LOCAL,
    NODE,
    SIMULATED,
    STAGE,
    TENSOR,
    WORKER,
    AxisName,
    EachDevice,
    all_gather,
    all_rows,
    all_to_all,
    between_cpu_processes,
    divide,
    each_device,
    exchange,
    for_each_device,
    gather,
    group_mean,
    mean,
    mean_bytes,
    num_workers,
    own_key,
    own_rows,
    own_share,
    scatter_mean,
    sent_by,
    stage_index,
    sum_over_stages,
    tensor_size,
    worker_index,
)
from decjax.mesh.workers import Workers, make_workers

__all__ = [
    "AxisName",
    "EachDevice",
    "LOCAL",
    "NODE",
    "SIMULATED",
    "STAGE",
    "TENSOR",
    "WORKER",
    "Workers",
    "all_gather",
    "all_rows",
    "all_to_all",
    "between_cpu_processes",
    "divide",
    "each_device",
    "exchange",
    "for_each_device",
    "gather",
    "group_mean",
    "make_workers",
    "mean",
    "mean_bytes",
    "num_workers",
    "own_key",
    "own_rows",
    "own_share",
    "scatter_mean",
    "sent_by",
    "stage_index",
    "sum_over_stages",
    "tensor_size",
    "worker_index",
]
