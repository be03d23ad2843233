"""MATCHA's two optimisation problems: how often each matching of a graph is active, and its mixing weight.

A round is W = I − α Σ_{j active} L_j, where matching j with Laplacian L_j is active with probability p_j,
independently.

Reference: Wang et al., "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling", 2019.
"""

import math

import numpy as np


def activation_probabilities(laplacians_MxNxN: np.ndarray, budget: float, num_steps: int = 200) -> np.ndarray:
    """The p that maximises λ2(Σ p_j L_j) over 0 <= p_j <= 1 with mean(p) = budget, [M].

    λ2 is concave in p: projected supergradient ascent from equal probabilities, the best iterate wins.
    """
    best, best_value = None, -1.0
    p = np.full(len(laplacians_MxNxN), budget)
    for step in range(num_steps):
        values, vectors_NxN = np.linalg.eigh(np.tensordot(p, laplacians_MxNxN, 1))
        if values[1] > best_value + 1e-9:  # equal probabilities stay unless something is really better
            best, best_value = p, values[1]
        fiedler = vectors_NxN[:, 1]
        gradient = np.einsum("mij,i,j->m", laplacians_MxNxN, fiedler, fiedler)
        p = p + gradient / (np.linalg.norm(gradient) + 1e-12) / math.sqrt(num_steps * (step + 1))
        # Project: subtract the one number after which clipping to [0, 1] meets the budget.
        low, high = p.min() - 1.0, p.max()
        for _ in range(60):
            middle = (low + high) / 2.0
            low, high = (middle, high) if np.clip(p - middle, 0.0, 1.0).mean() > budget else (low, middle)
        p = np.clip(p - high, 0.0, 1.0)
    return best


def mixing_weight(laplacians_MxNxN: np.ndarray, p: np.ndarray) -> float:
    """The α in (0, 1/Δ) that minimises ‖E[WᵀW] − J/n‖ = ‖I − 2α L̄ + α² (L̄² + 2 Σ p(1−p) L_j) − J/n‖.

    (A matching has L_j² = 2 L_j, and matchings are independent.) The norm is convex in α: ternary search.
    """
    n = laplacians_MxNxN.shape[1]
    mean_NxN = np.tensordot(p, laplacians_MxNxN, 1)
    square_NxN = mean_NxN @ mean_NxN + 2.0 * np.tensordot(p * (1.0 - p), laplacians_MxNxN, 1)

    def rho(alpha):
        return np.linalg.norm(np.eye(n) - 2.0 * alpha * mean_NxN + alpha**2 * square_NxN - 1.0 / n, ord=2)

    low, high = 0.0, 1.0 / laplacians_MxNxN.sum(axis=0).diagonal().max()
    for _ in range(60):
        left, right = low + (high - low) / 3.0, high - (high - low) / 3.0
        low, high = (low, right) if rho(left) <= rho(right) else (left, high)
    return low
