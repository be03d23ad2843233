"""The exchange check: tests that messages arrive unchanged, before training relies on them.

A compiler defect on some GPU builds returns zeros for permutations with several cycles; training on such data fails silently.
"""

from collections.abc import Sequence
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh
from decjax.gossip.rounds import member_pairs, mix_round
from decjax.topology import Topology

DTYPES = (np.uint8, np.uint16, np.uint32, np.float32)  # the types of the arrays in messages, encoded or not
BROKEN = "the exchange is broken on this backend"
FIX = {
    "stage": "refusing to train on wrong data (try another jax or driver version)",
    "worker": "refusing to train on wrong data (try another jax or driver version, or topology 'complete')",
}

Permutations = Sequence[Sequence[tuple[int, int]]]


def check_exchange(workers: mesh.Workers, topology: Topology, permutations: Permutations | None = None) -> None:
    """Test that every round and every permutation of messages delivers known values to the right workers.

    Each round mixes the one-hot vectors of the workers' indices, so that row i of W must arrive at worker i. Each permutation sends
    values of all types that messages have. A RuntimeError names the phase or source, and the worker to which other values arrive.

    Args:
        workers: those whose exchanges are tested.
        topology: its rounds are tested.
        permutations: lists of pairs (source, target) of workers, as `Mixer.permutations`; None: those of the topology's shifts.
    """
    n = workers.num_workers
    if permutations is None:
        permutations = [member_pairs(shift, round_.group_size) for round_ in topology.rounds for shift in round_.shifts]

    def probe(index):
        rows = []
        for round_ in topology.rounds:
            # Nodes average shares of equal size, so pad the one-hot vector to a multiple of the group.
            own = (jnp.arange(n + -n % round_.group_size) == index).astype(jnp.float32)
            rows.append(mix_round(own, round_, workers.axis)[:n])
        return rows

    mixed = workers.fetch(jax.jit(workers.map(probe, in_axes=(0,)))(workers.build(lambda worker: np.int32(worker))))
    for phase, mixed_NxN in enumerate(mixed):
        wrong_N = np.abs(mixed_NxN - topology.matrix(phase)).max(axis=1) > 1e-5
        if wrong_N.any():
            raise RuntimeError(
                f"{BROKEN}: in phase {phase} of topology {topology.name!r} worker "
                f"{np.flatnonzero(wrong_N)[0]} did not receive its neighbors' values; {FIX['worker']}"
            )
    _check_permutations(workers, permutations, workers.axis, "worker")


def check_stage_exchange(workers: mesh.Workers, permutations: Permutations) -> None:
    """Test permutations of messages between the pipeline stages of every worker, pairs (source, target), as `check_exchange` does."""
    _check_permutations(workers, permutations, mesh.STAGES, "stage")


def _check_permutations(workers: mesh.Workers, permutations: Permutations, axis: mesh.Axis, what: str) -> None:
    permutations = list(dict.fromkeys(tuple(pairs) for pairs in permutations))
    sizes = (workers.num_workers, workers.stages)[: workers.num_axes]
    bits = np.random.default_rng(0).integers(1, 2**32, (*sizes, 16), np.uint32)
    sent = [bits.astype(dtype) for dtype in DTYPES]

    def probe(values):
        return [[axis.exchange(x_P, pairs) for x_P in values] for pairs in permutations]

    moved = workers.fetch(jax.jit(workers.map(probe, in_axes=(0,)))(workers.place(sent)))
    dimension = len(sizes) - 1  # Workers where there are no stages, else stages.
    for pairs, arrived in zip(permutations, moved):
        for (x, arrived_x), (source, target) in itertools.product(zip(sent, arrived), pairs):
            if (np.take(arrived_x, target, dimension) != np.take(x, source, dimension)).any():
                raise RuntimeError(
                    f"{BROKEN}: {what} {target} did not receive the {x.dtype} values of {what} {source}; {FIX[what]}"
                )
