"""Pipelines whose stages do not wait for each other, simulated: the wrapper "late"."""

from decjax.contrib.late.gradients import LateState, late_gradients

__all__ = ["LateState", "late_gradients"]
