"""Messages of many tables' vectors along an all-to-all, each value off by at most the bound of its table, always.

    ‖v − v̂‖∞ ≤ e_t(s),   e_t(s) = e_t · f(s),   f from k at step 0 down to 1 at step S

The bounds e_t differ by table, and `factor` f makes them larger in the first steps, while the parameters still change much: the two
levels of the paper.

The codec is `contrib.codecs.bounded` with messages of one size. No such message holds every array within a bound, so the sender decodes its
own messages first. If a value of any worker is off by more than its bound, all workers send this step's vectors uncompressed.

Reference: Feng et al. 2024, arXiv 2407.04272. The paper's compressor also predicts values, finds repeated vectors and codes the
result without loss, in messages whose size varies. Here the number of bits determines the size.
"""

from collections.abc import Callable
import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs, mesh
from decjax.contrib.codecs import bounded
from decjax.program import hlo
from decjax.reduce.messages import as_bytes, from_bytes
from decjax.typing import PyTree

LEAST, MOST = 1e-20, 1e20  # of bounds
Shape = Literal["stepwise", "linear", "exponential"]


def bounds_of(text: str, what: str, tables: int) -> np.ndarray:
    """Return the bound of each table, float32 [T], from a text such as "0.01" or "0.01,2=0.05,5=0.002".

    That is the bound of all tables, and those of single tables by number.

    Raises:
        ValueError: if the text cannot be read, a table is none of 0 … T − 1, has two bounds or none, or a bound is out of range.
    """
    bounds: dict[int | None, float] = {}
    for part in text.split(","):
        table, equals, value = part.rpartition("=")
        try:
            number, bound = (int(table) if equals else None), float(value)
        except ValueError:
            raise ValueError(
                f"{what}={text!r} must read like '0.01' or '0.01,2=0.05', a bound and those of single tables"
            ) from None
        faults = {
            f"bound {value} must be positive, from {LEAST:g} to {MOST:g}": not LEAST <= bound <= MOST,
            f"there is no table {table}; tables are numbered from 0 to {tables - 1}": number not in (None, *range(tables)),
            f"{f'table {table} has' if equals else 'all tables have'} two bounds; leave one out": number in bounds,
        }
        for fault in (fault for fault, applies in faults.items() if applies):
            raise ValueError(f"{what}={text!r}: {fault}")
        bounds[number] = bound
    if None not in bounds and (missing := set(range(tables)) - bounds.keys()):
        raise ValueError(f"{what}={text!r} has no bound for table {min(missing)}; add one for it, or one for all, as '0.01,…'")
    return np.array([bounds.get(table, bounds.get(None)) for table in range(tables)], np.float32)


def factor(step: jax.Array, start: float, within: int, shape: Shape) -> jax.Array:
    """Return f at a step, a float32 scalar. Between 0 and S, with p = s/S,

        stepwise      f = 1 + (k − 1)(1 − ⌊4p⌋/4)        four equal drops
        linear        f = 1 + (k − 1)(1 − p)
        exponential   f = k^(1 − p)

    Args:
        step: s.
        start: k ≥ 1, how many times larger bounds are at first.
        within: S, the step from which on f is 1.
        shape: of the decay.
    """
    left = 1 - jnp.minimum(step / max(1, within), 1).astype(jnp.float32)
    if shape == "exponential":
        return jnp.float32(start) ** left
    left = jnp.ceil(4 * left) / 4 if shape == "stepwise" else left
    return 1 + (start - 1) * left


class Sent(NamedTuple):
    """A sender's record of its messages.

    Attributes:
        worst_P: largest |v − v̂| ÷ bound of what it sent of each table slot; 0 where vectors were uncompressed.
        is_raw: whether they were uncompressed, since a bound would not have held; the same on all workers.
    """

    worst_P: jax.Array
    is_raw: jax.Array


@dataclasses.dataclass(frozen=True)
class BoundedLink:
    """An all-to-all of vectors within bounds.

    Attributes:
        bits: of each value.
        outliers: for how many values in a group of 256 a message has room, beyond those that the bits hold.
        coded: False: vectors are always uncompressed.
    """

    bits: int = 8
    outliers: int = 2
    coded: bool = True

    def codec(self, bound: float) -> codecs.Codec:
        """Return the codec of one worker's vectors of one table."""
        return bounded(bound=bound, bits_per_value=self.bits, outliers=self.outliers, raw=False)

    def num_bytes(self, num_workers: int, slots: int, size: int) -> float:
        """Return the bytes that each worker sends, for `slots` tables with `size` float32 values for each worker; see `send`."""
        if not self.coded:
            return (num_workers - 1) * slots * size * 4
        flag = mesh.mean_bytes(1, jnp.int32, num_workers)
        return (num_workers - 1) * slots * self.codec(1.0).num_bytes((size,), jnp.float32) + flag

    def more_bytes(self, num_workers: int, slots: int, size: int) -> float:
        """Return the additional bytes of a step in which vectors are uncompressed."""
        if not self.coded:
            return 0.0
        return (num_workers - 1) * slots * (size * 4 - self.codec(1.0).num_bytes((size,), jnp.float32))

    def send(self, x_NxPxBxD: jax.Array, ours_NxP: jax.Array, theirs_NxP: jax.Array, axis: mesh.Axis) -> tuple[jax.Array, Sent]:
        """Return (v̂_NxPxBxD that arrives from each worker, the record of what was sent).

        Args:
            x_NxPxBxD: vectors for each worker, of P table slots.
            ours_NxP: bounds of what is sent.
            theirs_NxP: bounds of what arrives.
            axis: of the workers.
        """
        P, shape = x_NxPxBxD.shape[1], x_NxPxBxD.shape[2:]
        if not self.coded:
            return axis.all_to_all(x_NxPxBxD), Sent(jnp.zeros(P), jnp.zeros((), bool))

        def encode(x_BxD, bound):
            message = self.codec(bound).encode(x_BxD, (), None)
            return message, decode(message, bound)

        def decode(message, bound):
            return self.codec(bound).decode(message, shape, jnp.float32)

        message, own_NxPxBxD = _each(encode)(x_NxPxBxD, ours_NxP)
        off_NxPxBxD = jnp.abs(x_NxPxBxD - own_NxPxBxD) / ours_NxP[..., None, None]
        is_raw = axis.sum((~(off_NxPxBxD <= 1).all()).astype(jnp.int32)) > 0  # So that NaN counts as too far off.

        def uncompressed():
            with hlo.counted(runs=0):  # Declared bytes count the other branch; the state counts the steps of this one.
                return axis.all_to_all(x_NxPxBxD)

        def within_bounds():
            arrived_NxQ = axis.all_to_all(jax.vmap(as_bytes)(message))
            like = jax.tree.map(lambda x: x[0], message)
            return _each(decode)(jax.vmap(lambda row_Q: from_bytes(row_Q, like))(arrived_NxQ), theirs_NxP)

        worst_P = jnp.where(is_raw, 0, off_NxPxBxD.max(axis=(0, 2, 3)))
        return jax.lax.cond(is_raw, uncompressed, within_bounds), Sent(worst_P, is_raw)


def _each(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the function for every worker's every slot."""
    return jax.vmap(jax.vmap(fn))
