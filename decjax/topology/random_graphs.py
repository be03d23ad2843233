"""Named topologies that are drawn at random."""

import itertools
import math

import numpy as np

from decjax import registry
from decjax.topology import build, coloring, matcha, named, schedule


@build.register("erdos_renyi", static=True)
def _erdos_renyi(n: int, p: float | None = None, seed: int = 0) -> build.Rounds:
    """A random graph that has each edge with probability p, with Metropolis weights.

    Args:
        p: probability of an edge; None: 2 ln(n)/n, at which most graphs are connected.
        seed: of the random draws.
    """
    p = min(1.0, 2.0 * math.log(n) / n) if p is None else build.real("p", p, 1.0)
    rng = build.generator(seed)
    pairs_Ex2 = np.stack(np.triu_indices(n, 1), axis=1)

    def draw():
        drawn_Ex2 = pairs_Ex2[rng.random(len(pairs_Ex2)) < p]
        return [build.metropolis(n, drawn_Ex2.tolist())] if len(np.unique(drawn_Ex2)) == n else []  # Nobody is alone.

    problem = f"found no connected graph of {n} workers with p={p:.3g}; raise p above ln(n)/n = {math.log(n) / n:.2g}"
    return build.first_mixing(draw, f"topology 'erdos_renyi' {problem}")


@build.register("random_matching")
def _random_matching(n: int, rounds: int | None = None, seed: int = 0) -> build.Rounds:
    """In every round workers average in random pairs, weight 1/2; for odd n one worker is idle.

    Args:
        rounds: number of rounds until the schedule repeats; None: 2⌈log2 n⌉.
        seed: of the random draws.
    """
    count, rng = build.num_rounds(n, rounds), build.generator(seed)
    return build.first_mixing(
        lambda: [build.pairwise(n, rng.permutation(n)[: n - n % 2].reshape(-1, 2)) for _ in range(count)],
        f"topology 'random_matching' cannot connect {n} workers in rounds={count}; raise rounds",
    )


@build.register("matcha")
def _matcha(n: int, base: str = "ring", budget: float = 0.5, rounds: int | None = None, seed: int = 0) -> build.Rounds:
    """MATCHA: a base graph is split into matchings, of which a random subset is active in each round.

    The probabilities p_j maximise the algebraic connectivity λ2(Σ p_j L_j) of the expected graph, and a round is W = I − α Σ_active L_j
    with the α that minimises ‖E[WᵀW] − J/n‖. The sequence is drawn once and repeats. Differences from the paper: α is at most 1/Δ, so
    that weights stay nonnegative, and probabilities come from projected supergradient ascent.

    Args:
        base: the static undirected graph that is split, in call form, as "ring" or "torus(shape=(2,4))".
        budget: fraction of the matchings that is active on average, in (0, 1].
        rounds: number of rounds until the schedule repeats; None: 2⌈log2 n⌉.
        seed: of the random draws.

    Reference: Wang et al. 2019, arXiv 1905.09435.
    """
    budget, rounds, rng = build.real("budget", budget, 1.0), build.num_rounds(n, rounds), build.generator(seed)
    traits = registry.part("topology", registry.parse("topology", base)[0]).traits
    if not traits.get("static") or traits.get("directed") or not (graph := named.make(base, n)).is_symmetric:
        raise ValueError(
            f"topology 'matcha' needs a static undirected base graph, got base={base!r}; use 'ring', 'torus' or 'erdos_renyi'"
        )
    edges = [(int(i), int(j)) for i, j in np.argwhere(np.triu(graph.matrix(0), 1))]
    pairings = coloring.matchings(edges, n)
    laplacians_MxNxN = np.array([np.eye(n) - np.eye(n)[build.swap(n, pairing)] for pairing in pairings])
    probabilities = matcha.activation_probabilities(laplacians_MxNxN, budget)
    alpha = matcha.mixing_weight(laplacians_MxNxN, probabilities)

    def draw_round():
        active = itertools.compress(pairings, rng.random(len(pairings)) < probabilities)
        moves = [(build.swap(n, pairing), alpha) for pairing in active]
        return schedule.round_from_moves([(range(n), 1.0 - alpha * len(moves)), *moves])

    return build.first_mixing(
        lambda: [draw_round() for _ in range(rounds)],
        f"topology 'matcha' cannot connect {n} workers over base={base!r} in rounds={rounds} with budget={budget:g}; "
        "raise rounds or budget",
    )


@build.register("random_digraph", directed=True, static=True)
def _random_digraph(n: int, degree: int | None = None, seed: int = 0) -> build.Rounds:
    """Each worker splits its value equally among itself and `degree` random others: a column-stochastic W, for push-sum.

    One of the others is the next on a random cycle through all workers, which makes the graph strongly connected; the remaining ones
    are drawn uniformly.

    Args:
        degree: number of others that a worker sends to; None: ⌈log2 n⌉.
        seed: of the random draws.
    """
    degree = build.log2_ceil(n) if degree is None else build.integer("degree", degree, 1, n - 1)
    rng = build.generator(seed)
    cycle = rng.permutation(n)
    A_NxN = np.eye(n) / (degree + 1.0)
    for sender, successor in zip(cycle, np.roll(cycle, -1), strict=True):
        others = np.setdiff1d(np.arange(n), (sender, successor))
        A_NxN[[successor, *rng.choice(others, degree - 1, replace=False)], sender] = 1.0 / (degree + 1.0)
    return [schedule.round_from_matrix(A_NxN)]
