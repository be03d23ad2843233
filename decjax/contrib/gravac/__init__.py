"""GraVAC: averages gradients by the strongest of several codecs that pays, by predicted or by measured speed."""

from decjax.contrib.gravac.pace import Pace
from decjax.contrib.gravac.reducer import Gravac as gravac
from decjax.contrib.gravac.reducer import GravacState

__all__ = ["GravacState", "Pace", "gravac"]
