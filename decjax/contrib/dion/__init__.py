"""Dion: orthonormal updates of low rank, of which only the factors are averaged: reducer "dion" and optimizer "dion"."""

from decjax.contrib.dion.reducer import Dion, DionState
from decjax.contrib.dion.step import dion

__all__ = ["Dion", "DionState", "dion"]
