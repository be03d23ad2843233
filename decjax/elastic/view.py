"""Who takes part: views, agreed on by all members, from one change of the membership to the next."""

from typing import Any, NamedTuple

from decjax.errors import ViewChanged

BEATS = 5  # reports of a member to the coordinator in `heartbeat_s`, at least


class Member(NamedTuple):
    """A process that takes part.

    Attributes:
        slot: its number among all that may take part, 0 … N − 1; whoever takes its place later has the same.
        life: distinguishes processes that had the slot one after the other.
        process: its id on its own machine.
        host: where others reach it.
        port: where it listens.
    """

    slot: int
    life: str
    host: str
    port: int
    process: int = 0


class View(NamedTuple):
    """Who takes part from a step on.

    Attributes:
        number: counts views.
        step: the first step that these members take together.
        members: by ascending slot; member i is worker i.
        fresh: slots of members without a replica of that step, which receive one before it: they are new, or one step behind.
        writer: slot of the member that writes metrics and checkpoints; it stays the same as long as it takes part.
        block: batches that all workers have taken before that step; see `batch_of`.
    """

    number: int
    step: int
    members: tuple[Member, ...]
    fresh: tuple[int, ...] = ()
    writer: int = 0
    block: int = 0

    def index(self, slot: int) -> int | None:
        """Which worker a slot is; None if it does not take part."""
        return next((index for index, member in enumerate(self.members) if member.slot == slot), None)

    @property
    def source(self) -> Member | None:
        """Who gives its replica to the fresh members; None if all are fresh."""
        return next((member for member in self.members if member.slot not in self.fresh), None)

    def taken(self, step: int) -> int:
        """The number of batches that all workers together have taken before a step of this view."""
        return self.block + (step - self.step) * len(self.members)

    def batch_of(self, index: int, step: int, slots: int) -> tuple[int, int]:
        """(worker, step) of a run of so many workers that would have taken the batch that worker `index` takes in this view's `step`.

        Batches are numbered by (step, worker) as in a run without changes. The present workers take them in that order, also after the
        whole run was stopped. So no text of an epoch is left out or taken twice, with one exception: if a view ended when some
        members had taken a step and others had not, the batches of the latter are left out.
        """
        number = self.taken(step) + index
        return number % slots, number // slots

    @classmethod
    def of(cls, document: dict[str, Any]) -> "View":
        """The view that `_asdict` and JSON have made a document of."""
        members = tuple(Member(*fields) for fields in document["members"])
        return cls(**(document | {"members": members, "fresh": tuple(document["fresh"])}))


__all__ = ["BEATS", "Member", "View", "ViewChanged"]
