"""The exchange check: do messages arrive, before any training relies on it?

A compiler defect on some GPU builds returns zeros for permutations with several cycles; training on such data goes wrong
silently.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh
from decjax.gossip.rounds import member_pairs, mix_round
from decjax.topology import Topology

DTYPES = (np.uint8, np.uint16, np.uint32, np.float32)  # What messages are made of, coded ones and whole ones.
FIX = "refusing to train on wrong data (try another jax or driver version, or topology 'complete')"


def check_exchange(workers: mesh.Workers, topology: Topology,
                   permutations: Sequence[Sequence[tuple[int, int]]] | None = None) -> None:
    """Sends known values along every permutation and worker indices through every round, and looks at what arrives.

    Each round mixes the one-hot vector of the worker's index, so that row i of W must arrive at worker i. Each permutation moves
    values of every type that messages are made of.

    Args:
        workers: where the workers live.
        topology: the schedule to be checked.
        permutations: pairs (source, target) of workers, as `Mixer.permutations`; None: those of the topology's shifts.

    Raises:
        RuntimeError: naming the phase or the source, and the worker that received something else.
    """
    n = workers.num_workers
    if permutations is None:
        permutations = [member_pairs(shift, round_.group_size) for round_ in topology.rounds for shift in round_.shifts]
    permutations = list(dict.fromkeys(tuple(pairs) for pairs in permutations))
    bits_NxP = np.random.default_rng(0).integers(1, 2**32, (n, 16), np.uint32)
    sent = [bits_NxP.astype(dtype) for dtype in DTYPES]

    def probe(index, values):
        rows = []
        for round_ in topology.rounds:
            # Nodes average shares of equal size, so pad the one-hot vector to a multiple of the group.
            own = (jnp.arange(n + -n % round_.group_size) == index).astype(jnp.float32)
            rows.append(mix_round(own, round_, workers.axis_name)[:n])
        return rows, [[mesh.exchange(x_P, pairs, workers.axis_name) for x_P in values] for pairs in permutations]

    index, values = workers.build(lambda worker: np.int32(worker)), [workers.build(x_NxP.__getitem__) for x_NxP in sent]
    mixed, moved = workers.fetch(jax.jit(workers.map(probe, in_axes=(0, 0)))(index, values))
    for phase, mixed_NxN in enumerate(mixed):
        wrong_N = np.abs(mixed_NxN - topology.matrix(phase)).max(axis=1) > 1e-5
        if wrong_N.any():
            raise RuntimeError(f"the exchange is broken on this backend: in phase {phase} of topology {topology.name!r} worker "
                               f"{np.flatnonzero(wrong_N)[0]} did not receive its neighbours' values; {FIX}")
    for pairs, arrived in zip(permutations, moved):
        for x_NxP, arrived_NxP in zip(sent, arrived):
            for source, target in pairs:
                if (arrived_NxP[target] != x_NxP[source]).any():
                    raise RuntimeError(f"the exchange is broken on this backend: worker {target} did not receive the "
                                       f"{x_NxP.dtype} values of worker {source}; {FIX}")
