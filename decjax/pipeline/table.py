"""A schedule as arrays: what every stage does in each tick, which slots it reads and fills, and who sends to whom."""

from collections.abc import Callable, Iterable
import itertools
from typing import NamedTuple

import numpy as np

from decjax import schedules

IDLE, FORWARD, BACKWARD = 0, 1, 2
NOWHERE = -1
BOXES = {schedules.FORWARD: "input", schedules.BACKWARD: "gradient"}  # where messages of a kind wait

Label = tuple[str, bool]  # kind, compressed


class Message(NamedTuple):
    """Messages of one tick that are sent alike."""

    label: Label
    pairs: tuple[tuple[int, int], ...]


class Table(NamedTuple):
    """A schedule as arrays, one row a tick.

    Attributes:
        columns: [ticks, S] integers: what each stage does (`op`, `microbatch`, `chunk`), the slots that it reads (`input`,
            `kept`, `gradient`), and those in which it puts what arrives (`next_input`, `next_gradient`) or NOWHERE; the label of
            what it sends (`sent`) or NOWHERE; and of what arrives, by kind ("F", "B"), label or NOWHERE, microbatch and this
            end's chunk.
        labels: of messages: their kind, and whether they are compressed.
        pattern: [ticks] index into `patterns`.
        patterns: the messages of a tick.
        slots: how many of "input", "kept" and "gradient" any stage needs.
    """

    columns: dict[str, np.ndarray]
    labels: tuple[Label, ...]
    pattern: np.ndarray
    patterns: tuple[tuple[Message, ...], ...]
    slots: dict[str, int]

    @property
    def permutations(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Pairs of stages of every permutation that messages may travel in: those of a tick alone, or some of them joined."""
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
        """In how many ticks each pattern is used."""
        return np.bincount(self.pattern, minlength=len(self.patterns)).tolist()


def tabulate(schedule: schedules.Schedule, compresses: Callable[[schedules.Send], bool], remat: bool) -> Table:
    """The tables of a schedule.

    Args:
        schedule: which stage does what, when.
        compresses: which messages are compressed.
        remat: whether B computes F anew; inputs then wait for B instead of F, and the last virtual stage leaves F out.
    """
    shape, last = (schedule.num_ticks, schedule.num_stages), schedule.num_virtual - 1
    columns = {name: np.zeros(shape, np.int32) for name in ("op", "microbatch", "chunk", "input", "kept", "gradient")}
    columns |= {name: np.full(shape, NOWHERE, np.int32) for name in ("next_input", "next_gradient", "sent")}
    columns |= {
        f"{kind} {what}": np.full(shape, NOWHERE if what == "label" else 0, np.int32)
        for kind in BOXES
        for what in ("label", "microbatch", "chunk")
    }
    taken: dict[tuple, int] = {}  # (op, stage) -> tick
    for t, row in enumerate(schedule.ticks):
        for s, op in enumerate(row):
            if op:
                taken[op, s] = t
                is_left_out = remat and op.kind == schedules.FORWARD and schedule.virtual(s, op.chunk) == last
                columns["op"][t, s] = IDLE if is_left_out else FORWARD if op.kind == schedules.FORWARD else BACKWARD
                columns["microbatch"][t, s], columns["chunk"][t, s] = op.microbatch, op.chunk

    # (stage, from the end of this tick, until this one, ticks that read it)
    waits: dict[str, list] = {"input": [], "kept": [], "gradient": []}
    for (op, s), t in taken.items():
        if op.kind == schedules.BACKWARD:
            forward = taken[schedules.Op(schedules.FORWARD, op.microbatch, op.chunk), s]
            if not remat:
                waits["kept"].append((s, forward, t, (forward, t)))
    labels = tuple(sorted({(send.kind, compresses(send)) for sends in schedule.sends for send in sends}))
    for t, sends in enumerate(schedule.sends):
        for send in sends:
            s = send.target
            columns["sent"][t, send.source] = columns[f"{send.kind} label"][t, s] = labels.index((send.kind, compresses(send)))
            columns[f"{send.kind} microbatch"][t, s], columns[f"{send.kind} chunk"][t, s] = send.microbatch, send.target_chunk
            use, back = (
                taken[schedules.Op(kind, send.microbatch, send.target_chunk), s] for kind in (send.kind, schedules.BACKWARD)
            )
            if send.kind == schedules.BACKWARD:
                waits["gradient"].append((s, t, use, (use,)))
            else:
                # Without rematerialization the last virtual stage puts its output, of which B takes the loss, in its input's place.
                is_last = schedule.virtual(s, send.target_chunk) == last
                waits["input"].append((s, t, back if remat or is_last else use, (use, back) if remat or is_last else (use,)))
    slots = {name: _give_slots(columns, name, intervals) for name, intervals in waits.items()}

    found = [_messages(sends, compresses) for sends in schedule.sends]
    patterns = tuple(dict.fromkeys(found))
    return Table(columns, labels, np.array([patterns.index(messages) for messages in found], np.int32), patterns, slots)


def _give_slots(columns: dict[str, np.ndarray], name: str, waits: Iterable[tuple]) -> int:
    """Gives every wait the lowest slot of its stage that is free, enters it in the table, and returns how many are needed."""
    free_from: dict[int, list[int]] = {}
    for s, begin, end, reads in sorted(waits):
        ends = free_from.setdefault(s, [])
        slot = next((i for i, earlier in enumerate(ends) if earlier <= begin), len(ends))
        ends[slot : slot + 1] = [end]
        if f"next_{name}" in columns:
            columns[f"next_{name}"][begin, s] = slot
        for t in reads:
            columns[name][t, s] = slot
    return max(map(len, free_from.values()), default=0)


def _messages(sends: Iterable[schedules.Send], compresses) -> tuple[Message, ...]:
    groups: dict[Label, list] = {}
    for send in sends:
        groups.setdefault((send.kind, compresses(send)), []).append((send.source, send.target))
    # Activations first: nothing that a stage still has to do keeps them waiting, as it may keep a gradient.
    return tuple(Message(label, tuple(sorted(pairs))) for label, pairs in sorted(groups.items(), reverse=True))


def is_one_permutation(group: Iterable[Message]) -> bool:
    targets = [target for message in group for _, target in message.pairs]
    return len(set(targets)) == len(targets)
