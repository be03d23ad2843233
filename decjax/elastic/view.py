"""Views: the members that train together between two changes of the membership, as all of them have agreed."""

from typing import Any, NamedTuple

BEATS = 5  # reports of a member to the coordinator in `heartbeat_s`, at least


class Member(NamedTuple):
    """A process that takes part.

    Attributes:
        slot: its number, 0 … N − 1; a process that replaces it has the same.
        life: unique id of the process, which distinguishes it from others that have or had the slot.
        process: its id on its own machine.
        host: the address at which it listens.
        port: the port at which it listens.
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

    def index(self, slot: int) -> int | None:
        """The index of a slot's worker; None if it does not take part."""
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

    @classmethod
    def of(cls, document: dict[str, Any]) -> "View":
        """The view of a JSON object, as made from `_asdict`."""
        members = tuple(Member(*fields) for fields in document["members"])
        return cls(**(document | {"members": members, "fresh": tuple(document["fresh"])}))
