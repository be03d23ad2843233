"""GraVAC: the reducer "gravac", which averages gradients by the strongest of several codecs that pays."""

from decjax.contrib.gravac.reducer import Gravac as gravac
from decjax.contrib.gravac.reducer import GravacState, Pace

__all__ = ["GravacState", "Pace", "gravac"]
