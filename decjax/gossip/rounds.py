"""Executes rounds of a topology: messages along shifts, means inside nodes, and the bytes that both send."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets, codecs, mesh
from decjax.topology import Round, Shift, Topology
from decjax.typing import DType, PyTree


def own_weight(weights: tuple[float, ...], group_size: int, axis: mesh.Axis, dtype: DType) -> float | jax.Array:
    """Return this worker's entry of per-node weights; a Python float if all are equal, which saves the look-up."""
    if len(set(weights)) == 1:
        return weights[0]
    return jnp.asarray(weights, dtype)[axis.index // group_size]


def is_mean(round_: Round) -> bool:
    """Return whether a round consists of exact means inside nodes only, without messages between nodes."""
    return not round_.shifts and set(round_.self_weights) == {1.0}


def member_pairs(shift: Shift, group_size: int) -> list[tuple[int, int]]:
    """Return the pairs (source, target) of workers of a shift: member k of a node sends to member k of the other node."""
    return [(source * group_size + k, target * group_size + k) for source, target in shift.pairs for k in range(group_size)]


def mix_round(x_P: jax.Array, round_: Round, axis: mesh.Axis, wide: bool = False) -> jax.Array:
    """Return this worker's vector after one round: (Wx)_i for W = W_nodes ⊗ J_L/L.

    With L > 1, members of a node average by reduce-scatter, exchange their share with the same member of other nodes, and gather: a
    joint mean of two nodes sends P values out of a node, not L·P.

    Args:
        x_P: this worker's vector; L divides P.
        round_: gives W.
        axis: the worker axis.
        wide: whether a result of narrow values stays in float32, unless nodes gather it.
    """
    L = round_.group_size
    if is_mean(round_):
        return axis.group_mean(x_P, L)
    share = axis.scatter_mean(x_P, L)
    dtype = buckets.wide_dtype(x_P)
    mixed = own_weight(round_.self_weights, L, axis, dtype) * share.astype(dtype)
    for shift in round_.shifts:
        arrived = axis.exchange(share, member_pairs(shift, L))
        mixed += own_weight(shift.weights, L, axis, dtype) * arrived.astype(dtype)
    return mixed if wide and L == 1 else axis.gather(mixed.astype(x_P.dtype), L)


def difference(x_P: jax.Array, round_: Round, axis: mesh.Axis) -> jax.Array:
    """Return (Wx)_i − x_i = Σ_j W_ij (x_j − x_i), in float32 or wider, for W with rows that sum to one.

    Each difference is rounded to its own size, not to that of x, so over workers their sum is zero up to roundings as small. With L > 1
    the mean of a node is rounded to the size of x; what that loses of it is averaged as well, which sends as much again inside nodes.
    Otherwise it sends what `mix_round` sends.
    """
    L, dtype = round_.group_size, buckets.wide_dtype(x_P)
    share = axis.scatter_mean(x_P, L)
    own, drawn = share.astype(dtype), jnp.zeros(share.shape, dtype)
    for shift in round_.shifts:
        arrived = axis.exchange(share, member_pairs(shift, L)).astype(dtype)
        drawn += own_weight(shift.weights, L, axis, dtype) * (arrived - own)
    if L == 1:
        return drawn
    away_P = x_P.astype(dtype) - axis.gather(share, L).astype(dtype)
    lost = axis.scatter_mean(away_P.astype(x_P.dtype), L).astype(dtype)
    return axis.gather((drawn + lost).astype(x_P.dtype), L).astype(dtype) - away_P


def pull(codec: codecs.Codec, message: PyTree, own: jax.Array, round_: Round, axis: mesh.Axis) -> jax.Array:
    """Return the pull of neighbors on worker i, with the shape and type of `own`.

        pull_i = Σ_j W_ij c_j − c_i,   c_j the decoded message of worker j

    Its sum over workers is zero if columns of W sum to one, whatever the codec loses. With L > 1, W is W_nodes.

    Args:
        codec: decodes messages.
        message: this worker's message, which is sent along the round's shifts.
        own: c_i, this worker's decoded message.
        round_: gives W.
        axis: the worker axis.
    """
    L = round_.group_size
    drawn = (own_weight(round_.self_weights, L, axis, own.dtype) - 1) * own
    for shift in round_.shifts:
        pairs = member_pairs(shift, L)
        arrived = codec.decode(axis.exchange_tree(message, pairs), own.shape, own.dtype)
        weight = own_weight(shift.weights, L, axis, own.dtype)
        # A worker to which nothing is sent has a message of zeros, which may be decoded to anything.
        drawn += weight * arrived if isinstance(weight, float) else jnp.where(weight > 0, weight * arrived, 0)
    return drawn


def num_messages(round_: Round) -> np.ndarray:
    """Return the number of messages to other nodes that each worker sends in a round, [N]."""
    L = round_.group_size
    return round_.volume() * L - 2 * (L - 1)


def sent_bytes(round_: Round, layout: buckets.Layout, message_bytes: int | None = None) -> np.ndarray:
    """Return the bytes that each worker sends in a round, [N]; a message to a node has `message_bytes`, or a share's."""
    L = round_.group_size
    share_bytes = layout.num_bytes / L if message_bytes is None else message_bytes
    return 2 * (L - 1) / L * layout.num_bytes + num_messages(round_) * share_bytes


def step_bytes(topology: Topology, indices: list[int], layout: buckets.Layout, message_bytes: int | None = None) -> np.ndarray:
    """Return the bytes that each worker sends in the rounds of the given indices together, [N]; other arguments as of `sent_bytes`."""
    sent = (sent_bytes(topology.rounds[index], layout, message_bytes) for index in indices)
    return sum(sent, np.zeros(topology.num_workers))


def common_multiple(topology: Topology) -> int:
    """Return the number that must divide a bucket's size, so that members of every node get equal shares."""
    return math.lcm(*(round_.group_size for round_ in topology.rounds))
