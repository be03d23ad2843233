"""Optimizers for decentralized and synchronous training: optax transformations that also communicate, AccumAdam and 1-bit Adam."""

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
from decjax.optim.gossip_diloco import GossipDiLoCo, NoLoCo
from decjax.optim.inner import apply_if_finite, clip_by_global_norm
from decjax.optim.local_updates import DiLoCo, Local, LocalUpdatesState, SparseLoCo, local_updates
from decjax.optim.memories import lasting, transient
from decjax.optim.method import ORDERS, Method, Mixing, Ordered, Reducing, Wrapping
from decjax.optim.onebit import OnebitAdam, OnebitAdamState, scale_by_onebit_adam
from decjax.optim.own_loop import make_step
from decjax.optim.streaming import StreamingDiLoCo
from decjax.optim.tracking import Tracking, TrackState, track, tracked_exchange
from decjax.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "AccumulatedAdamState",
    "AllReduce",
    "DecentralizeState",
    "Decentralized",
    "DiLoCo",
    "GossipDiLoCo",
    "Local",
    "LocalUpdatesState",
    "Method",
    "Mixing",
    "NoLoCo",
    "ORDERS",
    "OnebitAdam",
    "OnebitAdamState",
    "Ordered",
    "Reducing",
    "SparseLoCo",
    "StreamingDiLoCo",
    "SynchronizeState",
    "TrackState",
    "Tracking",
    "Wrapping",
    "ZeroOneAdam",
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
    "scale_by_onebit_adam",
    "stale_exchange",
    "synchronize",
    "track",
    "tracked_exchange",
    "transient",
]
