"""Named topologies that are drawn at random.

They depend on (size, options, seed) alone, and are redrawn until repeating their rounds brings all workers to agreement.
"""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Annotated

import numpy as np

from decjax import registry
from decjax.options import Count, Seed, Share
from decjax.topology import build, coloring, schedule
from decjax.topology.build import Period, Workers

MAX_DRAWS = 1000

Draw = Annotated[Seed, "seed of the random draws"]
EdgeProbability = Annotated[Share, "p, probability of an edge; None: 2 ln(n)/n, at which most graphs are connected"]
Degree = Annotated[Count, "number of others that a worker sends to; None: ⌈log2 n⌉"]
Arriving = Annotated[Share, "η, the weight of what arrives"]


@build.register("erdos_renyi", static=True)
def _erdos_renyi(n: Workers, p: EdgeProbability | None = None, seed: Draw = 0) -> build.Rounds:
    """A random graph that has each edge with probability p, with Metropolis weights."""
    p = min(1.0, 2.0 * math.log(n) / n) if p is None else p
    rng = np.random.default_rng(seed)
    pairs_Ex2 = np.stack(np.triu_indices(n, 1), axis=1)

    def draw():
        drawn_Ex2 = pairs_Ex2[rng.random(len(pairs_Ex2)) < p]
        return [build.metropolis(n, drawn_Ex2.tolist())] if len(np.unique(drawn_Ex2)) == n else []  # No worker is alone.

    problem = f"found no connected graph of {n} workers with p={p:.3g}; raise p above ln(n)/n = {math.log(n) / n:.2g}"
    return first_mixing(draw, problem)


@build.register("random_matching")
def _random_matching(n: Workers, rounds: Period | None = None, seed: Draw = 0) -> build.Rounds:
    """In every round workers average in random pairs, weight 1/2; for odd n one worker is idle."""
    count, rng = num_rounds(n, rounds), np.random.default_rng(seed)
    return first_mixing(
        lambda: [build.pairwise(n, rng.permutation(n)[: n - n % 2].reshape(-1, 2)) for _ in range(count)],
        f"cannot connect {n} workers in rounds={count}; raise rounds",
    )


@build.register("matcha")
def _matcha(n: Workers, base: str = "ring", budget: Share = 0.5, rounds: Period | None = None, seed: Draw = 0) -> build.Rounds:
    """MATCHA: a base graph is split into matchings, of which a random subset is active in each round.

    A round is W = I − α Σ_active L_j, where matching j with Laplacian L_j is active with probability p_j, independently. The p_j
    maximize the algebraic connectivity λ2(Σ p_j L_j) of the expected graph, and α minimizes ‖E[WᵀW] − J/n‖. The sequence is drawn
    once and repeats. Differences from the paper: α is at most 1/Δ, so that weights stay nonnegative, and probabilities come from
    projected supergradient ascent.

    Args:
        base: the static undirected graph that is split, in call form, as "ring" or "torus(shape=(2,4))".
        budget: fraction of the matchings that is active on average, in (0, 1].

    Reference: Wang et al. 2019, "MATCHA: speeding up decentralized SGD via matching decomposition sampling", arXiv 1905.09435.
    """
    rounds, rng = num_rounds(n, rounds), np.random.default_rng(seed)
    traits = registry.part("topology", registry.parse("topology", base)[0]).traits
    build.require(
        bool(traits.get("static")) and not traits.get("directed") and build.make(base, n).is_symmetric,
        f"needs a static undirected base graph, got base={base!r}; use 'ring', 'torus' or 'erdos_renyi'",
    )
    edges = [(int(i), int(j)) for i, j in np.argwhere(np.triu(build.make(base, n).matrix(0), 1))]
    pairings = coloring.matchings(edges, n)
    laplacians_MxNxN = np.array([np.eye(n) - np.eye(n)[build.swap(n, pairing)] for pairing in pairings])
    probabilities = activation_probabilities(laplacians_MxNxN, budget)
    alpha = mixing_weight(laplacians_MxNxN, probabilities)

    def draw_round():
        active = itertools.compress(pairings, rng.random(len(pairings)) < probabilities)
        moves = [(build.swap(n, pairing), alpha) for pairing in active]
        return schedule.round_from_moves([(range(n), 1.0 - alpha * len(moves)), *moves])

    return first_mixing(
        lambda: [draw_round() for _ in range(rounds)],
        f"cannot connect {n} workers over base={base!r} in rounds={rounds} with budget={budget:g}; raise rounds or budget",
    )


