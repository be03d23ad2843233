"""Selective compression: `reducer.stages="auto"` lets the cost model decide how many stages of a pipeline compress."""

from decjax.contrib.selective.stages import choose, transformer

__all__ = ["choose", "transformer"]
