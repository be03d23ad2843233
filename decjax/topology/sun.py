"""Sun graphs whose centres move: the hard case for methods on time-varying graphs."""

import numpy as np

from decjax import registry
from decjax.topology import schedule

MAX_ROUNDS = 8  # by default: a round of N workers has N − 1 messages to and from a centre


@registry.register("topology", "sun")
def sun(num_workers: int, *, centers: int = 1, rounds: int | None = None) -> schedule.Topology:
    """Some workers, the centres, exchange with all others, and are others in the next round: W = I − L/n.

    L is the Laplacian of the graph whose edges are all pairs with a centre among them. A centre gives all workers the weight 1/n; any
    other worker gives itself 1 − c/n and each of the c centres 1/n. Round t has its first centre at worker ⌊t n / rounds⌋, and
    the next workers are the other centres. These graphs give the lower bound for methods on time-varying graphs, so accelerated
    gossip does not help there.

    Args:
        centers: c, from 1 to n; n − 1 or n: complete.
        rounds: in a period; None: n, and at most 8.

    Reference: Huang and Yuan 2022, "Optimal complexity in non-convex decentralized learning over time-varying networks", arXiv
    2211.00533.
    """
    n = num_workers
    for option, value, most in (("centers", centers, n), ("rounds", rounds, 1024)):
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"topology 'sun' {option!r} has to be an integer from 1 to {most}, got {value}")
    if n == 1:
        return schedule.Topology("sun", 1, (schedule.Round((1.0,)),))
    count = min(n, MAX_ROUNDS) if rounds is None else rounds
    return schedule.Topology("sun", n, tuple(_round(n, t * n // count, centers) for t in range(count)))


def _round(n: int, first: int, centers: int) -> schedule.Round:
    is_center_N = np.isin(np.arange(n), (first + np.arange(centers)) % n)
    W_NxN = (is_center_N[:, None] | is_center_N) / n
    np.fill_diagonal(W_NxN, 0.0)
    np.fill_diagonal(W_NxN, 1.0 - W_NxN.sum(axis=1))
    return schedule.round_from_matrix(W_NxN)