def activation_probabilities(laplacians_MxNxN: np.ndarray, budget: float) -> np.ndarray:
    """Return the p that maximizes λ2(Σ p_j L_j) over 0 <= p_j <= 1 with mean(p) = budget, [M].

    λ2 is concave in p; projected supergradient ascent starts from equal probabilities, stops when it gains nothing for a while, and
    the best iterate is returned. Where all matchings are equally useful (a ring, a torus) that is the first.
    """
    num_steps, patience = 200, 25
    p = np.full(len(laplacians_MxNxN), budget)
    best, best_value, best_step = p, -1.0, 0
    for step in range(num_steps):
        values, vectors_NxN = np.linalg.eigh(np.tensordot(p, laplacians_MxNxN, 1))
        if values[1] > best_value + 1e-9:  # equal probabilities stay unless something is really better
            best, best_value, best_step = p, values[1], step
        if step - best_step == patience:
            break
        fiedler = vectors_NxN[:, 1]
        gradient = np.einsum("mij,i,j->m", laplacians_MxNxN, fiedler, fiedler)
        p = p + gradient / (np.linalg.norm(gradient) + 1e-12) / math.sqrt(num_steps * (step + 1))
        # Project: subtract the number after which clipping to [0, 1] meets the budget. The mean after clipping is piecewise linear in
        # that number, with kinks where an entry reaches 0 or 1.
        kinks = np.sort(np.concatenate([p - 1.0, p]))
        means = np.clip(p - kinks[:, None], 0.0, 1.0).mean(axis=1)
        p = np.clip(p - np.interp(-budget, -means, kinks), 0.0, 1.0)
    return best


def mixing_weight(laplacians_MxNxN: np.ndarray, p: np.ndarray) -> float:
    """Return the α in (0, 1/Δ) that minimizes ‖E[WᵀW] − J/n‖ = ‖I − 2α L̄ + α² (L̄² + 2 Σ p(1−p) L_j) − J/n‖.

    (A matching has L_j² = 2 L_j, and matchings are independent.) The norm is convex in α: ternary search.
    """
    n = laplacians_MxNxN.shape[1]
    mean_NxN = np.tensordot(p, laplacians_MxNxN, 1)
    square_NxN = mean_NxN @ mean_NxN + 2.0 * np.tensordot(p * (1.0 - p), laplacians_MxNxN, 1)

    def rho(alpha):
        M_NxN = np.eye(n) - 2.0 * alpha * mean_NxN + alpha**2 * square_NxN - 1.0 / n
        return np.abs(np.linalg.eigvalsh(M_NxN)).max()

    low, high = 0.0, 1.0 / laplacians_MxNxN.sum(axis=0).diagonal().max()
    for _ in range(30):
        left, right = low + (high - low) / 3.0, high - (high - low) / 3.0
        low, high = (low, right) if rho(left) <= rho(right) else (left, high)
    return low


@build.register("random_digraph", directed=True, static=True)
def _random_digraph(n: Workers, degree: Degree | None = None, seed: Draw = 0) -> build.Rounds:
    """Each worker splits its value equally among itself and `degree` random others: a column-stochastic W, for push-sum.

    One of the others is the next on a random cycle through all workers, which makes the graph strongly connected; the remaining ones
    are drawn uniformly.
    """
    degree = degree_of(n, degree)
    rng = np.random.default_rng(seed)
    cycle = rng.permutation(n)
    A_NxN = np.eye(n) / (degree + 1.0)
    for sender, successor in zip(cycle, np.roll(cycle, -1), strict=True):
        others = np.setdiff1d(np.arange(n), (sender, successor))
        A_NxN[[successor, *rng.choice(others, degree - 1, replace=False)], sender] = 1.0 / (degree + 1.0)
    return [schedule.round_from_matrix(A_NxN)]


@build.register("erdos_renyi_digraph", directed=True, static=True)
def _erdos_renyi_digraph(n: Workers, p: EdgeProbability | None = None, seed: Draw = 0) -> build.Rounds:
    """A random digraph that has each directed edge with probability p; each worker splits its value equally among itself and those
    that it sends to: a column-stochastic W, for push-sum.
    """
    p = min(1.0, 2.0 * np.log(n) / n) if p is None else p
    rng = np.random.default_rng(seed)

    def draw():
        A_NxN = (rng.random((n, n)) < p) | np.eye(n, dtype=bool)
        return [schedule.round_from_matrix(A_NxN / A_NxN.sum(axis=0))]

    problem = f"found no strongly connected digraph of {n} workers with p={p:.3g}; raise p above ln(n)/n = {np.log(n) / n:.2g}"
    return first_mixing(draw, problem)


