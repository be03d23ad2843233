"""A schedule as arrays: the pass of every stage in each tick, the buffer slots that it reads and fills, and the pairs that communicate."""

from collections.abc import Callable, Iterable
import itertools
from typing import NamedTuple

import numpy as np

from decjax import schedules

IDLE, FORWARD, BACKWARD = 0, 1, 2
NOWHERE = -1
BOXES = {schedules.FORWARD: "input", schedules.BACKWARD: "gradient"}  # the buffer for messages of a kind

Label = tuple[str, bool]  # kind, compressed


class Message(NamedTuple):
    """The messages of one tick that have the same label, as pairs (source, target) of stages."""

    label: Label
    pairs: tuple[tuple[int, int], ...]


class Table(NamedTuple):
    """A schedule as arrays, one row per tick.

    Columns, [ticks, S] integers, hold the pass of each stage (`op`, `microbatch`, `chunk`), the slots that it reads (`input`, `kept`,
    `gradient`) and those that store arriving messages (`next_input`, `next_gradient`; NOWHERE if none arrives), the label of the message
    that it sends (`sent`, or NOWHERE), and for arriving messages, by kind ("F label" …): label or NOWHERE, microbatch, and this end's
    chunk.
    """

    columns: dict[str, np.ndarray]
    labels: tuple[Label, ...]  # of messages
    pattern: np.ndarray  # [ticks] index into `patterns`
    patterns: tuple[tuple[Message, ...], ...]  # the messages of a tick
    slots: dict[str, int]  # the largest number of slots "input", "kept" and "gradient" of any stage

    @property
    def permutations(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The pairs (source, target) of every permutation that may be used: of one kind of message of a tick, or of several kinds."""
        groups = (
            group
            for messages in self.patterns
            for size in range(1, len(messages) + 1)
            for group in itertools.combinations(messages, size)
            if is_one_permutation(group)
        )
        return tuple(dict.fromkeys(tuple(sorted(pair for message in group for pair in message.pairs)) for group in groups))

    @property
    def runs(self) -> list[int]:
        """The number of ticks that use each pattern."""
        return np.bincount(self.pattern, minlength=len(self.patterns)).tolist()


def tabulate(schedule: schedules.Schedule, compresses: Callable[[schedules.Send], bool], remat: bool) -> Table:
    """Return the table of a schedule; `compresses` selects the messages that are compressed.

    With `remat` B recomputes F: inputs are then stored until B instead of F, and the last virtual stage skips F.
    """
    label = lambda send: (send.kind, compresses(send))
    labels = tuple(sorted({label(send) for sends in schedule.sends for send in sends}))
    last = schedule.num_virtual - 1
    start = dict.fromkeys(("op", "microbatch", "chunk", "input", "kept", "gradient"), 0)
    start |= dict.fromkeys(("next_input", "next_gradient", "sent"), NOWHERE)
    for kind in BOXES:
        start |= {f"{kind} label": NOWHERE, f"{kind} microbatch": 0, f"{kind} chunk": 0}
    columns = {name: np.full((schedule.num_ticks, schedule.num_stages), value, np.int32) for name, value in start.items()}
    taken: dict[tuple, int] = {}  # (op, stage) -> tick
    for t, row in enumerate(schedule.ticks):
        for s, op in enumerate(row):
            if op:
                taken[op, s] = t
                is_skipped = remat and op.kind == schedules.FORWARD and schedule.virtual(s, op.chunk) == last
                columns["op"][t, s] = IDLE if is_skipped else FORWARD if op.kind == schedules.FORWARD else BACKWARD
                columns["microbatch"][t, s], columns["chunk"][t, s] = op.microbatch, op.chunk

    waits: dict[str, list] = {"input": [], "kept": [], "gradient": []}  # (stage, from the end of this tick, ticks that read it)
    for (op, s), t in taken.items():
        if op.kind == schedules.FORWARD and not remat:
            waits["kept"].append((s, t, (t, taken[op._replace(kind=schedules.BACKWARD), s])))
    for t, sends in enumerate(schedule.sends):
        for send in sends:
            s, op = send.target, schedules.Op(send.kind, send.microbatch, send.target_chunk)
            columns["sent"][t, send.source] = columns[f"{op.kind} label"][t, s] = labels.index(label(send))
            columns[f"{op.kind} microbatch"][t, s], columns[f"{op.kind} chunk"][t, s] = op.microbatch, op.chunk
            reads = [taken[op, s]]
            # Without rematerialization the last virtual stage stores its output, which B needs for the loss, in its input's slot.
            if op.kind == schedules.FORWARD and (remat or schedule.virtual(s, op.chunk) == last):
                reads.append(taken[op._replace(kind=schedules.BACKWARD), s])
            waits[BOXES[op.kind]].append((s, t, reads))
    slots = {name: _give_slots(columns, name, intervals) for name, intervals in waits.items()}

    by_tick = [_messages(sends, label) for sends in schedule.sends]
    patterns = tuple(dict.fromkeys(by_tick))
    return Table(columns, labels, np.array([patterns.index(messages) for messages in by_tick], np.int32), patterns, slots)


def _give_slots(columns: dict[str, np.ndarray], name: str, waits: Iterable[tuple]) -> int:
    """Assign the lowest free slot of its stage to every wait, enter it in the table, and return the number of slots needed."""
    free_from: dict[int, list[int]] = {}
    for s, begin, reads in sorted(waits):
        ends = free_from.setdefault(s, [])
        slot = next((i for i, earlier in enumerate(ends) if earlier <= begin), len(ends))
        ends[slot : slot + 1] = [reads[-1]]
        if f"next_{name}" in columns:
            columns[f"next_{name}"][begin, s] = slot
        columns[name][list(reads), s] = slot
    return max(map(len, free_from.values()), default=0)


def _messages(sends: Iterable[schedules.Send], label_of: Callable[[schedules.Send], Label]) -> tuple[Message, ...]:
    groups: dict[Label, list] = {}
    for send in sends:
        groups.setdefault(label_of(send), []).append((send.source, send.target))
    # Activations first: they are ready as soon as a stage has computed them, a gradient may have to wait for other work.
    return tuple(Message(label, tuple(sorted(pairs))) for label, pairs in sorted(groups.items(), reverse=True))


def is_one_permutation(group: Iterable[Message]) -> bool:
    """Return whether no stage receives two of these messages."""
    targets = [target for message in group for _, target in message.pairs]
    return len(set(targets)) == len(targets)
