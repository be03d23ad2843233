"""Compression of trained weights: int8 per channel, low rank, pruning by magnitude, principal directions of outputs."""

from decjax.contrib.compress.forms import EXAMPLES, OF_OUTPUTS, HasOutputs, Smaller, make, needs_outputs

__all__ = ["EXAMPLES", "OF_OUTPUTS", "HasOutputs", "Smaller", "make", "needs_outputs"]
