"""Views, the members that train together between two changes of the membership, and the messages by which members agree on them.

Both messages hold the complete state of their sender, so a lost one is made up for by the next.
"""

import json
from typing import NamedTuple

BEATS = 5  # reports of a member to the coordinator in `heartbeat_s`, at least


class Member(NamedTuple):
    """A process that takes part.

    Attributes:
        slot: its number, 0 … N − 1; a process that replaces it has the same.
        life: unique id of the process, which distinguishes it from others that have or had the slot.
        host: the address at which it listens.
        port: the port at which it listens.
        process: its process id on its machine.
    """

    slot: int
    life: str
    host: str
    port: int
    process: int = 0


class View(NamedTuple):
    """The members that train together from a step on.

    Attributes:
        number: counts views.
        step: the first step that these members take together.
        members: by ascending slot; member i is worker i.
        fresh: slots of members that first receive a replica: they are new, or one step behind.
        writer: slot of the member that writes metrics and checkpoints; it stays the same as long as it takes part.
        block: batches that all workers together have taken before that step; see `batch_of`.
    """

    number: int
    step: int
    members: tuple[Member, ...]
    fresh: tuple[int, ...] = ()
    writer: int = 0
    block: int = 0

    def worker_of(self, slot: int) -> int | None:
        """Return the index of a slot's worker; None if it does not take part."""
        return next((index for index, member in enumerate(self.members) if member.slot == slot), None)

    @property
    def source(self) -> Member | None:
        """The member that sends its replica to the fresh ones; None if all are fresh."""
        return next((member for member in self.members if member.slot not in self.fresh), None)

    def taken(self, step: int) -> int:
        """The number of batches that all workers together have taken before a step of this view."""
        return self.block + (step - self.step) * len(self.members)

    def batch_of(self, index: int, step: int, slots: int) -> tuple[int, int]:
        """Return the (worker, step) of the batch that worker `index` takes in `step`, in a run of `slots` workers without changes.

        Batches are ordered by (step, worker), and the present workers take them in that order, also after the whole run was stopped.
        So no text of an epoch is skipped or taken twice, with one exception: if a view ended when only some members had taken a step,
        the batches of the others are skipped.
        """
        number = self.taken(step) + index
        return number % slots, number // slots


class Report(NamedTuple):
    """What a member reports to the coordinator."""

    member: Member
    ready: bool  # whether it asks to take part
    step: int | None  # the next step that it takes; None if it has no replica
    taken: int  # batches that all workers had taken before the first view
    stopped: int  # number of the view for which it has stopped
    at: int | None  # its `step` when it stopped
    reaches: list[str]  # lives of the members to which it is connected
    broken: int  # number of the last view in which a connection was lost
    awaits: list[int]  # slots from which it awaits a message
    idle: float  # time without progress, in units of its longest step
    over: bool  # whether the run is over
    leaves: bool  # whether this is its last report

    @classmethod
    def read(cls, text: bytes) -> "Report":
        fields = json.loads(text)
        return cls(**fields | {"member": Member(*fields["member"])})


class Answer(NamedTuple):
    """What the coordinator answers to each report, and sends to all members after a change."""

    out: bool = False  # whether the member has been removed
    views: int = 0  # the number of views so far
    stop_for: int = 0  # number of the view for which the member must stop; 0: none
    view: View | None = None  # the current view; None if the member is not in it
    roster: tuple[Member, ...] = ()  # all members, to which connections are kept
    over: bool = False  # whether the run is over

    @classmethod
    def read(cls, text: bytes) -> "Answer":
        fields = json.loads(text)
        roster = tuple(Member(*member) for member in fields["roster"])
        if (view := fields["view"]) is not None:
            number, step, members, fresh, *others = view
            view = View(number, step, tuple(Member(*member) for member in members), tuple(fresh), *others)
        return cls(**fields | {"view": view, "roster": roster})


def written(message: Report | Answer) -> bytes:
    """Return a message as JSON, which `read` parses."""
    return json.dumps(message._asdict()).encode()
