"""Layouts of workers × pipeline stages × tensor-parallel devices in the cost model. NumPy only.

layout       what devices compute, send and keep in memory
transformer  parameters, operations and bytes of a decoder
iteration    time per iteration of a layout, under a pipeline schedule
ranking      ranks layouts; `launch.plan_layouts` is the command for it
"""

from decjax.contrib.layouts.iteration import LayoutPrediction, choose_compressed_stages, predict_layout
from decjax.contrib.layouts.layout import ALWAYS, Boundary, DeviceLayout, Footprint, Traffic, Work, memory, work
from decjax.contrib.layouts.ranking import RankedLayout, compressions, layouts, rank_layouts
from decjax.contrib.layouts.transformer import Transformer, low_rank_ratio

__all__ = [
    "ALWAYS",
    "Boundary",
    "DeviceLayout",
    "Footprint",
    "LayoutPrediction",
    "RankedLayout",
    "Traffic",
    "Transformer",
    "Work",
    "choose_compressed_stages",
    "compressions",
    "layouts",
    "low_rank_ratio",
    "memory",
    "predict_layout",
    "rank_layouts",
    "work",
]
