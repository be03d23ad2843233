"""EquiTopo: random circulant graphs.

EquiTopo averages basis graphs A(u), in which worker i+u gives the weight (n−1)/n to worker i and 1/n to itself, u = 1 … n−1. Their
mean over all u is J/n, so the mean of a few random ones is close to it at any n. Reference: Song et al., "Communication-Efficient
Topologies for Decentralized Learning with O(1) Consensus Rate", NeurIPS 2022.
"""

import itertools
import math

import numpy as np

from decjax.topology import build, schedule


@build.register("equitopo_d", directed=True, static=True)
def _equitopo_d(n: int, degree: int | None = None, seed: int = 0) -> build.Rounds:
    """D-EquiStatic: each worker hears from `degree` random distances u; the mean of the basis graphs A(u).

    In A(u) worker i+u gives the weight (n−1)/n to worker i and 1/n to itself.

    Args:
        degree: number of distances u, drawn without replacement; None: ⌈log2 n⌉.
        seed: of the random draws.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo), which draws with replacement.
    """
    return _equitopo_static("equitopo_d", n, degree, seed, both_ways=False)


@build.register("equitopo_u", static=True)
def _equitopo_u(n: int, degree: int | None = None, seed: int = 0) -> build.Rounds:
    """U-EquiStatic: the undirected form of `equitopo_d`, the mean of (A(u) + A(u)ᵀ)/2, with up to 2·degree neighbours.

    Args:
        degree: number of distances u, drawn without replacement; None: ⌈log2 n⌉.
        seed: of the random draws.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo).
    """
    return _equitopo_static("equitopo_u", n, degree, seed, both_ways=True)


def _equitopo_static(name: str, n: int, degree: int | None, seed: int, both_ways: bool) -> build.Rounds:
    degree = build.log2_ceil(n) if degree is None else build.integer("degree", degree, 1, n - 1)
    rng = build.generator(seed)

    def draw():
        hops = rng.choice(np.arange(1, n), degree, replace=False)
        if both_ways:
            hops = np.concatenate([hops, n - hops])
        moves = [(build.rotation(n, hop), (n - 1) / (n * len(hops))) for hop in sorted(hops)]
        return [schedule.round_from_moves([(range(n), 1.0 / n), *moves])]

    return build.first_mixing(draw, f"topology {name!r} found no connected graph of {n} workers; raise degree={degree}")


@build.register("equitopo_od", directed=True)
def _equitopo_od(n: int, rounds: int | None = None, eta: float = 0.5, seed: int = 0) -> build.Rounds:
    """OD-EquiDyn: one neighbour per round, at a random distance u: W = (1−η) I + η A(u), with A(u) as in `equitopo_d`.

    Args:
        rounds: number of rounds until the schedule repeats; None: 2⌈log2 n⌉.
        eta: η in (0, 1], the weight of what arrives.
        seed: of the random draws.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo).
    """
    return _equitopo_one_peer("equitopo_od", n, rounds, eta, seed, lambda rng: build.rotation(n, rng.integers(1, n)))


@build.register("equitopo_ou")
def _equitopo_ou(n: int, rounds: int | None = None, eta: float = 0.5, seed: int = 0) -> build.Rounds:
    """OU-EquiDyn: as `equitopo_od`, but workers at distance u exchange in pairs; each cycle i, i+u, … is paired from a random start.

    Args:
        rounds: number of rounds until the schedule repeats; None: 2⌈log2 n⌉.
        eta: η in (0, 1], the weight of what arrives.
        seed: of the random draws.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo).
    """

    def draw_targets(rng):
        hop, start = rng.integers(1, n), rng.integers(n)
        num_cycles = math.gcd(int(hop), n)
        pairs = itertools.product(range(num_cycles), range(n // num_cycles // 2))
        firsts = [start + cycle + 2 * pair * hop for cycle, pair in pairs]
        return build.swap(n, [(first % n, (first + hop) % n) for first in firsts])

    return _equitopo_one_peer("equitopo_ou", n, rounds, eta, seed, draw_targets)


def _equitopo_one_peer(name: str, n: int, rounds: int | None, eta: float, seed: int, draw_targets) -> build.Rounds:
    rounds, eta, rng = build.num_rounds(n, rounds), build.real("eta", eta, 1.0), build.generator(seed)
    weight = eta * (n - 1) / n

    def draw():
        return [schedule.round_from_moves([(range(n), 1.0 - weight), (draw_targets(rng), weight)]) for _ in range(rounds)]

    return build.first_mixing(draw, f"topology {name!r} cannot connect {n} workers in rounds={rounds}; raise rounds")
