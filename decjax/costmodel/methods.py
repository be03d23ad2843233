"""Training methods as the cost model describes them: what is sent over which topology."""

from collections.abc import Iterable
import dataclasses
from typing import Annotated, Literal, TypedDict, Unpack

from decjax import topology as topology_lib
from decjax.costmodel.profile import Amount, Compressed, Rate
from decjax.options import Range, checked, checked_class
from decjax.topology import Topology

GRADIENTS: Literal["gradients"] = "gradients"
PARAMETERS: Literal["parameters"] = "parameters"
Order = Literal["awc", "atc"]  # adapt while communicating, which overlaps with the gradient; adapt then communicate
MAX_EVERY = 1000  # since whole periods are simulated


@checked_class
@dataclasses.dataclass(frozen=True)
class Method:
    """What is sent over which topology, and whether it overlaps with computation; `costmodel.simulator` has the equations.

    Args:
        name: shown in tables.
        topology: who needs whose messages; None: nothing is sent.
        message: "gradients" (the optimizer waits for them) or "parameters" (sent after the optimizer).
        overlap: whether a message has a whole step to arrive.
        bucketed: whether each bucket is sent as soon as it is ready; else everything is one message.
        ratio: bytes of a message ÷ bytes of the parameters. Any ratio but 1 costs codec time.
        codec: name of the codec, for clusters with a speed for each codec.
        every: p, messages are exchanged in every p-th step only.
        joint_ring: whether nodes that exchange in pairs run one all-reduce over all their workers, which as a ring sends
            2(2L − 1)/2L times the parameters out of a node; else they exchange shards, which sends them once.
        coding_s: seconds that a worker takes to encode and decode one exchange; None: by the cluster's speed of the codec.
        latencies: how many times the latency of an uncompressed exchange it takes, see `Compressed`.
    """

    name: str
    topology: Topology | None
    message: Literal["gradients", "parameters"] = PARAMETERS
    overlap: bool = False
    bucketed: bool = False
    ratio: Rate = 1.0
    codec: str = ""
    every: Annotated[int, Range(1, MAX_EVERY)] = 1
    joint_ring: bool = False
    coding_s: Amount | None = None
    latencies: Amount = 1.0

    def phase_of(self, step: int) -> int | None:
        """Return the phase whose round is needed at the end of a step; None if nothing is sent in it (see `gossip.every`)."""
        if self.topology is None or (step + 1) % self.every:
            return None
        return step // self.every % self.topology.period

    @property
    def period(self) -> int:
        """Number of steps after which the schedule repeats."""
        return 1 if self.topology is None else self.every * self.topology.period


class MethodOptions(TypedDict, total=False):
    """Fields of `Method` that all methods have."""

    ratio: float
    codec: str
    every: int
    joint_ring: bool
    coding_s: float | None
    latencies: float


def graphs(names: Iterable[str], num_workers: int, local_size: int) -> tuple[dict[str, Topology], dict[str, str]]:
    """Return the named topologies that exist for a number of workers; and for the others the reason why they do not."""
    existing, refused = {}, {}
    for name in names:
        local = {"local_size": local_size} if "local_size" in topology_lib.options(name) else {}
        try:
            existing[name] = topology_lib.make(name, num_workers, **local)
        except ValueError as error:
            refused[name] = str(error)
    return existing, refused


def no_communication() -> Method:
    """Return the method that sends nothing: workers train independently, in the least time of all methods."""
    return Method("no communication", None)


def all_reduce(num_workers: int, *, overlap: bool = False, bucketed: bool = False, **options: Unpack[MethodOptions]) -> Method:
    """Return the method that averages the gradients of all workers.

    Args:
        num_workers: N, the number of workers.
        overlap: whether the average is used one step late, so that it has a whole step to arrive.
        bucketed: whether buckets are sent during the backward pass.
        **options: further fields of `Method`.
    """
    name = "all-reduce" + (", one step stale" if overlap else "") + (", bucketed" if bucketed else "")
    return Method(name, topology_lib.make("complete", num_workers), GRADIENTS, overlap, bucketed, **options)


@checked
def gossip(
    topology: Topology, *, order: Order = "awc", name: str = "", bucketed: bool = False, **options: Unpack[MethodOptions]
) -> Method:
    """Return the method that mixes parameters over a topology.

    Args:
        topology: who mixes with whom.
        order: "awc" (adapt while communicating: messages travel during the gradient) or "atc" (adapt then communicate).
        name: shown in tables; default: the topology's name and the order.
        bucketed: as for `all_reduce`.
        **options: further fields of `Method`.
    """
    return Method(name or f"{topology.name} {order}", topology, PARAMETERS, order == "awc", bucketed, **options)


def compressed(form: Compressed) -> Method:
    """Return the method that sends messages of a measured compressed form: the mean of all gradients, or gossip in order "awc"."""
    options = MethodOptions(ratio=form.ratio, coding_s=form.coding_s, latencies=form.latencies)
    if not form.topology:
        return dataclasses.replace(all_reduce(form.num_workers, **options), name=form.name)
    return gossip(topology_lib.make(form.topology, form.num_workers), name=form.name, **options)
