"""Prediction of clicks: task "clicks", model "dlrm", and the source "divided_tables" of embedding tables that workers divide.

task    click-through prediction of generated examples, with a known least loss
model   a recommendation model with embedding tables, DLRM
source  a gradient source with embedding tables that the workers divide among them
bounds  its messages, in which every value is within a bound of the exact one
"""

from decjax.contrib.clicks.model import ClickModel, dlrm
from decjax.contrib.clicks.source import DividedTables
from decjax.contrib.clicks.task import Clicks

__all__ = ["ClickModel", "Clicks", "DividedTables", "dlrm"]
