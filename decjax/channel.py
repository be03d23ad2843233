"""What all that exchange arrays have in common: between whom they travel, in which pieces, and with which noise."""

from collections.abc import Sequence
import dataclasses

from decjax import buckets, mesh


@dataclasses.dataclass(frozen=True)
class Channel:
    """How a pytree travels between workers.

    Attributes:
        axis: the worker axis, as `Workers.axis`.
        bucket_bytes: arrays are joined to messages of up to this size, before they are coded; 0: each array by itself.
        seed: of random numbers, such as those that codecs round with.
        alone: ends of the paths of arrays that are coded by themselves, so that copies of them that lie beside other arrays
            become the same messages.
    """

    axis: mesh.Axis = mesh.WORKERS
    bucket_bytes: int = buckets.BUCKET_BYTES
    seed: int = 0
    alone: tuple[str, ...] = ()

    def sent_by(self, stages: Sequence[int]) -> "Channel":
        """The same channel, on which only these stages of a pipeline send; see `mesh.Axis.sent_by`."""
        return dataclasses.replace(self, axis=self.axis.sent_by(stages))
