"""Prediction of clicks: task "clicks", model "dlrm", and the source "divided_tables" of embedding tables that workers divide.

task         click-through prediction of generated examples, with a known least loss
impressions  the generator of the examples
model        a recommendation model with embedding tables, DLRM
source       a gradient source with embedding tables that the workers divide among them
shares       which worker owns which of them
bounds       its messages, in which no value is off by more than a bound
"""

from decjax.contrib.clicks.model import ClickModel, dlrm
from decjax.contrib.clicks.source import DividedTables
from decjax.contrib.clicks.task import Clicks, clicks

__all__ = ["ClickModel", "Clicks", "DividedTables", "clicks", "dlrm"]
