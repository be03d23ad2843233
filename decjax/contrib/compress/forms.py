"""Trained parameters made smaller: eight bits per channel, low rank, pruning by magnitude. Surveyed in arXiv 2402.05964.

Arrays of at least two axes are compressed, as matrices [I, J] whose columns are the last axis, the output channels; vectors stay as
they are. Each form gives the parameters that would be used and the bytes that they would take:

    int8                     ŵ_ij = s_j ⌊w_ij / s_j⌉, s_j = max_i |w_ij| / 127        IJ + 4J bytes
    low_rank(fraction=f)     the best of rank R = ⌈f · min(I, J)⌉, by SVD              4 · min(R(I + J), IJ)
    prune(fraction=f)        the ⌊f · IJ⌋ values of least magnitude are zero           4 per value that is left, and a bit for each
    principal(fraction=f)    of rank R too, but nearest in what layers put out         as low_rank, and 4J for a table's mean

The last one needs outputs of layers for a sample of data, and compresses the layers and tables whose outputs it is given: see `features`.
With `principal(fraction=f,centred=false)` it lets their mean be.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
    """A task that returns what parts of its model put out."""

    def outputs(self, params: PyTree, variables: PyTree, examples: PyTree) -> dict[str, jax.Array]:
        """Return what parts of the model put out, by the path of their weights with slashes.

        [M, J] of a linear layer, by that of its `kernel` [I, J] (a sibling called `bias` is added); [M, D], the rows that are read,
        of a table `embedding` [V, D].
        """
        ...


class Smaller(NamedTuple):
    """Compressed parameters."""

    params: Any  # as they would be used
    num_bytes: int


def int8(w_IxJ: np.ndarray) -> tuple[np.ndarray, int]:
    """Eight bits per value, a scale per column."""
    scale_J = np.abs(w_IxJ).max(axis=0) / 127
    steps_IxJ = np.rint(w_IxJ / np.where(scale_J > 0, scale_J, 1))
    return steps_IxJ * scale_J, w_IxJ.size + 4 * scale_J.size


def low_rank(w_IxJ: np.ndarray, fraction: Share = 0.5) -> tuple[np.ndarray, int]:
    """The nearest matrix of a lower rank."""
    R = max(1, math.ceil(fraction * min(w_IxJ.shape)))
    left, values, right = np.linalg.svd(w_IxJ.astype(np.float64), full_matrices=False)
    return (left[:, :R] * values[:R]) @ right[:R], 4 * min(R * sum(w_IxJ.shape), w_IxJ.size)


def prune(w_IxJ: np.ndarray, fraction: Fraction = 0.5) -> tuple[np.ndarray, int]:
    """The smallest values are zero."""
    flat = w_IxJ.ravel().copy()
    gone = int(fraction * flat.size)
    flat[np.argsort(np.abs(flat), kind="stable")[:gone]] = 0
    return flat.reshape(w_IxJ.shape), 4 * (flat.size - gone) + math.ceil(flat.size / 8)


def principal(params: PyTree, outputs: Mapping[str, Any], *, fraction: Share = 0.5, centred: bool = True) -> tuple[PyTree, int]:
    """The nearest in what layers put out; see `features`."""
    return features.project(params, outputs, fraction, centred)


_FORMS: dict[str, Callable[..., tuple[Any, int]]] = {"int8": int8, "low_rank": low_rank, "prune": prune, "principal": principal}


def needs_outputs(text: str) -> bool:
    """Return whether a form needs outputs of layers."""
    return registry.parse("form", text)[0] == "principal"


def _checked(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a form."""
    name, options = partition.choose("form", text, _FORMS)
    if "fraction" in options and "fraction" not in registry.parse("form", text)[1]:
        raise ValueError(f"form {text!r} needs a fraction; use '{name}(fraction=0.5)'")
    return name, options


def make(text: str) -> Callable[..., Smaller]:
    """The form of a text such as "low_rank(fraction=0.25)", as a function of a tree of parameters, and of outputs for `principal`.

    Raises:
        ValueError: for an unknown form or option, or a fraction outside [0, 1]; a rank needs one above 0. From the function, if outputs
            are needed and missing, or do not fit.
    """
    name, options = _checked(text)

    def compress(params: Any, outputs: Mapping[str, Any] | None = None) -> Smaller:
        if name == "principal":
            if not outputs:
                raise ValueError(f"form {text!r} needs outputs of layers, which this task does not show; use 'low_rank' instead")
            return Smaller(*principal(params, outputs, **options))
        total = 0

        def one(x: Any) -> np.ndarray:
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
