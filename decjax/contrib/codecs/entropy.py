"""How many bits quantized values would take behind an entropy coder: an estimate, of bytes that no codec here sends.

A value that is Gaussian with mean μ and scale σ, rounded to multiples q of a step Δ, is in its cell with probability

    p(q) = Φ(((q + ½)Δ − μ)/σ) − Φ(((q − ½)Δ − μ)/σ),

and an ideal coder that knows μ and σ spends −log₂ p(q) bits on it: the rate that FCGS trains its models with (arXiv 2410.08017,
section 3), after Ballé et al. 2017. JAX has no entropy coder that runs inside a program, so messages have their fixed widths, and these
figures are separate from the bytes that `Codec.num_bytes` declares.
"""

import numpy as np
from scipy import special

from decjax import options
from decjax.options import Positive, Range, check_range

LEAST = 2.0**-32  # probability of a cell: far tails cost 32 bits


@options.checked
def gaussian_bits(
    levels: np.ndarray, step: Positive, mean: np.ndarray | float = 0.0, scale: np.ndarray | float = 1.0
) -> np.ndarray:
    """Return the bits of each value, given the levels q and the step Δ; μ and σ are numbers, or arrays of the shape of the levels."""
    check_range("smallest scale", float(np.min(scale)), Range(0, above=True))
    low, high = ((np.abs(levels * step - mean) + side * step / 2) / scale for side in (-1, 1))
    return -np.log2(np.maximum(special.ndtr(-low) - special.ndtr(-high), LEAST))  # Of the lower tail, where differences are exact.


def empirical_bits(levels: np.ndarray) -> float:
    """Return the entropy of the levels' frequencies, in bits a value: what a coder spends that has only these frequencies."""
    _, counts = np.unique(levels, return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log2(share)).sum())


def lossless_bits(x: np.ndarray) -> float:
    """Return the bits of each floating-point value behind a lossless coder that has the frequency of each byte at each place of a value.

        Σ_b H(byte b),   b the bytes of a value: sign and exponent first, whose entropy is small; the last are nearly noise

    Lossless coders of floating-point messages such as MPC (Yang et al. 2015) find this redundancy, and that of neighboring values, which
    is not counted here. With few values entropies come out too small: take a thousand times as many as there are bytes, 256.
    """
    bytes_PxB = np.ascontiguousarray(x).ravel()[:, None].view(np.uint8)
    return sum(empirical_bits(of_place) for of_place in bytes_PxB.T)
