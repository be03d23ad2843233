"""Averages of encoded messages. Encoded messages cannot be added, so there are two forms, with C a codec with error feedback:

    gather    every worker gets all messages:    averaged = (1/N) Σ_j C(x_j)           each sends its message N−1 times
    shards    worker k averages the k-th of      averaged_k = C((1/N) Σ_j C(x_jk))     each sends 2(N−1)/N of a message
              N shards and encodes the mean

In form "shards" the owner of a shard remembers what the message of its mean loses: error feedback on both sides, as in the compressed
all-reduce of 1-bit Adam (Tang et al. 2021, arXiv 2102.02888). All workers decode the same bytes in the same order, and so get the
same average, bit for bit. All messages of a worker in a step travel as one array of bytes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from decjax import buckets, codecs, mesh
from decjax.channel import Channel
from decjax.codecs.feedback import Feedback
from decjax.typing import Arrays, PyTree


class Side(NamedTuple):
    """Memory of the sender and the receivers of messages; one entry for each array."""

    memory: tuple[PyTree, ...]  # the sender's `codecs.feedback.Memory`
    estimate: tuple[PyTree, ...]  # the sum of changes that receivers have got so far; () if messages are not changes


def layout(channel: Channel, ends: Sequence[codecs.Codec], tree: PyTree, num_shards: int = 0) -> buckets.Layout:
    """Return the layout of the buckets of a tree that are encoded.

    Arrays that one of the codecs (`ends`) sees as matrices and makes smaller are matrices I×J of their own; the others are joined to
    vectors. With N shards, buckets are [N, …], N parts of their values or rows, padded with zeros.
    """

    def matrix(leaf):
        if not (sides := codecs.matrix_shape(leaf.shape)):
            return None
        part = (-(-sides[0] // max(1, num_shards)), sides[1])
        is_seen = any(len(codecs.seen_shape(codec, part, codecs.working_dtype(leaf.dtype))) > 1 for codec in ends)
        return sides if is_seen else None

    return channel.layout(tree, alone=channel.alone, matrix=matrix, num_shards=num_shards)


def num_bytes(codec: codecs.Codec, layout: buckets.Layout, num_workers: int, header_bytes: int) -> float:
    """Return the bytes that each worker sends for the average of arrays of this layout; `header_bytes` are added to each message."""
    message = sum(codec.num_bytes(x.shape, x.dtype) for x in layout.parts())
    return float((num_workers - 1) * ((2 if layout.num_shards else 1) * message + header_bytes))


def check(codec: codecs.Codec) -> None:
    """Raise a ValueError for a codec whose messages cannot be averaged."""
    if not codec.static_bytes or codec.state_key == "sample":
        fault = "remembers samples of a batch" if codec.static_bytes else "has messages of varying size"
        raise ValueError(f"codec {codec.name!r} {fault}, so collectives cannot average its messages; use 'int8' or 'topk'")


def worker_side(feedback: Feedback, layout: buckets.Layout) -> Side:
    """Return the initial memory and estimate of a worker's own messages."""
    one = _start(feedback, layout)
    if not layout.num_shards:
        return one
    return one._replace(memory=jax.tree.map(lambda x: jnp.broadcast_to(x, (layout.num_shards, *jnp.shape(x))), one.memory))


def owner_side(feedback: Feedback, layout: buckets.Layout) -> Side:
    """Return the initial memory and estimate of the means of shards that a worker owns."""
    one = _start(feedback.relay(), layout)
    return one._replace(estimate=jax.tree.map(lambda x: jnp.zeros((layout.num_shards, *x.shape), x.dtype), one.estimate))


def _start(feedback: Feedback, layout: buckets.Layout) -> Side:
    return Side(
        tuple(feedback.init(x.shape, x.dtype) for x in layout.parts()),
        tuple(jnp.zeros(x.shape, x.dtype) if feedback.builds else () for x in layout.parts()),
    )


Header = Callable[[list[jax.Array]], jax.Array]  # from a worker's own decoded messages to an array that is sent with them


