"""Methods that experiments on emulated clusters measure: names, shorthands of configs/lm.py, and descriptions for the cost model."""

from decjax import costmodel, topology

HOSTS = 4  # unless an experiment says otherwise
ALONE, SYNC, STALE = "no communication", "all-reduce", "all-reduce, one step stale"
ONE_PEER, RING = "one-peer exponential", "ring"
SHORTHANDS = {
    ALONE: "method=local",
    SYNC: "method=allreduce",
    STALE: "method=allreduce,stale",
    ONE_PEER: "topology=one_peer_exponential",
    f"{ONE_PEER}, atc": "topology=one_peer_exponential,order=atc",
    f"{ONE_PEER}, bfloat16": "topology=one_peer_exponential,codec=bfloat16",
    f"{ONE_PEER}, int8": "topology=one_peer_exponential,codec=int8",
    RING: "topology=ring",
}


def modeled(hosts: int = HOSTS) -> dict[str, costmodel.Method]:
    """Return the cost model's descriptions of these methods for so many hosts."""
    one_peer = topology.make("one_peer_exponential", hosts)
    return {
        ALONE: costmodel.no_communication(),
        SYNC: costmodel.all_reduce(hosts),
        STALE: costmodel.all_reduce(hosts, overlap=True),
        ONE_PEER: costmodel.gossip(one_peer),
        f"{ONE_PEER}, atc": costmodel.gossip(one_peer, order="atc"),
        f"{ONE_PEER}, bfloat16": costmodel.gossip(one_peer, ratio=1 / 2, codec="bfloat16"),
        f"{ONE_PEER}, int8": costmodel.gossip(one_peer, ratio=1 / 4 + 1 / 256, codec="int8"),
        RING: costmodel.gossip(topology.make("ring", hosts)),
    }
