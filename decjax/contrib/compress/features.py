"""Weights of low rank that keep the outputs of a layer, instead of the weights themselves, as near as a rank allows.

With E the R principal directions of a sample of outputs y around their mean μ, y is replaced by μ + (y − μ) E Eᵀ:

    layer     y = x W + b      W → (W E) Eᵀ,  b → μ + (b − μ) E Eᵀ          R(I + J) + J values
    table     y = T[c]         T → μ + (T − μ) E Eᵀ                         R(V + D) + D values

For the sample the mean squared error of y is the sum of the eigenvalues that are discarded, the least that a projection of rank R can
have; singular value decomposition gives the matrix of rank R nearest to W, whatever x is. A table counts by how often each of its rows
is read. A layer without bias cannot store μ: its second moments are not centered.

Reference: Yu et al. 2024, arXiv 2405.18146; Yu and Wu 2023, doi 10.1609/aaai.v37i9.26304 (algorithm 1). There is no training afterwards
here, and no activation between the two factors; both papers have the former, the first the latter.
"""

from collections.abc import Callable, Mapping
import math

import jax
import jax.numpy as jnp
import numpy as np

from decjax.options import Share
from decjax.principal import principal
from decjax.typing import PyTree


def project(params: PyTree, outputs: Mapping[str, PyTree], fraction: Share = 0.5, centred: bool = True) -> tuple[PyTree, int]:
    """Return (parameters, of rank R = ⌈fraction · min(I, J)⌉ where outputs are given, bytes of all).

    All other weights are unchanged, as is a weight whose R is min(I, J).

    Args:
        params: of a model.
        outputs: a sample of outputs; see `HasOutputs`.
        fraction: of the rank.
        centred: whether μ is the mean; without, it is 0.

    Raises:
        ValueError: if outputs do not belong to a weight, or are not finite.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
    made, num_bytes = dict(named), {name: leaf.nbytes for name, leaf in named.items()}
    for name, y_MxJ in outputs.items():
        if name not in named or np.ndim(y_MxJ) != 2 or not len(y_MxJ) or named[name].shape[1:] != y_MxJ.shape[1:]:
            raise ValueError(
                f"outputs {name!r} of shape {np.shape(y_MxJ)} belong to no weight; give M ≥ 1 rows [M, J] for a weight [I, J]"
            )
        if not np.isfinite(y_MxJ).all():
            raise ValueError(f"outputs of {name!r} are not finite, so the model has diverged; take one that has not")
        w_IxJ, bias = named[name], name.removesuffix("kernel") + "bias"
        is_table = name.endswith("embedding")
        R = math.ceil(fraction * min(w_IxJ.shape))
        if min(w_IxJ.shape) == R:
            continue  # With I < J, directions in which the sample's outputs do not vary could be missing.
        projected, mean_J = _projection(y_MxJ, R, centred=centred and (is_table or bias in named))
        made[name] = mean_J + projected(w_IxJ - mean_J) if is_table else projected(w_IxJ)
        if bias in named:
            made[bias] = mean_J + projected(named[bias] - mean_J)
        num_bytes[name] = 4 * min(R * sum(w_IxJ.shape) + (centred and is_table) * len(mean_J), w_IxJ.size)
    return tree.unflatten([made[name].astype(leaf.dtype) for name, leaf in named.items()]), sum(num_bytes.values())


def _projection(y_MxJ: PyTree, R: int, centred: bool) -> tuple[Callable[[PyTree], np.ndarray], np.ndarray]:
    """Return (projection of rows onto the R principal directions of outputs, in float64, the mean or zeros)."""
    wide_MxJ = np.asarray(y_MxJ, np.float64)
    mean_J = wide_MxJ.mean(axis=0) if centred else np.zeros(wide_MxJ.shape[1])
    with jax.enable_x64(True):
        E_JxR = np.asarray(principal(jnp.asarray(wide_MxJ - mean_J), R)[0])
    return lambda rows_IxJ: (np.asarray(rows_IxJ, np.float64) @ E_JxR) @ E_JxR.T, mean_J
