"""Pipeline schedules as tables: which stage does what, when, and who sends to whom. NumPy only.

A model is cut into S·C virtual stages on S devices; chunk c of stage s is virtual stage v = c·S + s. For each of M microbatches,
virtual stage v runs a forward pass F, which needs the output of stage v − 1, and a backward pass B, which needs its own F and the
gradient from stage v + 1. A schedule is the order of these passes on every device:

    name         order on stage s                                       live activations    bubble ÷ work
    gpipe        F of all microbatches, then B of all                   M                   (S − 1) / M
    1f1b         S − 1 − s times F, then F and B in turn, then B        S − s               (S − 1) / M
    interleaved  2(S − 1 − s) + (C − 1)S times F, then as 1f1b; C       2(S − 1 − s) +      (S − 1) / (C·M)
                 chunks take S microbatches in turn                     (C − 1)S + 1

(an interleaved activation is that of 1/C as many layers). Time is counted in ticks: in each, a stage runs one pass if its inputs
have arrived, and what it sends has arrived in the next tick. All three take 2(C·M + S − 1) ticks, and a stage is idle in the
fraction (S − 1) / (C·M + S − 1) of them.

References: Huang et al. 2019, arXiv 1811.06965 (GPipe); Narayanan et al. 2019, SOSP (1F1B); Narayanan et al. 2021, arXiv
2104.04473, section 2.2 (interleaved).
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import numpy as np

from decjax.options import Count, checked

FORWARD, BACKWARD = "F", "B"
Name = Literal["gpipe", "1f1b", "interleaved"]


class Op(NamedTuple):
    """One pass of one microbatch through one virtual stage.

    Attributes:
        kind: `FORWARD` or `BACKWARD`.
        microbatch: 0 … M − 1.
        chunk: c, which of the device's virtual stages.
    """

    kind: str
    microbatch: int
    chunk: int


class Send(NamedTuple):
    """A message from stage to stage, sent at the end of the tick in which it was computed.

    Attributes:
        kind: `FORWARD` for an activation, `BACKWARD` for a gradient: the pass that computed it and the one that needs it.
        microbatch: 0 … M − 1.
        source: the sending stage.
        source_chunk: the chunk that computed it.
        target: the receiving stage.
        target_chunk: the chunk that needs it.
        in_epilogue: whether the receiver has no forward pass left to run while it waits.
    """

    kind: str
    microbatch: int
    source: int
    source_chunk: int
    target: int
    target_chunk: int
    in_epilogue: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline schedule, with the ticks, messages and memory that follow from it.

    A stage runs some forward passes (its warm-up), then alternates between forward and backward passes, then runs as many backward
    passes as there were in its warm-up (its cool-down).

    Attributes:
        name: "gpipe", "1f1b" or "interleaved".
        num_stages: S, devices of a pipeline.
        num_microbatches: M.
        num_chunks: C, virtual stages of a device.
        orders: for each stage its passes in order.
        warm_ups: for each stage the number of forward passes in its warm-up.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    orders: tuple[tuple[Op, ...], ...]
    warm_ups: tuple[int, ...]

    @property
    def num_virtual(self) -> int:
        """S·C, the number of virtual stages."""
        return self.num_stages * self.num_chunks

    def virtual(self, stage: int, chunk: int) -> int:
        """Return the virtual stage v = c·S + s of chunk c on stage s: its position in the model."""
        return chunk * self.num_stages + stage

    @functools.cached_property
    def ticks(self) -> tuple[tuple[Op | None, ...], ...]:
        """For each tick the pass that each stage runs; None for a stage that is idle."""
        done: dict[tuple[str, int, int], int] = {}  # (kind, microbatch, virtual stage) -> tick
        upcoming = [list(reversed(order)) for order in self.orders]
        table: list[tuple[Op | None, ...]] = []
        while any(upcoming):
            row = tuple(
                order[-1] if order and self._is_ready(stage, order[-1], done) else None for stage, order in enumerate(upcoming)
            )
            if not any(row):
                raise ValueError(f"schedule {self.name!r}: the orders of its stages wait for each other in tick {len(table)}")
            for stage, op in enumerate(row):
                if op:
                    upcoming[stage].pop()
                    done[op.kind, op.microbatch, self.virtual(stage, op.chunk)] = len(table)
            table.append(row)
        return tuple(table)

    def _is_ready(self, stage: int, op: Op, done: dict[tuple[str, int, int], int]) -> bool:
        v = self.virtual(stage, op.chunk)
        if op.kind == FORWARD:
            return v == 0 or (FORWARD, op.microbatch, v - 1) in done
        follows = v == self.num_virtual - 1 or (BACKWARD, op.microbatch, v + 1) in done
        return follows and (FORWARD, op.microbatch, v) in done

    @property
    def num_ticks(self) -> int:
        """Number of ticks until all passes are done."""
        return len(self.ticks)

    @functools.cached_property
    def sends(self) -> tuple[tuple[Send, ...], ...]:
        """For each tick the messages that are sent at its end.

        A gradient is `in_epilogue` if its receiver needs it in its cool-down, where it can only wait for it: in 1F1B microbatch j
        from stage s to s − 1 where j ≥ M − (S − s), S(S − 1)/2 messages in all if M ≥ S − 1. Sender and receiver decide by this
        label whether a message is compressed.
        """
        cool_downs = [set(order[len(order) - warm_up :]) for order, warm_up in zip(self.orders, self.warm_ups)]

        def send(stage: int, op: Op) -> Send | None:
            v = self.virtual(stage, op.chunk) + (1 if op.kind == FORWARD else -1)
            if not 0 <= v < self.num_virtual:
                return None
            chunk, target = divmod(v, self.num_stages)
            in_epilogue = Op(op.kind, op.microbatch, chunk) in cool_downs[target]
            return Send(op.kind, op.microbatch, stage, op.chunk, target, chunk, in_epilogue)

        return tuple(tuple(message for stage, op in enumerate(row) if op and (message := send(stage, op))) for row in self.ticks)

    @functools.cached_property
    def live(self) -> tuple[int, ...]:
        """For each stage the most activations that it holds at once: forward passes whose backward pass has not run yet."""
        signs_TxS = np.array([[{FORWARD: 1, BACKWARD: -1}[op.kind] if op else 0 for op in row] for row in self.ticks])
        return tuple(int(most) for most in np.cumsum(signs_TxS, axis=0).max(axis=0))


@functools.partial(checked, called="schedules.make")
def make(name: Name, num_stages: Count, num_microbatches: Count, num_chunks: Count = 1) -> Schedule:
    """Return a schedule by its name.

    Args:
        name: "gpipe", "1f1b" or "interleaved".
        num_stages: S; at least 2 for "interleaved".
        num_microbatches: M; a multiple of S for "interleaved".
        num_chunks: C; at least 2 for "interleaved", else 1.

    Raises:
        ValueError: for numbers that do not fit the schedule.

    Examples:
        >>> make("1f1b", 4, 16).num_ticks
        38
    """
    S, M, C = num_stages, num_microbatches, num_chunks
    if (name == "interleaved" and min(C, S) < 2) or (name != "interleaved" and C > 1):
        raise ValueError(
            f"chunks={C}, stages={S} with schedule {name!r}: 'interleaved' needs at least 2 of each, other schedules need chunks=1; "
            "change the schedule"
        )
    if name == "interleaved" and M % S:
        fits = max(1, M // S) * S
        raise ValueError(
            f"microbatches={M} with schedule 'interleaved': must be a multiple of stages={S}; "
            f"use {fits if fits > M else f'{fits} or {fits + S}'}, or schedule '1f1b'"
        )
    turns = [(first + j, chunk) for first in range(0, M, S) for chunk in range(C) for j in range(min(S, M - first))]
    forward, backward = [Op(FORWARD, *turn) for turn in turns], [Op(BACKWARD, j, C - 1 - chunk) for j, chunk in turns]
    warm_up = {"gpipe": lambda s: M, "1f1b": lambda s: S - 1 - s, "interleaved": lambda s: 2 * (S - 1 - s) + (C - 1) * S}[name]
    warm_ups = tuple(min(M * C, warm_up(s)) for s in range(S))
    return Schedule(name, S, M, C, tuple(_alternate(forward, backward, count) for count in warm_ups), warm_ups)


def _alternate(forward: list[Op], backward: list[Op], warm_up: int) -> tuple[Op, ...]:
    """Return `warm_up` forward passes, then one forward and one backward in turn, then the backward passes that are left."""
    steady = [op for pair in zip(forward[warm_up:], backward) for op in pair]
    return (*forward[:warm_up], *steady, *backward[len(forward) - warm_up :])
