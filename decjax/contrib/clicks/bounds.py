"""Messages of many tables' vectors along an all-to-all, each value off by at most the bound of its table, always.

    ‖v − v̂‖∞ ≤ e_t(s),   e_t(s) = e_t · f(s),   f from k at step 0 down to 1 at step S

The bounds e_t differ by table, and f makes them larger in the first steps, while the parameters still change much: the two levels of
the paper. Between 0 and S, with p = s/S,

    stepwise      f = 1 + (k − 1)(1 − ⌊4p⌋/4)        four equal drops
    linear        f = 1 + (k − 1)(1 − p)
    exponential   f = k^(1 − p)

The codec is `codecs.bounded` with messages of one size. No such message holds every array within a bound, so the sender decodes its
own messages first. If a value of any worker is off by more than its bound, all workers send this step's vectors as they are.

Reference: Feng et al. 2024, arXiv 2407.04272. The paper's compressor also predicts values, finds repeated vectors and codes the
result without loss, in messages whose size varies. Here messages have the size that the bits say.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs, mesh
from decjax.program import hlo
from decjax.reduce.messages import as_bytes, from_bytes

DECAYS = ("stepwise", "linear", "exponential")
LEAST, MOST = 1e-20, 1e20  # of bounds


def bounds_of(text: str, what: str, tables: int) -> np.ndarray:
    """The bound of each table, float32 [T], from a text such as "0.01" or "0.01,2=0.05,5=0.002": that of all, and exceptions by number.

    Raises:
        ValueError: if the text cannot be read, a table is none of 0 … T − 1, has two bounds or none, or a bound is out of range.
    """
    usual, own = None, {}
    for part in text.split(","):
        table, equals, value = part.rpartition("=")
        try:
            number, bound = (int(table) if equals else None), float(value)
        except ValueError:
            raise ValueError(
                f"{what}={text!r} must read like '0.01' or '0.01,2=0.05', a bound and those of single tables"
            ) from None
        if not LEAST <= bound <= MOST:
            raise ValueError(f"{what}={text!r}: bound {value} must be positive, from {LEAST:g} to {MOST:g}")
        if number is not None and not 0 <= number < tables:
            raise ValueError(f"{what}={text!r}: there is no table {number}; tables are numbered from 0 to {tables - 1}")
        if number in own or (number is None and usual is not None):
            raise ValueError(
                f"{what}={text!r}: {'all tables have' if number is None else f'table {number} has'} two bounds; leave one out"
            )
        if number is None:
            usual = bound
        else:
            own[number] = bound
    bounds = [own.get(table, usual) for table in range(tables)]
    if None in bounds:
        raise ValueError(
            f"{what}={text!r} has no bound for table {bounds.index(None)}; add one for it, or one for all, as '0.01,…'"
        )
    return np.array(bounds, np.float32)


@dataclasses.dataclass(frozen=True)
class Decay:
    """How bounds shrink over the steps: f(s), see above.

    Attributes:
        start: k ≥ 1, how many times larger they are at first.
        within: S, the step from which they are as given.
        shape: one of `DECAYS`.
    """

    start: float = 1.0
    within: int = 0
    shape: str = "stepwise"

    def __post_init__(self):
        if self.shape not in DECAYS:
            raise ValueError(f"source.decay={self.shape!r} is unknown; use one of {', '.join(DECAYS)}")
        if not 1 <= self.start <= MOST:
            raise ValueError(f"source.start={self.start}: bounds start at least 1 times as large as they end; use 1 or more")
        if self.within < 0 or (self.start > 1) != (self.within > 0):
            raise ValueError(
                f"source.start={self.start} with source.within={self.within}: larger bounds need steps, at least 1, within which they "
                "shrink; use start=1 and within=0 for bounds that stay"
            )

    def __call__(self, step: jax.Array) -> jax.Array:
        """f at a step, a float32 scalar."""
        left = 1 - jnp.minimum(step / max(1, self.within), 1).astype(jnp.float32)
        if self.shape == "exponential":
            return jnp.float32(self.start) ** left
        left = jnp.ceil(4 * left) / 4 if self.shape == "stepwise" else left
        return 1 + (self.start - 1) * left


class Told(NamedTuple):
    """What a sender knows of its messages.

    Attributes:
        worst_P: largest |v − v̂| ÷ bound of what it sent of each table slot; 0 where vectors went as they are.
        is_raw: whether they went as they are, since a bound would not have held; the same on all workers.
    """

    worst_P: jax.Array
    is_raw: jax.Array


@dataclasses.dataclass(frozen=True)
class BoundedLink:
    """An all-to-all of vectors within bounds, or of vectors as they are.

    Attributes:
        bits: of each value.
        outliers: for how many values in a group of 256 a message has room, beyond those that the bits hold.
        coded: False: vectors go as they are, whatever the bounds.
    """

    bits: int = 8
    outliers: int = 2
    coded: bool = True

    def codec(self, bound: Any) -> codecs.Codec:
        """The codec of one worker's vectors of one table."""
        return codecs.bounded(bound=bound, bits_per_value=self.bits, outliers=self.outliers, raw=False)

    def num_bytes(self, num_workers: int, slots: int, size: int) -> float:
        """Bytes that each worker sends, for `slots` tables with `size` float32 values for each worker; see `send`."""
        if not self.coded:
            return (num_workers - 1) * slots * size * 4
        flag = mesh.mean_bytes(1, jnp.int32, num_workers)
        return (num_workers - 1) * slots * self.codec(1.0).num_bytes((size,), jnp.float32) + flag

    def more_bytes(self, num_workers: int, slots: int, size: int) -> float:
        """How many more it sends in a step in which vectors go as they are."""
        if not self.coded:
            return 0.0
        return (num_workers - 1) * slots * (size * 4 - self.codec(1.0).num_bytes((size,), jnp.float32))

    def send(self, x_NxPxBxD: jax.Array, ours_NxP: jax.Array, theirs_NxP: jax.Array, axis: mesh.Axis) -> tuple[jax.Array, Told]:
        """(what arrives, as v̂_NxPxBxD, from each worker; what the sender knows).

        Args:
            x_NxPxBxD: vectors for each worker, of P table slots.
            ours_NxP: bounds of what is sent.
            theirs_NxP: bounds of what arrives.
            axis: of the workers.
        """
        P, shape = x_NxPxBxD.shape[1], x_NxPxBxD.shape[2:]
        if not self.coded:
            return axis.all_to_all(x_NxPxBxD), Told(jnp.zeros(P), jnp.zeros((), bool))

        def encode(x_BxD, bound):
            message = self.codec(bound).encode(x_BxD, (), None)
            return message, self.decode(message, bound, shape)

        message, own_NxPxBxD = _each(encode)(x_NxPxBxD, ours_NxP)
        off_NxPxBxD = jnp.abs(x_NxPxBxD - own_NxPxBxD) / ours_NxP[..., None, None]
        is_raw = axis.sum((~(off_NxPxBxD <= 1).all()).astype(jnp.int32)) > 0  # So that NaN counts as too far off.

        def as_they_are():
            with hlo.counted(
                runs=0
            ):  # Of the two branches the usual one counts; the state records how often the other one is taken.
                return axis.all_to_all(x_NxPxBxD)

        def within_bounds():
            arrived_NxQ = axis.all_to_all(jax.vmap(as_bytes)(message))
            like = jax.tree.map(lambda x: x[0], message)
            arrived = jax.vmap(lambda row_Q: from_bytes(row_Q, like))(arrived_NxQ)
            return _each(lambda message, bound: self.decode(message, bound, shape))(arrived, theirs_NxP)

        worst_P = jnp.where(is_raw, 0, off_NxPxBxD.max(axis=(0, 2, 3)))
        return jax.lax.cond(is_raw, as_they_are, within_bounds), Told(worst_P, is_raw)

    def decode(self, message: Any, bound: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """v̂ of one message."""
        return self.codec(bound).decode(message, shape, jnp.float32)


def _each(fn):
    """The function for every worker's every slot."""
    return jax.vmap(jax.vmap(fn))
