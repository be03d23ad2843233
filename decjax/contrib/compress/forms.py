"""Compression of trained parameters: int8 per channel, low rank, pruning by magnitude. Surveyed in arXiv 2402.05964.

Arrays of at least two axes are compressed, as matrices [I, J] whose columns are the last axis, the output channels; vectors are
unchanged. Each form returns the parameters that would be used and the bytes that they would take:

    int8                     ŵ_ij = s_j ⌊w_ij / s_j⌉, s_j = max_i |w_ij| / 127        IJ + 4J bytes
    low_rank(fraction=f)     the best of rank R = ⌈f · min(I, J)⌉, by SVD              4 · min(R(I + J), IJ)
    prune(fraction=f)        the ⌊f · IJ⌋ values of least magnitude are zero           4 per value that is left, and a bit for each
    principal(fraction=f)    of rank R too, but nearest in the outputs of layers       as low_rank, and 4J for a table's mean

The last one needs outputs of layers for a sample of data, and compresses the layers and tables whose outputs it has: see `features`.
With `principal(fraction=f,centred=false)` their mean is not subtracted.
"""

from collections.abc import Callable, Mapping
import math
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from decjax import registry
from decjax.contrib.compress import features
from decjax.options import Fraction, Share
from decjax.tasks import partition
from decjax.typing import PyTree

EXAMPLES = ("int8", "low_rank(fraction=0.5)", "prune(fraction=0.5)")
OF_OUTPUTS = "principal(fraction=0.5)"  # needs outputs


@runtime_checkable
class HasOutputs(Protocol):
    """A task that returns the outputs of parts of its model."""

    def outputs(self, params: PyTree, variables: PyTree, examples: PyTree) -> dict[str, jax.Array]:
        """Return outputs by the path of their weights with slashes.

        A linear layer with the weight `kernel` [I, J] (and a sibling `bias`) has outputs [M, J], a table `embedding` [V, D] the rows that
        are read, [M, D].
        """
        ...


class Smaller(NamedTuple):
    """Compressed parameters."""

    params: PyTree  # as they would be used
    num_bytes: int


def int8(w_IxJ: np.ndarray) -> tuple[np.ndarray, int]:
    """Round to int8, with a scale per column."""
    scale_J = np.abs(w_IxJ).max(axis=0) / 127
    steps_IxJ = np.rint(w_IxJ / np.where(scale_J > 0, scale_J, 1))
    return steps_IxJ * scale_J, w_IxJ.size + 4 * scale_J.size


def low_rank(w_IxJ: np.ndarray, fraction: Share = 0.5) -> tuple[np.ndarray, int]:
    """Return the nearest matrix of a lower rank."""
    R = max(1, math.ceil(fraction * min(w_IxJ.shape)))
    left, values, right = np.linalg.svd(w_IxJ.astype(np.float64), full_matrices=False)
    return (left[:, :R] * values[:R]) @ right[:R], 4 * min(R * sum(w_IxJ.shape), w_IxJ.size)


def prune(w_IxJ: np.ndarray, fraction: Fraction = 0.5) -> tuple[np.ndarray, int]:
    """Set the smallest values to zero."""
    flat = w_IxJ.ravel().copy()
    gone = int(fraction * flat.size)
    flat[np.argsort(np.abs(flat), kind="stable")[:gone]] = 0
    return flat.reshape(w_IxJ.shape), 4 * (flat.size - gone) + math.ceil(flat.size / 8)


_FORMS: dict[str, Callable[..., tuple[PyTree, int]]] = {
    "int8": int8,
    "low_rank": low_rank,
    "prune": prune,
    "principal": features.project,
}


def needs_outputs(text: str) -> bool:
    """Return whether a form needs outputs of layers."""
    return registry.parse("form", text)[0] == "principal"


def make(text: str) -> Callable[..., Smaller]:
    """Return the form of a text such as "low_rank(fraction=0.25)": a function of a tree of parameters, and of outputs for `principal`.

    Raises:
        ValueError: for an unknown form or option, or a fraction outside [0, 1]; a rank needs one above 0. From the function, if outputs
            are needed and missing, or do not fit.
    """
    name, options = partition.choose("form", text, _FORMS)
    if "fraction" in options and "fraction" not in registry.parse("form", text)[1]:
        raise ValueError(f"form {text!r} needs a fraction; use '{name}(fraction=0.5)'")

    def compress(params: PyTree, outputs: Mapping[str, PyTree] | None = None) -> Smaller:
        if name == "principal":
            if not outputs:
                raise ValueError(f"form {text!r} needs outputs of layers, which this task does not return; use 'low_rank' instead")
            return Smaller(*features.project(params, outputs, **options))
        total = 0

        def one(x: PyTree) -> np.ndarray:
            nonlocal total
            array = np.asarray(x)
            if array.ndim < 2 or not np.issubdtype(array.dtype, np.floating):
                total += array.nbytes
                return array
            made, num_bytes = _FORMS[name](array.reshape(-1, array.shape[-1]), **options)
            total += num_bytes
            return made.reshape(array.shape).astype(array.dtype)

        return Smaller(jax.tree.map(one, params), total)

    return compress