def gathered(
    feedback: Feedback, arrays: list[jax.Array], side: Side, key: jax.Array, header: Header, axis: mesh.Axis
) -> tuple[list[jax.Array], Side, jax.Array]:
    """Form "gather": the averages, the new memory and estimate, and the headers of all workers, [N, …]."""
    messages, memory = _encoded(feedback, arrays, side.memory, key)
    sent = messages, header(_decoded(feedback, messages, arrays))
    means, headers = _mean(feedback, axis.all_gather(as_bytes(sent)), sent, arrays)
    averages, estimate = _received(feedback, side.estimate, means)
    return averages, Side(memory, estimate), headers


def sharded(
    feedback: Feedback, arrays: list[jax.Array], worker: Side, owner: Side, key: jax.Array, header: Header, axis: mesh.Axis
) -> tuple[list[jax.Array], Side, Side, jax.Array]:
    """Form "shards", for arrays [N, …]: the averages, the new `worker` and `owner`, and the headers of all workers, [N, …]."""
    keys = [jax.random.fold_in(key, end) for end in range(2)]
    shard_keys = jax.random.split(keys[0], len(arrays[0]))
    messages, memory = jax.vmap(lambda *one: _encoded(feedback, *one))(arrays, worker.memory, shard_keys)
    shards = [x[0] for x in arrays]
    head = header(jax.vmap(lambda messages: _decoded(feedback, messages, shards))(messages))
    sent = jax.tree.map(lambda x: x[0], messages), head
    rows_NxB = jax.vmap(lambda messages: as_bytes((messages, head)))(messages)
    means, headers = _mean(feedback, axis.all_to_all(rows_NxB), sent, shards)
    means, own_estimate = _received(feedback, worker.estimate, means)

    relay = feedback.relay()
    messages, owner_memory = _encoded(relay, means, owner.memory, keys[1])
    joint_NxB = axis.all_gather(as_bytes(messages))
    arrived = jax.vmap(lambda row: _decoded(relay, from_bytes(row, messages), shards))(joint_NxB)
    averages, estimate = _received(relay, owner.estimate, arrived)
    return averages, Side(memory, own_estimate), Side(owner_memory, estimate), headers


def _encoded(feedback: Feedback, arrays: Arrays, memory: tuple, key: jax.Array) -> tuple[list[PyTree], tuple[PyTree, ...]]:
    pairs = [feedback.encode(x, own, jax.random.fold_in(key, k)) for k, (x, own) in enumerate(zip(arrays, memory, strict=True))]
    return [message for message, _ in pairs], tuple(memory for _, memory in pairs)


def _decoded(feedback: Feedback, messages: list[PyTree], like: Arrays) -> list[jax.Array]:
    return [feedback.codec.decode(message, x.shape, x.dtype) for message, x in zip(messages, like, strict=True)]


def _received(feedback: Feedback, estimates: tuple, arrived: Arrays) -> tuple[list[jax.Array], tuple[PyTree, ...]]:
    estimated = [feedback.receive(estimate, x) for estimate, x in zip(estimates, arrived, strict=True)]
    return estimated, tuple(estimated) if feedback.builds else estimates


def _mean(feedback: Feedback, joint_NxB: jax.Array, sent: PyTree, like: Arrays) -> tuple[list[jax.Array], jax.Array]:
    """Return the mean of the decoded messages of all workers, and their headers; decoded one by one, to save memory."""

    def add(sums, joint):
        messages, header = from_bytes(joint, sent)
        return [total + x for total, x in zip(sums, _decoded(feedback, messages, like))], header

    sums, headers = jax.lax.scan(add, [jnp.zeros_like(x) for x in like], joint_NxB)
    return [total / len(joint_NxB) for total in sums], headers


def as_bytes(tree: PyTree) -> jax.Array:
    """Return all arrays of a tree as one vector of bytes."""
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.uint8).ravel() for x in jax.tree.leaves(tree)])


def from_bytes(joint: jax.Array, like: PyTree) -> PyTree:
    """Return the tree that `as_bytes` has joined, with structure, shapes and types of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    parts, start = [], 0
    for x in leaves:
        width = x.dtype.itemsize
        part = joint[start : start + x.size * width].reshape(*x.shape, *([width] if width > 1 else []))
        parts.append(jax.lax.bitcast_convert_type(part, x.dtype))
        start += x.size * width
    return treedef.unflatten(parts)
