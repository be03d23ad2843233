"""Optimizers for decentralized and synchronous training: optax transformations that also communicate, and AccumAdam."""

from decjax.optim.accumulated import AccumulatedAdamState, accumulated_adam, accumulated_adamw, scale_by_accumulated_adam
from decjax.optim.decentralize import (
    AllReduce,
    Decentralized,
    DecentralizeState,
    SynchronizeState,
    decentralize,
    decentralized_adam,
    decentralized_adamw,
    stale_exchange,
    synchronize,
)
from decjax.optim.inner import apply_if_finite, clip_by_global_norm
from decjax.optim.local_updates import DiLoCo, Local, LocalUpdatesState, SparseLoCo, local_updates
from decjax.optim.memories import lasting, transient
from decjax.optim.method import ORDERS, Method, Mixing, Ordered, Reducing, Wrapping
from decjax.optim.own_loop import make_step

__all__ = [
    "AccumulatedAdamState",
    "AllReduce",
    "DecentralizeState",
    "Decentralized",
    "DiLoCo",
    "Local",
    "LocalUpdatesState",
    "Method",
    "Mixing",
    "ORDERS",
    "Ordered",
    "Reducing",
    "SparseLoCo",
    "SynchronizeState",
    "Wrapping",
    "accumulated_adam",
    "accumulated_adamw",
    "apply_if_finite",
    "clip_by_global_norm",
    "decentralize",
    "decentralized_adam",
    "decentralized_adamw",
    "lasting",
    "local_updates",
    "make_step",
    "scale_by_accumulated_adam",
    "stale_exchange",
    "synchronize",
    "transient",
]