# -- EquiTopo ---------------------------------------------------------------------------------------------------------
# The mean of the basis graphs A(u) over all distances u is J/n, so the mean of a few random ones is close to it at any n.


@build.register("equitopo_d", directed=True, static=True)
def _equitopo_d(n: Workers, degree: Degree | None = None, seed: Draw = 0) -> build.Rounds:
    """D-EquiStatic: each worker receives from workers at `degree` random distances u, all different; W is the mean of the A(u).

    In A(u), worker i+u gives the weight (n−1)/n to worker i and 1/n to itself.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo), which draws with replacement.
    """
    return _equitopo_static(n, degree, seed, both_ways=False)


@build.register("equitopo_u", static=True)
def _equitopo_u(n: Workers, degree: Degree | None = None, seed: Draw = 0) -> build.Rounds:
    """U-EquiStatic: the undirected form of `equitopo_d`, the mean of (A(u) + A(u)ᵀ)/2, with up to 2·degree neighbors.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo).
    """
    return _equitopo_static(n, degree, seed, both_ways=True)


def _equitopo_static(n: int, degree: int | None, seed: int, both_ways: bool) -> build.Rounds:
    degree = degree_of(n, degree)
    rng = np.random.default_rng(seed)

    def draw():
        hops = rng.choice(np.arange(1, n), degree, replace=False)
        if both_ways:
            hops = np.concatenate([hops, n - hops])
        moves = [(build.rotation(n, hop), (n - 1) / (n * len(hops))) for hop in sorted(hops)]
        return [schedule.round_from_moves([(range(n), 1.0 / n), *moves])]

    return first_mixing(draw, f"found no connected graph of {n} workers; raise degree={degree}")


@build.register("equitopo_od", directed=True)
def _equitopo_od(n: Workers, rounds: Period | None = None, eta: Arriving = 0.5, seed: Draw = 0) -> build.Rounds:
    """OD-EquiDyn: one neighbor per round, at a random distance u: W = (1−η) I + η A(u), with A(u) as in `equitopo_d`.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo).
    """
    return _equitopo_one_peer(n, rounds, eta, seed, lambda rng: build.rotation(n, int(rng.integers(1, n))))


@build.register("equitopo_ou")
def _equitopo_ou(n: Workers, rounds: Period | None = None, eta: Arriving = 0.5, seed: Draw = 0) -> build.Rounds:
    """OU-EquiDyn: as `equitopo_od`, but workers at distance u exchange in pairs; each cycle i, i+u, … is paired from a random start.

    Reference: Song et al. 2022, arXiv 2210.07881 (EquiTopo).
    """

    def draw_targets(rng):
        hop, start = rng.integers(1, n), rng.integers(n)
        num_cycles = math.gcd(int(hop), n)
        pairs = itertools.product(range(num_cycles), range(n // num_cycles // 2))
        firsts = [start + cycle + 2 * pair * hop for cycle, pair in pairs]
        return build.swap(n, [(first % n, (first + hop) % n) for first in firsts])

    return _equitopo_one_peer(n, rounds, eta, seed, draw_targets)


def _equitopo_one_peer(
    n: int, rounds: int | None, eta: float, seed: int, draw_targets: Callable[[np.random.Generator], Sequence[int] | np.ndarray]
) -> build.Rounds:
    rounds, rng = num_rounds(n, rounds), np.random.default_rng(seed)
    weight = eta * (n - 1) / n

    def draw():
        return [schedule.round_from_moves([(range(n), 1.0 - weight), (draw_targets(rng), weight)]) for _ in range(rounds)]

    return first_mixing(draw, f"cannot connect {n} workers in rounds={rounds}; raise rounds")


# -- Shared -----------------------------------------------------------------------------------------------------------


def first_mixing(draw: Callable[[], build.Rounds], problem: str) -> build.Rounds:
    """Return the first random schedule that brings all workers to agreement; refused with `problem` if none of `MAX_DRAWS` does."""
    drawn = (draw() for _ in range(MAX_DRAWS))
    rounds = next((rounds for rounds in drawn if rounds and schedule.is_mixing(rounds)), [])
    build.require(bool(rounds), problem)
    return rounds


def degree_of(n: int, degree: int | None) -> int:
    """Return the number of others that a worker sends to, by default ⌈log2 n⌉."""
    build.require(degree is None or degree < n, f"of {n} workers: degree={degree} must be at most {n - 1}")
    return degree or build.log2_ceil(n)


def num_rounds(n: int, rounds: int | None) -> int:
    """Return the number of rounds of a random schedule, by default 2⌈log2 n⌉."""
    return rounds or 2 * build.log2_ceil(n)
