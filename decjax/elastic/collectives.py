"""Collectives between members on NumPy arrays: `lax.ppermute`, `psum`, `all_gather`, `psum_scatter` and `all_to_all` along the worker axis.

Sums use the ring algorithm: each member sends n − 1 messages with 1/n of the array to add, and n − 1 to gather. All members get the same
bits.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from decjax.elastic.transport import Key, Transport
from decjax.elastic.view import View
from decjax.typing import PyTree


class Stream:
    """One sequence of messages within a view, in the same order on all members; `slot` is that of this member."""

    def __init__(self, transport: Transport, view: View, slot: int, channel: int):
        self.view, self.slot = view, slot
        self.index, self.size = view.worker_of(slot), len(view.members)
        self._transport, self._channel, self._count = transport, channel, 0

    def exchange(self, x: np.ndarray, to: int | None, source: int | None) -> np.ndarray | None:
        """Send an array to worker `to` and return that of worker `source`, which has the same shape; with None do neither."""
        self._count += 1
        key, members = Key(self.view.number, self.slot, self._channel, self._count), self.view.members
        x = np.asarray(x, order="C")
        if to is not None and to != self.index:
            self._transport.send(key, members[to], x.reshape(-1).view(np.uint8).data)
        if source is None or source == self.index:
            return None if source is None else x
        arrived = self._transport.receive(key._replace(slot=members[source].slot))
        return np.frombuffer(arrived, x.dtype).reshape(x.shape)

    def hand_over(self, x: np.ndarray, source: int | None, target: int | None) -> np.ndarray | None:
        """Send an array from worker `source` to worker `target`; return what arrives, None on other workers."""
        return self.exchange(x, target if self.index == source else None, source if self.index == target else None)

    def ring_sum(self, x: np.ndarray, group: Sequence[int]) -> np.ndarray:
        """Return the sum over the workers of a group that includes this one; the same bits on each."""
        n = len(group)
        if n == 1:
            return x
        place = group.index(self.index)
        right, left = group[(place + 1) % n], group[place - 1]
        shares = np.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1)
        for k in range(n - 1):
            arrived = self.exchange(shares[(place - k) % n], right, left)
            shares[(place - k - 1) % n] += arrived
        for k in range(n - 1):
            shares[(place - k) % n] = self.exchange(shares[(place - k + 1) % n], right, left)
        return shares.reshape(-1)[: x.size].reshape(x.shape)

    def gather(self, x: np.ndarray, group: Sequence[int]) -> np.ndarray:
        """Return the arrays of the workers of a group, [n, …]."""
        return self.scatter(np.broadcast_to(x, (len(group), *x.shape)), group)

    def scatter(self, x: np.ndarray, group: Sequence[int]) -> np.ndarray:
        """Return the rows that the workers of a group send to this one, [n, …]; row i of `x` goes to worker i of the group."""
        n, place = len(group), group.index(self.index)
        rows = np.empty(x.shape, x.dtype)
        rows[place] = x[place]
        for k in range(1, n):
            rows[place - k] = self.exchange(x[(place + k) % n], group[(place + k) % n], group[place - k])
        return rows


def _group(channel: Stream, params: dict[str, PyTree]) -> Sequence[int]:
    groups = params.get("axis_index_groups") or [range(channel.size)]
    return next(list(group) for group in groups if channel.index in group)


def _ppermute(channel, params, x):
    sources = {target: source for source, target in params["perm"]}
    targets = dict(params["perm"])
    arrived = channel.exchange(x, targets.get(channel.index), sources.get(channel.index))
    return [np.zeros_like(x) if arrived is None else arrived]


def _psum(channel, params, *xs):
    return [channel.ring_sum(x, _group(channel, params)) for x in xs]


def _scattered(channel, params, x, at):
    """Send part i of `x` along the axis `at` to worker i of the group; return the parts that arrive."""
    group = _group(channel, params)
    parts = np.stack(np.split(x, len(group), axis=at) if params["tiled"] else list(np.moveaxis(x, at, 0)))
    return channel.scatter(parts, group)


def _joined(params, rows, at):
    """Join the arrays of a group along the axis `at`."""
    return np.concatenate(list(rows), axis=at) if params["tiled"] else np.moveaxis(rows, 0, at)


def _all_gather(channel, params, *xs):
    return [_joined(params, channel.gather(x, _group(channel, params)), params["all_gather_dimension"]) for x in xs]


def _reduce_scatter(channel, params, x):
    return [_scattered(channel, params, x, params["scatter_dimension"]).sum(axis=0, dtype=x.dtype)]


def _all_to_all(channel, params, x):
    return [_joined(params, _scattered(channel, params, x, params["split_axis"]), params["concat_axis"])]


COLLECTIVES: dict[str, Callable[..., list[np.ndarray]]] = {
    "ppermute": _ppermute,
    "psum": _psum,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def run(channel: Stream, name: str, params: dict[str, PyTree], *xs: PyTree) -> list[np.ndarray]:
    """Run a collective, given the name of its primitive, its parameters and this worker's operands; return the results."""
    return COLLECTIVES[name](channel, params, *(np.asarray(jnp.asarray(x)) for x in xs))
