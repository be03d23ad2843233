"""MATCHA's two optimization problems: how often each matching of a graph is active, and with which weight it mixes.

A round is W = I − α Σ_{j active} L_j, where matching j with Laplacian L_j is active with probability p_j, independently.

Reference: Wang et al. 2019, "MATCHA: speeding up decentralized SGD via matching decomposition sampling", arXiv 1905.09435.
"""

import math

import numpy as np


def activation_probabilities(laplacians_MxNxN: np.ndarray, budget: float) -> np.ndarray:
    """The p that maximizes λ2(Σ p_j L_j) over 0 <= p_j <= 1 with mean(p) = budget, [M].

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
    """The α in (0, 1/Δ) that minimizes ‖E[WᵀW] − J/n‖ = ‖I − 2α L̄ + α² (L̄² + 2 Σ p(1−p) L_j) − J/n‖.

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
